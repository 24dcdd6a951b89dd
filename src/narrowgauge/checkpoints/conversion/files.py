"""Checkpoint files of other libraries: which entries are weights or optimizer state, and which are left out.

==========================  ==================================================================================
``torch.save``              a ``state_dict``, or a mapping with a model and an optimizer under common keys
Lightning's ``.ckpt``       ``state_dict`` and ``optimizer_states``, a list of one
Accelerate's ``save_state`` a folder: ``model.safetensors`` or ``pytorch_model.bin``, and ``optimizer.bin``
Hugging Face                a folder of weights; the Trainer's ``optimizer.pt`` is passed separately
safetensors                 weights
==========================  ==================================================================================

Pickles are loaded with ``weights_only``, so no code in them runs. A checkpoint of DeepSpeed, Megatron or torchao names classes
of its package beside its tensors: an enum, a loss scaler, a quantized tensor. An inert class stands in for each of them: it
keeps what was saved and does nothing, and the package is neither imported nor called. A pickle that names anything else is
refused.

Source: Lightning 2.6 ``dump_checkpoint``, Accelerate 1.15 ``save_accelerator_state``, checked against files that they wrote.
"""

from __future__ import annotations

import io
import pickle
import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from narrowgauge.errors import DataError
from narrowgauge.runs.atomic_io import load_json
from narrowgauge.spec.models import WEIGHTS

# What the readers of pickles, safetensors and JSON raise where a file holds something else.
UNREADABLE = (
    OSError, ValueError, LookupError, RuntimeError, EOFError, TypeError, AttributeError, AssertionError, ArithmeticError,
    struct.error, pickle.UnpicklingError, SafetensorError,
)  # fmt: skip
_MODEL_KEYS = ("model", "model_state_dict", "state_dict")
_OPTIMIZER_KEYS = ("optimizer", "optimizer_state_dict", "optimizer_states")
_ACCELERATE = "optimizer.bin"
# Prefixes of files that describe a model or its tokenizer and hold no training state.
_DESCRIPTIONS = (
    "config", "generation_config", "tokenizer", "special_tokens", "added_tokens", "vocab", "merges", "chat_template", "README",
)  # fmt: skip


@dataclass(frozen=True)
class Found:
    """The contents of a file or folder.

    Args:
        state: the result of ``optimizer.state_dict()``, or ``None``.
        where: the file of the state.
        order: returns the parameter names in the model's order, or an empty list where that is unknown.
        left_out: other contents, which are not converted.
    """

    weights: dict[str, Tensor]
    state: Any
    where: Path
    order: Callable[[], list[str]]
    left_out: tuple[str, ...] = ()


def find(path: Path, optimizer: Path | None) -> Found:
    """Read weights, and optimizer state from the same or, with ``optimizer``, another file."""
    found = _folder(path, optimizer) if path.is_dir() else _file(path)
    if optimizer is None:
        return found
    if found.state is not None:
        raise DataError(f"{path} contains optimizer state, and {optimizer} was given too.", "Give one of them.")
    content = load(optimizer)
    key = next((key for key in _OPTIMIZER_KEYS if key in content), None)
    if key is None:
        return Found(found.weights, content, optimizer, found.order, found.left_out)
    others = tuple(str(other) for other in content if other != key and other not in _MODEL_KEYS)
    return Found(found.weights, _single(content[key], optimizer), optimizer, found.order, found.left_out + others)


def _folder(path: Path, optimizer: Path | None) -> Found:
    name = next((name for name in WEIGHTS if (path / name).is_file()), None)
    if name is None:
        shards = (path / ".metadata").is_file()
        how = f"python -m torch.distributed.checkpoint.format_utils dcp_to_torch {path} FILE merges its shards into one file."
        raise DataError(
            f"{path} contains neither a run nor weights.",
            how if shards else f"Weights are read from {' or '.join(WEIGHTS)}.",
        )
    if optimizer is None and (path / "optimizer.pt").is_file():
        raise DataError(
            f"{path} contains an optimizer.pt next to its weights.",
            f"Give --optimizer {path / 'optimizer.pt'}, or pass the file of weights to leave its state out.",
        )
    content, parts = _indexed(path / name)
    weights = tensors(content, path)
    read = {name, *parts}
    state = None
    if optimizer is None and (path / _ACCELERATE).is_file():
        if (path / "optimizer_1.bin").is_file():
            raise DataError(
                f"{path} contains the states of several optimizers.", "Choose one of them with --optimizer."
            )
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
    """The state of the only optimizer; Lightning stores a list."""
    if not isinstance(state, list):
        return state
    if len(state) > 1:
        raise DataError(
            f"{where} contains the states of {len(state)} optimizers, and only one can be converted.",
            "Save the model's state_dict and the state of one optimizer in a file.",
        )
    return state[0] if state else None


