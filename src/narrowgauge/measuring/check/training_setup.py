"""A user's set-up: a model and its optimizers, and what is surely wrong before a step."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from narrowgauge.measuring.reading import Readings, of_all
from narrowgauge.measuring.samples import take
from narrowgauge.measuring.unit_roundoff import unit_of
from narrowgauge.numerics.dtensor import local_of
from narrowgauge.numerics.exact_sums import largest_magnitude
from narrowgauge.runs.text import plural
from narrowgauge.torch_support.torch_names import inner_name, unwrapped_optimizer

NARROW_WEIGHTS = (torch.bfloat16, torch.float16)
TRAINED = (*NARROW_WEIGHTS, torch.float32, torch.float64)
"""Formats of weights that optimizers step."""
SAMPLE = 1 << 14
"""Elements of a tensor that stand for it: every one of a tensor of half as many, often twice."""


class OptimizedParameter(NamedTuple):
    """A parameter of an optimizer, with the name that the model has for it, or for what it is the
    master of.
    """

    name: str
    parameter: Tensor
    group: dict[str, Any]
    optimizer: torch.optim.Optimizer


@dataclass
class TrainingSetup:
    """A model, possibly wrapped, and its optimizers without wrappers."""

    model: nn.Module
    optimizers: list[torch.optim.Optimizer]

    @cached_property
    def parameters(self) -> dict[str, Tensor]:
        """Return the model's parameters by their names without wrappers."""
        return {inner_name(name): p for name, p in self.model.named_parameters()}

    @cached_property
    def stepped(self) -> list[OptimizedParameter]:
        """Return every parameter of every optimizer, as often as a group names it."""
        names = {p: name for name, p in self.parameters.items()}
        free = {name: p for name, p in self.parameters.items() if not p.is_meta}
        stepped = []
        for optimizer in self.optimizers:
            for index, group in enumerate(optimizer.param_groups):
                for place, p in enumerate(group["params"]):
                    if p not in names:
                        name = name_of_master(p, free) or f"group {index}, parameter {place}"
                        names[p] = name
                        free.pop(name, None)  # one master stands for a weight
                    stepped.append(OptimizedParameter(names[p], p, group, optimizer))
        return stepped

    @property
    def trained(self) -> list[OptimizedParameter]:
        """Return the stepped parameters that train."""
        return [stepped for stepped in self.stepped if is_trained(stepped.parameter)]

    @property
    def missing(self) -> list[str]:
        """Return the names of the trainable parameters that no optimizer steps."""
        named = {p.name for p in self.stepped}
        # Flat partitions of the weights, as of DeepSpeed and Megatron, stand for all.
        if named.isdisjoint(self.parameters) and all(p.parameter.ndim == 1 for p in self.stepped):
            return []
        return [
            name for name, p in self.parameters.items() if p.requires_grad and name not in named
        ]

    @property
    def outside(self) -> dict[str, Any]:
        """Return the trained parameters that are none of the model's, by name."""
        inside = {*self.parameters.values()}
        return {p.name: p.parameter for p in self.trained if p.parameter not in inside}


def is_trained(p: Tensor) -> bool:
    """Return whether a tensor has values of a known format and is not frozen."""
    return p.requires_grad and not p.is_meta and p.dtype in TRAINED


def name_of_master(master: Tensor, parameters: Mapping[str, Tensor]) -> str:
    """Return the name of the parameter whose values a wider tensor holds; empty if of none."""
    for name, p in parameters.items():
        is_wider = master.element_size() > p.element_size() and master.shape == p.shape
        if is_wider and torch.equal(sample_elements(master).to(p.dtype), sample_elements(p)):
            return name
    return ""


def setup_of(model: nn.Module, optimizer: Any) -> TrainingSetup:
    """Return the set-up of a model and an optimizer, or a list of them, possibly wrapped."""
    optimizers: list[torch.optim.Optimizer] = []
    for inner in optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]:
        inner = unwrapped_optimizer(inner)
        # A container such as torchtitan's has members.
        optimizers += getattr(inner, "optimizers", None) or [inner]
    return TrainingSetup(model, optimizers)


def sample_elements(tensor: Tensor) -> Tensor:
    """Return elements of this rank's part of a tensor on the CPU, 1-D: the same of each shape."""
    return take(tensor, SAMPLE).cpu()


# ── readings ──────────────────────────────────────────────────────────────────────────────────────


def add_setup(setup: TrainingSetup, result: Readings) -> None:
    """Tell parameters in no optimizer, listed twice, not finite or untied, and rounded buffers.

    Optimizers that hold trained tensors of the model alone may be some of several.
    """
    parameters = setup.parameters
    masters = setup.outside.keys()
    missing = setup.missing
    result.looked_at = (
        f"which of {plural(len(setup.trained), 'tensor')} an optimizer holds, finite weights, ties, "
        "rounded buffers"
    )
    if not masters.isdisjoint(parameters):
        words = "the loop copies them after the step; ng.watch sees it"
        result.unseen["whether weights follow their masters"] = words
    if missing and setup.trained and masters <= parameters.keys():
        words = "in none of the optimizers passed: pass all in a list"
        result.unseen[f"the step of {of_all(missing)}"] = words
        missing = []
    counts = Counter(p.parameter for p in setup.stepped)
    tables = {m.weight for m in setup.model.modules() if isinstance(m, nn.Embedding)}
    faults = {
        "missing-parameters": missing,
        "parameters-twice": [name for name, p in parameters.items() if counts[p] > 1],
        "nonfinite": [],
        "untied": [],
        "rounded-buffers": _rounded_buffers(setup.model),
    }
    for name, p in parameters.items():
        if p.dtype in TRAINED and not p.is_meta:
            largest = largest_magnitude(local_of(p))
            if largest.isnan() or (p.requires_grad and largest.isinf()):  # or a frozen mask
                faults["nonfinite"].append(name)
            if p.requires_grad and p not in tables and any(_is_copy(p, x) for x in tables):
                faults["untied"].append(name)
    for what, names in faults.items():
        if names:
            result.add(what, names, len(names), stage="start" if what == "nonfinite" else "")


def _is_copy(p: Tensor, table: Tensor) -> bool:
    """Return whether a parameter has the values of an embedding that trains, in a second tensor: its
    bits, or once both have the format of fewer bits.
    """
    if p.shape != table.shape or not is_trained(table):
        return False
    narrow = max(p.dtype, table.dtype, key=unit_of)
    values = sample_elements(p).to(narrow)
    return values.unique().numel() > 1 and torch.equal(values, sample_elements(table).to(narrow))


def _rounded_buffers(model: nn.Module) -> list[str]:
    """Return the buffers of 16 bits that need the last bit of their format: they were rounded.

    Masks and integers do not. Statistics beside their count, and scales beside codes, are
    meant.
    """
    names = []
    for owner, module in model.named_modules():
        buffers = dict(module.named_buffers(owner, recurse=False))
        has_integers = any(not b.is_floating_point() for b in buffers.values())
        for name, buffer in buffers.items():
            if buffer.dtype in NARROW_WEIGHTS and not buffer.is_meta and not has_integers:
                x = sample_elements(buffer)
                is_odd = x.view(torch.int16) % 2 != 0
                if (is_odd & (x != x.round())).any():
                    names.append(inner_name(name))
    return names
