"""Faults composed at random from the pieces of a training loop: how many the audit of steps names, and how often it is wrong.

A fault is drawn from the line of the loop that it is in, an operation on what passes there (multiply, cast, zero, mix with a
stale value, cut a part, shift, wrong axis), the tensors that it is about, its strength and the step from which on it acts.
The draw knows nothing of the audit's alternatives; what counts as the right name is written down beside each operation. The
strengths reach down to 1 %. Only the first third of the draws (``--tuning``) was looked at while the audit was written.

- *first*: the first finding has a right name and, if the fault is in one tensor, names it; *three*: one of the first three has.
- *located*: a note says that the right piece departs, without a cause.
- *wrong*: an error or warning comes first, and its name is not right.
- *silent*: no finding.

Baseline: the same loop without a fault, in every kind of loop of ``HEALTHY``, where nothing may be found.

Faults of data and of evaluations (``--data``) are drawn apart: their loops run for longer, with several orders of rows, and
evaluate every other step. So are those of ``_drawn_faults.py``: counts of steps and places of epsilon (``--counts``), schedules
and resumes (``--schedules``), positions, padding and dropout (``--positions``).

Run: ``./dev bench random_faults [--quick] [--tuning] [--data | --counts | --schedules | --positions]``.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from _drawn_faults import KINDS, Fault
from timing import Report, Row, parser
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from narrowgauge.recompute.task import task
from recompute.audited_loop import LENGTH, VOCABULARY, Loop

FORMATS = (torch.bfloat16, torch.float16, torch.float8_e4m3fn)
FACTORS = (0.0, 0.1, 0.5, 0.9, 0.99, 1.01, 1.1, 1.5, 2.0, 3.0, 10.0, -1.0)
STEPS = 9
LOOPS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "adamw, clipped": {"clip": 0.25, "task": task(max_grad_norm=0.25)},
    "sgd": {"optimizer": torch.optim.SGD, "lr": 0.1, "momentum": 0.9},
    "autocast": {"autocast": True},
    "one micro-batch": {"micro_batches": 1},
}
HEALTHY: dict[str, dict[str, Any]] = {
    **LOOPS,
    "dropout": {"dropout": 0.1},
    "bfloat16 weights": {"dtype": torch.bfloat16},
    "fused": {"fused": True},
    "adam": {"optimizer": torch.optim.Adam},
    "no decay": {"weight_decay": 0.0},
    "four micro-batches": {"micro_batches": 4},
    "large rate": {"lr": 0.1},
    "tiny rate": {"lr": 1e-7},
    "beta2 0.95": {"betas": (0.9, 0.95)},
    "nesterov": {"optimizer": torch.optim.SGD, "lr": 0.1, "momentum": 0.9, "nesterov": True},
}


# ── operations on a tensor ────────────────────────────────────────────────────────────────────────────────────────────


def operation(draw: random.Random, kinds: Sequence[str]) -> tuple[str, str, Callable[[Tensor, Tensor], Tensor]]:
    """A kind, its words, and a function of a tensor and its stale value."""
    kind = draw.choice(list(kinds))
    factor, share = draw.choice(FACTORS), draw.choice((0.05, 0.25, 0.5))
    narrow = draw.choice(FORMATS)
    if kind == "multiply":
        return ("zero" if factor == 0 else kind), f"times {factor}", lambda x, old: x * factor
    if kind == "cast":
        return kind, f"cast to {narrow}", lambda x, old: x.to(narrow).to(x.dtype)
    if kind == "stale":
        return kind, f"{share} of the stale value", lambda x, old: (1 - share) * x + share * old
    if kind == "revert":
        return kind, "the stale value", lambda x, old: old.clone()
    if kind == "part":

        def cut(x: Tensor, old: Tensor) -> Tensor:
            x = x.clone()
            x.view(-1)[: max(1, int(share * x.numel()))] = old.view(-1)[: max(1, int(share * x.numel()))]
            return x

        return kind, f"{share} of the elements stale", cut
    raise KeyError(kind)


def chosen(draw: random.Random, loop: Loop) -> tuple[str, str, Callable[[Loop], dict[str, Tensor]]]:
    """A set of parameters: words, the name if it is one, and the parameters of a loop."""
    names = [name for name, _ in loop.model.named_parameters()]
    kind = draw.choice(("one", "one", "all", "matrices", "vectors"))
    if kind == "one":
        name = draw.choice(names)
        return name, name, lambda loop: {name: dict(loop.model.named_parameters())[name]}

    def of(loop: Loop) -> dict[str, Tensor]:
        named = dict(loop.model.named_parameters())
        return {n: p for n, p in named.items() if kind == "all" or (p.ndim > 1) == (kind == "matrices")}

    return kind, "", of


def around(loop: Loop, place: str, after: Callable[[], None], before: Callable[[], None] = lambda: None) -> None:
    """Act before and after a line of a loop."""
    line = getattr(loop, place)

    def both(*args: Any) -> None:
        before()
        line(*args)
        after()

    setattr(loop, place, both)


def inside_step(optimizer: Any, before: Callable[[], None], after: Callable[[], None]) -> None:
    """Act inside the optimizer's step: between the hooks of whoever watches it."""
    optimizer.register_step_pre_hook(lambda *_: before())
    handle = optimizer.register_step_post_hook(lambda *_: after())
    optimizer._optimizer_step_post_hooks.move_to_end(handle.id, last=False)


