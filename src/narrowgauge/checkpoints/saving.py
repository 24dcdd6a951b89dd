"""Save and find the checkpoints of a run: one folder per step, complete or absent, verified by
checksums.

::

    checkpoints/step-00000040/
        shard-00001-model-00001-of-00001.safetensors   tensors of the first rank, and so on
        state.json                                     step, run.toml, skipped steps, loss scale
        manifest.json                                  size and BLAKE2b-256 of the others, and its own BLAKE2b-256

A checkpoint is written to a temporary folder, synced to the disk and then renamed. Only then are
older ones removed. A killed process, a full disk or a power failure leaves the last good checkpoint
intact. A checkpoint that does not match its manifest is reported and skipped. Nothing is pickled.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from narrowgauge.distributed.ranks import ALONE, Ranks
from narrowgauge.errors import NarrowgaugeError, RecordError
from narrowgauge.runs.atomic_io import (
    TEMPORARY,
    digest,
    disk_error,
    disk_errors,
    load_json,
    sync,
    system_error,
)

SCHEMA_VERSION = 5
_FOLDER = "checkpoints"
_STATE = "state.json"
_MANIFEST = "manifest.json"
_PATIENCE_SECONDS = 10.0
_NAME = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that matched its manifest when it was found; ``step`` counts optimizer steps."""

    path: Path
    step: int

    def state(self) -> dict[str, Any]:
        """Read ``state.json``."""
        with disk_errors(self.path):
            state: dict[str, Any] = load_json((self.path / _STATE).read_bytes())
        return state


# ── finding ───────────────────────────────────────────────────────────────────────────────────────


def latest_checkpoint(folder: Path, ranks: Ranks = ALONE) -> tuple[Checkpoint | None, list[str]]:
    """Return the newest checkpoint of a run that matches its manifest, or ``None``; and what is
    wrong with each newer one.

    The ``ranks`` divide the reading; all call this.

    Raises:
        RecordError: another version has written the newest checkpoint.
    """
    damaged: list[str] = []
    for checkpoint in ranks.of_first(lambda: _listed(Path(folder) / _FOLDER)):
        with disk_errors(checkpoint.path):
            reason = damage(checkpoint.path, ranks)
        if not reason:
            return checkpoint, damaged
        damaged.append(f"{checkpoint.path.name} is damaged ({reason})")
    return None, damaged


def damage(path: Path, ranks: Ranks = ALONE) -> str:
    """Return why a checkpoint is damaged, or an empty string. The ``ranks`` divide the reading."""
    reason, files = ranks.of_first(lambda: _read_manifest(path))
    if reason:
        return reason
    names = list(files)[ranks.rank :: ranks.size]
    reasons = ranks.together(lambda: [_file_damage(path / name, **files[name]) for name in names])
    return next(filter(None, chain.from_iterable(ranks.gather(reasons))), "")


def _read_manifest(path: Path) -> tuple[str, dict[str, Any]]:
    """Return why a manifest cannot be used, and the size and checksum of each file in it."""
    if not (path / _MANIFEST).is_file():
        return "it has no manifest.json", {}
    try:
        manifest = load_json((path / _MANIFEST).read_bytes())
        if manifest["blake2b"] != _checksum(manifest):
            raise ValueError("it does not match its checksum")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return f"its manifest.json is damaged ({error})", {}
    if manifest["schema_version"] != SCHEMA_VERSION:
        raise RecordError(
            f"Cannot read {path} because it has schema {manifest['schema_version']}, not "
            f"{SCHEMA_VERSION}.",
            "Resume with the version that wrote it.",
        )
    folder = f"step-{manifest['step']:08d}"
    if path.name != folder:
        return f"its manifest is of {folder}", {}
    return "", manifest["files"]


def _checksum(manifest: dict[str, Any]) -> str:
    """Return the BLAKE2b-256 of a manifest without its checksum."""
    content = {name: value for name, value in manifest.items() if name != "blake2b"}
    text = json.dumps(content, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=32).hexdigest()


