"""A watched loop computes the same bits, a fault is told with its tensor, and a healthy loop is
silent.
"""

from __future__ import annotations

import copy
import gc
import itertools
import math
import re
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel
from torch.utils._python_dispatch import TorchDispatchMode

import narrowgauge as ng
from narrowgauge.analysis.reading import Reading
from narrowgauge.gauges import RunNotice
from narrowgauge.gauges.recording.watch import Watch
from ranks import run_ranks

VOCABULARY = 16
WIDTH = 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(WIDTH), nn.Dropout(0.1)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.mlp(self.norm(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.blocks = (
            nn.Embedding(VOCABULARY, WIDTH),
            nn.ModuleList(Block() for _ in range(2)),
        )
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(input=self.norm(x))
        return logits


class OwnAdamW(torch.optim.Optimizer):
    """AdamW as people write it: states under names of their own."""

    state_dtype: torch.dtype | None = None

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                dtype = self.state_dtype or p.dtype
                if not state:
                    zeros = torch.zeros_like(p, dtype=dtype)
                    state.update(step=0, m=zeros, v=zeros.clone())
                state["step"] += 1
                gradient = p.grad.to(dtype)
                state["m"].lerp_(gradient, 0.1)
                state["v"].lerp_(gradient.square(), 0.05)
                first = state["m"] / (1 - 0.9 ** state["step"])
                second = state["v"] / (1 - 0.95 ** state["step"])
                change = group["lr"] * first / (second.sqrt() + 1e-8)
                p.copy_((p.to(dtype) - change).to(p.dtype))


class WideAdamW(OwnAdamW):
    """Its step casts to float32 itself, as its states are."""

    state_dtype = torch.float32


def batch(step: int, rows: int = 4) -> Tensor:
    return (
        torch.randint(1, 4, (rows, 9), generator=torch.Generator().manual_seed(step)).cumsum(1)
        % VOCABULARY
    )


def loss_of(model: Any, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten())


class Loop:
    """A training loop whose lines a fault replaces."""

    adamw = partial(torch.optim.AdamW, lr=1e-2)

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(0)
        self.model = self.build_model().to(dtype)
        self.optimizer: Any = self.optimizer_of(self.model)

    def build_model(self) -> Any:
        return Model()

    def optimizer_of(self, model: nn.Module) -> Any:
        return self.adamw(model.parameters())

    def loss(self, step: int) -> Tensor:
        return loss_of(self.model, batch(step))

    def backward(self, step: int) -> None:
        self.loss(step).backward()

    def update(self, step: int) -> None:
        self.optimizer.step()

    def clear(self) -> None:
        self.optimizer.zero_grad()

    def after(self, step: int) -> None: ...

    def train(self, steps: int) -> Loop:
        for step in range(1, steps + 1):
            self.backward(step)
            self.update(step)
            self.clear()
            self.after(step)
        return self


def watched(loop: Loop, steps: int = 60) -> tuple[dict[str, Reading], Watch]:
    """Train; return the first reading of each kind."""
    watch = ng.watch(loop.model, loop.optimizer)
    readings = list[Reading]()
    watch._say = readings.extend  # type: ignore[method-assign]
    loop.train(steps)
    watch.remove()
    return {reading.what: reading for reading in reversed(readings)}, watch


# ── the same bits ─────────────────────────────────────────────────────────────────────────────────

OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "AdamW": partial(torch.optim.AdamW, lr=1e-2),
    "fused": partial(torch.optim.AdamW, lr=1e-2, fused=True),
    "SGD": partial(torch.optim.SGD, lr=1e-1, momentum=0.9),
    "own": partial(OwnAdamW, lr=1e-2),
    "ours": lambda parameters: ng.AdamW(parameters, lr=1e-2, storage="word", compile=False),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_watched_loop_computes_the_same_bits(name: str, dtype: torch.dtype) -> None:
    class Accumulated(Loop):
        adamw = staticmethod(OPTIMIZERS[name])

        def backward(self, step: int) -> None:
            for part in range(2):
                (loss_of(self.model, batch(2 * step + part)) / 2).backward()

    plain = Accumulated(dtype).train(6)
    loop = Accumulated(dtype)
    watched(loop, 6)
    assert all(
        torch.equal(p, q)
        for p, q in zip(plain.model.parameters(), loop.model.parameters(), strict=True)
    )


# ── the effective learning rate ───────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "kind",
    [torch.optim.AdamW, torch.optim.NAdam, torch.optim.SGD, torch.optim.Muon, OwnAdamW, WideAdamW],
)
def test_the_effective_rate_is_that_of_a_twin_in_float32(kind: Any) -> None:
    torch.manual_seed(0)
    rate = 3e-5 if kind is torch.optim.SGD else 3e-4
    model = nn.Sequential(nn.Linear(32, 48, bias=False), nn.Linear(48, 32, bias=False)).bfloat16()
    for p in model.parameters():
        nn.init.normal_(p, std=0.05)
    optimizer = kind(model.parameters(), lr=rate)
    watch = ng.watch(model, optimizer)
    watch._say = lambda readings: None  # type: ignore[method-assign]
    for step in range(1, 6):
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(step)).bfloat16()
        before = [p.detach().float() for p in model.parameters()]
        twins = [nn.Parameter(x.clone()) for x in before]
        wide = kind(twins, lr=rate)
        for p, twin in zip(model.parameters(), twins, strict=True):
            twin.grad = p.grad.float()  # type: ignore[union-attr]
            if p in optimizer.state:
                wide.state[twin] = {
                    name: value.float() if isinstance(value, Tensor) else value
                    for name, value in copy.deepcopy(optimizer.state[p]).items()
                }
        optimizer.step()
        wide.step()
    intended = torch.cat(
        [(t.detach() - x).flatten() for t, x in zip(twins, before, strict=True)]
    ).double()
    stored = torch.cat(
        [
            (p.detach().float() - x).flatten()
            for p, x in zip(model.parameters(), before, strict=True)
        ]
    )
    edq = float(intended @ stored.double() / intended.square().sum())
    assert (
        watch.numbers()["effective_lr/group0"] == pytest.approx(rate * edq, rel=1e-3) and edq < 0.99
    )
    has_own_rule = kind in (torch.optim.Muon, OwnAdamW, WideAdamW)
    assert list(watch.unseen) == ["the optimizer's step"] * has_own_rule


