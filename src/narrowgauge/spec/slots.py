"""Slots: the six operands of a linear layer's three matmuls, ``output.left`` to ``grad_weight.right``.

A linear layer multiplies three times: ``output`` = x · wᵀ, ``grad_input`` = dy · w, ``grad_weight`` = dyᵀ · x. Each of its three
tensors enters two of these matmuls, and each matmul contracts another dimension of it. A slot says which tensor it takes and how;
:class:`~narrowgauge.spec.computes.Compute` says by which cast. The operators, the gauges and the profiler all read this table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from narrowgauge.spec.computes import Compute

TENSORS = ("input", "weight", "gradient")
"""The tensors of a layer: x ``[tokens, in]``, w ``[out, in]`` and dy ``[tokens, out]``, as in a layer's amax history."""


@dataclass(frozen=True, slots=True)
class Slot:
    """One operand of one matmul.

    Args:
        matmul: ``output``, ``grad_input`` or ``grad_weight``.
        side: of that matmul.
        tensor: what is cast, one of :data:`TENSORS`.
        dim: the dimension of the tensor that the matmul contracts; the operand is transposed where a left one contracts 0.
        random_key: distinguishes the random bits of a stochastic cast. Stored results depend on it: never renumber.
        reuses: the slot whose codes of the same tensor this one takes where they serve it.
    """

    matmul: str
    side: Literal["left", "right"]
    tensor: str
    dim: int
    random_key: int
    reuses: str = ""

    @property
    def name(self) -> str:
        """``matmul.side``, as in :attr:`Compute.casts`."""
        return f"{self.matmul}.{self.side}"

    @property
    def history_index(self) -> int:
        """Index of the tensor in a layer's amax history."""
        return TENSORS.index(self.tensor)


_SLOTS = (
    Slot("output", "left", "input", dim=1, random_key=0),
    Slot("output", "right", "weight", dim=1, random_key=1),
    Slot("grad_input", "left", "gradient", dim=1, random_key=3),
    Slot("grad_input", "right", "weight", dim=0, random_key=1, reuses="output.right"),
    Slot("grad_weight", "left", "gradient", dim=0, random_key=2, reuses="grad_input.left"),
    Slot("grad_weight", "right", "input", dim=0, random_key=0, reuses="output.left"),
)
SLOTS: dict[str, Slot] = {slot.name: slot for slot in _SLOTS}
"""The six slots by name."""


def slot_of_cast(compute: Compute, slot: str) -> str:
    """The slot whose cast fills a slot: its own, or that of the slot it reuses.

    Example:
        >>> from narrowgauge.spec.computes import COMPUTES
        >>> slot_of_cast(COMPUTES["int8-row"], "grad_weight.right"), slot_of_cast(COMPUTES["mxfp8"], "grad_weight.right")
        ('output.left', 'grad_weight.right')
    """
    first = SLOTS[slot].reuses
    return first if first and compute.casts[first].serves(compute.casts[slot]) else slot


def weight_slots(compute: Compute) -> list[str]:
    """The slots whose casts of the weight a compute makes, wide ones included.

    Example:
        >>> from narrowgauge.spec.computes import COMPUTES
        >>> weight_slots(COMPUTES["int8-row"]), weight_slots(COMPUTES["mxfp8"])
        (['output.right'], ['output.right', 'grad_input.right'])
    """
    return [name for name, slot in SLOTS.items() if slot.tensor == "weight" and slot_of_cast(compute, name) == name]


def casts_made(compute: Compute) -> tuple[str, ...]:
    """The slots whose casts a compute makes: not those that reuse codes, nor those that only round to 16 or 32 bits.

    Example:
        >>> from narrowgauge.spec.computes import COMPUTES
        >>> casts_made(COMPUTES["float8-tensor"])
        ('output.left', 'output.right', 'grad_input.left')
    """
    return tuple(name for name in SLOTS if slot_of_cast(compute, name) == name and not compute.casts[name].is_wide)


_SAME_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def first_of_input(layer: str) -> str:
    """The first of the layers that get the same input as a layer: they share the cast of it, and its delayed scale.

    Args:
        layer: a dotted name.
    Returns:
        The name of that layer; the layer's own where no other gets its input.
    Example:
        >>> first_of_input("layers.0.self_attn.v_proj"), first_of_input("layers.0.mlp.down_proj")
        ('layers.0.self_attn.q_proj', 'layers.0.mlp.down_proj')
    """
    parent, dot, own = layer.rpartition(".")
    return parent + dot + next((names[0] for names in _SAME_INPUT if own in names), own)
