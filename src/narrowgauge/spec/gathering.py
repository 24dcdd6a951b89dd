"""Narrow all-gathers: which computes can have FSDP2 gather a weight as the codes that their matmuls take.

A sharded weight is gathered before each forward and each backward pass of its layer. A compute that casts it anyway can cast
each shard first: one byte travels where a bfloat16 takes two, and the codes are the same, since a shard holds whole rows.
Scales that cover several shards (of a tensor, of a column) need the largest magnitude over all of them first, a small
all-reduce.

Most computes cast the weight along ``in`` for ``output`` and along ``out`` for ``grad_input``. Where these are two casts, each
gather carries the one that its pass needs; that takes FSDP2's ``reshard_after_forward``, and no activation checkpointing, whose
backward pass needs both.
"""

from __future__ import annotations

from dataclasses import dataclass

from narrowgauge.spec.computes import Compute
from narrowgauge.spec.slots import slot_of_cast


@dataclass(frozen=True, slots=True)
class Gathering:
    """How the weight of a compute's layer is gathered.

    Args:
        forward, backward: the slots whose casts of the weight travel before each pass; empty where it is gathered as it is.
        reason: why it is gathered as it is; empty otherwise.
    """

    forward: str = ""
    backward: str = ""
    reason: str = ""

    @property
    def is_narrow(self) -> bool:
        """Whether codes are gathered."""
        return not self.reason

    @property
    def differs(self) -> bool:
        """Whether the two passes take different casts."""
        return self.forward != self.backward


def gathering_of(compute: Compute) -> Gathering:
    """How the weights of layers in a compute are gathered.

    Example:
        >>> from narrowgauge.spec.computes import COMPUTES
        >>> gathering_of(COMPUTES["int8-row"])
        Gathering(forward='output.right', backward='output.right', reason='')
        >>> gathering_of(COMPUTES["mxfp8"]).reason
        'its scales belong to blocks'
    """
    forward, backward = "output.right", slot_of_cast(compute, "grad_input.right")
    casts = [compute.casts[slot] for slot in (forward, backward)]
    if compute.is_wide:
        return Gathering(reason="it multiplies the weights as they are")
    if compute.transform:
        return Gathering(reason="its transform computes with the weights themselves")
    if compute.output.left.outliers or any(cast.is_wide for cast in casts):
        return Gathering(reason="a matmul takes weights in 16 bits too")
    if any(cast.scaling == "delayed" for cast in casts):
        return Gathering(reason="its amax history is measured on the whole weight")
    if any(cast.block is not None for cast in casts):
        return Gathering(reason="its scales belong to blocks")
    return Gathering(forward, backward)
