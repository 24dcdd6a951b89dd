"""Gauges in loops that users write: any optimizer, in-place code, loss scales of PyTorch's own, copies of a watched model."""

from __future__ import annotations

import copy
import io
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import narrowgauge as ng
from narrowgauge.gauges.attach import Gauges, attach_gauges
from narrowgauge.runs.schema import METRICS

X = torch.randn(16, 32, generator=torch.Generator().manual_seed(2))


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64, bias=False), nn.GELU(), nn.Linear(64, 8, bias=False))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, run: Any = None) -> list[float]:
    losses = []
    for _ in range(steps):
        loss = (run or model)(X.to(next(model.parameters()).dtype)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


# ── optimizers ──────────────────────────────────────────────────────────────────────────────────────────────────────────

ELEMENTWISE = ("AdamW", "Adam", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD", "ASGD", "Adagrad", "Adadelta")
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    **{name: getattr(torch.optim, name) for name in (*ELEMENTWISE, "Adafactor", "Muon")},
    "AdamW, fused": lambda p, lr: torch.optim.AdamW(p, lr, fused=True),
    "AdamW, its rate a tensor": lambda p, lr: torch.optim.AdamW(p, torch.tensor(lr), foreach=False),
}


class Adamish(torch.optim.Optimizer):
    """Keeps states under Adam's names that are not Adam's: ``keep`` makes one of a squared gradient."""

    def __init__(
        self, parameters: Any, keep: Callable[[Tensor], Tensor], betas: tuple[float, ...] = (0.9, 0.5)
    ) -> None:
        super().__init__(parameters, {"lr": 1e-3, "betas": betas, "eps": 1e-8})
        self.keep, self.exact = keep, dict[Tensor, Tensor]()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            square = self.exact.setdefault(p, torch.zeros_like(p))
            square.lerp_(p.grad.square(), 0.5)
            steps = self.state[p].get("step", 0) + 1
            self.state[p] = {"step": steps, "exp_avg": torch.zeros_like(p), "exp_avg_sq": self.keep(square)}
            p.sub_(p.grad, alpha=1e-3)


class Codes(Tensor):
    """Stored as twice its value, and decoded by a method of its own, as torchao's optimizer states are."""

    def dequantize(self) -> Tensor:
        return self.as_subclass(Tensor) / 2


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_is_read(name: str) -> None:
    runs = []
    for every in (0, 2):
        model = net()
        optimizer = OPTIMIZERS[name](model.parameters(), lr=1e-3)
        gauges = attach_gauges(model, optimizer, every=every)
        runs.append((train(model, optimizer, 6), gauges.last))
    (plain, nothing), (watched, row) = runs
    assert plain == watched and nothing is None and row is not None
    fields = dict(zip(METRICS["updates"], row["updates"]["0.weight"], strict=True))
    assert fields["update_to_weight"] > 0
    if "Adam" in name and name not in ("Adamax", "NAdam", "RAdam"):
        assert fields["update_to_ulp"] > 1
        moments = dict(zip(METRICS["moments"], row["moments"]["0.weight"], strict=True))
        assert moments == {"bias": pytest.approx(1, abs=1e-3), "frozen_fraction": 0}


@pytest.mark.parametrize(
    ("keep", "betas", "followed"),
    [
        (lambda v: v.clone(), (0.9, 0.5), True),
        (lambda v: v.mean(), (0.9, 0.5), False),
        (lambda v: v.clone(), (0.9, 0.5, 0.9), True),
        (lambda v: (2 * v).as_subclass(Codes), (0.9, 0.5), True),
    ],
    ids=["as Adam's", "one for a tensor", "three betas", "codes"],
)
def test_states_of_adams_names_are_read_as_what_they_are(
    keep: Callable[[Tensor], Tensor], betas: tuple[float, ...], followed: bool
) -> None:
    model = net()
    optimizer = Adamish(model.parameters(), keep, betas)
    gauges = attach_gauges(model, optimizer, every=3)
    train(model, optimizer, 6)
    assert gauges.last is not None
    moments = gauges.last.get("moments", {})
    assert bool(moments) is followed
    assert all(row[0] == pytest.approx(1, abs=1e-3) for row in moments.values())


class Waits(TorchDispatchMode):
    """Counts the reads of single values, for each of which the host would wait for a device."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["AdamW", "AdamW, fused", "AdamW, its rate a tensor", "SGD"])
def test_reading_a_sampled_step_waits_for_nothing_but_its_one_transfer(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mode, read = Waits(), Gauges._read

    def counted(gauges: Gauges, step: int) -> None:
        # On a CPU a fused optimizer counts its steps there, too.
        with mode:
            read(gauges, step)

    monkeypatch.setattr(Gauges, "_read", counted)
    model = net()
    optimizer = OPTIMIZERS[name](model.parameters(), lr=1e-3)
    gauges = attach_gauges(model, optimizer, every=2)
    train(model, optimizer, 4)
    assert gauges.last is not None and gauges.last["step"] == 4
    assert mode.count == 0


# ── alarms ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_lost_updates_are_told_in_a_loop_of_ones_own() -> None:
    told: list[Any] = []
    stop = ng.on_event(told.append)
    model, optimizer = ng.prepare(net(), "bfloat16/naive", lr=1e-6, audit_every=2)
    gauges = attach_gauges(model, optimizer, every=2)
    with pytest.warns(ng.optim.UpdateLossWarning):
        train(model, optimizer, 12)
    gauges.detach()
    stop()
    assert [event.kind for event in told] == ["lost_updates"] and told[0].step <= 8


def scaled(fused: bool, init_scale: float, steps: int) -> tuple[Gauges, list[str]]:
    """A loop with PyTorch's own search for a loss scale."""
    told: list[Any] = []
    stop = ng.on_event(told.append)
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
    gauges = attach_gauges(model, optimizer, every=1)
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale)
    for _ in range(steps):
        scaler.scale(model(X).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    gauges.detach()
    stop()
    return gauges, [event.kind for event in told]


@pytest.mark.parametrize("fused", [False, True])
def test_moments_beside_a_loss_scale_of_pytorchs(fused: bool) -> None:
    gauges, told = scaled(fused, 1024.0, 6)
    assert gauges.last is not None and told == []
    assert all(bias == pytest.approx(1, abs=1e-3) for bias, _ in gauges.last["moments"].values())


def test_a_search_for_a_loss_scale_is_no_alarm() -> None:
    gauges, told = scaled(True, 2.0**126, 8)
    assert gauges.alarms is not None and gauges.alarms.facts.scales_loss
    assert "nonfinite" not in told


# ── models ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_what_is_changed_in_place_after_a_layer_compiles() -> None:
    losses = []
    for every in (0, 2):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(inplace=True), nn.Linear(64, 8))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        gauges = attach_gauges(model, optimizer, every=every)
        losses.append(train(model, optimizer, 4, torch.compile(model, fullgraph=True)))
    assert losses[0] == losses[1]
    assert gauges.last is not None and {"output_grad:0", "output_grad:2"} <= gauges.last["tensors"].keys()


