"""The first difference of two runs: the stage of a step, the tensor and the rank, by the fingerprints that both recorded.

A step reads tokens, computes outputs, a loss and gradients, clips them, and updates weights and moments. Each column of a record
and each kind of fingerprint belongs to one stage, so the first that differs says how far into the step the two runs were equal.
Fingerprints are in the order in which a step makes them, so the first that differs is where the step went another way. Where
both runs trained on equally many ranks, their hashes by rank say whether one rank alone did. And where the ranks of one run
disagree on what they must hold in common, that run is at fault, whatever the other one did.

Rounding carries a value only so far. A norm of n elements, each rounded independently with unit roundoff u, moves by about u/√n,
and so does a mean over n tokens. From step to step differences grow, since training amplifies them, but not by much in one step:
a tensor that suddenly differs far more than any did in the step before is off for another reason than the sums of earlier steps.

Source: the expected error of n independent roundings (Higham 2002, section 2.8); envelopes in place of one tolerance: TTrace
(2506.09280).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median
from typing import Any

from narrowgauge.errors import NarrowgaugeError
from narrowgauge.runs.fingerprint_rows import parted_in
from narrowgauge.runs.record import Run
from narrowgauge.runs.schema import Row
from narrowgauge.spec.formats import FORMATS
from narrowgauge.spec.notation import parse_value

STAGES: dict[str, str] = {
    "start": "the weights before the first step",
    "held": "a weight that changed between two steps",
    "tokens": "the tokens of the step",
    "output": "the forward pass",
    "loss": "the loss",
    "grad": "the gradients",
    "rate": "the learning rate",
    "norm": "the gradient norm",
    "skip": "whether the update was applied",
    "clip": "the factor that clips the gradients",
    "update": "the update of weights and moments",
    "evaluation": "the evaluation",
}
"""The stages of a step in the order in which they come, each with what differs there."""

KINDS: dict[str, str] = {
    "held": "held", "tokens": "tokens", "output": "output", "sent": "grad", "grad": "grad", "clip": "clip",
    "weight": "update", "exp_avg": "update", "exp_avg_sq": "update", "state": "update",
}  # fmt: skip
"""The stage of each kind of fingerprint; what a rank sent into the sum of the gradients is recorded by rank alone."""

COLUMNS: dict[str, str] = {
    "batch_crc": "tokens", "loss": "loss", "lr": "rate", "grad_norm": "norm", "loss_scale": "skip", "skipped": "skip",
}  # fmt: skip
"""The columns of a step's row that are compared, in the order of the stages; times and bytes differ in any two runs."""


@dataclass(frozen=True, slots=True)
class FirstDifference:
    """Where two runs first differ.

    Args:
        stage: a key of :data:`STAGES`, the first of the step that is known to differ.
        tensor: the first fingerprint that differs, as ``KIND:NAME``; empty where none was recorded at that step.
        values: the column's two values, or the tensor's two norms.
        numel: the tensor's elements; of a column, the tokens of the step; 0 where nothing is rounded.
        others: how many more fingerprints of the same kind differ in that step, and how many there are.
        same_after: entries of the same step, after the first that differs, that do not differ.
        equal_until: the last step whose fingerprints are all equal; ``None`` where none are.
        ranks: the only ranks that differ from the other run, or from the other ranks; empty where all do, or it is not known.
        said: what the ranks of one run disagree on, in words; empty where they agree.
        recurs: whether the tensor, the only one that differs, stands out in the next steps too, or the same run has a change
            between two steps again; ``None`` where they were not recorded, or do not tell.
        lasts: it differs as much in the next steps, whatever the others do.
        only_in: 0 or 1: the run that alone has this tensor, or change between two steps; ``None``: both have it.
        again: of a change between two steps: before how many later steps the same run has another, and of how many that is known.
    """

    step: int
    stage: str
    tensor: str = ""
    values: tuple[float, float] = (math.nan, math.nan)
    numel: int = 0
    others: tuple[int, int] = (0, 0)
    same_after: int = 0
    equal_until: int | None = None
    ranks: tuple[int, ...] = ()
    said: str = ""
    recurs: bool | None = None
    lasts: bool = False
    only_in: int | None = None
    again: tuple[int, int] = (0, 0)

    @property
    def relative(self) -> float:
        return relative_difference(*self.values)


