"""Compare a configured step with the plain loss in one process: its slope, its roundings, and its
structure, tensor by tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from narrowgauge.analysis.kinds import KINDS
from narrowgauge.analysis.reading import Reading, joined
from narrowgauge.checks.findings import Findings
from narrowgauge.checks.fit import fit, weights_of
from narrowgauge.checks.passes import Pass, Passes, PlainLoss
from narrowgauge.checks.rounding import Rounding, distances, lengths, rounding_of
from narrowgauge.checks.set_up import inner_name
from narrowgauge.checks.shadow import Shadow
from narrowgauge.checks.sites import first_not_finite, is_finite
from narrowgauge.checks.slope import Slope
from narrowgauge.checks.structure_words import equal_to, products_line, times_of_parts
from narrowgauge.checks.units import FINEST
from narrowgauge.runs.finding import counted

MARGIN = 4.0
"""Bounds of what has no shadow, over the roundings of the plain pass."""
COARSE = 32.0
"""The same bound, in roundings of the step's products, where no pass is followed."""
STOPPED = 0.03
"""Bound where a pass rounds to integers on purpose: one value of many lands elsewhere."""


class Comparison:
    """The step of a set-up beside the plain loss in one process.

    Args:
        alone: makes the passes of one process.
        first: the configured step; ``step`` in the mode in which structure is compared.
        rounding: of the configured step; ``None`` where it is not followed.
        differing: number of ranks with other gradients, by tensor.

    Attributes:
        exact: what each gradient should be, without roundings.
        scales: length of each of them, or the least that counts.
        bounds: of each distance, over the scale.
        near: distances within their bounds.
    """

    def __init__(
        self, alone: Passes, first: Pass, step: Pass, rounding: Rounding | None, differing: Mapping[str, int],
        num_ranks: int,
    ) -> None:  # fmt: skip
        self.alone = alone
        self.first = first
        self.step = step
        self.follows = rounding is not None
        self.rounding = rounding
        self.differing = differing
        self.num_ranks = num_ranks
        self.plain = PlainLoss(alone)
        self.findings = Findings()
        self.near = list[float]()
        self.is_sum = True

    def compare(self, *, draws: bool) -> None:
        """Compare slope, roundings and structure; an error becomes a reason for none.

        Args:
            draws: whether the step draws random numbers in evaluation mode, too.
        """
        self.findings.readings += self._not_reduced()
        with self.findings.reason_for_none("the slope of the loss"):
            self.compare_slope()
        with self.findings.reason_for_none("the gradient"):
            self.compare_rounding()
            self.compare_structure(draws=draws)
        if self.rounding is not None and self.rounding.mode.products:
            self.findings.lines.append(products_line(self.rounding.mode.products))

    def _not_reduced(self) -> list[Reading]:
        """Return readings of gradients that differ between ranks: no pass is needed."""
        kind = KINDS["ranks-differ"].case("gradient")
        names = [name for name in reversed(list(self.alone.leaves)) if name in self.differing]
        readings = [kind.reading(name, self.differing[name], 0) for name in names]
        return joined(readings, len(self.alone.leaves))

    # ── the slope, and what rounds ──────────────────────────────────────────────────────────────

    def compare_slope(self) -> None:
        """Find whether the gradient is the slope of the loss."""
        slope = Slope(replace(self.alone, is_training=True), self.plain.whole)
        readings = slope.readings()
        self.findings.judged.append("the slope of the loss")
        if not readings:
            count = counted(len(slope.names), "tensor")
            line = f"slope: the loss changes as the gradient of {count} says, within {slope.largest:.0e}"
            self.findings.lines.append(f"{line}, in training mode")
        self.findings.readings += readings + slope.noise()

    def compare_rounding(self) -> None:
        """Find what rounds, and values that are not finite."""
        of_copy = ""
        if self.rounding is None:
            of_copy = "in a copy in one process, "
            passes = replace(self.alone, is_training=self.step is self.first)
            self.rounding = rounding_of(passes, passes.step)[1]
        found = self.findings
        count = counted(len(self.first.gradients), "tensor")
        first, *more = self.rounding.lines()
        found.lines += [f"gradients of {count}: {of_copy}{first}", *more]
        found.judged.insert(0, f"gradients of {count}")
        for line, words in self.rounding.mode.misread.items():
            place = f"{words} in {line}"
            found.readings.append(KINDS["rounding"].reading("", 1.0, 0.0, 0.0, place=place))
        bad = first_not_finite(self.first.gradients)
        if bad:
            found.readings.append(self._not_finite(bad, self.rounding.not_finite))
        else:
            found.readings += self.rounding.readings()

    def _not_finite(self, name: str, maker: str) -> Reading:
        """Return a reading of a gradient that is not finite.

        Args:
            maker: the operation that made the first such value of the step.
        """
        passes = replace(self.alone, is_training=True)
        plain = passes.run(passes.plain(self.plain.whole), Shadow())
        exact = plain.shadows.get(name, plain.gradients.get(name))
        wide = "float32's are"
        if exact is None or not is_finite(exact):
            wide = "nor are float32's, so look at weights, data and loss"
        number = int((~self.first.gradients[name].isfinite()).sum())
        place = f" First in the step: {maker}." if maker else ""
        return KINDS["nonfinite"].case("gradient").reading(name, number, 0, wide=wide, place=place)

    # ── structure ───────────────────────────────────────────────────────────────────────────────

    def compare_structure(self, *, draws: bool) -> None:
        """Find gradients that are missing, or differ from the plain loss's."""
        found = self.findings
        plain = self.plain.run(self.plain.whole)
        found.loss = float(plain.loss.detach())
        if draws and not self.plain.repeats(plain, seed=1):
            words = "evaluation mode draws random numbers too"
            found.unseen["the structure of the gradient"] = words
            return
        if not is_finite(plain.loss) and not first_not_finite(self.step.gradients):
            found.readings += KINDS["nonfinite-step"].of(["the loss"])
            return
        self.plain.times = self._times_ranks(plain)
        if self.plain.times != 1:
            plain = self.plain.divided(plain)
            found.lines.append(
                f"the loss is {self.plain.times} times a mean, and the weights of the labels sum to 1 over "
                f"{self.plain.times} ranks"
            )
        self.exact = {n: plain.shadows.get(n, g) for n, g in plain.gradients.items()}
        self._set_bounds(plain)
        readings = self._differences()
        if readings and not self.plain.repeats(plain):
            found.unseen["the structure of the gradient"] = "two passes of the loss differ"
            return
        readings += self._missing(is_silent=not readings and not self.differing)
        self._add_lines(plain)
        readings.sort(key=lambda r: r.expected != 1.0)  # factors, which join none of the others
        found.readings += joined(readings, len(self.alone.leaves))

    def _times_ranks(self, plain: Pass) -> int:
        """Return the number of ranks if the loss of all batches is that many times the mean of
        theirs, as a sum over the labels of all ranks is.

        DistributedDataParallel divides by this number, so that the step is that of the mean.
        """
        size = self.num_ranks
        if size == 1:
            return 1
        values = [self.plain.run(part).value for part in self.alone.parts]
        mean = sum(values) / len(values)
        return size if abs(plain.value - size * mean) < 0.1 * abs(plain.value) else 1

    def _set_bounds(self, plain: Pass) -> None:
        """Allow for roundings where a gradient has no shadow, or where choices follow the step's."""
        assert self.rounding is not None
        self.scales = lengths(self.exact)
        own = distances(plain.gradients, self.exact)[1]
        measured = self.rounding.mode
        modes = [m for m in (measured, self.step.mode, plain.mode) if m is not None]
        chooses = measured.indices.total() or plain.mode.indices.total()
        stops = any(m.stops for m in modes)
        working = max(measured.working, plain.mode.working)
        self.bounds = {}
        for name in self.exact:
            bound = KINDS["gradient"].bound
            allowed = MARGIN * (own[name] + self.rounding.each.get(name, 0.0) + FINEST)
            if name not in plain.shadows or (self.follows and name not in self.step.shadows):
                bound = max(bound, allowed, COARSE * working)
            elif chooses or not self.follows:
                bound = max(bound, allowed)
            if stops:
                bound = max(bound, STOPPED)
            self.bounds[name] = min(bound, 1.0)

    def _is_zero(self, name: str) -> bool:
        """Return whether a gradient should be zero, up to roundings: a bias that cancels, say."""
        exact = self.exact.get(name)
        return exact is None or float(exact.norm()) <= KINDS["gradient"].bound * self.scales[name]

    def _is_there(self, name: str) -> bool:
        g = self.step.gradients.get(name)
        return g is not None and bool(g.any())

    def _differences(self) -> list[Reading]:
        """Return a reading of each gradient that is not the plain loss's, in the order of backward."""
        readings = []
        for name in reversed(list(self.alone.leaves)):
            exact = self.exact.get(name)
            if name in self.differing or not self._is_there(name):
                continue
            if not is_finite(self.step.gradients[name]):
                continue
            if exact is None:
                words = "is not zero, and the plain loss does not depend on it."
                readings.append(KINDS["gradient"].reading(name, 1.0, 0.0, words=words))
            else:
                g = self.step.shadows.get(name, self.step.gradients[name]).to(exact.device)
                reading = self._difference(name, g, exact)
                if reading is not None:
                    readings.append(reading)
        return readings

    def _difference(self, name: str, g: Tensor, exact: Tensor) -> Reading | None:
        """Return a reading of a gradient that is not the exact one; note its distance otherwise."""
        bound = self.bounds[name]
        scale = self.scales[name]
        multiple = fit(exact, g)
        distance = multiple.distance / scale
        if distance <= bound:
            self.near.append(distance)
            return None
        factor = multiple.factor
        if factor and multiple.rest <= bound * abs(factor) * scale:
            return self._multiple(name, factor)
        words = ""
        if factor and self.plain.terms(self.exact):
            columns = torch.stack(
                [term[name].flatten() for term in self.plain.terms(self.exact)], 1
            )
            right, misfit = weights_of(columns, exact)
            weights, rest = weights_of(columns, g)
            if misfit > bound:
                # Such as a balance loss, pairs within a batch, or scales of a whole tensor: the sum
                # of the parts is another function than the whole.
                self.is_sum = False
                distance = fit(columns.mean(1), g).distance / scale
                bound = max(bound, MARGIN * misfit)
                if min(distance, rest) <= bound:
                    self.near.append(min(distance, bound))
                    return None
            fits = g.numel() >= 4 * len(weights) and rest <= 2 * bound
            if fits and min(map(abs, right)) >= 1e-6:
                words = times_of_parts(weights, right)
        words = f"differs by {distance:.2g} of its length from float32's in one process; {bound:.1g} is allowed.{words}"
        return KINDS["gradient"].reading(name, distance, 0.0, bound, words=words)

    def _multiple(self, name: str, factor: float) -> Reading:
        """Return a reading of a gradient that is a multiple of the exact one."""
        num_parts = len(self.alone.parts) // self.num_ranks
        equals = equal_to(factor, num_parts, self.num_ranks)
        kind = KINDS["gradient"]
        if ", which is 2^" in equals and factor >= 256 and self.step.loss_scale == 1.0:
            equals += ". If the step divides by a loss scale of its own, all is well"
            kind = replace(kind, severity="note")
        words = f"is {factor:.6g} times float32's in one process{equals}."
        return kind.reading(name, factor, 1.0, self.bounds[name], words=words)

    def _missing(self, *, is_silent: bool) -> list[Reading]:
        """Return readings of gradients that are missing in the step.

        Args:
            is_silent: no gradient of the step differs.
        """
        leaves = reversed(list(self.alone.leaves))
        names = [name for name in leaves if name not in self.differing and not self._is_there(name)]
        gone = [name for name in names if not self._is_zero(name)]
        zero = []
        own = set(map(inner_name, dict(self.alone.model.named_parameters())))
        for name in names:
            if self._is_zero(name) and name not in self.step.gradients and name in own:
                zero.append(name)
        readings = []
        has_slope = not all(map(self._is_zero, self.alone.leaves))
        is_silent = is_silent and not self.near and not has_slope
        if is_silent and not first_not_finite(self.step.gradients):
            readings.append(KINDS["zero-gradients"].reading("", 1, 0, 0))
            zero = []
        count = len(self.alone.leaves)
        words = "; float32's are not zero"
        readings += KINDS["no-gradient"].of(gone, count=count, words=words)
        words = ", nor in the plain loss: no graph leads from the loss to them"
        readings += KINDS["no-gradient"].of(zero, count=count, words=words)
        return readings

    def _add_lines(self, plain: Pass) -> None:
        found = self.findings
        if not self.is_sum:
            words = "the loss over all of them is no weighted sum of their losses"
            found.unseen["the weights of micro-batches"] = words
        lost = []
        if self.follows:
            lost = [name for name in self.step.gradients if name not in self.step.shadows]
        if lost:
            cuts = self.step.mode.cuts | plain.mode.cuts
            through = f" through {', '.join(cuts)}" if cuts else ""
            found.lines.append(f"  not followed{through}: {counted(len(lost), 'gradient')}")
        if plain.mode.indices.total():
            (site, name), number = plain.mode.indices.most_common(1)[0]
            found.lines.append(
                f"  {number} indices of {name} in {site} are others in float32, so bounds are wider"
            )
        if self.near:
            without = "with" if lost else "without"
            found.lines.append(
                f"  {without} their roundings {counted(len(self.near), 'tensor')} within "
                f"{max(self.near):.1g} of float32's in one process"
            )
        if self.step is not self.first:
            mode = "structure compared in evaluation mode, since training draws random numbers"
            found.lines.append(f"  {mode}")
            if self.alone.backward is not None:
                found.unseen["backward= in training mode"] = "training draws random numbers"