def largest_input(gauges: Gauges) -> float:
    assert gauges.last is not None
    return float(gauges.last["tensors"]["input:0"][0])


def test_a_copy_of_a_watched_model_is_not_watched() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters())
    gauges = attach_gauges(model, optimizer, every=1)
    other = copy.deepcopy(model)
    model(torch.ones(4, 32)).sum().backward()
    other(torch.full((4, 32), 1000.0)).sum().backward()
    optimizer.step()
    assert largest_input(gauges) == 1
    own = torch.optim.SGD(other.parameters())
    others = attach_gauges(other, own, every=1)  # the copy has none that would stand in the way
    other(torch.full((4, 32), 7.0)).sum().backward()
    own.step()
    assert largest_input(others) == 7
    others.detach()
    other(torch.ones(4, 32)).sum().backward()  # while the first are open, and the copied hooks still there
    gauges.detach()


def test_a_pickle_of_a_watched_model_is_not_watched_elsewhere() -> None:
    model = net()
    gauges = attach_gauges(model, torch.optim.SGD(model.parameters()), every=1)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    code = """
import io, sys, torch
from narrowgauge.gauges.attach import attach_gauges
model = torch.load(io.BytesIO(sys.stdin.buffer.read()), weights_only=False)
second = torch.nn.Linear(2, 2)
attach_gauges(second, torch.optim.SGD(second.parameters()), every=1)  # a sampled step, and one recorder
model(torch.ones(4, 32)).sum().backward()
optimizer = torch.optim.SGD(model.parameters())
gauges = attach_gauges(model, optimizer, every=1)
model(torch.ones(4, 32)).sum().backward()
optimizer.step()
assert gauges.last["tensors"]["input:0"][0] == 1
"""
    done = subprocess.run([sys.executable, "-c", code], input=buffer.getvalue(), capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    gauges.detach()


def test_gauges_on_parts_of_a_model_end_each_by_themselves() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters())
    first, second = (attach_gauges(model, optimizer, f"{k}*", every=1) for k in (0, 2))
    second.detach()
    train(model, optimizer, 1)
    assert first.last is not None and {"input:0", "output_grad:0"} <= first.last["tensors"].keys()


def test_what_was_compiled_before_is_told_once() -> None:
    """In a process of its own: whether hooks are looked for is the process's, and other tests have asked for it."""
    code = """
import warnings, torch
from narrowgauge.gauges.attach import GaugeNotice, attach_gauges
model = torch.nn.Sequential(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters())
run = torch.compile(model, backend="eager")
def step():
    run(torch.ones(2, 8)).sum().backward()
    optimizer.step()
step()
gauges = attach_gauges(model, optimizer, every=1)
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    step(), step()
print([str(w.message) for w in told if w.category is GaugeNotice])
assert not any(key.startswith("input") for key in gauges.last["tensors"])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("recorded nothing at step 1") == 1 and "step 2" not in done.stdout


def test_names_are_those_without_the_compiler() -> None:
    model = torch.compile(net(), backend="eager")
    optimizer = torch.optim.SGD(model.parameters())
    gauges = attach_gauges(model, optimizer, every=1)
    train(model, optimizer, 1)
    assert gauges.last is not None
    assert {"weight:0.weight", "input:0", "output_grad:2"} <= gauges.last["tensors"].keys()
    assert not any("_orig_mod" in key for key in gauges.last["tensors"])
