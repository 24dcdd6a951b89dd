"""The files of a checkpoint and their checksums.

::

    step-00000040/                            of one process: schema 1
        tensors.safetensors                   weights and optimizer state, in their packed form
        state.json                            everything else: step, seeds, schedule, counters
        manifest.json                         size and BLAKE2b-256 of the others

    step-00000040/                            of many ranks: schema 2
        tensors-00001-of-00004.safetensors    what the first rank held, and so on
        index.json                            shape and dtype of every tensor, and which file holds which part of it
        state.json, manifest.json             as above

A single process still writes schema 1, so that versions from before there were ranks read it. Nothing is pickled: PyTorch's
distributed checkpoints keep their index as a pickle, ``.metadata``, which executes code when it is read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from narrowgauge.distributed.ranks import ALONE, Ranks
from narrowgauge.runs.atomic_io import digest, load_json

SCHEMA_WHOLE, SCHEMA_SHARDED = 1, 2
TENSORS, INDEX, STATE, MANIFEST = "tensors.safetensors", "index.json", "state.json", "manifest.json"


@dataclass(frozen=True, slots=True)
class FileRecord:
    """What a manifest says of one file.

    Args:
        size: in bytes.
        checksum: BLAKE2b-256 in hexadecimal.
    """

    size: int
    checksum: str


def record_of(path: Path) -> FileRecord:
    """The record of a file as it is; one read of it."""
    return FileRecord(path.stat().st_size, digest(path))


def part_name(index: int, number: int) -> str:
    """The file of the ``index``-th of ``number`` ranks, from 0.

    Example:
        >>> part_name(0, 4)
        'tensors-00001-of-00004.safetensors'
    """
    return f"tensors-{index + 1:05d}-of-{number:05d}.safetensors"


def write_manifest(folder: Path, step: int, files: Mapping[str, FileRecord]) -> None:
    """Write ``manifest.json``; it is of many ranks if it has an index."""
    manifest = {
        "schema_version": SCHEMA_SHARDED if INDEX in files else SCHEMA_WHOLE,
        "step": step,
        "files": {name: {"bytes": record.size, "blake2b": record.checksum} for name, record in files.items()},
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")


def read_manifest(path: Path, *, is_renamed: bool = False) -> tuple[str, dict[str, FileRecord]]:
    """Why the manifest of a checkpoint cannot be used, or an empty string; and the files that it lists.

    Args:
        path: the folder of the checkpoint.
        is_renamed: whether it may have another name than its step's.
    Raises:
        OSError: it cannot be read.
    """
    if not path.is_dir():
        return "there is no such folder", {}
    if not (path / MANIFEST).is_file():
        return "it has no manifest.json", {}
    try:
        manifest = load_json((path / MANIFEST).read_bytes())
        if manifest["schema_version"] > SCHEMA_SHARDED:
            return f"it has schema {manifest['schema_version']}; this version reads up to {SCHEMA_SHARDED}", {}
        if not is_renamed and path.name != f"step-{manifest['step']:08d}":
            return f"its manifest is of step {manifest['step']}", {}
        return "", _files(manifest)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return f"its manifest.json is damaged ({error})", {}


def _files(manifest: Mapping[str, Any]) -> dict[str, FileRecord]:
    listed = manifest["files"]
    files = {name: FileRecord(listed[name]["bytes"], listed[name]["blake2b"]) for name in listed}
    for name in (TENSORS, STATE) if manifest["schema_version"] == SCHEMA_WHOLE else (INDEX, STATE):
        if name not in files:
            raise KeyError(name)
    if not all(type(record.size) is int and type(record.checksum) is str for record in files.values()):
        raise ValueError("sizes must be integers and checksums text")
    if any(Path(name).name != name for name in files):
        raise ValueError("a file is not in this folder")
    return files


def file_damage(file: Path, record: FileRecord) -> str:
    """Why a file is not what its record says, or an empty string; one read of it.

    Raises:
        OSError: it cannot be read.
    """
    if not file.is_file():
        return f"{file.name} is missing"
    if file.stat().st_size != record.size:
        return f"{file.name} has {file.stat().st_size:,} bytes of {record.size:,}"
    if digest(file) != record.checksum:
        return f"{file.name} does not match its checksum"
    return ""


def damage(path: Path, ranks: Ranks = ALONE, *, is_renamed: bool = False) -> str:
    """Why a checkpoint is damaged, or an empty string, the same on all ranks: one that some cannot read is none.

    Args:
        path: the folder of the checkpoint.
        ranks: which look together, each at some of the files; all call this.
        is_renamed: whether it may have another name than its step's.
    Raises:
        OSError: a file cannot be read by one of them.
    Cost: one read of all its files, by all ranks together.
    """
    reason, files = ranks.of_first(lambda: read_manifest(path, is_renamed=is_renamed))
    if reason:
        return reason
    mine = list(files)[ranks.rank :: ranks.size]
    found = ranks.together(lambda: next(filter(None, (file_damage(path / name, files[name]) for name in mine)), ""))
    return next(filter(None, ranks.gather(found)), "")