def relative_difference(one: float, other: float) -> float:
    """The difference of two values over the larger magnitude; NaN where one is.

    Example:
        >>> relative_difference(2.0, 2.5), relative_difference(0.0, 0.0)
        (0.2, 0.0)
    """
    largest = max(abs(one), abs(other))
    return abs(one - other) / largest if largest else 0.0


# ── how far rounding alone carries a value ───────────────────────────────────────────────────────────────────────────────

ENVELOPE = 32.0
"""How many times the expected rounding of a norm still counts as rounding: roundings are not independent."""
LEAST = 2.0**-20
"""A relative difference that always counts as rounding, eight spacings of float32: losses and norms are sums in float32, whose
errors do not average out. Other orders of the sums of a float32 model changed losses and norms by up to 1.4e-7."""
GROWTH = 30.0
"""Factor within which the largest difference of any tensor grows in one step; measured on tiny models: below 6."""


def roundoff(*runs: Run) -> float:
    """Unit roundoff of the tensors between two matmuls, the largest of some runs; bfloat16's where a record does not say."""
    return max(max(FORMATS[name].epsilon for name in _formats_of(run)) / 2 for run in runs)


def _formats_of(run: Run) -> tuple[str, ...]:
    """The formats between two matmuls: those of the recipe, else those that the graph of a forward pass had."""
    with suppress(NarrowgaugeError, KeyError, AttributeError):
        recipe = parse_value(run.run.get("config", {}).get("recipe", ""))
        return recipe.compute.dtype, recipe.storage.visible
    model = run.run.get("model")
    if isinstance(model, dict) and not model.get("unseen"):
        names = tuple(str(model.get("formats", "")).split(", "))
        if all(name in FORMATS for name in names):
            return names
    return ("bfloat16",)


def rounding_of(numel: int, u: float) -> float:
    """The relative difference up to which a norm or a mean of ``numel`` values counts as rounded differently.

    Example:
        >>> rounding_of(1024, 2.0**-8)
        0.00390625
    """
    return max(ENVELOPE * u / math.sqrt(numel), LEAST)


def is_rounding(relative: float, numel: int, u: float) -> bool | None:
    """Whether a difference is as small as rounding; ``None`` where its size, or that of the tensor, is not known."""
    return None if math.isnan(relative) or numel <= 0 else relative <= rounding_of(numel, u)


def is_beyond(relative: float, numel: int, u: float, before: float) -> bool:
    """Whether the norm of a tensor differs by more than rounding, and than rounding of earlier steps can have grown to.

    ``before`` is the largest difference of any tensor in the step before; where it is 0, nothing has grown from it.
    """
    return before > 0 and relative > max(rounding_of(max(1, numel), u), GROWTH * before)


# ── fingerprints of two runs ─────────────────────────────────────────────────────────────────────────────────────────────

Fingerprints = tuple[dict[int, Row], dict[int, Row]]
"""Of two runs: by step, the row of ``fingerprints.jsonl``."""

_AFTER, _STANDS_OUT = 3, 3.0
"""Steps after the first difference in which a tensor may stand out again: it differs so many times as much as its kind."""
_AS_MUCH, _GONE, _LARGE = 0.3, 0.1, 0.3
"""Shares of a first difference: from the one on it is there again, below the other it is gone; from the third, relative to the
tensor, all that follows a single event may be as large."""
_SHARED = 0.5
"""The least share of a kind's tensors that both runs have for the others to be an answer: else they are named otherwise."""


def by_step(run: Run) -> dict[int, Row]:
    """The first row of fingerprints of each step; a resume writes its checkpoint's once more."""
    found: dict[int, Row] = {}
    for row in run.fingerprints:
        found.setdefault(int(row["step"]), row)
    return found


