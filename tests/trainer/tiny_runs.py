"""Trainings of a tiny model, for tests: their settings, the same as a command line, and when two
are the same run.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

import narrowgauge
from narrowgauge.cli.main import main
from narrowgauge.runs.record import Run
from narrowgauge.spec.notation import parse
from narrowgauge.trainer.config import TrainConfig

SHAPE = {
    "model_type": "llama", "vocab_size": 280, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64, "tie_word_embeddings": True,
}  # fmt: skip
TIMINGS = {
    "tokens_per_second", "seconds", "wall_seconds", "step_seconds", "loader_seconds", "communication_seconds", "wait_seconds",
    "kept", "still", "resumed",
}  # fmt: skip
"""Columns of the clock, and of what one process remembers."""
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": str(Path(narrowgauge.__file__).parents[1]),
    "OMP_NUM_THREADS": "1",
}


def settings(place: Path, out: Path, **changes: Any) -> TrainConfig:
    defaults: dict[str, Any] = {
        "steps": 8, "batch_size": 4, "sequence_length": 16, "lr": 3e-3, "eval_every": 3, "eval_sequences": 8,
        "checkpoint_every": 2, "audit_every": 2, "log_every": 1, "held_out": 0.2,
    }  # fmt: skip
    where = {"model": str(place / "model"), "data": str(place / "tokens"), "out": str(out)}
    named = {"recipe": parse(changes["recipe"])} if "recipe" in changes else {}
    return TrainConfig(**{**defaults, **where, **changes, **named})


def words_of(config: TrainConfig) -> list[str]:
    """The command line that says the same."""
    words = ["train"]
    for name, value in config.to_dict().items():
        words += [f"--{name.replace('_', '-')}", str(value)]
    return words


def call(*words: str) -> Result:
    return CliRunner().invoke(main, list(words), prog_name="narrowgauge")


def bytes_of(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def lasting(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in TIMINGS}


SITTINGS = {
    "start", "resume", "stop", "note", "checkpoint", "damaged-checkpoint", "changed-software", "changed-settings",
}  # fmt: skip
"""Events of how often a run was stopped and saved, and where."""


def lasting_events(run: Run) -> list[str]:
    """What happened in a run, however often it was stopped; a step that was taken again after a
    kill tells it again.
    """
    return list(dict.fromkeys(repr(event) for event in run.events if event["what"] not in SITTINGS))


def read_again(run: Run) -> list[str]:
    """What gauges read in any sitting."""
    return [repr(lasting(row)) for row in run.gauges]


def assert_same_run(first: Run, second: Run, *, gauges: bool = True) -> None:
    assert [lasting(row) for row in first.steps] == [lasting(row) for row in second.steps]
    assert [lasting(row) for row in first.evals] == [lasting(row) for row in second.evals]
    assert not gauges or read_again(first) == read_again(second)
    assert lasting_events(first) == lasting_events(second)
    assert lasting(first.summary) == {**lasting(second.summary)}


CASES: dict[str, dict[str, Any]] = {
    "word, accumulated": {"recipe": "bfloat16/word", "gradient_accumulation_steps": 2, "gauges_every": 4},
    "naive": {"recipe": "bfloat16/naive"},
    "autocast": {"recipe": "bfloat16/float32", "schedule": "linear", "warmup_steps": 3},
    "float8, accumulated": {
        "recipe": "float8-tensor/split", "gradient_accumulation_steps": 2,
    },
}  # fmt: skip
