"""A training on several ranks counts what it sends, and stops at a flipped bit with a checkpoint from before it."""

from __future__ import annotations

import contextlib
import io
import warnings
from pathlib import Path
from typing import Any

import torch

from narrowgauge.errors import CorruptionError
from narrowgauge.optim.loading import kept_tensors
from narrowgauge.runs.record import read_run
from narrowgauge.runs.schema import STEP
from narrowgauge.trainer import loop
from narrowgauge.trainer.session import Session
from ranks import run_ranks
from trainer.tiny_runs import lasting, settings

BASE: dict[str, Any] = {
    "recipe": "float32/float32", "steps": 12, "batch_size": 4, "gradient_accumulation_steps": 4, "checkpoint_every": 2,
    "gauges_every": 3, "eval_every": 4,
}  # fmt: skip


def train_here(rank: int, place: Path, out: Path, changes: dict[str, Any], fault: tuple[int, str, int] | None) -> Any:
    """One rank of a training in which a bit of a tensor of a rank flips after a step, as ``fault`` says."""
    true_batch = Session.batch

    def batch(self: Session) -> list[torch.Tensor]:
        if fault is not None and (rank, self.step) == (fault[0], fault[2]):
            tensor = next(tensor for name, tensor, _ in kept_tensors(self.optimizer) if name.startswith(fault[1]))
            tensor.data.view(-1).view(torch.int32)[5] ^= 1 << 30
        return true_batch(self)

    Session.batch = batch  # type: ignore[method-assign]
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        warnings.simplefilter("ignore")
        try:
            loop.train(settings(place, out, **{**BASE, **changes}))
        except CorruptionError as error:
            return error.message, error.rank, error.tensor
    return None


def test_verifying_changes_no_bit(place: Path, tmp_path: Path) -> None:
    for every in (0, 2):
        changes = {"shard": "none", "verify_every": every}
        assert run_ranks(train_here, 2, tmp_path / "ranks", place, tmp_path / str(every), changes, None) == [None, None]
    plain, verified = (read_run(tmp_path / every) for every in ("0", "2"))
    assert [lasting(row) for row in plain.steps] == [lasting(row) for row in verified.steps]
    assert [row["tensors"] for row in plain.gauges] == [row["tensors"] for row in verified.gauges]
    assert {name for row in plain.steps for name in row} <= STEP.keys()


def test_a_flipped_bit_ends_the_run_with_a_checkpoint_from_before(place: Path, tmp_path: Path) -> None:
    what, after = "exp_avg_sq of", 5
    changes = {"shard": "none", "verify_every": 4}
    first, *others = run_ranks(train_here, 3, tmp_path / "ranks", place, tmp_path / "run", changes, (1, what, after))
    assert others == [first] * 2
    message, rank, tensor = first
    assert rank == 1 and tensor.startswith(what) and "rank 1" in message
    run = read_run(tmp_path / "run")
    event = run.events[-1]
    assert (event["kind"], event["rank"], event["tensor"]) == ("corruption", 1, tensor)
    assert after <= event["step"] <= after + 4
    saved = sorted(int(folder.name.partition("-")[2]) for folder in (tmp_path / "run" / "checkpoints").glob("step-*"))
    assert saved and saved[-1] <= after
