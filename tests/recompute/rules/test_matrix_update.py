"""The step of an optimizer that needs whole matrices, computed again: Muon, torch's and ours, healthy and with faults."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import narrowgauge as ng
from narrowgauge.optim.rules.matrix import newton_schulz, orthogonalise
from narrowgauge.recompute import step_samples
from narrowgauge.recompute.piece_results import EQUAL, NOT_CHECKED, PieceResult
from narrowgauge.recompute.task import task
from recompute import audited_loop
from recompute.audited_loop import Loop
from recompute.pieces.test_update import edited, patched, setting


def torch_muon(parameters: Any, **settings: Any) -> torch.optim.Muon:
    """Of the matrices alone, as torch's takes no others; the rest is not trained."""
    matrices = []
    for p in parameters:
        if p.ndim == 2:
            matrices.append(p)
        else:
            p.requires_grad_(False)
    return torch.optim.Muon(matrices, **settings)


def own_muon(parameters: Any, **settings: Any) -> ng.Muon:
    return ng.Muon(parameters, compile=False, **{"storage": "float32"} | settings)


def updates(loop: Loop, step: int) -> list[PieceResult]:
    return [each for each in loop.results[step] if each.piece == "update"]


HEALTHY: dict[str, dict[str, Any]] = {
    "torch": {"optimizer": torch_muon},
    "torch, rms": {"optimizer": torch_muon, "adjust_lr_fn": "match_rms_adamw", "nesterov": False},
    "torch, other coefficients": {"optimizer": torch_muon, "ns_coefficients": (2.0, -1.5, 0.5), "ns_steps": 3},
    "torch, bfloat16": {"optimizer": torch_muon, "dtype": torch.bfloat16, "lr": 5e-2},
    "ours": {"optimizer": own_muon},
    "ours, float32 products": {"optimizer": own_muon, "ns_dtype": "float32", "adjust_lr_fn": "match_rms_adamw"},
    "ours, clipped": {"optimizer": own_muon, "max_grad_norm": 0.1},
    "ours, word": {"optimizer": own_muon, "storage": "word", "dtype": torch.bfloat16},
    "ours, compact": {"optimizer": own_muon, "storage": "compact", "dtype": torch.bfloat16},
}


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_step_is_equal_to_rounding(name: str) -> None:
    loop = Loop(**HEALTHY[name]).run(5)
    for step in (2, 4):
        found = updates(loop, step)
        assert {each.status for each in found} == {EQUAL}, found
        assert all(0 < each.difference <= each.envelope < 1 for each in found)
    assert not loop.findings()


def other_orthogonal(make: Callable[[Tensor], Tensor]) -> Any:
    """Torch's step with something else in place of its iteration; rate 1e-3, decay 0.1, momentum 0.95, no scale of wide ones."""

    def edit(p: Tensor, weight: Tensor, state: dict[str, Any], before: dict[str, Any]) -> None:
        mean = p.grad.lerp(state["momentum_buffer"], 0.95)
        p.copy_(weight * (1 - 1e-4) - 1e-3 * max(1, p.shape[0] / p.shape[1]) ** 0.5 * make(mean))

    return edited(edit)


@pytest.mark.parametrize(
    "make",
    [
        lambda m: orthogonalise(m, dtype=torch.float32),
        orthogonalise,
        lambda m: newton_schulz((m / m.norm()).bfloat16(), 5),
    ],
    ids=["float32", "ours", "norm first"],
)
def test_another_order_of_the_same_products_is_healthy(make: Callable[[Tensor], Tensor]) -> None:
    loop = Loop(every=4, optimizer=torch_muon).run(2)
    patched(other_orthogonal(make))(loop)
    loop.run(2)
    (found,) = updates(loop, 4)
    assert found.status == EQUAL and 0 < found.difference <= found.envelope < 0.1


def transposed(p: Tensor, weight: Tensor, state: dict[str, Any], before: dict[str, Any]) -> None:
    """The rate is scaled by the shape of the transpose, as by code for weights of (inputs, outputs)."""
    rows, columns = p.shape
    factor = max(1, columns / rows) ** 0.5 / max(1, rows / columns) ** 0.5
    p.copy_(weight * (1 - 1e-4) + factor * (p - weight * (1 - 1e-4)))


