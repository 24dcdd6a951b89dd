"""Experts of a mixture in low-precision matmuls: Mixtral, Qwen3-MoE, DeepSeek-V3, gpt-oss and
similar models.

A mixture stores the weights of its experts in one tensor ``[experts, out, in]``. Sorted by expert,
the tokens are a matrix. The rows from one *offset* to the next belong to one expert. A *grouped
linear* is one small matmul per expert, with its own casts. So each expert has its own scale per
tensor, and its own key of random bits. An expert without tokens costs nothing, and its gradient is
zero if another one has tokens.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from narrowgauge.errors import RecipeError
from narrowgauge.matmul.layer_matmuls import Call, multiply_layer, register
from narrowgauge.matmul.linear import NarrowLayer, plain_dtype
from narrowgauge.matmul.operand import Keys, layer_keys
from narrowgauge.matmul.own_code import NARROW, take_over
from narrowgauge.numerics.widening import is_widened
from narrowgauge.spec.computes import Compute
from narrowgauge.spec.formats import dtype_name
from narrowgauge.spec.notation import get_compute
from narrowgauge.torch_support.anatomy import parts


def grouped_linear(
    x: Tensor,
    weights: Tensor,
    offsets: Tensor,
    compute: Compute,
    bias: Tensor | None = None,
    keys: Keys | None = None,
    sequence_length: int = 1,
) -> Tensor:
    """Return each expert's linear layer over its own tokens, ``[tokens, out]``; zero for tokens
    without an expert.

    Invariant: an expert's output and gradients have the bits of a
    :class:`~narrowgauge.matmul.linear.Linear` of the same compute on that expert's tokens alone.

    Args:
        x: ``[tokens, in]``, sorted by expert.
        weights, bias: ``[experts, out, in]`` and ``[experts, out]``.
        offsets: int32 ``[experts]``: the end of each expert's tokens. Tokens after the last offset
            have no expert.
        keys: with a key for each expert. Needed for random bits.
        sequence_length: rows by which the index of the first sequence advances the random bits: all
            rows, so that micro-batches of equal size never share any.
    Cost: one layer per expert, on CUDA a wait for the offsets, and ``torch.compile`` breaks its
    graph here.
    """
    if x.dtype is plain_dtype(compute):
        weights = weights.to(x.dtype)
        x = x.contiguous()
        if bias is None and _suits_torch(x, weights):
            return F.grouped_mm(x, weights.transpose(1, 2), offs=offsets)
    name = register(compute)
    return cast(Tensor, _one_by_one(x, weights, offsets, name, bias, keys, sequence_length))


@torch.compiler.disable  # type: ignore[untyped-decorator]  # the numbers of tokens are data
def _one_by_one(
    x: Tensor,
    weights: Tensor,
    offsets: Tensor,
    name: str,
    bias: Tensor | None,
    keys: Keys | None,
    sequence_length: int,
) -> Tensor:
    """Return :func:`grouped_linear` by its definition: one layer after the other."""
    experts = len(weights)
    ends = offsets.tolist()
    *groups, without_expert = x.split(
        [end - start for start, end in zip([0, *ends], [*ends, len(x)], strict=True)]
    )
    biases: Sequence[Tensor | None] = [None] * experts
    if bias is not None:
        biases = bias.unbind()
    outputs = []
    for expert, (group, weight) in enumerate(zip(groups, weights.unbind(), strict=True)):
        if len(group):
            expert_keys = None
            if keys is not None:
                expert_keys = keys._replace(layer=keys.layer[expert])
            outputs.append(
                multiply_layer(
                    group, weight, biases[expert], Call(name, expert_keys, sequence_length)
                )
            )
    return torch.cat([*outputs, x.new_zeros(len(without_expert), weights.shape[1])])


def _suits_torch(x: Tensor, weights: Tensor) -> bool:
    """Return whether PyTorch's grouped matmul takes the operands: bfloat16, in whole rows of 16
    bytes.

    Source: ``check_valid_strides_and_return_transposed`` in
    ``aten/src/ATen/native/GroupedMMUtils.h`` of PyTorch.
    """
    is_multiplied = x.dtype == torch.bfloat16 and not is_widened(x.dtype, x.device.type)
    sizes = x.shape[1], weights.shape[1], x.storage_offset(), weights.storage_offset()
    is_whole = weights.is_contiguous() or weights.transpose(1, 2).is_contiguous()
    return is_multiplied and len(x) > 0 and is_whole and not any(size % 8 for size in sizes)


class GroupedLinear(NarrowLayer):
    """Multiply by one projection of all experts, in a compute.

    The weights stay in the model's own module.

    An expert's key, and so its random bits, comes from the name of its weights and its index.
    """

    def __init__(
        self, num_experts: int, name: str, compute: Compute, device: torch.device | None = None
    ) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.begin([f"{name}.{expert}" for expert in range(num_experts)], device, compute)

    def _keys_on(self, device: torch.device | None) -> Tensor:
        return layer_keys(self.names, device)

    def forward(
        self, x: Tensor, weights: Tensor, offsets: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        """Multiply ``[tokens, in]`` to ``[tokens, out]``, see :func:`grouped_linear`."""
        x = self.cast_stream(x)
        y: Tensor = grouped_linear(x, weights, offsets, self.compute, bias, self.keys(), x.shape[0])
        return y

    def multiply_one(
        self, x: Tensor, weight: Tensor, expert: int, bias: Tensor | None = None
    ) -> Tensor:
        """Multiply ``[…, in]`` by the weight ``[out, in]`` of one expert."""
        x = self.cast_stream(x)
        keys = self.keys()
        if keys is not None:
            keys = keys._replace(layer=keys.layer[expert])
        return self.multiply_rows(x, weight, bias, keys, math.prod(x.shape[:-1]))

    def extra_repr(self) -> str:
        return f"{self.num_experts}, compute={self.compute.name!r}"


# ── the experts of transformers' models ───────────────────────────────────────────────────────────
#
# Transformers stores the experts of a layer as a module with 3-D parameters. A name in the module's
# config selects the function that multiplies them. Swapping registers our function, and sets its
# name in a copy of the config. Parameters, names, ``state_dict`` and router stay.

IMPLEMENTATION = "narrowgauge"
"""The name in transformers' registry, next to its own ``eager``, ``batched_mm`` and ``grouped_mm``.
"""


class _Projections(nn.ModuleDict):
    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        _register()  # a process that unpickles it may have swapped no experts


class _Permuted(torch.autograd.Function):
    """Reorder rows, each first repeated ``copies`` times.

    Backward applies the inverse order and adds the copies.

    PyTorch's own indexing adds up gradients row by row, on CUDA in no fixed order.
    """

    @staticmethod
    def forward(x: Tensor, order: Tensor, inverse: Tensor, copies: int) -> Tensor:
        return x[order // copies]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, _, inverse, ctx.copies = inputs
        ctx.save_for_backward(inverse)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (inverse,) = ctx.saved_tensors
        grad = grads[0][inverse]
        return (
            grad if ctx.copies == 1 else grad.unflatten(0, (-1, ctx.copies)).sum(1),
            None,
            None,
            None,
        )


_permuted = cast(Callable[..., Tensor], _Permuted.apply)


def multiply_experts(
    module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Return the weighted sum of each token's experts, ``[tokens, hidden]``. Transformers calls it.

    ``top_k_index`` and ``top_k_weights`` are ``[tokens, k]``: the experts of a token, and their
    weights.
    """
    experts: Any = module
    tokens, top_k = top_k_index.shape
    chosen, order = torch.sort(top_k_index.reshape(-1), stable=True)
    inverse = torch.argsort(order)
    offsets = torch.searchsorted(
        chosen,
        torch.arange(experts.num_experts, device=chosen.device, dtype=chosen.dtype),
        right=True,
        out_int32=True,
    )
    x = _permuted(hidden_states, order, inverse, top_k)
    if experts.has_gate:
        x = experts._apply_gate(_project(experts, "gate_up_proj", x, chosen, offsets))
    else:
        x = experts.act_fn(_project(experts, "up_proj", x, chosen, offsets))
    x = _project(experts, "down_proj", x, chosen, offsets)
    if experts.has_post_expert_norm:
        x = experts.post_expert_norm(x)
    y = _permuted(x, inverse, order, 1).view(tokens, top_k, hidden_states.shape[1])
    return (y * top_k_weights[..., None]).sum(1).to(hidden_states.dtype)


