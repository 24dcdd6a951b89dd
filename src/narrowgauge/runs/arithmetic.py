"""The measured arithmetic of a machine, as ``run.toml`` holds it, and what parts two of them.

Measured in ``machine/``, which needs PyTorch; read and compared here without it. Results are short texts, equal where the bits
are::

    [arithmetic.settings]
    torch = "2.13.0+cpu"
    threads = "2"

    [arithmetic.results]
    "sum of rows" = "32 strided sums (sequential), joined irregularly, depth 8 #9ce46445"
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
from narrowgauge.spec.probes import PROBES, VERSIONS, Probe
from narrowgauge.spec.toml_text import load_toml

TABLE = "arithmetic"
"""The table of ``run.toml``."""
UNAVAILABLE = "unavailable"
"""How a result begins where this machine cannot do what the probe measures; such results are not compared."""
_MEASURE = "Measure it on that machine: narrowgauge fingerprint --json > machine.json"


@dataclass(frozen=True)
class Arithmetic:
    """What a machine's arithmetic was measured to be.

    Args:
        settings: versions, processor, threads and switches in force, by name.
        results: by the name of a row of :data:`narrowgauge.spec.probes.PROBES`; those not measured are absent.
    """

    settings: Mapping[str, str] = field(default_factory=dict)
    results: Mapping[str, str] = field(default_factory=dict)

    def to_toml(self) -> dict[str, dict[str, str]]:
        """The table of ``run.toml``, and the object that ``narrowgauge fingerprint --json`` prints."""
        return {"settings": dict(self.settings), "results": dict(self.results)}

    @classmethod
    def from_toml(cls, table: object, where: str) -> Arithmetic:
        """Read the table.

        Args:
            table: as from :meth:`to_toml`.
            where: the file, for messages.
        Raises:
            RecordError: it is no such table.
        Example:
            >>> found = Arithmetic({"threads": "2"}, {"layer norm": "sequential"})
            >>> Arithmetic.from_toml(found.to_toml(), "run.toml") == found
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
class Difference:
    """One property of the arithmetic that differs.

    Args:
        probe: the row of the table; a name that this version does not know has a row without words.
        one, other: the results.
        settings: which settings that may change it differ: name, value there, and value in the other.
    """

    probe: Probe
    one: str
    other: str
    settings: tuple[tuple[str, str, str], ...]

    def text(self) -> str:
        """The difference in one sentence."""
        why = "; ".join(f"{name} {one} and {other}" for name, one, other in self.settings)
        return f"{self.probe.name}: {self.one} and {self.other}" + (f" ({why})" if why else "")


def differences(one: Mapping[str, Any] | Arithmetic, other: Mapping[str, Any] | Arithmetic) -> list[Difference]:
    """What parts two machines, in the order of the table.

    Args:
        one, other: measured arithmetics, or the contents of two ``run.toml``; without the table nothing is compared.
    Returns:
        The probes whose results differ; those measured on one side only are left out, see :func:`not_compared`.
    Example:
        >>> found = differences(
        ...     Arithmetic({"threads": "1"}, {"sum of a tensor": "sequential", "layer norm": "pairwise"}),
        ...     Arithmetic({"threads": "2"}, {"sum of a tensor": "pairwise", "layer norm": "pairwise"}))
        >>> [difference.text() for difference in found]
        ['sum of a tensor: sequential and pairwise (threads 1 and 2)']
    """
    one, other = _arithmetic_in(one), _arithmetic_in(other)
    found = []
    for name in [*PROBES, *sorted(set(one.results) - set(PROBES))]:
        left, right = one.results.get(name, UNAVAILABLE), other.results.get(name, UNAVAILABLE)
        if left != right and not (left.startswith(UNAVAILABLE) or right.startswith(UNAVAILABLE)):
            probe = PROBES.get(name) or Probe(name, "", "", tuple(sorted({*one.settings, *other.settings})), "")
            found.append(Difference(probe, left, right, changed_settings(one, other, probe.settings)))
    return found


def origin(found: list[Difference]) -> str:
    """Where the differences between two machines come from, by the settings that may be why and by what they are.

    Returns:
        ``versions`` where libraries differ; ``sums`` where nothing but orders of additions differs, as with another number of
        threads; ``machine`` where functions or roundings do too, as with other vector instructions; empty without a difference.
    Example:
        >>> one, other = (Arithmetic({"threads": n}, {"sum of a tensor": order}) for n, order in (("1", "a"), ("2", "b")))
        >>> origin(differences(one, other))
        'sums'
    """
    if any(name in VERSIONS for difference in found for name, *_ in difference.settings):
        return "versions"
    if any(not difference.probe.is_sum for difference in found):
        return "machine"
    return "sums" if found else ""


def changed_settings(
    one: Arithmetic, other: Arithmetic, names: tuple[str, ...] = ()
) -> tuple[tuple[str, str, str], ...]:
    """Settings that differ, with both values.

    Args:
        one, other: measured arithmetics.
        names: those to look at; all where empty.
    """
    values = [
        (name, one.settings.get(name, "not set"), other.settings.get(name, "not set"))
        for name in names or dict.fromkeys([*one.settings, *other.settings])
    ]
    return tuple(entry for entry in values if entry[1] != entry[2])


def not_compared(one: Arithmetic, other: Arithmetic) -> list[str]:
    """Probes that were not measured on both sides."""
    both = [{name for name, text in side.results.items() if not text.startswith(UNAVAILABLE)} for side in (one, other)]
    return [name for name in PROBES if not all(name in names for names in both)]


def read_arithmetic(path: str | Path) -> Arithmetic:
    """The arithmetic of the machine of a run, or of a file.

    Args:
        path: a run folder, or a file that ``narrowgauge fingerprint --json`` or a ``run.toml`` wrote.
    Raises:
        RecordError: it cannot be read, or holds no measured arithmetic.
    """
    path = Path(path)
    if path.is_dir():
        content: Any = read_settings(path)
    else:
        with disk_errors(path):
            content = _parsed(path.read_text(encoding="utf-8", errors="replace"), path)
    if isinstance(content, dict) and TABLE in content:
        content = content[TABLE]
    return Arithmetic.from_toml(content, str(path))


def _parsed(text: str, path: Path) -> Any:
    try:
        return json.loads(text) if text.lstrip().startswith("{") else load_toml(text)
    except (ValueError, RecursionError) as error:
        raise RecordError(f"{path} is neither JSON nor TOML: {error}.", _MEASURE) from None


def _arithmetic_in(found: Mapping[str, Any] | Arithmetic) -> Arithmetic:
    if isinstance(found, Arithmetic):
        return found
    return Arithmetic.from_toml(found[TABLE], "run.toml") if TABLE in found else Arithmetic()
