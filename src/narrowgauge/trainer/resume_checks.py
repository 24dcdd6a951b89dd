"""What a run folder must hold before a command uses it, and what has changed since the run began.

The settings of a run are stored in its ``run.toml``, which anyone can edit, in its first record and in every checkpoint. If
they differ, resuming would continue another run than the recorded one, so it is refused with the name of the setting, unless
the change is accepted explicitly. How a run is distributed over ranks may change at a resume; ``run.toml`` then holds the new
settings.

None of these checks needs PyTorch, so the command line makes them first, and a wrong path fails at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from narrowgauge.errors import RankError, RecordError
from narrowgauge.runs.archive import zip_file_of
from narrowgauge.runs.atomic_io import disk_errors, load_json
from narrowgauge.runs.lines import json_value, restored, toml_value
from narrowgauge.runs.record import Run, read_run
from narrowgauge.runs.schema import short
from narrowgauge.runs.writer import require_rows, rows_lost
from narrowgauge.trainer.config import CHANGEABLE_ON_RESUME, TrainConfig

_NOT_OF_THE_RUN = ("out", "stop_after", "verify_every", *CHANGEABLE_ON_RESUME)
"""Settings that say where a run lies and when it pauses, and those that a resume may change."""


def accept(run: Run, present: TrainConfig, step: int, standing: Mapping[str, Any], is_accepted: bool) -> list[str]:
    """Changed settings and lost records that resuming from a checkpoint has to accept: sentences without a full stop.

    Args:
        present: the settings it would continue with, filled in.
        step: step of the checkpoint; 0 without one.
        standing: ``settings`` and ``rows`` stored in the checkpoint; older checkpoints lack them.
    Raises:
        RecordError: something has changed or is missing, and changes are not accepted.
    """
    changed = changed_settings(standing.get("settings") or run.began_with or {}, present.to_dict())
    if is_accepted:
        return [*describe_changes(changed, step), *rows_lost(run.path, step, standing.get("rows"))]
    if changed:
        changes = "; ".join(f"{name} is {now}, and the run started with {before}" for name, before, now in changed)
        raise RecordError(
            f"{run.path / 'run.toml'} was changed: {changes}.",
            f"Restore it, or accept the change: narrowgauge resume {run.path} --accept-changes",
        )
    require_rows(run.path, step, standing.get("rows"))
    return []


def describe_changes(changed: Iterable[tuple[str, str, str]], step: int) -> list[str]:
    """What has changed at a step, from name, value before and value now: sentences without a full stop."""
    return [f"{name} was {before} up to step {step} and is {now} from there on" for name, before, now in changed]


def changed_settings(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Settings that differ, by name, with both values as text. A setting that an older version lacked had its default.

    Example:
        >>> changed_settings({"lr": 0.003, "out": "a"}, {"lr": 0.007, "seed": 0, "out": "b"})
        [('lr', '0.003', '0.007')]
    """
    if not before:
        return []
    found, defaults = [], TrainConfig().to_dict()
    for field in fields(TrainConfig):
        if field.name in _NOT_OF_THE_RUN:
            continue
        values = [
            restored(json_value(toml_value(table.get(field.name, defaults.get(field.name))))) for table in (before, now)
        ]
        if values[0] != values[1]:
            texts = ["not set" if value is None else short(value) for value in values]
            found.append((field.name, texts[0], texts[1]))
    return found


