"""Answers: what a comparison says to the question of a named set of recipes (:data:`narrowgauge.spec.recipe_sets.RECIPE_SETS`).

A comparison that holds a set's recipes answers its question, however the recipes were named. Each sentence is put together from
what these runs measured and what the tables of formats and chips say; a sentence whose figures are missing says so. Nothing here
knows what the answer should be: where two formats would differ in memory, the last sentence says that they do.

What a machine emulates it computes in another format, so its times say nothing of the formats; data sheets stand in for them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from narrowgauge.analysis.comparison.classification import Classes, Classification, paired_difference
from narrowgauge.analysis.comparison.labels import listed
from narrowgauge.analysis.comparison.run_stats import TIMING_NOISE
from narrowgauge.runs.schema import Row
from narrowgauge.spec.chips import CHIPS
from narrowgauge.spec.computes import COMPUTES
from narrowgauge.spec.formats import Format, get_format
from narrowgauge.spec.recipe_sets import RECIPE_SETS, RecipeSet
from narrowgauge.spec.significance import MIN_EDQ

SAME = 0.01
"""Counted bytes that differ by no more than this share are the same: a few vectors, or a loss scale."""
COUNTED = {"state_bytes": "state", "activation_bytes": "activations", "peak_tensor_bytes": "peak"}
"""The columns of counted memory, in words."""


@dataclass(frozen=True)
class Answer:
    """What a comparison says to a set's question.

    Args:
        classes: of the comparison that holds the set's recipes.
    """

    row: RecipeSet
    classes: Classes

    @property
    def question(self) -> str:
        return self.row.question

    @property
    def recipes(self) -> list[Classification]:
        """Those of the set that were compared, in its order."""
        return [self.classes[name] for name in self.row.recipes if name in self.classes]

    @property
    def sentences(self) -> list[str]:
        """The answer, its conclusion last."""
        parts: tuple[Callable[[Answer], Iterator[str]], ...] = (
            _left_out, _formats, _memory, _savings, _times, _data_sheets, _losses, _skipped, _lost, _conclusion,
        )  # fmt: skip
        return [sentence for part in parts for sentence in part(self)]

    @property
    def pairs(self) -> list[tuple[Classification, Classification]]:
        return [(self.classes[one], self.classes[other]) for one, other in self.row.pairs]

    @property
    def formats(self) -> tuple[Format, Format]:
        """The two formats in which the recipes of each pair differ."""
        one, other = self.row.pairs[0]
        return multiplied_format(one), multiplied_format(other)

    @property
    def multiplied(self) -> frozenset[str] | None:
        """The formats that every machine of these runs multiplies natively; ``None`` where a record does not say."""
        found = [run.run.run.get("machine") for one in self.recipes for run in one.runs]
        known = [machine.get("multiplies") if isinstance(machine, Mapping) else None for machine in found]
        if not known or not all(isinstance(formats, list) for formats in known):
            return None
        return frozenset.intersection(*(frozenset(map(str, formats)) for formats in known if formats is not None))

    @property
    def are_native(self) -> bool | None:
        """Whether both formats are multiplied natively, so that the runs' times are theirs; ``None`` where it is not known."""
        multiplied = self.multiplied
        return None if multiplied is None else {row.name for row in self.formats} <= multiplied


def answers(classes: Classes) -> tuple[Answer, ...]:
    """The answers that a comparison gives: to each set of whose recipes it holds all that are needed."""
    return tuple(Answer(row, classes) for row in RECIPE_SETS.values() if set(row.needed) <= set(classes))


def multiplied_format(recipe: str) -> Format:
    """The format of the operands of the matmuls of a set's recipe.

    Example:
        >>> multiplied_format("bfloat16/float32").name
        'bfloat16'
    """
    return get_format(COMPUTES[recipe.partition("/")[0]].output.left.format)


# ── what the tables say ─────────────────────────────────────────────────────────────────────────────────────────────────


def _left_out(answer: Answer) -> Iterator[str]:
    for name in answer.row.where_native:
        if name in answer.classes:
            continue
        format, multiplied = multiplied_format(name).name, answer.multiplied
        if multiplied is None or format in multiplied:
            yield f"{name} was not trained."
        else:
            yield f"{name} was left out: this machine does not multiply {format}, and speed is its only benefit."


