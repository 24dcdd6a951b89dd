"""Compare a step with the plain loss in one process.

With several ranks the plain pass runs over the batches of all, in each process for itself; of shards,
in a gathered copy. Collectives are operations that have shadows, so sums over ranks are followed.
What is not followed is compared within four times the roundings of the plain pass.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import nn

from narrowgauge.distributed.ranks import Ranks, all_ranks
from narrowgauge.errors import NarrowgaugeError
from narrowgauge.measuring.passes import Alone, Gradients, Pass, Passes, inner_name
from narrowgauge.measuring.places import distance
from narrowgauge.measuring.policies.wide import Wide
from narrowgauge.measuring.reading import Reading, measured, words_of
from narrowgauge.measuring.set_up import spread
from narrowgauge.measuring.sharded import gathered_copy
from narrowgauge.measuring.slope import slope_readings
from narrowgauge.measuring.structure import SAME, missing_readings, structure_readings
from narrowgauge.numerics.dtensor import is_sharded
from narrowgauge.numerics.hashing import fingerprint
from narrowgauge.torch_support.torch_names import unwrapped_model

MARGIN = 4.0
"""Roundings of the plain pass within which a gradient lies that is not followed."""
LEAST = 2.0**-14
"""Half of float32's digits: the bound of such a gradient at least."""
MOST_PARTS = 16
"""Micro-batches of all ranks whose weights are fitted."""


