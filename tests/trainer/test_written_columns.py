"""Every column that a writer writes is in the schema, with its type: the trainer's rows, and those of your own loop."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import narrowgauge as ng
from narrowgauge.runs.schema import GAUGE, METRICS, NOT_FINITE, PYTHON_TYPES, TABLES, TENSOR_KINDS, Column
from narrowgauge.trainer import loop
from narrowgauge.trainer.experiment.harness import RunLog, compare
from narrowgauge.trainer.session import Session
from trainer.tiny_runs import settings

pytestmark = pytest.mark.usefixtures("one_thread")

RUNS: dict[str, dict[str, Any]] = {
    "loss scale, skip": {"recipe": "float16/master", "on_spike": "skip"},
    "delayed scales, rollback": {"recipe": "float8-delayed/word", "on_spike": "rollback"},
    "blocks, accumulated": {"recipe": "mxfp8/naive", "gradient_accumulation_steps": 2, "lr": 1e-6, "audit_every": 1},
}
ONLY_OWN_LOOPS = {("evals", "tokens_per_second"), ("evals", "peak_memory_bytes"), ("summary", "saturated")}
"""Columns that readers know and that only loops of users write."""

ONLY_RANKS = {
    "steps": {"communication_bytes", "communication_seconds", "wait_seconds", "ranks"},
    "events": {"rank"},
    "fingerprints": {"ranks", "parted"},
}
"""Columns of runs on several ranks."""

ONLY_RECORDER = {"steps": {"recomputed"}}
"""Columns of steps that ``ng.RunRecorder`` computes again; tests/analysis/diagnosis/test_computed_again.py reads them."""


def jump(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """A loss that is a spike, of the first batch that is number ``step``."""
    true_batch, left = Session.batch, [step]

    def batch(self: Session) -> list[torch.Tensor]:
        loss = self.__dict__.setdefault("true_loss", self.loss)
        scale = 20.0 if self.step + 1 in left else 1.0
        if scale > 1:
            left.clear()
        self.loss = lambda tokens: loss(tokens) * scale
        return true_batch(self)

    monkeypatch.setattr(Session, "batch", batch)


def own_loop(recipe: str, seed: int, log: RunLog) -> dict[str, Any]:
    torch.manual_seed(seed)
    model, optimizer = ng.prepare(torch.nn.Sequential(torch.nn.Linear(16, 4)), recipe, lr=1e-3, audit_every=1)
    log.watch(model, optimizer, every=2)
    for step in range(1, 5):
        loss = model(torch.ones(8, 16, dtype=torch.bfloat16)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        log.step({"loss": loss.detach(), "tokens": 8.0 * step, "grad_norm": None, "skipped": step == 3})
    log.eval({"val_loss": loss.detach(), "tokens_per_second": 1.0, "peak_memory_bytes": 1 << 20})
    log.event(ng.Event("note", 4, "words"))
    log.event(ng.Event("first_bad_value", 4, "words", detector="replay", phase="forward", operation="aten.log"))
    return {"saturated": 0, "model": "own"}


@pytest.fixture(scope="module")
def written(place: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Every row of all runs as it lies on the disk, by kind."""
    folder = tmp_path_factory.mktemp("written")
    for number, changes in enumerate(RUNS.values()):
        with pytest.MonkeyPatch.context() as patch:
            jump(patch, 6)
            loop.train(
                settings(
                    place,
                    folder / str(number),
                    **{"gauges_every": 2, "audit_every": 2, "fingerprints_every": 4, **changes},
                )
            )
    compare(own_loop, ["bfloat16/word"], out=folder / "own")
    rows: dict[str, list[dict[str, Any]]] = {kind: [] for kind in TABLES}
    for kind in TABLES:
        for file in sorted(folder.rglob(f"{kind}.json*")):
            lines = file.read_text().splitlines() if file.suffix == ".jsonl" else [file.read_text()]
            rows[kind] += map(json.loads, lines)
    return rows


def has_type(value: Any, column: Column) -> bool:
    # Not isinstance: True is an int, and no number.
    if type(value) in PYTHON_TYPES[column.type]:
        return True
    return (value is None and column.type != "step") or (column.type == "number" and value in NOT_FINITE)


@pytest.mark.parametrize("kind", TABLES)
def test_every_written_column_is_in_the_schema_with_its_type(
    kind: str, written: dict[str, list[dict[str, Any]]]
) -> None:
    assert written[kind]
    for row in written[kind]:
        for name, value in row.items():
            assert name in TABLES[kind], f"{name} of {kind} is not in the schema"
            assert has_type(value, TABLES[kind][name]), (
                f"{name} = {value!r} of {kind} is not a {TABLES[kind][name].type}"
            )


@pytest.mark.parametrize("kind", TABLES)
def test_every_column_of_the_schema_is_written(kind: str, written: dict[str, list[dict[str, Any]]]) -> None:
    seen = {name for row in written[kind] for name, value in row.items() if value is not None}
    rest = set(TABLES[kind]) - seen - ONLY_RANKS.get(kind, set()) - ONLY_RECORDER.get(kind, set())
    assert rest <= {"seconds"} if kind == "summary" else not rest
    assert {(kind, name) for name in seen} & ONLY_OWN_LOOPS == {pair for pair in ONLY_OWN_LOOPS if pair[0] == kind}


def test_every_list_of_gauges_holds_the_metrics_of_its_table(written: dict[str, list[dict[str, Any]]]) -> None:
    logits = {column.name for column in GAUGE["logits"].metrics}
    tables = set()
    for row in written["gauges"]:
        for table, metrics in METRICS.items():
            for values in row.get(table, {}).values():
                assert len(values) == len(metrics) and all(
                    has_type(value, column) for value, column in zip(values, metrics.values(), strict=True)
                )
                tables.add(table)
        assert set(row.get("logits", logits)) == logits
        assert {key.partition(":")[0] for key in row["tensors"]} | row["histograms"].keys() <= set(TENSOR_KINDS)
    assert tables == set(METRICS)
