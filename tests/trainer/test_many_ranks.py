"""A training on several ranks: one run folder, one voice, the numbers of one process, and an end at
a flipped bit.
"""

from __future__ import annotations

import contextlib
import io
import math
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from narrowgauge.errors import CorruptionError, NarrowgaugeError
from narrowgauge.optim.loading import kept_tensors
from narrowgauge.runs.record import Run, read_run
from narrowgauge.runs.schema import STEP
from narrowgauge.trainer import loop, session
from narrowgauge.trainer.session import Session
from ranks import run_ranks
from trainer.test_recovery import spoil
from trainer.tiny_runs import lasting, settings

BASE: dict[str, Any] = {
    "recipe": "float32/float32", "steps": 4, "batch_size": 5, "gradient_accumulation_steps": 5, "gauges_every": 2,
}  # fmt: skip


def train_here(rank: int, place: Path, runs: dict[Path, dict[str, Any]]) -> list[Any]:
    """One rank of some trainings; what it said, or why it was refused, or what it found corrupt."""
    outcomes: list[Any] = []
    for out, changes in runs.items():
        stream = io.StringIO()
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(stream),
            contextlib.redirect_stderr(stream),
        ):
            warnings.simplefilter("ignore")
            try:
                if (out / "run.toml").exists():
                    loop.resume(out)
                else:
                    loop.train(settings(place, out, **changes))
                outcome: Any = stream.getvalue()
            except CorruptionError as error:
                outcome = error.message, error.rank, error.tensor
            except NarrowgaugeError as error:
                outcome = f"{stream.getvalue()}{error}"
        outcomes.append(outcome)
    return outcomes


@pytest.fixture(scope="module")
def alone(place: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """One process."""
    return read_run(loop.train(settings(place, tmp_path_factory.mktemp("alone") / "run", **BASE)))


VERIFIED = {
    **BASE, "steps": 12, "batch_size": 4, "gradient_accumulation_steps": 4, "checkpoint_every": 2, "gauges_every": 3,
    "eval_every": 4, "shard": "none",
}  # fmt: skip


def train_twice(rank: int, place: Path, folder: Path) -> list[Any]:
    """One rank of a training, and of one in which a bit of a second moment of rank 1 flips after
    step 5.
    """
    outcomes = train_here(rank, place, {folder / "run": BASE})
    true_batch = Session.batch

    def batch(self: Session) -> list[torch.Tensor]:
        if (rank, self.step) == (1, 5):
            tensors = kept_tensors(self.optimizer)
            tensor = next(tensor for name, tensor, _ in tensors if name.startswith("exp_avg_sq of"))
            tensor.data.view(-1).view(torch.int32)[5] ^= 1 << 30
        return true_batch(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Session, "batch", batch)
        flipped = {folder / "flipped": {**VERIFIED, "checkpoint_every": 4}}
        return outcomes + train_here(rank, place, flipped)


@pytest.fixture(scope="module")
def of_three(place: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """The folder of both trainings, and their outcomes on each of three ranks."""
    folder = tmp_path_factory.mktemp("three")
    return folder, run_ranks(train_twice, 3, folder / "ranks", place, folder)


def test_ranks_make_one_run_and_one_rank_speaks(
    alone: Run, of_three: tuple[Path, list[Any]]
) -> None:
    folder, outputs = of_three
    run = read_run(folder / "run")
    assert [row["step"] for row in run.steps] == [1, 2, 3, 4]
    assert run.run["machine"]["ranks"] == 3
    for row in run.steps:
        assert 0 <= row["wait_seconds"] < row["communication_seconds"] < row["seconds"]
    assert "communication_seconds" not in alone.steps[0]
    assert [row["batch_crc"] for row in run.steps] == [row["batch_crc"] for row in alone.steps]
    for column in ("loss", "grad_norm"):
        values = [row[column] for row in run.steps]
        assert values == pytest.approx([row[column] for row in alone.steps], rel=1e-6)
    assert run.evals[-1]["val_loss"] == pytest.approx(alone.evals[-1]["val_loss"], rel=1e-6)
    assert [row["step"] for row in run.gauges] == [2, 4] and run.summary is not None
    assert run.summary["edq"] == pytest.approx(1, abs=1e-5) and run.summary["bytes_per_param"] == 16
    assert outputs[0][0].count("validation loss") == 2
    assert all(silent == "" for silent, _ in outputs[1:])


def test_a_flipped_bit_ends_the_run_with_a_checkpoint_from_before(
    of_three: tuple[Path, list[Any]],
) -> None:
    folder, outputs = of_three
    first, *other_ranks = [corruption for _, corruption in outputs]
    message, rank, tensor = first
    assert other_ranks == [first] * 2
    assert rank == 1
    assert tensor.startswith("exp_avg_sq of")
    assert "rank 1" in message
    events = read_run(folder / "flipped").events
    (event,) = [event for event in events if event["what"] == "corruption"]
    assert (event["rank"], event["tensor"]) == (1, tensor)
    assert 5 <= event["step"] <= 9
    saved = sorted(
        int(place.name.partition("-")[2])
        for place in (folder / "flipped" / "checkpoints").glob("step-*")
    )
    assert saved and saved[-1] <= 5


def train_in_three_ways(rank: int, place: Path, folder: Path, stale: Path) -> str:
    """One rank of two trainings with checkpoints or none, of one whose third batch is not finite on
    the second rank alone, and of one whose token map is its machine's own: return its refusal.
    """
    train_here(
        rank, place, {folder / f"every {n}": {**VERIFIED, "checkpoint_every": n} for n in (0, 2)}
    )
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            spoil(patch, {2}, lambda loss: loss * math.nan)
        train_here(rank, place, {folder / "spoilt": BASE})
    true_open = session.open_data
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(session, "open_data", lambda folder, *more: true_open(stale, *more))
        return train_here(rank, place, {folder / "refused": BASE})[0]


def test_two_ranks_verify_without_a_changed_bit_skip_together_and_want_the_same_tokens(
    place: Path, tmp_path: Path
) -> None:
    stale = Path(shutil.copytree(place / "tokens", tmp_path / "stale"))
    content = (stale / "tokens.bin").read_bytes()
    (stale / "tokens.bin").write_bytes(content[2:] + content[:2])
    messages = run_ranks(train_in_three_ways, 2, tmp_path / "ranks", place, tmp_path, stale)
    assert "rank 1 has tokens = " in messages[0] and messages[0] == messages[1]
    assert not (tmp_path / "refused").exists()
    skipped = [row["skipped"] for row in read_run(tmp_path / "spoilt").steps]
    assert skipped == [False, False, True, False]
    plain, verified = (read_run(tmp_path / f"every {n}") for n in (0, 2))
    assert [lasting(row) for row in plain.steps] == [lasting(row) for row in verified.steps]
    histograms = [[row["histograms"] for row in run.gauges] for run in (plain, verified)]
    assert histograms[0] == histograms[1]
    assert len(plain.steps) == 12 and {name for row in plain.steps for name in row} <= STEP.keys()