# ── the pieces ────────────────────────────────────────────────────────────────────────────────────────────────────────


def of_gradient(draw: random.Random, loop: Loop) -> Fault:
    kind, words, change = operation(draw, ("multiply", "multiply", "cast", "stale", "revert", "part"))
    who, where, parameters = chosen(draw, loop)
    names = {
        "multiply": {"gradient-scaled"}, "zero": {"gradient-zero"}, "cast": {"gradient-narrow", "gradient-underflow"},
        "stale": {"gradient-kept", "gradient-stale"}, "revert": {"gradient-stale"}, "part": {"part"},
    }[kind]  # fmt: skip

    def plant(loop: Loop) -> None:
        old: dict[str, Tensor] = {}

        def edit() -> None:
            for name, p in parameters(loop).items():
                if p.grad is not None:
                    own = p.grad.clone()
                    p.grad.copy_(change(own, old.get(name, own)))
                    old[name] = own

        around(loop, "after_backward", edit)

    return Fault(f"gradient of {who}: {words}", names, "gradient", where, plant, set(parameters(loop)))


def of_micro_batches(draw: random.Random, loop: Loop) -> Fault:
    factor = draw.choice((0.0, 0.5, 2.0))
    names = {"micro-batch-missing", "micro-batches-weighted", "micro-batches-uneven", "loss-scaled"}

    def plant(loop: Loop) -> None:
        number = draw.randrange(loop.micro_batches)
        backward = loop.backward

        def one(tokens: Tensor, place: int) -> None:
            if place == number and factor == 0:
                (loop.loss(tokens) * 1.0).detach()
            elif place == number:
                (factor * loop.loss(tokens)).backward()
            else:
                backward(tokens, place)

        loop.backward = one  # type: ignore[method-assign]

    return Fault(f"one micro-batch counts {factor}", names, "loss", "", plant)


def of_loss(draw: random.Random, loop: Loop) -> Fault:
    kind = draw.choice(("shift", "factor", "options", "rows"))
    shift, factor = draw.choice((-1, 0, 2, 3)), draw.choice([f for f in FACTORS if f])
    smoothing, share = draw.choice((0.01, 0.1)), draw.choice((0.05, 0.25, 1.0))
    names = {
        "shift": {"labels-shifted"}, "factor": {"loss-scaled", "loss-sign"},
        "options": {"label-smoothing"}, "rows": {"labels-other"},
    }[kind]  # fmt: skip
    words = {"shift": f"labels shifted by {shift}", "factor": f"times {factor}", "options": f"smoothing {smoothing}"}

    def plant(loop: Loop) -> None:
        def loss(tokens: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16, enabled=loop.autocast):
                logits = loop.model(tokens[:, :-1]).float()
            labels = tokens.roll(-shift, 1)[:, :-1] if kind == "shift" else tokens[:, 1:]
            if kind == "rows":
                wrong = torch.rand(labels.shape, generator=torch.Generator().manual_seed(0)) < share
                labels = torch.where(wrong, labels.roll(1, 0), labels)
            given = {"label_smoothing": smoothing} if kind == "options" else {}
            mean = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), **given)
            return mean * (factor if kind == "factor" else 1.0) / loop.micro_batches

        loop.loss = loss  # type: ignore[method-assign]

    return Fault(f"loss: {words.get(kind, f'labels of other rows, {share}')}", names, "loss", "", plant)