def test_our_optimizers_have_the_rate_of_their_audit() -> None:
    def rate(storage: str) -> float:
        loop = Loop(torch.bfloat16)
        loop.optimizer = ng.AdamW(
            loop.model.parameters(), lr=1e-4, storage=storage, audit_every=2, compile=False
        )
        loop.optimizer.on_alarm = lambda alarms: None
        return watched(loop, 10)[1].numbers()["effective_lr/group0"]

    assert rate("word") == pytest.approx(1e-4, rel=1e-3) and rate("naive") < 0.7e-4


def test_a_fault_is_told_once_and_again_when_it_is_twice_as_large() -> None:
    class Decayed(Loop):
        def after(self, step: int) -> None:
            self.optimizer.param_groups[0]["lr"] = 1e-3 * 0.9**step

    loop = Decayed(torch.bfloat16)
    watch = ng.watch(loop.model, loop.optimizer)
    shares = list[float]()
    watch._say = lambda readings: shares.extend(
        r.value / r.bound for r in readings if r.what == "effective-rate"
    )  # type: ignore[method-assign, operator, misc]
    loop.train(40)
    assert 2 < len(shares) < 8 and all(
        later < before / 2 for before, later in itertools.pairwise(shares)
    )


def test_the_sentence_names_the_step_and_both_rates() -> None:
    loop = Loop(torch.bfloat16)
    loop.optimizer.param_groups[0]["lr"] = 1e-4
    ng.watch(loop.model, loop.optimizer)
    with pytest.warns(
        RunNotice,
        match=r"^step 1: you train at \S+, not 0.0001: bfloat16 stored 0\.\d\d of the update",
    ):
        loop.train(2)


