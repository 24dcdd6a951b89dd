"""Saving beside the training, on one process or many: the copy is taken at the step, and written while the steps go on.

The tensors are copied to the CPU before :meth:`Saver.save` returns, so that a checkpoint has the bits of its step, however long
it takes to write. The next save, and the end of a run, wait for the one in flight; if it failed, all ranks raise its error
there, together, and the checkpoints before it are still there.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import torch

from narrowgauge.distributed.ranks import ALONE, Ranks
from narrowgauge.errors import NarrowgaugeError, RecordError
from narrowgauge.numerics.shards import local_of
from narrowgauge.runs.atomic_io import disk_error
from narrowgauge.trainer.checkpoint import new_checkpoint, path_of, save_checkpoint


class Saver:
    """Writes the checkpoints of a run, one at a time.

    Args:
        folder: the run folder.
        ranks: those that train together, in a process group that nobody else uses.
    """

    def __init__(self, folder: Path, ranks: Ranks = ALONE) -> None:
        self._folder, self.ranks = folder, ranks
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._path = folder

    def save(self, step: int, tensors: Mapping[str, Any], state: Mapping[str, Any], keep: int = 2) -> Path:
        """Take a copy and begin to write it, once the checkpoint before is written.

        Args:
            step: number of optimizer steps.
            tensors: by name: DTensors, and plain tensors that are the same on all ranks.
            state: a JSON object.
            keep: number of newest checkpoints to keep.
        Returns:
            The folder of the checkpoint.
        Raises:
            RecordError: this checkpoint, or the one before, could not be written; on all ranks.

        Cost: a copy of what this rank holds, kept in the memory of the CPU until it is written.
        """
        self.wait()
        self._path = path_of(self._folder, step)
        write = (self._whole if self.ranks.size == 1 else self._shards)(step, tensors, state, keep)
        # A daemon: a rank that is told to leave must not wait for others that are gone.
        self._thread = threading.Thread(target=self._write, args=(write,), name="checkpoint", daemon=True)
        self._thread.start()
        return self._path

    def _whole(self, step: int, tensors: Mapping[str, Any], state: Mapping[str, Any], keep: int) -> Callable[[], Any]:
        """What writes a copy of all tensors."""
        copies = {name: _copied(local_of(tensor)) for name, tensor in tensors.items()}
        return partial(save_checkpoint, self._folder, step, copies, deepcopy(dict(state)), keep)

    def _shards(self, step: int, tensors: Mapping[str, Any], state: Mapping[str, Any], keep: int) -> Callable[[], Any]:
        """What writes a copy of this rank's part, together with the others."""
        # Imported here: it takes a second, and one process needs none of it.
        from narrowgauge.checkpoints.storage import ShardWriter, TakenCopy, save_shards

        copy = self.ranks.together(lambda: TakenCopy(tensors))
        writer = ShardWriter(partial(new_checkpoint, self._path, keep), step, json.dumps(state, indent=1))
        return partial(save_shards, copy, writer, self.ranks.group)

    def _write(self, write: Callable[[], Any]) -> None:
        try:
            write()
        except BaseException as error:  # raised by wait()
            self._error = error

    def leave(self, patience_seconds: float = 10.0) -> None:
        """Give the checkpoint in flight a while before this process ends with an error; whether it is written nobody asks.

        Args:
            patience_seconds: for ranks, since those that write it with this one may be gone.
        """
        if self._thread is not None:
            self._thread.join(patience_seconds if self.ranks.size > 1 else None)

    def wait(self) -> None:
        """Wait for the checkpoint in flight, if there is one.

        Raises:
            RecordError: it could not be written; on all ranks.
        """
        if self._thread is None:
            return
        self._thread.join()
        self._thread, error, self._error = None, self._error, None
        if error is not None:
            raise save_error(self._path, error) from error

    def close(self) -> None:
        """Wait for the checkpoint in flight, and give back what the ranks spoke through; all call this.

        Raises:
            RecordError: it could not be written; on all ranks.
        """
        self.wait()
        self.ranks.close()


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())


def save_error(path: Path, error: BaseException) -> NarrowgaugeError:
    """What a failed save means, in one line: of the first rank that failed, which is named where there are others."""
    failures: Mapping[int, tuple[BaseException, Any]] = getattr(error, "failures", {})
    rank, cause = min(((rank, pair[0]) for rank, pair in failures.items()), default=(0, error))
    where = f" (rank {rank})" if failures else ""
    if isinstance(cause, OSError):
        found: NarrowgaugeError = disk_error(path, cause)
    elif isinstance(cause, NarrowgaugeError):
        found = cause
    else:
        found = RecordError(f"Cannot write {path}: {cause}.", "Older checkpoints are intact: narrowgauge resume.")
    return RecordError(f"{found.message.removesuffix('.')}{where}.", found.advice)
