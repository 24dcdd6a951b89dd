"""torchtitan's own Trainer, on its debug model with fewer layers, with its clipping, schedule and checkpoints."""

from __future__ import annotations

import gc
import runpy
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip(
    "torchtitan", reason="narrowgauge[torchtitan] is not installed: ./dev test integrations installs it"
)

from integrations.titan_on_cpu import STEPS, Trained, batch_of, configured, in_groups, on_cpu, train

# isort: split
from torchtitan.components.optimizer import ParamGroupConfig, default_adamw
from torchtitan.config import ConfigManager
from torchtitan.distributed.activation_checkpoint import FullAC

import narrowgauge as ng
from integrations.titan_ranks import resume_on_rank
from narrowgauge.errors import RecipeError
from narrowgauge.integrations.torchtitan import (
    NarrowgaugeAdamW,
    NarrowgaugeConverter,
    narrowgauge_adamw,
    with_recipe,
    with_record,
)
from ranks import run_ranks
from trainer.tiny_runs import TIMINGS

EXAMPLE = Path(__file__).parents[2] / "examples" / "torchtitan_configs.py"
RECIPE = "float8-delayed/word"
_ENVIRONMENT = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


@pytest.fixture(autouse=True, scope="module")
def one_rank() -> Iterator[None]:
    """The environment of torchrun with one process; Python collects garbage again afterwards, which a Trainer turns off."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in _ENVIRONMENT.items():
            patch.setenv(name, value)
        yield
    gc.enable()


def recorded(folder: Path, steps: int | None = None, change: Callable[[Any], Any] | None = None) -> Trained:
    """A run with parameter groups, delayed scales, checkpoints and a record with gauges."""
    config = with_record(with_recipe(configured(folder, in_groups()), RECIPE, audit_every=1), gauges_every=2)
    config.checkpoint.enable, config.checkpoint.interval = True, 2
    if change is not None:
        change(config)
    return train(config, steps)


@pytest.fixture(scope="module")
def through(tmp_path_factory: pytest.TempPathFactory) -> tuple[Trained, Path]:
    """A :func:`recorded` run that was not stopped, and its folder."""
    folder = tmp_path_factory.mktemp("through")
    return recorded(folder), folder


def in_a_plain_loop(
    start: dict[str, torch.Tensor], recipe: str, parts: int, folder: Path
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The same model from the same weights on the same batches, with :func:`narrowgauge.prepare` and nothing of the Trainer."""
    config = configured(folder)
    model = config.model_spec.model.build()  # type: ignore[union-attr]
    model.init_weights(buffer_device=None)
    model.load_state_dict(start)
    model, optimizer = ng.prepare(model.train(), recipe, lr=1e-3, max_grad_norm=config.training.max_norm)
    schedule = config.lr_scheduler.build(optimizers=[optimizer], training_steps=STEPS)
    losses = []
    for step in range(STEPS):
        loss = torch.zeros((), dtype=torch.float32)
        for part in range(parts):
            tokens = batch_of(step * parts + part, 4 // parts)
            logits = model(tokens[:, :-1]).flatten(0, 1).float()
            total = torch.nn.functional.cross_entropy(logits, tokens[:, 1:].flatten(), reduction="sum")
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

    def same(one: Any, other: Any) -> bool:
        return torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one == other)

    return [name for name in ours.keys() & theirs.keys() if not same(ours[name], theirs[name])]


