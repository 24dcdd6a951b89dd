"""Files of other libraries: which of their entries are weights and an optimizer's state, and which are left out.

==========================  ==================================================================================
``torch.save``              a ``state_dict`` alone, or a mapping with a model and an optimizer under usual names
Lightning's ``.ckpt``       ``state_dict`` and ``optimizer_states``, a list of one
Accelerate's ``save_state`` a folder: ``model.safetensors`` or ``pytorch_model.bin``, and ``optimizer.bin``
Hugging Face                a folder of weights; the Trainer's ``optimizer.pt`` is named beside it
safetensors                 weights
==========================  ==================================================================================

Pickles are read with ``weights_only``, so nothing in them runs.

Source: Lightning 2.6 ``dump_checkpoint``, Accelerate 1.15 ``save_accelerator_state``, read from what they write.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from narrowgauge.errors import DataError
from narrowgauge.runs.atomic_io import load_json

UNREADABLE = (OSError, ValueError, KeyError, RuntimeError, EOFError, pickle.UnpicklingError, SafetensorError)
_FILES = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
_MODEL_KEYS = ("model", "model_state_dict", "state_dict")
_OPTIMIZER_KEYS = ("optimizer", "optimizer_state_dict", "optimizer_states")
_ACCELERATE = "optimizer.bin"
# Beginnings of names of files that describe a model or its text, and hold nothing of a training.
_DESCRIPTIONS = (
    "config", "generation_config", "tokenizer", "special_tokens", "added_tokens", "vocab", "merges", "chat_template", "README",
)  # fmt: skip


@dataclass(frozen=True)
class Found:
    """What a file or folder holds.

    Args:
        weights: by name.
        state: what ``optimizer.state_dict()`` gave, ``None`` where there is none.
        where: the file of the state.
        order: what tells the names in the order in which the model lists them; none where nothing does.
        left_out: what else there is, which a conversion does not take.
    """

    weights: dict[str, Tensor]
    state: Any
    where: Path
    order: Callable[[], list[str]]
    left_out: tuple[str, ...] = ()


def find(path: Path, optimizer: Path | None) -> Found:
    """Read weights, and the state of an optimizer in the same file or folder or in another.

    Args:
        path: a folder or a file.
        optimizer: where the state lies, if apart.
    Returns:
        What there is.
    Raises:
        DataError: what cannot be read.
    """
    found = _folder(path, optimizer) if path.is_dir() else _file(path)
    if optimizer is None:
        return found
    if found.state is not None:
        raise DataError(f"{path} holds the state of an optimizer, and {optimizer} was given too.", "Give one of them.")
    content = load(optimizer)
    key = next((key for key in _OPTIMIZER_KEYS if key in content), None)
    if key is None:
        return Found(found.weights, content, optimizer, found.order, found.left_out)
    others = tuple(str(other) for other in content if other != key and other not in _MODEL_KEYS)
    return Found(found.weights, _single(content[key], optimizer), optimizer, found.order, found.left_out + others)


def _folder(path: Path, optimizer: Path | None) -> Found:
    name = next((name for name in _FILES if (path / name).is_file()), None)
    if name is None:
        shards = (path / ".metadata").is_file()
        how = f"python -m torch.distributed.checkpoint.format_utils dcp_to_torch {path} FILE makes one file of its shards."
        raise DataError(
            f"{path} holds neither a run nor weights.", how if shards else f"Weights lie in {' or '.join(_FILES)}."
        )
    if optimizer is None and (path / "optimizer.pt").is_file():
        raise DataError(
            f"{path} holds an optimizer.pt beside its weights.",
            f"Give --optimizer {path / 'optimizer.pt'}, or name the file of the weights to leave its state out.",
        )
    content, parts = _indexed(path / name)
    weights = tensors(content, path)
    read = {name, *parts}
    state = None
    if optimizer is None and (path / _ACCELERATE).is_file():
        if (path / "optimizer_1.bin").is_file():
            raise DataError(f"{path} holds the states of several optimizers.", "Name one of them with --optimizer.")
        state, read = load(path / _ACCELERATE), read | {_ACCELERATE}
    read |= {optimizer.name} if optimizer is not None else set()
    others = sorted(entry.name for entry in path.iterdir() if entry.name not in read)
    # A safetensors file sorts its names; a pickled state_dict keeps the model's order.
    order = (lambda: order_of_model(path)) if "safetensors" in name else (lambda: list(weights))
    left_out = tuple(name for name in others if not name.startswith(_DESCRIPTIONS))
    return Found(weights, state, path / _ACCELERATE if state is not None else path, order, left_out)


def _file(path: Path) -> Found:
    content = load(path)
    if path.suffix == ".safetensors":
        return Found(tensors(content, path), None, path, list)
    key = next((key for key in _MODEL_KEYS if isinstance(content.get(key), Mapping)), None)
    if key is None:
        return Found(tensors(content, path), None, path, lambda: list(content))
    own = next((own for own in _OPTIMIZER_KEYS if own in content), None)
    model, state = content[key], None if own is None else _single(content[own], path)
    others = tuple(str(other) for other in content if other not in (key, own))
    return Found(tensors(model, path), state, path, lambda: list(model), others)


def _single(state: Any, where: Path) -> Any:
    """The state of the one optimizer; Lightning writes a list of them."""
    if not isinstance(state, list):
        return state
    if len(state) > 1:
        raise DataError(
            f"{where} holds the states of {len(state)} optimizers, and one can be converted.",
            "Save its model's state_dict and the state of one of them in a file.",
        )
    return state[0] if state else None


def order_of_model(folder: Path) -> list[str]:
    """Parameter names of the model that a ``config.json`` describes; none where it describes none that can be built."""
    if not (folder / "config.json").is_file():
        return []
    import transformers

    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        kind = getattr(transformers, (config.architectures or [""])[0], None)
        if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
            return []
        with torch.device("meta"):
            return [name for name, _ in kind(config).named_parameters()]
    except (*UNREADABLE, TypeError, AttributeError, ImportError):
        return []


def _indexed(file: Path) -> tuple[dict[str, Any], list[str]]:
    """The content of a file of weights, or of all those that an index names; and their names."""
    if file.suffix != ".json":
        return load(file), []
    try:
        parts = sorted(set(load_json(file.read_bytes())["weight_map"].values()))
    except (*UNREADABLE, TypeError, AttributeError) as error:
        raise unreadable(file, error) from error
    return {name: value for part in parts for name, value in load(file.parent / part).items()}, parts


def load(file: Path) -> dict[str, Any]:
    """A safetensors file, or one of ``torch.save``, of which nothing is run.

    Raises:
        DataError: it cannot be read, or holds neither a mapping nor tensors alone.
    """
    try:
        if file.suffix == ".safetensors":
            return dict(load_file(file))
        content = torch.load(file, map_location="cpu", weights_only=True)
    except UNREADABLE as error:
        raise unreadable(file, error) from error
    if not isinstance(content, Mapping):
        raise DataError(
            f"{file} holds a {type(content).__name__}.", 'It must hold {"model": …, "optimizer": …}, or one.'
        )
    return dict(content)


def unreadable(file: Path, error: Exception) -> DataError:
    """What is wrong with a file, in our own words where torch's advise to let it run code."""
    if isinstance(error, pickle.UnpicklingError):
        named = re.search(r"GLOBAL ([\w.]+)", str(error))
        what = f" ({named.group(1)})" if named else ""
        return DataError(
            f"{file} cannot be read: it is a pickle of more than tensors and plain values{what}, and none of its code is run.",
            "Where it was written, save weights and state alone: a state_dict, and optimizer.state_dict().",
        )
    reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
    return DataError(
        f"{file} cannot be read: {reason}.", "It must be a safetensors file, or tensors that torch.save wrote."
    )


def tensors(content: Mapping[str, Any], where: Path) -> dict[str, Tensor]:
    """The same, where all of it is tensors.

    Raises:
        DataError: it holds anything else.
    """
    for name, value in content.items():
        if not isinstance(value, Tensor):
            raise DataError(
                f"{where} holds under '{name}' no tensor, but a {type(value).__name__}.",
                f"Weights are a state_dict, alone or under {' or '.join(map(repr, _MODEL_KEYS))}.",
            )
    return dict(content)