def _formats(answer: Answer) -> Iterator[str]:
    said = [
        f"{row.name} takes {row.bits} bits, {row.mantissa_bits + 1} of them significant, and reaches from "
        f"{row.smallest_subnormal:.2g} to {row.max:.5g}"
        for row in answer.formats
    ]
    yield f"{'; '.join(said)}."


def _data_sheets(answer: Answer) -> Iterator[str]:
    one, other = (row.name for row in answer.formats)
    both = [chip for chip in CHIPS.values() if {one, other} <= set(chip.peak_tflops)]
    unlike = [chip.name for chip in both if chip.peak_tflops[one] != chip.peak_tflops[other]]
    alone = [chip.name for chip in CHIPS.values() if (one in chip.peak_tflops) != (other in chip.peak_tflops)]
    if unlike:
        said = f"Of {len(both)} chips whose data sheets give both rates, {listed(unlike)} multiply the two at different ones"
    else:
        said = f"All {len(both)} chips whose data sheets give both rates multiply {one} and {other} at the same one"
    yield f"{said}; {listed(alone)} list one of the two." if alone else f"{said}."


# ── what the runs measured ──────────────────────────────────────────────────────────────────────────────────────────────


def _mib(value: float) -> str:
    return f"{value / 2**20:.1f} MiB"


def _ratios(answer: Answer) -> list[dict[str, float]] | None:
    """For each pair, the second recipe's counted bytes relative to the first's; ``None`` where any was not counted."""
    found = []
    for one, other in answer.pairs:
        if any(not each.row.get(column) for each in (one, other) for column in COUNTED):
            return None
        found.append({column: other.row[column] / one.row[column] for column in COUNTED})
    return found


def _memory(answer: Answer) -> Iterator[str]:
    ratios = _ratios(answer)
    if ratios is None:
        yield "The memory of these runs was not counted."
        return
    said = []
    for (one, other), found in zip(answer.pairs, ratios, strict=True):
        unlike = [f"{ratio:.2f} times the {COUNTED[name]}" for name, ratio in found.items() if abs(ratio - 1) > SAME]
        sizes = ", ".join(f"{words} {_mib(one.row[name])}" for name, words in COUNTED.items())
        if unlike:
            said.append(f"{other.label} takes {listed(unlike)} of {one.label} ({sizes})")
        else:
            said.append(f"{one.label} and {other.label} take the same ({sizes})")
    yield f"Counted memory: {'; '.join(said)}."


def _savings(answer: Answer) -> Iterator[str]:
    """The peak of each recipe, relative to the baseline's."""
    base = answer.classes.reference if answer.classes.baseline is not None else None
    peak = None if base is None else base.row.get("peak_tensor_bytes")
    others = [one for one in answer.recipes if one is not base and one.row.get("peak_tensor_bytes")]
    if base is not None and peak and others:
        shares = listed(f"{one.label} {one.row['peak_tensor_bytes'] / peak:.2f}" for one in others)
        yield f"Of the peak of {base.label}, {_mib(peak)} of tensors, the others take: {shares}."


def _time_ratios(answer: Answer) -> list[tuple[str, str, float]]:
    """Pairs whose steps were timed, and how many times as long the second's median step took."""
    return [
        (one.label, other.label, other.row["step_seconds"] / one.row["step_seconds"])
        for one, other in answer.pairs
        if one.row.get("step_seconds") and other.row.get("step_seconds")
    ]


def _times(answer: Answer) -> Iterator[str]:
    found = _time_ratios(answer)
    measured = listed(f"{other} {ratio:.2f} times that of {one}" for one, other, ratio in found) if found else ""
    names = " or ".join(row.name for row in answer.formats)
    if answer.are_native is None:
        yield f"Whether this machine multiplies {names} was not recorded, so the times say nothing of the formats."
    elif not answer.are_native:
        missing = [row.name for row in answer.formats if row.name not in (answer.multiplied or ())]
        yield (
            f"Times on this machine say nothing of the formats: it does not multiply {' or '.join(missing)}, and computes such "
            f"products in float32{f' (a median step took: {measured})' if measured else ''}."
        )
    elif found:
        yield f"A median step took: {measured}{'' if _differs_in_time(found) else ', within the noise of timings'}."
    else:
        yield "The steps of these runs were not timed."