def _file_damage(file: Path, bytes: int, blake2b: str) -> str:
    if not file.is_file():
        return f"{file.name} is missing"
    if file.stat().st_size != bytes:
        return f"{file.name} has {file.stat().st_size:,} bytes of {bytes:,}"
    if digest(file) != blake2b:
        return f"{file.name} does not match its checksum"
    return ""


def _listed(place: Path) -> list[Checkpoint]:
    """Return the checkpoints by name, newest first."""
    checkpoints = []
    with disk_errors(place):
        for entry in place.glob("step-*"):
            match = _NAME.fullmatch(entry.name)
            if match is not None:
                checkpoints.append(Checkpoint(entry, int(match[1])))
    return sorted(checkpoints, key=lambda checkpoint: -checkpoint.step)


def _remove(path: Path) -> None:
    """Remove a checkpoint.

    Rename it first, so that a kill leaves no partial checkpoint under a valid name.
    """
    doomed = path.with_name(f"{TEMPORARY}old-{path.name}")
    shutil.rmtree(doomed, ignore_errors=True)
    os.rename(path, doomed)
    shutil.rmtree(doomed, ignore_errors=True)


# ── saving during later steps ─────────────────────────────────────────────────────────────────────


class Saver:
    """Write the checkpoints of a run, one at a time, during training.

    ``save`` copies the tensors to the CPU before it returns, so a checkpoint has the bits of its
    step. Another thread writes it. When ``has_ended`` on any rank, all ranks call ``wait``, which
    raises the error of a failed save.

    Args:
        folder: the run folder, on a disk that all ranks share. No other job may write to it.
        ranks: a separate process group.
    Attributes:
        resumed_from: the step of the checkpoint that the run goes on from. The next save removes
            newer ones: they are damaged.
    """

    def __init__(self, folder: Path, ranks: Ranks = ALONE) -> None:
        self._place = Path(folder) / _FOLDER
        self.ranks = ranks
        self.resumed_from: int | None = None
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._step = 0

    def save(
        self, step: int, tensors: Mapping[str, Any], state: Mapping[str, Any], keep: int = 2
    ) -> Path:
        """Copy a checkpoint's tensors, start to write it, and return its folder.

        Args:
            tensors: DTensors, and plain tensors that are the same on all ranks.
            state: a JSON object. Floats, including NaN, round-trip exactly.
            keep: number of newest checkpoints to keep, at least 1.
        Raises:
            RecordError: this checkpoint, or the one before, could not be written; on all ranks.
        """
        from narrowgauge.checkpoints import dcp_files

        self.wait()
        self._step = step
        final = self._folder_of(step)
        temporary = self._place / f"{TEMPORARY}{final.name}"
        limit = step if self.resumed_from is None else self.resumed_from
        self.resumed_from = None
        manifest = {"schema_version": SCHEMA_VERSION, "step": step}
        text = json.dumps(state, indent=1)
        self.ranks.of_first(lambda: self._clean(temporary))
        copy = self.ranks.together(lambda: dcp_files.TakenCopy(tensors))

        def write() -> None:
            try:
                dcp_files.write(copy, temporary, self.ranks)
                shards = temporary.glob(f"shard-{self.ranks.rank + 1:05d}-*")
                files = self.ranks.gather(self.ranks.together(lambda: _synced(shards)))
                self.ranks.of_first(lambda: _publish(temporary, final, text, manifest, files))
                self.ranks.of_first(lambda: _remove_old(final, keep, limit))
            except BaseException as error:  # raised by wait()
                self._error = error
                if self.ranks.is_first:
                    shutil.rmtree(temporary, ignore_errors=True)

        # A daemon thread: a rank that must exit cannot wait for ranks that are gone.
        self._thread = threading.Thread(target=write, name="checkpoint", daemon=True)
        self._thread.start()
        return final

    def _folder_of(self, step: int) -> Path:
        return self._place / f"step-{step:08d}"

    def _clean(self, temporary: Path) -> None:
        """Remove the remains of a killed process, and make the temporary folder."""
        with disk_errors(self._place):
            for remains in self._place.glob(f"{TEMPORARY}*"):
                shutil.rmtree(remains, ignore_errors=True)
            temporary.mkdir(parents=True, exist_ok=True)

    def leave(self) -> None:
        """Wait a while for the checkpoint in flight, before this process ends with an error.

        The other ranks may be gone.
        """
        if self._thread is not None:
            self._thread.join(_PATIENCE_SECONDS if self.ranks.size > 1 else None)

    @property
    def has_ended(self) -> bool:
        """Return whether a save has ended on this rank, and nobody has waited for it."""
        return self._thread is not None and not self._thread.is_alive()

    def wait(self) -> int | None:
        """Wait for the checkpoint in flight, and return its step; ``None`` without one.

        All ranks call it.

        Raises:
            RecordError: it could not be written; on all ranks.
        """
        if self._thread is None:
            return None
        self._thread.join()
        self._thread = None
        error = self._error
        self._error = None
        if error is not None:
            raise _save_error(self._folder_of(self._step), error) from error
        return self._step

    def close(self) -> None:
        """Wait as :meth:`wait`, and destroy the process group of the ranks; all call this."""
        self.wait()
        self.ranks.close()


