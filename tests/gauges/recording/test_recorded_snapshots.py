"""A record holds the snapshots of its run: the laws find in the file what they found in the run."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import narrowgauge as ng
from corpus.rows import FAULTS, HEALTHY, Row
from narrowgauge.analysis.laws import Laws
from narrowgauge.analysis.log import reading_of, row_of
from narrowgauge.analysis.reading import Reading
from narrowgauge.analysis.snapshot import Facts, Snapshot, is_sampled, snapshots_of
from narrowgauge.runs.record import Run, read_rows

STEPS = 60
ROWS = {row.name: row for row in (*FAULTS, *HEALTHY)}
OF_TENSORS = {
    "step-factor", "weight-decay", "weight", "state", "step-count", "states-written",
    "step-order",
}  # fmt: skip
"""Kinds that compare tensors, which no record holds."""
LOOPS = {
    "never-zeroed": "gradients-kept",
    "norm-overflows": "zero-gradients",
    "frozen-parts-decay": "frozen-moves",
    "adapters-not-in-the-optimizer": "missing-parameters",
    "never-clipped": "clip-norm",
    "infinite-norm-passes": "nonfinite",
    "part-detached": "no-gradient",
    "old-backup-restored": "weights-written",
    "loss-scale-not-saved": "loss-scale-anew",
    "plain": "",
}
"""Loops of the corpus, each with a kind that a law reads of it."""


def train(row: Row, folder: Path) -> None:
    loop = row.loop(STEPS)
    limit = loop.settings.clip or None
    with ng.RunRecorder(folder, loop.model, loop.optimizer, max_grad_norm=limit) as recorder:
        one_step = loop.one_step

        def recorded() -> Any:
            value = one_step()
            scale = {} if loop.scaler is None else {"loss_scale": loop.scaler.get_scale()}
            recorder.step(value, **scale)
            return value

        loop.one_step = recorded  # type: ignore[method-assign]
        loop.run()


def of_laws(readings: list[Reading]) -> list[dict[str, Any]]:
    """Return the readings of the table of laws, as the rows of a record hold them."""
    rows = []
    for reading in readings:
        is_law = reading.what not in OF_TENSORS and "elements were changed" not in reading.advice
        if reading.severity != "note" and is_law:
            rows.append(row_of(reading_of(row_of(reading))))
    return sorted(rows, key=str)


def found(run: Run) -> list[Reading]:
    laws = Laws(Facts.of_run(run))
    readings: list[Reading] = []
    for now in snapshots_of(run):
        readings += laws.read(now)
    return readings


@pytest.mark.parametrize("name", LOOPS)
def test_the_laws_say_of_the_file_what_they_said_in_the_run(name: str, tmp_path: Path) -> None:
    row = ROWS.get(name, HEALTHY[0])
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        train(row, tmp_path / "run")
    run = ng.read_run(tmp_path / "run")
    told = of_laws([reading_of(event) for event in run.events])
    assert of_laws(found(run)) == told
    assert not LOOPS[name] or LOOPS[name] in [event["what"] for event in told]
    diagnosed = ng.diagnose(run).readings
    assert {event["what"] for event in told} <= {reading.what for reading in diagnosed} | {
        "nonfinite", "nonfinite-step", "divergence",
    }  # fmt: skip


def test_a_snapshot_is_its_row() -> None:
    full = Snapshot(3, modes=[True], norm=1.0, norms={"a": 1.0}, weights={"a": "moved"}, count=3.0)
    assert Snapshot.of_row(full.row()) == full
    assert Snapshot.of_row({"step": 4}) == Snapshot(4) and Snapshot(4).row() == {"step": 4}


def test_numbers_of_each_tensor_are_written_in_sampled_steps_alone(tmp_path: Path) -> None:
    """19 tensors as those of a transformer of two blocks, with long names."""
    torch.manual_seed(0)
    names = [f"model_layers_{k % 2}_self_attention_projection_{k}_weight" for k in range(19)]
    model = nn.ModuleDict({name: nn.Linear(8, 8, bias=False) for name in names})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def forward(x: torch.Tensor) -> torch.Tensor:
        for layer in model.values():
            x = x + layer(x)
        return x

    with ng.RunRecorder(tmp_path / "run", model, optimizer) as recorder:
        for _ in range(21):
            loss = forward(torch.randn(4, 8)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            recorder.step(loss)
    lines = (tmp_path / "run" / "snapshots.jsonl").read_bytes().splitlines()
    assert max(map(len, lines)) < 8000
    for line in lines:
        row = json.loads(line)
        assert ("norms" in row) is ("weights" in row) is is_sampled(row["step"])
        assert len(line) < 200 or is_sampled(row["step"])


def healthy(model: nn.Module, optimizer: Any, recorder: Any) -> None:
    loss = model(torch.randn(4, 8)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    recorder.step(loss)


def test_a_resumed_run_counts_on_from_its_record(tmp_path: Path) -> None:
    def without_gradient(model: nn.Module, optimizer: Any, recorder: Any) -> None:
        loss = 0 * model(torch.randn(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        recorder.step(loss)

    def take(steps: int, one_step: Callable[[Any, Any, Any], None], **options: Any) -> None:
        model = nn.Linear(8, 8)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        folder = tmp_path / "run"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            recorder = ng.RunRecorder(folder, model, optimizer, **options)
            if options:
                recorder.go_back(2)
            for _ in range(steps):
                one_step(model, optimizer, recorder)
            recorder.close(finished=False)

    take(2, without_gradient)
    take(3, without_gradient, resume=True)
    run = ng.read_run(tmp_path / "run")
    events = [event for event in run.events if event["what"] == "zero-gradients"]
    assert [(event["step"], event["value"]) for event in events] == [(3, 3)]
    notes: list[str] = []
    assert [row["step"] for row in read_rows(tmp_path / "run" / "snapshots.jsonl", notes)] == [
        1, 2, 3, 4, 5,
    ]  # fmt: skip
