"""The measured arithmetic of a machine in ``run.toml``, and the comparison of two machines.

Two correct machines may add in another order, fuse a multiplication with an addition, or round a
function differently. Each row of ``data/probes.toml`` names one such property.
:mod:`narrowgauge.gauges.arithmetic` measures it. Results are short texts::

    [arithmetic.results]
    "sum of rows" = "bits #9ce46445"
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

TABLE = "arithmetic"
"""The table of ``run.toml``."""
UNAVAILABLE = "unavailable"
"""Prefix of the result if this machine cannot run the probe. Such results are not compared."""


def differences(
    first_run: Mapping[str, Any], second_run: Mapping[str, Any]
) -> dict[str, tuple[str, str]]:
    """Return both results of each probe that differs between two ``run.toml``.

    Skip probes that only one has measured.

    Example:
        >>> one, other = ({TABLE: {"results": {"layer norm": text}}} for text in ("sequential", "pairwise"))
        >>> differences(one, other)
        {'layer norm': ('sequential', 'pairwise')}
    """
    first, second = (_results(run) for run in (first_run, second_run))
    return {
        name: (text, second[name])
        for name, text in first.items()
        if name in second and text != second[name]
    }


def _results(run: Mapping[str, Any]) -> dict[str, str]:
    table = run.get(TABLE)
    results = table.get("results") if isinstance(table, dict) else None
    texts = {name: str(text) for name, text in results.items()} if isinstance(results, dict) else {}
    return {name: text for name, text in texts.items() if not text.startswith(UNAVAILABLE)}
