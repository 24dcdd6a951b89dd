"""Trainings of a tiny model: what is refused before anything is written, and what the record of a
run holds.
"""

from __future__ import annotations

import errno
import io
import json
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from narrowgauge.errors import NarrowgaugeError
from narrowgauge.runs.record import read_run
from narrowgauge.trainer import loop, session
from narrowgauge.trainer.config import TrainConfig
from narrowgauge.trainer.step import evaluate, train_step
from trainer.tiny_runs import CASES, SHAPE, call, settings, words_of

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore::narrowgauge.matmul.gemm.EmulationNotice"),
]

# ── bad input ─────────────────────────────────────────────────────────────────────────────────────

BERT = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
}
SHAPES: dict[str, dict[str, Any]] = {
    "nonsense": {"model_type": "nonsense"}, "headless": {**SHAPE, "num_attention_heads": 0},
    "sighted": {"model_type": "bert", **BERT}, "picture": {"model_type": "vit"},
}  # fmt: skip
BAD_INPUT = {
    "--sequence-length 10000 --batch-size 1": "sequence_length 10000 needs 10001 tokens",
    "--sequence-length 65 --batch-size 1": "has 64 positions, and sequences have 65 tokens",
    "--model nonsense/config.json": "nonsense",
    "--model headless/config.json": "Cannot build a causal language model",
    "--model sighted/config.json": "its outputs depend on later tokens",
    "--model picture/config.json": "Cannot build a causal language model",
    "--recipe recipe.toml": "matches no linear layer",
}


@pytest.mark.parametrize("words", BAD_INPUT)
def test_bad_input_writes_nothing(
    words: str, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, shape in SHAPES.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(shape))
    override = '[[override]]\npattern = "nothing"\ncompute = "mxfp8"\n'
    (tmp_path / "recipe.toml").write_text(f'recipe = "bfloat16/word"\n{override}')
    before = sorted(tmp_path.rglob("*"))
    refused = call(*words_of(settings(place, tmp_path / "run")), *words.split())
    assert (refused.exit_code, refused.stdout, refused.stderr.count("\n")) == (2, "", 1)
    assert BAD_INPUT[words] in refused.stderr
    assert sorted(tmp_path.rglob("*")) == before


def built(place: Path, folder: Path, **changes: Any) -> session.Session:
    config = settings(place, folder, **changes).validated()
    return session.build(config, folder, session.open_on_ranks(config))


# ── the record ────────────────────────────────────────────────────────────────────────────────────


def test_the_record_holds_what_was_promised(place: Path, tmp_path: Path) -> None:
    config = settings(place, tmp_path / "run", **CASES["word, accumulated"])
    run = read_run(loop.train(config))
    summary = run.summary or {}
    assert summary["recipe"] == "bfloat16/word" and summary["steps"] == 8
    assert summary["tokens"] == 8 * 4 * 16
    assert 0 < summary["val_loss"] < math.log(280) + 0.5
    # word's 8, the vectors' share, and gradients in float32.
    assert 9.9 < summary["bytes_per_param"] < 11
    assert summary["tokens_per_second"] > 0 and summary["wall_seconds"] > 0
    assert abs(summary["edq"] - 1) < 0.01
    assert 0 <= summary["noise"] < 0.5
    assert 0 <= summary["lost_fraction"] < 0.2
    assert len(summary["weights_fingerprint"]) == 16 and int(summary["weights_fingerprint"], 16)
    assert [row["step"] for row in run.evals] == [3, 6, 8]
    assert summary["val_loss"] == run.evals[-1]["val_loss"]
    for number, row in enumerate(run.steps, 1):
        assert (row["step"], row["tokens"], row["skipped"]) == (number, number * 64, False)
        assert row["lr"] == config.learning_rate(number)
        assert min(row["loss"], row["grad_norm"], row["tokens_per_second"]) > 0
        assert 0 <= row["loader_seconds"] < row["seconds"]
        assert ("edq" in row) == (number % 2 == 0)
    assert run.steps[-1]["loss"] < run.steps[0]["loss"]
    assert run.run["config"]["recipe"] == "bfloat16/word"
    assert run.run["versions"]["torch"] == torch.__version__
    assert run.run["model"]["num_parameters"] > 0 and run.run["data"]["tokens"] > 0


