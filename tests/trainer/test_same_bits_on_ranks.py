"""Whole runs on ranks: what the trainer adds to the steps has the bits of one process too. Steps are in ``equivalence/``.

Five leaves on one, two, three and four ranks: shares of two and three leaves, and ranks that repeat one and contribute nothing.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

from narrowgauge.runs.record import Run, read_run
from narrowgauge.trainer import loop
from ranks import run_ranks
from trainer.tiny_runs import lasting, settings

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "two sharded": (2, {}),
    "three sharded": (3, {}),
    "three whole": (3, {"shard": "none"}),
    "two replicas of two shards": (4, {"replicas": 2}),
}
FIVE = {"batch_size": 10, "gradient_accumulation_steps": 5, "steps": 4}


def train_here(rank: int, place: Path, out: Path, changes: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loop.train(settings(place, out, **changes))


@pytest.mark.parametrize(
    ("recipe", "layouts"),
    [
        ("float32/float32", ("two sharded", "three whole")),
        ("bfloat16/word", ("three sharded", "two replicas of two shards")),
    ],
)
def test_whole_runs_are_equal(
    recipe: str, layouts: tuple[str, ...], place: Path, tmp_path: Path, one_thread: None
) -> None:
    """Compare rows, evaluations and the summary, in every layout once."""
    changes = {**FIVE, "recipe": f"{recipe}/reproducible", "fingerprints_every": 2}
    train_here(0, place, tmp_path / "alone", changes)
    for layout in layouts:
        size, own = LAYOUTS[layout]
        run_ranks(train_here, size, tmp_path / "ranks", place, tmp_path / layout, {**changes, **own})
        assert lasting_bits(read_run(tmp_path / layout)) == lasting_bits(read_run(tmp_path / "alone"))


def lasting_bits(run: Run) -> list[Any]:
    """What does not depend on time, on memory, or on how the sums of audits were cut."""
    assert run.summary is not None
    steps = [(row["step"], row["loss"], row["grad_norm"], row["lr"], row["skipped"]) for row in run.steps]
    # Norms are sums in the order of the machine.
    prints = [{name: (entry[0], entry[2]) for name, entry in row["tensors"].items()} for row in run.fingerprints]
    assert len(prints) == 3 and prints[1]
    evals = [lasting(row) for row in run.evals]
    return [steps, prints, evals, run.summary["val_loss"], run.summary["weights_fingerprint"]]
