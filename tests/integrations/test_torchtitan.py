"""torchtitan's own Trainer, on its debug model with fewer layers, with its clipping, schedule and checkpoints."""

from __future__ import annotations

import runpy
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip(
    "torchtitan", reason="narrowgauge[torchtitan] is not installed: ./dev test integrations installs it"
)

from integrations.titan_on_cpu import STEPS, batch_of, configured, on_cpu, train, weights_of, whole

# isort: split
from torchtitan.components.optimizer import ParamGroupConfig, default_adamw
from torchtitan.config import ConfigManager

import narrowgauge as ng
from integrations.titan_ranks import resume_on_rank
from narrowgauge.errors import RecipeError
from narrowgauge.integrations.torchtitan_converter import NarrowgaugeConverter
from narrowgauge.integrations.torchtitan_optimizer import NarrowgaugeAdamW, narrowgauge_adamw, with_recipe
from ranks import run_ranks

EXAMPLE = Path(__file__).parents[2] / "examples" / "torchtitan_configs.py"
_ENVIRONMENT = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The environment of torchrun with one process, and a process group that ends with the test."""
    for name, value in _ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def in_a_plain_loop(folder: Path, recipe: str, **settings: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The same model from the same weights on the same batches, with :func:`narrowgauge.prepare` and nothing of the Trainer."""
    config = configured(folder)
    start = config.build()
    model = config.model_spec.model.build()  # type: ignore[union-attr]
    model.init_weights(buffer_device=None)
    model.load_state_dict(weights_of(start))
    start.close()
    torch.distributed.destroy_process_group()
    model, optimizer = ng.prepare(model.train(), recipe, lr=1e-3, **settings)
    schedule = config.lr_scheduler.build(optimizers=[optimizer], training_steps=STEPS)
    losses = []
    for step in range(STEPS):
        tokens = batch_of(step)
        logits = model(tokens[:, :-1]).flatten(0, 1).float()
        loss = (
            torch.nn.functional.cross_entropy(logits, tokens[:, 1:].flatten(), reduction="sum") / tokens[:, 1:].numel()
        )
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: value.clone() for name, value in model.state_dict().items()}


def assert_same_weights(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    compared = ours.keys() & theirs.keys()
    assert len(compared) >= 9
    differing = [name for name in compared if not torch.equal(ours[name], theirs[name])]
    assert not differing


@pytest.mark.parametrize("recipe", ["bfloat16/word", "int8-row/split"])
def test_the_trainer_computes_the_bits_of_a_plain_loop(recipe: str, tmp_path: Path) -> None:
    losses, weights = in_a_plain_loop(tmp_path, recipe)
    trainer, found, _ = train(with_recipe(configured(tmp_path, default_adamw(lr=1e-3)), recipe))
    assert found == losses
    assert_same_weights(weights_of(trainer), weights)
    (optimizer,) = trainer.optimizers
    assert isinstance(optimizer, ng.AdamW) and optimizer.num_steps(next(trainer.model_parts[0].parameters())) == STEPS
    assert {group["lr"] for group in optimizer.param_groups} == {0.0}  # at the end of torchtitan's schedule


def test_a_resumed_run_has_the_bits_of_one_that_was_not_stopped(tmp_path: Path) -> None:
    def run(folder: Path, steps: int | None = None) -> tuple[list[float], dict[str, torch.Tensor], dict[str, Any]]:
        config = with_recipe(configured(folder), "float8-delayed/word")
        config.checkpoint.enable, config.checkpoint.interval = True, 2
        trainer, losses, _ = train(config, steps)
        states = {name: _plain(value) for name, value in trainer.optimizers.state_dict().items()}
        result = losses, weights_of(trainer), states
        trainer.close()
        torch.distributed.destroy_process_group()
        return result

    through = run(tmp_path / "through")
    first, _, _ = run(tmp_path / "stopped", 2)
    then = run(tmp_path / "stopped")
    assert first + then[0] == through[0] and len(then[0]) == STEPS - 2
    assert_same_weights_and_states(then, through)


def assert_same_weights_and_states(one: Any, other: Any) -> None:
    assert all(torch.equal(one[1][name], other[1][name]) for name in other[1])
    assert one[2].keys() == other[2].keys()
    assert any("amax_history" in name for name in one[2])
    assert [n for n, v in one[2].items() if not _equal(v, other[2][n])] == []


def _plain(value: Any) -> Any:
    return whole(value).clone() if isinstance(value, torch.Tensor) else value


def _equal(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one == other)


def test_the_converter_names_the_recipe_and_the_optimizer_obeys_it(tmp_path: Path) -> None:
    config = configured(tmp_path, narrowgauge_adamw(lr=1e-3))
    NarrowgaugeConverter.Config(recipe="float8-row/word").build().convert(config.model_spec.model)  # type: ignore[union-attr]
    trainer, losses, _ = train(config, 1)
    linears = ng.linears_of(trainer.model_parts[0])
    assert linears is not None and len(losses) == 1 and linears.step == 1
    assert {layer.compute.name for name, layer in linears.layers.items() if "lm_head" not in name} == {"float8-row"}


def test_a_converted_model_without_our_optimizer_refuses_to_run(tmp_path: Path) -> None:
    config = configured(tmp_path)
    NarrowgaugeConverter.Config(recipe="float8-row/word").build().convert(config.model_spec.model)  # type: ignore[union-attr]
    with pytest.raises(RecipeError, match="the optimizer is not NarrowgaugeAdamW"):
        train(config, 1)


def test_the_command_line_names_the_recipe_of_any_config(tmp_path: Path) -> None:
    here = "narrowgauge.integrations.torchtitan_"
    words = [f'{here}converter.linears={{"recipe": "int8-row/split"}}', f"{here}optimizer.optimizer"]
    parsed: Any = ConfigManager().parse_args(
        ["--module", "llama3", "--config", "llama3_debugmodel_ce_loss", "--override.imports", *words]
    )
    config = configured(tmp_path)
    config.override = parsed.override
    trainer, losses, norms = train(config, 2)
    assert isinstance(trainer.optimizers, NarrowgaugeAdamW) and len(losses) == 2
    assert {group["storage"] for optimizer in trainer.optimizers for group in optimizer.param_groups} == {"split"}
    assert "int8-row" in {layer.compute.name for layer in ng.linears_of(trainer.model_parts[0]).layers.values()}  # type: ignore[union-attr]
    # torchtitan clips, once.
    assert [optimizer.max_grad_norm for optimizer in trainer.optimizers] == [None] and norms[0] > 1


def test_layers_whose_forward_is_bound_already_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="a framework has replaced its forward") as refusal:
        configured(tmp_path, narrowgauge_adamw("int8-row/word")).build()
    assert "with_recipe" in str(refusal.value)


