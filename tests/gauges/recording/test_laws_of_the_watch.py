"""Laws of a watch: it says what it does not see, does not end a loop, and claims no more than it
measured.
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
from narrowgauge.analysis.laws import Laws
from narrowgauge.analysis.snapshot import Facts, Snapshot
from narrowgauge.gauges import RunNotice
from narrowgauge.gauges.hub import Hub
from narrowgauge.gauges.recording.backward import BackwardPasses
from narrowgauge.gauges.recording.forward import ForwardPasses
from narrowgauge.gauges.recording.watch import Watch
from narrowgauge.measuring.casts import Gauges

B16 = torch.bfloat16


def run(steps: int, one_step: Callable[[int], Any]) -> list[str]:
    """Take some steps, and return what the watch said."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(steps):
            one_step(step)
    return [str(w.message) for w in caught if w.category is RunNotice]


def square(model: nn.Module, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return model(torch.randn(*shape).to(dtype)).float().square().mean()


def loop(model: nn.Module, optimizer: Any, *shape: int, dtype: torch.dtype = torch.float32) -> Any:
    def one_step(step: int) -> None:
        square(model, *shape, dtype=dtype).backward()
        optimizer.step()
        optimizer.zero_grad()

    return one_step


class Scaled(nn.Module):
    """A linear layer times a scale of some shape, as CLIP's and ReZero's."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.scale = nn.Parameter(torch.full(shape, 2.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.scale


@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_scalar_parameter_does_not_switch_the_rate_off(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model = Scaled(shape).to(B16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    watch = ng.watch(model, optimizer)
    messages = run(10, loop(model, optimizer, 8, 64, dtype=B16))
    assert watch.numbers()["effective_lr/group0"] < 5e-6 and not watch.unseen
    assert any("you train at" in words for words in messages)


def test_parameters_that_are_added_or_thawed_later_are_watched() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(3)])
    model[2].requires_grad_(False)
    optimizer = torch.optim.AdamW(
        [{"params": model[0].parameters()}, {"params": model[2].parameters()}], lr=1e-3
    )
    watch = ng.watch(model, optimizer)
    one_step = loop(model, optimizer, 8, 16)
    assert not run(2, one_step) and "2 tensors" in watch.seen()
    optimizer.add_param_group({"params": list(model[1].parameters()), "lr": 1e-4})
    model[2].requires_grad_(True)
    assert not run(63, one_step)
    assert watch.numbers()["effective_lr/group2"] == pytest.approx(1e-4, rel=1e-3)
    assert "6 tensors" in watch.seen() and watch.numbers()["frozen_tensors"] == 0


def test_weights_of_a_resumed_run_get_50_steps_to_move() -> None:
    model = nn.Linear(16, 16).to(B16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-9, weight_decay=0.0)
    watch = ng.watch(model, optimizer)
    watch.go_on_after(60, anew=True)
    messages = run(30, loop(model, optimizer, 8, 16, dtype=B16))
    assert messages and not any("never moved" in words for words in messages)


def test_an_optimizer_of_an_earlier_loop_says_nothing_of_this_one() -> None:
    earlier = nn.Linear(8, 8)
    earlier_optimizer = torch.optim.AdamW(earlier.parameters(), lr=1e-3)
    ng.watch(earlier, earlier_optimizer)
    run(3, loop(earlier, earlier_optimizer, 4, 8))
    model = nn.Linear(8, 8)
    ng.watch(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def no_step(_: int) -> None:
        model(torch.randn(4, 8)).square().mean().backward()

    assert not run(25, no_step), "as a loss scaler that skips every step"


@pytest.mark.parametrize(
    ("part", "method"),
    [
        (ForwardPasses, "before_pass"), (ForwardPasses, "add_sum"), (BackwardPasses, "see_gradient"),
        (Watch, "after_step"),
    ],
)  # fmt: skip
def test_a_part_that_ended_leaves_no_hook_of_its_own(
    part: Any, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise ValueError("no ink")

    monkeypatch.setattr(part, method, broken)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    watch = ng.watch(model, optimizer)
    assert all(block._forward_hooks for block in model)
    assert any(p._backward_hooks for p in model.parameters())
    messages = run(2, loop(model, optimizer, 4, 8))
    assert messages == [f"{part.title} ended: ValueError: no ink"]
    assert watch.is_ended is (part is Watch)
    assert part is BackwardPasses or not any(block._forward_hooks for block in model)
    assert part is ForwardPasses or not any(p._backward_hooks for p in model.parameters())
    watch.remove()
    assert not any(block._forward_hooks for block in model)
    assert not any(p._backward_hooks for p in model.parameters())
    assert not model._forward_hooks and not model._forward_pre_hooks


def test_what_is_watched_is_printed_at_the_third_step(capfd: pytest.CaptureFixture[str]) -> None:
    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(8, 8)

    model = Parts()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    watches = ng.watch(model, optimizer), ng.watch(model, optimizer, called=model.net)
    one_step = loop(model.net, optimizer, 4, 8)
    run(2, one_step)
    assert not capfd.readouterr().err
    run(3, one_step)
    first, second = capfd.readouterr().err.splitlines()
    assert first.startswith("watch: 2 tensors, rate, gradients; not: modes") and "called=" in first
    assert second == "watch: 2 tensors, rate, gradients, modes" and not watches[1].unseen


class OwnRate(torch.optim.Optimizer):
    """An optimizer that computes its own rate, as Adafactor may."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": None})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            p.sub_(1e-3 * p.grad)


