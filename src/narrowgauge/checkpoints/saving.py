"""Checkpoints of a run: one folder per step, written atomically during training and verified by checksums.

A checkpoint is written to a temporary folder, flushed to the disk and then renamed; older ones are removed only after that. A
killed process, a full disk or a power failure leaves the last good checkpoint intact. A checkpoint whose bytes do not match its
manifest is reported and skipped, never loaded. Nothing is pickled, so reading a checkpoint executes no code. The files in the
folder are those of :mod:`narrowgauge.checkpoints.checkpoint_files`, of one process or of many ranks; either reads both.

:class:`Saver` copies the tensors to the CPU before ``save`` returns, so that a checkpoint has the bits of its step, however long
it takes to write; another thread writes it while training goes on. The next save, and the end of a run, wait for the one in
flight. If it failed, all ranks raise its error there, together, and the earlier checkpoints are intact.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from narrowgauge.checkpoints.checkpoint_files import (
    MANIFEST,
    STATE,
    TENSORS,
    damage,
    load_whole,
    record_of,
    write_manifest,
    write_tensors,
)
from narrowgauge.distributed.ranks import ALONE, Ranks
from narrowgauge.errors import NarrowgaugeError, RecordError
from narrowgauge.numerics.shards import copied_to_cpu
from narrowgauge.runs.atomic_io import (
    TEMPORARY,
    disk_error,
    disk_errors,
    hidden_error,
    load_json,
    lock,
    sync_file,
    sync_folder,
    temporary_name,
)

_FOLDER = "checkpoints"
_NAME = re.compile(r"step-(\d{8,})")
_REPLACED = ".old-"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that matched its manifest when it was found; ``step`` counts optimizer steps."""

    path: Path
    step: int

    def load(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Its tensors, whole and on the CPU, and its state; the checksums are not verified again."""
        return _read(self.path)

    def state(self) -> dict[str, Any]:
        return _read_state(self.path)


def save_checkpoint(
    folder: Path, step: int, tensors: dict[str, torch.Tensor], state: dict[str, Any], keep: int = 2
) -> Path:
    """Write a checkpoint, then remove all but the newest ``keep``.

    Invariant: the old ones are untouched until the new one is complete on the disk; saving the same step again replaces it.

    Args:
        folder: the run folder; the checkpoint goes to ``checkpoints/`` in it.
        step: number of optimizer steps, not negative.
        tensors: of the dtypes of ``checkpoint_files.DTYPES``, on any device; what two names share is written twice.
        state: a JSON object. Floats, including NaN, round-trip exactly.
        keep: at least 1.
    Returns:
        The folder of the checkpoint.
    Raises:
        RecordError: the disk is full or not writable; nothing of the new checkpoint remains.
        ValueError: ``keep`` or ``step`` out of range.
    Cost: one write, a checksum of it, and four fsyncs.
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
    final, text = path_of(folder, step), json.dumps(state, indent=1)
    with disk_errors(final), new_checkpoint(final, keep) as temporary:
        _write(temporary, step, tensors, text)
    return final


def path_of(folder: Path, step: int) -> Path:
    return Path(folder) / _FOLDER / f"step-{step:08d}"


@contextlib.contextmanager
def new_checkpoint(final: Path, keep: int) -> Iterator[Path]:
    """A temporary folder, which becomes the checkpoint ``final`` when the block succeeds and is removed when it fails.

    Then all but the newest ``keep`` checkpoints are removed.
    """
    place = final.parent
    place.mkdir(parents=True, exist_ok=True)
    with _writing(place, wait=True):
        _remove_leftovers(place)
        temporary = temporary_name(final)
        try:
            temporary.mkdir()
            yield temporary
            _publish(temporary, final)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        for old in _listed(place)[keep:]:
            _remove(old.path)


def latest_checkpoint(folder: Path, on_damaged: Callable[[Path, str], None], ranks: Ranks = ALONE) -> Checkpoint | None:
    """The newest checkpoint of a run that matches its manifest, or ``None``; the ``ranks`` share the reading, and all call this.

    ``on_damaged`` is called with each newer checkpoint that does not match, and the reason.
    """
    place = Path(folder) / _FOLDER
    with disk_errors(place):
        for checkpoint in ranks.of_first(lambda: _found(place)):
            found = damage(checkpoint.path, ranks)
            if not found:
                return checkpoint
            on_damaged(checkpoint.path, found)
    return None


def checkpoint_before(folder: Path, step: int, on_damaged: Callable[[Path, str], None]) -> Checkpoint | None:
    """The newest checkpoint at or before a step that matches its manifest, or ``None``.

    Nothing is written or locked, so the run may be live. ``on_damaged`` is called with each newer checkpoint that does not match,
    or that its run removes meanwhile, and the reason.
    """
    place = Path(folder) / _FOLDER
    with disk_errors(place):
        listed = _listed(place) if place.is_dir() else []
    for checkpoint in listed:
        if checkpoint.step > step:
            continue
        try:
            found = damage(checkpoint.path)
        except OSError as error:
            found = error.strerror or str(error)
        if not found:
            return checkpoint
        on_damaged(checkpoint.path, found)
    return None


def _found(place: Path) -> list[Checkpoint]:
    """The checkpoints by name, newest first, after the leftovers of a killed process are removed."""
    if not place.is_dir():
        return []
    # A reader of a live run must not delete what its writer is writing.
    # Leftovers that cannot be removed, on a full or read-only disk, do no harm to a reader.
    with contextlib.suppress(OSError), _writing(place, wait=False) as held:
        if held:
            _remove_leftovers(place)
    return _listed(place)


def go_back(folder: Path, every: int, ranks: Ranks = ALONE) -> int | None:
    """Remove the checkpoints of interruptions since the last regular one, and return its step; ``None`` without a good one.

    An interrupted run and an uninterrupted one then roll back to the same step. If the regular checkpoint no longer exists,
    the newest one is kept. The first of the ``ranks`` does it; all call this. Regular checkpoints are ``every`` so many steps.
    """
    return ranks.of_first(lambda: _go_back(Path(folder), every))


def _go_back(folder: Path, every: int) -> int | None:
    newest = latest_checkpoint(folder, lambda path, reason: None)
    if newest is None:
        return None
    place = folder / _FOLDER
    with disk_errors(place), _writing(place, wait=True):
        good = [found for found in _listed(place) if not damage(found.path)]
        regular = next((found for found in good if found.step % every == 0), newest)
        for later in good:
            if later.step > regular.step:
                _remove(later.path)
    return regular.step


def load_checkpoint(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Read a checkpoint's tensors, on the CPU, and its state, after verifying every byte.

    Raises:
        RecordError: it is missing, torn, damaged, or from a newer version.
    """
    path = Path(path)
    with disk_errors(path):
        reason = damage(path)
    if reason:
        raise RecordError(f"Cannot load the checkpoint {path}: {reason}.", "Use an older one from the same folder.")
    return _read(path)


def _write(folder: Path, step: int, tensors: Mapping[str, torch.Tensor], state: str) -> None:
    record = write_tensors(folder / TENSORS, tensors)
    (folder / STATE).write_text(state, encoding="utf-8")
    write_manifest(folder, step, {TENSORS: record, STATE: record_of(folder / STATE)})
    for name in (STATE, MANIFEST):
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


def _read(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    with disk_errors(path), _safetensors_errors():
        tensors = load_whole(path)
    return tensors, _read_state(path)


def _read_state(path: Path) -> dict[str, Any]:
    with disk_errors(path):
        state: dict[str, Any] = load_json((path / STATE).read_bytes())
    return state


@contextlib.contextmanager
def _safetensors_errors() -> Iterator[None]:
    """Recover the operating system's error number, which safetensors reports only as text."""
    try:
        yield
    except SafetensorError as error:
        raise hidden_error(error) from error


# ── saving while the steps go on ────────────────────────────────────────────────────────────────────────────────────


class Saver:
    """Writes the checkpoints of a run, one at a time, while training goes on; ``ranks`` are a process group of their own."""

    def __init__(self, folder: Path, ranks: Ranks = ALONE) -> None:
        self._folder, self.ranks = folder, ranks
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._path = folder

    def save(self, step: int, tensors: Mapping[str, Any], state: Mapping[str, Any], keep: int = 2) -> Path:
        """Copy a checkpoint's tensors and start to write it, once the one before is written; returns its folder.

        Args:
            tensors: DTensors, and plain tensors that are the same on all ranks.
            state: a JSON object.
        Raises:
            RecordError: this checkpoint, or the one before, could not be written; on all ranks.
        Cost: a copy of what this rank holds, kept in the memory of the CPU until it is written.
        """
        self.wait()
        self._path = path_of(self._folder, step)
        write = (self._whole if self.ranks.size == 1 else self._shards)(step, tensors, state, keep)
        # A daemon: a rank that is told to leave must not wait for others that are gone.
        self._thread = threading.Thread(target=self._write, args=(write,), name="checkpoint", daemon=True)
        self._thread.start()
        return self._path

    def _whole(self, step: int, tensors: Mapping[str, Any], state: Mapping[str, Any], keep: int) -> Callable[[], Any]:
        """A function that writes a copy of all tensors."""
        copies = {name: copied_to_cpu(tensor) for name, tensor in tensors.items()}
        return partial(save_checkpoint, self._folder, step, copies, deepcopy(dict(state)), keep)

    def _shards(self, step: int, tensors: Mapping[str, Any], state: Mapping[str, Any], keep: int) -> Callable[[], Any]:
        """A function that writes a copy of this rank's shards, together with the others."""
        # Imported here: it takes a second, and one process needs none of it.
        from narrowgauge.checkpoints.sharded_checkpoints import ShardWriter, TakenCopy, save_shards

        copy = self.ranks.together(lambda: TakenCopy(tensors))
        writer = ShardWriter(partial(new_checkpoint, self._path, keep), step, json.dumps(state, indent=1))
        return partial(save_shards, copy, writer, self.ranks.group)

    def _write(self, write: Callable[[], Any]) -> None:
        try:
            write()
        except BaseException as error:  # raised by wait()
            self._error = error

    def leave(self, patience_seconds: float = 10.0) -> None:
        """Wait a while for the checkpoint in flight, before this process ends with an error: best effort.

        ``patience_seconds`` limits ranks, since those that write it with this one may be gone.
        """
        if self._thread is not None:
            self._thread.join(patience_seconds if self.ranks.size > 1 else None)

    def wait(self) -> None:
        """Wait for the checkpoint in flight, if there is one.

        Raises:
            RecordError: it could not be written; on all ranks.
        """
        if self._thread is None:
            return
        self._thread.join()
        self._thread, error, self._error = None, self._error, None
        if error is not None:
            raise save_error(self._path, error) from error

    def close(self) -> None:
        """Wait for the checkpoint in flight, as :meth:`wait`, and destroy the process group of the ranks; all call this."""
        self.wait()
        self.ranks.close()


def save_error(path: Path, error: BaseException) -> NarrowgaugeError:
    """The error of a failed save, in one line: that of the first rank that failed, which is named where there are others."""
    failures: Mapping[int, tuple[BaseException, Any]] = getattr(error, "failures", {})
    rank, cause = min(((rank, pair[0]) for rank, pair in failures.items()), default=(0, error))
    where = f" (rank {rank})" if failures else ""
    if isinstance(cause, OSError):
        found: NarrowgaugeError = disk_error(path, cause)
    elif isinstance(cause, NarrowgaugeError):
        found = cause
    else:
        found = RecordError(f"Cannot write {path}: {cause}.", "Older checkpoints are intact: narrowgauge resume.")
    return RecordError(f"{found.message.removesuffix('.')}{where}.", found.advice)
