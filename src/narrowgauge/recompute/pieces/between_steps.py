"""What must not change between two steps: weights and states; and what must: an average of the weights.

Samples that were taken after an audited step are compared with the same places before the next one, bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from narrowgauge.optim.optimizer import Optimizer
from narrowgauge.recompute.capture import ParameterSample, number_of, spread, states_of
from narrowgauge.recompute.fitting import fitted, near
from narrowgauge.recompute.piece_results import DEPARTS, EQUAL, PieceResult, joined
from narrowgauge.recompute.pieces.update import narrower_format

PIECE = "between"
_STILL = 3
"""Audited steps over which an average that stands still is reported: some are updated every few steps."""
_FEW = 4
"""Parameters that are followed from each step to the next."""


@dataclass
class LeftAfterStep:
    """What an audited step left.

    Args:
        step: its number.
        parameters: samples with weights and states after it.
        outside: samples of trained parameters that the optimizer does not have, before the step, which had gradients.
        averages: samples of the averages of the weights, by the parameter's name.
    """

    step: int
    parameters: dict[str, ParameterSample]
    outside: dict[str, Tensor] = field(default_factory=dict)
    averages: dict[str, Tensor] = field(default_factory=dict)


class FewLeft:
    """A few parameters as a step left them, so that what is written between any two steps is seen, not only after audited ones.

    Their values are compared only where a tensor is another one or was written to, which its counter of versions tells.

    Args:
        step: that was taken.
        optimizer: whose rule is known; of one of ours the visible weights alone are looked at.
        held: its parameters by name.

    Cost: a copy of at most :data:`narrowgauge.recompute.capture.ELEMENTS` elements of each weight and state of four parameters.
    """

    def __init__(self, step: int, optimizer: torch.optim.Optimizer, held: Mapping[str, Tensor]) -> None:
        stepped = [name for name, p in held.items() if p.grad is not None]
        chosen = {stepped[place * (len(stepped) - 1) // (_FEW - 1)] for place in range(_FEW)} if stepped else set()
        self._held = {name: p for name, p in held.items() if name in chosen}
        self._optimizer = optimizer
        self._seen, self._counts = self._versions(), [self._count(p) for p in self._held.values()]
        samples = {}
        for name, p in self._held.items():
            samples[name] = ParameterSample(name, p.shape, p.dtype, {}, weight=torch.empty(0, dtype=p.dtype), states={})
            samples[name].weight_after, samples[name].states_after = spread(p), self._states(p)
        self._left = LeftAfterStep(step, samples)

    def _states(self, parameter: Tensor) -> dict[str, Tensor]:
        return {} if isinstance(self._optimizer, Optimizer) else states_of(self._optimizer, parameter)

    def _versions(self) -> list[tuple[int, int]]:
        tensors = (t for p in self._held.values() for t in (p, *self._optimizer.state.get(p, {}).values()))
        return [(id(t), t._version) for t in tensors if isinstance(t, Tensor)]

    def _count(self, parameter: Tensor) -> Tensor | int:
        """The optimizer's count of steps; a tensor is copied, since reading it may wait for a device."""
        if not isinstance(self._optimizer, Optimizer):
            count = self._optimizer.state.get(parameter, {}).get("step")
            if isinstance(count, Tensor):
                return count.clone()
        return number_of(self._optimizer, parameter)

    def check(self) -> list[PieceResult]:
        """Compare with what the next step finds; of a checkpoint that was loaded, the counts of steps are others too."""
        if self._versions() == self._seen:
            return []
        counts = zip(self._held.values(), self._counts, strict=True)
        if any(number_of(self._optimizer, p) not in (0, int(count)) for p, count in counts):
            return []
        found = check_between(
            self._left,
            {name: spread(p) for name, p in self._held.items()},
            {name: self._states(p) for name, p in self._held.items()},
            {},
            {},
        )
        # That all of a few are is nothing that is known of all.
        names = tuple(self._held)
        return [replace(each, where=each.where or names) for each in found if each.status == DEPARTS]


