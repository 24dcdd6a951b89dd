"""Checks of a run folder before PyTorch is loaded, so that a wrong path fails at once.

The command line calls them first. The functions behind it check again, for other callers and because a folder may change.
"""

from __future__ import annotations

from pathlib import Path

from narrowgauge.errors import RankError, RecordError
from narrowgauge.runs.archive import zip_file_of
from narrowgauge.runs.atomic_io import disk_errors
from narrowgauge.runs.record import Run, read_run
from narrowgauge.trainer.config import TrainConfig


def require_resumable(folder: Path) -> Run:
    """The record of a run that can be resumed.

    Args:
        folder: the run folder.
    Returns:
        The run.
    Raises:
        RecordError: no such run, or a damaged or finished one.
        NarrowgaugeError: settings that this version does not know.
    """
    run = _unpacked(folder)
    if run.summary is not None:
        raise RecordError(
            f"{folder} is finished: {run.summary['steps']} steps, validation loss {run.summary['val_loss']:.4f}.",
            "Start another run with narrowgauge train.",
        )
    TrainConfig.from_dict(run.config, str(folder / "run.toml"))
    return run


def require_trained(folder: Path) -> None:
    """Refuse a folder that is no run or holds no checkpoint; whether the checkpoint is intact is checked when it is read.

    Args:
        folder: the run folder.
    Raises:
        RecordError: no such run, or no checkpoint.
        NarrowgaugeError: settings that this version does not know.
    """
    TrainConfig.from_dict(_unpacked(folder).config, str(folder / "run.toml"))
    with disk_errors(folder):
        found = any((folder / "checkpoints").glob("step-*"))
    if not found:
        raise RecordError(
            f"{folder} holds no good checkpoint.", f"narrowgauge resume {folder} restarts it from step 0."
        )


def require_replayable(folder: Path, step: int) -> Run:
    """The record of a run that has a step which can be computed again.

    Args:
        folder: the run folder.
        step: number of the step.
    Returns:
        The run.
    Raises:
        RecordError: no such run or step, or one without its data.
    """
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
    """Refuse a number of ranks that does not fit the settings.

    Args:
        config: of the run.
        num_ranks: how many are to train together.
    Raises:
        RankError: more ranks than micro-batches, or replicas that do not divide the ranks.
    """
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
