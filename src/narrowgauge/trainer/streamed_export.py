"""The weights of a checkpoint as Hugging Face files, one tensor in memory at a time.

A checkpoint of many ranks may be larger than the memory of the process that exports it. Nothing of it has to be whole: each
tensor is put together from the ranks' files, decoded if its tail is wanted, and written. Several processes share the files of
the export among them, and none holds more than one tensor.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from narrowgauge.checkpoints.reading import SavedTensor, load_whole
from narrowgauge.checkpoints.tensor_files import write_one_by_one
from narrowgauge.distributed.ranks import ALONE, Ranks
from narrowgauge.errors import RecordError
from narrowgauge.numerics.summation import fingerprint, fingerprint_all
from narrowgauge.optim.optimizers import AdamW
from narrowgauge.spec.recipes import Recipe
from narrowgauge.trainer.checkpoint import Checkpoint

if TYPE_CHECKING:  # it takes seconds to import
    from transformers import PreTrainedModel

MAX_FILE_BYTES = 5_000_000_000
"""The largest file of an export, unless a single tensor is larger."""


@dataclass(frozen=True)
class WeightSource:
    """The weights in a checkpoint.

    Args:
        checkpoint: whose checksums were verified.
        saved: what it holds.
        names: of the parameters, in the model's order.
        recipe: which was trained.
        is_exact: export the stored weights in float32, tails included, and not the visible ones.
    """

    checkpoint: Checkpoint
    saved: Mapping[str, SavedTensor]
    names: tuple[str, ...]
    recipe: Recipe
    is_exact: bool

    def shapes(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Dtype and shape of each weight as exported."""
        return {name: self._shape(self.saved[f"model.{name}"]) for name in self.names}

    def _shape(self, saved: SavedTensor) -> tuple[torch.dtype, tuple[int, ...]]:
        return torch.float32 if self.is_exact else saved.dtype, saved.shape

    def weight(self, name: str) -> Tensor:
        """A weight as exported, on the CPU."""
        path, key, prefix = self.checkpoint.path, f"model.{name}", f"optimizer.{name}."
        if not self.is_exact:
            return load_whole(path, [key])[key]
        states = [state for state in self.saved if state.startswith(prefix)]
        tensors = load_whole(path, [key, *states])
        entry = {state.removeprefix(prefix): tensors[state] for state in states}
        parameter = nn.Parameter(tensors[key], requires_grad=tensors[key].is_floating_point())
        storage = self.recipe.storage_of(name, parameter.ndim)
        optimizer = AdamW([{"params": [(name, parameter)], "storage": storage}], audit_every=0, compile=False)
        optimizer.load_states({parameter: entry} if entry else {})
        return optimizer.stored(parameter)


def can_stream(model: PreTrainedModel, saved: Mapping[str, SavedTensor]) -> bool:
    """Whether the export of a model is its parameters, one by one.

    Not where the state of the model has buffers, which a checkpoint does not hold, or where ``save_pretrained`` joins or renames
    tensors: the whole model is then built.

    Args:
        model: on any device.
        saved: what the checkpoint holds.
    """
    own = {f"model.{name}": tuple(parameter.shape) for name, parameter in model.named_parameters()}
    theirs = {name: tensor.shape for name, tensor in saved.items() if name.startswith("model.")}
    all_names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return own == theirs and model.state_dict().keys() <= all_names and not _is_renamed(model)


def _is_renamed(model: PreTrainedModel) -> bool:
    try:
        # Not in transformers' documentation. Without it the model is built, which takes memory and nothing else.
        from transformers.conversion_mapping import get_model_conversion_mapping
    except ImportError:
        return True
    return bool(get_model_conversion_mapping(model, add_legacy=False))


def write_weights(
    source: WeightSource, folder: Path, max_file_bytes: int = MAX_FILE_BYTES, ranks: Ranks = ALONE
) -> None:
    """Write ``model.safetensors``, or several files and ``model.safetensors.index.json``, as ``save_pretrained`` does.

    Args:
        source: the weights.
        folder: an empty one, the same for all ranks.
        max_file_bytes: largest file, unless one tensor is larger.
        ranks: which share the files among them.
    Raises:
        RecordError: the exact weights are not those that were saved.
        OSError: the disk is full, or not writable.

    Cost: one read of the weights, with ``is_exact`` of the whole checkpoint; one write; memory for one tensor, with ``is_exact``
        for some copies of it.
    """
    shapes = source.shapes()
    files = split_files(shapes, max_file_bytes)
    numbers: dict[str, int] = {}

    def tensor_of(name: str) -> Tensor:
        weight = source.weight(name)
        numbers[name] = fingerprint(weight)
        return weight

    def write_mine() -> None:
        for name in list(files)[ranks.rank :: ranks.size]:
            write_one_by_one(folder / name, {key: shapes[key] for key in files[name]}, tensor_of)
        if ranks.rank == 0 and len(files) > 1:
            _write_index(folder, shapes, files)

    ranks.together(write_mine)
    if source.is_exact:
        _require_saved(source, {name: number for part in ranks.gather(numbers) for name, number in part.items()})


def split_files(shapes: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], max_file_bytes: int) -> dict[str, list[str]]:
    """Which tensors go to which file, in order.

    Example:
        >>> of = (torch.float32, (2,))
        >>> split_files({"a": of, "b": of, "c": of}, 16)
        {'model-00001-of-00002.safetensors': ['a', 'b'], 'model-00002-of-00002.safetensors': ['c']}
    """
    groups: list[list[str]] = [[]]
    room = max_file_bytes
    for name, (dtype, shape) in shapes.items():
        size = math.prod(shape) * dtype.itemsize
        if size > room and groups[-1]:
            groups.append([])
            room = max_file_bytes
        groups[-1].append(name)
        room -= size
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    return {f"model-{k:05d}-of-{len(groups):05d}.safetensors": names for k, names in enumerate(groups, 1)}


def _write_index(
    folder: Path, shapes: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], files: Mapping[str, list[str]]
) -> None:
    total = sum(math.prod(shape) * dtype.itemsize for dtype, shape in shapes.values())
    weight_map = {name: file for file, names in files.items() for name in names}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _require_saved(source: WeightSource, numbers: Mapping[str, int]) -> None:
    expected, found = source.checkpoint.state()["fingerprint"], fingerprint_all(numbers)
    if found != expected:
        raise RecordError(
            f"checkpoint {source.checkpoint.path.name} gives weights {found}, and {expected} was saved.",
            "The checkpoint is intact, so the code of the storage has changed: export with the version that wrote it.",
        )
