"""DeepSpeed's own engine on the CPU: ZeRO 1, 2 and 3 with the optimizer's states on the host step by
the storage that was asked for, and go on from a checkpoint with equal bits.
"""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import narrowgauge as ng
from ranks import run_ranks
from tensors import gaussian

pytestmark = pytest.mark.frameworks

SIDE = 512
STEPS = 4
LARGEST_BYTES = {1: 2.1, 2: 2.1, 3: 3.0}
"""Of states, a parameter; ZeRO 3 has a short part in float32 beside the long one."""


def engine_of(stage: int) -> Any:
    import deepspeed

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(SIDE, 4 * SIDE), nn.GELU(), nn.Linear(4 * SIDE, SIDE))
    offload = {"stage": stage, "offload_optimizer": {"device": "cpu"}, "sub_group_size": 1_500_000}
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "zero_optimization": offload,
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
    }
    optimizer = ng.AdamW(model.parameters(), lr=1e-3, storage="float32-states8")
    options = {"optimizer": optimizer, "config": config}
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), **options)[0]


def losses(engine: Any) -> list[float]:
    """Train on one batch."""
    x = gaussian(4, SIDE, seed=0).bfloat16()
    values = []
    for _ in range(STEPS):
        loss = engine(x).float().square().mean()
        engine.backward(loss)
        engine.step()
        values.append(loss.item())
    return values


def on_a_rank(rank: int, stage: int, folder: Path):
    """Return the losses of a run and of its resume, and the bytes of states a parameter."""
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "DS_ACCELERATOR": "cpu"}
    engine = engine_of(stage)
    losses(engine)
    engine.save_checkpoint(str(folder), tag="half")
    rest = losses(engine)
    states = engine.optimizer.optimizer.state
    num_bytes = sum(value.nbytes for state in states.values() for value in state.values())
    again = engine_of(stage)
    again.load_checkpoint(str(folder), tag="half")
    resumed = losses(again)
    return rest, resumed, num_bytes / sum(part.numel() for part in states)


@pytest.mark.parametrize("stage", LARGEST_BYTES)
def test_zero_steps_by_the_storage_and_resumes(stage, tmp_path):
    pytest.importorskip("deepspeed")
    ((rest, resumed, num_bytes),) = run_ranks(on_a_rank, 1, tmp_path, stage, tmp_path)
    assert rest == resumed
    assert rest[-1] < rest[0]
    assert num_bytes < LARGEST_BYTES[stage]
