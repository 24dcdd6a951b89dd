"""The rules of unit scaling: the constant that keeps each operation's output, and each of its gradients, at unit variance.

A product of matrices with independent entries of variance one has entries of variance ``fan_in``; divided by the root of
that, they fit the range of any narrow format. Its backward sums over ``fan_out`` and, for the weight, over tokens, so forward and
backward need *different* constants. A constant may differ from the true derivative's where the gradient ends (a weight: an
optimizer such as Adam is independent of its scale) or where another constant compensates it later; everywhere else they are
equal, so that each parameter's gradient is a multiple of the true one. :func:`scaled` applies different constants forward and
backward.

Source: Blake et al., Unit Scaling, arXiv 2303.11257; Blake et al., u-muP, arXiv 2407.17465 (residual weights: appendix G).
All multipliers that u-muP leaves to tuning are 1 here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call

Factor = float | Tensor


@dataclass
class Batch:
    """The batch sizes that the rules depend on; one object, shared by all modules of a model.

    Args:
        sequence_length: tokens that attention averages over; ``None``: those of each call.
        tokens: number of tokens of an optimizer step, which divides the loss; ``None``: those of each call.
        sequences: rows of the last call's input.
    """

    sequence_length: int | None = None
    tokens: int | None = None
    sequences: int = 1

    def tokens_of(self, x: Tensor) -> int:
        """How many tokens the gradient of a weight sums over, where ``x [..., width]`` is its input."""
        return self.tokens or x.numel() // x.shape[-1]


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Factor | None, backward: Factor | None) -> Tensor:
        ctx.factor = backward
        return x.view_as(x) if forward is None else x * forward

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] if ctx.factor is None else gradients[0] * ctx.factor, None, None


def scaled(x: Tensor, *, forward: Factor | None = None, backward: Factor | None = None) -> Tensor:
    """``x * forward``, whose gradient is multiplied by ``backward`` instead.

    Args:
        x: any floating tensor.
        forward, backward: a number or a 0-d tensor; ``None`` for 1, without a copy.

    Example:
        >>> x = torch.ones(2, requires_grad=True)
        >>> y = scaled(x, forward=3.0, backward=0.5)
        >>> y.sum().backward()
        >>> y.tolist(), x.grad.tolist()
        ([3.0, 3.0], [0.5, 0.5])
    """
    return cast(Tensor, _Scaled.apply(x, forward, backward))  # type: ignore[no-untyped-call]


def fans(module: Any) -> tuple[int, int]:
    """Inputs and outputs of a linear layer; transformers' ``Conv1D`` has no such attributes and a transposed weight."""
    if hasattr(module, "in_features"):
        return module.in_features, module.out_features
    fan_in, fan_out = module.weight.shape
    return fan_in, fan_out


def linear(module: nn.Module, x: Tensor, batch: Batch, grad_input: float | None = None) -> Tensor:
    """A linear layer of any class with its constants around it: its inputs, outputs and gradients have unit variance.

    Args:
        module: computes ``x @ weight + bias``, in any format.
        x: ``[..., fan_in]``.
        batch: for the gradients of weight and bias.
        grad_input: factor of the input's gradient; ``None`` where the caller has applied it to ``x``.
    """
    tokens, fan_in = batch.tokens_of(x), fans(module)[0]
    if grad_input is not None:
        x = scaled(x, backward=grad_input)
    weights = {name: scaled(p, backward=tokens**-0.5) for name, p in module.named_parameters(recurse=False)}
    return scaled(functional_call(module, weights, (x,)), forward=fan_in**-0.5)


def log_interpolate(weight: float, lower: float, upper: float) -> float:
    """Geometric interpolation between two positive numbers: ``lower`` at 0, ``upper`` at 1."""
    return float(lower ** (1 - weight) * upper**weight)


# Fits to measured standard deviations between the limits of a linear and a step function, at multiplier 1.
SILU_GLU = log_interpolate(1 / (1 + 1), 2.0, math.sqrt(2.0))
"""The factor of ``up * silu(gate)``."""
GELU = log_interpolate(1 / (1 + 1 / 4), 2.0, math.sqrt(2 / (1 - 1 / math.pi)))
"""The factor of ``gelu``."""


def attention_output(sequence_length: int, head_dim: int) -> float:
    """The factor of causal attention's output, where logits are divided by ``head_dim``.

    Token ``t`` averages about ``t`` values, so the mean square over a sequence is ``log(s) / s``. The published form has a
    pole at length 1, where nothing is averaged; from 3 on this one is the same.
    """
    length = sequence_length
    mixed = torch.sym_max(1.0, math.log2(length) * math.log(2.0)) / length
    return cast(float, mixed ** (-0.5 * (1 - 1 / (1 + 4 * head_dim))))


def residual_weights(branch: int, num_layers: int) -> tuple[float, float]:
    """Factors of the skip and of a branch, so that embedding, attentions and MLPs contribute equally to the output.

    Args:
        branch: index among all branches; attention and MLP are one each.
        num_layers: decoder layers.

    Example:
        >>> [round(w * w, 4) for w in residual_weights(0, 2)]
        [0.6667, 0.3333]
    """
    tau = (num_layers + branch) ** -0.5
    return 1 / math.sqrt(1 + tau**2), tau / math.sqrt(1 + tau**2)


def cross_entropy_gradient(vocab_size: int) -> float:
    """One over the root mean square of ``softmax - onehot`` where all tokens are equally likely."""
    return vocab_size / math.sqrt(vocab_size - 1)
