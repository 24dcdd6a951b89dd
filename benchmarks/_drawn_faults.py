"""Further kinds of faults that ``random_faults.py`` draws, each with the loop that it needs: counts, schedules, positions.

As there, the draw knows nothing of the audit's alternatives, and the right names stand beside each kind. Some draws are no fault
at all, as keys that are all turned further by one position: of those nothing may be named.
"""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from narrowgauge.recompute.task import task
from recompute.audited_loop import LENGTH, WIDTH, Loop
from recompute.pieces.test_moved_sequences import MASK, POSITIONS, watched
from recompute.pieces.test_schedules import MADE, SGD, Scheduled
from recompute.rules.test_other_counts import WrittenAdamW, halved


@dataclass
class Fault:
    """A drawn fault.

    Args:
        says: what it is.
        names: right names of findings.
        piece: where it is.
        where: the one tensor or module that it is about, or empty.
        plant: puts it into a loop.
        members: the tensors that it is about; ``None`` for all.
    """

    says: str
    names: set[str]
    piece: str
    where: str
    plant: Callable[[Loop], None]
    members: set[str] | None = None


@dataclass
class Drawn:
    """A fault and its loop.

    Args:
        kind: of the loop, in words.
        start: the number of steps before the fault.
        steps: of the whole loop.
    """

    kind: str
    fault: Fault
    loop: Loop
    start: int
    steps: int


# ── counts of steps, and places of epsilon ────────────────────────────────────────────────────────────────────────────

DENOMINATORS: dict[str, tuple[Callable[[Tensor, float, float], Tensor], str]] = {
    "added to the root, which is corrected": (lambda v, c, eps: (v.sqrt() + eps) / c**0.5, "eps-before-correction"),
    "added before the correction": (lambda v, c, eps: ((v + eps) / c).sqrt(), "eps-before-correction"),
    "squared, added before the correction": (lambda v, c, eps: ((v + eps**2) / c).sqrt(), "eps-before-correction"),
    "added under the root": (lambda v, c, eps: (v / c + eps).sqrt(), "eps-inside-root"),
    "squared, added under the root": (lambda v, c, eps: (v / c + eps**2).sqrt(), "eps-inside-root"),
}


def of_counts(draw: random.Random) -> Drawn:
    """AdamW written by hand, with another count of steps, another place for epsilon, or a factor on the rate."""
    betas, eps = (0.9, draw.choice((0.95, 0.99, 0.999))), draw.choice((1e-8, 1e-6, 1e-4, 1e-3))
    micro_batches, decay = draw.choice((1, 2, 3)), draw.choice((0.0, 0.1))
    given: dict[str, Any] = {"lr": draw.choice((3e-4, 1e-3)), "betas": betas, "eps": eps, "weight_decay": decay}
    loop = halved(Loop(every=4, optimizer=WrittenAdamW, micro_batches=micro_batches, **given))
    start = draw.randrange(5, 14)
    what = draw.choice(("anew", "anew", "beside", "shared", "place", "place", "eps", "factor"))
    make = {"anew": _count, "beside": _count, "shared": _shared_count}.get(what, _denominator)
    return Drawn(f"{micro_batches} micro-batches, {given}", make(draw, what, loop, start), loop, start, 25)


def _count(draw: random.Random, what: str, loop: Loop, start: int) -> Fault:
    who, more = draw.choice(("all", "matrices", "vectors")), draw.choice((-1, 1)) if what == "beside" else -start
    members = {n for n, p in loop.model.named_parameters() if who == "all" or (p.ndim > 1) == (who == "matrices")}

    def plant(loop: Loop) -> None:
        own = {p for n, p in loop.model.named_parameters() if n in members}
        loop.optimizer.count = lambda optimizer, p, number: number + more if p in own else number

    return Fault(f"count of {who}: {more:+d}", {"step-count"}, "update", "", plant, members)


def _shared_count(draw: random.Random, what: str, loop: Loop, start: int) -> Fault:
    by = draw.choice(("group", "parameter", "micro-batch") if loop.micro_batches > 1 else ("group", "parameter"))

    def plant(loop: Loop) -> None:
        groups = [set(group["params"]) for group in loop.optimizer.param_groups]
        raised = {"group": start * len(groups), "parameter": start * sum(map(len, groups))}
        last: list[Any] = []

        def count(optimizer: Any, p: Tensor, own: int) -> int:
            raised["micro-batch"] = own * loop.micro_batches
            raised["parameter"] += 1
            now = [own, next(place for place, group in enumerate(groups) if p in group)]
            raised["group"] += last != now
            last[:] = now
            return raised[by]

        loop.optimizer.count = count

    return Fault(f"count raised by each {by}", {"count-shared", "step-count"}, "update", "", plant)


