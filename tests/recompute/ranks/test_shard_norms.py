"""Sharded parameters: clipping is checked by the norm over all ranks, in which each element counts once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import narrowgauge as ng
from narrowgauge.distributed.sharding import make_mesh
from narrowgauge.numerics.shards import is_unsummed, ranks_of_parts
from narrowgauge.recompute.capture import ParameterSample, StepCapture
from narrowgauge.recompute.departures import unchecked
from narrowgauge.recompute.piece_results import DEPARTS
from narrowgauge.recompute.pieces.clipping import ClipHistory, check_clip
from narrowgauge.recompute.step_watcher import StepWatcher
from narrowgauge.recompute.task import Task
from ranks import run_ranks
from recompute.audited_loop import Loop, batches

LIMIT = 0.1


class LocalPart:
    """Looks to ``clip_grad_norm_`` like a parameter that is the part of one rank."""

    def __init__(self, parameter: Any) -> None:
        self.grad = parameter.grad.to_local()


def several(rank: int, cases: list[str]) -> dict[str, dict[str, Any]]:
    return {case: told_of(rank, case) for case in cases}


def told_of(rank: int, case: str) -> dict[str, Any]:
    """What a rank is told of a loop with FSDP2."""
    loop = Loop(every=0, micro_batches=1, clip=LIMIT)
    loop.data, model = iter(batches(seed=1 + rank)), loop.model
    whole = [model.norm.weight, model.head.weight] if "mixed" in case else []
    ranks = dist.get_world_size()
    mesh = make_mesh(ranks, "cpu", replicas=ranks // 2)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh, ignored_params=set(whole))
    loop.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if "ours" in case:
        loop.optimizer, loop.clip = ng.AdamW(model.parameters(), lr=1e-3, storage="float32", max_grad_norm=LIMIT), 0.0

    def sum_whole() -> None:
        for parameter in whole:
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
            parameter.grad /= ranks

    def clip() -> None:
        if "local" in case:
            nn.utils.clip_grad_norm_([LocalPart(p) for p in model.parameters()], LIMIT)  # type: ignore[misc]
        elif whole:  # torch takes no norm over both kinds at once
            parts = [
                [p for p in model.parameters() if any(p is w for w in whole) is of_whole] for of_whole in (True, False)
            ]
            norms = [nn.utils.get_total_norm([p.grad for p in part if p.grad is not None]) for part in parts]
            norms = [norm.full_tensor() if hasattr(norm, "full_tensor") else norm for norm in norms]
            for part in parts:
                nn.utils.clip_grads_with_norm_(part, LIMIT, torch.stack(norms).norm())
        elif loop.clip:
            nn.utils.clip_grad_norm_(model.parameters(), LIMIT)

    loop.after_backward, loop.clip_gradients = sum_whole, clip  # type: ignore[method-assign]
    loop.watcher = None
    if not ("one rank" in case and rank == 1):
        task = Task(max_grad_norm=LIMIT) if "declared" in case else None
        loop.watcher = StepWatcher(model, loop.optimizer, 1, loop.keep, task)
    loop.run(3)
    found = [each for results in loop.results.values() for each in results]
    return {
        "found": {(each.name, each.message.rpartition(": ")[2]) for each in loop.findings()},
        "pieces": {(each.piece, each.status) for each in found},
        "clip": [each.difference for each in found if each.piece == "clip"],
        "unchecked": unchecked(found),
    }


CHECKED = {("loss", "equal"), ("clip", "equal"), ("update", "equal")}


def test_clipping_by_the_norm_over_all_shards_is_checked(tmp_path: Path) -> None:
    cases = ["declared", "learnt", "ours, declared", "mixed, declared", "one rank, declared"]
    for rank, told in enumerate(run_ranks(several, 2, tmp_path, cases)):
        assert not any(each["found"] for each in told.values()), told
        for case in cases[:4]:
            assert told[case]["pieces"] >= CHECKED, (case, told[case])
        for case in cases[:3]:
            why = "parameters are sharded over ranks"
            assert told[case]["unchecked"]["forward"] == told[case]["unchecked"]["gradient"] == why
        assert max(told["declared"]["clip"]) < 1e-5
        assert "not sharded are summed" in told["mixed, declared"]["unchecked"]["gradient"]
        if rank == 0:
            assert "norms need all ranks" in told["one rank, declared"]["unchecked"]["clip"]


def test_clipping_by_the_norm_of_a_shard_is_named(tmp_path: Path) -> None:
    for told in run_ranks(several, 2, tmp_path, ["local, declared", "local"]):
        for case in told.values():
            assert case["found"] == {("clip-norm", "that of this rank's shard.")}, case
            assert case["pieces"] >= {("loss", "equal"), ("clip", DEPARTS), ("update", "equal")}


def test_replicas_of_shards_count_once(tmp_path: Path) -> None:
    for told in run_ranks(several, 4, tmp_path, ["declared", "mixed, declared"]):
        for case in told.values():
            assert not case["found"] and case["pieces"] >= CHECKED and max(case["clip"]) < 1e-5, case


def test_the_norm_of_a_rank_is_named_only_where_it_explains_the_factors() -> None:
    def told(*norms_of_ranks: tuple[float, float]) -> list[str]:
        gradient = torch.ones(4)
        sample = ParameterSample("w", gradient.shape, gradient.dtype, {}, gradient, {}, gradient)
        sample.computed, sample.computed_squares = 2 * gradient, torch.tensor(16.0, dtype=torch.float64)
        step = StepCapture(1, "adamw", {"w": sample}, ranks=len(norms_of_ranks), norms_of_ranks=norms_of_ranks)
        return [str(each.values.get("over")) for each in check_clip(step, ClipHistory(), 2.0)]

    assert told((4.0, 0.5), (8.0, 0.25)) == ["shard"]
    assert told((4.0, 0.5), (1.0, 1.0)) == ["shard"]
    assert told((4.0, 0.5), (4.0, 0.5)) == ["None"]
    assert told((4.0, 0.5), (8.0, 0.5)) == ["None"]
    assert told((4.0, 0.5), (8.0, 0.3)) == ["None"]


def parts(rank: int) -> list[list[int]]:
    """The ranks whose parts make up tensors that are placed otherwise."""
    mesh, one = make_mesh(4, "cpu", replicas=2), torch.ones(4, 4)
    cut, whole, term = Shard(0), Replicate(), Partial()
    placed = [DTensor.from_local(one, mesh, each) for each in ([whole, cut], [cut, whole], [cut, cut], [whole, whole])]
    assert is_unsummed(DTensor.from_local(one, mesh, [term, cut])) and not any(map(is_unsummed, placed))
    return [ranks_of_parts(each) for each in (*placed, one)]


def test_a_tensor_is_summed_over_the_ranks_with_other_parts(tmp_path: Path) -> None:
    assert run_ranks(parts, 4, tmp_path)[2] == [[2, 3], [0, 2], [0, 1, 2, 3], [2], [2]]