def test_micro_batches_add_up_to_the_batch(place: Path, tmp_path: Path) -> None:
    """The loss of a step, its gradients, and the mean of an evaluation over the predicted tokens."""
    values = []
    for parts in (1, 2, 4):
        options = {"recipe": "float32/float32", "gradient_accumulation_steps": parts}
        run = built(place, tmp_path, **options, eval_sequences=7)
        tokens = torch.from_numpy(run.data.validation(7, 16))
        with torch.no_grad():
            expected = float(run.model(input_ids=tokens, labels=tokens).loss)
        assert evaluate(run) == pytest.approx(expected, rel=1e-5)
        values.append([train_step(run)["loss"], float(run.optimizer.grad_norm)])
    assert values == [pytest.approx(values[0], rel=1e-4)] * 3


def test_a_micro_batch_has_the_random_bits_of_its_place(place: Path, tmp_path: Path) -> None:
    run = built(place, tmp_path, recipe="int8-row/word", gradient_accumulation_steps=2)
    layer = next(iter(run.linears.layers.values()))
    places = []
    run.model.register_forward_pre_hook(lambda *_: places.append(layer.clock_words.tolist()[1:3]))
    train_step(run)
    assert (
        len(places) == 2 and sum(places[0]) == 0 and sum(places[1]) == 2 * 16
    )  # two sequences before it


# ── events ────────────────────────────────────────────────────────────────────────────────────────


def test_a_lost_update_is_an_event(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    often = {"audit_every": 1, "gauges_every": 1}
    config = settings(
        place, tmp_path / "run", recipe="bfloat16/naive", lr=1e-6, schedule="constant", **often
    )
    run = read_run(loop.train(config))
    warnings = [e for e in run.events if e["what"] == "lost-updates"]
    assert any("mlp.down_proj.weight" in e["tensor"] for e in warnings)
    for e in warnings:
        assert "'word' would keep it" in e["advice"] and e["value"] < 0.9
        assert "'bfloat16'" not in e["advice"] and e["tensor"] in e["advice"]
    # The gauges' detector reads the same updates, and does not raise the event a second time.
    assert (
        len({(e["step"], e["tensor"]) for e in warnings})
        == len(warnings)
        == len({e["tensor"] for e in warnings})
    )
    assert capsys.readouterr().out.count("\nlost updates: '") == 1  # for all tensors of a step
    assert run.summary is not None and run.summary["lost_fraction"] > 0.5


# ── a step, and an evaluation ─────────────────────────────────────────────────────────────────────


def test_an_evaluation_is_in_evaluation_mode_and_a_step_is_not(place: Path, tmp_path: Path) -> None:
    run = built(place, tmp_path)
    modes: list[bool] = []
    for module in run.model.modules():
        module.register_forward_pre_hook(lambda module, _: modes.append(module.training))
    draws: list[float] = []
    run.model.register_forward_pre_hook(lambda *_: draws.append(torch.rand(()).item()))
    evaluate(run)
    assert modes and not any(modes)
    evaluate(run)
    batches = len(draws) // 2
    assert draws[:batches] == draws[batches:] and len(set(draws)) == batches > 1
    modes.clear()
    train_step(run)
    assert modes and all(modes)


class Output(io.StringIO):
    """Fails after three writes."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def write(self, text: str) -> int:
        if self.tell() > 200:
            raise OSError(self.number, os.strerror(self.number))
        return super().write(text)


@pytest.mark.parametrize("number", [errno.EPIPE, errno.ENOSPC])
def test_output_that_cannot_be_written_ends_the_run_at_a_checkpoint(
    number: int, place: Path, tmp_path: Path
) -> None:
    config = settings(place, tmp_path / "run", **CASES["naive"], checkpoint_every=0)
    with pytest.raises(OSError) as failure:
        loop.train(config, stream=Output(number))
    assert failure.value.errno == number
    steps = len(read_run(tmp_path / "run").steps)
    assert 0 < steps < config.steps
    assert loop.resume(tmp_path / "run")
    assert (tmp_path / "run" / "checkpoints" / f"step-{steps:08d}").is_dir()


def test_ranks_share_the_batch_unless_the_settings_say_how(place: Path, tmp_path: Path) -> None:
    config = TrainConfig(batch_size=6, data=str(place / "tokens"), out=str(tmp_path / "run"))
    assert [config.validated(ranks).gradient_accumulation_steps for ranks in (1, 3)] == [1, 3]
    assert (
        replace(config, gradient_accumulation_steps=2).validated(2).gradient_accumulation_steps == 2
    )
    with pytest.raises(NarrowgaugeError, match="6 sequences cannot be split into 4"):
        config.validated(4)
