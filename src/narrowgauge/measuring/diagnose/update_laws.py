"""Laws of what formats keep of the updates."""

import math
from collections import defaultdict, deque
from collections.abc import Sequence
from statistics import fmean, median, stdev

from narrowgauge.measuring.diagnose.step_metrics import Emit, Law, reads
from narrowgauge.measuring.kinds import KINDS
from narrowgauge.spec.significance import MIN_EDQ

ALL = "all weights"
"""The tensor of a reading of the audits."""
LATE = 100
"""Audits that a late EDQ is read from, at most: a run of a million steps has 100,000."""
ERRORS = 4.0
"""Standard errors below the bound: of 48 runs of ``stochastic`` and ``word`` at rates of 1e-7 to 1e-3,
three seeds, none was accused."""


def late(audits: Sequence[float]) -> float:
    """Return the median of the last tenth of the audits, of at most the last :data:`LATE`: large first
    steps would dominate a sum.

    Example:
        >>> late([1.0] * 3 + [0.5] * 3), late([0.0] * 100_000 + [1.0] * 60)
        (0.5, 1.0)
    """
    return median(audits[-max(3, min(LATE, len(audits) // 10)) :])


def loses_updates(edq: float, error: float = 0.0) -> bool:
    """Return whether an EDQ says that updates are lost, beyond chance: for laws, tables and pages.

    Args:
        error: its standard error. Random rounding moves the EDQ of a few elements far.

    Example:
        >>> loses_updates(0.3), loses_updates(0.3, 0.2)
        (True, False)
    """
    return edq + ERRORS * error < MIN_EDQ


@reads("edq", "edq_error stalled", least=3)
def audits(emit: Emit) -> Law:
    """Read tensors whose audits say that updates are lost, or else all weights together, if the late
    audits say so.
    """
    stalled: dict[str, float] = {}
    begun = 0
    shares = []
    errors = []
    since = 0
    while True:
        step = yield
        if step.edq is not None:
            shares.append(step.edq)
            errors.append(step.edq_error or 0.0)
            if not loses_updates(step.edq, errors[-1]):
                since = 0
            elif not since:
                since = step.step
        stalled |= step.stalled or {}
        if stalled:
            begun = begun or step.step
            names = sorted(stalled, key=stalled.__getitem__)
            emit("stored-share", names, stalled[names[0]], 1.0, step=begun)
        elif len(shares) >= 3 and loses_updates(late(shares), late(errors)):
            emit("stored-share", ALL, late(shares), 1.0, step=since)


@reads("stored", "behind", least=5)
def lost_updates(emit: Emit) -> Law:
    """Read stored shares of updates that are below their bound with three standard errors, of weights that
    an optimizer steps, and of those with masters apart.
    """
    shares: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=20))
    low: dict[str, float] = {}
    since = dict.fromkeys(("stored-share", "masters-apart"), 0)
    masters = set[str]()
    while True:
        step = yield
        masters.update(step.behind or ())
        for name, value in (step.stored or {}).items():
            values = shares[name]
            values.append(value)
            low.pop(name, None)
            if len(values) < 5:
                continue
            error = stdev(values) / math.sqrt(len(values))
            if fmean(values) + 3 * error < 1 - KINDS["stored-share"].bound:
                low[name] = fmean(values)
        for kind in since:
            is_of_masters = kind == "masters-apart"
            names = [name for name in low if (name in masters) == is_of_masters]
            if names:
                names.sort(key=low.__getitem__)
                since[kind] = since[kind] or step.step
                emit(kind, names, low[names[0]], 1.0, step=since[kind])