def check_between(
    left: LeftAfterStep,
    weights: Mapping[str, Tensor],
    states: Mapping[str, Mapping[str, Tensor]],
    outside: Mapping[str, Tensor],
    numbers: Mapping[str, int],
) -> list[PieceResult]:
    """Compare what a step left with what the next one finds.

    Args:
        weights, states: samples at the same places, before the next step.
        outside: samples of the parameters in ``left.outside``.
        numbers: the optimizer's counts of steps.
    """
    found = []
    for name, sample in left.parameters.items():
        after, now = sample.weight_after, weights.get(name)
        if after is None or now is None or now.shape != after.shape or _is_same(now, after):
            continue
        result = PieceResult(PIECE, DEPARTS, (name,), _apart(now, after), 0.0, "weights-written", step=left.step)
        found.append(_written(result, sample, after, now))
    for name, sample in left.parameters.items():
        for state, kept in sample.states_after.items():
            now = states.get(name, {}).get(state)
            if now is not None and now.shape == kept.shape and bool(((now == kept) | kept.isnan()).all()):
                continue
            cause = "states-lost" if now is None or not now.any() else "states-written"
            values: dict[str, object] = {"state": state}
            if cause == "states-written" and 0 < (number := numbers.get(name, 0)) != sample.number:
                cause, values = "states-of-other-step", {"step": sample.number, "at": number}
            found.append(PieceResult(PIECE, DEPARTS, (name,), 1.0, 0.0, cause, values, left.step))
    absent = [name for name, before in left.outside.items() if name in outside and outside[name].equal(before)]
    if absent:
        found.append(PieceResult("update", DEPARTS, tuple(absent), 1.0, 0.0, "no-group", step=left.step))
    if all(each.piece != PIECE for each in found):
        found.append(PieceResult(PIECE, EQUAL, step=left.step))
    return joined(found, len(left.parameters))


def _is_same(now: Tensor, after: Tensor) -> bool:
    """Whether values are the same, or what is left of them after a way to other ones and back, as two averages take it."""
    if bool(((now == after) | after.isnan()).all()):
        return True
    return now.dtype in (torch.float32, torch.float64) and _apart(now, after) <= 4 * torch.finfo(now.dtype).eps


def _apart(now: Tensor, after: Tensor) -> float:
    return float((now.double() - after.double()).norm() / max(float(after.double().norm()), 1e-300))


def _written(result: PieceResult, sample: ParameterSample, after: Tensor, now: Tensor) -> PieceResult:
    if now.equal(sample.weight):
        return replace(result, cause="step-undone")
    if (narrow := narrower_format(now.double(), after.double(), now.dtype)) is not None:
        return replace(result, cause="weight-narrow", values={"format": narrow})
    (factor,), rest = fitted(now.double(), [after.double()])
    if rest <= 4 * torch.finfo(now.dtype).eps * float(after.double().norm()):
        return replace(result, cause="weights-scaled", values={"factor": factor})
    share = float((now != after).double().mean())
    return replace(result, values={"share": share})


class AverageCheck:
    """Follows an average of the weights over audited steps."""

    def __init__(self) -> None:
        self._still = 0

    def check(self, left: LeftAfterStep, averages: Mapping[str, Tensor]) -> list[PieceResult]:
        """Compare the average before the next step with a mean of what it was and the weights.

        Args:
            averages: samples before the next step.
        """
        kinds = []
        for name, before in left.averages.items():
            sample, now = left.parameters.get(name), averages.get(name)
            if sample is None or sample.weight_after is None or now is None or before.equal(sample.weight_after):
                continue
            if now.equal(before):
                kinds.append("average-still")
                continue
            after = sample.weight_after.double()
            (kept, taken), rest = fitted(now.double(), [before.double(), after])
            if rest > 1e-4 * float(after.norm()):
                kinds.append("average-other")
            else:
                is_between = near(kept + taken, 1.0, 1e-3) and -1e-3 <= taken <= 1 + 1e-3
                kinds.append("" if is_between else "average-other")
        if not kinds:
            return []
        self._still = self._still + 1 if all(kind == "average-still" for kind in kinds) else 0
        others = kinds.count("average-other")
        cause = "average-other" if others * 2 > len(kinds) else "average-still" if self._still >= _STILL else ""
        return [PieceResult(PIECE, DEPARTS, (), 1.0, 0.0, cause, step=left.step)] if cause else []
