"""Compare the shadow of a step with the shadow of the plain loss in one process.

Both are without roundings, so they are equal or the step computes another gradient: a factor, other
weights of micro-batches and ranks, or another distance. With several ranks each process makes the
plain pass over the batches of all. Collectives are operations that have shadows, so sums over ranks
are followed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from narrowgauge.distributed.ranks import all_ranks
from narrowgauge.measuring.beside import is_finite
from narrowgauge.measuring.passes import Findings, Gradients, Pass, Passes, concatenated
from narrowgauge.measuring.policies.wide import Wide
from narrowgauge.measuring.reading import of_all
from narrowgauge.numerics.hashing import fingerprint

SAME = 2.0**-20
"""Shadows are float64. What a loop counts by itself in float32, such as a denominator, leaves 16 of
its roundings.
"""
MOST_PARTS = 16
"""Micro-batches of all ranks whose weights are fitted."""


def compare_ranks(passes: Passes, alone: Passes, first: Pass, findings: Findings) -> None:
    """Tell gradients that differ between ranks, where the loop's sums were made, and compare them no
    further.
    """
    differing = unlike({name: fingerprint(x) for name, x in first.gradients.items()})
    for name in differing:
        first.shadows.pop(name, None)
    if differing and (passes.model is not alone.model or passes.backward is not None):
        findings.add("ranks-unsummed", differing, len(differing))
    elif differing:
        findings.unseen["sums over ranks"] = "the loop makes them; pass backward="


def unlike(prints: Mapping[str, int]) -> list[str]:
    """Return the names whose fingerprint is another one on a rank than on rank 0."""
    of_ranks = all_ranks().gather(prints)
    names = []
    for name, bits in of_ranks[0].items():
        if any(other.get(name) != bits for other in of_ranks):
            names.append(name)
    return names


def compare_structure(
    passes: Passes, alone: Passes, first: Pass, findings: Findings
) -> Pass | None:
    """Compare a step with the plain loss, and return the pass of that, if it was made.

    Args:
        passes: of the loop.
        alone: of one process, over the micro-batches of all ranks.
        first: the pass of the step in training mode.
    """
    batch = concatenated(alone.parts)
    step = first
    if passes.backward is None and len(alone.parts) == 1:
        _add_missing(passes, step, step.shadows, findings)
        return step
    if batch is None:
        findings.unseen["the structure of the gradient"] = "micro-batches have unlike shapes"
        return None
    if all_ranks().largest(int(step.draws)):
        passes.is_training = alone.is_training = False
        step = passes.run(passes.step, Wide())
    plain = alone.run(alone.plain(batch), Wide())
    if plain.draws:
        findings.unseen["the structure of the gradient"] = (
            "evaluation mode draws random numbers too"
        )
        return None
    terms = []
    if 1 < len(alone.parts) <= MOST_PARTS:
        terms = [alone.run(alone.plain(part), Wide()) for part in alone.parts]
    exact = plain.shadows
    size = all_ranks().size
    mean = sum(term.value for term in terms) / (len(terms) or 1)
    if size > 1 and abs(plain.value - size * mean) < 0.1 * abs(plain.value):
        # A loss that counts the labels of all ranks; DistributedDataParallel divides by their number.
        exact = {name: x / size for name, x in exact.items()}
        findings.lines.append(f"  the loss is {size} times a mean over the batches of all ranks")
    _compare(step.shadows, exact, [term.shadows for term in terms], findings)
    _add_missing(passes, step, exact, findings)
    passes.is_training = alone.is_training = True
    return plain


def _compare(
    step: Gradients, exact: Gradients, terms: Sequence[Gradients], findings: Findings
) -> None:
    """Tell each answer: tensors that have one are one reading."""
    differing: dict[str, float] = {}
    count = 0
    for name, right in exact.items():
        gradient = step.get(name)
        if gradient is not None and right.any() and gradient.any() and is_finite(gradient):
            count += 1
            off = float((gradient - right).norm() / right.norm())
            if off > SAME:
                differing[name] = off
    equal = count - len(differing)
    findings.lines.append(
        f"  without roundings {equal} of {count} gradients equal the plain loss's"
    )
    answers: dict[str, tuple[float, float, list[str]]] = {}
    for name in sorted(differing, key=differing.__getitem__, reverse=True):
        columns = [term[name].flatten() for term in terms if name in term]
        words, value, expected = _answer(step[name].flatten(), exact[name].flatten(), columns)
        if words:
            answers.setdefault(words, (value, expected, []))[2].append(name)
    for words, (value, expected, members) in answers.items():
        findings.lines.append(f"  {of_all(members)}: {words}")
        what = "gradient"
        if value >= 256 and math.log2(value) % 1 == 0:
            what = "own-scale"
        if len(members) == count > 1:
            members.clear()
        findings.add(what, members, value, expected)


def _answer(a: Tensor, b: Tensor, columns: Sequence[Tensor]) -> tuple[str, float, float]:
    """Return how a gradient is related to the right one, in words, its factor or its distance over the
    length, and which is expected.

    Args:
        columns: the plain gradients of each micro-batch, if there are several.
    """
    factor = float(a @ b) / float(b @ b)
    if float((a - factor * b).norm()) <= SAME * abs(factor) * float(b.norm()):
        return f"{factor:.6g} times the plain loss's", round(factor, 9), 1.0
    off = float((a - b).norm() / b.norm())
    if columns and a.numel() >= 2 * len(columns):
        terms = torch.stack([*columns], 1)
        weights, of_whole = _weights(terms, a), _weights(terms, b)
        if not of_whole and float((terms.mean(1) - a).norm()) <= SAME * float(a.norm()):
            return "", off, 0.0  # a mean of losses of which the whole batch's is no sum
        if weights and of_whole and min(map(abs, of_whole)) > 1e-6:
            times = [f"{x / y:.3g}" for x, y in zip(weights, of_whole, strict=True)]
            return f"micro-batches count {', '.join(times)} times", off, 0.0
    return "neither a multiple of the plain loss's nor of its micro-batches'", off, 0.0


def _weights(columns: Tensor, target: Tensor) -> list[float]:
    """Return the weights of columns whose sum is a target; empty if none is."""
    solution = torch.linalg.lstsq(columns, target[:, None], driver="gelsd").solution[:, 0]
    rest = float((target - columns @ solution).norm())
    if rest > 1e-3 * float(target.norm()):
        return []
    return [float(weight) for weight in solution]


def _add_missing(passes: Passes, step: Pass, exact: Gradients, findings: Findings) -> None:
    """Tell gradients that the step lacks, and that the plain loss lacks too."""
    has_values = {name: bool(x.any()) for name, x in step.gradients.items()}
    lacking = [name for name, x in exact.items() if x.any() and not has_values.get(name)]
    gone = [name for name in passes.leaves if name not in has_values and name not in exact]
    if has_values and not lacking and not any(has_values.values()):
        findings.add("zero-gradients", "", 1)
    if lacking:
        findings.add("no-gradient", lacking[::-1], len(lacking))
    if gone and len(gone) < len(passes.leaves):
        findings.add("no-graph", gone[::-1], len(gone))
