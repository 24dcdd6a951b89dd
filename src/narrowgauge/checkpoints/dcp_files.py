"""Write and read the tensors of a checkpoint with PyTorch's distributed checkpoints (DCP), as
safetensors files.

DCP plans the writes: every rank writes its own shard, and one rank writes replicated tensors. An
error on one rank is raised on all. If the number of ranks changes, DCP plans what each rank reads.
Its safetensors writer pickles nothing.

Importing this module takes a second, so functions import it.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    create_default_local_save_plan,
)
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from narrowgauge.distributed.ranks import Ranks
from narrowgauge.numerics.dtensor import copied_to_cpu


class TakenCopy(DefaultSavePlanner):
    """Copy this rank's shards to the CPU now, and plan to save them.

    Args:
        tensors: DTensors sharded along rows, and plain tensors that are the same on every rank.
    """

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._own_plan = create_default_local_save_plan(dict(tensors), is_coordinator=False)
        self._copies = {name: copied_to_cpu(tensor) for name, tensor in tensors.items()}

    def set_up_planner(self, *arguments: Any, storage_meta: Any = None, **options: Any) -> None:
        """Do nothing: the copy was taken."""

    def create_local_plan(self) -> SavePlan:
        self.plan = self._own_plan
        return self._own_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self._copies[write_item.index.fqn]


def write(copy: TakenCopy, folder: Path, ranks: Ranks) -> None:
    """Write a copy into a folder together with all ``ranks``.

    Nothing else may use their group meanwhile.

    Raises:
        torch.distributed.checkpoint.CheckpointException: a rank failed; on all ranks.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        save(
            {},
            storage_writer=HuggingFaceStorageWriter(path=str(folder), save_distributed=True),
            planner=copy,
            process_group=ranks.group,
            no_dist=ranks.size == 1,
        )


def described(path: Path) -> dict[str, TensorStorageMetadata]:
    """Return the dtype (``properties.dtype``) and shape (``size``) of each tensor of a checkpoint,
    by name.
    """
    metadata = HuggingFaceStorageReader(str(path)).read_metadata().state_dict_metadata
    return {
        name: tensor
        for name, tensor in metadata.items()
        if isinstance(tensor, TensorStorageMetadata)
    }


def fill(path: Path, targets: Mapping[str, Tensor]) -> None:
    """Fill tensors from a checkpoint.

    Each rank reads its own shards, whichever ranks wrote it. Ranks do not communicate.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        load(
            dict(targets),
            storage_reader=HuggingFaceStorageReader(str(path)),
            planner=planner,
            no_dist=True,
        )
