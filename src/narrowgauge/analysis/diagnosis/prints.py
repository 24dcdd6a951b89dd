"""Fingerprints of two runs side by side: the first tensor and rank that differ, step by step.

Entries stand in the order in which a step makes them, so the first that differs is where the step went another way. Where both
runs trained on equally many ranks, their hashes by rank say whether one rank alone did. And where the ranks of one run do not
agree on what they must hold alike, that run parts from itself, whatever the other one did.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from statistics import median

from narrowgauge.analysis.diagnosis.envelope import is_beyond
from narrowgauge.analysis.diagnosis.stages import KINDS, STAGES, Parting, relative_difference
from narrowgauge.runs.odd_ranks import parted_in
from narrowgauge.runs.record import Run
from narrowgauge.runs.schema import Row

Prints = list[dict[int, Row]]
"""Of two runs: by step, the row of ``fingerprints.jsonl``."""

_AFTER, _STANDS_OUT = 3, 3.0
"""Steps after the first difference in which a tensor that differs this many times as much as its kind stands out again."""


def by_step(run: Run) -> dict[int, Row]:
    """The first row of fingerprints of each step; a resume writes its checkpoint's once more."""
    found: dict[int, Row] = {}
    for row in run.fingerprints:
        found.setdefault(int(row["step"]), row)
    return found


def common_steps(prints: Prints) -> list[int]:
    """The steps that both have recorded."""
    return sorted(prints[0].keys() & prints[1].keys())


def partings(prints: Prints) -> Iterator[Parting]:
    """Each recorded step in which the two runs differ, by the first entry that does."""
    equal: int | None = None
    for step in common_steps(prints):
        rows = prints[0][step], prints[1][step]
        found = [each for each in (_of_tensors(step, *rows), *_of_ranks(step, *rows)) if each is not None]
        if not found:
            equal = step
            continue
        first = min(found, key=_stage)
        alike = [each for each in found if each.stage == first.stage]
        joined = replace(
            first,
            tensor=next((each.tensor for each in alike if each.tensor), ""),
            ranks=next((each.ranks for each in alike if each.ranks), ()),
            said=next((each.said for each in alike if each.said), ""),
        )
        yield replace(joined, equal_until=equal, recurs=_recurs(prints, joined))


def _stage(parting: Parting) -> int:
    return list(STAGES).index(parting.stage)


def _of_tensors(step: int, one: Row, other: Row) -> Parting | None:
    """By the fingerprints of whole tensors."""
    first, second = one["tensors"], other["tensors"]
    held = [key for key in {**first, **second} if key.startswith("held:") and (key in first) != (key in second)]
    if held:
        entry = (first if held[0] in first else second)[held[0]]
        return Parting(step, "held", held[0], numel=int(entry[2]), others=(len(held) - 1, len(held)))
    differing = (key for key in first if key in second and first[key][0] != second[key][0])
    key = next(differing, None)
    return None if key is None else parting_at(step, key, one, other)


def parting_at(step: int, key: str, one: Row, other: Row) -> Parting:
    """The parting at one entry of a step."""
    first, second = one["tensors"], other["tensors"]
    shared = [name for name in first if name in second]
    differing = {name for name in shared if first[name][0] != second[name][0]}
    kind = key.partition(":")[0]
    alike = [name for name in shared if name.startswith(f"{kind}:")]
    return Parting(
        step,
        "start" if step == 0 else KINDS[kind],
        key,
        (first[key][1], second[key][1]),
        0 if kind == "tokens" else int(first[key][2]),  # whole numbers are not rounded
        (sum(name in differing for name in alike) - 1, len(alike)),
        sum(name not in differing for name in shared[shared.index(key) + 1 :]),
    )


def _of_ranks(step: int, one: Row, other: Row) -> Iterator[Parting]:
    """By the hashes of each rank's own part, and by what the ranks of one of the two do not agree on."""
    first, second = one.get("ranks") or {}, other.get("ranks") or {}
    for kind, stage in KINDS.items():
        mine, its = first.get(kind), second.get(kind)
        if mine is None or its is None or len(mine) != len(its):
            continue
        odd = tuple(rank for rank, (here, there) in enumerate(zip(mine, its, strict=True)) if here != there)
        if odd:
            # Where all differ, the layouts may: then a rank's part is another part.
            if len(odd) < len(mine):
                known = (mine[odd[0]], its[odd[0]]) if kind == "clip" else (math.nan, math.nan)
                yield Parting(step, "start" if step == 0 else stage, values=known, ranks=odd)
            break
    said = [parted_in(row) for row in (one, other)]
    if bool(said[0][0]) != bool(said[1][0]):
        key, odd, words = said[0] if said[0][0] else said[1]
        yield Parting(step, "start" if step == 0 else KINDS[key.partition(":")[0]], key, ranks=odd, said=words)


def _recurs(prints: Prints, parting: Parting) -> bool | None:
    """Whether a gradient that alone differs stands out in the steps after too: code is wrong again, and one bit is not."""
    kind = parting.tensor.partition(":")[0]
    if kind != "grad" or parting.others[0] > 0:
        return None
    later = [step for step in common_steps(prints) if parting.step < step <= parting.step + _AFTER]
    seen = []
    for step in later:
        found = relatives(prints, step).get(kind, {})
        others = [relative for key, relative in found.items() if key != parting.tensor]
        if parting.tensor in found and others:
            seen.append(found[parting.tensor] > _STANDS_OUT * median(others))
    return None if not seen else 2 * sum(seen) > len(seen)


def beyond(prints: Prints, u: float) -> Iterator[Parting]:
    """The tensors that suddenly differ by more than rounding, where the step before was recorded too, by step.

    Args:
        prints: of two runs.
        u: unit roundoff.
    """
    for before, step in pairwise(common_steps(prints)):
        if step != before + 1 or before == 0:  # nothing but weights is recorded before the first step
            continue
        rows = prints[0][step], prints[1][step]
        # The largest of all kinds: what differs in a gradient is in an output after the next update.
        level = max((each for found in relatives(prints, before).values() for each in found.values()), default=0.0)
        for found in relatives(prints, step).values():
            for key, relative in found.items():
                if is_beyond(relative, int(rows[0]["tensors"][key][2]), u, level):
                    yield parting_at(step, key, *rows)
        yield from (each for each in _of_ranks(step, *rows) if each.said)


def relatives(prints: Prints, step: int) -> dict[str, dict[str, float]]:
    """By kind, how much the norm of each tensor differs in a step; tokens have none to compare."""
    first, second = prints[0][step]["tensors"], prints[1][step]["tensors"]
    found: dict[str, dict[str, float]] = {}
    for key, entry in first.items():
        if key in second and not key.startswith("tokens:"):
            found.setdefault(key.partition(":")[0], {})[key] = relative_difference(entry[1], second[key][1])
    return found
