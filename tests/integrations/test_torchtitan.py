"""torchtitan's own Trainer, with its clipping, schedule and checkpoints: the bits of a plain loop on
one rank, and on four ranks of gloo those of a resume.
"""

import gc
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from integrations.titan_on_cpu import STEPS, batch_of, on_cpu, train

# isort: split
from torchtitan.models.llama3.config_registry import llama3_debugmodel

import narrowgauge as ng
from narrowgauge.integrations.torchtitan import NarrowgaugeConverter, narrowgauge_adamw
from ranks import run_ranks
from text.refusals import refused

pytestmark = pytest.mark.frameworks

PAGE = Path(__file__).parents[2] / "docs" / "frameworks.md"
ADDRESS = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


@pytest.fixture(autouse=True, scope="module")
def one_rank() -> Iterator[None]:
    """The environment of torchrun with one process; Python collects garbage again afterwards, which
    a Trainer turns off.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**ADDRESS, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
            patch.setenv(name, value)
        yield
    gc.enable()


def narrow(folder: Path, compute: str) -> Any:
    """torchtitan's config with the lines of a user's: bfloat16 weights, our optimizer and layers."""
    config = on_cpu(folder)
    config.optimizer = narrowgauge_adamw(lr=1e-3, max_grad_norm=1.0)
    config.training.dtype = "bfloat16"
    config.training.max_norm = math.inf
    config.training.global_batch_size = 4
    config.training.local_batch_size = 2
    NarrowgaugeConverter.Config(compute=compute).build().convert(config.model_spec.model)
    return config


def in_a_plain_loop(start: dict[str, torch.Tensor], compute: str, folder: Path):
    """The same model from the same weights on the same batches, and nothing of the Trainer."""
    config = on_cpu(folder)
    model = config.model_spec.model.build()
    model.init_weights(buffer_device=None)
    model.load_state_dict(start, strict=False)
    model = ng.swap_linears(model.bfloat16().train(), compute).model
    optimizer = ng.AdamW(model.named_parameters(), lr=1e-3, storage="word", max_grad_norm=1.0)
    schedule = config.lr_scheduler.build(optimizers=[optimizer], training_steps=STEPS)
    losses = []
    for step in range(STEPS):
        total = torch.zeros((), dtype=torch.float32)
        for part in (0, 1):
            tokens = batch_of(2 * step + part, 2)
            logits = model(tokens[:, :-1]).flatten(0, 1).float()
            loss = torch.nn.functional.cross_entropy(
                logits, tokens[:, 1:].flatten(), reduction="sum"
            )
            share = loss / 64
            share.backward()
            total += share.detach()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(total.item())
    return losses, model.state_dict()


def test_the_trainer_computes_the_bits_of_a_plain_loop(tmp_path):
    """Gradients of micro-batches are added up in bfloat16 in both."""
    _, start, _ = train(narrow(tmp_path, "bfloat16"), 0)
    losses, weights = in_a_plain_loop(start, "int8-row", tmp_path)
    theirs, tensors, optimizer = train(narrow(tmp_path, "int8-row"))
    assert theirs == losses
    for name, value in weights.items():
        assert torch.equal(tensors[name], value), name
    assert isinstance(optimizer, ng.AdamW) and optimizer.bytes_per_param() < 8.1


def test_converted_layers_refuse_torchtitans_own_optimizer(tmp_path):
    config = narrow(tmp_path, "float8-row")
    config.optimizer = on_cpu(tmp_path).optimizer
    with refused("torchtitan's own optimizer"):
        train(config, 1)


def test_the_config_of_the_page_trains_with_torchtitans_chunked_loss(tmp_path):
    names = {}
    exec(re.search(r"```py\n(# titan_configs.*?)```", PAGE.read_text("utf-8"), re.DOTALL)[1], names)
    config = names["in_word"](llama3_debugmodel(), 8e-4)
    losses, _, optimizer = train(on_cpu(tmp_path, config), 2)
    assert len(losses) == 2 and optimizer.bytes_per_param() < 8.1
    assert optimizer.max_grad_norm == 1.0


def of_four(rank: int, folder: Path, stop: int):
    """Train on a rank until step ``stop``, from the newest checkpoint of a folder."""
    from torch.distributed.fsdp import FSDPModule

    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="4")
    set_factor = FSDPModule.set_gradient_divide_factor

    def with_sums(module: FSDPModule, factor: float) -> None:
        """Divide gradients in a kernel of its own: gloo has no sum with a factor."""
        set_factor(module, factor)
        module.set_force_sum_reduction_for_comms(True)

    FSDPModule.set_gradient_divide_factor = with_sums
    config = narrow(folder, "float8-row")
    config.parallelism.data_parallel_shard_degree = 4
    # The other ways to place parameters need PyTorch 2.14.
    config.parallelism.spmd_backend = "partial_dtensor"
    config.training.local_batch_size = 1
    config.checkpoint.enable = True
    config.checkpoint.interval = 2
    losses, tensors, optimizer = train(config, stop)
    assert optimizer.bytes_per_param() < 8.1
    return losses, tensors


def test_four_ranks_train_and_a_resume_has_their_bits(tmp_path):
    results = []
    for name, stop in (("whole", STEPS), ("parts", 2), ("parts", STEPS)):
        results.append(run_ranks(of_four, 4, tmp_path / name, tmp_path / name, stop)[0])
    (losses, tensors), first, then = results
    assert first[0] + then[0] == losses and all(4 < loss < 7 for loss in losses)
    assert len(tensors) > 20
    for name, value in tensors.items():
        assert torch.equal(then[1][name], value), name