def _project(experts: Any, name: str, x: Tensor, chosen: Tensor, offsets: Tensor) -> Tensor:
    """Multiply by one projection, in its compute, or as PyTorch does if it was not swapped."""
    weights: Any = getattr(experts, name)
    if experts.is_transposed:
        weights = weights.transpose(1, 2)
    bias = None
    if experts.has_bias:
        bias = getattr(experts, f"{name}_bias")
    swapped = experts.get_submodule(NARROW)
    if name in swapped:
        return cast(Tensor, swapped[name](x, weights, offsets, bias))
    return grouped_linear(x, weights, offsets, get_compute(dtype_name(x.dtype)), bias)


def grouped_layers(
    model: nn.Module, choose: Callable[[str], Compute | None]
) -> dict[str, GroupedLinear]:
    """Swap the experts whose projections get a compute from ``choose``.

    Return the projections by name.
    """
    layers: dict[str, GroupedLinear] = {}
    by_owner: dict[nn.Module, dict[str, GroupedLinear]] = {}
    for name, owner in projections(model).items():
        compute = choose(name)
        if compute is not None:
            own_name = name.rpartition(".")[2]
            weight = owner.get_parameter(own_name)
            layers[name] = GroupedLinear(len(weight), name, compute, weight.device)
            by_owner.setdefault(owner, {})[own_name] = layers[name]
    for owner, own_layers in by_owner.items():
        _swap(owner, own_layers)
    return layers


def _swap(module: Any, layers: Mapping[str, GroupedLinear]) -> None:
    """Make a module multiply by swapped projections: through transformers' registry, or in its own
    code.
    """
    if getattr(module, "_is_expert_parallel", False):
        raise RecipeError(
            f"Cannot swap '{next(iter(layers.values())).names[0]}' because it is sharded by expert "
            "parallelism.",
            "Load the model without it.",
        )
    config = getattr(module, "config", None)
    if not hasattr(module, "is_concatenated") or not hasattr(config, "_experts_implementation"):
        take_over(module, nn.ModuleDict(layers))
        return
    module.add_module(NARROW, _Projections(layers))
    _register()
    # A copy: other models of this config, and experts that are not swapped, use transformers' own
    # function.
    module.config = copy.copy(config)
    module.config._experts_implementation = IMPLEMENTATION


def grouped_layers_of(model: nn.Module) -> dict[str, GroupedLinear]:
    """Return the projections that are already swapped, by the names that ``choose`` got."""
    layers = {}
    for name, module in model.named_modules():
        if isinstance(module, GroupedLinear):
            layers[".".join(part for part in name.split(".") if part != NARROW)] = module
    return layers


def projections(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that own the projections of experts, by the projections' names."""
    owners = {}
    stacks = parts(model).stacks()
    for name, module in model.named_modules():
        for projection in stacks.get(module, ()):
            owners[f"{name}.{projection}".removeprefix(".")] = module
    return owners


def _register() -> None:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, multiply_experts)
