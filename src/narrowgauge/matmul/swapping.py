"""Swap a model's linear layers and experts to other computes, in place, behind one handle."""

from __future__ import annotations

import fnmatch
import re
import warnings
from collections.abc import Callable, Mapping

from torch import nn

from narrowgauge.errors import RecipeError
from narrowgauge.matmul import experts
from narrowgauge.matmul.experts import GroupedLinear
from narrowgauge.matmul.gemm import warn_if_emulated
from narrowgauge.matmul.layer_matmuls import TRACED
from narrowgauge.matmul.linear import (
    Linear,
    is_linear,
    keep_from_fused_kernels,
    made_narrow,
)
from narrowgauge.matmul.roles import multiplied, roles_of
from narrowgauge.spec.computes import Compute
from narrowgauge.spec.notation import get_compute
from narrowgauge.torch_support.machine import require_float64
from narrowgauge.torch_support.torch_names import plain_name

Layer = Linear | GroupedLinear
Choice = str | Compute | Callable[[str], str | Compute | None]
"""A compute, its name, or a function from a layer's name to one of these; ``None`` leaves the layer
alone.
"""
_MOST_NAMES = 4
"""Names of wide matrices that a line says."""
COMPILE_OPTIONS = {"emulate_precision_casts": True}
"""Options of ``torch.compile`` for eager's bits: otherwise fused operations do not round the values
between them.
"""


class NarrowLayers:
    """The narrow layers of a model. ``str()`` says which matrices of the model they multiply.

    Attributes:
        model: the model.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    @property
    def layers(self) -> dict[str, Layer]:
        """Return the layers by the names that they have now."""
        layers: dict[str, Layer] = {}
        for name, module in self.model.named_modules():
            if isinstance(module, Linear):
                layers[name] = module
        return layers | experts.grouped_layers_of(self.model)

    @property
    def kept(self) -> dict[str, str]:
        """Return the layers that were left wide, and why: their role (see :mod:`.roles`), or ``by
        choice``.
        """
        layers = self.layers
        keep_last = 0.0
        for layer in layers.values():
            keep_last = max(keep_last, layer.compute.keep_last)
        roles = roles_of(self.model, keep_last)
        kept = {}
        for name in multiplied(self.model):
            if name not in layers:
                kept[name] = roles.get(name, "by choice")
        return kept

    def matrices(self) -> dict[str, str]:
        """Return what multiplies each matrix of the model: ``narrow``, ``never called`` where other
        layers were, why it is kept, or the class whose code reads it.

        A matrix is a parameter of two or more dims, but no bias, embedding or magnitude.
        """
        layers = self.layers
        kept = self.kept
        has_run = not TRACED and any(layer.was_called for layer in layers.values())
        readers: dict[str, str] = {}
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            owner_name = re.sub(r"(^|\.)(parametrizations\..*|[^.]+)$", "", name)
            owner = self.model.get_submodule(owner_name)
            is_vector = parameter.ndim < 2 or 1 in (parameter.shape[-1], *parameter.shape[1:-1])
            if is_vector or "bias" in name.rpartition(".")[2]:
                continue
            if isinstance(owner, nn.Embedding | nn.LayerNorm):
                continue
            layer = layers.get(owner_name) or layers.get(name)
            reason = kept.get(owner_name) or kept.get(name)
            if layer is not None and not layer.compute.is_wide:
                # A model may read a layer's weight in its own code, as Mamba does dt_proj's.
                readers[name] = "narrow"
                if has_run and not layer.was_called:
                    readers[name] = "never called"
            elif reason is not None or layer is not None:
                readers[name] = reason or "by choice"
            else:
                readers[name] = type(owner).__name__
        return readers

    def __str__(self) -> str:
        sizes = {True: 0, False: 0}
        wide = []
        for name, reader in self.matrices().items():
            sizes[reader == "narrow"] += self.model.get_parameter(name).numel()
            if reader != "narrow":
                wide.append(f"{name} ({reader})")
        narrow, total = sizes[True], max(1, sum(sizes.values()))
        line = f"{narrow:,} of {total:,} matrix weights are narrow ({narrow / total:.0%})"
        if wide:
            line += f"; wide: {', '.join(wide[:_MOST_NAMES])}"
        if len(wide) > _MOST_NAMES:
            line += f" and {len(wide) - _MOST_NAMES} more"
        return line

    def set_compute(self, choose: Callable[[str], Compute]) -> None:
        """Continue in other computes. ``choose`` maps a layer's name to its compute."""
        layers = self.layers
        chosen = {}
        for name, layer in layers.items():
            chosen[name] = choose(name)
            if not layer.compute.transform:
                _refuse_transform(chosen[name])
        for name, layer in layers.items():
            layer.set_compute(chosen[name])