def test_a_loss_with_a_graph_is_read_without_a_warning() -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    watch = ng.watch(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        watch.step(square(model, 4, 8))


def test_a_rate_of_none_is_said() -> None:
    model = nn.Linear(8, 8)
    optimizer = OwnRate(model.parameters())
    watch = ng.watch(model, optimizer)
    run(3, loop(model, optimizer, 4, 8))
    assert "effective learning rate (a group has no lr)" in watch.seen()


class Stochastic(torch.optim.Optimizer):
    """SGD whose bfloat16 weights are rounded stochastically, without bias."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr, "bf16_stochastic_round": True})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                exact = p.float() - group["lr"] * p.grad.float().sign()
                bits = exact.view(torch.int32) + torch.randint_like(exact, 65536).to(torch.int32)
                p.copy_((bits & -65536).view(torch.float32))


def test_stochastic_rounding_is_not_accused_over_a_window() -> None:
    torch.manual_seed(0)
    model = nn.LayerNorm(256).to(B16)
    optimizer = Stochastic(model.parameters(), lr=1e-5)
    ng.watch(model, optimizer)
    assert not run(40, loop(model, optimizer, 8, 256, dtype=B16))


def test_gradients_in_float16_whose_squares_overflow_have_a_norm() -> None:
    model = nn.Linear(8, 8).half()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    watch = ng.watch(model, optimizer)

    def one_step(step: int) -> None:
        for p in model.parameters():
            p.grad = torch.full_like(p, 1000.0)
        optimizer.step()

    assert not [words for words in run(2, one_step) if "not finite" in words]
    assert watch.numbers()["grad_norm"] == pytest.approx(1000 * math.sqrt(72), rel=1e-3)


def test_one_value_that_is_not_finite_is_one_reading_at_the_first_place() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ng.watch(model, optimizer)

    def one_step(step: int) -> None:
        square(model, 4, 8).backward()
        if step == 4:
            model[2].bias.grad[0] = math.nan
        optimizer.step()
        optimizer.zero_grad()

    messages = run(10, one_step)
    assert len(messages) == 1 and messages[0].startswith(
        "step 5: 2.bias: its gradient is the first"
    ), messages


def test_a_tensor_without_a_gradient_that_moves_is_said() -> None:
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    ng.watch(model, optimizer, called=model[0])

    def one_step(step: int) -> None:
        square(model[0], 4, 8).backward()
        for p in model[1].parameters():
            p.grad = torch.zeros_like(p)
        optimizer.step()
        optimizer.zero_grad()

    messages = run(60, one_step)
    assert len(messages) == 1 and "tensors without a gradient move: 2" in messages[0], messages


class Coded(Tensor):
    """A state that holds codes, as of torchao and bitsandbytes."""

    @staticmethod
    def __new__(cls, values: Tensor) -> Coded:
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=torch.float32)

    def __init__(self, values: Tensor) -> None:
        self.codes = values.half()

    def dequantize(self) -> Tensor:
        return self.codes.float()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(f"no {func}")


class CodedAdam(torch.optim.AdamW):
    """An AdamW whose states are tensors of another class."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["exp_avg"], state["exp_avg_sq"] = Coded(p.grad), Coded(p.grad.square())
                state["step"] = torch.tensor(1.0)
                p.sub_(group["lr"] * p.grad.sign())


@pytest.mark.parametrize("dtype", [torch.float32, B16])
def test_states_of_other_classes_end_no_loop(dtype: torch.dtype, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(64, 64).to(dtype)
    optimizer = CodedAdam(model.parameters(), lr=1e-2)
    with ng.RunRecorder(tmp_path, model, optimizer, gauges_every=2) as recorder:

        def one_step(step: int) -> None:
            value = square(model, 4, 64, dtype=dtype)
            value.backward()
            optimizer.step()
            optimizer.zero_grad()
            recorder.step(value)

        run(4, one_step)
    assert len(ng.read_run(tmp_path).steps) == 4
    assert ng.check(model, optimizer) is not None


def test_gauges_let_torch_func_pass() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows: list[Any] = []
    Gauges(Hub(model, [optimizer]), optimizer, 1, rows.append)
    values = {name: p.detach() for name, p in model.named_parameters()}

    def loss(values: Any, x: Tensor) -> Tensor:
        return torch.func.functional_call(model, values, (x,)).square().sum()

    gradients = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(values, torch.ones(4, 8))
    for name, p in model.named_parameters():
        p.grad = gradients[name].mean(0)
    optimizer.step()
    assert len(rows) == 1


# ── the record ────────────────────────────────────────────────────────────────────────────────────


def recorded(tmp_path: Path, rows: Callable[[int], dict[str, Any]], number: int = 60) -> Any:
    with ng.runs.RunWriter.create(tmp_path / "run", {"recipe": "float32/float32"}) as writer:
        for step in range(1, number + 1):
            writer.append("steps", {"step": step, **rows(step)})
    return ng.diagnose(tmp_path / "run")


LOSSES: dict[str, Callable[[int], float]] = {
    "begins at zero, as GRPO's": lambda step: 4e-4 * step / 60,
    "hovers around zero": lambda step: 0.01 * (-1) ** step,
    "is negative and falls": lambda step: -0.1 - step / 100,
    "is negative and rises": lambda step: -1.0 + step / 100,
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_without_a_zero_has_no_divergence_and_no_flatness(name: str, tmp_path: Path) -> None:
    diagnosis = recorded(tmp_path, lambda step: {"loss": LOSSES[name](step)})
    assert not [r for r in diagnosis if r.what in ("divergence", "constant-loss")], diagnosis


def test_a_loss_of_nats_that_rises_has_diverged(tmp_path: Path) -> None:
    diagnosis = recorded(tmp_path, lambda step: {"loss": 2.0 + step / 30})
    assert "divergence" in [r.what for r in diagnosis]


def whats(diagnosis: Any) -> list[tuple[str, int, str]]:
    return [
        (r.what, r.step, r.severity) for r in diagnosis if r.stage in ("data", "optimizer step")
    ]


def test_repeated_batches_are_read_from_their_checksums(tmp_path: Path) -> None:
    loss = {"loss": 2.0}
    repeated = recorded(tmp_path / "a", lambda step: {**loss, "batch_crc": "aa"}, 20)
    assert whats(repeated) == [("equal-batches", 2, "warning")]
    again = recorded(tmp_path / "b", lambda step: {**loss, "batch_crc": f"{step % 20:02}"}, 40)
    assert whats(again) == [("equal-batches", 21, "note")]
    shuffled = recorded(
        tmp_path / "c", lambda step: {**loss, "batch_crc": f"{step * step % 61}"}, 40
    )
    assert not whats(shuffled)


def test_a_rate_that_ends_at_zero_before_the_run_is_read(tmp_path: Path) -> None:
    diagnosis = recorded(tmp_path / "a", lambda step: {"loss": 2.0, "lr": max(0.0, 1 - step / 40)})
    assert whats(diagnosis) == [("learning-rate", 40, "warning")]
    usual = recorded(tmp_path / "b", lambda step: {"loss": 2.0, "lr": 1 - step / 60})
    assert not whats(usual)


@pytest.mark.parametrize(("limit", "after"), [(1.0, 0.125), (1.0, 0.3), (None, 0.3)])
def test_a_norm_below_what_the_clip_leaves_is_read(
    limit: float | None, after: float, tmp_path: Path
) -> None:
    """Where no limit is declared, the loop may clip to any."""
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    recorder = ng.RunRecorder(tmp_path, model, optimizer, max_grad_norm=limit)
    with recorder:

        def one_step(step: int) -> None:
            value = 100 * square(model, 4, 8)
            value.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for p in model.parameters():
                p.grad *= after if step > 3 else 1
            optimizer.step()
            optimizer.zero_grad()
            recorder.step(value, grad_norm=norm if limit else float(norm))

        run(6, one_step)
    readings = [r for r in ng.diagnose(tmp_path) if r.what == "clip-norm"]
    expected = [] if limit is None else [(5, after, 1.0)]
    assert [(r.step, round(r.value, 3), r.expected) for r in readings] == expected


def test_a_step_that_nothing_compared_was_not_looked_at(tmp_path: Path) -> None:
    class Mine(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            for p in self.param_groups[0]["params"]:
                p.data -= 100 * self.param_groups[0]["lr"] * p.grad

    model = nn.Linear(8, 8)
    optimizer = Mine(model.parameters(), lr=1e-6)
    with ng.RunRecorder(tmp_path, model, optimizer) as recorder:
        for _ in range(4):
            value = square(model, 4, 8)
            value.backward()
            optimizer.step()
            optimizer.zero_grad()
            recorder.step(value)
    diagnosis = ng.diagnose(tmp_path)
    assert "the optimizer's step" in diagnosis.unseen


def test_masters_of_a_loop_s_own_are_no_replaced_parameters() -> None:
    torch.manual_seed(0)
    model = nn.Linear(16, 16).to(B16)
    masters = [nn.Parameter(torch.randn_like(p.float())) for p in model.parameters()]
    for p, master in zip(model.parameters(), masters, strict=True):
        p.data = master.detach().to(B16)
    readings = ng.check(model, torch.optim.AdamW(masters, lr=1e-3))
    assert "missing-parameters" not in [r.what for r in readings]
    float32_params = [nn.Parameter(torch.randn_like(p.float())) for p in model.parameters()]
    readings = ng.check(model, torch.optim.AdamW(float32_params))
    (missing,) = [r for r in readings if r.what == "missing-parameters"]
    assert "steps other tensors" in missing.advice


def test_a_step_of_forward_passes_alone_is_no_evaluation() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    watch = ng.watch(model, optimizer)

    def one_step(step: int) -> None:
        """Estimate the slope along a direction, and put the weights back up to rounding."""
        x = torch.randn(16, 8)
        losses = []
        with torch.no_grad():
            for move in (1e-3, -2e-3):
                generator = torch.Generator().manual_seed(step)
                for p in model.parameters():
                    p.add_(torch.randn(p.shape, generator=generator), alpha=move)
                losses.append(model(x).square().mean())
            generator = torch.Generator().manual_seed(step)
            for p in model.parameters():
                direction = torch.randn(p.shape, generator=generator)
                p.add_(direction, alpha=1e-3)
                p.grad = direction * (losses[0] - losses[1]) / 2e-3
        optimizer.step()

    messages = run(20, one_step)
    watch.remove()
    assert not [words for words in messages if "evaluation" in words]


@pytest.mark.parametrize("other_steps", [False, True])
def test_an_optimizer_that_never_steps_is_said(other_steps: bool) -> None:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    second_optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=1e-2)
    watch = ng.watch(model, optimizer)

    def one_step(step: int) -> None:
        loss = square(model, 4, 8)
        loss.backward()
        if other_steps:
            second_optimizer.step()
        else:
            watch.step(loss)

    messages = run(25, one_step)
    watch.remove()
    (words,) = messages
    assert "has not stepped in 20 backward passes" in words
    assert ("another one has (SGD)" in words) is other_steps


def test_an_optimizer_that_steps_first_and_alone_is_one_that_steps() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    optimizers = [torch.optim.SGD(layer.parameters(), lr=1e-2) for layer in model]
    watch = ng.watch(model, optimizers)

    def one_step(step: int) -> None:
        loss = square(model, 4, 8)
        loss.backward()
        optimizers[step >= 24].step()
        watch.step(loss)
        model.zero_grad()

    messages = run(30, one_step)
    watch.remove()
    assert not [words for words in messages if "has not stepped" in words]


class Fourier(nn.Module):
    """Weights of frequencies, and an output that is complex."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8, dtype=torch.complex64))
        self.layers = nn.ModuleList([nn.Identity()])

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.ifft(self.layers[0](torch.fft.fft(x)) @ self.weight).real


class Bag(nn.Module):
    """A table whose gradients are sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(50, 8, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.table(x.abs().mul(10).long().clamp_max(49))


UNUSUAL = {
    "float64": (nn.Linear(8, 8).double(), torch.optim.NAdam, torch.float64),
    "complex": (Fourier(), torch.optim.Adam, torch.float32),
    "sparse gradients": (Bag(), torch.optim.SparseAdam, torch.float32),
    "a bias before a norm": (
        nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4)),
        partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True),
        torch.float32,
    ),
}


@pytest.mark.parametrize("kind", UNUSUAL)
def test_unusual_tensors_are_watched_to_the_end(kind: str) -> None:
    torch.manual_seed(0)
    model, make, dtype = UNUSUAL[kind]
    optimizer = make(model.parameters())
    ng.check(
        model,
        optimizer,
        batch=torch.randn(16, 8, dtype=dtype),
        loss=lambda m, b: m(b).square().mean(),
    )
    watch = ng.watch(model, optimizer)

    def one_step(step: int) -> None:
        (model(torch.randn(16, 8, dtype=dtype)) - 1).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    messages = run(60, one_step)
    watch.remove()
    assert [words for words in messages if not words.startswith("watch: ")] == []
    assert 0 < watch.numbers()["grad_norm"] < math.inf


def test_two_token_types_are_no_vocabulary() -> None:
    from narrowgauge.checks.loss_value import vocabulary_of

    model = nn.ModuleDict({"types": nn.Embedding(2, 8), "classifier": nn.Linear(8, 2)})
    assert vocabulary_of(model) == 0


# ── what a loop keeps beside its weights ──────────────────────────────────────────────────────────


class Masters(torch.optim.SGD):
    """SGD over masters that a loop keeps itself, and writes back into 16-bit weights."""

    def __init__(self, model: nn.Module, keeps_gradients: bool = False) -> None:
        self.weights = list(model.parameters())
        self.keeps_gradients = keeps_gradients
        super().__init__([p.detach().float().requires_grad_() for p in self.weights], lr=2e-3)

    def train(self, value: Tensor) -> None:
        value.backward()
        masters = self.param_groups[0]["params"]
        for master, p in zip(masters, self.weights, strict=True):
            master.grad = p.grad.float()
        self.step()
        for master, p in zip(masters, self.weights, strict=True):
            p.data.copy_(master)
            if not self.keeps_gradients:
                p.grad = None


class Kahan(torch.optim.Optimizer):
    """Descent that keeps what a 16-bit weight rounds off."""

    def __init__(self, model: nn.Module, keeps_rest: bool = True) -> None:
        self.keeps_rest = keeps_rest
        super().__init__(model.parameters(), {"lr": 5e-4})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                rest = self.state[p].setdefault("rest", torch.zeros_like(p))
                change = (-group["lr"] * p.grad.float().sign() * p.grad.abs().sqrt()).to(B16) + rest
                now = p + change
                if self.keeps_rest:
                    rest.copy_(change - (now - p))
                p.copy_(now)

    def train(self, value: Tensor) -> None:
        value.backward()
        self.step()
        self.zero_grad()


class Perturbed(torch.optim.SGD):
    """Descent whose state is written before each step, as sharpness-aware minimization's."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        super().__init__(model.parameters(), lr=1e-2)

    def step(self, closure: Any = None) -> None:
        with torch.no_grad():
            for p in self.model.parameters():
                p.copy_(self.state[p]["old"])
                p.sub_(p.grad, alpha=1e-2)

    def train(self, value: Tensor) -> None:
        value.backward()
        with torch.no_grad():
            for p in self.model.parameters():
                self.state[p]["old"] = p.detach().clone()
                p.add_(p.grad, alpha=1e-2)
        self.zero_grad()
        square(self.model, 8, 32, dtype=next(self.model.parameters()).dtype).backward()
        self.step()
        self.zero_grad()


BESIDE: dict[str, tuple[Callable[[nn.Module], Any], torch.dtype, str]] = {
    "masters of the loop": (Masters, B16, ""),
    "masters, gradients kept": (partial(Masters, keeps_gradients=True), B16, "were not cleared"),
    "compensation": (Kahan, B16, ""),
    "compensation that is lost": (partial(Kahan, keeps_rest=False), B16, "you train at"),
    "a state that is written in each step": (Perturbed, torch.float32, ""),
}


@pytest.mark.parametrize("name", BESIDE)
def test_what_lies_beside_the_weights_is_no_fault_until_it_is_lost(name: str) -> None:
    make, dtype, expected = BESIDE[name]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.RMSNorm(32), nn.Linear(32, 8)).to(dtype)
    optimizer = make(model)
    ng.watch(model, optimizer)
    messages = run(60, lambda step: optimizer.train(square(model, 8, 32, dtype=dtype)))
    assert bool(messages) == bool(expected), messages
    assert not messages or any(expected in words for words in messages)


@pytest.mark.parametrize("dtype", [torch.float32, B16])
def test_an_average_of_a_part_of_the_model_is_followed(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Linear(32, 32), nn.RMSNorm(32))
    model = nn.Sequential(encoder, nn.Linear(32, 8))
    average = copy.deepcopy(encoder).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    ng.watch(model, optimizer)

    def one_step(step: int) -> None:
        loop(model, optimizer, 8, 32)(step)
        for p, q in zip(average.parameters(), encoder.parameters(), strict=True):
            with torch.no_grad():
                p.lerp_(q.to(dtype), 1e-4)

    messages = run(60, one_step)
    assert [("average" in words) for words in messages] == [True] * (dtype is B16)


def test_a_group_whose_rate_is_zero_while_another_trains_is_told() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    groups = [{"params": layer.parameters(), "lr": 1e-3} for layer in model]
    optimizer = torch.optim.AdamW(groups)
    ng.watch(model, optimizer)
    one_step = loop(model, optimizer, 8, 16)
    assert not run(10, one_step)
    optimizer.param_groups[1]["lr"] = 0.0
    assert not run(4, one_step)
    (words,) = run(6, one_step)
    assert "learning rate of 0 in group 1" in words
    optimizer.param_groups[0]["lr"] = 0.0
    assert not run(3, one_step), "the run has ended"


@pytest.mark.parametrize("mode", ["train", "eval", "thawed", "without momentum"])
def test_statistics_of_frozen_batch_norms_that_move_are_said(mode: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW([*model[0].parameters(), *model[2].parameters()], lr=1e-3)
    if mode == "thawed":
        optimizer.add_param_group({"params": [*model[1].parameters()]})
    model[1].requires_grad_(mode == "thawed").train(mode != "eval")
    model[1].momentum = 0.0 if mode == "without momentum" else 0.1
    ng.watch(model, optimizer)
    messages = run(8, loop(model, optimizer, 8, 8))
    assert [("1 batch norms" in words) for words in messages] == [True] * (mode == "train")


# ── the count of steps ────────────────────────────────────────────────────────────────────────────


def count_alone(model: nn.Module, optimizer: Any) -> None:
    for state in optimizer.state.values():
        state["step"].zero_()


def all_states(model: nn.Module, optimizer: Any) -> None:
    for state in optimizer.state.values():
        for x in state.values():
            x.zero_()


def a_rollback(model: nn.Module, optimizer: Any) -> None:
    count_alone(model, optimizer)
    for p in model.parameters():
        p.data.mul_(0.5)


@pytest.mark.parametrize(
    ("change", "is_told"), [(count_alone, True), (all_states, False), (a_rollback, False)]
)
def test_a_count_that_falls_alone_is_told(change: Callable[..., None], is_told: bool) -> None:
    torch.manual_seed(0)
    model = nn.Linear(16, 16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ng.watch(model, optimizer)
    one_step = loop(model, optimizer, 8, 16)
    assert not run(10, one_step)
    change(model, optimizer)
    messages = run(2, one_step)
    assert [("count of steps is 0 after 9" in words) for words in messages] == [True] * is_told


def test_the_rate_is_that_of_now() -> None:
    torch.manual_seed(0)
    model = nn.Linear(16, 16).to(B16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    watch = ng.watch(model, optimizer)
    run(3, loop(model, optimizer, 8, 16, dtype=B16))
    share = watch.numbers()["effective_lr/group0"] / 0.5
    optimizer.param_groups[0]["lr"] = 0.1
    run(1, loop(model, optimizer, 8, 16, dtype=B16))  # not a sampled step
    assert watch.numbers()["lr/group0"] == 0.1
    assert watch.numbers()["effective_lr/group0"] == pytest.approx(0.1 * share)


class Accumulating:
    """A loop of four micro-batches a step, as a fault spoils it or not."""

    def __init__(self, case: str) -> None:
        torch.manual_seed(0)
        self.case = case
        first, second = nn.Linear(8, 4, bias=False), nn.Linear(4, 8, bias=False)
        self.model = nn.Sequential(first, second)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        ng.watch(self.model, self.optimizer)

    def __call__(self, step: int) -> None:
        if self.case == "begun anew" and step == 20:  # as adapters: the other factor is zero
            with torch.no_grad():
                self.model[1].weight.zero_()
        if self.case == "left out" and step % 10 == 9:
            self.passes(4, torch.randn(4, 4, 8))
            self.optimizer.zero_grad()
        first = torch.randn(4, 8).expand(4, 4, 8)
        batches = first if self.case in ("one read", "perturbed") else torch.randn(4, 4, 8)
        self.passes(2, batches[:2])
        if self.case == "evaluated" and step % 10 == 9:
            self.optimizer.zero_grad()
        if self.case == "perturbed":  # as sharpness-aware minimization
            with torch.no_grad():
                self.model[0].weight += 0.01
        self.passes(2, batches[2:])
        if self.case == "perturbed":
            with torch.no_grad():
                self.model[0].weight -= 0.01
        self.optimizer.step()
        self.optimizer.zero_grad()

    def passes(self, number: int, batches: Tensor) -> None:
        for batch in batches[:number]:
            (self.model(batch).square().mean() / 4).backward()


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("plain", ""),
        ("left out", ""),
        ("begun anew", ""),
        ("perturbed", ""),
        ("evaluated", "step 10: in 1 of 10 steps the gradients were cleared between the 4"),
        ("one read", "step 13: all 4 backward passes of a step have the same gradient"),
    ],
)
def test_passes_that_a_step_lost_or_repeated_are_said(case: str, words: str) -> None:
    messages = run(40, Accumulating(case))
    if case == "begun anew":
        assert not [message for message in messages if "cleared" in message], messages
        return
    assert [message.startswith(words) for message in messages] == [True] * bool(words), messages


@pytest.mark.parametrize("case", ["in proportion", "at one rate", "second at zero"])
def test_rates_of_the_run_are_compared_with_those_at_the_start(case: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    groups = [
        {"params": model[0].parameters(), "lr": 1e-3},
        {"params": model[1].parameters(), "lr": 1e-4},
    ]
    optimizer = torch.optim.SGD(groups, lr=1e-3)
    ng.watch(model, optimizer)
    one_step = loop(model, optimizer, 4, 8)

    def scheduled(step: int) -> None:
        rate = 1e-3 * (1 - step / 100)
        second = {"in proportion": 0.1 * rate, "at one rate": rate, "second at zero": 0.0}[case]
        for group, value in zip(optimizer.param_groups, (rate, second), strict=True):
            group["lr"] = value
        one_step(step)

    expected = {
        "at one rate": "the groups began",
        "second at zero": "5 steps had a learning rate of 0",
    }
    messages = run(30, scheduled)
    assert [expected[case] in message for message in messages[:1]] == [True] * (case in expected)
    assert bool(messages) is (case in expected), messages


@pytest.mark.parametrize(
    ("case", "is_said"),
    [("an average", False), ("exchanged", True), ("a copy", False), ("a narrow copy", False)],
)
def test_an_average_with_its_factors_exchanged_is_said(case: str, is_said: bool) -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    average = copy.deepcopy(model)
    if case == "a narrow copy":
        average = average.to(B16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ng.watch(model, optimizer)
    one_step = loop(model, optimizer, 4, 8)
    taken = {"an average": 0.01, "exchanged": 0.99}.get(case, 1.0)

    @torch.no_grad()
    def averaged(step: int) -> None:
        with torch.enable_grad():
            one_step(step)
        for mean, p in zip(average.parameters(), model.parameters(), strict=True):
            mean.lerp_(p.to(mean.dtype), taken)

    messages = run(501, averaged)
    assert [("factors exchanged" in message) for message in messages] == [True] * is_said, messages


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("seeded evaluation", "step 21: the random generator is where it was at step 11"),
        ("seeded epoch", "step 11: the random generator is where it was at step 1"),
        ("forked evaluation", ""),
        ("nothing drawn", ""),
    ],
)
def test_a_generator_that_returns_is_told(case: str, words: str) -> None:
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5 if case != "nothing drawn" else 0.0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batches = torch.randn(40, 4, 8)
    ng.watch(model, optimizer)

    def one_step(step: int) -> None:
        if step % 10 == 0 and case == "seeded epoch":
            torch.manual_seed(0)
        if step and step % 10 == 0 and "evaluation" in case:
            with torch.random.fork_rng(enabled=case == "forked evaluation"), torch.no_grad():
                torch.manual_seed(0)
                model.eval()(torch.randn(4, 8))
            model.train()
        model(batches[step]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    messages = run(40, one_step)
    assert [message.startswith(words) for message in messages] == [True] * bool(words), messages


@pytest.mark.parametrize("number", [1, 2])
def test_weights_that_all_differ_after_the_first_step_were_not_summed(number: int) -> None:
    sums = {name: [1.0, 2.0, 1] for name in ("a", "b")}
    apart = dict(list(sums.items())[:number])
    now = Snapshot(1, norm=1.0, ranks_apart=apart, weights=dict.fromkeys(sums, "moved"))
    (reading,) = [r for r in Laws(Facts()).read(now) if r.what == "ranks-differ"]
    assert ("summed over the ranks" in reading.advice) == (number == 2)


@pytest.mark.parametrize(
    ("case", "is_told"),
    [("one loss", True), ("a game", False), ("a game, one watched", False), ("two models", True)],
)
def test_losses_of_a_game_are_no_spikes(case: str, is_told: bool) -> None:
    """Two optimizers of one loss, as Muon and AdamW, step after the same pass."""
    torch.manual_seed(0)
    first, second = nn.Linear(8, 8), nn.Linear(8, 1)
    model = nn.Sequential(first, second)
    optimizers = [torch.optim.SGD(part.parameters(), lr=1e-3) for part in model]
    other = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=1e-3)
    watched: Any = optimizers
    if case == "a game, one watched":
        model, watched = first, optimizers[0]
    elif case == "two models":
        other.step()  # of another loop, before this one
    watch = ng.watch(model, watched)

    def one_step(step: int) -> None:
        batch = torch.randn(4, 8)
        for optimizer in optimizers:
            if case.startswith("a game") or optimizer is optimizers[0]:
                second(first(batch)).square().mean().backward()
            optimizer.step()
            if case.startswith("a game"):
                optimizer.zero_grad()
        for optimizer in optimizers:
            optimizer.zero_grad()
        watch.step(5.0 if step == 60 else 0.5 + 0.001 * math.sin(step))

    messages = run(62, one_step)
    assert any("the loss jumped" in message for message in messages) == is_told, messages