def of_forward(draw: random.Random, loop: Loop) -> Fault:
    modules = [
        name for name, m in loop.model.named_modules() if name.startswith("blocks.") and isinstance(m, nn.Linear)
    ]
    where = draw.choice([*modules, "norm"])
    kind = draw.choice(("roll", "batch", "time", "cast", "multiply"))
    factor, narrow = draw.choice((0.01, 0.1, 1.0)), draw.choice(FORMATS[:2])
    names = {"roll": {"sees-future"}, "time": {"sees-future"}, "batch": {"rows-mixed"}, "cast": {"module-cast"}}
    apply: dict[str, Callable[[Tensor], Tensor]] = {
        "roll": lambda y: y + factor * y.roll(-1, 1),
        "time": lambda y: y - factor * y.mean(1, keepdim=True),
        "batch": lambda y: y - factor * y.mean(0, keepdim=True),
        "cast": lambda y: y.to(narrow).to(y.dtype),
        "multiply": lambda y: y * (1 + factor),
    }

    def plant(loop: Loop) -> None:
        dict(loop.model.named_modules())[where].register_forward_hook(lambda m, args, output: apply[kind](output))

    size = narrow if kind == "cast" else factor
    return Fault(f"output of {where}: {kind} {size}", names.get(kind, set()), "forward", where, plant)


def of_clip(draw: random.Random, loop: Loop) -> Fault:
    kind = draw.choice(("matrices", "vectors", "sum", "missing", "limit", "each"))
    # A norm over fewer values may be below the limit: then nothing is clipped.
    names = {"missing": {"clip-missing"}, "limit": {"clip-limit"}, "each": {"clip-each"}}
    names |= {"sum": {"clip-norm"}, "matrices": {"clip-norm", "clip-missing"}, "vectors": {"clip-norm", "clip-missing"}}
    limit = draw.choice((0.05, 0.2, 0.3))

    def plant(loop: Loop) -> None:
        loop.clip = loop.clip or 0.25
        own = list(loop.model.parameters())

        def clip() -> None:
            some = [p for p in own if p.grad is not None and (kind == "sum" or (p.ndim > 1) == (kind == "matrices"))]
            if kind == "each":
                for p in own:
                    nn.utils.clip_grad_norm_([p], limit / 5)
            elif kind == "limit":
                nn.utils.clip_grad_norm_(own, limit)
            elif kind != "missing":
                norms = torch.stack([p.grad.norm() for p in some])
                norm = float(norms.sum() if kind == "sum" else norms.norm())
                for p in own:
                    if p.grad is not None:
                        p.grad.mul_(min(1.0, loop.clip / (norm + 1e-6)))

        loop.clip_gradients = clip  # type: ignore[method-assign]

    return Fault(f"clip: {kind} {limit if kind in ('limit', 'each') else ''}", names[kind], "clip", "", plant)


def of_settings(draw: random.Random, loop: Loop) -> Fault:
    """The step uses other settings than its groups say."""
    is_sgd = isinstance(loop.optimizer, torch.optim.SGD)
    kind = draw.choice(
        ("lr", "weight_decay", "momentum") if is_sgd else ("lr", "weight_decay", "eps", "beta1", "beta2")
    )
    factor = draw.choice([f for f in FACTORS if f >= 0])
    names = {
        "lr": {"rate", "step-lost", "frozen", "decay-lost"}, "weight_decay": {"decay", "decay-lost", "decay-in-gradient"},
        "eps": {"eps"}, "beta1": {"beta"}, "beta2": {"beta"}, "momentum": {"state-other-factors", "state-lost"},
    }[kind]  # fmt: skip

    def plant(loop: Loop) -> None:
        kept: list[Any] = []

        def before() -> None:
            for group in loop.optimizer.param_groups:
                name = "betas" if kind.startswith("beta") else kind
                kept.append((group, name, group[name]))
                if kind == "beta1":
                    group["betas"] = (1 - (1 - group["betas"][0]) * max(factor, 0.1) / 2, group["betas"][1])
                elif kind == "beta2":
                    group["betas"] = (group["betas"][0], 1 - (1 - group["betas"][1]) * max(factor, 0.1) * 2)
                elif kind == "eps":
                    group["eps"] = 10 ** draw.choice((-5, -4, -3))
                else:
                    group[name] = group[name] * factor

        def after() -> None:
            for group, name, value in kept:
                group[name] = value
            kept.clear()

        inside_step(loop.optimizer, before, after)

    return Fault(f"settings within the step: {kind} × {factor}", names, "update", "", plant)