def common_steps(fingerprints: Fingerprints) -> list[int]:
    return sorted(fingerprints[0].keys() & fingerprints[1].keys())


def differing_steps(fingerprints: Fingerprints) -> Iterator[FirstDifference]:
    """Each recorded step in which the two runs differ, by the first entry that does."""
    equal: int | None = None
    for step in common_steps(fingerprints):
        rows = fingerprints[0][step], fingerprints[1][step]
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
        joined = replace(joined, equal_until=equal, again=_held_again(fingerprints, joined))
        recurs, lasts = _next_steps(fingerprints, joined)
        yield replace(joined, recurs=recurs, lasts=lasts)


def _stage(difference: FirstDifference) -> int:
    return list(STAGES).index(difference.stage)


def _of_tensors(step: int, one: Row, other: Row) -> FirstDifference | None:
    first, second = one["tensors"], other["tensors"]
    held = _held_in_one(first, second)
    if held:
        only_in = 0 if held[0] in first else 1
        numel = int((first, second)[only_in][held[0]][2])
        return FirstDifference(step, "held", held[0], numel=numel, others=(len(held) - 1, len(held)), only_in=only_in)
    differing = next((key for key in first if key in second and first[key][0] != second[key][0]), None)
    lacking = _of_one_run(step, first, second)
    if lacking is not None and (differing is None or _comes_before(lacking, differing)):
        return lacking
    return None if differing is None else difference_at(step, differing, one, other)


