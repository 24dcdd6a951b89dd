"""Megatron-Core's distributed checkpoints (``torch_dist``): shards of global tensors in PyTorch's DCP files.

::

    metadata.json                      {"sharded_backend": "torch_dist", …}
    .metadata                          what each file holds: a pickle of DCP, read here with its own few classes alone
    __0_0.distcp …                     shards, each a torch.save of one tensor
    common.pt                          settings and the step count; newer versions keep them in the shards

A model's tensor has its name as key; the optimizer's has ``optimizer.state.KIND.`` before it. Layers of one kind share a key
and are stacked along a first dimension. ``fully_reshardable`` and ``fully_sharded_model_space`` are laid out so; before version
0.14 the optimizer's shards were flattened. ``dp_reshardable`` keeps the buckets of the run that wrote it and is refused.

Source: Megatron-LM at d98e8a6, ``core/optimizer/distrib_optimizer.py``, ``core/dist_checkpointing/strategies/torch.py``;
torch 2.13 ``distributed/checkpoint/filesystem.py``.
"""

from __future__ import annotations

import io
import itertools
import math
import pickle
import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from narrowgauge.checkpoints.conversion.files import UNREADABLE, Inert, load_pickle, unreadable
from narrowgauge.checkpoints.conversion.sharded import SEEN, WEIGHT, Fragment, Sharded, mapped, pickled
from narrowgauge.errors import DataError
from narrowgauge.runs.atomic_io import load_json
from narrowgauge.spec.storages import STATE_NAMES

_KINDS = {"fp32_param": WEIGHT, "param": WEIGHT, **{kind: kind for kind in STATE_NAMES}}
_STATE = re.compile(r"optimizer\.(?:\w+\.)?state\.(\w+)\.(.+)")
_BUCKET = re.compile(r"optimizer\.distributed\.dp_group_idx_\d+\.gbuf_idx")
_LAYERS = re.compile(r"(.*\blayers)\.(?!\d)(.+)")
# What a DCP index consists of.
_DCP = {
    "torch.distributed.checkpoint.metadata": (
        "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties",
        "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo", "_StoragePrefix"),
    "torch.distributed._shard.sharded_tensor.metadata": ("TensorProperties", "MEM_FORMAT_ENCODING"),
    "torch.distributed.checkpoint.planner": ("SavePlan",),
    "collections": ("OrderedDict",),
    "pathlib": ("PosixPath", "PurePosixPath"),
    "torch.serialization": ("_get_layout",),
    "torch": ("Size", "device"),
}  # fmt: skip


@dataclass(frozen=True)
class Shard:
    """A shard of a global tensor: where it begins and how large it is in each dimension, and its bytes."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    stored: Tensor


@dataclass(frozen=True)
class Global:
    shape: tuple[int, ...]
    dtype: torch.dtype
    shards: list[Shard]


class _Index(pickle.Unpickler):
    """Unpickles a DCP index with only the classes of such an index; nothing else is imported or called."""

    def find_class(self, module: str, name: str) -> Any:
        if module.partition(".")[0] == "megatron":
            return type(name, (Inert,), {})
        known = name in _DCP.get(module, ())
        if module == "torch" and isinstance(
            getattr(torch, name, None), (torch.dtype, torch.layout, torch.memory_format)
        ):
            known = True
        if not known:
            raise pickle.UnpicklingError(f"GLOBAL {module}.{name}")
        return super().find_class(module, name)


def is_megatron(path: Path) -> bool:
    """Whether a folder is a checkpoint of Megatron-Core, or contains one that its tracker file names."""
    place = _newest(path)
    return _is_flat(place) or ((place / "metadata.json").is_file() and (place / ".metadata").is_file())


def _is_flat(folder: Path) -> bool:
    """Whether a folder is in Megatron's older ``torch`` format."""
    return any(True for _ in folder.glob("mp_rank_*/model_optim_rng.pt"))