def order_of_model(folder: Path) -> list[str]:
    """Parameter names of the model that ``config.json`` describes; empty where it cannot be built."""
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
    except (*UNREADABLE, ImportError):
        return []


def _indexed(file: Path) -> tuple[dict[str, Any], list[str]]:
    """The contents of a weights file, or of all shards of an index, and the names of the shards."""
    if file.suffix != ".json":
        return load(file), []
    parts = parts_of(file)
    return {name: value for part in parts for name, value in load(file.parent / part).items()}, parts


def parts_of(file: Path) -> list[str]:
    """The names of the files that an index (``….index.json``) of a sharded checkpoint lists, beside it.

    Files outside its folder are refused; a link in the folder is followed, as in Hugging Face's cache.
    """
    try:
        parts = sorted({PurePosixPath(name).as_posix() for name in load_json(file.read_bytes())["weight_map"].values()})
    except UNREADABLE as error:
        raise unreadable(file, error) from error
    outside = [p for p in parts if ".." in re.split(r"[/\\]", p) or PurePosixPath(p).root or PureWindowsPath(p).anchor]
    if outside or not parts:
        what = f"names '{outside[0]}', which is outside its folder" if outside else "names no file"
        raise DataError(
            f"the index {file} {what}.", "The files of weights stand beside their index; download the checkpoint again."
        )
    return parts


def require_weights(file: Path) -> None:
    """Refuse a file of weights, or an index of several, that cannot be read; the values are not read."""
    for part in [file] if file.suffix != ".json" else [file.parent / name for name in parts_of(file)]:
        try:
            if part.suffix == ".safetensors":
                with safe_open(part, framework="pt"):
                    continue
            with part.open("rb") as opened:
                is_zip = opened.read(2) == _ZIP
            content = load_pickle(part, mmap=is_zip)
        except UNREADABLE as error:
            raise unreadable(part, error) from error
        tensors(_mapping(content, part), part)


def load(file: Path) -> dict[str, Any]:
    """Load a safetensors file, or a ``torch.save`` file without running its code."""
    try:
        if file.suffix == ".safetensors":
            return dict(load_file(file))
        content = load_pickle(file)
    except UNREADABLE as error:
        raise unreadable(file, error) from error
    return _mapping(content, file)


def _mapping(content: Any, file: Path) -> dict[str, Any]:
    if not isinstance(content, Mapping):
        raise DataError(
            f"{file} contains a {type(content).__name__}.",
            'It must contain {"model": …, "optimizer": …}, or one of them.',
        )
    return dict(content)


_ZIP = b"PK"
_POINTER = b"version https://git-lfs.github.com/spec/"


def _stands_in(file: Path) -> tuple[str, str] | None:
    """What a file holds in place of tensors, and what to do; ``None`` where it may hold some, damaged or not."""
    again = "Download or copy it again."
    if not file.exists():
        return "is a link to a file that is not there" if file.is_symlink() else "does not exist", again
    if not file.is_file():
        return None
    with file.open("rb") as opened:
        head = opened.read(1 << 16)
    if not head:
        return "is empty", again
    if head.startswith(_POINTER):
        return "is a pointer of git-LFS: the file itself was not downloaded", "Run git lfs pull in its folder."
    if not any(head):
        return "holds zeros", f"Its download or copy did not end. {again}"
    if head[:1] == b"{" and file.suffix == ".json":
        return None
    first = head[:256].decode("utf-8", "replace")
    if "\ufffd" not in first[:-1] and all(c.isprintable() or c.isspace() for c in first[:-1]):
        return f"is a text that begins with {first.split(chr(10))[0].strip()[:40]!r}", again
    return None


