"""A checkpoint of another framework as fragments in mapped files: opened to be read, or to be written in place.

Writing copies a checkpoint of theirs and replaces its numbers, byte for byte where they stand: everything else in it, from the
settings to the random states, stays as the framework wrote it, and no pickle is written by us.
"""

from __future__ import annotations

import json
import mmap
import struct
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from narrowgauge.checkpoints.conversion.files import UNREADABLE, unreadable
from narrowgauge.checkpoints.conversion.fragments import KINDS, SEEN, WEIGHT, Fragment, gather, scatter
from narrowgauge.checkpoints.conversion.source import Source
from narrowgauge.checkpoints.conversion.stand_ins import load_pickle
from narrowgauge.errors import DataError
from narrowgauge.spec.storages import STATE_NAMES

_SAFETENSORS = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


@dataclass(frozen=True)
class Sharded:
    """What a checkpoint contains.

    Args:
        origin: the framework, as in the report.
        where: its folder.
        fragments: the numbers of weights and moments.
        steps: the step counts: tensors in mapped files, or numbers in pickles, which cannot be replaced.
        others: integer buffers by name.
        left_out: other contents.
    """

    origin: str
    where: Path
    fragments: list[Fragment]
    steps: Sequence[Any]
    others: dict[str, Tensor] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()

    def source(self) -> Source:
        """The training state, joined from all ranks.

        Raises:
            DataError: a part is missing, or a parameter has one moment and not the other.
        """
        whole = gather(self.fragments, self.where)
        weights = {**whole[SEEN], **whole[WEIGHT]}
        step = max((int(step) for step in self.steps), default=0)
        states: dict[str, dict[str, Any]] = {}
        for name in whole[STATE_NAMES[0]] | whole[STATE_NAMES[1]]:
            if lacks := [kind for kind in STATE_NAMES if name not in whole[kind]]:
                raise DataError(
                    f"the state of '{name}' in {self.where} lacks '{lacks[0]}'.",
                    "Only states of Adam and AdamW can be converted.",
                )
            states[name] = {"step": step, **{kind: whole[kind][name] for kind in STATE_NAMES}}
        others = {f"model.{name}": value.clone() for name, value in self.others.items()}
        return Source(self.origin, weights, states, others=others, left_out=self.left_out)

    def fill(self, values: dict[str, dict[str, Tensor]], step: int) -> None:
        """Replace all numbers, of a checkpoint that was opened for writing.

        Args:
            values: float32, by kind and parameter name.
            step: optimizer steps taken.
        Raises:
            DataError: another model, or a step count that cannot be replaced.
        """
        fixed = [int(known) for known in self.steps if not isinstance(known, Tensor) and int(known) != step]
        if fixed:
            raise DataError(
                f"{self.where} counts {fixed[0]} steps in a pickle, which cannot be replaced, and the source has taken {step}.",
                f"Give a checkpoint that was saved after {step} steps.",
            )
        scatter(self.fragments, {kind: values.get(kind, {}) for kind in KINDS}, self.where)
        for known in self.steps:
            if isinstance(known, Tensor):
                known.fill_(step)


def pickled(file: Path, *, writable: bool) -> Any:
    """A ``torch.save`` file with its tensors mapped, and stand-ins for classes of its framework.

    Raises:
        DataError: it cannot be read.
    """
    shared: AbstractContextManager[Any] = (
        torch.serialization.set_default_mmap_options(mmap.MAP_SHARED) if writable else nullcontext()
    )
    try:
        with shared:
            return load_pickle(file, mmap=True)
    except UNREADABLE as error:
        raise unreadable(file, error) from error


def mapped(file: Path, *, writable: bool) -> Tensor:
    """The bytes of a file."""
    size = file.stat().st_size
    return torch.from_file(str(file), shared=writable, size=size, dtype=torch.uint8)


def safetensors(
    file: Path, *, writable: bool
) -> tuple[dict[str, tuple[Tensor, torch.dtype, tuple[int, ...]]], dict[str, str]]:
    """The bytes, dtype and shape of each tensor of a safetensors file, and its metadata.

    Raises:
        DataError: it cannot be read.
    """
    try:
        whole = mapped(file, writable=writable)
        (length,) = struct.unpack("<Q", bytes(whole[:8].tolist()))
        header = json.loads(bytes(whole[8 : 8 + length].tolist()))
        metadata = header.pop("__metadata__", {})
        found = {
            name: (
                whole[8 + length + row["data_offsets"][0] : 8 + length + row["data_offsets"][1]],
                _SAFETENSORS[row["dtype"]],
                tuple(row["shape"]),
            )
            for name, row in header.items()
        }
    except (*UNREADABLE, struct.error, TypeError) as error:
        raise unreadable(file, error) from error
    return found, metadata
