"""A replayed step has the bits of the run that it repeats, and leaves the run folder as it is."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from narrowgauge.errors import NarrowgaugeError
from narrowgauge.runs.record import read_run
from narrowgauge.trainer import loop
from narrowgauge.trainer import session as session_module
from narrowgauge.trainer.micro_batches import batch_index
from narrowgauge.trainer.replays.past_steps import Moment, in_other_recipe, replaying
from narrowgauge.trainer.replays.step_replay import tensors_of_step
from narrowgauge.trainer.session import Session
from narrowgauge.trainer.step import train_step
from trainer.tiny_runs import lasting, settings

pytestmark = pytest.mark.usefixtures("one_thread")

CASES: dict[str, dict[str, Any]] = {
    "word, accumulated, hashed": {
        "recipe": "bfloat16/word", "gradient_accumulation_steps": 2, "fingerprints_every": 2, "keep_checkpoints": 9,
        "activation_checkpointing": True,
    },
    "float16 with a loss scale": {"recipe": "float16/split", "keep_checkpoints": 9},
    "scale histories": {"recipe": "float8-delayed/word", "keep_checkpoints": 9},
    "no checkpoint is left": {"recipe": "int8-row/compact", "gradient_accumulation_steps": 2, "keep_checkpoints": 1},
}  # fmt: skip


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("case", CASES)
def test_a_replayed_step_is_the_recorded_one_to_the_last_bit(case: str, place: Path, tmp_path: Path) -> None:
    folder = loop.train(settings(place, tmp_path / "run", **CASES[case]))
    before, recorded = files_of(folder), read_run(folder).steps
    with replaying(folder, 6) as past:
        assert past.started == (0 if "no checkpoint" in case else 4) and past.session.step == 5
        state = Moment.of(past.session)
        first = past.advance()
        state.restore(past.session)
        row, tensors = tensors_of_step(past.session, past.advance)
        weights = past.session.weights_fingerprint()
    assert lasting(row) == lasting(first) == lasting(recorded[5]) and past.mismatch is None
    assert next(iter(tensors)) == "tokens:batch" and {key.partition(":")[0] for key in tensors} >= {
        "output",
        "grad",
        "exp_avg",
    }
    assert files_of(folder) == before
    with replaying(folder, 7) as past:
        assert past.session.weights_fingerprint() == weights
    if "hashed" in case:
        assert [print_["step"] for print_ in read_run(folder).fingerprints] == [0, 2, 4, 6, 8]


def test_a_replay_that_is_not_the_run_says_where_it_parts(place: Path, tmp_path: Path) -> None:
    folder = loop.train(settings(place, tmp_path / "run", steps=4, recipe="bfloat16/word", fingerprints_every=1))

    def hooked(session: Session) -> None:
        session.model.get_submodule("model.layers.1.mlp").register_forward_hook(
            lambda module, args, output: output * 1.5
        )

    with replaying(folder, 4, prepared=hooked) as past:
        past.advance()
    assert past.mismatch is not None
    assert (past.mismatch.step, past.mismatch.what) == (3, "output:model.norm"), past.mismatch.message
    for step, said in ((0, "steps 1 to 4"), (5, "steps 1 to 4")):
        with pytest.raises(NarrowgaugeError, match=said), replaying(folder, step):
            pass


def test_another_recipe_goes_on_from_the_same_weights_and_moments(place: Path, tmp_path: Path) -> None:
    folder = loop.train(settings(place, tmp_path / "run", steps=4, recipe="bfloat16/word"))
    with replaying(folder, 4) as past:
        wide = in_other_recipe(past.session, settings(place, tmp_path, recipe="float32/float32").recipe)
        named = dict(wide.named_parameters())
        for name, parameter in past.session.named_parameters():
            for what in ("weight", "exp_avg", "exp_avg_sq"):
                one, other = past.session.optimizer.stored(parameter, what), wide.optimizer.stored(named[name], what)
                assert torch.equal(one, other), (name, what)
        row = past.advance()
        other_row, _ = tensors_of_step(wide, partial(train_step, wide))
    assert other_row["step"] == row["step"] and other_row["batch_crc"] == row["batch_crc"]
    assert other_row["loss"] == pytest.approx(row["loss"], rel=1e-2) and other_row["loss"] != row["loss"]


@pytest.mark.parametrize(("action", "step"), [("skip", 29), ("rollback", 29)])
def test_updates_and_batches_that_a_run_left_out_are_left_out(
    action: str, step: int, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The 27th batch makes the loss jump: its update is not applied, or the run goes back to step 20 and around its data."""
    true_loss, true_batch, spoiled = session_module._loss, Session.batch, [False]

    def build_loss(model: Any, config: Any) -> Any:
        loss = true_loss(model, config)
        return lambda tokens: loss(tokens) * (20.0 if spoiled[0] and torch.is_grad_enabled() else 1.0)

    def batch(self: Session) -> list[torch.Tensor]:
        spoiled[0] = batch_index(self.step, self.skipped_batches) == 26
        return true_batch(self)

    monkeypatch.setattr(session_module, "_loss", build_loss)
    monkeypatch.setattr(Session, "batch", batch)
    quiet = {
        "steps": 30,
        "checkpoint_every": 10,
        "keep_checkpoints": 9,
        "eval_every": 0,
        "audit_every": 0,
        "log_every": 99,
    }
    folder = loop.train(settings(place, tmp_path / "run", on_spike=action, **quiet))
    assert action in [event["kind"] for event in read_run(folder).events]
    with replaying(folder, step) as past:
        assert past.started == 20
        past.advance()
    assert past.mismatch is None, past.mismatch
