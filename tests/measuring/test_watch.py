"""Loops with a fault are told with its tensor and step, and healthy loops are silent. A watched loop
computes the same bits.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import narrowgauge as ng
from measuring.plain_loop import Loop
from narrowgauge.measuring import laws, meter, numbers
from narrowgauge.measuring.hooks import RunNotice
from narrowgauge.measuring.samples import take
from ranks import run_ranks

pytestmark = [
    pytest.mark.filterwarnings("ignore::narrowgauge.measuring.hooks.RunNotice"),
    pytest.mark.usefixtures("one_thread"),
]


class ByHand(torch.optim.Optimizer):
    """AdamW with masters in float32, made in its first step."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["master"] = p.detach().float()
                    state["second"] = torch.zeros_like(state["master"])
                gradient = p.grad.float()
                state["second"].lerp_(gradient.square(), 0.05)
                state["master"].sub_(group["lr"] * gradient / (state["second"].sqrt() + 1e-8))
                p.copy_(state["master"])


# ── bits, and the stored share ────────────────────────────────────────────────────────────────────

OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "AdamW": torch.optim.AdamW,
    "SGD": torch.optim.SGD,
    "Muon and others": lambda params, lr: torch.optim.Muon(
        [p for p in params if p.ndim == 2], lr=lr
    ),
    "by hand": ByHand,
    "ours": lambda params, lr: ng.AdamW(params, lr=lr, storage="word"),
    "stochastic": lambda params, lr: ng.AdamW(params, lr=lr, storage="stochastic"),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_watched_loop_computes_the_same_bits(name: str) -> None:
    class Trained(Loop):
        dtype = torch.bfloat16

        def make_optimizer(self) -> Any:
            return OPTIMIZERS[name](self.model.parameters(), lr=1e-3)

    plain = Trained(is_watched=False).run(6)
    watched = Trained().run(6)
    for mine, its in zip(plain.model.parameters(), watched.model.parameters(), strict=True):
        assert torch.equal(mine, its)
    watched.watcher.remove()
    assert not watched.optimizer._optimizer_step_post_hooks and not watched.model._forward_hooks


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop])
def test_the_stored_share_is_that_of_a_twin_in_float32(kind: Any) -> None:
    """The share of the step that bfloat16 stores, of each tensor that was sampled."""

    class Narrow(Loop):
        dtype = torch.bfloat16
        optimizer_class = kind
        lr = 1e-4

    loop = Narrow().run(6)
    before = {name: p.detach().clone() for name, p in loop.model.named_parameters()}
    optimizer = copy.deepcopy(loop.optimizer)
    wide = [nn.Parameter(p.float()) for p in before.values()]
    loop.backward(loop.loss())
    for x, p in zip(wide, loop.model.parameters(), strict=True):
        x.grad = p.grad.float()  # type: ignore[union-attr]
    twin = kind(wide, lr=1e-4)
    twin.load_state_dict(optimizer.state_dict())
    for state in twin.state.values():
        for name, value in state.items():
            state[name] = value.float() if isinstance(value, Tensor) else value
    loop.update()
    twin.step()
    loop.watcher.step()
    shares = loop.watcher.meter.last["stored"]
    assert len(shares) >= 8
    for (name, old), x in zip(before.items(), wide, strict=True):
        if name in shares:
            meant = take(x.detach() - old.float()).double()
            now = loop.model.get_parameter(name).detach()
            stored = take(now.float() - old.float()).double()
            share = float((meant * stored).sum() / meant.square().sum())
            assert shares[name] == pytest.approx(share, rel=0.02, abs=2e-3)
    numbers = loop.watcher.numbers()
    assert numbers["lr"] > 0
    assert numbers["stored_share"] < 0.9 or kind is torch.optim.SGD


def test_our_optimizers_have_the_rate_of_their_audit() -> None:
    class Ours(Loop):
        dtype = torch.bfloat16

        def make_optimizer(self) -> Any:
            options: Any = {"storage": "naive", "audit_every": 1, "compile": False}
            optimizer = ng.AdamW(self.model.parameters(), lr=1e-5, **options)
            optimizer.on_alarm = lambda alarms: None
            return optimizer

    loop = Ours().run(6)
    share = loop.watcher.numbers()["stored_share"]
    total = ng.audit(loop.optimizer).total
    assert total is not None
    assert share == pytest.approx(total.edq, rel=1e-6) and share < 0.5


