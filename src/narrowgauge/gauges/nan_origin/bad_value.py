"""Describe the operation that made the first NaN or infinity of a step.

A report names the module and the operation that failed, in forward or backward. It gives the range and dtype
of the operands, and says whether the value reached the loss or a gradient. All of it is collected when the operation
runs, while its operands still exist.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from narrowgauge.spec.formats import FORMATS

Phase = Literal["input", "forward", "backward"]

# Operators that return uninitialized memory.
ALLOCATES = {
    "empty",
    "empty_like",
    "empty_strided",
    "empty_permuted",
    "new_empty",
    "new_empty_strided",
    "resize_",
}
_MOST_OPERANDS = 4


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor of an operation.

    Args:
        name: the parameter or buffer (or a view of it), or else the name of the operation's argument.
        shape, dtype: of the tensor; the dtype as PyTorch names it.
        amin, amax: the smallest nonzero and the largest finite magnitude; ``None`` if there is none.
        num_nonfinite: number of NaNs and infinities.
        place: index of the first of them.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    amin: float | None
    amax: float | None
    num_nonfinite: int
    place: tuple[int, ...]

    def __str__(self) -> str:
        words = f"{self.name} {self.dtype} {list(self.shape)}"
        if self.amin is not None:
            words += f" with magnitudes {self.amin:.3g} to {self.amax:.3g}"
        elif self.amax is not None:
            words += " of zeros"
        return words + (f", {self.num_nonfinite} non-finite" if self.num_nonfinite else "")


@dataclass(frozen=True, slots=True)
class BadValue:
    """The first non-finite value of a step and the operation that made it.

    Args:
        phase: ``input``: the value existed before any operation; ``forward``; ``backward``, with recomputed modules.
        module: dotted name of the innermost module; ``""`` outside the model's modules.
        operation: name of the operation in PyTorch; for ``input`` the first reader of the tensor.
        what: ``nan`` or ``inf`` (without NaN).
        result: the bad result, or the input.
        operands: the operands; none for ``input``.
        parameter: the parameter, buffer or argument that was non-finite before, or whose gradient was being accumulated.
        compute: name of the module's compute, if it is a low-precision layer.
        reached: its destination: ``the loss`` or ``the gradient of NAME``.
    """

    phase: Phase
    module: str
    operation: str
    what: Literal["nan", "inf"]
    result: Operand
    operands: tuple[Operand, ...] = ()
    parameter: str | None = None
    compute: str | None = None
    reached: str = ""

    @property
    def message(self) -> str:
        """Return a sentence that describes the operation, and one of advice."""
        bad, inside = (
            self.result,
            f" in {self.module}" if self.module else " outside the model's modules",
        )
        first = f", the first at {list(bad.place)}" if bad.place else ""
        values = f"{bad.num_nonfinite} of {math.prod(bad.shape)} values ({bad.dtype} {list(bad.shape)}{first})"
        if self.phase == "input":
            name = self.parameter or "a tensor from outside the step"
            words = f"{name} held {self.what} in {values} before any operation; {self.operation}{inside} is the first to read it"
        else:
            whose = f" for {self.parameter}" if self.parameter else ""
            phase = "in backward" if self.phase == "backward" else "forward"
            operands = "; ".join(map(str, self.operands[:_MOST_OPERANDS])) or "nothing"
            words = f"{self.operation}{inside}{whose} ({phase}) made {self.what} in {values}, from {operands}"
        compute = f" Its compute is {self.compute}." if self.compute else ""
        return f"{words}; it reaches {self.reached}.{compute} {self.advice}".strip()

    @property
    def advice(self) -> str:
        """Return advice, if the remedy is clear."""
        if self.phase == "input":
            is_stored = self.parameter is not None and not self.parameter.startswith("argument ")
            stored = "the update that wrote it, or the checkpoint it was loaded from"
            return f"Check {stored if is_stored else 'the batch of this step'}."
        if self.operation.removeprefix("aten.") in ALLOCATES:
            return (
                "This operation returns uninitialized memory, which was read before it was written."
            )
        dtype = self.result.dtype
        number_format = FORMATS.get(dtype)
        if self.what == "inf" and number_format is not None and number_format.max < 1e6:
            return f"The largest finite {dtype} is {number_format.max:.6g}: scale the operands down, or use a wider format here."
        return ""