def _synced(files: Iterable[Path]) -> dict[str, dict[str, Any]]:
    """Sync files to the disk, and return the size and checksum of each, by name."""
    entries = {}
    for file in files:
        sync(file)
        entries[file.name] = {"bytes": file.stat().st_size, "blake2b": digest(file)}
    return entries


def _publish(
    temporary: Path, final: Path, state: str, manifest: dict[str, Any], shards: list[dict[str, Any]]
) -> None:
    """Write the state, and the manifest with the files of every rank, and rename the folder."""
    files: dict[str, Any] = {}
    for rank, written in enumerate(shards):
        if not all((temporary / name).is_file() for name in written):
            raise RecordError(
                f"Cannot write {final} because the files of rank {rank} are not there.",
                "Put the run folder on a disk that all ranks share.",
            )
        files |= written
    (temporary / _STATE).write_text(state, encoding="utf-8")
    manifest = {**manifest, "files": files | _synced([temporary / _STATE])}
    manifest["blake2b"] = _checksum(manifest)
    (temporary / _MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    sync(temporary / _MANIFEST)
    sync(temporary)
    if final.exists():  # damaged, or equal: the run has returned to this step from an earlier one
        _remove(final)
    os.rename(temporary, final)
    sync(final.parent)


def _remove_old(final: Path, keep: int, limit: int) -> None:
    """Remove all checkpoints but ``keep``: ``final`` and the newest others.

    Others after step ``limit`` are damaged.
    """
    earlier = [checkpoint for checkpoint in _listed(final.parent) if checkpoint.path != final]
    retained = [checkpoint for checkpoint in earlier if checkpoint.step <= limit][: keep - 1]
    for checkpoint in earlier:
        if checkpoint not in retained:
            _remove(checkpoint.path)


def _save_error(path: Path, error: BaseException) -> NarrowgaugeError:
    """Return the error of a failed save, in one line.

    DCP gives the errors of all ranks: take the first.
    """
    failures: Mapping[int, tuple[Any, Any]] = getattr(error, "failures", {0: (error, None)})
    rank = min(failures)
    cause = failures[rank][0]
    if system_error(cause) is not None:
        cause = disk_error(path, cause)
    elif not isinstance(cause, NarrowgaugeError):
        advice = "Older checkpoints are intact: narrowgauge resume."
        cause = RecordError(f"Cannot write {path}: {cause}.", advice)
    where = f" (rank {rank})" if rank else ""
    return RecordError(
        f"{cause.message.removesuffix('.')}{where}.", cause.advice, status=cause.status
    )