def test_a_sampled_step_reads_the_device_as_often_for_many_tensors_as_for_few(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reads = 0

    class Reads(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            nonlocal reads
            reads += func in (
                torch.ops.aten._local_scalar_dense.default,
                torch.ops.aten.equal.default,
            )
            return func(*args, **(kwargs or {}))

    def counted(read: Any) -> Any:
        def call(*args: Any) -> Any:
            nonlocal reads
            reads += 1
            return read(*args)

        return call

    def reads_of(depth: int) -> int:
        nonlocal reads
        loop = Loop(torch.bfloat16)
        loop.model.blocks.extend(Block().bfloat16() for _ in range(depth))
        loop.model.norm.requires_grad_(False)
        loop.optimizer = torch.optim.SGD(loop.model.parameters(), lr=1e-1, momentum=0.9)
        watch = ng.watch(loop.model, loop.optimizer)
        loop.train(4)
        loop.backward(5)
        reads = 0
        with monkeypatch.context() as patch, Reads():
            for name in ("cpu", "tolist"):
                patch.setattr(Tensor, name, counted(getattr(Tensor, name)))
            loop.update(5)
        assert "effective_lr/group0" in watch.numbers() and not watch.unseen
        return reads

    assert reads_of(0) == reads_of(6) < 8


# ── faults ────────────────────────────────────────────────────────────────────────────────────────


class KeptGradients(Loop):
    def clear(self) -> None: ...


class PythonList(Loop):
    def build_model(self) -> Any:
        class WithList(Model):
            def __init__(self) -> None:
                super().__init__()
                self.more, self.scale = [Block()], torch.ones(WIDTH, requires_grad=True)

            def forward(self, tokens: Tensor) -> Tensor:
                return self.head(self.more[0](self.embedding(tokens)) * self.scale)  # type: ignore[no-any-return]

        return WithList()


class Detached(Loop):
    def build_model(self) -> Any:
        model = super().build_model()
        model.blocks[1].mlp.register_forward_hook(lambda module, args, output: output.detach())
        return model


class ZeroRate(Loop):
    def optimizer_of(self, model: Any) -> Any:
        rest = [p for name, p in model.named_parameters() if not name.startswith("head")]
        return torch.optim.AdamW(
            [{"params": rest}, {"params": [*model.head.parameters()], "lr": 0.0}], lr=1e-2
        )


class Frozen(Loop):
    def clear(self) -> None:
        self.optimizer.zero_grad(set_to_none=False)

    def after(self, step: int) -> None:
        self.model.embedding.weight.requires_grad_(step < 5)


class Divided(Loop):
    def loss(self, step: int) -> Tensor:
        if step == 7:
            hook = (
                self.model.blocks[1]
                .mlp[2]
                .register_forward_hook(lambda module, args, output: output / 0.0)
            )
            loss = super().loss(step)
            hook.remove()
            return loss
        return super().loss(step)


class OneBadGradient(Loop):
    def backward(self, step: int) -> None:
        super().backward(step)
        if step == 7:
            self.model.head.bias.grad[3] = math.nan


class StaysInEvaluation(Loop):
    def after(self, step: int) -> None:
        if step == 20:
            self.model.eval()
            with torch.no_grad():
                loss_of(self.model, batch(99))


class EvaluatesInTraining(Loop):
    def after(self, step: int) -> None:
        if step == 20:
            with torch.no_grad():
                loss_of(self.model, batch(99))


class KeepsTheAverage(StaysInEvaluation):
    def after(self, step: int) -> None:
        super().after(step)
        self.model.train()
        if step == 20:
            with torch.no_grad():
                for p in self.model.parameters():
                    p.mul_(0.5)


class SlowNorms(Loop):
    adamw = partial(torch.optim.AdamW, lr=5e-4)

    def __init__(self) -> None:
        super().__init__(torch.bfloat16)


class Twice(Loop):
    def update(self, step: int) -> None:
        super().update(step)
        super().update(step)


class ClearedTooEarly(Loop):
    def backward(self, step: int) -> None:
        super().backward(step)
        self.optimizer.zero_grad(set_to_none=step % 2 == 0)


class ClearedTooEarlyNowAndThen(Loop):
    def backward(self, step: int) -> None:
        super().backward(step)
        if step % 2 == 0:
            self.optimizer.zero_grad()


class MergedBase(Loop):
    """A frozen weight keeps the roundings of something that is added to it and taken away."""

    def optimizer_of(self, model: Any) -> Any:
        model.embedding.requires_grad_(False)
        return self.adamw([p for p in model.parameters() if p.requires_grad])

    def after(self, step: int) -> None:
        base = self.model.embedding.weight
        with torch.no_grad():
            base.copy_(torch.nextafter(base, torch.full_like(base, 9.0)))


class OldMasters(Loop):
    """One step puts weights back to where masters were."""

    def update(self, step: int) -> None:
        handle = self.optimizer.register_step_post_hook(self.put_back)
        hooks = self.optimizer._optimizer_step_post_hooks
        hooks.move_to_end(handle.id, last=False)  # before the watch's
        super().update(step)
        handle.remove()
        self.step = step

    step = 0

    def put_back(self, *_: Any) -> None:
        if self.step == 20:
            with torch.no_grad():
                self.model.head.weight.add_(5.0)


class SecondOptimizer(Loop):
    def __init__(self) -> None:
        super().__init__()
        self.second = torch.optim.AdamW([self.model.head.weight])

    def update(self, step: int) -> None:
        super().update(step)
        self.second.step()


class SeparateHead(Loop):
    """The head has an optimizer of its own."""

    def __init__(self) -> None:
        super().__init__()
        second = torch.optim.SGD(self.model.head.parameters(), lr=1e-3)
        rest = [p for name, p in self.model.named_parameters() if not name.startswith("head")]
        self.optimizer = [self.adamw(rest), second]


class SteppedRarely(Loop):
    """The head has an optimizer that is not watched, and steps every second time."""

    def optimizer_of(self, model: Any) -> Any:
        self.second = torch.optim.SGD(model.head.parameters(), lr=1e-3)
        return self.adamw([p for n, p in model.named_parameters() if not n.startswith("head")])

    def update(self, step: int) -> None:
        super().update(step)
        if step % 2 == 0:
            self.second.step()
            self.second.zero_grad()


class KeptBySecond(SeparateHead):
    """Two optimizers, of which the loop clears the gradients of one."""

    def update(self, step: int) -> None:
        for optimizer in self.optimizer:
            optimizer.step()

    def clear(self) -> None:
        self.optimizer[0].zero_grad()


class ThawedLate(Loop):
    """A block is thawed after 60 steps, and the optimizer does not know it."""

    def optimizer_of(self, model: Any) -> Any:
        model.blocks[0].requires_grad_(False)
        return self.adamw([p for p in model.parameters() if p.requires_grad])

    def after(self, step: int) -> None:
        if step == 60:
            self.model.blocks[0].requires_grad_(True)


class LeavesBlockInEvaluation(StaysInEvaluation):
    """An evaluation puts the model in evaluation mode, and only a part of it back."""

    def after(self, step: int) -> None:
        super().after(step)
        if step == 20:
            self.model.training = True
            self.model.blocks[1].train()


class Overflows(Loop):
    """Every loss overflows float16, whatever its scale.

    The fused step is called, and skips itself.
    """

    def __init__(self) -> None:
        super().__init__()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, fused=True)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**25)

    def backward(self, step: int) -> None:
        self.scaler.scale(self.loss(step) * math.inf).backward()

    def update(self, step: int) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()


