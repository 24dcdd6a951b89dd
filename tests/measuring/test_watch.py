"""Loops with a fault are told with its tensor and step, and healthy loops are silent. A watched loop
computes the same bits.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import narrowgauge as ng
from measuring.watched import Watched, nothing
from narrowgauge.measuring import laws, meter, numbers
from narrowgauge.measuring.hooks import RunNotice
from narrowgauge.measuring.samples import take

pytestmark = [
    pytest.mark.filterwarnings("ignore::narrowgauge.measuring.hooks.RunNotice"),
    pytest.mark.usefixtures("one_thread"),
]
B16 = torch.bfloat16


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


def ours(params: Any, lr: float, **options: Any) -> ng.Optimizer:
    optimizer = ng.AdamW(params, lr=lr, **options)
    optimizer.on_alarm = lambda alarms: None
    return optimizer


# ── bits, and the stored share ────────────────────────────────────────────────────────────────────

OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "AdamW": torch.optim.AdamW,
    "Muon": lambda params, lr: torch.optim.Muon([p for p in params if p.ndim == 2], lr=lr),
    "by hand": ByHand,
    "ours": partial(ours, storage="word"),
    "stochastic": partial(ours, storage="stochastic"),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_watched_loop_computes_the_same_bits(name: str) -> None:
    plain = Watched(kind=OPTIMIZERS[name], dtype=B16, is_watched=False).train(6)
    watched = Watched(kind=OPTIMIZERS[name], dtype=B16).train(6)
    for mine, its in zip(plain.model.parameters(), watched.model.parameters(), strict=True):
        assert torch.equal(mine, its)
    watched.watcher.remove()
    assert not watched.optimizer._optimizer_step_post_hooks and not watched.model._forward_hooks


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop])
def test_the_stored_share_is_that_of_a_twin_in_float32(kind: Any) -> None:
    """The share of the step that bfloat16 stores, of each tensor that was sampled."""
    twin: Any = None
    before: dict[str, Tensor] = {}

    def copied(optimizer: Any, args: Any, kwargs: Any) -> None:
        nonlocal twin
        before.update({name: p.detach().clone() for name, p in loop.model.named_parameters()})
        wide = [nn.Parameter(p.float()) for p in before.values()]
        for x, p in zip(wide, loop.model.parameters(), strict=True):
            x.grad = p.grad.float()  # type: ignore[union-attr]
        twin = kind(wide, lr=1e-4)
        twin.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for state in twin.state.values():
            for name, value in state.items():
                state[name] = value.float() if isinstance(value, Tensor) else value
        twin.step()

    loop = Watched(kind=kind, dtype=B16, lr=1e-4).train(6)
    loop.optimizer.register_step_pre_hook(copied)
    loop.train(1)
    shares = loop.watcher.meter.last["stored"]
    assert len(shares) >= 8
    for (name, old), x in zip(before.items(), twin.param_groups[0]["params"], strict=True):
        if name in shares:
            meant = take(x.detach() - old.float()).double()
            now = loop.model.get_parameter(name).detach()
            stored = take(now.float() - old.float()).double()
            share = float((meant * stored).sum() / meant.square().sum())
            assert shares[name] == pytest.approx(share, rel=0.02, abs=2e-3)
    values = loop.watcher.numbers()
    assert values["lr"] > 0
    assert values["stored_share"] < 0.9 or kind is torch.optim.SGD


def test_our_optimizers_have_the_rate_of_their_audit() -> None:
    loop = Watched(kind=partial(ours, storage="naive", audit_every=1), dtype=B16, lr=1e-5).train(6)
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
    Watched().train(4)
    assert len(reads) == 4


# ── faults ────────────────────────────────────────────────────────────────────────────────────────


def bad_gradient(loop: Watched) -> None:
    weight = loop.model.get_parameter("blocks.1.up.weight")
    weight.register_hook(lambda g: g * math.inf if loop.step == 3 else g)


def bad_output(loop: Watched) -> None:
    spoil = lambda module, args, x: x * math.inf if loop.step == 3 else x  # noqa: E731
    loop.model.blocks[1].register_forward_hook(spoil)


def bad_weight(loop: Watched) -> None:
    if loop.step == 3:
        loop.model.get_parameter("blocks.0.down.weight").data.fill_(math.nan)


def old_masters(at: int, loop: Watched) -> None:
    """Load weights into the model, where the masters are still those of before."""
    if loop.step == at:
        for p in loop.model.parameters():
            p.data.add_(0.5)


HANDMADE = {"kind": ByHand, "dtype": B16, "lr": 1e-4}
FAULTS: dict[str, tuple[Any, Any, dict[str, Any], tuple[str, str, str, int]]] = {
    "bad gradient": (bad_gradient, nothing, {}, ("nonfinite", "blocks.1.up.weight", "gradient", 3)),
    "bad output": (bad_output, nothing, {}, ("nonfinite", "", "loss", 3)),
    "bad weight": (nothing, bad_weight, {}, ("nonfinite", "blocks.0.down.weight", "between steps", 4)),
    "old masters": (nothing, partial(old_masters, 7), HANDMADE, ("weights-jump", "", "optimizer step", 8)),
    "old masters early": (nothing, partial(old_masters, 1), HANDMADE, ("weights-jump", "", "optimizer step", 2)),
}  # fmt: skip
"""What is done before the watch and after each update, options, and the kind, tensor, stage and step."""


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_told_with_its_tensor(name: str) -> None:
    prepare, after, options, (kind, tensor, stage, step) = FAULTS[name]
    loop = Watched(prepare, after, **options).train(10)
    readings = {reading.what: reading for reading in reversed(loop.readings)}
    assert (readings[kind].stage, readings[kind].step) == (stage, step)
    assert readings[kind].tensor.startswith(tensor)
    errors = {what for what in readings if readings[what].severity == "error"}
    # A jump may bring more.
    assert errors - {"nonfinite", "stored-share"} == {kind} - {"nonfinite"}


def test_a_fault_is_told_once_and_again_when_it_is_twice_as_large() -> None:
    loop = Watched(max_grad_norm=0.01)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for loop.factor in (1.0, 1.0, 1.0, 5.0, 5.0):
            loop.train(1)
    words = [str(w.message) for w in caught if w.category is RunNotice]
    assert [text.partition(":")[0] for text in words] == ["step 1", "step 4"]
    assert "Gradients of norm" in words[0] and "the limit is 0.01" in words[0]


def test_an_unknown_kind_is_refused_and_a_known_one_is_silent() -> None:
    with pytest.raises(ng.errors.RecipeError, match="Did you mean 'clip-norm'"):
        Watched(ignore=["clip-nrm"])
    assert Watched(max_grad_norm=0.01, ignore=["clip-norm"]).train(3).readings == []


def test_a_tensor_that_never_has_a_gradient_is_a_note_with_its_share() -> None:
    def prepare(loop: Watched) -> None:
        loop.model.blocks[0].unused = nn.Linear(4, 4)  # type: ignore[union-attr]
        loop.model.get_parameter("blocks.0.up.weight").register_hook(torch.zeros_like)
        loop.optimizer = loop.make()

    readings = Watched(prepare).train(25).readings
    assert {(r.what, r.value, r.severity) for r in readings} == {("zero-gradients", 1.0, "note")}
    assert (readings[-1].tensor, readings[-1].step) == ("blocks.0.unused.bias and 2 others", 1)


# ── healthy loops ─────────────────────────────────────────────────────────────────────────────────


def warmed_up(loop: Watched) -> None:
    """Begin at a rate that is smaller than the low bits."""
    loop.optimizer.param_groups[0]["lr"] = min(1e-3, 1e-8 * 2.0**loop.step)


def scaled(loop: Watched, scale: float = 2.0**127) -> None:
    """Leave out the first steps, while the scaler searches."""
    loop.scaler = torch.amp.GradScaler("cpu", init_scale=scale)


HEALTHY: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "warmed up": (nothing, warmed_up, {"kind": partial(ours, storage="word"), "dtype": B16, "lr": 1e-8}),
    "scaled": (scaled, nothing, {}),
}  # fmt: skip


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_loop_is_silent(name: str) -> None:
    prepare, after, options = HEALTHY[name]
    loop = Watched(prepare, after, **options).train(30)
    assert [reading.what for reading in loop.readings if reading.severity != "note"] == []


def test_steps_that_a_grad_scaler_skips_are_recorded(tmp_path: Path) -> None:
    def overflow(loop: Watched) -> None:
        scaled(loop, 1024.0)
        spoil = lambda g: g * math.inf if loop.step in (1, 3) else g  # noqa: E731
        loop.model.head.weight.register_hook(spoil)

    loop = Watched(overflow, record=tmp_path / "run").train(8)
    loop.watcher.close()
    run = ng.read_run(tmp_path / "run")
    assert [row["step"] for row in run.steps if row.get("skipped")] == [1, 3]
    assert any(row.get("stored") for row in run.steps) and ng.diagnose(run).ok


def test_a_run_whose_steps_are_all_skipped_is_told() -> None:
    def overflow(loop: Watched) -> None:
        scaled(loop, 1024.0)
        loop.model.head.weight.register_hook(lambda g: g * math.inf)

    errors = [r for r in Watched(overflow).train(40).readings if r.severity == "error"]
    assert {(reading.what, reading.step) for reading in errors} == {("skipped-steps", 1)}


def test_norms_are_zero_of_zeros_and_infinite_of_infinities_alone() -> None:
    """Squares of the others leave float32's range."""
    values = torch.tensor([1e-30, 1e30, 0.0, math.inf])
    norms = numbers.norms_of([value.expand(4) for value in values])
    assert norms.tolist() == pytest.approx([2e-30, 2e30, 0.0, math.inf])


