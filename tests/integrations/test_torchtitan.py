"""torchtitan's own Trainer, on its debug model with fewer layers, with its clipping and schedule; its
checkpoints: ``test_torchtitan_on_ranks``.
"""

from __future__ import annotations

import gc
import math
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from integrations.titan_on_cpu import STEPS, batch_of, configured, on_cpu, train

# isort: split
import narrowgauge as ng
from narrowgauge.errors import RecipeError
from narrowgauge.integrations.torchtitan import NarrowgaugeConverter, narrowgauge_adamw

pytestmark = pytest.mark.frameworks

EXAMPLE = Path(__file__).parents[2] / "examples" / "torchtitan_configs.py"
_ENVIRONMENT = {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "0",
}


@pytest.fixture(autouse=True, scope="module")
def one_rank() -> Iterator[None]:
    """The environment of torchrun with one process; Python collects garbage again afterwards, which
    a Trainer turns off.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name, value in _ENVIRONMENT.items():
            patch.setenv(name, value)
        yield
    gc.enable()


def narrow(folder: Path, compute: str | None = None, **options: Any) -> Any:
    """torchtitan's config with the three lines of a user's: bfloat16 weights, our optimizer,
    perhaps our layers.
    """
    config = configured(folder, narrowgauge_adamw(lr=1e-3, max_grad_norm=1.0, **options))
    config.training.dtype = "bfloat16"
    config.training.max_norm = math.inf
    if compute is not None:
        NarrowgaugeConverter.Config(compute=compute).build().convert(config.model_spec.model)  # type: ignore[union-attr]
    return config


def in_a_plain_loop(
    start: dict[str, torch.Tensor], compute: str | None, parts: int, folder: Path
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The same model from the same weights on the same batches, and nothing of the Trainer."""
    config = configured(folder)
    model = config.model_spec.model.build()  # type: ignore[union-attr]
    model.init_weights(buffer_device=None)
    model.load_state_dict(start)
    model = model.bfloat16().train()
    if compute is not None:
        ng.swap_linears(model, compute)
    optimizer = ng.AdamW(model.named_parameters(), lr=1e-3, storage="word", max_grad_norm=1.0)
    schedule = config.lr_scheduler.build(optimizers=[optimizer], training_steps=STEPS)
    losses = []
    for step in range(STEPS):
        loss = torch.zeros((), dtype=torch.float32)
        for part in range(parts):
            tokens = batch_of(step * parts + part, 4 // parts)
            logits = model(tokens[:, :-1]).flatten(0, 1).float()
            total = torch.nn.functional.cross_entropy(
                logits, tokens[:, 1:].flatten(), reduction="sum"
            )
            (share := total / (tokens[:, 1:].numel() * parts)).backward()
            loss += share.detach()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: value.clone() for name, value in model.state_dict().items()}


def differing(ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    """The names of values that are not the same, bit for bit."""
    assert len(ours.keys() & theirs.keys()) >= 9

    def same(first: Any, second: Any) -> bool:
        return (
            torch.equal(first, second) if isinstance(first, torch.Tensor) else bool(first == second)
        )

    return [name for name in ours.keys() & theirs.keys() if not same(ours[name], theirs[name])]


def test_the_trainer_computes_the_bits_of_a_plain_loop(tmp_path: Path) -> None:
    """With one rank: gradients of micro-batches are added up in bfloat16 in both."""
    compute = "int8-row"
    parts = 2
    start = train(narrow(tmp_path / "start"), 0).weights
    losses, weights = in_a_plain_loop(start, compute, parts, tmp_path)
    config = narrow(tmp_path, compute)
    config.training.local_batch_size = 4 // parts
    config.training.global_batch_size = 4
    trained = train(config)
    assert trained.losses == losses and differing(trained.weights, weights) == []
    (optimizer,) = trained.trainer.optimizers
    assert isinstance(optimizer, ng.AdamW) and optimizer.bytes_per_param() < 8.1
    assert optimizer.num_steps(next(trained.trainer.model_parts[0].parameters())) == STEPS


def test_converted_layers_refuse_torchtitans_own_optimizer(tmp_path: Path) -> None:
    config = configured(tmp_path)
    NarrowgaugeConverter.Config(compute="float8-row").build().convert(config.model_spec.model)  # type: ignore[union-attr]
    with pytest.raises(RecipeError, match=r"swaps no layers.*narrowgauge_adamw"):
        train(config, 1)


def test_the_example_trains_with_torchtitans_chunked_loss(tmp_path: Path) -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= 60
    config = runpy.run_path(str(EXAMPLE))["debugmodel_word"]()
    trained = train(on_cpu(config, tmp_path), 2)
    (optimizer,) = trained.trainer.optimizers
    assert len(trained.losses) == 2
    assert optimizer.bytes_per_param() < 8.1
    assert optimizer.max_grad_norm == 1.0
