"""Steps whose outputs or parameters are too large to be kept whole: what is computed again, and what is said of the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import narrowgauge as ng
from narrowgauge.recompute import capture, kept_passes, output_samples, passes_again
from narrowgauge.recompute.departures import unchecked
from narrowgauge.recompute.output_samples import OutputSample
from narrowgauge.recompute.piece_results import EQUAL, NOT_CHECKED
from narrowgauge.recompute.task import task
from recompute.audited_loop import Loop, next_token

ROOM = 1 << 15
"""Bytes, where the logits of a micro-batch and their gradient take 36,864."""


@pytest.fixture(autouse=True)
def little_room(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for module in (capture, kept_passes):
        monkeypatch.setattr(module, "CALL_BYTES", ROOM)
    yield


def statuses(loop: Loop, step: int) -> dict[str, str]:
    return {each.piece: each.status for each in loop.results[step]}


@pytest.mark.parametrize(
    "settings",
    [{}, {"micro_batches": 1}, {"dtype": torch.bfloat16, "lr": 1e-2}, {"autocast": True}, {"dropout": 0.2}],
    ids=["plain", "one micro-batch", "bfloat16", "autocast", "dropout"],
)
def test_a_healthy_step_is_equal_in_bounded_memory_and_keeps_its_bits(settings: dict[str, Any]) -> None:
    loop, alone = Loop(**settings).run(5), Loop(every=0, **settings).run(5)
    assert not loop.findings()
    assert {statuses(loop, 4)[piece] for piece in ("loss", "forward", "gradient")} == {EQUAL}, loop.results[4]
    assert torch.equal(loop.bits(), alone.bits())


def test_what_is_kept_of_outputs_stays_within_the_bound() -> None:
    loop = Loop(micro_batches=6)
    before = loop.update

    def update() -> None:
        assert loop.watcher is not None
        assert sum(call.nbytes for call in loop.watcher._kept.calls) <= 1.1 * ROOM
        before()

    loop.update = update  # type: ignore[method-assign]
    assert not loop.run(2).findings()


def test_a_sample_meets_every_place_of_a_row_and_fits_its_room() -> None:
    output = torch.arange(3 * 24 * 5, dtype=torch.float32).view(3, 24, 5)
    sample = OutputSample.of(output, room=8 * (2 * 5 * 4) * 40)
    assert len(set((sample.chosen % 24).tolist())) == len(sample.chosen) <= 40
    assert torch.equal(sample.values, output.reshape(-1, 5)[sample.chosen])
    assert len(OutputSample.of(output, room=0).chosen) == 1


def scaled(factor: float) -> Callable[[Loop], None]:
    def plant(loop: Loop) -> None:
        weight = loop.model.blocks[1].up.weight
        loop.after_backward = lambda: weight.grad.mul_(factor)  # type: ignore[method-assign]

    return plant


def hooked(loop: Loop) -> None:
    loop.model.blocks[1].up.weight.register_hook(lambda gradient: 1.5 * gradient)


def shifted(loop: Loop) -> None:
    loop.loss = lambda x: F.cross_entropy(loop.model(x[:, :-1])[:, :-1].flatten(0, 1), x[:, 2:].flatten()) / 2  # type: ignore[method-assign]


def upwards(loop: Loop) -> None:
    loop.loss = lambda x: -next_token(loop.model(x[:, :-1]), x) / 2  # type: ignore[method-assign]


def sees_all(loop: Loop) -> None:
    loop.model.blocks[0].is_causal = False


@pytest.mark.parametrize(
    ("plant", "name"),
    [
        (scaled(1.5), "gradient-scaled"),
        (hooked, "gradient-scaled"),
        (shifted, "labels-shifted"),
        (upwards, "loss-sign"),
        (sees_all, "sees-future"),
    ],
    ids=["after backward", "in backward", "labels", "sign", "mask"],
)
def test_faults_are_named_there_too(plant: Callable[[Loop], None], name: str) -> None:
    loop = Loop()
    plant(loop)
    assert loop.run(2).names() == {name}


def test_some_tokens_may_count_and_some_not() -> None:
    loop = Loop(task=task(ignore=7), micro_batches=1)
    loop.loss = lambda x: F.cross_entropy(loop.model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten(), ignore_index=7)  # type: ignore[method-assign]
    loop.run(2)
    assert not loop.findings() and statuses(loop, 2)["gradient"] == EQUAL


def test_another_loss_leaves_the_gradient_unchecked_and_says_why() -> None:
    loop = Loop(task=task(loss="own"))
    loop.loss = lambda x: loop.model(x[:, :-1]).square().mean()  # type: ignore[method-assign]
    loop.run(2)
    assert "no cross entropy" in unchecked(loop.results[2])["gradient"]
    assert not loop.findings()


def test_check_says_what_it_did_not_compute_again() -> None:
    loop = Loop(every=0)
    loop.loss = lambda x: loop.model(x[:, :-1]).square().mean()  # type: ignore[method-assign]
    with ng.check(loop.model, loop.optimizer, step=1, task=task(loss="own")) as watched:
        loop.run(1)
    assert set(watched.unchecked) == {"loss", "gradient", "clip"} or set(watched.unchecked) == {"loss", "gradient"}
    assert "not computed again: the gradient" in watched.plain()
    with ng.check(loop.model, loop.optimizer) as watched:
        loop.run(1)
    assert not watched.unchecked and "not computed again" not in watched.plain()


# ── models of which not all parameters are copied ─────────────────────────────────────────────────────────────────────


def test_of_a_larger_model_some_parameters_are_computed_again_in_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes_again, "MOST_PARAMETERS", 9_000)
    loop = Loop(every=1).run(8)
    of_steps = [set(passes_again.chosen_parameters(loop.model, step)) for step in range(1, 9)]
    names = {name for name, _ in loop.model.named_parameters()}
    sizes = {name: p.numel() for name, p in loop.model.named_parameters()}
    assert all(0 < sum(map(sizes.get, each)) <= 9_000 for each in of_steps)  # type: ignore[arg-type]
    assert len(set(map(frozenset, of_steps))) > 4 and set.union(*of_steps) == names
    assert not loop.findings()
    assert "others are in other steps" in unchecked(loop.results[4])["gradient"]


def test_another_order_of_sums_in_a_larger_model_is_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a compiled model has: what is not moved rounds, too."""
    monkeypatch.setattr(passes_again, "MOST_PARAMETERS", 2_000)
    loop = Loop(every=1, autocast=True)

    def in_parts(layer: torch.nn.Linear) -> Callable[[Tensor], Tensor]:
        def forward(x: Tensor) -> Tensor:
            assert loop.watcher is not None
            if loop.watcher.is_own_pass:
                return F.linear(x, layer.weight, layer.bias)
            half = x.shape[-1] // 2
            return F.linear(x[..., :half], layer.weight[:, :half], layer.bias) + F.linear(
                x[..., half:], layer.weight[:, half:]
            )

        return forward

    for module in loop.model.modules():
        if isinstance(module, torch.nn.Linear):
            module.forward = in_parts(module)  # type: ignore[method-assign]
    loop.run(6)
    assert not loop.findings()


