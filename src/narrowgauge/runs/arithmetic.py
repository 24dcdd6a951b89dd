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

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from narrowgauge.errors import RecordError
from narrowgauge.runs.atomic_io import disk_errors
from narrowgauge.runs.record import read_settings
from narrowgauge.spec.toml import load_data, load_toml

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


# ── results of two machines ────────────────────────────────────────────────────────────────────────────────────────────


TABLE = "arithmetic"
"""The table of ``run.toml``."""
UNAVAILABLE = "unavailable"
"""Prefix of the result if this machine cannot run the probe. Such results are not compared."""
_MEASURE = "Measure it on that machine: narrowgauge show arithmetic --json > machine.json"


@dataclass(frozen=True)
class Arithmetic:
    """The measured arithmetic of a machine: its active settings, and the result of each measured probe."""

    settings: Mapping[str, str] = field(default_factory=dict)
    results: Mapping[str, str] = field(default_factory=dict)

    def to_toml(self) -> dict[str, dict[str, str]]:
        """Return the table of ``run.toml``, and the object that ``narrowgauge show arithmetic --json`` prints."""
        return {"settings": dict(self.settings), "results": dict(self.results)}

    @classmethod
    def from_toml(cls, table: object, where: str) -> Arithmetic:
        """Read the table of :meth:`to_toml`; ``where`` names the file in messages.

        Example:
            >>> measured = Arithmetic({"threads": "2"}, {"layer norm": "sequential"})
            >>> Arithmetic.from_toml(measured.to_toml(), "run.toml") == measured
            True
        """
        parts = [table.get(name) for name in ("settings", "results")] if isinstance(table, dict) else []
        texts = [
            part for part in parts if isinstance(part, dict) and all(isinstance(text, str) for text in part.values())
        ]
        if len(texts) != 2:
            raise RecordError(f"{where} holds no measured arithmetic that can be read.", _MEASURE)
        return cls(*texts)


@dataclass(frozen=True)
class ArithmeticDifference:
    """One property of the arithmetic that differs between two machines.

    Args:
        probe: the row of the table. A name unknown to this version gets a row without words.
        settings: all settings that differ: name, first value, second value.
    """

    probe: Probe
    one: str
    other: str
    settings: tuple[tuple[str, str, str], ...]


def differences(
    first: Mapping[str, Any] | Arithmetic, second: Mapping[str, Any] | Arithmetic
) -> list[ArithmeticDifference]:
    """Return the probes whose results differ between two machines, in the order of the table.

    Skip probes that only one side has measured.

    Args:
        first, second: measured arithmetics, or the contents of two ``run.toml``. Without the table nothing is compared.
    """
    first, second = _arithmetic_in(first), _arithmetic_in(second)
    settings = changed_settings(first, second)
    return [
        ArithmeticDifference(
            PROBES.get(name) or Probe(name, "", ""), first.results[name], second.results[name], settings
        )
        for name in compared(first, second)
        if first.results[name] != second.results[name]
    ]


def compared(first: Arithmetic, second: Arithmetic) -> list[str]:
    """Return the probes measured on both sides, probes of the table first."""
    measured = [
        {name for name, text in side.results.items() if not text.startswith(UNAVAILABLE)} for side in (first, second)
    ]
    return [
        name
        for name in [*PROBES, *sorted(set(first.results) - set(PROBES))]
        if all(name in names for names in measured)
    ]


def origin(parted: list[ArithmeticDifference]) -> str:
    """Classify the cause of differences between two machines, by their settings and probes.

    ``versions``: libraries differ. ``sums``: only orders of additions differ, as with another number of threads.
    ``machine``: functions or roundings differ too, as with other vector instructions. Empty: no difference.
    """
    if any(name in VERSIONS for difference in parted for name, *_ in difference.settings):
        return "versions"
    if any(not difference.probe.is_sum for difference in parted):
        return "machine"
    return "sums" if parted else ""


def changed_settings(first: Arithmetic, second: Arithmetic) -> tuple[tuple[str, str, str], ...]:
    """Return the settings that differ: name and both values."""
    values = [
        (name, first.settings.get(name, "not set"), second.settings.get(name, "not set"))
        for name in dict.fromkeys([*first.settings, *second.settings])
    ]
    return tuple(entry for entry in values if entry[1] != entry[2])


def read_arithmetic(path: str | Path) -> Arithmetic:
    """Read the measured arithmetic from a run folder, a ``run.toml``, or ``narrowgauge show arithmetic --json``."""
    path = Path(path)
    if path.is_dir():
        content: Any = read_settings(path)
    else:
        with disk_errors(path):
            text = path.read_text(encoding="utf-8", errors="replace")
        try:
            content = json.loads(text) if text.lstrip().startswith("{") else load_toml(text)
        except (ValueError, RecursionError) as error:
            raise RecordError(f"{path} is neither JSON nor TOML: {error}.", _MEASURE) from None
    if isinstance(content, dict) and TABLE in content:
        content = content[TABLE]
    return Arithmetic.from_toml(content, str(path))


def _arithmetic_in(content: Mapping[str, Any] | Arithmetic) -> Arithmetic:
    if isinstance(content, Arithmetic):
        return content
    return Arithmetic.from_toml(content[TABLE], "run.toml") if TABLE in content else Arithmetic()