class AverageInBfloat16(Loop):
    """An exponential average of the weights."""

    adamw = partial(torch.optim.AdamW, lr=1e-3)
    dtype = torch.bfloat16
    decay = 0.9999
    gain = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.average = AveragedModel(self.model, multi_avg_fn=self.averaged).to(self.dtype)

    def averaged(self, averages: Any, weights: Any, number: Any) -> None:
        for average, weight in zip(averages, weights, strict=True):
            average.mul_(self.decay).add_(weight, alpha=self.gain - self.decay)

    def after(self, step: int) -> None:
        self.average.update_parameters(self.model)


class AverageRunsAway(AverageInBfloat16):
    dtype = torch.float32
    decay = 0.9
    gain = 1.5


FAULTS: dict[type[Loop], tuple[str, str, int]] = {
    KeptGradients: ("gradients-kept", "", 2),
    PythonList: ("missing-parameters", "scale and 6 others", 3),
    Detached: ("no-gradient", "blocks.1.norm.weight and 5 others", 55),
    ZeroRate: ("never-moved", "head.weight and 1 other", 55),
    Frozen: ("frozen-moves", "embedding.weight", 8),
    Divided: ("nonfinite", "blocks.1.mlp", 7),
    OneBadGradient: ("nonfinite", "head.bias", 7),
    Overflows: ("nonfinite", "head.bias", 24),
    StaysInEvaluation: ("wrong-mode", "", 21),
    EvaluatesInTraining: ("wrong-mode", "", 20),
    KeepsTheAverage: ("weights-written", "", 20),
    SlowNorms: ("never-moved", "blocks.0.norm.weight and 2 others", 55),
    Twice: ("step-order", "", 2),
    KeptBySecond: ("gradients-kept", "head.bias", 2),
    ThawedLate: ("missing-parameters", "blocks.0.mlp.2.weight and 5 others", 91),
    LeavesBlockInEvaluation: ("wrong-mode", "", 21),
    ClearedTooEarly: ("zero-gradients", "", 3),
    ClearedTooEarlyNowAndThen: ("zero-gradients", "", 6),
    MergedBase: ("weights-written", "embedding.weight", 5),
    OldMasters: ("weights-jump", "head.weight", 21),
    SecondOptimizer: ("parameters-twice", "head.weight", 3),
    AverageInBfloat16: ("average", "embedding.weight and 10 others", 55),
    AverageRunsAway: ("average", "embedding.weight", 34),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_told_with_its_tensor(fault: type[Loop]) -> None:
    kind, tensor, step = FAULTS[fault]
    reading = watched(fault(), max(step + 1, 70))[0][kind]
    assert (reading.tensor, reading.step) == (tensor, step)


def test_parameters_that_were_replaced_after_the_optimizer_was_made_are_named() -> None:
    loop = Loop()
    state = {name: value.clone() for name, value in loop.model.state_dict().items()}
    loop.model.load_state_dict(state, assign=True)
    untrained = watched(loop, 4)[0]["missing-parameters"]
    assert untrained.value == len(state)


LOSSES: dict[str, Callable[[int], float]] = {
    r"ln 16 = 2\.77259 in 20 of 30 steps": lambda n: math.log(16) * (1 + 1e-6) if n % 3 else 2.0,
    r"the loss is exactly 0\.693147181 in each of 20 steps": lambda n: math.log(2),
    "": lambda n: 0.6931,
}


@pytest.mark.parametrize("words", LOSSES)
def test_a_loss_that_says_nothing_of_its_tokens_is_told(words: str) -> None:
    loop = Loop()
    watch = ng.watch(loop.model, loop.optimizer)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(30):
            watch.step(LOSSES[words](number))
    messages = [str(w.message) for w in caught if "has not stepped" not in str(w.message)]
    assert [bool(re.search(words, message)) for message in messages] == [True] * bool(words)


def test_a_gradient_that_is_zero_in_one_step_is_a_note() -> None:
    class OnceMasked(Loop):
        def backward(self, step: int) -> None:
            super().backward(step)
            if step == 12:
                self.model.head.bias.grad.zero_()

    loop = OnceMasked()
    ng.watch(loop.model, loop.optimizer)
    logged = list[Reading]()
    stop = ng.on_event(logged.append)
    loop.train(21)
    stop()
    (reading,) = logged
    assert (reading.what, reading.tensor, reading.severity) == (
        "zero-gradients",
        "head.bias",
        "note",
    )
    assert reading.value == 1 / 20


# ── healthy loops ─────────────────────────────────────────────────────────────────────────────────


class Scaled(Loop):
    """float16 with a scale from 2^25: the first steps are skipped."""

    def __init__(self, fused: bool = False) -> None:
        super().__init__()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, fused=fused)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**25)

    def backward(self, step: int) -> None:
        with torch.autocast("cpu", torch.float16):
            loss = self.loss(step)
        self.scaler.scale(loss).backward()

    def update(self, step: int) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()


