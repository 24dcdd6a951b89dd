"""Checkpoints of many ranks, by PyTorch's distributed checkpoints (DCP) in files of our own.

DCP plans who writes what: every rank its own shard, and one of them what all ranks hold (replicas, small vectors). It carries an
error on one rank to all, and plans which parts of which files a rank needs when there are more ranks, or fewer. Only where the
bytes go is ours: DCP's own writer keeps its index as a pickle, has no checksums, and writes in place. Here each rank writes one
safetensors file into a folder that has a temporary name, syncs it and takes its checksum; the first rank then writes index and
manifest, and renames the folder. A checkpoint of many ranks is complete, or it does not exist.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    create_default_local_save_plan,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from narrowgauge.checkpoints.checkpoint_files import (
    DTYPES,
    INDEX,
    MANIFEST,
    STATE,
    FileRecord,
    SavedTensor,
    TensorFile,
    part_name,
    record_of,
    saved_tensors,
    write_manifest,
    write_tensors,
)
from narrowgauge.errors import RecordError
from narrowgauge.numerics.shards import copied_to_cpu
from narrowgauge.runs.atomic_io import sync_file, sync_folder


@dataclass(frozen=True, slots=True)
class _Written:
    """The file in which a rank put a part of a tensor, and its record."""

    file: str
    record: FileRecord


class ShardWriter(StorageWriter):
    """Writes one checkpoint; a context manager around one ``save``, which removes what a failure leaves.

    Args:
        new_folder: on the first rank: a context that makes a temporary folder, and gives it its name at the end.
        state: content of ``state.json``.
    """

    def __init__(self, new_folder: Callable[[], AbstractContextManager[Path]], step: int, state: str) -> None:
        self._new_folder, self._step, self._state = new_folder, step, state
        self._open = ExitStack()
        self._folder = Path()

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, *error: Any) -> None:
        self._open.__exit__(*error)

    def reset(self, checkpoint_id: object = None) -> None:
        """Nothing: a writer is for one checkpoint."""

    def set_up_storage_writer(self, is_coordinator: bool, *arguments: Any, **options: Any) -> None:
        """Nothing: the folder is made once all ranks have come."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On the first rank: make the folder, and tell every rank its file."""
        self._folder = self._open.enter_context(self._new_folder())
        number = len(plans)
        places = [(str(self._folder), part_name(index, number)) for index in range(number)]
        return [replace(plan, storage_data=place) for plan, place in zip(plans, places, strict=True)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """On every rank: write and sync its file."""
        folder, name = plan.storage_data
        tensors, offsets = {}, {}
        for item in plan.items:
            data = planner.resolve_data(item)
            assert isinstance(data, Tensor)
            tensors[item.index.fqn] = data
            offsets[item.index.fqn] = tuple(item.index.offset or ())
        written: Future[list[WriteResult]] = Future()
        if not tensors:
            written.set_result([])
            return written
        place = _Written(name, write_tensors(Path(folder, name), tensors, offsets))
        written.set_result([WriteResult(item.index, 0, place) for item in plan.items])
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the first rank, once all have written: index, state and manifest, then the rename.

        Raises:
            OSError: a rank's file is not visible here, or the disk refused.
        """
        files = {result.storage_data.file: result.storage_data.record for rank in results for result in rank}
        for name, record in files.items():
            if (size := (self._folder / name).stat().st_size) != record.size:
                raise OSError(f"{name} has {size:,} bytes here, and its rank wrote {record.size:,}")
        (self._folder / INDEX).write_text(json.dumps(_index(metadata, results)), encoding="utf-8")
        (self._folder / STATE).write_text(self._state, encoding="utf-8")
        own = {name: record_of(self._folder / name) for name in (STATE, INDEX)}
        write_manifest(self._folder, self._step, {**files, **own})
        for name in (*own, MANIFEST):
            sync_file(self._folder / name)
        sync_folder(self._folder)
        self._open.close()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: object) -> bool:
        """Never: a writer is made for one checkpoint."""
        return False


def _index(metadata: Metadata, results: Iterable[list[WriteResult]]) -> dict[str, Any]:
    """Every tensor's dtype, shape and parts: the file of each, where it begins, and its shape."""
    places = {(r.index.fqn, tuple(r.index.offset or ())): r.storage_data.file for rank in results for r in rank}
    index = {}
    for name, tensor in metadata.state_dict_metadata.items():
        assert isinstance(tensor, TensorStorageMetadata)
        index[name] = {
            "dtype": DTYPES[tensor.properties.dtype],
            "shape": list(tensor.size),
            "parts": [[places[name, tuple(c.offsets)], list(c.offsets), list(c.sizes)] for c in tensor.chunks],
        }
    return index


class ShardReader(StorageReader):
    """Reads a checkpoint of one process or many, whose checksums were verified; of each file only what is requested."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._files: dict[tuple[str, tuple[int, ...]], str] = {}

    def reset(self, checkpoint_id: object = None) -> None:
        """Nothing: a reader is for one checkpoint."""

    def read_metadata(self, *arguments: Any, **options: Any) -> Metadata:
        """What there is, as DCP describes it."""
        saved = saved_tensors(self._path)
        self._files = {(name, part.offsets): part.file for name, tensor in saved.items() for part in tensor.parts}
        return Metadata({name: _described(tensor) for name, tensor in saved.items()})

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *arguments: Any, **options: Any) -> None:
        """Nothing: the index has been read."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the parts that this rank needs, file by file."""
        by_file: dict[str, list[Any]] = {}
        for item in plan.items:
            by_file.setdefault(self._file(item.storage_index), []).append(item)
        for name, items in by_file.items():
            with TensorFile(self._path / name) as file:
                for item in items:
                    part = tuple(
                        slice(start, start + length)
                        for start, length in zip(item.storage_offsets, item.lengths, strict=True)
                    )
                    target = planner.resolve_tensor(item).detach()
                    target.copy_(file.read(item.storage_index.fqn, part))
                    planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _file(self, index: MetadataIndex) -> str:
        return self._files[index.fqn, tuple(index.offset or ())]

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: object) -> bool:
        """Never: a reader is made for one checkpoint."""
        return False