def _denominator(draw: random.Random, what: str, loop: Loop, start: int) -> Fault:
    place, factor = draw.choice(list(DENOMINATORS)), draw.choice((0.3, 0.5, 0.8, 0.9, 1.1, 1.25, 2.0, 3.0))
    times = 10.0 ** draw.choice((-3, -2, -1, 1, 2, 3))
    own = WrittenAdamW.denominator
    chosen: dict[str, tuple[Callable[[Tensor, float, float], Tensor], set[str], str]] = {
        "place": (DENOMINATORS[place][0], {DENOMINATORS[place][1]}, f"epsilon {place}"),
        "eps": (lambda v, c, eps: own(v, c, times * eps), {"eps"}, f"epsilon times {times:g}"),
        "factor": (lambda v, c, eps: own(v, c, eps) / factor, {"rate", "step-scaled"}, f"the step times {factor}"),
    }
    denominator, names, says = chosen[what]

    def plant(loop: Loop) -> None:
        loop.optimizer.denominator = denominator

    return Fault(says, names, "update", "", plant)


# ── schedules and resumes ─────────────────────────────────────────────────────────────────────────────────────────────


def of_schedules(draw: random.Random) -> Drawn:
    """A schedule that moves otherwise than once a step, and a resume that did not load everything."""
    name, micro_batches, is_sgd = draw.choice(list(MADE)), draw.choice((1, 2, 3)), draw.choice((False, False, True))
    loop = Scheduled(MADE[name], task(schedule="step"), micro_batches=micro_batches, **(SGD if is_sgd else {}))
    start, gap = draw.randrange(4, 10), draw.randrange(2, 6)
    what = draw.choice(
        (
            "still",
            "twice",
            "thrice",
            "per micro-batch",
            "ahead",
            "behind",
            "anew",
            "rate",
            "all",
            "schedule",
            "states",
            "older",
        )
    )
    each = what == "per micro-batch" and micro_batches > 1
    often = {"schedule-many", "schedule-per-micro-batch"}
    names = {
        "still": {"schedule-still"}, "twice": often, "thrice": often, "all": set(), "per micro-batch": often if each else set(),
        "ahead": {"schedule-beside"}, "behind": {"schedule-beside"}, "anew": {"schedule-anew"}, "rate": {"rate-of-other-step"},
        "schedule": {"schedule-anew"}, "states": {"states-lost"}, "older": {"states-of-other-step", "states-written"},
    }[what]  # fmt: skip
    says = {"all": "a resume with everything", "older": f"a resume with states of {gap} steps before"}
    says |= {name: f"a resume without the {name}" for name in ("schedule", "states")}
    fault = Fault(
        says.get(what, f"schedule: {what}"), names, "between", "", lambda loop: _move(loop, what, name, start, gap)
    )
    return Drawn(f"{name}, {micro_batches} micro-batches{', sgd' if is_sgd else ''}", fault, loop, start, start + 12)


def _move(loop: Any, what: str, name: str, start: int, gap: int) -> None:
    moves = {"still": 0, "twice": 2, "thrice": 3, "per micro-batch": loop.micro_batches}
    loop.moves = moves.get(what, 1)
    if what == "ahead":
        loop.schedule.step()
    if what in ("anew", "schedule"):
        fresh = MADE[name](torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=loop.optimizer.defaults["lr"]))
        loop.schedule.load_state_dict(fresh.state_dict())
    if what == "states":
        loop.optimizer.state.clear()
    if what in ("all", "schedule", "states"):
        loop.watcher.go_on_from(start)
    if what in ("behind", "older"):
        _later(loop, what, start, gap)
    if what == "rate":
        _late_rate(loop)


