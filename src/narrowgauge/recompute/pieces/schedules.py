"""Learning rates from step to step: whether the schedule that sets them moves once in each, from where it should.

A schedule is an object of :mod:`torch.optim.lr_scheduler` that holds the optimizer; those of a loop, of Hugging Face's and of
Lightning's trainers are found by that. Where rates come from elsewhere, nothing is said of them. How often a schedule has moved
is its ``last_epoch``: a number on the host, so it is read in every step.

A schedule may rightly move once an epoch, or at evaluations. It is judged where it moved in each of the last steps, or where it
was declared that it does.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.optim import lr_scheduler

from narrowgauge.optim.audit import unwrapped
from narrowgauge.recompute.fitting import near
from narrowgauge.recompute.object_states import living
from narrowgauge.recompute.piece_results import DEPARTS, PieceResult
from narrowgauge.recompute.task import EACH_STEP, OWN_SCHEDULE

PIECE = "between"
_STEPS = 3
"""Steps in which a schedule must have moved alike before that is reported."""
_EXPLAINED = 0.05
"""The part of a factor on the rate that the rate of another step may leave unexplained."""


def schedules_of(optimizer: torch.optim.Optimizer) -> list[Any]:
    """The schedules that hold an optimizer and move by themselves: none that is part of another, and none that waits for a loss.

    Cost: that of :func:`~narrowgauge.recompute.object_states.living`.
    """
    every = living(lr_scheduler.LRScheduler)
    own = [each for each in every if unwrapped(getattr(each, "optimizer", None)) is optimizer]
    own = [
        each for each in own if not isinstance(each, (lr_scheduler.ChainedScheduler, lr_scheduler.ReduceLROnPlateau))
    ]
    parts = {id(part) for each in own for part in _parts(each)}
    return [each for each in own if id(each) not in parts and isinstance(getattr(each, "last_epoch", None), int)]


def _parts(schedule: Any) -> Iterator[Any]:
    for value in vars(schedule).values():
        for each in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(each, lr_scheduler.LRScheduler):
                yield each


@dataclass
class _Followed:
    """A schedule, how far it was before each of the last steps, and how many forward passes each of them had."""

    schedule: weakref.ref[Any]
    places: list[int] = field(default_factory=list)
    passes: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)

    def add(self, place: int, passes: int, count: int) -> None:
        self.places = [*self.places, place][-_STEPS - 2 :]
        self.passes = [*self.passes, passes][-_STEPS - 1 :]
        self.counts = [*self.counts, count][-_STEPS - 2 :]

    @property
    def moves(self) -> list[int]:
        """How far it moved in each of the last steps; empty while those are few."""
        found = [after - before for before, after in zip(self.places, self.places[1:], strict=False)]
        return found[-_STEPS:] if len(found) >= _STEPS else []

    def is_moved_by(self, number: int) -> bool:
        return bool(self.moves) and all(each == number for each in self.moves)


class ScheduleHistory:
    """Follows the schedules and rates of an optimizer.

    Args:
        declared: a key of :data:`narrowgauge.recompute.task.SCHEDULES`.
        ranks: processes that train together; accelerate moves a schedule once for each of them.
    """

    def __init__(self, declared: str, ranks: int = 1) -> None:
        self.declared, self.ranks = declared, ranks
        self._followed: list[_Followed] = []
        self._rates: dict[int, tuple[float, ...]] = {}
        self._named: set[str] = set()
        self._is_from_start, self._begun = True, (0, 0)
        self._has_skipped = False
        self._restarts: list[PieceResult] = []

    def go_on_from(self, step: int, seen: int) -> None:
        """The loop goes on from a checkpoint of a step, after so many steps that were seen."""
        self._begun = step, seen
        for each in self._followed:
            each.places, each.passes, each.counts = [], [], []

    def begin_step(
        self, optimizer: torch.optim.Optimizer, seen: int, passes: int, count: int, *, is_search: bool, may_skip: bool
    ) -> None:
        """Read where the schedules are before a step.

        Args:
            seen: steps before it.
            passes: forward passes since the step before.
            count: the optimizer's own count of steps; 0 where it has none.
            is_search: look for schedules that are new.
            may_skip: a loss scaler may leave out steps, but not those of the schedule.
        """
        if self.declared == OWN_SCHEDULE:
            return
        self._has_skipped |= may_skip
        self._is_from_start &= seen > 0 or count == 0
        self._rates[seen + 1] = rates_of(optimizer)
        for old in list(self._rates)[1:-2]:  # the first is kept: a rate may be compiled in
            del self._rates[old]
        if is_search:
            known = {id(each.schedule()) for each in self._followed}
            new = [each for each in schedules_of(optimizer) if id(each) not in known]
            self._followed += [_Followed(weakref.ref(each)) for each in new]
        self._followed = [each for each in self._followed if each.schedule() is not None]
        for each in self._followed:
            each.add(int(getattr(each.schedule(), "last_epoch", 0)), passes, count)
            self._restarts += _restarts(each, seen)

    def results(self, seen: int) -> list[PieceResult]:
        """What is known of the schedules before a step; each departure once.

        Args:
            seen: steps before it.
        """
        found, self._restarts = self._restarts, []
        found += [result for each in self._followed for result in self._judged(each, seen)]
        if self.declared == EACH_STEP and self._followed and all(each.is_moved_by(0) for each in self._followed):
            found.append(_departs("schedule-still", seen))
        new = [each for each in found if each.cause not in self._named]
        self._named |= {each.cause for each in new}
        return new

    def _judged(self, schedule: _Followed, seen: int) -> Iterator[PieceResult]:
        moves = schedule.moves
        if not moves:
            return
        times = moves[-1]
        if times >= 2 and schedule.is_moved_by(times) and times != self.ranks:
            is_each_pass = set(schedule.passes[-_STEPS:]) == {times}
            yield _departs("schedule-per-micro-batch" if is_each_pass else "schedule-many", seen, times=times)
        elif schedule.is_moved_by(1):
            yield from self._from_where(schedule.places[-1], seen)

    def _from_where(self, place: int, seen: int) -> Iterator[PieceResult]:
        """Of a schedule that moves once a step: whether it is as far as the steps are."""
        step, at = self._begun
        if not step and not self._is_from_start:
            return
        done, since = step + seen - at, seen - at
        if step > 1 and place <= since + 1:
            yield _departs("schedule-anew", seen, was=done, now=place)
        elif place - done in (-1, 1) and not self._has_skipped:
            yield _departs("schedule-beside", seen, step=done + 1, of=place + 1)

    def named(self, result: PieceResult, group: int, step: int, after: Sequence[float]) -> PieceResult:
        """A result of the update whose rate is wrong, with the step whose rate it is, if it is that of another.

        Args:
            group: the index of the group that it is about.
            step: its number.
            after: the rates of all groups after the step.
        """
        own = self._rates.get(step)
        if own is None or group >= len(own) or not own[group]:
            return result
        factor = float(result.values["factor"])
        others = {at: rates for at, rates in {**self._rates, step + 1: tuple(after)}.items() if at != step}
        for at, rates in others.items():
            ratio = rates[group] / own[group] if group < len(rates) else 1.0
            if abs(ratio - 1) > 1e-6 and near(factor - 1, ratio - 1, _EXPLAINED):
                return replace(result, cause="rate-of-other-step", values={"of": at, "step": step, "factor": factor})
        return result


def _restarts(schedule: _Followed, seen: int) -> Iterator[PieceResult]:
    """A schedule that moved once a step and is at its begin again, while the optimizer's states did not go back with it."""
    moves = schedule.moves
    if moves and moves[-1] < 0 and set(moves[:-1]) == {1} and schedule.places[-1] <= 1:
        before, after = schedule.counts[-2:]
        if after > before > 0:
            yield _departs("schedule-anew", seen, was=schedule.places[-2], now=schedule.places[-1])


