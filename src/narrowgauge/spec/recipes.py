"""Recipes: a compute, a storage and a reduction.

A recipe has up to three parts, ``compute/storage/reduction``: how operands enter a matmul, how
weights and moments are stored, and how gradients are summed across ranks. Each part is an entry of
a small table: N + M + K entries give N × M × K recipes. :mod:`narrowgauge.spec.parse` reads
recipes from names.
"""

from dataclasses import dataclass

from narrowgauge.errors import RecipeError
from narrowgauge.spec.computes import Compute
from narrowgauge.spec.reductions import REDUCTIONS, Reduction
from narrowgauge.spec.storages import STORAGES, Storage


@dataclass(frozen=True, slots=True)
class Recipe:
    """The formats of a whole model: a compute, a storage and a reduction.

    Args:
        compute: how operands enter matmuls.
        storage: how weights and moments are stored.
        reduction: how gradients are summed across ranks.
    Raises:
        RecipeError: the parts contradict each other.
    Example:
        >>> from narrowgauge.spec.parse import parse
        >>> parse("bf16/word").name, parse("bf16/word").bytes_per_param
        ('bfloat16/word', 8.0)
    """

    compute: Compute
    storage: Storage
    reduction: Reduction = REDUCTIONS["native"]

    def __post_init__(self) -> None:
        if not is_pair(self.compute, self.storage):
            owner = self.storage.owner or self.compute.name
            raise RecipeError(
                f"Cannot use compute '{self.compute.name}' with storage '{self.storage.name}'.",
                f"Take '{owner}/{self.storage.short_name}'.",
            )

    @property
    def name(self) -> str:
        """Return the full name, ``compute/storage``, followed by the reduction if it is not native."""
        name = f"{self.compute.name}/{self.storage.short_name}"
        if self.reduction.name != "native":
            name += f"/{self.reduction.name}"
        return name

    @property
    def bytes_per_param(self) -> float:
        """Bytes per parameter of weight, gradient and states, for matrices."""
        return self.storage.bytes_per_param

    @property
    def dtype(self) -> str:
        """Return the dtype of plain linear layers, norms and all else outside the casts, whatever
        the weights' format.
        """
        return self.compute.dtype


def is_pair(compute: Compute, storage: Storage) -> bool:
    """Tell whether a compute supports a storage: its own, or a general one that it does not replace."""
    if storage.owner:
        return storage.owner == compute.name
    return f"{compute.name}/{storage.name}" not in STORAGES