@pytest.fixture(scope="module")
def initial(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The weights that torchtitan draws for the seed, in float32."""
    return train(configured(tmp_path_factory.mktemp("initial")), 0).weights


@pytest.mark.parametrize(("recipe", "parts"), [("bfloat16/word", 1), ("int8-row/split", 2)])
def test_the_trainer_computes_the_bits_of_a_plain_loop(
    recipe: str, parts: int, initial: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    """With one rank: gradients of micro-batches are added up in bfloat16 in both."""
    losses, weights = in_a_plain_loop(initial, recipe, parts, tmp_path)
    config = with_recipe(configured(tmp_path, narrowgauge_adamw(lr=1e-3)), recipe)
    config.training.local_batch_size, config.training.global_batch_size = 4 // parts, 4
    found = train(config)
    assert found.losses == losses and differing(found.weights, weights) == []
    (optimizer,) = found.trainer.optimizers
    assert isinstance(optimizer, ng.AdamW)
    assert optimizer.num_steps(next(found.trainer.model_parts[0].parameters())) == STEPS


def test_parameter_groups_train_as_torchtitans_own(tmp_path: Path) -> None:
    """In float32 all along; the last bits differ, since the two norms of the gradients are summed in another order."""

    def run(prepare: Callable[[Any], Any]) -> Trained:
        config = configured(tmp_path, in_groups())
        config.training.mixed_precision_param = "float32"
        return train(prepare(config))

    ours, theirs = run(lambda config: with_recipe(config, "float32/float32")), run(lambda config: config)
    assert ours.losses == pytest.approx(theirs.losses, abs=1e-5)
    for name, weight in theirs.weights.items():
        assert torch.allclose(ours.weights[name], weight, rtol=0.0, atol=1e-5), name
    settings = [name for name in theirs.states if name.endswith((".initial_lr", ".weight_decay"))]
    assert len(settings) >= 18 and all(ours.states[name] == theirs.states[name] for name in settings)


def test_a_resumed_run_has_the_bits_of_one_that_was_not_stopped(through: tuple[Trained, Path], tmp_path: Path) -> None:
    whole, folder = through
    first, then = recorded(tmp_path, 2), recorded(tmp_path)
    assert first.losses + then.losses == whole.losses and len(then.losses) == STEPS - 2
    assert then.states.keys() == whole.states.keys() and any("amax_history" in name for name in whole.states)
    assert differing(then.weights, whole.weights) == differing(then.states, whole.states) == []
    runs = [ng.read_run(place / "narrowgauge") for place in (tmp_path, folder)]
    assert without_times(runs[0].steps) == without_times(runs[1].steps)
    # What a resume loses: the window of audited steps, and the shadow of second moments.
    gauges = [without_times(run.gauges, "updates", "moments") for run in runs]
    assert gauges[0] == gauges[1] and len(gauges[0]) == 2
    assert [event["kind"] for event in runs[0].events if event["kind"] != "warning"] == [
        "start",
        "stop",
        "resume",
        "finish",
    ]


def without_times(rows: Any, *others: str) -> list[dict[str, Any]]:
    measured = {*TIMINGS, "crc32", *others}
    return [{name: value for name, value in row.items() if name not in measured} for row in rows]


def test_a_record_holds_the_run_beside_torchtitans_own_optimizer(through: tuple[Trained, Path], tmp_path: Path) -> None:
    found, folder = through
    run = ng.read_run(folder / "narrowgauge")
    assert [row["loss"] for row in run.steps] == found.losses
    assert [row["tokens"] for row in run.steps] == [64, 128, 192, 256]
    assert [row["lr"] for row in run.steps] == pytest.approx([5e-3, 1e-2, 1e-2, 5e-3])  # of the first group
    # The optimizer clips, so the norm is its own, in float32.
    assert all(
        row["edq"] is not None and row["grad_norm"] != norm for row, norm in zip(run.steps, found.norms, strict=True)
    )
    assert {row["step"] for row in run.gauges} == {2, 4} and run.config["recipe"] == RECIPE
    assert run.summary["steps"] == STEPS and run.config["seed"] == 7 and run.config["batch_size"] == 4
    config = with_record(configured(tmp_path, in_groups()))
    own = train(config)
    ours = with_record(configured(tmp_path, in_groups()), run_folder="narrowgauge")
    assert differing(train(ours).weights, own.weights) == []
    second = ng.read_run(tmp_path / "narrowgauge-2")
    assert [row["loss"] for row in second.steps] == own.losses and second.steps[0]["grad_norm"] == own.norms[0]


def test_checkpointed_and_compiled_blocks_compute_the_same_bits_and_gauges(
    through: tuple[Trained, Path], tmp_path: Path
) -> None:
    """Compiled by ``aot_eager``: Inductor rounds bfloat16 less often between operators, in torchtitan's own layers."""

    def compiled(config: Any) -> None:
        config.compile.enable, config.compile.backend = True, "aot_eager"

    def checkpointed(config: Any) -> None:
        config.activation_checkpoint = FullAC.Config()

    names = (
        "capture_scalar_outputs",
        "skip_fwd_side_effects_in_bwd_under_checkpoint",
    )  # what torchtitan sets, for the process
    flags = torch._dynamo.config
    whole, folder = through
    gauges = without_times(ng.read_run(folder / "narrowgauge").gauges)
    for change in (checkpointed, compiled):
        with flags.patch({name: getattr(flags, name) for name in names}):
            found = recorded(tmp_path / change.__name__, change=change)
        assert found.losses == whole.losses and differing(found.states, whole.states) == []
        assert without_times(ng.read_run(tmp_path / change.__name__ / "narrowgauge").gauges) == gauges


def test_the_converter_names_the_recipe_and_the_optimizer_obeys_it(tmp_path: Path) -> None:
    config = configured(tmp_path, narrowgauge_adamw(lr=1e-3))
    NarrowgaugeConverter.Config(recipe="float8-row/word").build().convert(config.model_spec.model)  # type: ignore[union-attr]
    found = train(config, 1)
    linears = ng.matmul.linears_of(found.trainer.model_parts[0])
    assert linears is not None and len(found.losses) == 1 and linears.step == 1
    assert {layer.compute.name for name, layer in linears.layers.items() if "lm_head" not in name} == {"float8-row"}


def test_a_converted_model_without_our_optimizer_refuses_to_run(tmp_path: Path) -> None:
    config = configured(tmp_path)
    NarrowgaugeConverter.Config(recipe="float8-row/word").build().convert(config.model_spec.model)  # type: ignore[union-attr]
    with pytest.raises(RecipeError, match="the optimizer is not NarrowgaugeAdamW"):
        train(config, 1)


def test_the_command_line_names_the_recipe_and_the_record_of_any_config(tmp_path: Path) -> None:
    here = "narrowgauge.integrations.torchtitan."
    words = [
        f'{here}converter.linears={{"recipe": "int8-row/split"}}',
        f"{here}optimizers_container.optimizer",
        'narrowgauge.integrations.torchtitan_metrics.metrics={"run_folder": "record"}',  # its former name
    ]
    parsed: Any = ConfigManager().parse_args(
        ["--module", "llama3", "--config", "llama3_debugmodel_ce_loss", "--override.imports", *words]
    )
    config = configured(tmp_path)
    config.override, config.training.max_norm = parsed.override, 0.5
    found = train(config, 2)
    optimizers = found.trainer.optimizers
    assert isinstance(optimizers, NarrowgaugeAdamW) and len(found.losses) == 2
    assert {group["storage"] for optimizer in optimizers for group in optimizer.param_groups} == {"split"}
    linears = ng.matmul.linears_of(found.trainer.model_parts[0])
    assert linears is not None and "int8-row" in {layer.compute.name for layer in linears.layers.values()}
    # torchtitan clips, once, and its norm is recorded.
    assert [optimizer.max_grad_norm for optimizer in optimizers] == [None] and found.norms[0] > 0.5
    assert [row["grad_norm"] for row in ng.read_run(tmp_path / "record").steps] == found.norms


def test_with_pipeline_stages_or_where_asked_torchtitan_goes_on_clipping(tmp_path: Path) -> None:
    config = configured(tmp_path)
    config.parallelism.pipeline_parallel_degree = 2
    optimizer = with_recipe(config, "bfloat16/word").optimizer
    assert (optimizer.max_grad_norm, config.training.max_norm) == (None, 1.0)
    config = configured(tmp_path)
    optimizer = with_recipe(config, "bfloat16/word", max_grad_norm=None).optimizer
    assert (optimizer.max_grad_norm, config.training.max_norm) == (None, 1.0)


def test_layers_whose_forward_is_bound_already_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="a framework has replaced its forward") as refusal:
        train(configured(tmp_path, narrowgauge_adamw("int8-row/word")), 0)
    assert "with_recipe" in str(refusal.value)


