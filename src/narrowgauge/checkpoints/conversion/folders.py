"""Run folders: reads a checkpoint of a run, and writes one as part of a new run.

::

    checkpoints/step-00000040/   read from one process or many ranks, written as by one; see checkpoints/checkpoint_files.py
    conversion.json              the report of the conversion
    run.toml, data/, …           where the source was a run: ``narrowgauge resume`` continues it

Every byte read is checked against the manifest. A new folder has a temporary name until it is complete.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from safetensors import SafetensorError
from torch import Tensor

from narrowgauge.checkpoints.checkpoint_files import (
    INDEX,
    MANIFEST,
    STATE,
    TENSORS,
    damage,
    load_whole,
    record_of,
    write_manifest,
    write_tensors,
)
from narrowgauge.checkpoints.conversion.conversion_report import Report
from narrowgauge.checkpoints.conversion.source import Source, matched, numbers_of
from narrowgauge.distributed.ranks import ALONE, Ranks
from narrowgauge.errors import RecordError
from narrowgauge.runs.atomic_io import (
    AGAIN,
    disk_error,
    disk_errors,
    hidden_error,
    load_json,
    sync_file,
    sync_folder,
    temporary_name,
)
from narrowgauge.runs.events import Event
from narrowgauge.runs.record import Run, read_run
from narrowgauge.runs.writer import RunWriter
from narrowgauge.spec.notation import parse_value
from narrowgauge.spec.recipes import Recipe

_REPORT = "conversion.json"
Value = TypeVar("Value")
_PLACE = "checkpoints"


def is_ours(path: Path) -> bool:
    """Whether a folder is a run, one of its checkpoints, or the result of a conversion."""
    return any((path / name).is_file() for name in ("run.toml", _REPORT, TENSORS, INDEX))


def locate(path: Path) -> tuple[Path, Path]:
    """The run folder and the checkpoint of ``path``: itself, or the newest one in it."""
    if (path / MANIFEST).is_file():
        return path.absolute().parent.parent, path
    found = sorted((path / _PLACE).glob("step-*"))
    if not found:
        raise RecordError(f"{path} contains no checkpoint.", "Give a run folder, or one of its checkpoints.")
    return path, found[-1]


def read_checkpoint(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and the state of a checkpoint, verified against its checksums."""
    require_intact(path, ALONE)
    with _readable(path):
        return load_whole(path), load_json((path / STATE).read_bytes())


def read_record(path: Path) -> dict[str, Any]:
    with _readable(path):
        record: dict[str, Any] = load_json((path / STATE).read_bytes())
    return record


def require_intact(path: Path, ranks: Ranks) -> None:
    """Verify a checkpoint against its checksums; ``ranks`` share the reading, and all of them call this."""
    with _readable(path):
        if reason := damage(path, ranks, is_renamed=True):
            raise ValueError(reason)


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        with disk_errors(path):
            yield
    except (ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise RecordError(
            f"Cannot read the checkpoint {path}: {error}.", "Give an older one of the same run."
        ) from error


def parted(tensors: Mapping[str, Value]) -> tuple[dict[str, Value], dict[str, dict[str, Value]]]:
    """Split a checkpoint's tensors, or anything under their names, into weights and optimizer states by parameter name."""
    weights: dict[str, Value] = {}
    states: dict[str, dict[str, Value]] = {}
    for key, value in tensors.items():
        kind, _, name = key.partition(".")
        if kind == "model":
            weights[name] = value
        elif kind == "optimizer":
            owner, _, plane = name.rpartition(".")
            states.setdefault(owner, {})[plane] = value
    return weights, states


def read_own(path: Path) -> Source:
    """The state of a run, of one of its checkpoints, or of an earlier conversion."""
    folder, checkpoint = locate(path)
    tensors, record = read_checkpoint(checkpoint)
    run = read_run(folder) if (folder / "run.toml").exists() else None
    policy = _policy(folder, run)
    weights, states = parted(tensors)
    numbers, others = numbers_of(weights)
    numbers = matched(numbers, states, checkpoint)
    others |= {key: value for key, value in tensors.items() if key.startswith("audit.")}
    storages = {name: policy.storage_of(name, value.ndim) for name, value in numbers.items()}
    return Source(policy.name, numbers, states, storages, others, record, run)


def _policy(folder: Path, run: Run | None) -> Recipe:
    try:
        value = run.config["recipe"] if run else load_json((folder / _REPORT).read_bytes())["policy"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RecordError(
            f"cannot find the recipe of the checkpoints in {folder} ({error}).",
            "Keep a checkpoint in the folder it was written to.",
        ) from error
    return parse_value(value, str(folder))


# ── writing ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A temporary folder, renamed to ``out`` when the block succeeds and removed when it fails."""
    temporary = temporary_name(out)
    absent = [place for place in out.parents if not place.exists()]
    with disk_errors(out, AGAIN):
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir()
            yield temporary
            _sync(temporary)
            if out.exists():
                out.rmdir()
            os.rename(temporary, out)
            sync_folder(out.parent)
        except BaseException as error:
            shutil.rmtree(temporary, ignore_errors=True)
            with suppress(OSError):
                for place in absent:
                    place.rmdir()
            if isinstance(error, SafetensorError):  # its text hides the system's error, such as a full disk
                raise disk_error(out, hidden_error(error), AGAIN) from error
            raise


def _sync(folder: Path) -> None:
    for entry in folder.iterdir():
        if entry.is_dir():
            _sync(entry)
        else:
            sync_file(entry)
    sync_folder(folder)


def write_checkpoint(folder: Path, step: int, tensors: Mapping[str, Tensor], record: Mapping[str, Any]) -> None:
    place = folder / _PLACE / f"step-{step:08d}"
    place.mkdir(parents=True)
    written = write_tensors(place / TENSORS, tensors)
    (place / STATE).write_text(json.dumps(record, indent=1), encoding="utf-8")
    write_manifest(place, step, {TENSORS: written, STATE: record_of(place / STATE)})


def write_report(folder: Path, report: Report, policy: Recipe) -> None:
    """Write ``conversion.json``: the report, and the recipe in full."""
    text = json.dumps({**report.row(), "policy": policy.to_dict()}, indent=1)
    (folder / _REPORT).write_text(text + "\n", encoding="utf-8")


def write_run(folder: Path, run: Run, report: Report, policy: Recipe) -> None:
    """Write the run's history up to the checkpoint, with the new recipe, so that the folder is a run."""
    config = {**run.config, "recipe": policy.to_value(), "out": report.out}
    if (run.path / "data").is_dir():
        shutil.copytree(run.path / "data", folder / "data", copy_function=_link)
    with RunWriter.create(folder, {**run.run, "config": config}, beside=os.listdir(folder)) as writer:
        for row in run.steps:
            if row["step"] <= report.step:
                writer.step(row)
        for row in run.evals:
            # The evaluation of the last step is the run's result, which the resumed run computes again.
            if row["step"] <= report.step and row["step"] < run.config.get("steps", math.inf):
                writer.eval(row)
        for row in run.events:
            writer.event(row)
        message = f"converted from {report.origin} to {report.recipe}; earlier steps are those of {report.source}"
        writer.event(Event("note", report.step, message))


def _link(source: str, target: str) -> None:
    """Hard-link a file of tokens, which never changes, or copy it where the file system has no links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