def _newest(path: Path) -> Path:
    tracker = path / "latest_checkpointed_iteration.txt"
    if not tracker.is_file():
        return path
    number = tracker.read_text(encoding="utf-8").strip()
    return path / (f"iter_{int(number):07d}" if number.isdigit() else number)


def open_megatron(path: Path, *, writable: bool = False) -> Sharded:
    """The fragments of a distributed checkpoint of any tensor, pipeline and data parallelism.

    Raises:
        DataError: an unreadable file, another backend, or an optimizer state in buckets.
    """
    folder = _newest(path)
    if _is_flat(folder):
        raise DataError(
            f"{folder} is in Megatron's torch format, whose distrib_optim.pt is flat buckets without names or places.",
            "Load it with --ckpt-format torch and --ckpt-convert-format torch_dist in Megatron.",
        )
    backend = load_json((folder / "metadata.json").read_bytes()).get("sharded_backend")
    if backend != "torch_dist":
        raise DataError(f"{folder} has the backend {backend!r}.", "Save it with --ckpt-format torch_dist.")
    tensors, objects = read_index(folder, writable=writable)
    if any(map(_BUCKET.match, tensors)):
        raise DataError(
            f"{folder} keeps the optimizer state in the buckets of the run that wrote it (dp_reshardable), which only that run "
            "can take apart.",
            "Save it with --dist-ckpt-optim-fully-reshardable.",
        )
    fragments = list(_fragments(tensors, folder))
    if odd := sorted({fragment.kind for fragment in fragments} - {*_KINDS.values(), SEEN}):
        raise DataError(
            f"{folder} keeps '{odd[0]}' of its optimizer.", "Only states of Adam and AdamW can be converted."
        )
    common = _common(folder, objects)
    has_state = any(fragment.kind in STATE_NAMES for fragment in fragments)
    left = ("settings and random states", "lr, betas, eps, weight_decay of the optimizer", "lr_scheduler")
    return Sharded("Megatron-Core", folder, fragments, _steps(common) if has_state else (), left_out=left)


def _fragments(tensors: Mapping[str, Global], where: object) -> Iterator[Fragment]:
    for key, found in tensors.items():
        state = _STATE.fullmatch(key)
        kind, name = (_KINDS.get(state.group(1), state.group(1)), state.group(2)) if state else (SEEN, key)
        if (
            not found.dtype.is_floating_point
            or not math.prod(found.shape)
            or (state is None and key.startswith(("optimizer", "rng")))
        ):
            continue
        model = tensors.get(name, found)
        for shard in found.shards:
            yield from _layers(name, kind, found, shard, model.shape, where)


def _layers(
    name: str, kind: str, found: Global, shard: Shard, shape: tuple[int, ...], where: object
) -> Iterator[Fragment]:
    """The fragments of one shard, one for each of the layers that are stacked in it."""
    stacked = _LAYERS.fullmatch(name)
    for corner, sizes, start, stored in _blocks(name, found, shard, shape, where):
        block = tuple(slice(low, low + size) for low, size in zip(corner, sizes, strict=True))
        if stacked is None:
            yield Fragment(name, kind, stored, shape, block, start, found.dtype)
            continue
        share = len(stored) // sizes[0]
        for number in range(sizes[0]):
            own = f"{stacked.group(1)}.{corner[0] + number}.{stacked.group(2)}"
            part = stored[number * share : (number + 1) * share]
            yield Fragment(own, kind, part, shape[1:], block[1:], start, found.dtype)


