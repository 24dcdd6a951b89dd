"""PyTorch's own clipping of gradients that were summed exactly: the same bits on any ranks; of all others it is PyTorch's."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import utils

import narrowgauge as ng
from narrowgauge.distributed import order_invariance
from narrowgauge.errors import RecipeError
from narrowgauge.numerics.exact_sums import exact_norm
from narrowgauge.numerics.hashing import fingerprint_all
from ranks import run_ranks

LEAVES = 6


def clipped(rank: int, kind: str, how: str) -> tuple[str, str]:
    """Norms and weights of five steps whose gradients PyTorch clips."""
    size = dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 15), nn.Tanh(), nn.Linear(15, 4))
    called: nn.Module = nn.parallel.DistributedDataParallel(model) if kind == "ddp" else model
    if kind == "sharded":
        mesh = init_device_mesh("cpu", (size,))
        for unit in (model[0], model[2], model):
            fully_shard(unit, mesh=mesh)
    reduction = ng.reduce_gradients_with(called, "reproducible", average=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    norms = []
    for k in range(5):
        for leaf in range(rank, LEAVES, size):
            x = torch.randn(3, 8, generator=torch.Generator().manual_seed(10 * k + leaf))
            with reduction.micro_batch(is_last=leaf + size >= LEAVES):
                called(x).square().mean().backward()
        if how == "at once":
            norm = utils.clip_grad_norm_(model.parameters(), 0.05, error_if_nonfinite=True)
        else:
            norm = utils.get_total_norm([p.grad for p in model.parameters()])
            utils.clip_grads_with_norm_(model.parameters(), 0.05, norm)
        assert hasattr(norm, "full_tensor") is (kind == "sharded")  # as PyTorch returns it
        norms.append(float(norm))
        optimizer.step()
        optimizer.zero_grad()
    whole = {n: p.full_tensor() if hasattr(p, "full_tensor") else p for n, p in model.named_parameters()}
    return str(norms), fingerprint_all({name: value.detach() for name, value in whole.items()})


def test_clipped_gradients_have_the_same_bits_on_any_ranks(tmp_path: Path) -> None:
    (expected,) = run_ranks(clipped, 1, tmp_path / "one", "plain", "at once")
    cases = [(1, "sharded", "at once"), (2, "sharded", "apart"), (3, "sharded", "at once"), (2, "ddp", "at once")]
    for size, kind, how in cases:
        assert set(run_ranks(clipped, size, tmp_path / f"{size}{kind}", kind, how)) == {expected}, (size, kind, how)


def summed(reduction: str = "reproducible") -> nn.Linear:
    torch.manual_seed(0)
    model = nn.Linear(64, 64)
    inputs = torch.randn(5, 64)
    with ng.reduce_gradients_with(model, reduction).micro_batch():
        model(inputs).square().sum().backward()
    return model


def test_the_norm_is_the_exact_one_and_the_largest_magnitude_pytorchs() -> None:
    model = summed()
    gradients = [p.grad for p in model.parameters()]
    wanted = exact_norm([g.clone() for g in gradients])
    assert utils.clip_grad_norm_(model.parameters(), math.inf) == wanted
    assert utils.clip_grad_norm_(model.parameters(), math.inf, norm_type=math.inf) == max(
        g.abs().max() for g in gradients
    )
    with pytest.raises(RecipeError, match="the norm of order 1 was requested"):
        utils.clip_grad_norm_(model.parameters(), 1.0, norm_type=1.0)
    gradients[0][0, 0] = math.nan
    assert utils.clip_grad_norm_(model.parameters(), 1.0).isnan()
    with pytest.raises(RuntimeError, match="non-finite"):
        utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)


def test_other_gradients_are_clipped_as_ever() -> None:
    summed()
    theirs = nn.Linear(64, 64)
    theirs(torch.randn(5, 64)).square().sum().backward()
    for model in (theirs, summed("float32")):
        parts = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None])
        assert utils.clip_grad_norm_(model.parameters(), math.inf, norm_type=1.0) > parts.norm()
        assert utils.clip_grad_norm_(model.parameters(), math.inf) == parts.norm()


def test_pytorchs_norm_is_back_when_the_last_reduction_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, empty in (("_users", set()), ("_restore", [])):  # without those of other tests
        monkeypatch.setattr(order_invariance, name, empty)
    before = utils.get_total_norm
    first, second = (ng.reduce_gradients_with(nn.Linear(2, 2), "reproducible") for _ in range(2))
    first.close()
    assert utils.get_total_norm is not before
    second.close()
    assert utils.get_total_norm is before and utils.clip_grad._get_total_norm is before