def test_a_fault_in_a_larger_model_is_named_in_a_step_that_takes_its_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes_again, "MOST_PARAMETERS", 9_000)
    loop = Loop(every=1)
    hooked(loop)
    loop.run(8)
    named = {step for step, results in loop.results.items() if any(each.cause == "gradient-scaled" for each in results)}
    taken = {step for step in range(2, 9) if "blocks.1.up.weight" in passes_again.chosen_parameters(loop.model, step)}
    assert named == taken and taken


def test_the_gradient_of_a_cross_entropy_is_autograds() -> None:
    torch.manual_seed(0)
    logits = torch.randn(2, 6, 11, dtype=torch.float64).float().requires_grad_()
    targets = torch.randint(0, 11, (2, 6))
    counts = torch.tensor([[True] * 6, [True, True, True, False, False, True]])
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(2, 6)
    (wanted,) = torch.autograd.grad((losses * counts).sum() * 0.25, logits)
    found: Tensor = output_samples.CrossEntropy(targets, counts, 0.25, 0.0).gradient(logits)
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize(("smoothing", "penalty"), [(0.1, 0.0), (0.05, 0.0), (0.0, 1e-4), (0.0, 1e-3), (0.1, 1e-3)])
def test_smoothing_and_a_penalty_depart_nowhere(smoothing: float, penalty: float, autocast: bool) -> None:
    """Both are told of, if they are not declared, as terms of the loss; the gradient is checked where they hardly count."""
    loop = Loop(micro_batches=1, autocast=autocast)

    def loss(tokens: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            logits = loop.model(tokens[:, :-1]).float()
        entropy = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), label_smoothing=smoothing)
        return entropy + penalty * logits.logsumexp(-1).square().mean()

    loop.loss = loss  # type: ignore[method-assign]
    loop.run(5)
    assert loop.names() <= {"label-smoothing", "z-loss"}, loop.results[4]
    assert statuses(loop, 4)["gradient"] in (EQUAL, NOT_CHECKED)


def test_weights_of_tokens_leave_the_gradient_unchecked() -> None:
    loop = Loop(micro_batches=1)

    def loss(tokens: Tensor) -> Tensor:
        losses = F.cross_entropy(loop.model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
        weights = 1 + 0.03 * torch.sin(torch.arange(len(losses), dtype=torch.float32))
        return (losses * weights).mean()

    loop.loss = loss  # type: ignore[method-assign]
    loop.run(4)
    assert not loop.findings() and "no cross entropy" in unchecked(loop.results[4])["gradient"]
