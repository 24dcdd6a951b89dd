"""Gradients that are means over two ranks: a healthy mean is equal, and a factor, or a rank that is left out, is named."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import narrowgauge as ng
from narrowgauge.recompute.capture import StepCapture
from narrowgauge.recompute.departures import unchecked
from narrowgauge.recompute.piece_results import EQUAL
from narrowgauge.recompute.pieces.gradient import what_it_equals
from narrowgauge.recompute.ranks.gradient_sums import ranks_in
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


# ── whose gradients are in the mean ─────────────────────────────────────────────────────────────────────────────────


def sent(case: str, rank: int, buffer: Tensor) -> Tensor:
    """What a communication hook hands to the sum of one bucket, already divided by the number of ranks."""
    if case == "rank missing" and rank == 1:
        return torch.zeros_like(buffer)
    return buffer.bfloat16().float() if case == "bfloat16" else buffer


def hooked(case: str, rank: int) -> Any:
    def hook(_, bucket):  # type: ignore[no-untyped-def]  # torch takes no annotations that are strings
        if case == "not summed":
            own: torch.futures.Future[Tensor] = torch.futures.Future()
            own.set_result(bucket.buffer())
            return own
        if case == "hook of its own":  # keeps the largest half
            buffer = bucket.buffer()
            buffer[buffer.abs() < buffer.abs().median()] = 0
        given = sent(case, rank, bucket.buffer() / 2)
        return dist.all_reduce(given, async_op=True).get_future().then(lambda f: sent(case, 0, f.value()[0]))

    return hook


def several(rank: int, cases: list[str]) -> dict[str, dict[str, Any]]:
    """What two ranks are told of some loops, one after the other."""
    return {case: told_of(rank, case) for case in cases}


def told_of(rank: int, case: str) -> dict[str, Any]:
    passes = 2 if "passes" in case else 1
    loop = Loop(every=0, micro_batches=passes)
    loop.data = iter(batches(seed=1 if "same rows" in case else 1 + rank))
    model = DistributedDataParallel(loop.model)
    accumulator = ng.GradientAccumulator(loop.model.parameters(), "float64") if "accumulator" in case else None
    if case in ("rank missing", "not summed", "bfloat16", "hook of its own"):
        model.register_comm_hook(None, hooked(case, rank))

    def backward(tokens: Tensor, number: int) -> None:
        is_alone = "no_sync" in case and (number + 1 < passes or "always" in case)
        with model.no_sync() if is_alone else nullcontext():
            (next_token(model(tokens[:, :-1]), tokens) / passes).backward()
        if accumulator is not None:
            accumulator.accumulate()

    def after_backward() -> None:
        if accumulator is not None:
            accumulator.finish()
        if case == "one tensor":
            gradient = loop.model.head.weight.grad
            assert gradient is not None
            gradient.copy_(kept["head.weight"])

    kept: dict[str, Tensor] = {}
    if case == "one tensor":
        loop.model.head.weight.register_hook(lambda g: kept.update({"head.weight": g.clone()}))
    loop.backward, loop.after_backward = backward, after_backward  # type: ignore[method-assign]
    loop.watcher = StepWatcher(model, loop.optimizer, 2, loop.keep)
    with model.join() if case == "join" else nullcontext():
        loop.run(5 if case == "join" and rank == 0 else 3)
    found = [each for results in loop.results.values() for each in results]
    return {
        "found": {(each.name, each.where, each.message) for each in loop.findings()},
        "equal": {each.piece for each in found if each.status == EQUAL},
        "unchecked": unchecked(found),
    }


def test_ranks_that_are_not_summed_or_missing_are_named(tmp_path: Path) -> None:
    by_rank = run_ranks(several, 2, tmp_path, ["not summed", "rank missing", "one tensor", "always no_sync"])
    own = "the gradient is what one rank alone computed, not the mean over ranks: on ranks 0, 1 of 2."
    for told in by_rank:
        assert told["not summed"]["found"] == told["always no_sync"]["found"] == {("ranks-not-summed", "", own)}
        assert told["one tensor"]["found"] == {("ranks-not-summed", "head.weight", own)}
        missing = "what rank 1 computed is missing from the mean over 2 ranks."
        assert told["rank missing"]["found"] == {("rank-missing", "", missing)}


HEALTHY = [
    "same rows",
    "two passes",
    "two passes, no_sync",
    "two passes, accumulator",
    "bfloat16",
    "join",
    "hook of its own",
]


def test_nothing_is_said_of_healthy_sums(tmp_path: Path) -> None:
    for told in run_ranks(several, 2, tmp_path, HEALTHY):
        assert not any(each["found"] for each in told.values()), told
        for case in HEALTHY[:5]:
            assert {"gradient", "clip"} <= told[case]["equal"] and not told[case]["unchecked"], case
        assert "join" in told["join"]["unchecked"]["gradient"]
        assert "communication hook" in told["hook of its own"]["unchecked"]["gradient"]


def test_several_missing_ranks_are_found_one_after_the_other() -> None:
    torch.manual_seed(0)
    own = torch.randn(6, 64, dtype=torch.float64)
    received = 0.3 * own[[0, 2, 5]].sum(0).expand(6, 64)
    assert ranks_in(own, received, 1e-5) == ("rank-missing", {"missing": "ranks 1, 3, 4", "of": 6})
    of_own = own.clone()
    of_own[:4] = own.mean(0)
    assert ranks_in(own, of_own, 1e-5) == ("ranks-not-summed", {"ranks": "ranks 4, 5", "of": 6})
    assert ranks_in(own, own.mean(0) * torch.linspace(1, 2, 6, dtype=torch.float64)[:, None], 1e-5) is None
    assert ranks_in(own, torch.zeros_like(own), 1e-5) is None