def of_weights(draw: random.Random, loop: Loop) -> Fault:
    """What the step leaves of weights or states is edited, within the step or after it."""
    who, where, parameters = chosen(draw, loop)
    is_within = draw.choice((True, False))
    state = draw.choice(("", "", "exp_avg", "exp_avg_sq")) if isinstance(loop.optimizer, torch.optim.Adam) else ""
    kind, words, change = operation(draw, ("multiply", "cast", "stale", "revert", "part"))
    if state:
        names = {
            "multiply": {"state-other-factors", "states-written"}, "zero": {"state-zero", "states-lost"},
            "cast": {"state-narrow", "states-written"}, "stale": {"state-other-factors", "beta", "states-written"},
            "revert": {"state-frozen", "states-written"}, "part": {"part", "states-written"},
        }[kind]  # fmt: skip
    else:
        names = {
            "multiply": {"weights-scaled", "decay"}, "zero": {"weights-scaled", "weights-written"}, "cast": {"weight-narrow"},
            "stale": {"rate", "weights-written"}, "revert": {"frozen", "step-undone"}, "part": {"part", "weights-written"},
        }[kind]  # fmt: skip

    def plant(loop: Loop) -> None:
        old: dict[str, Tensor] = {}

        def value(p: Tensor) -> Tensor | None:
            return loop.optimizer.state[p].get(state) if state else p.detach()

        def before() -> None:
            old.update({n: v.clone() for n, p in parameters(loop).items() if (v := value(p)) is not None})

        def after() -> None:
            with torch.no_grad():
                for name, p in parameters(loop).items():
                    if (now := value(p)) is not None and name in old:
                        now.copy_(change(now, old[name]))

        if is_within:
            inside_step(loop.optimizer, before, after)
        else:
            around(loop, "update", after, before)

    place, piece = ("within the step", "update") if is_within else ("after the step", "between")
    says = f"{state or 'weight'} of {who} {place}: {words}"
    return Fault(says, names, piece, where, plant, set(parameters(loop)))


PIECES: tuple[Callable[[random.Random, Loop], Fault], ...] = (
    of_gradient, of_gradient, of_micro_batches, of_loss, of_forward, of_clip, of_settings, of_weights, of_weights,
)  # fmt: skip


# ── data and evaluations ──────────────────────────────────────────────────────────────────────────────────────────────

LONG = 41
ORDERS = ("new", "frequent", "epochs", "replacement")


def in_order(kind: str, number: int, seed: int) -> Iterator[Tensor]:
    """Batches of four rows: always new, of tokens that come unevenly, in epochs over some rows, or drawn from them."""
    generator = torch.Generator().manual_seed(seed)
    odds = 1 / torch.arange(1, VOCABULARY + 1, dtype=torch.float64) if kind == "frequent" else torch.ones(VOCABULARY)

    def rows(count: int) -> Tensor:
        return torch.multinomial(odds, count * (LENGTH + 1), True, generator=generator).view(count, LENGTH + 1)

    data = rows(4 * number)
    while True:
        if kind in ("new", "frequent"):
            yield rows(4)
        elif kind == "epochs":
            yield from data[torch.randperm(len(data), generator=generator)].split(4)
        else:
            yield data[torch.randint(0, len(data), (4,), generator=generator)]