# ── masters that the user holds ───────────────────────────────────────────────────────────────────


def with_masters(lr: float, loop: Watched) -> None:
    """Step masters in float32, which take the gradients of a narrow model."""

    def moved(master: Any, p: Any) -> None:
        master.grad = p.grad.float()
        p.grad = None

    masters = [nn.Parameter(p.detach().float()) for p in loop.model.parameters()]
    for p, master in zip(loop.model.parameters(), masters, strict=True):
        p.register_post_accumulate_grad_hook(partial(moved, master))
    loop.optimizer = torch.optim.SGD(masters, lr=lr)


@torch.no_grad()
def copied(loop: Watched, at_random: bool = False) -> None:
    masters = loop.optimizer.param_groups[0]["params"]
    for p, master in zip(loop.model.parameters(), masters, strict=True):
        low = torch.randint_like(master, 0, 1 << 16, dtype=torch.int32) * at_random
        p.copy_(
            ((master.view(torch.int32) + low) & -65536).view(torch.float32) if at_random else master
        )


@torch.no_grad()
def copied_but_vectors(loop: Watched) -> None:
    masters = loop.optimizer.param_groups[0]["params"]
    for p, master in zip(loop.model.parameters(), masters, strict=True):
        if p.ndim > 1:
            p.copy_(master)