FAULTS: dict[str, tuple[Callable[[Any], Any], str, dict[str, Any]]] = {
    "rate": (setting(lr=2e-3), "rate", {"factor": 2.0}),
    "decay lost": (setting(weight_decay=0.0), "decay-lost", {}),
    "decay": (setting(weight_decay=0.3), "decay", {"value": 0.3}),
    "momentum": (setting(momentum=0.9), "beta", {"value": 0.9, "state": "momentum_buffer"}),
    "nesterov": (setting(nesterov=False), "nesterov", {"given": True}),
    "not orthogonal": (other_orthogonal(lambda m: m), "not-orthogonal", {}),
    "scale": (setting(adjust_lr_fn="match_rms_adamw"), "scale-of-shape", {"by": "0.2 * max(rows, cols)**0.5"}),
    "transposed": (edited(transposed), "scale-of-shape", {"by": "max(1, cols / rows)**0.5"}),
    "of an older mean": (
        edited(
            lambda p, w, state, before: p.copy_(
                w * (1 - 1e-4)
                - 1e-2
                * max(1, p.shape[0] / p.shape[1]) ** 0.5
                * orthogonalise(before["momentum_buffer"], dtype=torch.float32)
            )
        ),
        "stale-moment",
        {"state": "momentum_buffer"},
    ),
    "frozen": (edited(lambda p, weight, *_: p.copy_(weight), 3), "frozen", {}),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_step_is_named(fault: str) -> None:
    change, cause, values = FAULTS[fault]
    loop = Loop(every=4, optimizer=torch_muon).run(2)
    assert not loop.findings()
    patched(change)(loop)
    loop.run(2)
    found = [each for each in updates(loop, 4) if each.status != EQUAL]
    assert {each.cause for each in found} == {cause}, updates(loop, 4)
    for name, value in values.items():
        now = found[0].values[name]
        assert math.isclose(now, value, rel_tol=5e-3) if isinstance(value, float) else now == value, (name, now)


@pytest.mark.parametrize(
    ("storage", "name", "cause"),
    [("float32", name, name) for name in ("rate", "nesterov", "decay")]
    + [("word", name, name) for name in ("rate", "nesterov")],
)
def test_a_fault_of_ours_is_named(storage: str, name: str, cause: str) -> None:
    """Vectors are stepped by AdamW: a rate and a decay are theirs, too."""
    dtype = torch.float32 if storage == "float32" else torch.bfloat16
    loop = Loop(every=4, optimizer=own_muon, storage=storage, dtype=dtype).run(2)
    assert not loop.findings()
    patched(FAULTS[name][0])(loop)
    loop.run(2)
    found = [each for each in updates(loop, 4) if each.cause]
    assert {each.cause for each in found} == {cause}, updates(loop, 4)


def test_a_matrix_that_is_too_large_is_not_checked_and_its_states_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audited_loop, "WIDTH", 64)
    assert {each.status for each in updates(Loop(optimizer=torch_muon).run(2), 2)} == {EQUAL}
    monkeypatch.setattr(step_samples, "WHOLE_PRODUCTS", 0)
    loop = Loop(every=4, optimizer=torch_muon).run(2)
    patched(edited(lambda p, w, state, before: state["momentum_buffer"].mul_(0.5)))(loop)
    loop.run(2)
    (unknown,) = [each for each in updates(loop, 2) if each.status == NOT_CHECKED]
    large = {f"blocks.{number}.{name}.weight" for number in range(2) for name in ("qkv", "up", "down")}
    assert set(unknown.where) == large and "needs all of it" in unknown.values["why"]
    assert {each.cause for each in updates(loop, 4) if each.cause} == {"state-other-factors"}


def test_matrices_are_whole_until_the_step_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audited_loop, "WIDTH", 64)
    loop = Loop(optimizer=torch_muon)
    held = []
    loop.optimizer.register_step_pre_hook(lambda *_: held.append(loop.watcher._capture))  # type: ignore[union-attr]
    step = (loop.run(2), held[-1])[1]
    assert step.nbytes < loop.watcher.nbytes and not any(each.whole for each in step.parameters.values())  # type: ignore[union-attr]


def test_states_that_a_resume_lost_are_those_that_the_rule_of_each_parameter_keeps() -> None:
    loop = Loop(every=2, optimizer=own_muon).run(2)
    loop.watcher.go_on_from(2)  # type: ignore[union-attr]
    assert not loop.run(2).findings()


def test_the_rule_can_be_declared() -> None:
    assert not Loop(optimizer=torch_muon, task=task(optimizer="muon")).run(2).findings()
    found = Loop(optimizer=torch_muon, task=task(optimizer="adamw")).run(2).findings()
    assert [each.name for each in found] == ["optimizer-other"]


def test_muon_beside_another_optimizer_is_healthy() -> None:
    """The watched one steps the matrices of the blocks, AdamW the rest."""
    rest: list[Any] = []

    def of_blocks(parameters: Any, **settings: Any) -> torch.optim.Muon:
        shapes = {p: p.ndim == 2 and min(p.shape) == audited_loop.WIDTH for p in parameters}
        rest.append(torch.optim.AdamW([p for p, is_own in shapes.items() if not is_own], lr=1e-3))
        return torch.optim.Muon([p for p, is_own in shapes.items() if is_own], **settings)

    loop = Loop(optimizer=of_blocks)
    update, after = loop.update, loop.after_update
    loop.update = lambda: (update(), rest[0].step())[0]  # type: ignore[method-assign,func-returns-value]
    loop.after_update = lambda: (after(), rest[0].zero_grad())[0]  # type: ignore[method-assign,func-returns-value]
    assert not loop.run(6).findings()
    assert {each.status for each in updates(loop, 4)} == {EQUAL}
