"""Experts of a mixture in low-precision matmuls: Mixtral, Qwen3-MoE, DeepSeek-V3, gpt-oss and
similar models.

A mixture stores the weights of its experts in one tensor ``[experts, out, in]``, and its module
multiplies them in code of its own: by ``linear``, ``matmul``, ``bmm`` or ``grouped_mm``. While the
module's forward runs, its stacks are tensors that know their projection, through copies, transposes
and the choice of an expert. Where one is the second factor of a product, the swapped projection
multiplies. Routing, activation and order of tokens stay the module's own.

A projection is one linear layer for each expert, with its own casts. So each expert has its own
scale per tensor, and its own key of random bits. The gradient of an expert without tokens is zero.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from narrowgauge.errors import RecipeError
from narrowgauge.matmul.grouped import grouped
from narrowgauge.matmul.linear import NarrowLayer
from narrowgauge.spec.computes import Compute
from narrowgauge.torch_support.extension import extended_class
from narrowgauge.torch_support.model_parts import parts


class Projection(nn.Module):
    """One projection of all experts of a module.

    Its ``of_expert(x, weight, bias, expert)`` multiplies the tokens of an expert by its weight
    ``[out, in]``. A call ``(x, weights, offsets)`` multiplies as
    :func:`~narrowgauge.matmul.grouped.grouped` does.
    """


class GroupedLinear(Projection, NarrowLayer):
    """Multiply by one projection of all experts, in a compute.

    The weights stay in the model's own module. An expert's output and gradients have the bits of a
    :class:`~narrowgauge.matmul.linear.Linear` of the same compute on that expert's tokens alone. An
    expert's key, and so its random bits, comes from the name of its weights and its index.
    """

    def __init__(self, weight: Tensor, name: str, compute: Compute, seed: int) -> None:
        super().__init__()
        names = [f"{name}.{expert}" for expert in range(len(weight))]
        self.begin(names, weight.device, compute, seed)

    def of_expert(self, x: Tensor, weight: Tensor, bias: Tensor | None, expert: int) -> Tensor:
        return self.product(x, weight, bias, self.key[expert])

    def forward(self, x: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
        x, is_plain = self.entered(x, weights)
        name = "" if is_plain else self.registered_name
        keys = self.key if self.is_stochastic else None
        return grouped(x, weights, offsets, name, keys, None)


# ── the stacks of a module ────────────────────────────────────────────────────────────────────────


_NARROW = "narrow"
"""The submodule that holds the swapped projections."""
_SUFFIX = "_of_experts"
"""Ends the name of a swapped projection, so that it is no target of adapters as its weight is."""
_MATMUL = (torch.matmul, torch.bmm, Tensor.matmul, Tensor.bmm, Tensor.__matmul__)
_GROUPED = (torch._grouped_mm, F.grouped_mm, torch.ops.aten._grouped_mm)
PRODUCTS = (F.linear, *_MATMUL, *_GROUPED)
_KEPT = {"bfloat16", "contiguous", "float", "half", "t", "to", "transpose"}
"""Names of functions whose result is the same weight."""


@torch.compiler.substitute_in_graph(F.grouped_mm, skip_signature_check=True)
def _(*args: Any, **kwargs: Any) -> Any:
    """Call what a compiler lets a stack take over: it puts torch._grouped_mm into its graph."""
    return torch.ops.aten._grouped_mm(*args, **kwargs)


class OwnCode:
    """A module of stacked weights whose own forward multiplies them, in low precision."""

    def stored_weights(self) -> dict[str, Tensor]:
        """Return what stands for the stacks that are stored as codes, by name."""
        module: Any = self
        stored = {}
        for name, layer in _layers(module).items():
            if module._parameters[name] is None:
                stored[name] = layer.stand_in()
        return stored

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module's own forward, with its swapped projections."""
        if _implementation(self) == "grouped_mm":
            return self._multiplied(*args, **kwargs)
        return self._apart(*args, **kwargs)

    # A compiler cannot follow loops over the tokens of each expert.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _apart(self, *args: Any, **kwargs: Any) -> Any:
        return self._multiplied(*args, **kwargs)

    def _multiplied(self, *args: Any, **kwargs: Any) -> Any:
        module: Any = self
        multiplied: set[Any] = set()
        layers = _layers(module)
        weights = {name: module._parameters[name] for name in layers}
        try:
            for name, layer in layers.items():
                weight = weights[name]
                if weight is None:
                    weight = layer.stand_in()
                if type(weight) in (Tensor, nn.Parameter):  # no DTensor
                    module._parameters[name] = _tracked(weight, _Origin(layer, multiplied))
            result = super().forward(*args, **kwargs)  # type: ignore[misc]
        finally:
            module._parameters.update(weights)
        has_tokens = any(isinstance(x, Tensor) and x.numel() > 0 for x in args)
        missed = [name for name, layer in layers.items() if layer not in multiplied]
        if has_tokens and missed:
            _refuse(module, missed)
        return result


