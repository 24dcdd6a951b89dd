"""Scalify: every tensor of a model carries a power-of-two scale, so that the operands of its matmuls are near one.

Narrow formats lose numbers far from one: a gradient of 1e-6 is zero in ``float8_e4m3fn``. The usual remedy measures each operand
of each matmul before the cast. Scalify propagates scales instead: a tensor is ``data * scale``, and a rule for each operation
gives its result a scale, forward and backward (:mod:`narrowgauge.spec.propagation`). Matmuls and sums guess the size of their
results. It is measured where errors of guesses would accumulate: results of activations, gradients behind a norm, and
weights. A float8 matmul then needs no scale and no amax: it casts ``data`` directly.

The model keeps its parameters, their names and its class. Only the modules that own parameters, and the activations, compute by a
rule; everything between them (residual sums, splits, rotations, the attention) is the model's own code, run on scaled tensors.
Tensors are scaled from the embedding to the last norm; logits and the parameters' gradients are plain tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, ClassVar, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from narrowgauge.spec.propagation import RULES
from narrowgauge.transforms.scaled_functions import activation, embedding, linear, norm, value_of
from narrowgauge.transforms.scaled_tensor import Scaled, unknown

__all__ = ["Measurements", "Scaled", "measurements", "scalify"]


def scalify(model: nn.Module, dtype: torch.dtype | None = None) -> None:
    """Let a model compute with scaled tensors from its inputs to its outputs.

    Invariant: logits and gradients have the values of the plain model (the same bits in most operations: scales are powers of
    two), while every operand of a linear layer's three matmuls, forward and backward, has a root mean square of the
    order of one. Parameters, ``state_dict`` and gradients are plain tensors under the same names. Copies and pickles of
    the model stay scalified; activation checkpointing and ``torch.compile`` work as before.

    A linear layer with a method ``multiply(x, weight, bias)``, as narrow layers have, multiplies its plain data by that, with the
    weight in the layout of its parameter. A plain input, such as the head's, has scale 1.

    Args:
        model: changed in place: each module that owns parameters, and each activation, gets a class of its own. Narrow
            layers must be swapped before. A second call changes nothing.
        dtype: of the scaled tensors, if not the parameters' own.

    Raises:
        RecipeError: a module's class has no rule; or, when the model runs, an operation has none.

    Cost: one additional read of each measured tensor (:func:`measurements`): in a Llama's layer one forward and two backward, and
        each weight, within ``cached_weights`` once a step. Compiled, the rest is fused into existing kernels.

    Example:
        >>> import torch
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.SiLU(), nn.Linear(8, 2))
        >>> x = torch.ones(3, 8)
        >>> plain = model(x)
        >>> scalify(model)
        >>> torch.equal(model(x), plain)
        True

    Source: Balança et al., Scalify: scale propagation for efficient low-precision LLM training, arXiv 2407.17353;
    graphcore-research/jax-scalify.
    """
    head = cast(Any, model).get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    classes = {
        module: _class_for(name, module) for name, module in model.named_modules() if not _is_plain_head(module, head)
    }
    for module, ruled in classes.items():
        if ruled is not None:
            module.__class__ = ruled
        if isinstance(module, _Ruled):
            cast(Any, module).computes_in = dtype
    if isinstance(head, _Ruled):
        head.leaves_plain = True
    # The body of a Hugging Face model can also be called directly.
    for module in (model, cast(nn.Module, getattr(model, "base_model", model))):
        if _leave_values not in module._forward_hooks.values():
            module.register_forward_hook(_leave_values)


class Measurements(NamedTuple):
    """How many tensors are read for their scales.

    Attributes:
        weights: once for each version within ``cached_weights``; those of embeddings and of layers that are not narrow in each
            forward pass.
        forward: in each forward pass.
        backward: in each backward pass.
    """

    weights: int
    forward: int
    backward: int


def measurements(model: nn.Module) -> Measurements:
    """How many tensors a scalified model measures.

    Args:
        model: scalified; it must use each of its modules once in a forward pass.
    Returns:
        The counts, including gradients that enter as plain tensors.
    Example:
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.SiLU(), nn.LayerNorm(8))
        >>> scalify(model)
        >>> measurements(model)
        Measurements(weights=1, forward=1, backward=2)
    """
    ruled = [module for module in model.modules() if isinstance(module, _Ruled)]
    entries = 1 + sum(module.leaves_plain for module in ruled)
    read = [what for module in ruled for what in RULES[module.rule].measures]
    read += [what for what in RULES["plain gradient that enters"].measures for _ in range(entries)]
    return Measurements(read.count("weight"), read.count("output"), read.count("gradient"))


def _is_plain_head(module: nn.Module, head: Any) -> bool:
    """Whether a module is a head that nothing casts: with plain inputs and outputs, a rule would only measure it."""
    return module is head and type(module) is nn.Linear


def _leave_values(_: nn.Module, __: Any, result: Any) -> Any:
    """Hook: the same result with plain tensors in it."""
    if isinstance(result, Scaled):
        return value_of(result)
    if isinstance(result, (list, tuple)):
        items = [_leave_values(_, __, item) for item in result]
        return type(result)(*items) if hasattr(result, "_fields") else type(result)(items)
    if isinstance(result, dict):
        changed = {key: _leave_values(_, __, item) for key, item in result.items()}
        return changed if type(result) is dict else type(result)(**changed)
    return result


# --- modules ----------------------------------------------------------------------------------------------------------


class _Ruled:
    """Mixed into the class of a module that computes by a rule.

    The class changes, not the object's forward: such a module can be copied and pickled, and a compiler reuses one graph for
    all layers of the class.
    """

    origin: ClassVar[type[nn.Module]]
    # In propagation.RULES.
    rule: ClassVar[str]
    leaves_plain = False
    # The dtype of the scaled tensors, if not the parameters' own. A rule casts its parameters itself: after a separate
    # cast their gradients would leave scaled arithmetic in the narrower of the two ranges.
    computes_in: torch.dtype | None = None

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        made = cast(tuple[Any, ...], super().__reduce_ex__(protocol))
        return _revived, (self.origin,), *made[2:]


def _revived(origin: Any) -> nn.Module:
    ruled: Any = _ruled_class(origin)
    return cast(nn.Module, ruled.__new__(ruled))


class _Linear(_Ruled):
    rule = "linear layer"

    def forward(self: Any, x: Tensor) -> Tensor:
        multiply = getattr(self, "multiply", F.linear)
        features = self.in_features, self.out_features
        return linear(x, self.weight, self.bias, multiply, features, self.leaves_plain, _unit_of(self))


def _unit_of(layer: Any) -> Callable[[Tensor], Tensor] | None:
    """How a narrow layer measures its weight; it then divides by the result itself, in a cast that can be cached."""
    return None if not hasattr(layer, "unit_of") or layer.compute.is_wide else cast(Any, layer.unit_of)


class _Conv1D(_Ruled):
    """A linear layer of transformers whose weight is ``[inputs, outputs]``."""

    rule = "linear layer"

    def forward(self: Any, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias, self._product, (self.nx, self.nf), self.leaves_plain)

    def _product(self: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        y = torch.addmm(bias, x.flatten(0, -2), weight)
        return y.view(*x.shape[:-1], self.nf)


class _Embedding(_Ruled):
    rule = "embedding"

    def forward(self: Any, x: Tensor) -> Tensor:
        return embedding(x, self.weight, self.padding_idx, self.computes_in)


class _Activation(_Ruled):
    rule = "activation"

    def forward(self: Any, x: Tensor) -> Tensor:
        return activation(x, super().forward)  # type: ignore[misc]


class _LayerNorm(_Ruled):
    rule = "norm"

    def forward(self: Any, x: Tensor) -> Tensor:
        return norm(x, self._normalized, *_vectors(self))

    def _normalized(self: Any, real: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        return F.layer_norm(real, self.normalized_shape, weight, bias, self.eps)


class _RMSNorm(_Ruled):
    rule = "norm"

    def forward(self: Any, x: Tensor) -> Tensor:
        return norm(x, self._normalized, *_vectors(self))

    def _normalized(self: Any, real: Tensor, weight: Tensor | None = None) -> Tensor:
        return F.rms_norm(real, self.normalized_shape, weight, self.eps)


class _LlamaRMSNorm(_Ruled):
    """As in transformers: computed in float32."""

    rule = "norm"

    def forward(self: Any, x: Tensor) -> Tensor:
        return norm(x, self._normalized, self.weight)

    def _normalized(self: Any, real: Tensor, weight: Tensor) -> Tensor:
        wide = real.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return weight * wide.to(real.dtype)


def _vectors(module: Any) -> list[Tensor]:
    return [vector for vector in (module.weight, getattr(module, "bias", None)) if vector is not None]


# By full name: a model of another library must not need transformers.
_BY_CLASS: dict[str, type[_Ruled]] = {
    "torch.nn.modules.linear.Linear": _Linear,
    "transformers.pytorch_utils.Conv1D": _Conv1D,
    "torch.nn.modules.sparse.Embedding": _Embedding,
    "torch.nn.modules.normalization.LayerNorm": _LayerNorm,
    "torch.nn.modules.normalization.RMSNorm": _RMSNorm,
    "transformers.models.llama.modeling_llama.LlamaRMSNorm": _LlamaRMSNorm,
    **{f"torch.nn.modules.activation.{name}": _Activation for name in ("GELU", "ReLU", "Sigmoid", "SiLU", "Tanh")},
    **{
        f"transformers.activations.{name}": _Activation
        for name in (
            "FastGELUActivation",
            "GELUActivation",
            "GELUTanh",
            "NewGELUActivation",
            "QuickGELUActivation",
            "SiLUActivation",
        )
    },
}


@cache
def _ruled_class(origin: Any) -> Any:
    """A subclass with the rule's forward, or ``origin`` itself where there is no rule."""
    for kind in origin.__mro__:
        rule = _BY_CLASS.get(f"{kind.__module__}.{kind.__qualname__}")
        # A subclass may compute anything, unless its `multiply` shows that only its product differs.
        if rule is not None and (kind is origin or hasattr(origin, "multiply")):
            return type(f"Scaled{origin.__name__}", (rule, origin), {"origin": origin, "__module__": __name__})
    return origin


def _class_for(name: str, module: nn.Module) -> Any:
    """The new class of a module; None for one that only calls others, or has it already."""
    if isinstance(module, _Ruled):
        return None
    found = _ruled_class(cast(Any, type(module)))
    if found is not type(module):
        _check_embedding(name, module)
        return found
    if next(module.parameters(recurse=False), None) is not None:
        raise unknown(f"the module '{name}' of class {type(module).__name__}")
    return None


def _check_embedding(name: str, module: nn.Module) -> None:
    if isinstance(module, nn.Embedding) and (module.max_norm or module.scale_grad_by_freq or module.sparse):
        raise unknown(f"the embedding '{name}' with max_norm, scale_grad_by_freq or sparse")
