"""Swap a model's linear layers and experts to other computes, in place, behind one handle."""

import fnmatch
from collections.abc import Callable, Iterable, Mapping

from torch import nn

from narrowgauge.errors import RecipeError
from narrowgauge.matmul import experts
from narrowgauge.matmul.gemm import warn_if_emulated
from narrowgauge.matmul.kept_layers import multiplied, roles_of
from narrowgauge.matmul.linear import (
    NarrowLayer,
    is_linear,
    keep_from_fused_kernels,
    make_narrow,
    refuse_replaced_forward,
)
from narrowgauge.spec.computes import Compute
from narrowgauge.spec.parse import get_compute
from narrowgauge.torch_support.torch_names import plain_name

Choice = str | Compute | Callable[[str], str | Compute | None]
"""A compute, its name, or a function from a layer's name to one of these; ``None`` leaves the layer
alone.
"""
_MOST_NAMES = 4
"""Names of wide matrices that a line says."""


class NarrowLayers:
    """The narrow layers of a model. ``str()`` says which matrices are wide, and why.

    Attributes:
        model: the model.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    @property
    def layers(self) -> dict[str, NarrowLayer]:
        """Return the layers by the names that they have now."""
        layers = {}
        for name, module in self.model.named_modules():
            if isinstance(module, NarrowLayer):
                if isinstance(module, experts.Projection):
                    name = experts.weight_name(name)
                layers[name] = module
        return layers

    @property
    def kept(self) -> dict[str, str]:
        """Return the linear layers and projections of experts that are not narrow, and why: their
        role (see :mod:`.kept_layers`), or ``by choice``.
        """
        layers = self.layers
        keep_last = max([layer.compute.keep_last for layer in layers.values()], default=0.0)
        roles = roles_of(self.model, keep_last)
        wide = {}
        for name in multiplied(self.model):
            if name not in layers:
                wide[name] = roles.get(name, "by choice")
        return wide

    def __str__(self) -> str:
        wide = [f"{name} ({reason})" for name, reason in self.kept.items()]
        num_narrow = sum(not layer.compute.is_wide for layer in self.layers.values())
        line = f"{num_narrow} layers are narrow"
        if wide:
            line += f"; wide: {', '.join(wide[:_MOST_NAMES])}"
        if len(wide) > _MOST_NAMES:
            line += f" and {len(wide) - _MOST_NAMES} more"
        return line


def swap_linears(
    model: nn.Module,
    compute: Choice,
    *,
    keep: tuple[str, ...] = (),
    seed: int = 0,
) -> NarrowLayers:
    """Make a model's linear layers and experts multiply in the formats of a compute, in place.

    Parameters, names and ``state_dict`` stay. A layer is swapped unless its name matches ``keep``.

    Args:
        model: any module with ``nn.Linear``, transformers' ``Conv1D`` or a mixture's experts.
        compute: a compute, its name, or a function from a layer's name to either (``None`` leaves
            it alone). A projection of experts is called ``….experts.down_proj``.
        keep: name patterns (shell wildcards) of layers to leave alone, or of modules around them.
            Layers outside the blocks, routers, adapters and last blocks are left alone too (see
            :mod:`narrowgauge.matmul.kept_layers`), but not if ``compute`` is a function, or casts nothing
            below 16 bits.
        seed: of stochastic casts.
    Returns:
        A handle on the narrow layers. ``print(linears)`` says which linear layers stay wide, and
        why. A warning says if the model has no blocks.
    Raises:
        RecipeError: an unknown compute, no linear layer to swap, or experts that cannot be swapped.
    Cost: none until the layers are used. The first use of a compute compiles its casts, some
    seconds each.
    Example:
        >>> model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)).bfloat16()
        >>> linears = swap_linears(model, "bfloat16")
        >>> sorted(linears.layers)
        ['0', '2']
    """
    roles = {}
    if not callable(compute):
        compute = get_compute(compute)
        if compute.transform:
            raise RecipeError(
                f"Cannot swap layers to '{compute.name}' alone because its static scales need the "
                "whole model changed.",
                f'Use ng.prepare(model, "{compute.name}/word").',
            )
        if not compute.is_wide:
            roles = roles_of(model, compute.keep_last, warns=True)
    for name, (module, chosen) in chosen_layers(model, compute, keep, roles).items():
        if is_linear(module):
            make_narrow(plain_name(name), module, chosen, seed)
        else:
            experts.swap_projection(module, name, chosen, seed)
    keep_from_fused_kernels(model)
    linears = NarrowLayers(model)
    for layer in linears.layers.values():
        warn_if_emulated(layer.compute, layer.key.device)
    return linears


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Return whether a pattern matches a layer's name, or that of a module that contains it."""
    place = plain_name(name).removesuffix(".base_layer")  # of PEFT
    while place:
        if any(fnmatch.fnmatchcase(place, pattern) for pattern in patterns):
            return True
        place = place.rpartition(".")[0]
    return False


def chosen_layers(
    model: nn.Module, compute: Choice, keep: tuple[str, ...], roles: Mapping[str, str]
) -> dict[str, tuple[nn.Module, Compute]]:
    """Return the linear layers and owners of experts that neither ``keep`` nor their role leaves
    alone, and their computes, by name.

    Refuse patterns that match none, a layer whose forward is replaced, and a model without layers.
    """
    layers = multiplied(model)
    for pattern in keep:
        if not any(matches(name, [pattern]) for name in layers):
            names = list(layers)
            raise RecipeError(
                f"Cannot keep '{pattern}' because it matches no linear layer of "
                f"{type(model).__name__}.",
                f"Its names look like {', '.join(names[:1] + names[-1:])}.",
            )
    chosen = {}
    for name, module in layers.items():
        choice = None
        if name not in roles and not matches(name, keep):
            choice = compute(name) if callable(compute) else compute
        if choice is not None:
            chosen[name] = module, get_compute(choice)
            refuse_replaced_forward(name, module, chosen[name][1])
    if not chosen:
        reason = "none is left"
        if roles:
            reason += f" beside those that stay wide ({', '.join(sorted(set(roles.values())))})"
        raise RecipeError(
            f"Cannot swap the linear layers of this {type(model).__name__} because {reason}.",
            "Its layers must be nn.Linear or transformers' Conv1D, hold a weight and not codes, and "
            "not all be kept. A function from names to computes chooses among all layers.",
        )
    return chosen
