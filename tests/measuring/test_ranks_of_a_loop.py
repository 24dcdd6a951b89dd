"""Two ranks with a loop of their own: where a run differs from another, the rank is named that
alone is off.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import narrowgauge as ng
from narrowgauge.measuring.two_runs import TwoRuns
from ranks import run_ranks

STEPS = 3
AT = 2
NAME = "1.weight"


def train(rank: int, folder: Path, fault: str, every: int) -> list[Tensor]:
    """Train and record on two ranks, with a fault on the second one in one step; the last weights."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(29, 16), torch.nn.Linear(16, 29))
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = 0

    def before_the_sum(gradient: Tensor) -> Tensor:
        return gradient * 1.5 if fault == "before" and rank == 1 and step == AT else gradient

    model.get_parameter(NAME).register_hook(before_the_sum)
    with ng.RunRecorder(folder, parallel, optimizer, fingerprints_every=every) as recorder:
        for step in range(1, STEPS + 1):
            tokens = torch.randint(
                0, 29, (4, 8), generator=torch.Generator().manual_seed(10 * step + rank)
            )
            loss = F.cross_entropy(parallel(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
            if fault == "after" and rank == 1 and step == AT:
                gradient = model.get_parameter(NAME).grad
                assert gradient is not None
                gradient.mul_(1.5)
            optimizer.step()
            optimizer.zero_grad()
            recorder.step(loss)
    return [p.detach() for p in model.parameters()]


def train_all(rank: int, place: Path) -> list[list[Tensor]]:
    """Train in one start of the ranks: healthy, with each fault, and without fingerprints."""
    cases = (("healthy", "", 1), ("after", "after", 1), ("before", "before", 1), ("plain", "", 0))
    return [train(rank, place / name, fault, every) for name, fault, every in cases]


def test_the_step_the_tensor_and_the_rank_of_a_fault_are_told(tmp_path: Path) -> None:
    healthy, _, _, plain = run_ranks(train_all, 2, tmp_path / "ranks", tmp_path)[0]
    for fault in ("after", "before"):
        runs = TwoRuns(ng.read_run(tmp_path / "healthy"), ng.read_run(tmp_path / fault))
        (difference,) = runs.readings
        assert (difference.step, difference.tensor) == (AT, f"grad:{NAME}")
        assert runs.ranks == ([1] if fault == "after" else [])
    for mine, its in zip(healthy, plain, strict=True):  # hooks change no bit
        assert mine.equal(its)


def train_without_wrapper(rank: int, folder: Path, unsummed: tuple[str, ...]) -> list[str]:
    """Train with linear weights that differ between ranks from the start, and sum all gradients
    but some. Return the tensors that are told to differ, on rank 0.
    """
    torch.manual_seed(rank)
    model = torch.nn.Sequential(torch.nn.LayerNorm(8), torch.nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ng.RunRecorder(folder, model, optimizer, fingerprints_every=1) as recorder:
        for _ in range(STEPS):
            loss = model(torch.randn(4, 8)).square().mean()
            loss.backward()
            for name, p in model.named_parameters():
                if name not in unsummed:
                    torch.distributed.all_reduce(p.grad)
            optimizer.step()
            optimizer.zero_grad()
            recorder.step(loss)
    if rank > 0:
        return []
    return [r.tensor for r in ng.diagnose(folder).readings if r.what.startswith("ranks-")]


def train_without_wrappers(rank: int, place: Path) -> list[list[str]]:
    linear = ("1.weight", "1.bias")
    cases = {"parts": linear, "unsent": (), "unsummed": (*linear, "0.weight")}
    return [train_without_wrapper(rank, place / name, case) for name, case in cases.items()]


def test_parts_of_a_layer_are_no_replicas_that_differ(tmp_path: Path) -> None:
    parts, unsent, unsummed = run_ranks(train_without_wrappers, 2, tmp_path / "ranks", tmp_path)[0]
    assert not parts
    assert unsent == ["1.weight and 1 other"]
    assert unsummed == ["0.weight"]