class Averaged(Loop):
    """An average is swapped in for an evaluation, and back."""

    def after(self, step: int) -> None:
        if step % 20 == 0:
            saved = copy.deepcopy(self.model.state_dict())
            self.model.load_state_dict({name: 0.5 * value for name, value in saved.items()})
            self.model.eval()
            with torch.no_grad():
                loss_of(self.model, batch(99))
            self.model.load_state_dict(saved)
            self.model.train()


class AverageInFloat32(AverageInBfloat16):
    dtype = torch.float32


class CopiesThatAreNoAverages(Loop):
    """The best weights so far, written once, and a second model with an optimizer of its own from
    step 20 on.
    """

    def __init__(self) -> None:
        super().__init__()
        self.best, self.other = copy.deepcopy(self.model), copy.deepcopy(self.model)
        self.optimizer_of_other = torch.optim.SGD(self.other.parameters(), lr=10.0)

    def after(self, step: int) -> None:
        if step == 10:
            self.best.load_state_dict(self.model.state_dict())
        if step >= 20:
            for weight in self.other.parameters():
                weight.grad = torch.ones_like(weight)
            self.optimizer_of_other.step()


class ClearedBeforeBackward(Loop):
    def backward(self, step: int) -> None:
        loss = self.loss(step)
        self.optimizer.zero_grad(set_to_none=step % 2 == 0)
        loss.backward()

    def clear(self) -> None: ...