REFUSED = {
    "needs one recipe, and none": narrowgauge_adamw(""),
    "scales the loss": narrowgauge_adamw("float16/word"),
    "computes in float32, and FSDP2 casts weights to bfloat16": narrowgauge_adamw("float32/float32"),
    "has no setting 'amsgrad'": narrowgauge_adamw("bfloat16/word", amsgrad=True),
    "implementation 'fused_opt_states_bf16'": NarrowgaugeAdamW.Config(
        param_groups=default_adamw().param_groups, recipe="bfloat16/word", implementation="fused_opt_states_bf16"
    ),
    "takes one parameter group": NarrowgaugeAdamW.Config(
        param_groups=[ParamGroupConfig(pattern="bias", optimizer_name="AdamW", optimizer_kwargs={"lr": 1e-3})],
        recipe="bfloat16/word",
    ),
    "is AdamW, and the optimizer 'DistMuon'": NarrowgaugeAdamW.Config(
        param_groups=[ParamGroupConfig(pattern=".*", optimizer_name="DistMuon")], recipe="bfloat16/word"
    ),
    "given no learning rate": NarrowgaugeAdamW.Config(
        param_groups=[ParamGroupConfig(pattern=".*", optimizer_name="AdamW")], recipe="bfloat16/word"
    ),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_cannot_be_done_is_refused_in_one_line(reason: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=reason) as refusal:
        configured(tmp_path, REFUSED[reason]).build()
    assert "\n" not in str(refusal.value)


def test_two_ranks_continue_from_the_checkpoint_of_one(tmp_path: Path) -> None:
    """Each rank sums its own half of the batch, in bfloat16, so the last bits of the update differ."""
    config = with_recipe(configured(tmp_path), "bfloat16/word")
    config.checkpoint.enable, config.checkpoint.interval = True, 2
    train(config, 2)
    torch.distributed.destroy_process_group()
    shutil.copytree(tmp_path / "checkpoint", tmp_path / "two" / "checkpoint")
    ((loss,), weights), (same, others) = run_ranks(
        resume_on_rank, 2, tmp_path / "ranks", str(tmp_path / "two"), "bfloat16/word"
    )
    trainer, (alone,), _ = train(config)
    assert [loss] == same and all(torch.equal(weights[name], others[name]) for name in weights)
    assert loss == pytest.approx(alone, abs=1e-4)
    for name, value in weights_of(trainer).items():
        assert torch.allclose(value.float(), weights[name].float(), atol=2e-3), name


def test_the_example_trains_with_torchtitans_chunked_loss(tmp_path: Path) -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= 60
    config = runpy.run_path(str(EXAMPLE))["debugmodel_word"]()
    trainer, losses, _ = train(on_cpu(config, tmp_path), 2)
    (optimizer,) = trainer.optimizers
    assert len(losses) == 2 and optimizer.bytes_per_param() < 8.1 and optimizer.max_grad_norm == 1.0