def _blocks(
    name: str, found: Global, shard: Shard, shape: tuple[int, ...], where: object
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int, Tensor]]:
    """Blocks of a parameter in one shard: their corner and sizes, where their values begin in them, and their bytes."""
    if found.shape == shape:
        yield shard.offsets, shard.sizes, 0, shard.stored
        return
    # Before 0.14, [parts of each dimension, values of one part].
    fits = len(found.shape) == len(shape) + 1
    if not fits or any(size % parts for size, parts in zip(shape, found.shape[:-1], strict=True)):
        raise DataError(
            f"'{name}' has shape {shape} in {where}, and its state {found.shape}.",
            "Give weights and state of one model.",
        )
    sizes = tuple(size // parts for size, parts in zip(shape, found.shape[:-1], strict=True))
    ranges = [range(low, low + count) for low, count in zip(shard.offsets[:-1], shard.sizes[:-1], strict=True)]
    share = shard.sizes[-1] * found.dtype.itemsize
    for number, place in enumerate(itertools.product(*ranges)):
        corner = tuple(index * size for index, size in zip(place, sizes, strict=True))
        yield corner, sizes, shard.offsets[-1], shard.stored[number * share : (number + 1) * share]


def _common(folder: Path, objects: Mapping[str, Tensor]) -> Any:
    """Settings and step counts, as plain values; classes of Megatron in them do nothing."""
    if (folder / "common.pt").is_file():
        return pickled(folder / "common.pt", writable=False)
    for key in sorted(objects):
        if key.startswith("common_state"):
            return _object(folder / ".metadata", objects[key])
    return {}


def _object(where: Path, content: Tensor) -> Any:
    """A pickle within a shard's file; only plain values and inert stand-ins are built."""
    try:
        return load_pickle(io.BytesIO(content.numpy().tobytes()))
    except UNREADABLE as error:
        raise unreadable(where, error) from error


def _steps(common: Any) -> Sequence[Any]:
    """Step counts of all groups of the optimizer, or else the number of iterations."""
    found = list(_named(common, "step"))
    return found or list(_named(common, "iteration"))


def _named(value: Any, name: str) -> Iterator[Any]:
    if isinstance(value, Mapping):
        if isinstance(value.get(name), (int, Tensor)):
            yield int(value[name])
        for part in value.values():
            yield from _named(part, name)
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _named(part, name)


def read_index(folder: Path, *, writable: bool) -> tuple[dict[str, Global], dict[str, Tensor]]:
    """The tensors of a DCP checkpoint, and the bytes of its other objects; ``writable`` shards write through to its files."""
    try:
        with open(folder / ".metadata", "rb") as file:
            index = _Index(file).load()
        files: dict[str, Tensor] = {}
        spans = {}
        for place, info in index.storage_data.items():
            whole = files.setdefault(info.relative_path, mapped(folder / info.relative_path, writable=writable))
            spans[(place.fqn, tuple(place.offset or ()))] = whole[info.offset : info.offset + info.length]
        tensors, objects = {}, {}
        for key, entry in index.state_dict_metadata.items():
            if not hasattr(entry, "chunks"):
                objects[key] = spans[(key, ())]
                continue
            dtype = entry.properties.dtype
            shards = []
            for chunk in entry.chunks:
                record = _record(spans[(key, tuple(chunk.offsets))], math.prod(chunk.sizes) * dtype.itemsize)
                shards.append(Shard(tuple(chunk.offsets), tuple(chunk.sizes), record))
            tensors[key] = Global(tuple(entry.size), dtype, shards)
    except (*UNREADABLE, zipfile.BadZipFile) as error:
        raise unreadable(folder / ".metadata", error) from error
    return tensors, objects


def _record(content: Tensor, num_bytes: int) -> Tensor:
    """The bytes of the one tensor in a ``torch.save`` file within a shard's file."""
    if not num_bytes:
        return content[:0]
    held = content.numpy()
    with zipfile.ZipFile(io.BytesIO(held.tobytes())) as archive:
        (info,) = (entry for entry in archive.infolist() if re.search(r"/data/\d+$", entry.filename))
    head = held[info.header_offset : info.header_offset + 30]
    begin = info.header_offset + 30 + int(head[26]) + 256 * int(head[27]) + int(head[28]) + 256 * int(head[29])
    if info.file_size != num_bytes or info.compress_type != zipfile.ZIP_STORED:
        raise ValueError(f"a shard holds {info.file_size} bytes, and {num_bytes} were expected")
    return content[begin : begin + num_bytes]
