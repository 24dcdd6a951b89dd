"""A loop of one's own records hashes of its tensors and the formats it computes in, with the same
bits as without.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import narrowgauge as ng
from narrowgauge.measuring.two_runs import TwoRuns
from narrowgauge.runs.record import Run

STEPS = 6


def model_of(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Embedding(29, 16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 29))


def tokens_at(step: int) -> Tensor:
    return torch.randint(0, 29, (4, 8), generator=torch.Generator().manual_seed(step))


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    logits = model(tokens)
    return functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), tokens[:, 1:].flatten())


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def recorded(
    folder: Path,
    *,
    after_step: Callable[[nn.Module, int], object] = lambda model, step: None,
    every: int = 1,
) -> Run:
    """Train, and return the record."""
    model = model_of()
    optimizer = adamw(model)
    with ng.RunRecorder(folder, model, optimizer, fingerprints_every=every) as recorder:
        for step in range(1, STEPS + 1):
            tokens = tokens_at(step)
            loss = loss_of(model, tokens)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            recorder.step(loss, tokens=tokens.numel(), batch=tokens)
            after_step(model, step)
    return ng.read_run(folder)


def test_every_tensor_of_a_step_is_recorded(tmp_path: Path) -> None:
    hashed = recorded(tmp_path / "a")
    unhashed = recorded(tmp_path / "b", every=0)
    assert (
        unhashed.fingerprints == [] and TwoRuns(hashed, unhashed).is_complete
    )  # the last weights are the same
    rows = {row["step"]: row["tensors"] for row in hashed.fingerprints}
    assert list(rows) == list(range(STEPS + 1))
    names = [name for name, _ in model_of().named_parameters()]
    assert list(rows[0]) == [f"weight:{name}" for name in names]
    forward = [key for key in rows[2] if key.startswith(("tokens:", "output:"))]
    assert forward == ["tokens:batch", *(f"output:{name}" for name in "013")]
    assert [key for key in rows[2] if key not in forward] == [
        *(f"grad:{name}" for name in reversed(names)),
        *(f"{kind}:{name}" for kind in ("weight", "exp_avg", "exp_avg_sq") for name in names),
    ]
    assert rows[0]["weight:1.weight"][1] == pytest.approx(float(model_of()[1].weight.norm()))


@torch.no_grad()
def scale_a_weight(model: nn.Module, step: int) -> None:
    model.get_parameter("1.weight").mul_(0.999 if step == 4 else 1.0)


def test_a_weight_that_changes_between_steps_is_located(tmp_path: Path) -> None:
    runs = TwoRuns(
        recorded(tmp_path / "plain"), recorded(tmp_path / "other", after_step=scale_a_weight)
    )
    first = runs.readings[0]
    assert (first.step, first.stage, first.tensor) == (5, "forward", "output:1")


def test_masters_of_a_loops_own_and_states_of_any_optimizer_are_recorded(tmp_path: Path) -> None:
    model = model_of().bfloat16()
    masters = [p.detach().float() for p in model.parameters()]
    optimizer = torch.optim.SGD(masters, lr=0.1, momentum=0.9)
    with ng.RunRecorder(tmp_path / "a", model, optimizer, fingerprints_every=1) as recorder:
        loss = loss_of(model, tokens_at(1))
        loss.backward()
        for master, p in zip(masters, model.parameters(), strict=True):
            assert p.grad is not None
            master.grad = p.grad.float()
        optimizer.step()
        with torch.no_grad():
            for master, p in zip(masters, model.parameters(), strict=True):
                p.copy_(master)
        recorder.step(loss)
    rows = ng.read_run(tmp_path / "a").fingerprints
    for row in rows:
        assert "weight:1.weight" in row["tensors"]
    assert "state:momentum_buffer:1.weight" in rows[1]["tensors"]


def test_a_module_with_parameters_may_return_its_loss(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    model.register_forward_hook(lambda module, args, output: output.square().mean())
    optimizer = adamw(model)
    with ng.RunRecorder(tmp_path / "a", model, optimizer, fingerprints_every=1) as recorder:
        loss = model(torch.ones(2, 4))
        loss.backward()
        optimizer.step()
        recorder.step(loss)
    assert ng.read_run(tmp_path / "a").fingerprints[1]["tensors"]["output:"][2] == 1