def _held_in_one(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
    """What one run alone found changed between two steps."""
    return [key for key in {**first, **second} if key.startswith("held:") and (key in first) != (key in second)]


def _of_one_run(step: int, first: Mapping[str, Any], second: Mapping[str, Any]) -> FirstDifference | None:
    """The first tensor that only one of the runs has, of a kind that both recorded: a part of the model, or a gradient."""
    for kind, stage in KINDS.items():
        names = [{key for key in each if key.startswith(f"{kind}:")} for each in (first, second)]
        lacking = names[0] ^ names[1]
        if kind in ("held", "tokens") or not lacking or len(names[0] & names[1]) < _SHARED * len(names[0] | names[1]):
            continue
        key = next(key for key in (*first, *second) if key in lacking)
        only_in = 0 if key in first else 1
        entry = (first, second)[only_in][key]
        return FirstDifference(
            step,
            "start" if step == 0 else stage,
            key,
            numel=int(entry[2]),
            others=(len(lacking) - 1, len(lacking)),
            only_in=only_in,
        )
    return None


def _comes_before(lacking: FirstDifference, key: str) -> bool:
    """Whether a tensor that one run lacks is of no later stage than one that differs: its absence explains that."""
    kinds = list(KINDS)
    return kinds.index(lacking.tensor.partition(":")[0]) <= kinds.index(key.partition(":")[0])


def difference_at(step: int, key: str, one: Row, other: Row) -> FirstDifference:
    first, second = one["tensors"], other["tensors"]
    shared = [name for name in first if name in second]
    differing = {name for name in shared if first[name][0] != second[name][0]}
    kind = key.partition(":")[0]
    alike = [name for name in shared if name.startswith(f"{kind}:")]
    return FirstDifference(
        step,
        "start" if step == 0 else KINDS[kind],
        key,
        (first[key][1], second[key][1]),
        0 if kind == "tokens" else int(first[key][2]),  # whole numbers are not rounded
        (sum(name in differing for name in alike) - 1, len(alike)),
        sum(name not in differing for name in shared[shared.index(key) + 1 :]),
    )


def _of_ranks(step: int, one: Row, other: Row) -> Iterator[FirstDifference]:
    """By the hashes of what each rank holds itself, and by what the ranks of one of the two runs disagree on."""
    first, second = one.get("ranks") or {}, other.get("ranks") or {}
    for kind, stage in KINDS.items():
        mine, its = first.get(kind), second.get(kind)
        if mine is None or its is None or len(mine) != len(its):
            continue
        odd = tuple(rank for rank, (here, there) in enumerate(zip(mine, its, strict=True)) if here != there)
        if odd:
            # Where all differ, the layouts may too: then a rank holds another shard.
            if len(odd) < len(mine):
                known = (mine[odd[0]], its[odd[0]]) if kind == "clip" else (math.nan, math.nan)
                yield FirstDifference(step, "start" if step == 0 else stage, values=known, ranks=odd)
            break
    said = [parted_in(row) for row in (one, other)]
    if bool(said[0][0]) != bool(said[1][0]):
        key, odd, words = said[0] if said[0][0] else said[1]
        yield FirstDifference(step, "start" if step == 0 else KINDS[key.partition(":")[0]], key, ranks=odd, said=words)


def _held_again(fingerprints: Fingerprints, difference: FirstDifference) -> tuple[int, int]:
    """Before how many later steps a run alone changes something again, of those whose step before was recorded, too."""
    if difference.stage != "held" or difference.only_in is None:
        return 0, 0
    pairs = [(before, step) for before, step in pairwise(common_steps(fingerprints)) if step == before + 1]
    later = [[each[step]["tensors"] for each in fingerprints] for _, step in pairs if step > difference.step]
    again = [any(key in both[difference.only_in] for key in _held_in_one(*both)) for both in later]
    return sum(again), len(again)


def _next_steps(fingerprints: Fingerprints, difference: FirstDifference) -> tuple[bool | None, bool]:
    """Whether the only tensor that differs stands out in the next steps too, and whether it differs there as much as it did.

    Wrong code acts again, and a flipped bit does not. Code that is wrong in every layer makes none stand out.
    """
    kind, size = difference.tensor.partition(":")[0], difference.relative
    if difference.again[1] > 0:
        return (True if difference.again[0] > 0 else None if difference.others[0] > 0 else False), False
    if kind not in ("grad", "output") or math.isnan(size):
        return None, False
    out, as_much, gone = [], [], []
    for step in common_steps(fingerprints):
        if not difference.step < step <= difference.step + _AFTER:
            continue
        found = relative_differences(fingerprints, step).get(kind, {})
        others = [relative for key, relative in found.items() if key != difference.tensor]
        if difference.tensor in found and others:
            now = found[difference.tensor]
            out.append(now > _STANDS_OUT * median(others))
            # After one event of a size that changes everything, the next steps do not tell.
            as_much.append(size < _LARGE and now >= _AS_MUCH * size)
            gone.append(size >= _LARGE or now < _GONE * size)
    lasts = 2 * sum(as_much) > len(as_much)
    if difference.others[0] > 0 or not out or kind != "grad":
        return None, lasts
    return (True if 2 * sum(out) > len(out) else False if 2 * sum(gone) > len(gone) else None), lasts


def beyond_rounding(fingerprints: Fingerprints, u: float) -> Iterator[FirstDifference]:
    """By step, the tensors that suddenly differ by more than rounding, where the step before was recorded too."""
    for before, step in pairwise(common_steps(fingerprints)):
        if step != before + 1 or before == 0:  # nothing but weights is recorded before the first step
            continue
        rows = fingerprints[0][step], fingerprints[1][step]
        # The largest of all kinds: what differs in a gradient is in an output after the next update.
        earlier = relative_differences(fingerprints, before)
        level = max((each for found in earlier.values() for each in found.values()), default=0.0)
        for found in relative_differences(fingerprints, step).values():
            for key, relative in found.items():
                if is_beyond(relative, int(rows[0]["tensors"][key][2]), u, level):
                    yield difference_at(step, key, *rows)
        yield from (each for each in _of_ranks(step, *rows) if each.said)


def relative_differences(fingerprints: Fingerprints, step: int) -> dict[str, dict[str, float]]:
    """By kind, the relative difference of each tensor's norm in a step; tokens have no norm to compare."""
    first, second = fingerprints[0][step]["tensors"], fingerprints[1][step]["tensors"]
    found: dict[str, dict[str, float]] = {}
    for key, entry in first.items():
        if key in second and not key.startswith("tokens:"):
            found.setdefault(key.partition(":")[0], {})[key] = relative_difference(entry[1], second[key][1])
    return found
