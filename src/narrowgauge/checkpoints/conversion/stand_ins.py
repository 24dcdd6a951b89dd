"""Pickles that name classes of other packages, loaded without those packages and without running their code.

A checkpoint of DeepSpeed, Megatron or torchao names classes of its package beside its tensors: an enum, a loss scaler, a
quantized tensor. ``weights_only`` refuses them. Here each is replaced by an inert class that keeps what was saved and does
nothing: nothing of the package is imported or called. Only names of the packages below get one; a pickle that names anything
else is refused as before.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

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
    """A tensor of another package's class: its parts are attributes, as torchao's ``codes`` and ``scale``."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # a class method, as PyTorch documents it
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Refuse: only the parts are read."""
        raise NotImplementedError(f"{func} of a {cls.__name__}")


def load_pickle(file: Path | io.BytesIO, *, mmap: bool = False) -> Any:
    """Load a ``torch.save`` file with stand-ins for the classes of the known packages.

    Args:
        file: the file.
        mmap: map its tensors instead of reading them.
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
