"""Checkpoints: one folder per step, written atomically and verified by checksums.

::

    checkpoints/step-00000040/
        tensors.safetensors    weights and optimizer state, in their packed form
        state.json             everything else: step, seeds, schedule, counters
        manifest.json          size and BLAKE2b-256 of the other two

A checkpoint is written to a temporary folder, flushed to the disk and then renamed; older ones are removed only after that. A
killed process, a full disk or a power failure leaves the last good checkpoint intact. A checkpoint whose bytes do not match its
manifest is reported and skipped, never loaded. Nothing is pickled, so reading a checkpoint executes no code.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from narrowgauge.errors import RecordError
from narrowgauge.runs.atomic_io import (
    TEMPORARY,
    digest,
    disk_errors,
    hidden_error,
    load_json,
    lock,
    sync_file,
    sync_folder,
    temporary_name,
)

SCHEMA_VERSION = 1

_FOLDER = "checkpoints"
_NAME = re.compile(r"step-(\d{8,})")
_REPLACED = ".old-"
_TENSORS, _STATE, _MANIFEST = "tensors.safetensors", "state.json", "manifest.json"
_PARTS = (_TENSORS, _STATE)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that matched its manifest when it was found.

    Args:
        path: its folder.
        step: number of optimizer steps when it was written.
    """

    path: Path
    step: int

    def load(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Its tensors (on the CPU) and state, without verifying the checksums again."""
        return _read(self.path)


def save_checkpoint(
    folder: Path, step: int, tensors: dict[str, torch.Tensor], state: dict[str, Any], keep: int = 2
) -> Path:
    """Write a checkpoint, then remove all but the newest ``keep``.

    Invariant: the old ones are untouched until the new one is complete on the disk; saving the same step again replaces it.

    Args:
        folder: the run folder; the checkpoint goes to ``checkpoints/`` in it.
        step: number of optimizer steps, not negative.
        tensors: any dtypes and devices; two names must not share memory (tied weights: use one name).
        state: a JSON object. Floats, including NaN, round-trip exactly.
        keep: number of newest checkpoints to keep, at least 1.

    Returns:
        The folder of the checkpoint.

    Raises:
        RecordError: the disk is full or not writable; nothing of the new checkpoint remains.
        ValueError: ``keep`` or ``step`` out of range.
        RuntimeError: two tensors share memory (from safetensors, which names them).

    Cost: one write, one read from the page cache for the checksum, and three fsyncs.

    Example:
        >>> import tempfile
        >>> run = Path(tempfile.mkdtemp())
        >>> save_checkpoint(run, 40, {"w": torch.ones(2)}, {"seed": 1}).name
        'step-00000040'
        >>> load_checkpoint(run / "checkpoints" / "step-00000040")
        ({'w': tensor([1., 1.])}, {'seed': 1})
    """
    if keep < 1 or step < 0:
        raise ValueError(f"keep is {keep} and must be at least 1; step is {step} and must not be negative")
    place = Path(folder) / _FOLDER
    final = place / f"step-{step:08d}"
    text = json.dumps(state, indent=1)
    with disk_errors(final):
        place.mkdir(parents=True, exist_ok=True)
        with _writing(place, wait=True):
            _remove_leftovers(place)
            temporary = temporary_name(final)
            try:
                temporary.mkdir()
                _write(temporary, step, tensors, text)
                _publish(temporary, final)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
            for old in _listed(place)[keep:]:
                _remove(old.path)
    return final


def latest_checkpoint(folder: Path, on_damaged: Callable[[Path, str], None]) -> Checkpoint | None:
    """The newest checkpoint that matches its manifest.

    Args:
        folder: the run folder.
        on_damaged: called with each newer checkpoint that does not match, and the reason.

    Returns:
        The checkpoint, or ``None`` if there is no good one.

    Cost: one read of each checkpoint that is checked.
    """
    place = Path(folder) / _FOLDER
    if not place.is_dir():
        return None
    with disk_errors(place):
        # A reader of a live run must not delete what its writer is writing.
        # Leftovers that cannot be removed, on a full or read-only disk, do no harm to a reader.
        with contextlib.suppress(OSError), _writing(place, wait=False) as held:
            if held:
                _remove_leftovers(place)
        for checkpoint in _listed(place):
            damage = _damage(checkpoint.path)
            if not damage:
                return checkpoint
            on_damaged(checkpoint.path, damage)
    return None


def go_back(folder: Path, every: int) -> int | None:
    """Remove the checkpoints of interruptions since the last regular one, and return its step.

    An interrupted run and an uninterrupted one then roll back to the same step.

    Args:
        folder: the run folder.
        every: number of steps between regular checkpoints.

    Returns:
        The step of the checkpoint to roll back to, or ``None`` without a good one. If the regular one no longer exists,
        the newest one.
    """
    newest = latest_checkpoint(folder, lambda path, reason: None)
    if newest is None:
        return None
    place = Path(folder) / _FOLDER
    with disk_errors(place), _writing(place, wait=True):
        good = [found for found in _listed(place) if not _damage(found.path)]
        regular = next((found for found in good if found.step % every == 0), newest)
        for later in good:
            if later.step > regular.step:
                _remove(later.path)
    return regular.step


def load_checkpoint(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Read a checkpoint after verifying every byte.

    Args:
        path: the folder of one checkpoint.

    Returns:
        Its tensors, on the CPU, and its state.

    Raises:
        RecordError: it is missing, torn, damaged, or from a newer version.
    """
    path = Path(path)
    with disk_errors(path):
        damage = _damage(path)
    if damage:
        raise RecordError(f"Cannot load the checkpoint {path}: {damage}.", "Use an older one from the same folder.")
    return _read(path)


def _write(folder: Path, step: int, tensors: dict[str, torch.Tensor], state: str) -> None:
    with _safetensors_errors():
        save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, folder / _TENSORS)
    (folder / _STATE).write_text(state, encoding="utf-8")
    files = {name: {"bytes": (folder / name).stat().st_size, "blake2b": digest(folder / name)} for name in _PARTS}
    manifest = {"schema_version": SCHEMA_VERSION, "step": step, "files": files}
    (folder / _MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    for name in (*files, _MANIFEST):
        sync_file(folder / name)
    sync_folder(folder)


def _publish(temporary: Path, final: Path) -> None:
    """Rename the finished folder. An older one of that name is moved aside, and restored if the process dies in between."""
    aside = final.with_name(f"{_REPLACED}{final.name}")
    if final.exists():
        os.rename(final, aside)
    os.rename(temporary, final)
    sync_folder(final.parent)
    shutil.rmtree(aside, ignore_errors=True)


def _remove(path: Path) -> None:
    """Rename first, so that a kill in between leaves no partial checkpoint under a valid name."""
    doomed = temporary_name(path)
    os.rename(path, doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def _remove_leftovers(place: Path) -> None:
    for entry in list(place.iterdir()):
        if entry.name.startswith(_REPLACED):
            final = place / entry.name.removeprefix(_REPLACED)
            if not final.exists():
                os.rename(entry, final)
        if entry.name.startswith((TEMPORARY, _REPLACED)):
            shutil.rmtree(entry, ignore_errors=True)


@contextlib.contextmanager
def _writing(place: Path, *, wait: bool) -> Iterator[bool]:
    """Hold the lock of the folder; yields whether this process holds it."""
    descriptor = os.open(place / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        yield lock(descriptor, wait=wait)
    finally:
        os.close(descriptor)


def _listed(place: Path) -> list[Checkpoint]:
    """The checkpoints by name, newest first."""
    names = ((entry, _NAME.fullmatch(entry.name)) for entry in place.iterdir())
    found = [Checkpoint(entry, int(match[1])) for entry, match in names if match]
    return sorted(found, key=lambda checkpoint: -checkpoint.step)


def _damage(path: Path) -> str:
    """Why a checkpoint is damaged, or an empty string."""
    if not path.is_dir():
        return "there is no such folder"
    if not (path / _MANIFEST).is_file():
        return "it has no manifest.json"
    try:
        manifest = load_json((path / _MANIFEST).read_bytes())
        if manifest["schema_version"] > SCHEMA_VERSION:
            return f"it has schema {manifest['schema_version']}; this version reads up to {SCHEMA_VERSION}"
        if path.name != f"step-{manifest['step']:08d}":
            return f"its manifest is of step {manifest['step']}"
        expected = {name: (manifest["files"][name]["bytes"], manifest["files"][name]["blake2b"]) for name in _PARTS}
        if not all(type(size) is int and type(checksum) is str for size, checksum in expected.values()):
            raise ValueError("sizes must be integers and checksums text")
    except (ValueError, KeyError, TypeError) as error:
        return f"its manifest.json is damaged ({error})"
    for name, (size, checksum) in expected.items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != size:
            return f"{name} has {file.stat().st_size:,} bytes of {size:,}"
        if digest(file) != checksum:
            return f"{name} does not match its checksum"
    return ""


def _read(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    with disk_errors(path), _safetensors_errors():
        tensors = load_file(path / _TENSORS)
        state: dict[str, Any] = load_json((path / _STATE).read_bytes())
    return tensors, state


@contextlib.contextmanager
def _safetensors_errors() -> Iterator[None]:
    """Recover the operating system's error number, which safetensors reports only as text."""
    try:
        yield
    except SafetensorError as error:
        raise hidden_error(error) from error
