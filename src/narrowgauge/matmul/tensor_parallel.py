"""Narrow layers under tensor parallelism: each rank multiplies its part of the weight.

``parallelize_module`` makes the weight a ``DTensor``. Split by outputs (``ColwiseParallel``), every
rank has the whole input and its part of the output. Split by inputs (``RowwiseParallel``), the
products of the ranks are added up.

A cast is that of one process only if the values that share a scale lie on one rank. That holds for
wide casts and for blocks that divide the parts. Scales of rows, columns and tensors are each rank's
own, with the same error, and a warning says so. Random bits belong to a rank's part.
"""

from __future__ import annotations

import functools
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
    placement = weight.placements[0]
    splits_outputs = placement.is_shard(0)
    if mesh.ndim != 1 or not (splits_outputs or placement.is_shard(1)):
        raise RecipeError(
            f"Cannot multiply layer '{name}': its weight is distributed as {weight.placements}.",
            "Split it by outputs (ColwiseParallel) or by inputs (RowwiseParallel) over one "
            "dimension of the mesh.",
        )
    if not isinstance(
        x, DTensor
    ):  # as where FSDP2's weights are used outside the forward of their module
        raise RecipeError(
            f"Cannot multiply layer '{name}': its weight is distributed, and its input is a plain "
            "tensor.",
            "Call the module that fully_shard or parallelize_module was given.",
        )
    part = weight.to_local()
    last = x.ndim - 1
    dim = 1
    input_placement: Any = Shard(last)
    grad_placements: list[Any] = [input_placement]
    if splits_outputs:
        dim = 0
        input_placement = Replicate()
        # The input's gradient is a sum over ranks where each has some of the outputs.
        grad_placements = [Partial()]
    require_local_scales(layer.compute, name, part.shape, dim, mesh.size())
    # Equal parts of several ranks round independently.
    key = mixed(local_of(layer.key), mesh.get_local_rank())
    local = x.redistribute(placements=[input_placement]).to_local(grad_placements=grad_placements)
    # Added to what one rank has in full, a bias is rounded with the product, as in one process.
    own_bias = None
    output_placement: Any = Partial()
    if splits_outputs:
        own_bias = bias
        if isinstance(bias, DTensor):
            own_bias = bias.to_local()
        output_placement = Shard(last)
    product = layer.product(local, part, own_bias, key)
    result: Tensor = DTensor.from_local(product, mesh, [output_placement], run_check=False)
    if splits_outputs or bias is None:
        return result
    return result + bias


def require_local_scales(
    compute: Compute, name: str, part: tuple[int, ...], dim: int, num_ranks: int
) -> None:
    """Refuse a compute that cannot be cast on several ranks."""
    advice = (
        "Take bfloat16, float8-row or mxfp8 for the layers that are split, or shard with FSDP2."
    )
    for cast in compute.casts.values():
        if cast.is_wide:
            continue
        if cast.block is None or cast.scale == "float8_e4m3fn":
            _say_whose_scales(compute.name)
        side = max(cast.block or (1, 1))
        if part[dim] % side:
            raise RecipeError(
                f"Cannot split layer '{name}' over {num_ranks} ranks because blocks of {side} do "
                "not divide its part of "
                f"{part[dim]}.",
                advice,
            )


@functools.cache
def _say_whose_scales(name: str) -> None:
    warnings.warn(
        f"Layers in {name} are split over ranks: their scales are each rank's own, so the bits are "
        "not those of one process.",
        stacklevel=2,
    )