def test_a_step_reads_the_device_as_often_for_many_tensors_as_for_few(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reads = []
    copied = numbers.HostCopy.cpu

    def counted(self: Any) -> Tensor:
        reads.append(self)
        return copied(self)

    monkeypatch.setattr(numbers.HostCopy, "cpu", counted)
    Loop().run(4)
    assert len(reads) == 4


# ── faults ────────────────────────────────────────────────────────────────────────────────────────


class NeverClipped(Loop):
    told_clip = 0.01
    expected = ("clip-norm", "", "clip")


class BadGradient(Loop):
    expected = ("nonfinite", "blocks.1.up.weight", "gradient")

    def prepare(self) -> None:
        weight = self.model.get_parameter("blocks.1.up.weight")
        weight.register_hook(lambda g: g * math.inf if self.number == 3 else g)


class BadWeight(Loop):
    expected = ("nonfinite", "blocks.0.down.bias", "between steps")

    def after_update(self) -> None:
        super().after_update()
        if self.number == 3:
            self.model.get_parameter("blocks.0.down.bias").data.fill_(math.nan)


class BadOutput(Loop):
    expected = ("nonfinite", "blocks.1", "forward")

    def prepare(self) -> None:
        def spoil(module: Any, args: Any, output: Tensor) -> Tensor:
            return output * math.inf if self.number == 3 else output

        self.model.blocks[1].register_forward_hook(spoil)


class OldMasters(Loop):
    """The weights are loaded into the model, and the masters are still those of the start."""

    dtype = torch.bfloat16
    optimizer_class = ByHand
    lr = 1e-4
    expected = ("weights-jump", "", "optimizer step")

    def after_update(self) -> None:
        super().after_update()
        if self.number == 7:
            for p in self.model.parameters():
                p.data.add_(0.5)


class MergedIn(Loop):
    """Something is added to a frozen weight and taken out again."""

    dtype = torch.bfloat16
    expected = ("drift", "head.weight", "between steps")

    def prepare(self) -> None:
        self.model.head.weight.requires_grad_(False)
        self.optimizer = ByHand([p for p in self.model.parameters() if p.requires_grad], lr=1e-3)

    def after_update(self) -> None:
        super().after_update()
        part = torch.randn_like(self.model.head.weight) * 0.03
        self.model.head.weight.data.add_(part).sub_(part)


FAULTS: list[type[Loop]] = [
    NeverClipped, BadGradient, BadWeight, BadOutput, OldMasters, MergedIn,
]  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_told_with_its_tensor(fault: Any) -> None:
    loop = fault().run(10)
    kind, tensor, stage = fault.expected
    readings = {reading.what: reading for reading in reversed(loop.readings)}
    assert kind in readings, readings
    assert readings[kind].stage == stage
    assert readings[kind].severity == ("note" if kind == "drift" else "error")
    assert readings[kind].tensor.startswith(tensor)
    others = {what for what in readings if readings[what].severity == "error"} - {kind}
    # The first gradient that is added twice is beyond no limit, and a jump may bring more.
    assert others <= {"nonfinite"} if fault is OldMasters else not others, readings
    if kind == "nonfinite" and stage != "gradient":
        assert readings[kind].step == (4 if stage == "between steps" else 3)


def test_a_fault_is_told_once_and_again_when_it_is_twice_as_large() -> None:
    loop = NeverClipped(is_watched=False)
    watcher = ng.watch(loop.model, loop.optimizer, max_grad_norm=0.01)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for scale in (1.0, 1.0, 1.0, 5.0, 5.0):
            loop.backward(loop.loss() * scale)
            loop.update()
            loop.after_update()
            watcher.step()
    words = [str(w.message) for w in caught if w.category is RunNotice]
    assert [text.partition(":")[0] for text in words] == ["step 1", "step 4"]
    assert "Gradients of norm" in words[0] and "the limit is 0.01" in words[0]


def test_an_unknown_kind_is_refused_and_a_known_one_is_silent() -> None:
    loop = Loop(is_watched=False)
    with pytest.raises(ng.errors.RecipeError, match="Did you mean 'clip-norm'"):
        ng.watch(loop.model, loop.optimizer, ignore=["clip-nrm"])
    watcher = ng.watch(loop.model, loop.optimizer, max_grad_norm=0.01, ignore=["clip-norm"])
    with warnings.catch_warnings():
        warnings.simplefilter("error", RunNotice)
        loop.run(3)
        watcher.remove()


# ── healthy loops ─────────────────────────────────────────────────────────────────────────────────


class WarmedUp(Loop):
    """A warm-up from a rate that is smaller than the low bits."""

    dtype = torch.bfloat16

    def make_optimizer(self) -> Any:
        optimizer = ng.AdamW(self.model.parameters(), lr=1e-8, storage="word")
        optimizer.on_alarm = lambda alarms: None
        return optimizer

    def after_update(self) -> None:
        super().after_update()
        self.optimizer.param_groups[0]["lr"] = min(1e-3, 1e-8 * 2.0**self.number)


class Frozen(Loop):
    def prepare(self) -> None:
        self.model.embedding.weight.requires_grad_(False)


class Masters(Loop):
    dtype = torch.bfloat16
    optimizer_class = ByHand


class ScaledLoss(Loop):
    """A scaler leaves out the first steps, while it searches."""

    def prepare(self) -> None:
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)

    def backward(self, loss: Tensor) -> None:
        self.scaler.scale(loss).backward()

    def update(self) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()


