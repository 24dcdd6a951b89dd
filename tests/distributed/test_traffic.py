"""What is counted between ranks: the bytes of every collective against those of a ring, and whom the others wait for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from narrowgauge.distributed import traffic
from narrowgauge.distributed.traffic import COLLECTIVES, Traffic, table_of
from ranks import run_ranks

N = 12  # elements of 4 bytes, a multiple of the ranks


def parts(size: int) -> list[Tensor]:
    return list(torch.ones(N).chunk(size))


def pass_on(size: int) -> None:
    """Each rank sends to the next, as pipelines do."""
    rank = dist.get_rank()
    sent = dist.isend(torch.ones(N), (rank + 1) % size)
    dist.recv(torch.empty(N), (rank - 1) % size)
    sent.wait()


# Each call, and what a rank of `n` sends by it in bytes.
CALLS: dict[str, tuple[Callable[[int], Any], Callable[[int], float]]] = {
    "all_reduce": (lambda n: dist.all_reduce(torch.ones(N)), lambda n: 2 * 4 * N * (n - 1) / n),
    "all_reduce async": (lambda n: dist.all_reduce(torch.ones(N), async_op=True).wait(), lambda n: 8 * N * (n - 1) / n),
    "reduce": (lambda n: dist.reduce(torch.ones(N), 0), lambda n: 4 * N * (n - 1) / n),
    "broadcast": (lambda n: dist.broadcast(torch.ones(N), src=0), lambda n: 4 * N * (n - 1) / n),
    "all_gather": (lambda n: dist.all_gather(parts(n), parts(n)[0]), lambda n: 4 * N * (n - 1) / n),
    "all_gather_into_tensor": (
        lambda n: dist.all_gather_into_tensor(torch.ones(N), input_tensor=parts(n)[0]),
        lambda n: 4 * N * (n - 1) / n,
    ),
    "gather": (
        lambda n: dist.gather(torch.ones(N), [torch.ones(N) for _ in range(n)] if not dist.get_rank() else None),
        lambda n: 4 * N * (n - 1) / n,
    ),
    "scatter": (
        lambda n: dist.scatter(torch.ones(N), [torch.ones(N) for _ in range(n)] if not dist.get_rank() else None),
        lambda n: 4 * N * (n - 1) / n,
    ),
    "reduce_scatter": (lambda n: dist.reduce_scatter(parts(n)[0], parts(n)), lambda n: 4 * N * (n - 1) / n),
    "reduce_scatter_tensor": (
        lambda n: dist.reduce_scatter_tensor(parts(n)[0], torch.ones(N)),
        lambda n: 4 * N * (n - 1) / n,
    ),
    "all_to_all_single": (
        lambda n: dist.all_to_all_single(torch.ones(N), torch.ones(N)),
        lambda n: 4 * N * (n - 1) / n,
    ),
    "barrier": (lambda n: dist.barrier(), lambda n: 0.0),
    "isend": (pass_on, lambda n: 4 * N),
    "within a group": (
        lambda n: dist.all_reduce(
            torch.ones(N), group=dist.new_group([dist.get_rank()], use_local_synchronization=True)
        ),
        lambda n: 0.0,
    ),
}


def count_each(rank: int, size: int) -> dict[str, dict[str, Any]]:
    found = {}
    with Traffic() as watching:
        for name, (call, _) in CALLS.items():
            call(size)
            found[name] = watching.end_step()
        found["nothing"] = watching.end_step()
        background = threading.Thread(target=dist.all_reduce, args=(torch.ones(N),))
        background.start()
        background.join()
        found["in the background"] = watching.end_step()
        dist.all_gather_object([None] * size, "text")
        found["object"] = watching.end_step()
    dist.all_reduce(torch.ones(N))
    found["afterwards"] = watching.end_step()
    return found


@pytest.mark.parametrize("size", [2, 3])
def test_every_collective_counts_as_a_ring_sends_it(size: int, tmp_path: Path) -> None:
    for found in run_ranks(count_each, size, tmp_path, size):
        for name, (_, expected) in CALLS.items():
            assert found[name]["communication_bytes"] == pytest.approx(expected(size)), name
            assert found[name]["communication_seconds"] > 0, name
        assert found["object"]["communication_bytes"] > 0
        for name in ("nothing", "in the background", "afterwards"):
            assert found[name] == {"communication_bytes": 0, "communication_seconds": 0, "wait_seconds": 0}


def test_the_table_names_only_collectives_of_this_release() -> None:
    renamed = {"all_gather_single", "reduce_scatter_single"}  # since 2.13; before, the names that they replace
    assert all(hasattr(dist, name) for name in COLLECTIVES if name not in renamed)


def count_fsdp(rank: int) -> list[dict[str, Any]]:
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(3)))
    for layer in [*model, model]:
        fully_shard(layer, mesh=init_device_mesh("cpu", (2,)))
    rows = []
    with Traffic(window=3) as watching:
        for _ in range(3):
            model(torch.ones(4, 8)).sum().backward()
            rows.append(watching.end_step())
    return rows


def test_a_step_of_fsdp_sends_two_gathers_and_one_reduction(tmp_path: Path) -> None:
    """Of three layers of 256 bytes; the last stays gathered between forward and backward, as FSDP2 leaves it."""
    first, second = run_ranks(count_fsdp, 2, tmp_path)
    assert [row["communication_bytes"] for row in first] == [(3 + 3 + 3) * 128.0] * 3
    assert first == second
    assert ["ranks" in row for row in first] == [False, False, True]
    assert first[2]["ranks"]["communication_bytes"] == [(3 + 3 + 3) * 128.0] * 2


def wait_by_the_clock(rank: int, lateness: list[list[float]]) -> list[dict[str, Any]]:
    """Steps in which this rank is in a collective for as long as a clock of our own says."""
    now = [0.0]
    traffic.time = type("Clock", (), {"perf_counter": staticmethod(lambda: now[0])})  # type: ignore[assignment]

    class Slow(Traffic):
        def _timed(self, function: Any, *rest: Any) -> Any:
            def slow(*arguments: Any, **named: Any) -> Any:
                function(*arguments, **named)
                now[0] += seconds

            return super()._timed(slow, *rest)

    rows = []
    with Slow(window=len(lateness)) as watching:
        for step in lateness:
            seconds = step[rank]
            dist.all_reduce(torch.ones(1))
            rows.append(watching.end_step())
    return rows


def test_the_rank_that_is_least_in_collectives_is_the_one_the_others_wait_for(tmp_path: Path) -> None:
    in_collectives = [[1.0, 0.25, 0.75], [0.5, 0.5, 0.5], [1.0, 0.5, 1.5], [0.25, 1.25, 1.25]]
    for rows in run_ranks(wait_by_the_clock, 3, tmp_path, in_collectives):
        assert [row["wait_seconds"] for row in rows] == [0.625, 0.0, 0.75, 1.0]
        assert [row["communication_seconds"] for row in rows] == pytest.approx([2 / 3, 0.5, 1.0, 2.75 / 3])
        table = rows[3]["ranks"]
        assert table["num_steps"] == 4
        assert table["num_last"] == [2, 2, 0]  # of ranks that arrive together the first counts
        assert table["late_seconds"] == [0.5, 0.6875, 0.0]
        assert table["wait_seconds"] == [0.3125, 0.25, 0.625]


def test_a_table_of_many_ranks_has_a_number_for_each() -> None:
    steps = [torch.rand(100, 2, dtype=torch.float64) for _ in range(100)]
    table = table_of(steps)
    assert sum(table["num_last"]) == 100
    assert all(len(table[name]) == 100 for name in table if name != "num_steps")
    expected = torch.stack(steps)[:, :, 1]
    excess = (expected - expected.min(1, keepdim=True).values).mean(0)
    assert table["wait_seconds"] == pytest.approx(excess.tolist(), abs=1e-6)