def _differs_in_time(found: list[tuple[str, str, float]]) -> bool:
    return any(max(ratio, 1 / ratio) > TIMING_NOISE for _, _, ratio in found)


def _losses(answer: Answer) -> Iterator[str]:
    said = []
    for one, other in answer.pairs:
        found = paired_difference(other.label, answer.classes.groups, one.label)
        if found is None:
            without = [each.label for each in (one, other) if not each.row["num_seeds"]]
            said.append(
                f"{listed(without)} ended without a loss" if without else f"no seed of {one.label} is {other.label}'s"
            )
            continue
        if not math.isfinite(found.half):
            reads = "one seed, so no interval"
        elif found.low <= 0 <= found.high:
            reads = "not distinguishable"
        else:
            reads = "certainly worse" if found.low > 0 else "certainly better"
        said.append(f"{other.label} minus {one.label} {found.text} ({reads})")
    yield f"Validation loss: {'; '.join(said)}."


def _skipped(answer: Answer) -> Iterator[str]:
    """What the range of a format cost: steps without an update, while the loss scale was found."""
    said = []
    for one in answer.recipes:
        ended = [run.run.summary for run in one.runs if run.run.summary is not None]
        skipped = sum(int(summary.get("num_skipped") or 0) for summary in ended)
        if skipped:
            said.append(f"{one.label} {skipped:,} of {sum(int(summary.get('steps') or 0) for summary in ended):,}")
    if said:
        yield f"Steps skipped because gradients left the range: {listed(said)}; the others none."


def _lost(answer: Answer) -> Iterator[str]:
    """What the precision of a format cost: updates that the stored weight did not take."""
    known = {one.label: one.late.get("edq") for one in answer.recipes}
    found = {label: edq for label, edq in known.items() if edq is not None}
    if any(edq < MIN_EDQ for edq in found.values()):
        shares = listed(f"{label} {edq:.3f}" for label, edq in found.items())
        yield f"Of late updates the weights took (EDQ, 1 loses nothing): {shares}."


def _conclusion(answer: Answer) -> Iterator[str]:
    """In what the formats differ, and in what they do not."""
    one, other = answer.formats
    differ: dict[str, bool] = {
        "precision": one.mantissa_bits != other.mantissa_bits,
        "range": (one.max, one.smallest_subnormal) != (other.max, other.smallest_subnormal),
    }
    ratios = _ratios(answer)
    if ratios is not None:
        differ["memory"] = any(abs(ratio - 1) > SAME for found in ratios for ratio in found.values())
    times = _time_ratios(answer)
    if answer.are_native and times:
        differ["speed"] = _differs_in_time(times)
    else:
        both = [chip.peak_tflops for chip in CHIPS.values() if {one.name, other.name} <= set(chip.peak_tflops)]
        differ["speed by the data sheets"] = any(rates[one.name] != rates[other.name] for rates in both)
    apart = [words for words, is_apart in differ.items() if is_apart]
    alike = [words for words, is_apart in differ.items() if not is_apart]
    names = f"{one.name} and {other.name}"
    if not apart:
        yield f"So {names} differ in none of {listed(alike)}."
    else:
        others = f", not in {' or '.join(alike)}" if alike else ""
        yield f"So {names} differ in {listed(apart)}{others}."


def step_ratio(one: Classification, base: Classification | None) -> float | None:
    """How many times as long a recipe's median step takes as the baseline's; ``None`` where either was not timed."""
    mine, theirs = (None if each is None else each.row.get("step_seconds") for each in (one, base))
    return mine / theirs if mine and theirs else None


def rows_of(answer: Answer) -> list[Row]:
    """The measured columns of the set's recipes, as in ``compare.json``, and ``step_ratio`` to the baseline."""
    base = answer.classes.reference if answer.classes.baseline is not None else None
    return [{**one.row, "step_ratio": step_ratio(one, base)} for one in answer.recipes]
