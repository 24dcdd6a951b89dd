"""The table of rule × storage: which pairs there are, and small trainings of any of them.

All of it is eager, on small shapes. A contract names the pairs that it is asked of:

- ``EVERY``: all that are legal.
- ``SOME``: every rule in a flat and a row-wise storage, every storage under AdamW: for what neither a rule nor a storage
  has any part in alone.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import narrowgauge as ng
from narrowgauge.optim import GaLore
from narrowgauge.spec.storages import STORAGES
from script_modules import script_module
from tensors import assert_same_bits, parameters_of

Shape = tuple[int, ...]
SHAPES = [(12, 10), (7, 9), (5,)]


OWN = script_module("examples/own_rule.py")


def users_rule(
    params: Any, *, lr: float, betas: tuple[float, ...], alpha: float, **options: Any
) -> ng.Optimizer:
    """The rule of the example; as a user's own, it is given its options by hand."""
    return ng.Optimizer(params, OWN.ADEMAMIX, {"lr": lr, "betas": betas, "alpha": alpha}, **options)


@dataclass(frozen=True)
class Row:
    """One rule of the table.

    Args:
        make: what builds its optimizer.
        options: with which it learns fast.
    """

    make: Callable[..., ng.Optimizer]
    options: dict[str, Any]


RULES = {
    "adamw": Row(ng.AdamW, {"lr": 0.3}),
    "adam": Row(ng.Adam, {"lr": 0.3, "weight_decay": 1e-3}),
    "sgd": Row(ng.SGD, {"lr": 0.2, "momentum": 0.8}),
    "nesterov": Row(ng.SGD, {"lr": 0.2, "momentum": 0.8, "nesterov": True}),
    "plain sgd": Row(ng.SGD, {"lr": 0.5}),
    "lion": Row(ng.Lion, {"lr": 0.2}),
    "own": Row(users_rule, {"lr": 0.1, "betas": (0.9, 0.999, 0.99), "alpha": 2.0}),
    "muon": Row(ng.Muon, {"lr": 0.5, "weight_decay": 0.0, "adjust_lr_fn": "match_rms_adamw"}),
    "galore": Row(GaLore, {"lr": 0.4, "rank": 4, "update_proj_gap": 3, "scale": 1.0}),
}


def is_legal(rule: str, storage: str) -> bool:
    row = STORAGES[storage]
    if rule in ("muon", "galore"):
        # Before the step a matrix rule knows no scale by block of Muon's momentum beside the weight.
        is_refused = rule == "muon" and row.exp_avg.scaled
        return row.arithmetic == "float32" and not is_refused
    return rule == "adamw" or row.arithmetic != "expansion"


PAIRS = [(rule, storage) for rule in RULES for storage in STORAGES if is_legal(rule, storage)]
SOME_PAIRS = [pair for pair in PAIRS if pair[1] in ("word", "compact") or pair[0] == "adamw"]


def over(pairs: Sequence[tuple[str, str]]) -> pytest.MarkDecorator:
    """Parametrize over every storage, each with the rule that was used least, and over every rule."""
    used = dict.fromkeys((rule for rule, _ in pairs), 0)
    chosen = []
    for storage in dict.fromkeys(storage for _, storage in pairs):
        rule = min(
            (rule for rule, paired_storage in pairs if paired_storage == storage),
            key=used.__getitem__,
        )
        used[rule] += 1
        chosen.append((rule, storage))
    chosen += [
        next(pair for pair in pairs if pair[0] == rule) for rule, times in used.items() if not times
    ]
    return pytest.mark.parametrize(("rule", "storage"), chosen)


EVERY = over(PAIRS)
SOME = over(SOME_PAIRS)


def build(rule: str, params: Any, storage: str, **options: Any) -> ng.Optimizer:
    row = RULES[rule]
    return row.make(params, storage=storage, compile=False, **{**row.options, **options})


def kernel_of(rule: str, storage: str) -> tuple[Any, Any]:
    """Return what a printed step is of."""
    optimizer = build(rule, parameters(storage, [(2, 2)]), storage)
    (group,) = optimizer.param_groups
    row = optimizer.kernels.rule_in(group, group["params"][0])  # SGD's depends on its momentum
    return row, STORAGES[storage].with_states(row.stored_states)


def parameters(
    storage: str, shapes: Sequence[Shape] = SHAPES, scale: float = 0.5
) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=generator) * scale for shape in shapes]
    return [nn.Parameter(value.to(getattr(torch, STORAGES[storage].visible))) for value in values]


def narrow(*shape: int) -> nn.Parameter:
    """Return a parameter of ones in bfloat16."""
    return nn.Parameter(torch.ones(shape, dtype=torch.bfloat16))


def every_value(visible: str) -> Tensor:
    """Return all finite values of a 16-bit format."""
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    values = every.view(getattr(torch, visible))
    return values[values.isfinite()]


def step_along(optimizer: torch.optim.Optimizer, value: float) -> None:
    """Step along gradients of one value."""
    for p in parameters_of(optimizer):
        p.grad = torch.full_like(p, value)
    optimizer.step()


@contextmanager
def unchanged(optimizer: ng.Optimizer) -> Iterator[None]:
    """Expect that nothing changes."""
    before = everything(optimizer)
    yield
    assert_same_bits(before, everything(optimizer))


def everything(optimizer: ng.Optimizer) -> dict[str, Tensor]:
    """Visible weights and all that is kept, copied, in the parameters' order."""
    result = {}
    for k, p in enumerate(parameters_of(optimizer)):
        result[f"{k} visible"] = p.detach().clone()
    for k, entry in optimizer.state_dict()["state"].items():
        result |= {f"{k} {name}": value.clone() for name, value in entry.items()}
    return result
