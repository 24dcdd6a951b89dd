"""What every section of ``gpu.py`` is given: a device, how much to do, and until when.

``--rehearse`` puts the CPU in the place of the GPU, so that each line runs where there is none. Claim: none of its own.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import torch
from peers import reason
from timing import Report, Row, nothing

from narrowgauge.spec.computes import COMPUTES
from narrowgauge.spec.storages import STORAGES

Item = TypeVar("Item")
Tables = Iterator[tuple[str, list[Row]]]
"""What a section of checks makes: titles and rows, each of which says whether it passes."""


@dataclass(frozen=True)
class Extent:
    """How much is done.

    Args:
        storages: that are checked and timed.
        rules: that are checked.
        steps: of each check of an optimizer.
        largest: elements of a tensor in these checks, at most.
        casts: how many distinct ones are checked; ``None`` for all.
        computes: whose products are checked, and that train.
        training_steps: of each of them.
        text: what they train on.
        watched: recipes that gauges watch, and whether the model is compiled.
        copy_bytes: of the copy that shows the bandwidth.
        model: whose tensors are stepped.
        num_small: tensors of the other case that is stepped.
        layers: a set of ``narrow_linear.py``.
        rows: computes of its layers that are timed, the claimed ones first.
        recipes: of whole models that are timed.
        training: ``--model``, ``--batch-size`` and ``--sequence-length`` of ``narrow_training.py``.
    """

    storages: tuple[str, ...]
    rules: tuple[str, ...]
    steps: int
    largest: int
    casts: int | None
    computes: tuple[str, ...]
    training_steps: int
    text: str
    watched: tuple[tuple[str, bool], ...]
    copy_bytes: int
    model: str
    num_small: int
    layers: str
    rows: tuple[str, ...]
    recipes: tuple[str, ...]
    training: tuple[str, str, str]


RULES = ("Adam", "SGD", "Lion", "Muon", "Adafactor", "GaLore")
WATCHED = ("bfloat16/word", "float8-row/word", "float8-delayed/word")
FULL = Extent(
    storages=tuple(STORAGES),
    rules=RULES,
    steps=25,
    largest=1 << 20,
    casts=None,
    computes=("bfloat16", *(name for name in COMPUTES if name != "bfloat16")),
    training_steps=20,
    text="stdlib",
    watched=tuple((recipe, compile) for recipe in WATCHED for compile in (False, True)),
    copy_bytes=1 << 30,
    model="llama-1b",
    num_small=300,
    layers="5b",
    rows=("float8-tensor", "float8-row", "float8-block", "float8-delayed", "mxfp8", "nvfp4", "int8-row"),
    recipes=("bfloat16/word", "float8-tensor/word", "float8-delayed/word", "float8-row/word"),
    training=("llama-1b", "4", "2048"),
)
QUICK = Extent(
    storages=("float32", "word", "compact", "kahan"),
    rules=("Lion", "Muon"),
    steps=11,
    largest=1 << 14,
    casts=2,
    computes=("bfloat16", "int8-row", "float8-row"),
    training_steps=8,
    text=str(Path(__file__).parent),  # half a megabyte of Python
    watched=(("float8-delayed/word", False),),
    copy_bytes=1 << 20,
    model="llama-1m",
    num_small=20,
    layers="quick",
    rows=("int8-row",),
    recipes=("bfloat16/word",),
    training=("llama-1m", "2", "64"),
)
"""Shows that everything runs; measures nothing."""


@dataclass
class Setting:
    """Where a section runs, how much of it, and until when.

    Args:
        device: the GPU, or the CPU that stands for it.
        extent: how much is done.
        report: where notes go.
        minutes: what has not begun after so many is left out, and noted.
    """

    device: torch.device
    extent: Extent
    report: Report
    minutes: float
    began: float = field(default_factory=time.monotonic)

    @property
    def wait(self) -> Callable[[], object]:
        """Waits for the device's work to end."""
        return torch.cuda.synchronize if self.device.type == "cuda" else nothing

    def in_time(self, what: str, items: Iterable[Item]) -> Iterator[Item]:
        """The items, until the minutes are over."""
        given = list(items)
        for place, item in enumerate(given):
            if time.monotonic() - self.began >= 60 * self.minutes:
                left = f"{len(given) - place} of {len(given)}, from {item} on"
                self.report.note(f"{what}: left out after {self.minutes:g} minutes: {left}")
                return
            yield item

    def rows(self, what: str, items: Iterable[Item], make: Callable[[Item], Row]) -> list[Row]:
        """A row for each item in time; one that fails must not keep the others from being checked."""
        made: list[Row] = []
        for item in self.in_time(what, items):
            try:
                made.append(make(item))
            except Exception as error:
                traceback.print_exc()
                made.append({what: str(item), "passes": "NO", "why": reason(error)})
        return made

    def free(self) -> None:
        """Give the device's cached memory back."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