class OneProcess:
    """The plain loss of the batches of all ranks, beside a step.

    Args:
        passes: of the loop.
        first: the pass of its step in training mode.

    Attributes:
        plain: the pass of the plain loss, if it was made.
        lines: printed.
        unseen: what was not compared, with the reason.
    """

    def __init__(self, passes: Passes, first: Pass) -> None:
        self.passes = passes
        self.first = first
        self.ranks = all_ranks()
        self.plain: Pass | None = first if passes.is_plain else None
        self.lines: list[str] = []
        self.unseen: dict[str, str] = {}
        self.has_shards = any(is_sharded(p) for p in passes.leaves.values())
        self.policies: Sequence[Any] = (Alone(),) if self.ranks.size > 1 else ()
        self.apart = _weights_apart(passes, self.ranks)

    def readings(self) -> list[Reading]:
        """Return the readings of sums over ranks, structure, missing gradients and the slope."""
        readings = self._unsummed()
        if self.apart:
            names = ", ".join(self.apart[:2])
            self.unseen["the gradient"] = f"ranks hold unlike weights, such as {names}"
            return readings
        alone = self._alone()
        try:
            readings += self._structure(alone)
            batch = alone.parts[0] if alone.whole is None else alone.whole
            readings += slope_readings(alone, batch, self.lines, self.unseen, *self.policies)
        except NarrowgaugeError:
            raise
        except Exception as error:  # whatever the loss raises of an unwrapped model
            self.unseen["the gradient"] = words_of(error)
        finally:
            self.passes.is_training = True
        return readings

    def _unsummed(self) -> list[Reading]:
        """Return a reading of gradients that differ between ranks, where the loop's sums were made."""
        prints = {}
        for name, gradient in self.first.gradients.items():
            if name not in self.apart and not is_sharded(gradient):
                prints[name] = fingerprint(gradient)
        self.differing = _unlike(self.ranks.gather(prints))
        if not self.differing:
            return []
        is_summed = self.passes.backward is not None or self.passes.model is not (
            self.passes.plain_model
        )
        if not is_summed:
            self.unseen["sums over ranks"] = "the loop makes them; pass backward="
            return []
        return [measured("ranks-unsummed", self.differing, len(self.differing), 0)]

    def _alone(self) -> Passes:
        """Return the passes of one process over the batches of all ranks."""
        if self.ranks.size == 1 and not self.has_shards:
            return self.passes
        parts = [*chain.from_iterable(self.ranks.gather(self.passes.parts))]
        model: nn.Module = unwrapped_model(self.passes.model)
        leaves = self.passes.leaves
        if self.has_shards:
            model = gathered_copy(self.passes.model)
            own = {inner_name(n): p for n, p in model.named_parameters() if p.requires_grad}
            leaves = leaves | own
        return replace(
            self.passes, model=model, optimizers=[], leaves=leaves, parts=parts, backward=None
        )

    # ── the structure ─────────────────────────────────────────────────────────────────────────────

    def _structure(self, alone: Passes) -> list[Reading]:
        first = self.first
        if alone is self.passes and self.passes.is_plain:
            return missing_readings(self.passes, first, first.shadows)
        if alone.whole is None:
            self.unseen["the structure of the gradient"] = "micro-batches have unlike shapes"
            return []
        step = first
        if self.ranks.largest(int(first.draws)):
            self.passes.is_training = alone.is_training = False
            step = self.passes.run(self.passes.step, Wide())
        plain = alone.run(alone.plain(alone.whole), Wide(), *self.policies)
        self.plain = plain
        if plain.draws and self._draws_matter(alone, plain):
            words = "evaluation mode draws random numbers too"
            self.unseen["the structure of the gradient"] = words
            return []
        terms = self._terms(alone)
        exact = self._exact(plain, terms)
        for name in self.differing:
            exact.pop(name, None)
        own: Gradients = {}
        bounds = {}
        for name in exact:
            if name in step.shadows:
                own[name] = step.shadows[name]
                bounds[name] = SAME
            elif name in step.gradients:
                own[name] = step.gradients[name].double()
                bounds[name] = self._coarse(plain, name)
        of_parts = [term.shadows for term in terms]
        readings = structure_readings(own, exact, bounds, of_parts, self.lines)
        alone.is_training = True
        return readings + missing_readings(self.passes, step, exact)

    def _draws_matter(self, alone: Passes, plain: Pass) -> bool:
        """Return whether other random numbers give other gradients."""
        call = alone.plain(alone.whole)

        def other() -> Any:
            torch.manual_seed(1)
            random.seed(1)
            return call()

        again = alone.run(other, Wide(), *self.policies).shadows
        return any(not torch.equal(x, again[name]) for name, x in plain.shadows.items())

    def _terms(self, alone: Passes) -> list[Pass]:
        if not 1 < len(alone.parts) <= MOST_PARTS:
            return []
        return [alone.run(alone.plain(part), Wide(), *self.policies) for part in alone.parts]

    def _exact(self, plain: Pass, terms: Sequence[Pass]) -> Gradients:
        """Return the plain gradients; of a loss that counts the labels of all ranks, of their mean.

        Such a loss is the number of ranks times a mean, and DistributedDataParallel divides by it.
        """
        size = self.ranks.size
        if size == 1 or not terms:
            return dict(plain.shadows)
        mean = sum(term.value for term in terms) / len(terms)
        if not abs(plain.value - size * mean) < 0.1 * abs(plain.value):
            return dict(plain.shadows)
        self.lines.append(f"  the loss is {size} times a mean over the batches of all ranks")
        return {name: x / size for name, x in plain.shadows.items()}

    def _coarse(self, plain: Pass, name: str) -> float:
        """Return the bound of a gradient that is not followed: the roundings of the plain pass."""
        length = float(plain.shadows[name].norm())
        off = distance(plain.gradients, plain.shadows, [name]) / (length or 1.0)
        return max(LEAST, MARGIN * off)


def _weights_apart(passes: Passes, ranks: Ranks) -> list[str]:
    """Return the names of weights of which ranks hold unlike values, as of experts."""
    prints = {}
    for name, p in passes.leaves.items() if ranks.size > 1 else ():
        if not is_sharded(p):
            prints[name] = fingerprint(spread(p))
    return _unlike(ranks.gather(prints))


def _unlike(of_ranks: Sequence[Mapping[str, int]]) -> list[str]:
    """Return the names whose fingerprint is another one on a rank than on rank 0."""
    names = []
    for name, bits in of_ranks[0].items():
        if any(prints.get(name) != bits for prints in of_ranks):
            names.append(name)
    return names
