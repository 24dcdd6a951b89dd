"""Narrow layers under tensor parallelism: each rank multiplies its part of the weight.

``parallelize_module`` makes the weight a ``DTensor``. Split by outputs (``ColwiseParallel``), every
rank has the whole input and its part of the output. Split by inputs (``RowwiseParallel``), the
products of the ranks are added up.

A cast is that of one process only if the values that share a scale lie on one rank. That holds for
wide casts and for blocks that divide the parts. Scales of rows, columns and tensors are each rank's
own, with the same error, and a warning says so. Random bits belong to a rank's part.
"""

from __future__ import annotations

import warnings
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from narrowgauge.errors import RecipeError
from narrowgauge.matmul.operand import mixed
from narrowgauge.numerics.dtensor import local_of
from narrowgauge.spec.computes import Compute


def multiply_parts(layer: Any, x: Tensor, weight: Any, bias: Tensor | None) -> Tensor:
    """Return the product of an input and this rank's part of a weight, as ``parallelize_module``
    expects it.

    Args:
        layer: a :class:`~narrowgauge.matmul.linear.Linear`.
        x: ``[..., in]``, a ``DTensor``.
        weight: ``[out, in]``.
    Raises:
        RecipeError: blocks do not divide a part, or ``x`` is a plain tensor.
    """
    name = layer.names[0]
    mesh = weight.device_mesh
    placement, *more_placements = weight.placements
    splits_outputs = placement.is_shard(0)
    # A plain input: as where FSDP2's weights are used outside the forward of their module.
    if more_placements or placement.is_replicate() or not isinstance(x, DTensor):
        raise RecipeError(
            f"Cannot multiply layer '{name}': its weight is distributed as {weight.placements}, and "
            f"its input is a {type(x).__name__}.",
            "Split it by outputs (ColwiseParallel) or by inputs (RowwiseParallel) over one "
            "dimension of the mesh, or call the module that fully_shard was given.",
        )
    part = weight.to_local()
    require_local_scales(layer.compute, name, part.shape[placement.dim])
    last = Shard(x.ndim - 1)
    # Equal parts of several ranks round independently.
    key = mixed(local_of(layer.key), mesh.get_local_rank())
    if splits_outputs:
        # The input's gradient is a sum over ranks where each has some of the outputs.
        rows = x.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
        if isinstance(bias, DTensor):
            bias = bias.to_local()
        # Added to what one rank has in full, a bias is rounded with the product, as in one process.
        product = layer.product(rows, part, bias, key)
        return DTensor.from_local(product, mesh, [last], run_check=False)
    columns = x.redistribute(placements=[last]).to_local(grad_placements=[last])
    product = layer.product(columns, part, None, key)
    result: Tensor = DTensor.from_local(product, mesh, [Partial()], run_check=False)
    return result if bias is None else result + bias


def require_local_scales(compute: Compute, name: str, size: int) -> None:
    """Refuse a compute whose blocks do not divide a rank's part of a layer."""
    for cast in compute.casts.values():
        side = max(cast.block or (1, 1))
        if not cast.is_wide and (cast.block is None or cast.scale == "float8_e4m3fn"):
            warnings.warn(
                f"Layers in {compute.name} are split over ranks: their scales are each rank's own, "
                "so the bits are not those of one process.",
                stacklevel=2,
            )
        if not cast.is_wide and size % side:
            raise RecipeError(
                f"Cannot split layer '{name}' over ranks because blocks of {side} do not divide its "
                f"part of {size}.",
                "Take bfloat16, float8-row or mxfp8 for the layers that are split, or shard with "
                "FSDP2.",
            )