class OtherLossBefore(ClearedBeforeBackward):
    """Another backward pass leaves gradients that the loop clears, as a generator's loss does in
    its critic.
    """

    def backward(self, step: int) -> None:
        loss_of(self.model, batch(1000 + step)).backward()
        super().backward(step)


class Closure(Loop):
    def backward(self, step: int) -> None: ...

    def update(self, step: int) -> None:
        def closure() -> Tensor:
            self.optimizer.zero_grad()
            loss = self.loss(step)
            loss.backward()
            return loss

        self.optimizer.step(closure)


class Projected(Loop):
    def after(self, step: int) -> None:
        with torch.no_grad():
            self.model.embedding.weight.copy_(F.normalize(self.model.embedding.weight, dim=-1))
            self.model.norm.weight.clamp_(0.999, 1.001)


class TargetPasses(Loop):
    """A pass without gradients belongs to every step."""

    def loss(self, step: int) -> Tensor:
        with torch.no_grad():
            target = self.model(batch(step)[:, :-1])
        return super().loss(step) + 0.1 * F.mse_loss(self.model(batch(step)[:, :-1]), target)


class TwoOptimizers(Loop):
    def optimizer_of(self, model: Any) -> Any:
        matrices = [p for p in model.blocks.parameters() if p.ndim == 2]
        rest = [
            p for name, p in model.named_parameters() if not name.startswith("blocks") or p.ndim < 2
        ]
        self.both = [torch.optim.Muon(matrices, lr=1e-2), torch.optim.AdamW(rest, lr=1e-2)]
        return self.both

    def update(self, step: int) -> None:
        for optimizer in self.both:
            optimizer.step()

    def clear(self) -> None:
        self.model.zero_grad()


class OneOfTwoOptimizers(TwoOptimizers):
    def optimizer_of(self, model: Any) -> Any:
        return super().optimizer_of(model)[1]


class Container(torch.optim.Optimizer):
    """An optimizer of all parameters whose step calls its members', as torchtitan has one."""

    def __init__(self, *members: torch.optim.Optimizer) -> None:
        self.members = members
        parameters = [p for member in members for p in member.param_groups[0]["params"]]
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for member in self.members:
            member.step()