def moved(recorded: Mapping[str, Any], present: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Settings that a resume may change and has changed, and the number of ranks: name, value before, value now, as text.

    Both are contents of ``run.toml``: the recorded one, and that of :func:`~narrowgauge.trainer.session.describe`.

    Example:
        >>> moved({"config": {"shard": "full"}, "machine": {"ranks": 2}}, {"config": {"shard": "none"}, "machine": {}})
        [('shard', "'full'", "'none'"), ('the number of ranks', '2', '1')]
    """
    defaults = TrainConfig().to_dict()
    values = [
        {
            **{
                name: short(run.get("config", {}).get(name, defaults.get(name, "not set")))
                for name in CHANGEABLE_ON_RESUME
            },
            "the number of ranks": str(run.get("machine", {}).get("ranks", 1)),
        }
        for run in (recorded, present)
    ]
    return [(name, before, values[1][name]) for name, before in values[0].items() if before != values[1][name]]


def with_present_ranks(recorded: Mapping[str, Any], present: Mapping[str, Any]) -> dict[str, Any]:
    """The content of ``run.toml`` with this process's ranks and the settings that it may change; all else as it was."""

    def replaced(table: str, names: tuple[str, ...]) -> dict[str, Any]:
        kept = {name: value for name, value in recorded.get(table, {}).items() if name not in names}
        return kept | {name: value for name, value in present.get(table, {}).items() if name in names}

    return {**recorded, "config": replaced("config", CHANGEABLE_ON_RESUME), "machine": replaced("machine", ("ranks",))}


# ── folders that can be resumed, exported or replayed ───────────────────────────────────────────────────────────────


def unfinished_run(folder: Path) -> Run:
    """The record of a run that is not finished; its settings are not parsed."""
    run = _unpacked(folder)
    if run.summary is not None:
        raise RecordError(
            f"{folder} is finished: {run.summary['steps']} steps, validation loss {run.summary['val_loss']:.4f}.",
            "Start another run with narrowgauge train.",
        )
    return run


def require_resumable(folder: Path) -> Run:
    """:func:`unfinished_run`, whose settings this version knows."""
    run = unfinished_run(folder)
    TrainConfig.from_dict(run.config, str(folder / "run.toml"))
    return run


def require_trained(folder: Path) -> None:
    """Refuse a folder that is no run or holds no checkpoint; whether the checkpoint is intact is checked when it is read."""
    TrainConfig.from_dict(_unpacked(folder).config, str(folder / "run.toml"))
    with disk_errors(folder):
        found = any((folder / "checkpoints").glob("step-*"))
    if not found:
        raise RecordError(
            f"{folder} holds no good checkpoint.", f"narrowgauge resume {folder} restarts it from step 0."
        )


QUANTIZED_BY = "narrowgauge"
"""``quant_method`` in the ``config.json`` of a quantized export."""


def quantization_of(folder: Path) -> dict[str, Any] | None:
    """What the ``config.json`` of a quantized export says of its codes; ``None`` for any other folder."""
    file = Path(folder) / "config.json"
    with disk_errors(folder):
        if not file.is_file():
            return None
        text = file.read_text(encoding="utf-8", errors="replace")
    try:
        config = load_json(text)
    except ValueError:
        return None
    said = config.get("quantization_config") if isinstance(config, dict) else None
    is_ours = (
        isinstance(said, dict) and said.get("quant_method") == QUANTIZED_BY and isinstance(said.get("compute"), str)
    )
    return said if is_ours else None


def require_sampled(folder: Path) -> None:
    """Refuse a folder that is neither a run with a checkpoint nor a quantized export."""
    if quantization_of(folder) is None:
        require_trained(folder)


def require_replayable(folder: Path, step: int) -> Run:
    """The record of a run that has its data and a step which can be computed again."""
    run = read_run(folder)
    if run.is_foreign or "recorder" in run.run:
        raise RecordError(
            f"{folder} is the record of another program's loop, which has the model and the data.",
            "A replay needs a run of narrowgauge train.",
        )
    if zip_file_of(folder) is not None:
        raise RecordError(
            f"{folder} is in a zip file, which holds neither data nor checkpoints.",
            "Name the run folder that was packed.",
        )
    last = run.steps[-1]["step"] if run.steps else 0
    if not 1 <= step <= last:
        raise RecordError(
            f"step {step} of {folder} was requested, and its record holds {f'steps 1 to {last}' if last else 'no step'}.",
            "Name one of its steps." if last else "Train it first.",
        )
    with disk_errors(folder):
        is_there = (folder / "data" / "data.json").is_file()
    if not is_there:
        raise RecordError(
            f"{folder} holds no data, from which its steps could be computed again.", "Restore its folder data/."
        )
    return run


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


def _unpacked(folder: Path) -> Run:
    """The run in a folder; one in a zip file is refused, and one that the trainer cannot continue."""
    run = read_run(folder)
    if "recorder" in run.run:
        raise RecordError(
            f"{folder} records a loop of its own, in {run.run['recorder'].get('program') or 'a program'}, which has the weights.",
            "Start that program again; its RunRecorder(resume=True) goes on with the record.",
        )
    if zip_file_of(folder) is not None:
        raise RecordError(
            f"{folder} is in a zip file, which holds no checkpoints.", "Name the run folder that was packed."
        )
    return run


def refuse_occupied(out: Path) -> None:
    """Raise unless ``out`` does not exist or is an empty folder."""
    with disk_errors(out):
        occupied = out.exists() and (not out.is_dir() or any(out.iterdir()))
    if occupied:
        what = "is not empty" if out.is_dir() else "is a file"
        raise RecordError(f"Cannot export to {out}: it exists and {what}.", "Name another folder, or remove this one.")
