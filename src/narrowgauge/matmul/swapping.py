"""Swap a model's linear layers and experts to other computes, in place, behind one handle."""

from __future__ import annotations

import fnmatch
import re
import warnings
from collections.abc import Callable, Mapping

import torch
from torch import nn

from narrowgauge.errors import RecipeError
from narrowgauge.matmul import clock, experts
from narrowgauge.matmul.experts import GroupedLinear
from narrowgauge.matmul.gemm import warn_if_emulated
from narrowgauge.matmul.layer_matmuls import TRACED
from narrowgauge.matmul.linear import (
    Linear,
    NarrowLayer,
    is_linear,
    keep_from_fused_kernels,
    made_narrow,
)
from narrowgauge.matmul.roles import role_of, roles_of
from narrowgauge.spec.computes import Compute
from narrowgauge.spec.notation import get_compute
from narrowgauge.torch_support.anatomy import parts
from narrowgauge.torch_support.machine import require_float64
from narrowgauge.torch_support.torch_names import leave_out_of_ddp, plain_name

Layer = Linear | GroupedLinear
Choice = str | Compute | Callable[[str], str | Compute | None]
"""A compute, its name, or a function from a layer's name to one of these; ``None`` leaves the layer
alone.
"""
COMPILE_OPTIONS = {"emulate_precision_casts": True}
"""Options of ``torch.compile`` for eager's bits: otherwise fused operations do not round the values
between them.
"""


