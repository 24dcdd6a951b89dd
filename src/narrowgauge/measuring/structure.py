"""Compare the shadow of a step with the shadow of the plain loss in one process.

Both are without roundings, so they are equal or the step computes another gradient: a factor, other
weights of micro-batches and ranks, or another distance. With several ranks each process makes the
plain pass over the batches of all. Collectives are operations that have shadows, so sums over ranks
are followed.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from narrowgauge.distributed.ranks import all_ranks
from narrowgauge.measuring.beside import is_finite
from narrowgauge.measuring.passes import Gradients, Pass, Passes, concatenated
from narrowgauge.measuring.policies.wide import Wide
from narrowgauge.measuring.reading import Reading, measured, of_all
from narrowgauge.numerics.hashing import fingerprint
from narrowgauge.torch_support.torch_names import unwrapped_model

SAME = 2.0**-20
"""Shadows are float64. What a loop counts by itself in float32, such as a denominator, leaves 16 of
its roundings.
"""
MOST_PARTS = 16
"""Micro-batches of all ranks whose weights are fitted."""


def rank_readings(passes: Passes, first: Pass, unseen: dict[str, str]) -> list[Reading]:
    """Return a reading of gradients that differ between ranks, where the loop's sums were made.

    Drop them from what is compared.
    """
    prints = {}
    for name, gradient in first.gradients.items():
        prints[name] = fingerprint(gradient)
    differing = unlike(prints)
    for name in differing:
        first.shadows.pop(name, None)
    is_wrapped = passes.model is not unwrapped_model(passes.model)
    if differing and (is_wrapped or passes.backward is not None):
        return [measured("ranks-unsummed", differing, len(differing), 0)]
    if differing:
        unseen["sums over ranks"] = "the loop makes them; pass backward="
    return []


def unlike(prints: Mapping[str, int]) -> list[str]:
    """Return the names whose fingerprint is another one on a rank than on rank 0."""
    of_ranks = all_ranks().gather(prints)
    names = []
    for name, bits in of_ranks[0].items():
        if any(other.get(name) != bits for other in of_ranks):
            names.append(name)
    return names


class Structure:
    """Compare a step with the plain loss.

    Args:
        passes: of the loop.
        alone: of one process, over the micro-batches of all ranks.
        first: the pass of the step in training mode.

    Attributes:
        plain: the pass of the plain loss, if it was made.
        lines, unseen: printed.
    """

    def __init__(self, passes: Passes, alone: Passes, first: Pass) -> None:
        self.passes = passes
        self.alone = alone
        self.first = first
        self.plain: Pass | None = None
        self.lines: list[str] = []
        self.unseen: dict[str, str] = {}

    def readings(self) -> list[Reading]:
        """Return the readings of structure and of missing gradients."""
        alone, step = self.alone, self.first
        batch = concatenated(alone.parts)
        if self.passes.backward is None and len(alone.parts) == 1:
            self.plain = step
            return self._missing(step, step.shadows)
        reason = "micro-batches have unlike shapes" if batch is None else ""
        if not reason:
            if all_ranks().largest(int(step.draws)):
                self.passes.is_training = alone.is_training = False
                step = self.passes.run(self.passes.step, Wide())
            plain = alone.run(alone.plain(batch), Wide())
            if plain.draws and self._draws_matter(plain, batch):
                reason = "evaluation mode draws random numbers too"
        if reason:
            self.unseen["the structure of the gradient"] = reason
            return []
        self.plain = plain
        parts = alone.parts if 1 < len(alone.parts) <= MOST_PARTS else []
        terms = [alone.run(alone.plain(part), Wide()) for part in parts]
        exact = self._exact(plain, terms)
        readings = self._compared(step.shadows, exact, [term.shadows for term in terms])
        self.passes.is_training = alone.is_training = True
        return readings + self._missing(step, exact)

    def _draws_matter(self, plain: Pass, batch: Any) -> bool:
        """Return whether other random numbers give other gradients."""
        call = self.alone.plain(batch)

        def other() -> Any:
            torch.manual_seed(1)
            random.seed(1)
            return call()

        again = self.alone.run(other, Wide()).shadows
        return any(not torch.equal(x, again[name]) for name, x in plain.shadows.items())

    def _exact(self, plain: Pass, terms: Sequence[Pass]) -> Gradients:
        """Return the plain gradients; of a loss that counts the labels of all ranks, of their mean.

        Such a loss is the number of ranks times a mean, and DistributedDataParallel divides by it.
        """
        size = all_ranks().size
        mean = sum(term.value for term in terms) / (len(terms) or 1)
        if size == 1 or not abs(plain.value - size * mean) < 0.1 * abs(plain.value):
            return plain.shadows
        self.lines.append(f"  the loss is {size} times a mean over the batches of all ranks")
        return {name: x / size for name, x in plain.shadows.items()}

    def _compared(
        self, step: Gradients, exact: Gradients, terms: Sequence[Gradients]
    ) -> list[Reading]:
        """Return a reading for each answer: tensors that have one are one reading."""
        differing: dict[str, float] = {}
        names = []
        for name, right in exact.items():
            own = step.get(name)
            if own is not None and right.any() and own.any() and is_finite(own):
                names.append(name)
                off = float((own - right).norm() / right.norm())
                if off > SAME:
                    differing[name] = off
        equal = len(names) - len(differing)
        if names:
            self.lines.append(
                f"  without roundings {equal} of {len(names)} gradients equal the plain loss's"
            )
        answers: dict[str, tuple[float, float, list[str]]] = {}
        for name in sorted(differing, key=lambda name: -differing[name]):
            columns = []
            if all(name in term for term in terms):
                columns = [term[name].flatten() for term in terms]
            answer = _answer(step[name].flatten(), exact[name].flatten(), columns)
            if answer is not None:
                words, factor = answer
                value = (differing[name], 0.0) if factor is None else (factor, 1.0)
                answers.setdefault(words, (*value, []))[2].append(name)
        readings = []
        for words, (value, expected, members) in answers.items():
            self.lines.append(f"  {of_all(members)}: {words}")
            what = "own-scale" if value >= 256 and math.log2(value) % 1 == 0 else "gradient"
            tensors = [] if len(members) == len(names) > 1 else members
            readings.append(measured(what, tensors, value, expected))
        return readings

    def _missing(self, step: Pass, exact: Gradients) -> list[Reading]:
        """Return readings of gradients that the step lacks, and that the plain loss lacks too."""
        own = step.gradients
        lacking = []
        for name, right in exact.items():
            if right.any() and not (name in own and own[name].any()):
                lacking.append(name)
        gone = [n for n in self.passes.leaves if n not in own and n not in exact]
        readings = []
        if own and not lacking and not any(bool(x.any()) for x in own.values()):
            readings.append(measured("zero-gradients", "", 1, 0))
        if lacking:
            readings.append(measured("no-gradient", lacking[::-1], len(lacking), 0))
        if gone and len(gone) < len(self.passes.leaves):
            readings.append(measured("no-graph", gone[::-1], len(gone), 0))
        return readings


def _answer(a: Tensor, b: Tensor, columns: Sequence[Tensor]) -> tuple[str, float | None] | None:
    """Return how a gradient is related to the right one, in words, and the factor if it is one.

    Args:
        columns: the plain gradients of each micro-batch, if there are several.
    """
    factor = float(a @ b) / float(b @ b)
    if float((a - factor * b).norm()) <= SAME * abs(factor) * float(b.norm()):
        return f"{factor:.6g} times the plain loss's", round(factor, 9)
    if columns and a.numel() >= 2 * len(columns):
        terms = torch.stack([*columns], 1)
        weights, of_whole = _weights(terms, a), _weights(terms, b)
        if not of_whole and float((terms.mean(1) - a).norm()) <= SAME * float(a.norm()):
            return None  # a mean of losses of which the whole batch's is no sum
        if weights and of_whole and min(map(abs, of_whole)) > 1e-6:
            times = [f"{x / y:.3g}" for x, y in zip(weights, of_whole, strict=True)]
            return f"micro-batches count {', '.join(times)} times", None
    return "neither a multiple of the plain loss's nor of its micro-batches'", None


def _weights(columns: Tensor, target: Tensor) -> list[float]:
    """Return the weights of columns whose sum is a target; empty if none is."""
    solution = torch.linalg.lstsq(columns, target[:, None], driver="gelsd").solution[:, 0]
    rest = float((target - columns @ solution).norm())
    return solution.tolist() if rest <= 1e-3 * float(target.norm()) else []
