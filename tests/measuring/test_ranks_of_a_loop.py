"""Four ranks with a loop of their own: a fault on one of them is located, and parts are no replicas."""

import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import narrowgauge as ng
from narrowgauge.distributed.ranks import ALONE, all_ranks
from narrowgauge.measuring.diagnose.first_difference import first_difference
from narrowgauge.measuring.watch.rank_sums import RankSums
from narrowgauge.torch_support.torch_names import unwrapped_model
from ranks import run_ranks

STEPS = 3
AT = 2
NAME = "1.weight"
SAME_DATA = ("same-data", "shards")


def train(rank: int, folder: Path, fault: str) -> None:
    """Train and record: with one flipped bit in a gradient of the second rank in one step, or with the
    same data on all ranks, as shards of a linear layer have them.
    """
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(29, 16), torch.nn.Linear(16, 29))
    parallel = DistributedDataParallel(model)
    if fault == "shards":
        columns = ColwiseParallel(output_layouts=Replicate())
        parallel = parallelize_module(model, init_device_mesh("cpu", (4,)), {"1": columns})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with ng.RunRecorder(folder, parallel, optimizer, fingerprints_every=1) as recorder:
        for step in range(1, STEPS + 1):
            seeded = torch.Generator().manual_seed(10 * step + rank * (fault not in SAME_DATA))
            tokens = torch.randint(0, 29, (4, 8), generator=seeded)
            loss = F.cross_entropy(parallel(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
            if fault == "flipped" and rank == 1 and step == AT:
                gradient = model.get_parameter(NAME).grad
                gradient.view(torch.int32)[3, 5] ^= 1 << 20
            optimizer.step()
            optimizer.zero_grad()
            recorder.step(loss)


def fail(*args: object) -> None:
    raise ValueError("no ink")


def train_without_wrapper(rank: int, folder: Path, unsummed: tuple[str, ...], fault: str):
    """Train with linear weights that differ between ranks from the start, and sum all gradients
    but some. Return the steps and tensors that are told to differ, on rank 0.
    """
    torch.manual_seed(rank)
    model = torch.nn.Sequential(torch.nn.LayerNorm(8), torch.nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ng.RunRecorder(folder, model, optimizer) as recorder:
        if rank == 1 and fault == "an error of ours":
            recorder.meter._after = fail
        for step in range(STEPS):
            if rank == 1 and step == 1 and fault == "a weight is written":
                model[0].weight.data.add_(1.0)
            loss = model(torch.randn(4, 8)).square().mean()
            loss.backward()
            for name, p in model.named_parameters():
                if name not in unsummed:
                    torch.distributed.all_reduce(p.grad)
            optimizer.step()
            optimizer.zero_grad()
            recorder.step(loss)
    return [] if rank > 0 else apart(folder)


def apart(folder: Path):
    readings = ng.diagnose(folder).readings
    return [(r.step, r.tensor) for r in readings if r.what == "ranks-apart"]


VALUES = [*itertools.product(range(6, 10), repeat=4)]
"""Values of four ranks."""


def lone(values: tuple[int, ...]) -> int:
    """Return the only rank that has another value, counted from 1; -1 if others differ."""
    (_, most), *rest = Counter(values).most_common()
    if most < 3:
        return -1
    return values.index(rest[0][0]) + 1 if rest else 0


def train_all(rank: int, place: Path) -> list[Any]:
    for fault in ("healthy", "flipped", *SAME_DATA):
        train(rank, place / fault, fault)
    linear = ("1.weight", "1.bias")
    values = torch.tensor([values[rank] for values in VALUES])
    return [
        RankSums(all_ranks(), {})._unlike(values).tolist(),
        train_without_wrapper(rank, place / "parts", linear, ""),
        train_without_wrapper(rank, place / "unsent", (), ""),
        train_without_wrapper(rank, place / "unsummed", (*linear, "0.weight"), ""),
        train_without_wrapper(rank, place / "written", linear, "a weight is written"),
        train_without_wrapper(rank, place / "broken", linear, "an error of ours"),
    ]


def test_a_fault_of_one_rank_is_located_and_parts_are_no_replicas(tmp_path):
    answers = run_ranks(train_all, 4, tmp_path / "ranks", tmp_path)[0]
    unlike, parts, unsent, unsummed, written, broken = answers
    assert unlike == [*map(lone, VALUES)]
    assert parts == broken == []
    assert unsent == [(1, "1.weight and 1 other")]
    assert unsummed == [(1, "0.weight")]
    assert written == [(2, "0.weight on rank 1")]
    assert ng.diagnose(tmp_path / "healthy").ok and ng.diagnose(tmp_path / "shards").ok
    assert apart(tmp_path / "flipped") == [(AT, f"{NAME} on rank 1")]
    [reading] = ng.diagnose(tmp_path / "same-data").readings
    assert (reading.what, reading.step, reading.value) == ("same-data", 1, 1.0)
    runs = first_difference(ng.read_run(tmp_path / "healthy"), ng.read_run(tmp_path / "flipped"))
    difference, *_ = runs.readings
    assert (difference.step, difference.tensor) == (AT, f"grad:{NAME}")
    assert "Of 4 ranks these differ there: 1." in runs.lines


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_weight_without_a_gradient_has_no_sum(dtype):
    first, second = (torch.ones(2, dtype=dtype, requires_grad=True) for _ in range(2))
    sums = RankSums(ALONE, {first: "first", second: "second"})
    sums.add_gradients({second: torch.ones(2, dtype=dtype)})
    assert sums._sums[0, :-1].ne(0).tolist() == [False, True]


@pytest.mark.usefixtures("one_rank")
def test_the_wrappers_of_a_model_are_taken_off_in_any_order():
    model = torch.nn.Linear(2, 2)
    parallel = DistributedDataParallel(model)
    compiled = torch.compile(model)
    for wrapped in (parallel, compiled, torch.compile(parallel), DistributedDataParallel(compiled)):
        assert unwrapped_model(wrapped) is model