def swap_linears(
    model: nn.Module,
    compute: Choice,
    *,
    keep: tuple[str, ...] = (),
    keep_roles: bool = True,
    seed: int = 0,
) -> NarrowLayers:
    """Make a model's linear layers and experts multiply in the formats of a compute, in place.

    Parameters, names and ``state_dict`` stay. A layer is swapped unless its name matches ``keep``.

    Args:
        model: any module with ``nn.Linear``, transformers' ``Conv1D`` or a mixture's experts.
        compute: a compute, its name, or a function from a layer's name to either (``None`` leaves
            it alone). A projection of experts is called ``….experts.down_proj``.
        keep: name patterns (shell wildcards) of layers to leave alone, or of modules around them.
        keep_roles: also leave layers outside the blocks, routers, adapters and last blocks alone
            (see :mod:`narrowgauge.matmul.roles`); not if ``compute`` is a function, or casts
            nothing below 16 bits.
        seed: of stochastic casts.
    Returns:
        A handle on the narrow layers. ``print(linears)`` says what stays wide, and why. A warning
        names matrices that no ``nn.Linear`` multiplies, and says if the model has no blocks.
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
    require_float64(model.parameters())
    roles: Mapping[str, str] = {}
    if not callable(compute):
        compute = get_compute(compute)
        _refuse_transform(compute)
        if keep_roles and not compute.is_wide:
            roles = roles_of(model, compute.keep_last, warns=True)
    refuse_unmatched(model, keep)
    choose = chooser(compute, keep, roles)
    layers: dict[str, Layer] = {}
    for name, module in list(model.named_modules()):
        chosen = None
        if is_linear(module):
            chosen = choose(name)
        if chosen is not None:
            _warn_if_narrow(name, module, chosen)
            layers[name] = made_narrow(plain_name(name), module, chosen, seed)
    layers |= experts.grouped_layers(model, choose, seed)
    if not layers:
        raise RecipeError(
            f"{type(model).__name__} has no linear layer to compute narrowly.",
            "Its layers must be nn.Linear or transformers' Conv1D, and not all be kept.",
        )
    keep_from_fused_kernels(model)
    device = next(iter(layers.values())).key.device
    for layer in layers.values():
        warn_if_emulated(layer.compute, device)
    linears = NarrowLayers(model)
    readers = set(linears.matrices().values())
    if "narrow" in readers and not readers <= {"narrow", *linears.kept.values()}:
        warnings.warn(
            f"{linears}. linears.matrices() lists all. Only layers of nn.Linear's own forward are "
            "swapped.",
            stacklevel=2,
        )
    return linears


def _warn_if_narrow(name: str, module: nn.Module, compute: Compute) -> None:
    """Warn of a layer that is narrow already, perhaps as a part of another model."""
    before = getattr(module, "compute", None)
    if isinstance(module, Linear) and before != compute and not module.compute.is_wide:
        warnings.warn(
            f"'{name}' was narrow already: from now on it multiplies in {compute.name}, and not in "
            f"{module.compute.name}, in every model that holds it.",
            stacklevel=3,
        )


def _refuse_transform(compute: Compute) -> None:
    """Raise RecipeError for a compute whose casts need a transformed model."""
    if compute.transform:
        raise RecipeError(
            f"Cannot swap layers to '{compute.name}' alone because its static scales need the "
            "whole model changed.",
            f'Use ng.prepare(model, "{compute.name}/word").',
        )


def linears_of(model: nn.Module) -> NarrowLayers | None:
    """Return a handle on a model's narrow layers, for code that has only the model.

    Args:
        model: any module.
    Returns:
        The handle; ``None`` if no layer is narrow.
    Example:
        >>> linears_of(nn.Linear(2, 2)) is None
        True
    """
    linears = NarrowLayers(model)
    if linears.layers:
        return linears
    return None


def _matches(name: str, pattern: str) -> bool:
    """Return whether a pattern matches a layer's name, or that of a module that contains it."""
    if fnmatch.fnmatchcase(name, pattern):
        return True
    place = plain_name(name).removesuffix(".base_layer")  # of PEFT
    while place:
        if fnmatch.fnmatchcase(place, pattern):
            return True
        place = place.rpartition(".")[0]
    return False


def refuse_unmatched(model: nn.Module, keep: tuple[str, ...]) -> None:
    """Refuse patterns of layers to leave alone that match none."""
    if isinstance(keep, str):
        raise RecipeError(
            f"Cannot use keep = {keep!r} because it is not a tuple.", f'Give keep=("{keep}",).'
        )
    if not keep:
        return
    names = list(multiplied(model))
    for pattern in keep:
        matches = [name for name in names if _matches(name, pattern)]
        if not matches:
            raise RecipeError(
                f"Cannot keep '{pattern}' because it matches no linear layer of "
                f"{type(model).__name__}.",
                f"Its names look like '{names[0]}' and '{names[-1]}'." if names else "",
            )


def chooser(
    compute: Choice, keep: tuple[str, ...], roles: Mapping[str, str]
) -> Callable[[str], Compute | None]:
    """Return a function from a layer's name to its compute; ``None`` if ``keep`` or its role leaves
    it alone.
    """

    def choose(name: str) -> Compute | None:
        if name in roles or any(_matches(name, pattern) for pattern in keep):
            return None
        if callable(compute):
            layer_compute = compute(name)
        else:
            layer_compute = compute
        if layer_compute is None:
            return None
        return get_compute(layer_compute)

    return choose