REFUSED = {
    "needs one recipe, and none": narrowgauge_adamw(""),
    "scales the loss": narrowgauge_adamw("float16/word"),
    "has phases": narrowgauge_adamw("phases.toml"),
    "reduction 'reproducible'": narrowgauge_adamw("bfloat16/word/reproducible"),
    "computes in float32, and FSDP2 casts weights to bfloat16": narrowgauge_adamw("float32/float32"),
    "has no setting 'amsgrad'": narrowgauge_adamw("bfloat16/word", amsgrad=True),
    "implementation 'fused_opt_states_bf16'": NarrowgaugeAdamW.Config(
        param_groups=default_adamw().param_groups, recipe="bfloat16/word", implementation="fused_opt_states_bf16"
    ),
    "'tok_embeddings.weight' is trained, and no parameter group's pattern": NarrowgaugeAdamW.Config(
        param_groups=[ParamGroupConfig(pattern="norm", optimizer_name="AdamW", optimizer_kwargs={"lr": 1e-3})],
        recipe="bfloat16/word",
    ),
    "pattern 'bias' of a parameter group matched no parameters": NarrowgaugeAdamW.Config(
        param_groups=[
            ParamGroupConfig(pattern=pattern, optimizer_name="AdamW", optimizer_kwargs={"lr": 1e-3})
            for pattern in ("bias", "")
        ],
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
def test_what_cannot_be_done_is_refused_in_one_line(
    reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("phases.toml").write_text('recipe = "float8-row/word"\n[[phase]]\nuntil = 0.5\ncompute = "bfloat16"\n')
    with pytest.raises(RecipeError, match=reason) as refusal:
        train(configured(tmp_path, REFUSED[reason]), 0)
    assert "\n" not in str(refusal.value)


def test_two_ranks_continue_from_the_checkpoint_and_the_record_of_one(
    through: tuple[Trained, Path], tmp_path: Path
) -> None:
    """Each rank sums its own half of the batch, in bfloat16, so the last bits of the update differ."""
    whole, folder = through
    shutil.copytree(folder / "checkpoint" / "step-2", tmp_path / "checkpoint" / "step-2")
    shutil.copytree(folder / "narrowgauge", tmp_path / "narrowgauge")
    (losses, weights, states), (same, others, held) = run_ranks(
        resume_on_rank, 2, tmp_path / "ranks", str(tmp_path), RECIPE
    )
    assert losses == same == pytest.approx(whole.losses[2:], abs=2e-3)
    # Delayed scales are those of both ranks' data.
    assert differing(weights, others) == differing(states, held) == []
    run = ng.read_run(tmp_path / "narrowgauge")
    assert [row["loss"] for row in run.steps] == whole.losses[:2] + losses and run.summary["steps"] == STEPS
    assert [row["tokens"] for row in run.steps] == [64, 128, 192, 256]


def test_the_example_trains_with_torchtitans_chunked_loss(tmp_path: Path) -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= 60
    config = runpy.run_path(str(EXAMPLE))["debugmodel_word"]()
    found = train(on_cpu(config, tmp_path), 2)
    (optimizer,) = found.trainer.optimizers
    assert len(found.losses) == 2 and optimizer.bytes_per_param() < 8.1 and optimizer.max_grad_norm == 1.0