class ContainerOfTwo(TwoOptimizers):
    def optimizer_of(self, model: Any) -> Any:
        super().optimizer_of(model)
        self.container = Container(*self.both)
        return self.container

    def update(self, step: int) -> None:
        self.container.step()


class MembersOfContainer(ContainerOfTwo):
    def optimizer_of(self, model: Any) -> Any:
        super().optimizer_of(model)
        return self.both


class TwoThatShareBackward(SeparateHead):
    """Two networks as of a GAN: the gradients that one's loss leaves in the other are cleared
    before the other's own pass.
    """

    def train(self, steps: int) -> Loop:
        for step in range(1, steps + 1):
            for optimizer in self.optimizer:
                optimizer.zero_grad()
                self.backward(step)
                optimizer.step()
        return self


class ThawedInTime(ThawedLate):
    """A block is thawed, and the optimizer is told."""

    def after(self, step: int) -> None:
        super().after(step)
        if step == 60:
            self.optimizer.add_param_group({"params": [*self.model.blocks[0].parameters()]})


class SparseGradients(Loop):
    def build_model(self) -> Any:
        model = super().build_model()
        model.embedding.sparse = True
        return model

    def optimizer_of(self, model: Any) -> Any:
        return torch.optim.SGD(model.parameters(), lr=1e-2)


HEALTHY = [
    Loop, Scaled, partial(Scaled, fused=True), Averaged, ClearedBeforeBackward, OtherLossBefore, Closure, Projected, TargetPasses,
    TwoOptimizers, OneOfTwoOptimizers, ContainerOfTwo, MembersOfContainer, TwoThatShareBackward, ThawedInTime, SparseGradients,
    AverageInFloat32, CopiesThatAreNoAverages, SteppedRarely,
]  # fmt: skip


@pytest.mark.parametrize("make", HEALTHY)
def test_a_healthy_loop_is_silent(make: Callable[[], Loop]) -> None:
    assert watched(make(), 110 if make is ThawedInTime else 60)[0] == {}


def test_copies_of_a_watched_model_are_not_watched() -> None:
    loop = Loop()
    watch = ng.watch(loop.model, loop.optimizer)
    loss_of(copy.deepcopy(loop.model), batch(0)).backward()
    assert watch.forward.number == watch.backward.number == 0


# ── ranks ─────────────────────────────────────────────────────────────────────────────────────────


def kinds_on_a_rank(rank: int, own_data: bool, own_seed: bool, loss: float) -> set[str]:
    loop = Loop()
    torch.manual_seed(rank * own_seed)
    model = DistributedDataParallel(loop.model)
    watch = ng.watch(model, loop.optimizer)
    readings = list[Reading]()
    watch._say = readings.extend  # type: ignore[method-assign]
    for step in range(3):
        loss_of(model, batch(2 * step + rank * own_data)).backward()
        loop.optimizer.step()
        loop.optimizer.zero_grad()
        watch.step(loss if rank == 1 and step == 2 else 1.0)
    return {reading.what for reading in readings}


@pytest.mark.parametrize(
    ("faults", "kind"),
    [
        ((True, True, 1.5), None),
        ((False, True, 1.5), "equal-batches"),
        ((True, False, 1.5), "equal-batches"),
        ((True, True, 4e4), "ranks-differ"),
    ],
)
def test_ranks_with_equal_data_equal_masks_or_another_loss_are_told(
    faults: tuple[Any, ...], kind: str | None, tmp_path: Path
) -> None:
    assert (
        run_ranks(kinds_on_a_rank, 2, tmp_path, *faults) == [set() if kind is None else {kind}] * 2
    )


def parted_on_a_rank(rank: int) -> list[tuple[str, str, int]]:
    loop = Loop()
    watch = ng.watch(loop.model, loop.optimizer)
    readings = list[Reading]()
    watch._say = readings.extend  # type: ignore[method-assign]
    for step in range(3):
        loss_of(loop.model, batch(2 * step + rank)).backward()  # nothing adds the gradients
        loop.optimizer.step()
        loop.optimizer.zero_grad()
    return [(r.what, r.tensor, r.step) for r in readings if r.what == "ranks-differ"]