def _described(tensor: SavedTensor) -> TensorStorageMetadata:
    chunks = [ChunkStorageMetadata(torch.Size(part.offsets), torch.Size(part.shape)) for part in tensor.parts]
    return TensorStorageMetadata(TensorProperties(dtype=tensor.dtype), torch.Size(tensor.shape), chunks)


def load_into(path: Path, targets: Mapping[str, Tensor]) -> None:
    """Fill tensors from a checkpoint: each rank its own shards, whichever ranks wrote it. The checksums must have been verified.

    Ranks do not communicate, so they may load different tensors. Plain tensors are filled whole.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # each rank reads by itself, on purpose
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        load(dict(targets), storage_reader=ShardReader(path), planner=planner, no_dist=True)


class TakenCopy(DefaultSavePlanner):
    """What this rank holds of some tensors at this moment, copied to the CPU, and the plan to save it.

    Args:
        tensors: DTensors, and plain tensors that are the same on every rank.
    Raises:
        RecordError: a shard does not tile its whole, such as scales of rows whose matrix is cut along its columns.
    Cost: a copy of what this rank holds, until it is written.
    """

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        # Now: the DTensors themselves need not outlive this call, and their memory may be a device's.
        self._own_plan = create_default_local_save_plan(dict(tensors), is_coordinator=False)
        self._copies = {name: copied_to_cpu(tensor) for name, tensor in tensors.items()}
        for item in self._own_plan.items:
            planned = item.tensor_data.chunk.sizes if item.tensor_data is not None else None
            if planned != (own := self._copies[item.index.fqn].shape):
                raise RecordError(
                    f"'{item.index.fqn}' has the shape {tuple(own)} on a rank where its sharding has {tuple(planned or ())}: "
                    "it cannot be saved so that other ranks can load it.",
                    "Shard along rows, or choose a storage without scales of rows.",
                )

    def set_up_planner(self, *arguments: Any, storage_meta: Any = None, **options: Any) -> None:
        """Nothing: the copy was taken."""

    def create_local_plan(self) -> SavePlan:
        self.plan = self._own_plan
        return self._own_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self._copies[write_item.index.fqn]


def save_shards(copy: TakenCopy, writer: ShardWriter, group: Any) -> None:
    """Write a checkpoint together with all other ranks of a group.

    Args:
        group: one that can send objects from the CPU; nothing else uses it meanwhile.
    Raises:
        torch.distributed.checkpoint.CheckpointException: a rank failed, on all ranks; nothing of the checkpoint remains.
    """
    with writer:
        save({}, storage_writer=writer, planner=copy, process_group=group)
