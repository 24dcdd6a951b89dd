"""Two runs without fingerprints: replays find the tensor, tell damage from code, and measure how far rounding reaches."""

from __future__ import annotations

import io
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from analysis.diagnosis.test_two_trainings import AT, scaled_gradient, struck
from narrowgauge.analysis.diagnosis.pairs.two_runs import TwoRuns, compare_two
from narrowgauge.cli.diagnosing import StepBar
from narrowgauge.runs.record import Run, read_run
from narrowgauge.runs.writer import RunWriter
from narrowgauge.trainer import loop
from narrowgauge.trainer.replays.past_steps import expected_time
from narrowgauge.trainer.replays.two_replays import common_state, compare_exactly, measure_envelope
from narrowgauge.trainer.session import Session
from trainer.tiny_runs import call, settings

pytestmark = pytest.mark.usefixtures("one_thread")


def off_once(session: Session) -> None:
    """What one module gives is off in one step, as after a flipped bit of a register."""
    struck_step = session.step

    def damaged(module: Any, args: Any, output: Tensor) -> Tensor:
        return output * 1.5 if session.step == struck_step and torch.is_grad_enabled() else output

    session.model.get_submodule("model.layers.1.mlp").register_forward_hook(damaged)


def trained(place: Path, folder: Path, strike: Any = None, **changes: Any) -> Path:
    given = {"steps": 8, "recipe": "bfloat16/word", "keep_checkpoints": 9, "eval_every": 0, **changes}
    with struck(strike) if strike is not None else nullcontext():
        return loop.train(settings(place, folder, **given))


@pytest.fixture(scope="module")
def plain(place: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(place, tmp_path_factory.mktemp("plain") / "run")


def test_where_settings_differ_the_first_tensor_is_found_and_rounding_is_measured(
    place: Path, plain: Path, tmp_path: Path
) -> None:
    """From step 1 on the gradients are sums of two micro-batches; the record alone shows it in the norm."""
    other, said, done = trained(place, tmp_path / "other", gradient_accumulation_steps=2), [], []
    recorded = compare_two(read_run(plain), read_run(other))
    assert "--exact" in recorded.next_measurement
    found = compare_exactly(plain, other, say=said.append, progress=lambda *steps: done.append(steps))
    assert said[0].startswith("Both runs are computed again from step 1 to step 1: about 1 s by the recorded steps")
    assert done[:2] == [(1, 1), (1, 1)], "a step of each run, then those with changed weights"
    parting, replayed = found.alignment.first_difference, found.alignment.replayed
    assert replayed is not None and replayed.repeats == (True, True) and replayed.since == 0, found.text()
    assert parting is not None and parting.step == 1, found.text()
    assert found.reason is not None and found.reason.name == "order-of-sums", found.text()
    if parting.stage == "loss":  # with AVX512 the loss of two halves differs in its last bit already, and has no tensor
        assert abs(parting.values[0] - parting.values[1]) < 1e-6 and replayed.envelope is None, found.text()
        return
    assert parting.tensor.startswith("grad:"), found.text()
    assert replayed.envelope is not None and len(replayed.envelope.changes) == 3 and 0 < replayed.envelope.limit < 0.1
    assert (
        "in 3 replays with weights changed by one ulp of float32 it moved by at most" in found.text() and len(said) >= 3
    )
    assert "rounding explains" not in found.text() and "inside" in found.text()
    assert found.to_dict()["replayed"]["envelope"]["tensor"] == parting.tensor and not found.next_measurement


@pytest.mark.parametrize(
    ("strike", "persists", "reason"), [(scaled_gradient, True, "bug"), (off_once, False, "silent-corruption")]
)
def test_damage_does_not_happen_twice_and_code_does(
    strike: Any, persists: bool, reason: str, place: Path, plain: Path, tmp_path: Path
) -> None:
    other = trained(place, tmp_path / "other", strike)
    assert common_state(read_run(plain), read_run(other), before=AT) == AT - 2
    found: TwoRuns = compare_exactly(plain, other, num_replays=0)
    replayed = found.alignment.replayed
    assert replayed is not None and replayed.repeats == (True, False) and replayed.agree, found.text()
    assert replayed.persists is persists and replayed.since == AT - 2
    assert found.reason is not None and found.reason.name == reason, found.text()
    assert f"of other, the replay first differs from the record at step {AT}" in found.text()
    assert "computed again here, both give the same: settings and data do not explain the difference" in found.text()


def test_how_long_a_replay_takes_is_said_and_its_steps_are_counted(plain: Path) -> None:
    said: list[str] = []
    done: list[tuple[int, int]] = []
    run = read_run(plain)
    assert measure_envelope(run, 3, "grad:model.norm.weight", 2, said.append, lambda *steps: done.append(steps))
    assert done == [(1, 3), (2, 3), (3, 3)], "the checkpoint after step 2 leaves no step on the way"
    assert " times with weights changed by one ulp of float32: about 1 s by the recorded steps." in said[0]
    assert expected_time([run, Run(Path("bare"), {})], 5) == "", "a record without durations tells no time"


def test_a_terminal_shows_a_bar_of_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    stream = io.StringIO()
    monkeypatch.setattr("sys.stderr", stream)
    with StepBar() as bar:
        bar.say("Repeating 2 steps.")
        for step in (1, 2):
            bar.show(step, 2)
            bar._bar.refresh()
    assert "Repeating 2 steps." in stream.getvalue() and "2/2" in stream.getvalue()


def test_a_hundredth_of_a_gradient_is_more_than_rounding_in_a_narrow_format(plain: Path) -> None:
    envelope = measure_envelope(read_run(plain), AT, "grad:model.layers.0.mlp.down_proj.weight", 2)
    assert envelope is not None and len(set(envelope.changes)) == 2
    assert 0 < envelope.limit < 0.01 and not envelope.holds(0.01)


def test_what_cannot_be_replayed_is_refused_in_one_line(plain: Path, tmp_path: Path) -> None:
    run = read_run(plain)
    with RunWriter.create(tmp_path / "elsewhere", run.run) as writer:
        for row in run.steps[:3]:
            writer.step({**row, "loss": row["loss"] + 0.5})
    for words, said in (
        ((str(tmp_path / "elsewhere"), "--exact"), "elsewhere"),
        (("--exact",), "--exact compares two runs, and one was named"),
        ((str(plain), "--exact", "--perturbations", "-1"), "-1 is not in the range"),
    ):
        result = call("diagnose", str(plain), *words)
        assert result.exit_code == 2 and said in result.output and "Traceback" not in result.output
    assert call("diagnose", str(plain), str(plain), "--exact").output.startswith("/")