def test_weights_that_part_are_told_at_the_first_step(tmp_path: Path) -> None:
    first, second = run_ranks(parted_on_a_rank, 2, tmp_path)
    assert first == second
    ((kind, tensors, step),) = first
    assert (kind, step) == ("ranks-differ", 1)
    assert tensors.startswith("embedding.weight and ")  # a key's bias may be equal by rounding


class Batch:
    """A batch whose tensors no hook sees."""

    def __init__(self, x: Tensor) -> None:
        self.x = x


def hidden_batches_on_a_rank(rank: int, own_data: bool) -> tuple[list[tuple[str, int]], float]:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    model.register_forward_pre_hook(lambda module, args: (args[0].x,))
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch = ng.watch(parallel, optimizer)
    readings = list[Reading]()
    watch._say = readings.extend  # type: ignore[method-assign]
    for step in range(6):
        generator = torch.Generator().manual_seed(2 * step + rank * own_data)
        loss = parallel(Batch(torch.randn(3, 4, generator=generator))).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        watch.step(loss)
    numbers = watch.numbers()
    return [(r.what, r.step) for r in readings], numbers["rank_grad_norm/max"] - numbers[
        "rank_grad_norm/min"
    ]


@pytest.mark.parametrize("own_data", [True, False])
def test_equal_losses_and_gradients_of_all_ranks_are_one_batch(
    own_data: bool, tmp_path: Path
) -> None:
    (readings, difference), _ = run_ranks(hidden_batches_on_a_rank, 2, tmp_path, own_data)
    assert readings == ([] if own_data else [("equal-batches", 1)]) and (difference > 0) is own_data


def sharded_on_a_rank(rank: int) -> tuple[list[str], set[str], float]:
    loop = Loop()
    fully_shard(loop.model, mesh=init_device_mesh("cpu", (2,)))
    loop.optimizer = loop.adamw(loop.model.parameters())
    torch.manual_seed(rank)
    watch = ng.watch(loop.model, loop.optimizer, max_grad_norm=1e-3)
    readings = list[Reading]()
    watch._say = readings.extend  # type: ignore[method-assign]
    norms = []
    for step in range(4):
        loss_of(loop.model, batch(2 * step + rank)).backward()
        norm: Any = torch.nn.utils.get_total_norm([p.grad for p in loop.model.parameters()])
        norms.append(float(norm.full_tensor()))
        loop.optimizer.step()
        loop.optimizer.zero_grad()
    rate = round(watch.numbers()["effective_lr/group0"], 6)
    assert "rank_grad_norm/min" not in watch.numbers()
    assert watch.numbers()["grad_norm"] == pytest.approx(norms[2])  # of the last sampled step
    return [reading.what for reading in readings], {*watch.unseen}, rate


def test_a_sharded_loop_has_one_norm_and_says_what_is_not_watched(tmp_path: Path) -> None:
    unseen = {
        "tensors without an optimizer",
        "gradients that were not cleared",
        "losses of ranks",
        "weights of ranks",
    }
    assert run_ranks(sharded_on_a_rank, 2, tmp_path) == [(["clip-norm"], unseen, 0.01)] * 2


# ── with a folder ─────────────────────────────────────────────────────────────────────────────────


def test_a_recorder_that_nobody_closed_has_written_its_events_and_summary(tmp_path: Path) -> None:
    def record() -> None:
        loop = KeptGradients()
        recorder = ng.RunRecorder(tmp_path / "run", loop.model, loop.optimizer)
        for step in range(1, 4):
            loss = loop.loss(step)
            loss.backward()
            loop.update(step)
            recorder.step(loss)

    with pytest.warns(RunNotice, match="not cleared"):
        record()
    gc.collect()
    run = ng.read_run(tmp_path / "run")
    assert run.summary is not None and run.summary["steps"] == 3
    events = [event for event in run.events if event["what"] == "gradients-kept"]
    assert len(events) == 1 and "effective_lr/group0" in run.steps[1]