class EvaluatedLoop(Loop):
    """A loop that evaluates every other step. Its methods are further places for a fault."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        generator = torch.Generator().manual_seed(7)
        self.held = torch.randint(0, VOCABULARY, (120, LENGTH + 1), generator=generator)
        self.sizes = (50, 50, 20)

    def validation(self) -> list[Tensor]:
        return list(self.held.split(list(self.sizes)))

    def count(self, losses: list[Tensor]) -> float:
        return float(torch.cat(losses).mean())

    def weights(self, own: dict[str, Tensor]) -> dict[str, Tensor]:
        """The weights to evaluate with."""
        return own

    @torch.no_grad()
    def set_weights(self, weights: dict[str, Tensor]) -> None:
        for name, p in self.model.named_parameters():
            p.copy_(weights[name])

    @torch.no_grad()
    def evaluate(self) -> None:
        own = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        self.set_weights(self.weights(own))
        losses = []
        for tokens in self.validation():
            with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
                logits = self.model(tokens[:, :-1]).float()
            losses.append(nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none"))
        if self.watcher is not None:
            self.watcher.evaluated(self.count(losses))
        self.set_weights(own)

    def run(self, steps: int = 4) -> Loop:
        for _ in range(steps):
            super().run(1)
            if self.step % 2 == 0:
                self.evaluate()
        return self


def of_data(draw: random.Random, loop: Loop) -> Fault:
    """Batches are edited after they were read."""
    kind = draw.choice(("stale", "stale", "copied", "sorted", "mapped", "zeroed", "mixed", "restarted"))
    back, share = draw.choice((1, 1, 2, 4, 8)), draw.choice((0.25, 0.5, 1.0))
    positions, key = draw.choice((0.02, 0.1, 0.5, 1.0)), draw.choice(("first", "mean", "last", "largest"))
    names = {
        "stale": {"rows-again", "rows-few"}, "copied": {"rows-twice"}, "sorted": {"rows-sorted"}, "mapped": {"tokens-change"},
        "zeroed": {"tokens-change"}, "mixed": {"tokens-change"}, "restarted": {"rows-anew", "rows-again", "rows-few"},
    }[kind]  # fmt: skip
    says = {
        "stale": f"{share} of the rows of {back} batches before", "copied": f"{share} of the rows copied over the others",
        "sorted": f"sorted by {key}", "mapped": f"{positions} of the tokens are others",
        "zeroed": f"{positions} of the tokens are 0",
        "mixed": f"{share} of the rows of another source", "restarted": "read from the beginning",
    }[kind]  # fmt: skip
    of_key: dict[str, Callable[[Tensor], Tensor]] = {
        "first": lambda x: x[:, 0], "mean": lambda x: x.double().mean(1), "last": lambda x: x[:, -1],
        "largest": lambda x: x.amax(1),
    }  # fmt: skip

    def plant(loop: Loop) -> None:
        source, generator = iter(loop.data), torch.Generator().manual_seed(3)
        other = in_order("frequent", 8, 5)

        def edited() -> Iterator[Tensor]:
            kept: list[Tensor] = [next(source) for _ in range(back)]
            if kind == "sorted":
                pool = torch.cat([next(source) for _ in range(2 * LONG)])
                yield from pool[of_key[key](pool).argsort(stable=True)].split(4)
            if kind == "restarted":
                yield from loop.again()  # type: ignore[attr-defined]
            while True:
                batch = next(source).clone()
                number = max(1, int(share * len(batch)))
                hit = torch.rand(batch.shape, generator=generator) < positions
                if kind == "stale":
                    batch[:number] = kept[0][:number]
                    kept = [*kept[1:], batch]
                elif kind == "copied":
                    batch = (
                        batch[:1].repeat(len(batch), 1) if share == 1.0 else torch.cat([batch[number:], batch[:number]])
                    )
                    batch[-number:] = batch[:1]
                elif kind == "mapped":
                    batch = torch.where(hit, (batch * 5 + 7) % 13, batch)
                elif kind == "zeroed":
                    batch = torch.where(hit, 0, batch)
                elif kind == "mixed":
                    batch[:number] = next(other)[:number]
                yield batch

        loop.data = edited()

    return Fault(f"data: {says}", names, "data", "", plant)


def of_leak(draw: random.Random, loop: Loop) -> Fault:
    """Evaluated rows are trained on, in place of others."""
    share = draw.choice((0.1, 0.25, 0.5, 1.0))

    def plant(loop: Loop) -> None:
        source, held = iter(loop.data), loop.held  # type: ignore[attr-defined]
        leaked = held[torch.randperm(len(held), generator=torch.Generator().manual_seed(1))][: int(share * len(held))]

        def edited() -> Iterator[Tensor]:
            for row in leaked:
                batch = next(source).clone()
                batch[0] = row
                yield batch
            yield from source

        loop.data = edited()

    return Fault(
        f"{share} of the evaluated rows are trained on", {"rows-evaluated", "evaluated-on-training"}, "data", "", plant
    )


def of_evaluated_rows(draw: random.Random, loop: Loop) -> Fault:
    share = draw.choice((0.05, 0.25, 1.0))

    def plant(loop: Loop) -> None:
        held = loop.held.clone()  # type: ignore[attr-defined]
        number = max(1, int(share * len(held)))
        others = torch.randint(0, VOCABULARY, held.shape, generator=torch.Generator().manual_seed(11))
        held[:number] = others[:number]
        loop.held = held  # type: ignore[attr-defined]

    return Fault(f"evaluation: {share} of the rows are others", {"evaluation-data-changed"}, "evaluation", "", plant)


def of_evaluated_weights(draw: random.Random, loop: Loop) -> Fault:
    kind = draw.choice(("revert", "late", "multiply", "cast", "average", "sum", "zero"))
    factor, narrow, decay = draw.choice([f for f in FACTORS if f != 0]), draw.choice(FORMATS), draw.choice((0.5, 0.9))
    names = {
        "revert": {"evaluated-stale"}, "late": {"evaluated-stale"}, "multiply": {"evaluated-scaled"},
        "cast": {"evaluated-narrow"}, "average": set(), "sum": {"evaluated-scaled"}, "zero": {"evaluated-scaled"},
    }[kind]  # fmt: skip

    def plant(loop: Loop) -> None:
        kept: list[dict[str, Tensor]] = []

        def weights(own: dict[str, Tensor]) -> dict[str, Tensor]:
            last = kept[-1] if kept else {n: torch.zeros_like(w) for n, w in own.items()} if kind == "zero" else own
            if kind in ("multiply", "cast"):
                return {n: w * factor if kind == "multiply" else w.to(narrow).to(w.dtype) for n, w in own.items()}
            taken = 1.0 if kind == "sum" else 1 - decay
            now = own if kind in ("revert", "late") else {n: decay * last[n] + taken * w for n, w in own.items()}
            if kind != "revert" or not kept:
                kept.append(now)
            return last if kind in ("revert", "late") else now

        loop.weights = weights  # type: ignore[attr-defined]

    size = {"multiply": factor, "cast": narrow, "average": decay, "sum": decay, "zero": decay}.get(kind, "")
    return Fault(f"evaluated weights: {kind} {size}", names, "evaluation", "", plant)


def of_evaluated_loss(draw: random.Random, loop: Loop) -> Fault:
    kind, factor = draw.choice(("number", "means", "sum", "factor")), draw.choice((0.9, 0.99, 1 / math.log(2)))
    more, is_uneven = draw.choice((-2, -1, 1)), draw.choice((True, False))
    names = {
        "number": {"evaluation-count"}, "means": {"evaluation-mean-of-means"}, "sum": {"evaluation-scaled"},
        "factor": {"evaluation-scaled"},
    }[kind]  # fmt: skip

    def plant(loop: Loop) -> None:
        def count(losses: list[Tensor]) -> float:
            tokens = torch.cat(losses)
            if kind == "number":
                return float(tokens.sum()) / (len(tokens) + more * (len(tokens) // LENGTH))
            if kind == "factor":
                return factor * float(tokens.mean())
            means = torch.stack([each.mean() for each in losses])
            return float(means.sum() if kind == "sum" else means.mean())

        loop.count = count  # type: ignore[attr-defined]
        if kind == "means" and is_uneven:
            loop.sizes = (115, 5)  # type: ignore[attr-defined]

    size = {"number": more, "factor": factor, "means": "(115, 5)" if is_uneven else ""}.get(kind, "")
    return Fault(f"evaluated loss: {kind} {size}", names, "evaluation", "", plant)


DATA_PIECES: tuple[Callable[[random.Random, Loop], Fault], ...] = (
    of_data, of_data, of_data, of_leak, of_evaluated_rows, of_evaluated_weights, of_evaluated_loss,
)  # fmt: skip


# ── the trial ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def trial(seed: int) -> Row:
    """Draw a fault, run a loop with it, and judge what the audit says."""
    draw = random.Random(seed)
    kind = draw.choice(list(LOOPS))
    settings = dict(LOOPS[kind])
    make = draw.choice(PIECES)
    if make is of_clip:
        settings = dict(LOOPS["adamw, clipped"])
        kind = "adamw, clipped"
    if make is of_micro_batches:
        settings["micro_batches"] = 2
    start = draw.randrange(2, 6)
    loop = Loop(every=4, **settings)
    return judged(seed, kind, make(draw, loop), loop, start, STEPS)


def data_trial(seed: int) -> Row:
    """The same for a fault of the data or of an evaluation."""
    draw = random.Random(seed)
    kind, order, number = draw.choice(list(LOOPS)), draw.choice(ORDERS), draw.choice((3, 30, 300))
    start, make = draw.randrange(9, 20), draw.choice(DATA_PIECES)
    loop = EvaluatedLoop(every=4, **LOOPS[kind])
    loop.data = in_order(order, number, seed)
    loop.again = lambda: in_order(order, number, seed)  # type: ignore[attr-defined]
    size = f" of {4 * number}" if order in ("epochs", "replacement") else ""
    return judged(seed, f"{kind}; rows {order}{size}", make(draw, loop), loop, start, LONG)


def kind_trial(kind: str, seed: int) -> Row:
    """The same for a fault of :data:`_drawn_faults.KINDS`, with the loop that it needs."""
    drawn = KINDS[kind][0](random.Random(seed))
    return judged(seed, drawn.kind, drawn.fault, drawn.loop, drawn.start, drawn.steps)


def judged(seed: int, kind: str, fault: Fault, loop: Loop, start: int, steps: int) -> Row:
    """Run a loop, with a fault from a step on, and judge what the audit says."""
    loop.run(start)
    assert not loop.findings(), "something was found before the fault"
    fault.plant(loop)
    loop.run(steps - start)
    found = loop.findings()

    def is_right(finding: Any) -> bool:
        names = [name for name in finding.where.split(", ") if name]
        shown = {name.split(" and ")[0] for name in names}
        is_there = not fault.where or not names or any(fault.where in n for n in names)
        return finding.name in fault.names and is_there and (fault.members is None or shown <= fault.members)

    first, three = bool(found) and is_right(found[0]), any(map(is_right, found[:3]))
    is_note = bool(found) and found[0].severity == "note"
    if first:
        answer = "first"
    elif not found:
        answer = "silent"
    elif is_note:
        answer = "located" if found[0].name == f"{fault.piece}-departs" else "note elsewhere"
    else:
        answer = "wrong"
    said = "; ".join(f"{each.name} ({each.where})" if each.where else each.name for each in found[:3])
    return {
        "seed": seed, "loop": kind, "from step": start, "fault": fault.says.strip() + ("" if fault.names else " (no fault)"),
        "answer": answer, "in three": "yes" if three else "", "said": said,
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    options = parser(__doc__, rounds=1)
    options.add_argument(
        "--tuning", action="store_true", help="only the draws that were looked at while the audit was written"
    )
    flags = options.add_mutually_exclusive_group()
    flags.add_argument("--data", action="store_true", help="faults of data and of evaluations, in longer loops")
    for name, (_, words) in KINDS.items():
        flags.add_argument(f"--{name}", action="store_true", help=words)
    options.add_argument("--first", type=int, default=0, help="the number of the first draw")
    options.add_argument("--draws", type=int, default=60, help="faults drawn; a third of them are tuning's")
    given = options.parse_args(arguments)
    report = Report("random faults", given)
    torch.set_num_threads(1)
    number = 6 if given.quick else given.draws
    third = number // 3
    parts = {"tuning": range(third), "kept aside": range(third, number)}
    if given.tuning:
        del parts["kept aside"]
    if given.first:
        parts = {f"from {given.first}": range(given.first, given.first + number)}
    kind = next((name for name in KINDS if getattr(given, name)), "")
    for part, seeds in parts.items():
        rows = [kind_trial(kind, seed) if kind else data_trial(seed) if given.data else trial(seed) for seed in seeds]
        answers = [row["answer"] for row in rows]
        counts = {answer: answers.count(answer) for answer in ("first", "located", "note elsewhere", "silent", "wrong")}
        counts["in three"] = sum(bool(row["in three"]) for row in rows)
        report.add(f"{part}: {len(rows)} faults", rows)
        report.add(f"{part}: answers", [counts])
    if not given.tuning and not kind:  # of those kinds, draws that are no fault are among the others
        rows = [
            {"loop": name, "named": ", ".join(sorted(Loop(every=2, **s).run(5).names()))} for name, s in HEALTHY.items()
        ]
        for order in ORDERS if given.data else ():
            for number in (3, 30, 300):
                loop = EvaluatedLoop(every=4)
                loop.data = in_order(order, number, 1)
                rows.append(
                    {"loop": f"rows {order}, {4 * number}", "named": ", ".join(sorted(loop.run(3 * LONG).names()))}
                )
        report.add("healthy loops", rows)
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
