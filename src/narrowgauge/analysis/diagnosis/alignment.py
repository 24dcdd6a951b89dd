"""Two runs side by side: what they were given, and the first step and tensor in which they part.

Numbers of a record are written with all their digits, so two runs that computed the same have the same rows. The first row that
differs names the step; its first column that differs names the *stage* of the step: the learning rate, the loss, the gradient
norm, the skip. Where both runs recorded fingerprints (``--fingerprints-every``), the first entry that differs names the tensor,
since entries stand in the order in which a step makes them. Rows are aligned by step; where the tokens of a step differ, no
step of one is a step of the other: the difference of settings is then the answer, and losses are compared at equal tokens too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from narrowgauge.analysis.diagnosis.envelope import is_rounding, roundoff
from narrowgauge.analysis.diagnosis.equal_tokens import EqualTokens, at_equal_tokens, have_other_tokens
from narrowgauge.analysis.diagnosis.given import Difference, differences
from narrowgauge.analysis.diagnosis.prints import beyond, by_step, common_steps, partings
from narrowgauge.analysis.diagnosis.replayed import Replayed
from narrowgauge.analysis.diagnosis.stages import COLUMNS, STAGES, Parting
from narrowgauge.runs.record import Run
from narrowgauge.runs.schema import Row


@dataclass(frozen=True, slots=True)
class Alignment:
    """Two runs, aligned.

    Args:
        differences: what they were not given alike.
        parting: where they part; ``None`` where all that both recorded is equal.
        beyond: where they part is only rounding: the first tensor that later differs by more than rounding has grown to.
        rounded: where they part first, by rounding, if ``parting`` is a later place beyond it.
        roundoff: unit roundoff of the tensors between two matmuls.
        num_common: steps that both recorded.
        is_complete: both are finished, and the hashes of their final weights are known and equal.
        has_prints: both recorded fingerprints, of at least one common step.
        at_tokens: the losses at equal tokens, where steps have not equally many.
        replayed: what replays of both say, where there were any.
        notes: what the records do not hold.
    """

    differences: tuple[Difference, ...]
    parting: Parting | None
    num_common: int
    beyond: Parting | None = None
    rounded: Parting | None = None
    roundoff: float = 0.0
    is_complete: bool = False
    has_prints: bool = False
    at_tokens: EqualTokens | None = None
    replayed: Replayed | None = None
    notes: tuple[str, ...] = field(default_factory=tuple)

    def is_rounding(self, parting: Parting) -> bool | None:
        """Whether rounding explains a difference, by the measured envelope where there is one; ``None`` without a size."""
        envelope = self.replayed.envelope if self.replayed is not None else None
        if envelope is not None and (envelope.step, envelope.tensor) == (parting.step, parting.tensor):
            return None if math.isnan(parting.relative) else envelope.holds(parting.relative)
        return is_rounding(parting.relative, parting.numel, self.roundoff)


def align(one: Run, other: Run, replayed: Replayed | None = None) -> Alignment:
    """Align two runs by step.

    Args:
        one, other: their records, finished or not.
        replayed: what replays of both say.
    Returns:
        What differs first.
    """
    rows = [{int(row["step"]): row for row in run.steps} for run in (one, other)]
    common = sorted(rows[0].keys() & rows[1].keys())
    prints = [by_step(run) for run in (one, other)]
    u = roundoff(one, other)
    first = min(
        [*_columns(rows, common), *islice(partings(prints), 1), *_stopped(one, other)], key=_order, default=None
    )
    small = first is not None and is_rounding(first.relative, first.numel, u)
    ends = [(run.summary or {}).get("weights_fingerprint") for run in (one, other)]
    if first is None and None not in ends and ends[0] != ends[1]:
        first = Parting(common[-1] if common else 0, "update")
    has_other = have_other_tokens(one, other)
    at_tokens = at_equal_tokens(one, other) if has_other else None
    return Alignment(
        differences=tuple(differences(one.run, other.run)),
        parting=first,
        num_common=len(common),
        beyond=next(beyond(prints, u), None) if small else None,
        roundoff=u,
        is_complete=None not in ends and ends[0] == ends[1],
        has_prints=bool(common_steps(prints)),
        at_tokens=at_tokens,
        replayed=replayed,
        notes=tuple(_notes(one, other, common, has_other, at_tokens)),
    )


def _columns(rows: list[dict[int, Row]], common: list[int]) -> Iterator[Parting]:
    """The first step whose rows differ, by its first column that does."""
    for step in common:
        first, second = rows[0][step], rows[1][step]
        for column, stage in COLUMNS.items():
            values = first.get(column), second.get(column)
            if values[0] is not None and values[1] is not None and not same_value(*values):
                tokens = int((first.get("tokens") or 0) // max(1, step))
                known = (math.nan, math.nan) if stage == "tokens" else (float(values[0]), float(values[1]))
                yield Parting(step, stage, values=known, numel=tokens)
                return


def _stopped(one: Run, other: Run) -> Iterator[Parting]:
    """Where one of the two stopped because its ranks found damage, before the record shows any."""
    found = [next((event for event in run.events if event.get("kind") == "corruption"), None) for run in (one, other)]
    if (found[0] is None) == (found[1] is None):
        return
    event = found[0] or found[1] or {}
    message, tensor, step = str(event.get("message", "")), str(event.get("tensor") or ""), int(event.get("step") or 0)
    state, _, name = tensor.rpartition(" of ")
    rank = event.get("rank")
    ranks = (rank,) if isinstance(rank, int) else ()
    check = event.get("detector")
    if check == "rest":
        yield Parting(
            step + 1, "held", f"held:{state}:{name}" if state else f"held:{tensor}", ranks=ranks, said=message
        )
    elif check == "recomputation":
        yield Parting(step + 1, "grad", f"grad:{tensor}", ranks=ranks, said=message)
    elif check == "replicas":
        yield Parting(step, "update", ranks=ranks, said=message)


def same_value(one: Any, other: Any) -> bool:
    """Whether two recorded values are equal; NaN is, and so are checksums of different lengths, which two versions made."""
    if isinstance(one, str) and isinstance(other, str) and len(one) != len(other):
        return True  # they say nothing of each other
    return bool(one == other) or (one != one and other != other)


def _order(parting: Parting) -> tuple[int, int, bool]:
    """The earlier step comes first, then the earlier stage; of two such, the one that names a tensor."""
    return parting.step, list(STAGES).index(parting.stage), not parting.tensor


def _notes(one: Run, other: Run, common: list[int], has_other: bool, at_tokens: EqualTokens | None) -> Iterator[str]:
    lengths = [len(run.steps) for run in (one, other)]
    if not common:
        yield "the two records have no step in common"
    elif lengths[0] != lengths[1]:
        yield f"they recorded {lengths[0]} and {lengths[1]} steps, of which {len(common)} are common"
    if has_other:
        compared = (
            "nowhere have both seen equally many" if at_tokens is None else "they are compared at equal tokens too"
        )
        yield f"a step of one has not as many tokens as a step of the other: {compared}"
