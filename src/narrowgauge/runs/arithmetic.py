"""The measured arithmetic of a machine: its form in ``run.toml``, and the comparison of two machines.

Two correct machines may differ in their last bits, and so may one machine under two settings. They add in another order, fuse
a multiplication with an addition, or round a function differently. Each row of ``data/probes.toml`` names one such property.
:mod:`narrowgauge.gauges.arithmetic` measures it under the same name, with PyTorch. Reading and comparing needs no torch.
Results are short texts, equal if the bits are::

    [arithmetic.settings]
    torch = "2.13.0+cpu"
    threads = "2"

    [arithmetic.results]
    "sum of rows" = "bits #9ce46445"
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from narrowgauge.errors import RecordError
from narrowgauge.spec.toml import load_data

VERSIONS = ("torch", "mkl", "onednn", "cuda", "cudnn")
"""Settings that are versions of a library."""


@dataclass(frozen=True, slots=True)
class Probe:
    """One property of a machine's arithmetic: a row of ``data/probes.toml``, which explains the fields."""

    name: str
    measures: str
    affects: str
    is_sum: bool = False


PROBES: dict[str, Probe] = {name: Probe(name, **row) for name, row in load_data("probes", "runs").items()}
"""All probes by name, in the order measured."""


TABLE = "arithmetic"
"""The table of ``run.toml``."""
UNAVAILABLE = "unavailable"
"""Prefix of the result if this machine cannot run the probe. Such results are not compared."""


@dataclass(frozen=True)
class Arithmetic:
    """The measured arithmetic of a machine: its active settings, and the result of each measured probe."""

    settings: dict[str, str]
    results: dict[str, str]

    def to_toml(self) -> dict[str, dict[str, str]]:
        """Return the table of ``run.toml``, and the object that ``narrowgauge show arithmetic --json`` prints."""
        return asdict(self)

    @classmethod
    def from_toml(cls, table: object, where: str) -> Arithmetic:
        """Read the table of :meth:`to_toml`; ``where`` names the file in messages.

        Example:
            >>> measured = Arithmetic({"threads": "2"}, {"layer norm": "sequential"})
            >>> Arithmetic.from_toml(measured.to_toml(), "run.toml") == measured
            True
        """
        parts = [table.get(name) for name in ("settings", "results")] if isinstance(table, dict) else [None]
        if not all(isinstance(part, dict) and all(isinstance(text, str) for text in part.values()) for part in parts):
            raise RecordError(f"{where} holds no measured arithmetic that can be read.")
        return cls(*parts)


@dataclass(frozen=True)
class Differences:
    """What differs between two machines.

    Attributes:
        results: both results of each probe that differs, in the order of the table.
        settings: both values of each setting that differs.
    """

    results: dict[str, tuple[str, str]]
    settings: dict[str, tuple[str, str]]

    @property
    def origin(self) -> str:
        """Classify the cause.

        ``versions``: libraries differ. ``sums``: only orders of additions differ, as with another number of threads.
        ``machine``: functions or roundings differ too, as with other vector instructions. Empty: no result differs.
        """
        if not self.results:
            return ""
        if not self.settings.keys().isdisjoint(VERSIONS):
            return "versions"
        return "sums" if all(name in PROBES and PROBES[name].is_sum for name in self.results) else "machine"


def differences(first: Arithmetic, second: Arithmetic) -> Differences:
    """Compare two machines. Skip probes that only one of them has measured."""
    results = _pairs(first.results, second.results, UNAVAILABLE)
    results = {n: pair for n, pair in results.items() if not any(text.startswith(UNAVAILABLE) for text in pair)}
    return Differences(
        _unequal({name: results[name] for name in [*PROBES, *results] if name in results}),
        _unequal(_pairs(first.settings, second.settings, "not set")),
    )


def _pairs(first: dict[str, str], second: dict[str, str], absent: str) -> dict[str, tuple[str, str]]:
    return {name: (first.get(name, absent), second.get(name, absent)) for name in [*first, *second]}


def _unequal(pairs: dict[str, tuple[str, str]]) -> dict[str, tuple[str, str]]:
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def arithmetic_of(run: Mapping[str, Any]) -> Arithmetic:
    """Return the arithmetic in the content of a ``run.toml``; an empty one if it has none."""
    return Arithmetic.from_toml(run[TABLE], "run.toml") if TABLE in run else Arithmetic({}, {})
