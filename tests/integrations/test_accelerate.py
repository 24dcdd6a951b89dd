"""Accelerate's loop around our optimizers: the bits of a loop of one's own, on one process and on
two.
"""

import os
from collections.abc import Iterator

import accelerate
import pytest
import torch
from torch import nn

import narrowgauge as ng
from narrowgauge.integrations.accelerate import pass_states_on
from ranks import run_ranks

pytestmark = pytest.mark.frameworks


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


def of_two(rank: int, kind: str, recipe: str, folder: str):
    """Losses, whole stored weights, and the losses after a resume, of one rank."""
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    PartialState(cpu=True, backend="gloo")
    plugin = None
    if kind == "FSDP2":
        # Accelerate 1.15 looks at its plugin on accelerators only: these ranks of gloo say that
        # they are some.
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_XPU
        policy = {
            "auto_wrap_policy": "size_based_wrap",
            "min_num_params": 500,
            "cpu_ram_efficient_loading": False,
        }
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, **policy)
    accelerator = accelerate.Accelerator(cpu=plugin is None, fsdp_plugin=plugin)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 65), nn.GELU(), nn.Linear(65, 32))
    narrow, optimizer = ng.prepare(model, recipe, lr=1e-2)
    model, optimizer = accelerator.prepare(narrow, optimizer)
    pass_states_on(optimizer)
    draw = torch.Generator().manual_seed(1 + rank)
    x, y = torch.randn(2, 4, 8, 32, generator=draw)

    def steps(*numbers: int) -> list[float]:
        losses = []
        for number in numbers:
            loss = nn.functional.mse_loss(model(x[number].bfloat16()).float(), y[number])
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    losses = steps(0, 1)
    accelerator.save_state(folder)
    losses += steps(2, 3)
    full_tensors = []
    for p in model.parameters():
        value = optimizer.optimizer.stored(p)
        full_tensors.append(value.full_tensor() if hasattr(value, "full_tensor") else value)
    accelerator.load_state(folder)
    return losses, full_tensors, steps(2, 3)


@pytest.mark.parametrize(
    "recipe", ["bfloat16/compact", "float8-tensor/word"]
)  # scales of rows, and of a tensor
def test_fsdp2_and_ddp_have_the_same_bits_and_resume(tmp_path, recipe):
    of_kind = {}
    for kind in ("DDP", "FSDP2"):
        results = run_ranks(
            of_two, 2, tmp_path / kind, kind, recipe, str(tmp_path / kind / "state")
        )
        for losses, weights, resumed in results:
            assert resumed == losses[2:]
            for a, b in zip(weights, results[0][1], strict=True):
                assert torch.equal(a, b)
        of_kind[kind] = results
    for ddp, fsdp2 in zip(of_kind["DDP"], of_kind["FSDP2"], strict=True):
        assert ddp[0] == fsdp2[0] and all(map(torch.equal, ddp[1], fsdp2[1]))