def in_turn(loop: Watched) -> None:
    """Train one half of the tensors in the first steps, and the other half later."""
    copied(loop)
    for number, p in enumerate(loop.model.parameters()):
        p.requires_grad_((number % 2 == 0) == (loop.step > 8))


def warmed_up_from_zero(loop: Watched) -> None:
    copied(loop)
    loop.optimizer.param_groups[0]["lr"] = 0.3 * max(0, loop.step - 8)


MASTERS: dict[str, tuple[float, Callable[[Watched], object], str]] = {
    "never copied": (3.0, nothing, "blocks.1.attention_norm.weight and 18 others"),
    "vectors never copied": (
        3.0,
        copied_but_vectors,
        "blocks.1.attention_norm.weight and 4 others",
    ),
    "copied": (0.3, copied, ""),
    "slow": (1e-4, copied, ""),
    "warm-up": (0.0, warmed_up_from_zero, ""),
    "no rate": (0.0, nothing, ""),
    "in turn": (0.3, in_turn, ""),
    "rounded at random": (0.3, partial(copied, at_random=True), ""),
}
"""The rate, what follows the step, and the tensors that stand still."""


@pytest.mark.parametrize("name", MASTERS)
def test_weights_to_which_masters_are_never_copied_are_told(name: str) -> None:
    lr, after, stands_still = MASTERS[name]
    loop = Watched(partial(with_masters, lr), after, dtype=B16).train(16)
    told = [reading for reading in loop.readings if reading.severity != "note"]
    assert [reading.what for reading in told[:1]] == ["stored-share"] * bool(stands_still)
    if stands_still:
        assert (told[0].step, told[0].value) == (6, 0.0)
        assert told[-1].tensor == stands_still


# ── errors of ours ─────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("place", ["_take_gradients", "_after", "_measured"])
def test_an_error_of_ours_ends_the_watch_and_not_the_loop(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages: list[str] = []
    fails = lambda title, error: messages.append(str(error)) or "ended"  # type: ignore  # noqa: E731
    monkeypatch.setattr(meter, "failure_of", fails)
    plain = Watched(is_watched=False).train(4)
    monkeypatch.setattr(meter.Meter, place, lambda self, *args: int("no ink"))
    loop = Watched().train(4)
    assert "no ink" in messages[0]
    for mine, its in zip(plain.model.parameters(), loop.model.parameters(), strict=True):
        assert torch.equal(mine, its)


def test_an_error_in_a_law_ends_the_laws_and_not_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    messages: list[str] = []
    monkeypatch.setattr(laws, "failure_of", lambda title, error: f"{title} ended: {error}")

    def broken(tell: Any) -> Any:
        yield
        raise ValueError("no ink")

    monkeypatch.setattr(laws, "LAWS", (broken,))
    loop = Watched()
    loop.watcher.laws._say = messages.append
    loop.train(3)
    assert messages == ["the laws ended: no ink"] and loop.watcher.meter.number == 3