def unreadable(file: Path, error: Exception) -> DataError:
    """The error for an unreadable file, with our own text where torch's advises running its code."""
    if (instead := _stands_in(file)) is not None:
        return DataError(f"{file} cannot be read: it {instead[0]}.", instead[1])
    if isinstance(error, pickle.UnpicklingError) and _is_pickle(file):
        named = re.search(r"GLOBAL ([\w.]+)", str(error))
        what = f" ({named.group(1)})" if named else ""
        return DataError(
            f"{file} cannot be read: it is a pickle of more than tensors and plain values{what}, whose code is not run.",
            "Save only model.state_dict() and optimizer.state_dict() where it was written.",
        )
    # torch's own words for a file that is no pickle tell how to run its code.
    own = not isinstance(error, pickle.UnpicklingError | LookupError | AssertionError) or isinstance(error, KeyError)
    reason = (
        (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".") if own else "it holds something else"
    )
    return DataError(
        f"{file} cannot be read: {reason}.", "It must be a safetensors file, or tensors that torch.save wrote."
    )


def _is_pickle(file: Path) -> bool:
    """Whether a file begins as a pickle, or as the zip file in which ``torch.save`` writes one."""
    with file.open("rb") as opened:
        return opened.read(2) in (_ZIP, b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")


def tensors(content: Mapping[str, Any], where: Path) -> dict[str, Tensor]:
    """The content, all of whose values must be tensors."""
    for name, value in content.items():
        if not isinstance(value, Tensor):
            raise DataError(
                f"'{name}' in {where} is a {type(value).__name__}, not a tensor.",
                f"Weights must be a state_dict, alone or under {' or '.join(map(repr, _MODEL_KEYS))}.",
            )
    return dict(content)


# ── pickles that name classes of other packages ───────────────────────────────────────────────────────────────────────

# Packages whose classes occur in the checkpoints that are read here, and argparse.Namespace, Megatron's settings.
_PACKAGES = ("deepspeed", "megatron", "torchao", "transformer_engine", "nanotron")
_OTHERS = ("argparse.Namespace",)


class Inert:
    """An object of another package: its arguments and its attributes, and no behaviour."""

    def __new__(cls, *args: Any) -> Inert:
        """Keep the arguments; an enum has its value as the first of them."""
        made = super().__new__(cls)
        made.args = args
        return made

    def __init__(self, *args: Any) -> None:
        """Nothing: ``__new__`` has kept the arguments."""

    args: tuple[Any, ...]

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state if isinstance(state, dict) else {"state": state})


class InertTensor(Tensor):
    """A tensor of another package's class: its components are attributes, such as torchao's ``codes`` and ``scale``."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # a class method, as PyTorch documents it
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise NotImplementedError(f"{func} of a {cls.__name__}")


def load_pickle(file: Path | io.BytesIO, *, mmap: bool = False) -> Any:
    """Load a ``torch.save`` file with stand-ins for the classes of the known packages; with ``mmap`` its tensors are mapped.

    Raises:
        pickle.UnpicklingError: it names something else, whose code is not run.
    """
    try:
        named = torch.serialization.get_unsafe_globals_in_checkpoint(file)
    except ValueError:  # the format before zip files, which cannot be searched
        named = []
    allowed: list[Any] = [(_stand_in(name), name) for name in named if _is_known(name)]
    with torch.serialization.safe_globals(allowed):
        return torch.load(file, map_location="cpu", weights_only=True, mmap=mmap)


def _is_known(name: str) -> bool:
    return name in _OTHERS or name.partition(".")[0] in _PACKAGES


def _stand_in(name: str) -> type:
    """A new class, so that pickles which build objects of it find it among the allowed ones."""
    last = name.rpartition(".")[2]
    # Low-bit optimizer states of torchao: OptimState8bit, OptimState4bit, OptimStateFp8.
    is_tensor = name.startswith("torchao") and last.startswith("OptimState")
    return type(last, (InertTensor if is_tensor else Inert,), {})
