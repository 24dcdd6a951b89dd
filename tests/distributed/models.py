"""Small models and meshes for tests of ranks, and gradients that are known without a backward pass
of a real one.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


class Leaf(nn.Module):
    """Parameters whose gradients are given: the loss is the sum of products of both.

    A frozen one, one that is tied, a vector of another dtype, one without a gradient, and rows that
    no number of ranks divides.
    """

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.layers = nn.ModuleList(Layer(rows, dtype, generator) for rows in (5, 8))
        self.head = nn.Parameter(torch.randn(7, 3, generator=generator).to(dtype))
        self.tied = self.head
        self.gain = nn.Parameter(torch.ones(6))
        self.frozen = nn.Parameter(torch.ones(4, dtype=dtype), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, gradients: dict[str, Tensor]) -> Tensor:
        tied_loss = (self.tied * gradients["head"].to(self.head.dtype)).float().sum() + (
            self.gain * gradients["gain"]
        ).sum()
        return tied_loss + sum(
            layer(gradients[f"layers.{k}.weight"]) for k, layer in enumerate(self.layers)
        )


class Layer(nn.Module):
    """One matrix."""

    def __init__(self, rows: int, dtype: torch.dtype, generator: torch.Generator) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(rows, 4, generator=generator).to(dtype))

    def forward(self, gradient: Tensor) -> Tensor:
        return (self.weight * gradient.to(self.weight.dtype)).float().sum()


SHAPES = {"layers.0.weight": (5, 4), "layers.1.weight": (8, 4), "head": (7, 3), "gain": (6,)}


def gradients_of(leaf: int) -> dict[str, Tensor]:
    """The gradients of one micro-batch: of magnitudes so far apart that no two orders of addition
    agree everywhere.
    """
    generator = torch.Generator().manual_seed(1000 + leaf)
    gradients = {}
    for name, shape in SHAPES.items():
        gradients[name] = torch.randn(shape, generator=generator) * torch.exp2(
            torch.randint(-12, 6, shape, generator=generator)
        )
    return gradients


def mesh_of(kind: str) -> DeviceMesh:
    """All ranks, as a mesh of that kind."""
    size = dist.get_world_size()
    shape = {"sharded": (size,), "replicas": (2, size // 2), "shards of one": (size, 1)}[kind]
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards")[-len(shape) :])


def full_tensor_of(tensor: Any) -> Tensor:
    """All of a tensor that may be sharded."""
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()
