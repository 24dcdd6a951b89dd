"""What a run folder must hold before a command uses it, and which settings have changed since the run began.

Every checkpoint holds the settings of its run. If ``run.toml`` has others, resuming would continue another run than the recorded
one, so it is refused unless the change is accepted. How a run is distributed over ranks may change at a resume. None of these
checks needs PyTorch, so the command line makes them first, and a wrong path fails at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from narrowgauge.errors import RankError, RecordError
from narrowgauge.runs.atomic_io import disk_errors
from narrowgauge.runs.lines import json_value, toml_value
from narrowgauge.runs.record import Run, read_run
from narrowgauge.runs.schema import short
from narrowgauge.trainer.config import OF_RANKS, TrainConfig

_NOT_OF_THE_RUN = ("out", "stop_after", "verify_every", *OF_RANKS)
FIXED = tuple(field.name for field in fields(TrainConfig) if field.name not in _NOT_OF_THE_RUN)
"""Settings that decide the numbers of a run."""


def changed_settings(
    before: Mapping[str, Any], now: Mapping[str, Any], names: Iterable[str]
) -> list[tuple[str, str, str]]:
    """Return settings that differ: name and both values as text.

    Example:
        >>> changed_settings({"lr": 0.003, "out": "a"}, {"lr": 0.007, "seed": 0, "out": "b"}, FIXED)
        [('lr', '0.003', '0.007')]
    """
    defaults = TrainConfig().to_dict()
    pairs = [(name, [json_value(toml_value(t.get(name, defaults.get(name)))) for t in (before, now)]) for name in names]
    texts = [
        (name, *("not set" if value is None else short(value) for value in pair))
        for name, pair in pairs
        if pair[0] != pair[1]
    ]
    return [(name, old, new) for name, old, new in texts]


def amended(recorded: Mapping[str, Any], present: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of ``run.toml`` with this process's ranks and the settings that it may change; all else as it was."""
    config, machine = dict(recorded.get("config", {})), dict(recorded.get("machine", {}))
    for table, name in [(config, name) for name in OF_RANKS] + [(machine, "ranks")]:
        table.pop(name, None)
    config |= {name: value for name, value in present["config"].items() if name in OF_RANKS}
    machine |= {"ranks": present["machine"]["ranks"]} if "ranks" in present.get("machine", {}) else {}
    return {**recorded, "config": config, "machine": machine}


def unfinished_run(folder: Path) -> Run:
    """Return the record of a run that is not finished; its settings are not parsed."""
    run = _run_of_trainer(folder)
    if run.summary is not None:
        raise RecordError(
            f"{folder} is finished: {run.summary['steps']} steps, validation loss {run.summary['val_loss']:.4f}.",
            "Start another run with narrowgauge train.",
        )
    return run


def require_trained(folder: Path) -> None:
    """Refuse a folder that is no run or holds no checkpoint; whether the checkpoint is intact is checked when it is read."""
    TrainConfig.from_dict(_run_of_trainer(folder).config, str(folder / "run.toml"))
    with disk_errors(folder):
        has_checkpoint = any((folder / "checkpoints").glob("step-*"))
    if not has_checkpoint:
        raise RecordError(
            f"{folder} holds no good checkpoint.", f"narrowgauge resume {folder} restarts it from step 0."
        )


def require_ranks(config: TrainConfig, num_ranks: int) -> None:
    """Refuse more ranks than micro-batches, and replicas that do not divide the ranks."""
    if num_ranks > config.gradient_accumulation_steps:
        raise RankError(
            f"{num_ranks} ranks were requested, and a step has {config.gradient_accumulation_steps} micro-batches; each rank "
            "needs one.",
            f"Set --gradient-accumulation-steps to {num_ranks} or more, or start fewer ranks.",
        )
    if num_ranks % config.replicas:
        raise RankError(
            f"{config.replicas} replicas were requested on {num_ranks} ranks, which they do not divide.",
            "Choose a divisor of the number of ranks.",
        )


def refuse_occupied(out: Path) -> None:
    """Raise unless ``out`` does not exist or is an empty folder."""
    with disk_errors(out):
        occupied = out.exists() and (not out.is_dir() or any(out.iterdir()))
    if occupied:
        what = "is not empty" if out.is_dir() else "is a file"
        raise RecordError(f"Cannot export to {out}: it exists and {what}.", "Name another folder, or remove this one.")


def _run_of_trainer(folder: Path) -> Run:
    run = read_run(folder)
    if "recorder" in run.run:
        raise RecordError(
            f"{folder} records a loop of its own, in {run.run['recorder'].get('program') or 'a program'}, which has the weights.",
            "Start that program again; its RunRecorder(resume=True) goes on with the record.",
        )
    return run
