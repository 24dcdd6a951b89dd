"""Trainings of a tiny model: what the record of a run holds, and what a step that goes wrong leaves in it."""

import itertools
import math
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from narrowgauge.measuring.watch.hooks import RunNotice
from narrowgauge.runs.record import read_run
from narrowgauge.trainer import language_model
from narrowgauge.trainer import train as loop
from narrowgauge.trainer.tokens import open_tokens
from narrowgauge.trainer.train import Session, build, evaluate, train_step
from trainer.tiny_runs import CASES, settings, trained

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore::narrowgauge.matmul.gemm.EmulationNotice"),
]

# ── the record ────────────────────────────────────────────────────────────────────────────────────


def test_the_record_holds_what_was_promised(place, tmp_path):
    chosen = settings(place, tmp_path / "run", **CASES["word, accumulated"], steps=20)
    run = read_run(loop.train(vars(chosen)))
    summary = run.summary or {}
    assert (summary["recipe"], summary["steps"], summary["tokens"]) == ("bfloat16/word", 20, 1280)
    assert 0 < summary["val_loss"] < math.log(280) + 0.5
    # word's 8, the vectors' share, and gradients in float32.
    assert 9.9 < summary["bytes_per_param"] < 11
    assert abs(summary["edq"] - 1) < 0.01
    assert [row["step"] for row in run.evals] == [3, 6, 9, 12, 15, 18, 20]
    for number, row in enumerate(run.steps, 1):
        assert (row["tokens"], row["lr"]) == (number * 64, chosen.learning_rate(number))
        assert ("edq" in row) == (number % 10 == 0)
    assert run.steps[-1]["loss"] < run.steps[0]["loss"]
    assert run.run["data"]["unigram_loss"] == open_tokens(place / "tokens").unigram_loss()
    steps = [event["step"] for event in run.events if event["what"] == "checkpoint"]
    assert steps == [*range(2, 21, 2)]


def built(place: Path, **changes: Any) -> Session:
    chosen = settings(place, Path("unused"), **changes).checked()
    return build(chosen, open_tokens(str(chosen.data)))


def test_micro_batches_add_up_to_the_batch(place):
    """The loss of a step, its gradients, and the mean of an evaluation over the predicted tokens."""
    values = []
    for parts in (1, 2, 4):
        options = {"recipe": "float32/float32", "gradient_accumulation_steps": parts}
        run = built(place, **options, eval_sequences=5)
        tokens = torch.from_numpy(run.tokens.validation(5, 16))
        with torch.no_grad():
            expected = float(run.model(input_ids=tokens, labels=tokens).loss)
        assert evaluate(run) == pytest.approx(expected, rel=1e-5)
        values.append([train_step(run), float(run.optimizer.grad_norm)])
    assert values == [pytest.approx(values[0], rel=1e-4)] * 3


def test_an_evaluation_is_in_evaluation_mode_and_a_step_is_not(place):
    run = built(place)
    modes = []
    run.model.model.layers[1].register_forward_pre_hook(
        lambda layer, _: modes.append(layer.training)
    )
    evaluate(run)
    assert modes and not any(modes)
    train_step(run)
    assert modes[-1]


# ── steps that go wrong ───────────────────────────────────────────────────────────────────────────


def test_a_reader_of_the_progress_that_leaves_ends_no_training(place, tmp_path, monkeypatch):
    """`narrowgauge train | head -1` once stopped after the first step, without a checkpoint."""
    monkeypatch.setattr("builtins.print", Mock(side_effect=BrokenPipeError))
    assert read_run(trained(place, tmp_path / "run")).summary["steps"] == 8


def test_a_nan_is_skipped_and_named(place, tmp_path, monkeypatch):
    true_loss = language_model.loss_sum
    calls = itertools.count(1)

    def loss_sum(model, tokens):
        loss = true_loss(model, tokens)
        return loss * math.nan if next(calls) == 5 else loss

    monkeypatch.setattr(language_model, "loss_sum", loss_sum)
    with pytest.warns(RunNotice, match="step 5: "):
        run = read_run(trained(place, tmp_path / "run", eval_every=0))
    assert any(name.startswith("model.") for name in run.steps[4]["bad"])
    assert [row["step"] for row in run.steps if row["skipped"]] == [5]