def _later(loop: Any, what: str, start: int, gap: int) -> None:
    """What happens once, after some more steps: the schedule leaves one out, or older states are loaded."""
    kept, after = copy.deepcopy(loop.optimizer.state_dict()["state"]), loop.after_update

    def both() -> None:
        is_now = loop.step == start + gap
        loop.moves = 0 if what == "behind" and is_now else 1
        after()
        if what == "older" and is_now:
            loop.optimizer.load_state_dict({**loop.optimizer.state_dict(), "state": kept})
            loop.watcher.go_on_from(loop.step)

    loop.after_update = both


def _late_rate(loop: Any) -> None:
    """The step takes the rate of the step before."""
    (group,), last = loop.optimizer.param_groups, [loop.optimizer.param_groups[0]["lr"]]

    def exchange(*_: Any) -> None:
        group["lr"], last[0] = last[0], group["lr"]

    def put_back(*_: Any) -> None:
        group["lr"] = last[0]

    loop.optimizer.register_step_pre_hook(exchange)
    handle = loop.optimizer.register_step_post_hook(put_back)
    loop.optimizer._optimizer_step_post_hooks.move_to_end(handle.id, last=False)


# ── positions, padding and dropout ────────────────────────────────────────────────────────────────────────────────────


def of_positions(draw: random.Random) -> Drawn:
    """A layer of attention with rotary positions, whose keys, outputs, mask or dropout are others."""
    inputs = {"position_ids": POSITIONS, **(MASK if (has_mask := draw.choice((False, True))) else {})}
    loop, start = watched(inputs), draw.randrange(2, 6)
    what = draw.choice(("keys", "keys", "shifted", "scales", "mask", "dropout", "packed", "table", "channels"))
    factor, shift, growth = draw.choice((0.0, 0.5, 0.9, 1.1)), draw.choice((1, 5)), draw.choice((1e-4, 1e-3, 1e-2))
    rate, length, part = draw.choice((0.01, 0.1, 0.5)), draw.choice((6, 8, 12)), draw.choice((2, 8))
    names = {
        "keys": {"positions-absolute", "order-unseen"}, "channels": {"positions-absolute"}, "scales": {"positions-absolute"},
        "mask": {"padding-seen"} if has_mask else set(), "dropout": {"random-in-evaluation"}, "packed": {"border-ignored"},
    }.get(what, set())  # fmt: skip
    size = {"keys": factor, "shifted": shift, "scales": growth, "dropout": rate, "packed": length, "channels": part}

    def plant(loop: Any) -> None:
        model = loop.model
        if what in ("keys", "shifted", "channels"):
            model.rotary = _TurnedKeys(model.rotary, factor, shift, part, what)
        elif what == "scales":
            seen: dict[str, Tensor] = {}
            model.rotary.register_forward_pre_hook(lambda m, args: seen.update(at=args[1]))
            model.head.register_forward_pre_hook(lambda m, args: (args[0] * (1 + growth * seen["at"][..., None]),))
        elif what == "mask":
            model.masks = False
        elif what == "dropout":
            model.attention_dropout, model.asks_for_mode = rate, False
        elif what == "packed":
            inputs["position_ids"] = POSITIONS % length
        else:
            model.table = nn.Embedding(LENGTH, WIDTH).requires_grad_(False)

    says = f"positions: {what} {size.get(what, '')}"
    return Drawn(f"rotary{', mask' if has_mask else ''}", Fault(says, names, "forward", "", plant), loop, start, 9)


class _TurnedKeys(nn.Module):
    """Turns queries, which come first, as they should be, and keys by other positions, or some of their channels not at all."""

    def __init__(self, rotary: nn.Module, factor: float, shift: int, part: int, what: str) -> None:
        super().__init__()
        self.own, self.what, self.factor, self.shift, self.part = rotary, what, factor, shift, part
        self.is_key = False

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        is_key, self.is_key = self.is_key, not self.is_key
        if not is_key:
            turned: Tensor = self.own(x, positions)
        elif self.what == "channels":
            turned = torch.cat([x[..., : self.part], self.own(x, positions)[..., self.part :]], -1)
        else:
            turned = self.own(x, positions * self.factor if self.what == "keys" else positions + self.shift)
        return turned


KINDS: dict[str, tuple[Callable[[random.Random], Drawn], str]] = {
    "counts": (of_counts, "counts of steps and places of epsilon"),
    "schedules": (of_schedules, "schedules and resumes"),
    "positions": (of_positions, "positions, padding and dropout"),
}
