"""Accelerate's loop around our optimizers: the bits of our own trainer, on one process and on two."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from torch import nn

import narrowgauge as ng
from integrations.own_trainer import OwnRun, reference
from narrowgauge.integrations.accelerate import pass_states_on
from ranks import run_ranks

pytestmark = pytest.mark.frameworks

STEPS = 6


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Accelerate's state is the process's own: each test begins and leaves without one."""
    forget()
    yield
    forget()


def forget() -> None:
    from accelerate.state import AcceleratorState, GradientState, PartialState

    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    PartialState._reset_state()
    os.environ.pop("ACCELERATE_USE_FSDP", None)


def prepared(run: OwnRun, accelerator: Any, order: str, **options: Any) -> tuple[Any, Any]:
    """Model and optimizer, prepared by us ``before`` or ``after`` Accelerate prepares them."""
    settings = {**run.prepare_settings, **options}
    if order == "before":
        model, optimizer = accelerator.prepare(*ng.prepare(run.model(), run.recipe, **settings))
        return model, optimizer
    model, optimizer = ng.prepare(accelerator.prepare(run.model()), run.recipe, **settings)
    return model, accelerator.prepare(optimizer)


def schedule(run: OwnRun, optimizer: Any) -> Any:
    """The trainer's learning rates as a scheduler of PyTorch's."""
    peak = run.settings.lr
    inner = optimizer.optimizer if hasattr(optimizer, "optimizer") else optimizer
    return torch.optim.lr_scheduler.LambdaLR(inner, lambda step: run.rates[min(step, STEPS - 1)] / peak)


def trained(run: OwnRun, accelerator: Any, model: Any, optimizer: Any, scheduler: Any, steps: range) -> list[float]:
    losses = []
    for step in steps:
        loss = run.loss(model, run.batches[step])
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def assert_same(run: OwnRun, losses: list[float], model: nn.Module, optimizer: Any) -> None:
    assert losses == run.losses
    assert all(torch.equal(value, run.state[name]) for name, value in model.state_dict().items())
    stored = {name: optimizer.optimizer.stored(p) for name, p in model.named_parameters()}
    assert all(torch.equal(value, run.stored[name]) for name, value in stored.items())


@pytest.mark.parametrize(("order", "precision"), [("before", "no"), ("after", "no"), ("before", "bf16")])
def test_the_loop_has_the_bits_of_the_own_trainer(order: str, precision: str) -> None:
    run = reference("bfloat16/word", STEPS)
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision=precision)
    model, optimizer = prepared(run, accelerator, order)
    scheduler = accelerator.prepare(schedule(run, optimizer))
    losses = trained(run, accelerator, model, optimizer, scheduler, range(STEPS))
    if precision == "no":
        assert_same(run, losses, model, optimizer)
    else:  # autocast computes the loss of each token elsewhere in bfloat16; weights and layers are bfloat16 already
        assert all(abs(mine - theirs) < 2e-2 for mine, theirs in zip(losses, run.losses, strict=True))


def test_save_state_and_load_state_go_on_bit_for_bit(tmp_path: Path) -> None:
    run = reference("bfloat16/word", STEPS)

    def begun() -> tuple[Any, Any, Any, Any]:
        forget()
        accelerator = accelerate.Accelerator(cpu=True)
        model, optimizer = prepared(run, accelerator, "before")
        return accelerator, model, optimizer, accelerator.prepare(schedule(run, optimizer))

    first = begun()
    losses = trained(run, *first, range(3))
    first[0].save_state(tmp_path)
    again = begun()
    again[0].load_state(tmp_path)
    losses += trained(run, *again, range(3, STEPS))
    assert_same(run, losses, again[1], again[2])


# ── two ranks ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def of_two(rank: int, kind: str, recipe: str, folder: str) -> tuple[list[float], list[torch.Tensor], list[float]]:
    """Losses, whole stored weights and delayed scales, and the losses after a resume, of one rank."""
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    PartialState(cpu=True, backend="gloo")
    plugin = None
    if kind == "FSDP2":
        # Accelerate 1.15 looks at its plugin on accelerators only: these ranks of gloo say that they are some.
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_XPU
        policy = {"auto_wrap_policy": "size_based_wrap", "min_num_params": 500, "cpu_ram_efficient_loading": False}
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, **policy)
    accelerator = accelerate.Accelerator(cpu=plugin is None, fsdp_plugin=plugin)
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(32, 65), nn.GELU(), nn.Linear(65, 32))
    narrow, optimizer = ng.prepare(model, recipe, lr=1e-2)
    linears = ng.matmul.linears_of(narrow)
    model, optimizer = accelerator.prepare(narrow, optimizer)
    pass_states_on(optimizer)
    draw = torch.Generator().manual_seed(1 + rank)
    batches = [(torch.randn(8, 32, generator=draw).bfloat16(), torch.randn(8, 32, generator=draw)) for _ in range(4)]

    def steps(which: list[Any]) -> list[float]:
        losses = []
        for x, y in which:
            loss = nn.functional.mse_loss(model(x).float(), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    losses = steps(batches[:2])
    accelerator.save_state(folder)
    losses += steps(batches[2:])
    stored = [optimizer.optimizer.stored(p) for p in model.parameters()]
    whole = [value.full_tensor() if hasattr(value, "full_tensor") else value for value in stored]
    whole += [history.clone() for history in linears.histories().values()] if linears else []
    accelerator.load_state(folder)
    return losses, whole, steps(batches[2:])


@pytest.mark.parametrize("recipe", ["bfloat16/compact", "float8-delayed/word"])  # scales of rows, and of all ranks
def test_fsdp2_and_ddp_have_the_same_bits_and_resume(tmp_path: Path, recipe: str) -> None:
    of_kind = {}
    for kind in ("DDP", "FSDP2"):
        results = run_ranks(of_two, 2, tmp_path / kind, kind, recipe, str(tmp_path / kind / "state"))
        for losses, whole, resumed in results:
            assert resumed == losses[2:]
            assert all(torch.equal(a, b) for a, b in zip(whole, results[0][1], strict=True))
        of_kind[kind] = results
    for one, other in zip(of_kind["DDP"], of_kind["FSDP2"], strict=True):
        assert one[0] == other[0] and all(map(torch.equal, one[1], other[1]))
