"""Gradients that are means over two ranks: a healthy mean is equal, and a factor of the number of ranks is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from narrowgauge.recompute.capture import StepCapture
from narrowgauge.recompute.departures import unchecked
from narrowgauge.recompute.gradient_piece import what_it_equals
from narrowgauge.recompute.piece_results import EQUAL
from narrowgauge.recompute.step_watcher import StepWatcher
from narrowgauge.recompute.task import Task
from ranks import run_ranks
from recompute.audited_loop import Loop, batches, next_token


def work(rank: int, fault: str, clip: float) -> dict[str, Any]:
    """Names of findings, statuses of the gradient, why pieces were not checked, and the sum of the weights."""
    loop = Loop(every=0, micro_batches=1, clip=clip)
    loop.data = iter(batches(seed=1 + rank))
    model = DistributedDataParallel(loop.model)
    loop.loss = lambda tokens: next_token(model(tokens[:, :-1]), tokens)  # type: ignore[method-assign]
    if fault != "no audit" and not (fault == "one rank" and rank == 1):
        loop.watcher = StepWatcher(model, loop.optimizer, 2, loop.keep, Task(max_grad_norm=clip or None))
    factor = {"sum": 2.0, "one too many": 2 / 3}.get(fault, 1.0)

    def after() -> None:
        for name, p in loop.model.named_parameters():
            assert p.grad is not None
            p.grad.mul_(1.02 if fault == "one layer" and name == "head.weight" else factor)

    loop.after_backward = after  # type: ignore[method-assign]
    loop.run(4)
    found = [each for results in loop.results.values() for each in results]
    return {
        "names": {(each.name, each.where, each.message.rpartition("equals ")[2]) for each in loop.findings()},
        "equal": [each.piece for each in found if each.status == EQUAL],
        "unchecked": unchecked(found),
        "bits": float(loop.bits().double().sum()),
    }


def test_a_mean_over_ranks_is_computed_again_and_changes_no_bit(tmp_path: Path) -> None:
    plain = run_ranks(work, 2, tmp_path / "plain", "no audit", 0.25)
    ranks = run_ranks(work, 2, tmp_path / "audited", "", 0.25)
    for each in ranks:
        assert not each["names"] and not {"gradient", "clip"} & set(each["unchecked"]), each
        assert {"gradient", "clip", "update"} <= set(each["equal"])
    assert [each["bits"] for each in plain] == [each["bits"] for each in ranks]


@pytest.mark.parametrize(("fault", "equals"), [("sum", "ranks."), ("one too many", "ranks / (ranks + 1).")])
def test_a_factor_of_the_number_of_ranks_is_named(fault: str, equals: str, tmp_path: Path) -> None:
    for each in run_ranks(work, 2, tmp_path, fault, 0.0):
        assert each["names"] == {("gradient-scaled", "", equals)}


def test_one_layer_is_named_by_all_ranks(tmp_path: Path) -> None:
    for each in run_ranks(work, 2, tmp_path, "one layer", 0.0):
        assert {(name, where) for name, where, _ in each["names"]} == {("gradient-scaled", "head.weight")}


def test_nothing_is_exchanged_where_one_rank_does_not_audit(tmp_path: Path) -> None:
    audited, other = run_ranks(work, 2, tmp_path, "one rank", 0.0)
    assert "not all of them audit" in audited["unchecked"]["gradient"] and not audited["names"]
    assert not other["equal"] and not other["unchecked"]


def test_quantities_of_the_run_are_told_by_name_where_one_alone_fits() -> None:
    calls: list[Any] = [None] * 4
    step = StepCapture(1, "adamw", calls=calls, ranks=8, loss_scale=1024.0)
    told = {
        4.0: "micro-batches", 1 / 8: "1 / ranks", 32.0: "(micro-batches × ranks)", 8 / 9: "ranks / (ranks + 1)",
        5 / 4: "(micro-batches + 1) / micro-batches", 1024.0: "loss scale",
    }  # fmt: skip
    assert {factor: what_it_equals(factor, step).get("equals") for factor in told} == told
    assert what_it_equals(4.0, StepCapture(1, "adamw", calls=calls, ranks=4)) == {}
    assert what_it_equals(3.0, step) == {} and not dist.is_initialized() and torch.is_grad_enabled()
