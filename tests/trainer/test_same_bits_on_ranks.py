"""The law of order-invariant reductions: losses, gradient norms, weights and moments have equal bits on any number of ranks.

Five leaves on one, two, three and four ranks: shares of two and three leaves, and ranks that repeat one and contribute nothing.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from narrowgauge.distributed.sharding import fingerprint_whole
from narrowgauge.runs.record import Run, read_run
from narrowgauge.trainer import loop
from narrowgauge.trainer.data.dataset import open_data, prepare_data
from narrowgauge.trainer.session import build
from narrowgauge.trainer.step import evaluate, train_step
from ranks import run_ranks
from trainer.tiny_runs import SHAPE, lasting, settings

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {  # the first one has every case
    "two sharded": (2, {}),
    "three sharded": (3, {}),
    "three whole": (3, {"shard": "none"}),
    "two replicas of two shards": (4, {"replicas": 2}),
}
FIVE = {"batch_size": 10, "gradient_accumulation_steps": 5, "steps": 4}
CASES: dict[str, dict[str, Any]] = {
    "autocast": {"recipe": "bfloat16/float32"},
    "delayed scales": {"recipe": "float8-delayed/split"},
    "stochastic casts": {"recipe": "int8-row/compact"},
    "blocks": {"recipe": "mxfp8/states8"},
    "rotated blocks": {"recipe": "mxfp4/word"},
    "scaled loss": {"recipe": "float16/master"},
    "expansions": {"recipe": "float8/collage-plus"},
    "compensated": {"recipe": "bfloat16/kahan"},
    "unit scaled": {"recipe": "unit/word", "lr": 0.1},
    "propagated scales": {"recipe": "scalify/split8"},
    "checkpointed": {"recipe": "bfloat16/naive", "activation_checkpointing": True},
    "one leaf each": {"recipe": "bfloat16/exact", "batch_size": 4, "gradient_accumulation_steps": 4},
    "stochastic": {"recipe": "bfloat16/stochastic"},
}


FEWER = ("delayed scales", "stochastic casts", "scaled loss", "expansions", "one leaf each")
"""Of layouts that differ from the first in how rows are shared out and sums are exchanged alone."""


def learn(place: Path, data: Path, case: str, layout: dict[str, Any]) -> list[Any]:
    """Losses, norms, the validation loss, and fingerprints of weights and moments."""
    given = {**FIVE, **CASES[case], **layout}
    config = settings(place, data, **{**given, "recipe": f"{given['recipe']}/reproducible"})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        session = build(config.filled(), data, open_data(data))
        rows = [train_step(session) for _ in range(3)]
        found: list[Any] = [(row["loss"], row["grad_norm"], row["skipped"], row.get("saturated")) for row in rows]
        optimizer = session.optimizer
        for name in ("weight", "exp_avg", "exp_avg_sq"):
            found.append(fingerprint_whole({n: optimizer.stored(p, name) for n, p in session.named_parameters()}))
        return [*found, evaluate(session)]


def learn_here(rank: int, place: Path, data: Path, layout: str) -> dict[str, list[Any]]:
    """One rank of the cases of a layout."""
    cases = CASES if layout == next(iter(LAYOUTS)) else FEWER
    return {case: learn(place, data, case, LAYOUTS[layout][1]) for case in cases}


@pytest.fixture(scope="module")
def data(place: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with prepared data."""
    folder = tmp_path_factory.mktemp("data") / "run"
    prepare_data(str(place / "text"), folder, vocab_size=SHAPE["vocab_size"], held_out=0.2)
    return folder


@pytest.fixture(scope="module")
def alone(place: Path, data: Path) -> dict[str, list[Any]]:
    """Every case on one process with one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    found = {case: learn(place, data, case, {}) for case in CASES}
    torch.set_num_threads(threads)
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_have_the_bits_of_one_process(
    layout: str, alone: dict[str, list[Any]], place: Path, data: Path, tmp_path: Path
) -> None:
    for result in run_ranks(learn_here, LAYOUTS[layout][0], tmp_path / "ranks", place, data, layout):
        assert result == {case: alone[case] for case in result}


def test_cases_differ_and_learn(alone: dict[str, list[Any]]) -> None:
    """Or equal bits would prove little."""
    assert len({found[3] for found in alone.values()}) == len(alone)
    assert all(not row[2] and row[0] > 0 for found in alone.values() for row in found[:3])


# ── whole runs ──────────────────────────────────────────────────────────────────────────────────────────────────────


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
    """What the loop adds to the steps: rows, evaluations, the summary. Every layout once, since the steps are compared above."""
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