class NarrowLayers:
    """The narrow layers of a model.

    The seed and the step key stochastic casts. They are those of the optimizer that steps a layer's
    weight, and travel in its ``state_dict()``. ``str()`` says which matrices of the model the layers
    multiply.

    Attributes:
        model: the model.
        layers: the layers by name.
        kept: the layers that were left wide, and why: their role (see :mod:`.roles`), or ``by
            choice``.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Mapping[str, Layer],
        kept: Mapping[str, str] | None = None,
    ) -> None:
        self.model, self.layers = model, dict(layers)
        if kept is None:
            self.kept = roles_of(model)
        else:
            self.kept = dict(kept)

    @property
    def step(self) -> int:
        """Return the number of optimizer steps done, of the layer with the most."""
        return max(layer.draw.step for layer in self.layers.values())

    @step.setter
    def step(self, step: int) -> None:
        clock.set_step(self.layers.values(), step)

    def set_first_sequence(self, index: int) -> None:
        """Set the index in the whole batch of the next micro-batch's first sequence, for inputs
        ``[sequences, …, in]``.

        It keys random bits: sequences of equal length round alike however the batch is divided into
        micro-batches.
        """
        self._set_place(first_sequence=index, first_token=0)

    def set_first_token(self, index: int) -> None:
        """Set the index in the whole batch of the next micro-batch's first token, for packed inputs
        ``[(1,) tokens, in]``.

        It keys random bits: tokens round alike however the batch is divided. A sample without
        tokens counts as one.
        """
        self._set_place(first_sequence=0, first_token=index)

    def _set_place(self, **index: int) -> None:
        clock.set_draw(self.layers.values(), is_placed=True, **index)

    def matrices(self) -> dict[str, str]:
        """Return what multiplies each matrix of the model: ``narrow``, ``kept`` (by choice), ``never
        called`` where other layers were, or the class whose code reads it.

        A matrix is a parameter of two or more dims, but no bias or embedding. :attr:`kept` says why
        a layer is.
        """
        readers: dict[str, str] = {}
        stacks = parts(self.model).stacks()
        has_run = not TRACED and any(layer.was_called for layer in self.layers.values())
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            owner_name = re.sub(r"(^|\.)(parametrizations\..*|[^.]+)$", "", name)
            owner = self.model.get_submodule(owner_name)
            is_vector = owner in stacks and min(parameter.shape) == 1  # [experts, 1, out]
            if parameter.ndim < 2 or is_vector or "bias" in name.rpartition(".")[2]:
                continue
            layer = self.layers.get(owner_name) or self.layers.get(name)
            if isinstance(owner, nn.Embedding | nn.LayerNorm):
                continue
            if layer is not None and not layer.compute.is_wide:
                # A model may read a layer's weight in its own code, as Mamba does dt_proj's.
                readers[name] = "narrow"
                if has_run and not layer.was_called:
                    readers[name] = "never called"
            elif owner_name in self.kept or is_linear(owner) or owner in stacks:
                readers[name] = "kept"
            else:
                readers[name] = type(owner).__name__
        return readers

    def __str__(self) -> str:
        return self.describe()

    def describe(self, limit: int = 4) -> str:
        """Return in one line how many weights are narrow, and which matrices are not and why, at
        most ``limit`` of them.
        """
        total = 0
        narrow = 0
        wide = []
        for name, reader in self.matrices().items():
            size = self.model.get_parameter(name).numel()
            total += size
            if reader == "narrow":
                narrow += size
                continue
            if reader == "kept":
                reader = self.kept.get(name.rpartition(".")[0], "by choice")
            wide.append(f"{name} ({reader})")
        line = f"{narrow:,} of {total:,} matrix weights are narrow ({narrow / max(total, 1):.0%})"
        if wide:
            line += f"; wide: {', '.join(wide[:limit])}"
        if len(wide) > limit:
            line += f" and {len(wide) - limit} more"
        return line

    def set_compute(self, choose: Callable[[str], Compute]) -> None:
        """Continue in other computes. ``choose`` maps a layer's name to its compute."""
        chosen = {name: choose(name) for name in self.layers}
        for name, compute in chosen.items():
            if not self.layers[name].compute.transform:
                _refuse_transform(compute)
        for name, layer in self.layers.items():
            layer.set_compute(chosen[name])
        clock.hear()  # of the count of optimizers, which may key random bits only now

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Take the step from this optimizer, also if its state is loaded.

        Narrowgauge's own are found without this.
        """
        clock.follow(optimizer)


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
        model: any module with ``nn.Linear``, transformers' ``Conv1D`` or its mixtures' experts.
        compute: a compute, its name, or a function from a layer's name to either (``None`` leaves
            it alone). A projection of experts is called ``….experts.down_proj``.
        keep: name patterns (shell wildcards) of layers to leave alone.
        keep_roles: also leave heads, routers, adapters and last blocks alone, as the compute says
            (see :mod:`narrowgauge.matmul.roles`); not if ``compute`` is a function.
        seed: of stochastic casts, unless an optimizer of Narrowgauge steps the model: then its seed
            is used.
    Returns:
        A handle on the swapped layers. ``print(linears)`` says what stays wide, and why. A warning
        names matrices that no ``nn.Linear`` multiplies, and a head that is narrow because you chose
        so.
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
    own_keep: tuple[str, ...] = ()
    keep_last = 0.0
    if not callable(compute):
        compute = get_compute(compute)
        _refuse_transform(compute)
        own_keep = compute.keep
        keep_last = compute.keep_last
    roles = roles_of(model, keep_last)
    is_by_role = keep_roles and bool(own_keep)
    refuse_unmatched(model, keep)
    if is_by_role:
        choose = chooser(compute, (*keep, *own_keep), roles)
    else:
        choose = chooser(compute, keep, {})
    layers: dict[str, Layer] = {}
    for name, module in list(model.named_modules()):
        chosen = None
        if is_linear(module):
            chosen = choose(name)
        if chosen is not None:
            layers[name] = made_narrow(plain_name(name), module, chosen)
    layers |= experts.grouped_layers(model, choose)
    if not layers:
        raise RecipeError(
            f"{type(model).__name__} has no linear layer to compute narrowly.",
            "Its layers must be nn.Linear or transformers' Conv1D, and not all be kept.",
        )
    keep_from_fused_kernels(model)
    device = next(iter(layers.values())).key.device
    for used in {layer.compute.name: layer.compute for layer in layers.values()}.values():
        warn_if_emulated(used, device)
    if is_by_role:
        reasons = roles
    else:
        reasons = dict.fromkeys(roles.keys() - layers.keys(), "by choice")
    linears = NarrowLayers(model, layers, reasons)
    for name, layer in layers.items():
        if roles.get(name) == "head" and not layer.compute.is_wide:
            warnings.warn(
                f"'{name}' is the model's head, and is narrow by your choice: its errors go "
                "straight into the loss.",
                stacklevel=2,
            )
    readers = set(linears.matrices().values())
    if "narrow" in readers and not readers <= {"narrow", "kept"}:
        warnings.warn(
            f"{linears}. linears.matrices() lists all. Only layers of nn.Linear's own forward are "
            "swapped.",
            stacklevel=2,
        )
    clock.serve(model, layers.values(), seed)
    keep_ranks_apart(model)
    return linears


def _refuse_transform(compute: Compute) -> None:
    """Raise RecipeError for a compute whose casts need a transformed model."""
    if compute.transform:
        raise RecipeError(
            f"Cannot swap layers to '{compute.name}' alone because its static scales need the "
            "whole model changed.",
            f'Use ng.prepare(model, "{compute.name}/word").',
        )


def keep_ranks_apart(model: nn.Module) -> None:
    """Make DistributedDataParallel ignore the buffers of narrow layers, which differ by rank.

    Call it before wrapping, for the module that is wrapped: :func:`swap_linears` and ``prepare`` do
    it for their model.
    """
    buffers = []
    for name, layer in model.named_modules():
        if isinstance(layer, NarrowLayer):
            prefix = f"{name}." if name else ""
            buffers += [f"{prefix}key", f"{prefix}clock_words"]
    if buffers:
        leave_out_of_ddp(model, buffers)


def linears_of(model: nn.Module) -> NarrowLayers | None:
    """Return a handle on a model's narrow layers, for code that has only the model.

    Args:
        model: any module.
    Returns:
        The handle, with the layers' seed and step; ``None`` if no layer is narrow.
    Example:
        >>> linears_of(nn.Linear(2, 2)) is None
        True
    """
    layers: dict[str, Layer] = {}
    for name, module in model.named_modules():
        if isinstance(module, Linear):
            layers[name] = module
    layers |= experts.grouped_layers_of(model)
    if not layers:
        return None
    return NarrowLayers(model, layers)


def linear_names(model: nn.Module) -> list[str]:
    """Return the names of linear layers, and of the projections of mixtures' experts."""
    return [
        *(name for name, module in model.named_modules() if is_linear(module)),
        *experts.projections(model),
    ]


def _matches(name: str, pattern: str) -> bool:
    names = {name, plain_name(name).removesuffix(".base_layer")}  # of PEFT
    return any(fnmatch.fnmatchcase(one_name, pattern) for one_name in names)


def refuse_unmatched(model: nn.Module, keep: tuple[str, ...]) -> None:
    """Refuse patterns of layers to leave alone that match none."""
    if isinstance(keep, str):
        raise RecipeError(
            f"Cannot use keep = {keep!r} because it is not a tuple.", f'Give keep=("{keep}",).'
        )
    if not keep:
        return
    names = linear_names(model)
    owners = [name.rpartition(".")[0] for name in names]
    for pattern in keep:
        if not any(_matches(name, pattern) for name in (*names, *owners)):
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
        if role_of(name, roles) or any(_matches(name, pattern) for pattern in keep):
            return None
        if callable(compute):
            layer_compute = compute(name)
        else:
            layer_compute = compute
        if layer_compute is None:
            return None
        return get_compute(layer_compute)

    return choose
