"""nanotron's checkpoints: a safetensors file for every parameter and tensor-parallel rank, and torch.save files of the optimizer.

::

    checkpoint_metadata.json
    model/…/model_weight.safetensors                                           a whole parameter
    model/…/model_weight_pp-rank-0-of-1_tp-rank-0-of-2.safetensors             a shard, whose metadata says of what
    optimizer/optimizer_config.json
    optimizer/optimizer_pp-0-of-1_tp-0-of-2_exp-0-of-1.pt                      ``_dp-0-of-2`` too under ZeRO-1

A state's ``names`` map its numbers to parameters. Under ZeRO-1 a rank holds a range of each flattened parameter; the config
says which. The float32 weights are the state of the gradient accumulator, which ``accumulate_grad_in_fp32`` makes.

Source: nanotron at 2411b02, ``serialize/weights.py``, ``serialize/optimizer.py``, ``optim/zero.py``, ``parallel/parameters.py``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from narrowgauge.checkpoints.conversion.sharded import SEEN, WEIGHT, Fragment, Sharded, pickled, safetensors
from narrowgauge.errors import DataError
from narrowgauge.runs.atomic_io import load_json
from narrowgauge.spec.storages import STATE_NAMES

_METADATA = "checkpoint_metadata.json"
_WEIGHT = re.compile(r"model_(.+?)(?:_pp-rank-(\d+)-of-\d+_tp-rank-(\d+)-of-\d+)?(_exp-rank-.*)?\.safetensors")
_STATE = re.compile(r"optimizer_pp-(\d+)-of-(\d+)(?:_dp-(\d+)-of-(\d+))?_tp-(\d+)-of-(\d+)_exp-(\d+)-of-(\d+)\.pt")
# Slices of a shard, each with the block of the whole parameter that it holds.
Blocks = list[tuple[tuple[slice, ...], tuple[slice, ...]]]


def is_nanotron(path: Path) -> bool:
    """Whether a folder is a checkpoint of nanotron, or contains one that ``latest.txt`` names."""
    place = _newest(path)
    return (place / _METADATA).is_file() and (place / "model").is_dir()


def _newest(path: Path) -> Path:
    latest = path / "latest.txt"
    return path / latest.read_text(encoding="utf-8").strip() if latest.is_file() else path


def open_nanotron(path: Path, *, writable: bool = False) -> Sharded:
    """The fragments of a nanotron checkpoint, joined over tensor-parallel, pipeline and ZeRO-1 ranks.

    Raises:
        DataError: an unreadable or missing file, experts in files of their own, or an optimizer other than Adam.
    """
    folder = _newest(path)
    weights, blocks = _weights(folder, writable=writable)
    place = folder / "optimizer"
    fragments, steps = list(weights), []
    if place.is_dir():
        offsets = load_json((place / "optimizer_config.json").read_bytes())["configs"].get(
            "param_name_to_dp_rank_offsets", {}
        )
        files = {file: found for file in sorted(place.iterdir()) if (found := _STATE.fullmatch(file.name))}
        _require_all(place, files)
        for file, found in files.items():
            state = pickled(file, writable=writable)
            steps += [entry["step"] for entry in state["state"].values() if "step" in entry]
            fragments += _moments(state, blocks, int(found.group(5)), found.group(3), offsets, file)
    left = ("lr_scheduler", "random states", "lr, betas, eps, weight_decay of the optimizer")
    return Sharded("nanotron", folder, fragments, steps, left_out=left if place.is_dir() else ())


def _require_all(place: Path, files: Mapping[Path, re.Match[str]]) -> None:
    if not files:
        raise DataError(f"{place} contains no optimizer_pp-*.pt.", "Copy the files of all ranks.")
    found = next(iter(files.values()))
    if int(found.group(8)) > 1:
        raise DataError(f"{place} divides experts over ranks.", "Save it with expert_parallel_size 1.")
    expected = int(found.group(2)) * int(found.group(4) or 1) * int(found.group(6))
    if len(files) != expected:
        raise DataError(
            f"{place} contains the states of {len(files)} of {expected} ranks.", "Copy the files of all ranks."
        )


def _weights(
    folder: Path, *, writable: bool
) -> tuple[list[Fragment], dict[tuple[str, int], tuple[Blocks, tuple[int, ...]]]]:
    """The fragments of the weights, and of each parameter and rank its blocks and whole shape."""
    fragments: list[Fragment] = []
    blocks: dict[tuple[str, int], tuple[Blocks, tuple[int, ...]]] = {}
    for file in sorted((folder / "model").rglob("*.safetensors")):
        found = _WEIGHT.fullmatch(file.name)
        if found is None or found.group(4):
            raise DataError(
                f"{file} is the weight of an expert, or none of nanotron's.", "Save it with expert_parallel_size 1."
            )
        name = ".".join((*file.parent.relative_to(folder / "model").parts, found.group(1)))
        held, metadata = safetensors(file, writable=writable)
        stored, dtype, shape = held["data"]
        whole, pairs = _slices(metadata, shape)
        rank = int(found.group(3) or 0)
        blocks[(name, rank)] = pairs, whole
        for local, block in pairs:
            part = stored.view(-1, dtype.itemsize).view(*shape, dtype.itemsize)[local]
            if part.numel() != stored.numel() and writable:
                raise DataError(f"{file} joins several parts.", "Write into a checkpoint of one tensor-parallel rank.")
            fragments.append(Fragment(name, SEEN, part.reshape(-1), whole, block, words=dtype))
    return fragments, blocks


def _slices(metadata: Mapping[str, str], shape: tuple[int, ...]) -> tuple[tuple[int, ...], Blocks]:
    """The whole shape, and which slices of the shard are which of the whole; of an undivided one, all of it."""
    if "local_global_slices_pairs" not in metadata:
        return shape, [((slice(None),) * len(shape), ())]
    whole = tuple(int(size) for size in re.findall(r"\d+", metadata["unsharded_shape"].replace("np.int64", "")))
    pairs = []
    for pair in metadata["local_global_slices_pairs"].split(";"):
        local, block = (tuple(map(_slice, side.split("|"))) for side in pair.split("#"))
        pairs.append((local, block))
    return whole, pairs


def _slice(text: str) -> slice:
    return slice(*(None if part == "None" else int(part) for part in text.split(",")))


def _moments(
    state: Mapping[str, Any],
    blocks: Mapping[tuple[str, int], tuple[Blocks, tuple[int, ...]]],
    tensor_rank: int,
    data_rank: str | None,
    offsets: Mapping[str, Mapping[str, Any]],
    file: Path,
) -> Iterator[Fragment]:
    accumulated = state.get("gradient_accumulator", {})
    for number, full in state["names"].items():
        name, entry = full.removeprefix("module."), state["state"][number]
        if set(entry) - {"step", *STATE_NAMES}:
            raise DataError(
                f"the optimizer in {file} keeps {', '.join(entry)}.", "Only states of Adam and AdamW can be converted."
            )
        pairs, whole = blocks.get((name, tensor_rank)) or blocks.get((name, 0)) or ((), ())
        if not pairs:
            raise DataError(
                f"{file} contains a state of '{name}', which is not among the weights.", "Copy all files of model/."
            )
        if len(pairs) > 1:
            raise DataError(
                f"'{name}' in {file} joins several parts of a parameter.", "Save it with one tensor-parallel rank."
            )
        if tensor_rank and (name, tensor_rank) not in blocks:
            continue  # undivided: every rank holds the same
        start = 0 if data_rank is None else int(offsets[full][data_rank][0])
        values = {**entry, WEIGHT: accumulated.get(full)}
        for kind in (WEIGHT, *STATE_NAMES):
            if values.get(kind) is not None:
                yield Fragment(name, kind, values[kind].reshape(-1), whole, pairs[0][1], start)