def _layers(module: nn.Module) -> dict[str, Any]:
    """Return the swapped projections of a module by the names of their weights."""
    layers = {}
    for name, layer in module.get_submodule(_NARROW).named_children():
        layers[name.removesuffix(_SUFFIX)] = layer
    return layers


def weight_name(name: str) -> str:
    """Return the name of the weight that a swapped projection multiplies by, from its own name."""
    return name.removesuffix(_SUFFIX).replace(f"{_NARROW}.", "")


def _refuse(module: nn.Module, missed: list[str]) -> None:
    """Raise RecipeError for projections that a module's code multiplies in another way."""
    reason = "its code uses none of linear, matmul, bmm and grouped_mm on a whole weight"
    patterns = ", ".join(f'"*.{name}"' for name in missed)
    cure = f"Leave it as it is with keep=({patterns},)."
    if _implementation(module) == "batched_mm":
        reason = "'batched_mm' copies a weight for each token"
        cure = 'Call model.set_experts_implementation("grouped_mm").'
    raise RecipeError(
        f"Cannot multiply '{missed[0]}' of {type(module).__name__} in low precision because {reason}.",
        cure,
    )


def _implementation(module: Any) -> str | None:
    """Return how a mixture of transformers multiplies its stacks."""
    return getattr(getattr(module, "config", None), "_experts_implementation", None)


class _Origin(NamedTuple):
    """Where a tensor comes from.

    Attributes:
        layer: the swapped projection.
        multiplied: the projections that multiplied in this call.
        expert: whose part it is; ``None`` for all experts.
    """

    layer: Any
    multiplied: set[Any]
    expert: int | None = None


class _Stack(Tensor):
    """A weight of experts, or the part of one expert.

    Attributes:
        plain: the same tensor, as no stack.
    """

    origin: _Origin
    plain: Tensor

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func in PRODUCTS and len(args) > 1 and isinstance(args[1], cls):
                return _multiply(func, args[1].origin, args[0], args[1].plain, *args[2:], **kwargs)
            result = func(*args, **kwargs)
            if not args or not isinstance(args[0], cls):
                return result
            origin = args[0].origin
            if func.__name__ in _KEPT:
                return _tracked(result, origin)
            is_choice = func is Tensor.__getitem__ and result.shape == args[0].shape[1:]
            if is_choice and origin.expert is None:
                return _tracked(result, origin._replace(expert=int(args[1]) % len(args[0])))
        return result


def _tracked(x: Tensor, origin: _Origin) -> _Stack:
    stack = x.as_subclass(_Stack)
    stack.origin = origin
    stack.plain = x
    return stack


def _multiply(
    func: Any, origin: _Origin, x: Tensor, weight: Tensor, *rest: Any, **options: Any
) -> Any:
    """Multiply by the swapped projection of a stack, or of the expert whose part it is."""
    layer = origin.layer
    origin.multiplied.add(layer)
    if func is not F.linear:
        weight = weight.transpose(-2, -1)
    if weight.ndim == 2:
        bias = [*rest, options.get("bias")][0]
        return layer.of_expert(x, weight, bias, origin.expert)
    if func not in _MATMUL:
        return layer(x, weight, [*rest, options.get("offs")][0])
    outputs = []
    for expert, rows in enumerate(x.expand(len(weight), -1, -1)):
        outputs.append(layer.of_expert(rows, weight[expert], None, expert))
    return torch.stack(outputs)


# ── swapping ──────────────────────────────────────────────────────────────────────────────────────


def take_over(owner: nn.Module, name: str, layer: Projection) -> None:
    """Let the code of a module multiply its weight of that name by a layer."""
    if not isinstance(owner, OwnCode):
        kind: Any = type(owner)
        owner.__class__ = extended_class(OwnCode, kind)
        owner.add_module(_NARROW, nn.ModuleDict())
    owner.get_submodule(_NARROW).add_module(name + _SUFFIX, layer)


def swap_projection(owner: nn.Module, name: str, compute: Compute, seed: int) -> None:
    """Swap one projection of a module's experts: its own forward then multiplies by layers."""
    own_name = name.rpartition(".")[2]
    layer = GroupedLinear(owner.get_parameter(own_name), name, compute, seed)
    take_over(owner, own_name, layer)


def projections(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that own the projections of experts, by the projections' names."""
    owners = {}
    names = {module: name for name, module in model.named_modules()}
    for experts in parts(model).experts:
        for projection in experts.stacks:
            if experts.owner._parameters[projection] is not None:  # not stored as codes
                name = f"{names[experts.owner]}.{projection}"
                owners[name.removeprefix(".")] = experts.owner
    return owners