class Averaged(Loop):
    """A slow average of the weights is a module of the model."""

    def prepare(self) -> None:
        self.model.target = copy.deepcopy(self.model.head).requires_grad_(False)
        self.optimizer = ByHand([p for p in self.model.parameters() if p.requires_grad], lr=1e-8)

    def after_update(self) -> None:
        super().after_update()
        for average, p in zip(
            self.model.target.parameters(), self.model.head.parameters(), strict=True
        ):
            average.data.lerp_(p.data, 0.01)


HEALTHY: list[type[Loop]] = [Loop, WarmedUp, Frozen, Masters, ScaledLoss, Averaged]


@pytest.mark.parametrize("make", HEALTHY)
def test_a_healthy_loop_is_silent(make: Callable[[], Loop]) -> None:
    loop = make().run(30)
    assert [reading.what for reading in loop.readings if reading.severity != "note"] == []


def test_a_step_of_another_optimizer_is_no_skipped_step() -> None:
    loop = Loop()
    watched = loop.optimizer
    loop.optimizer = torch.optim.SGD(loop.model.parameters(), lr=1e-3)
    loop.run(30)
    assert loop.readings == [] and "skipped" not in loop.watcher.meter.last
    loop.optimizer = watched
    loop.run(1)
    assert loop.watcher.meter.last["skipped"] is False


def test_a_tensor_that_never_has_a_gradient_is_a_note_with_its_share() -> None:
    class Unused(Loop):
        def prepare(self) -> None:
            self.model.unused = nn.Linear(4, 4)
            self.model.blocks[0].up.weight.register_hook(torch.zeros_like)
            self.optimizer = self.make_optimizer()

    readings = Unused().run(25).readings
    assert {(r.what, r.value, r.severity) for r in readings} == {("zero-share", 1.0, "note")}
    assert readings[-1].tensor == "blocks.0.up.weight and 2 others"
    assert readings[-1].step == 1


# ── errors of ours, and ranks ─────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("place", ["_take_gradients", "_after", "_measured"])
def test_an_error_of_ours_ends_the_watch_and_not_the_loop(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages = []
    monkeypatch.setattr(
        meter, "failure_of", lambda title, error: messages.append(str(error)) or "ended"
    )

    def fails(self: Any, *args: Any) -> Any:
        raise ValueError("no ink")

    plain = Loop(is_watched=False).run(4)
    loop = Loop(is_watched=False)
    monkeypatch.setattr(meter.Meter, place, fails)
    loop.watcher = ng.watch(loop.model, loop.optimizer)
    loop.run(4)
    assert messages[0] == "no ink"
    for mine, its in zip(plain.model.parameters(), loop.model.parameters(), strict=True):
        assert torch.equal(mine, its)


def apart(rank: int, fault: str) -> list[tuple[int, str, str]]:
    """Train on two ranks, with a fault on the second one; what is read there."""
    torch.manual_seed(0)
    loop = Loop()
    parallel = nn.parallel.DistributedDataParallel(loop.model)
    called = loop.model if fault == "unsummed" else parallel
    loop.model = called  # type: ignore[assignment]
    inner: Any = parallel.module

    def after_update() -> None:
        loop.optimizer.zero_grad()
        if fault == "written" and rank == 1 and loop.number == 2:
            inner.head.weight.data.add_(1.0)

    loop.after_update = after_update  # type: ignore[method-assign]
    if rank == 1:
        next(loop.data)  # each rank has its own batches
    loop.run(4)
    return [(r.step, r.what, r.tensor) for r in loop.readings if r.what.startswith("ranks")]


def all_apart(rank: int) -> list[list[tuple[int, str, str]]]:
    return [apart(rank, fault) for fault in ("", "unsummed", "written")]


def test_gradients_that_were_not_summed_and_weights_that_part_are_told(tmp_path: Path) -> None:
    healthy, unsummed, written = run_ranks(all_apart, 2, tmp_path / "ranks")[0]
    assert healthy == []
    assert unsummed[0][:2] == (1, "ranks-unsummed")
    assert written[0] == (3, "ranks-unsummed", "head.weight") or written[0][1] == "ranks-apart"
    assert written[0][0] == 3


def test_an_error_in_a_law_ends_the_laws_and_not_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    messages: list[str] = []
    monkeypatch.setattr(laws, "failure_of", lambda title, error: f"{title} ended: {error}")

    def broken(tell: Any) -> Any:
        yield
        raise ValueError("no ink")

    monkeypatch.setattr(laws, "LAWS", (broken,))
    loop = Loop()
    loop.watcher.laws._say = messages.append
    loop.run(3)
    assert messages == ["the laws ended: no ink"] and loop.watcher.meter.number == 3