def rates_of(optimizer: torch.optim.Optimizer) -> tuple[float, ...]:
    """The learning rate of each group; 0 for one that is a tensor on a device, since reading it would wait."""
    return tuple(0.0 if _is_away(group["lr"]) else float(group["lr"]) for group in optimizer.param_groups)


def _is_away(rate: Any) -> bool:
    return isinstance(rate, torch.Tensor) and rate.device.type != "cpu"


def _departs(cause: str, seen: int, /, **values: object) -> PieceResult:
    return PieceResult(PIECE, DEPARTS, (), 1.0, 0.0, cause, values, seen)


# ── a loop that goes on from a checkpoint ─────────────────────────────────────────────────────────────────────────────


def check_resumed(
    is_counted: bool, step: int, counts: Iterable[int], states: Iterable[tuple[str, bool]], skipped: int | None
) -> list[PieceResult]:
    """Compare an optimizer's states with the step from which a loop goes on.

    Args:
        is_counted: whether the optimizer's rule counts its steps.
        step: that the checkpoint has done, above 0.
        counts: of the parameters' steps.
        states: of every parameter: the name of a state that the rule has, and whether it is there and not zero.
        skipped: how many steps the optimizer had left out, where that is known; otherwise a tenth of them, or 16, may be.
    """
    there: dict[str, bool] = {}
    for name, is_there in states:
        there[name] = there.get(name, False) or is_there
    lost = [name for name, is_there in there.items() if not is_there]
    if lost:
        return [_departs("states-lost", step, state=" and ".join(lost))]
    if not is_counted:
        return []
    if not (count := max(counts, default=0)):
        return [replace(_departs("count-anew", step, count=0), piece="update")]
    slack = max(16, step // 10) if skipped is None else skipped
    if count > step or count < step - slack:
        return [_departs("states-of-other-step", step, step=step, at=count)]
    return []
