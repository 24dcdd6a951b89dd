"""Bad values: describe the operation that made the first NaN or infinity of a step.

A report names the module and the operation that failed, in forward or backward. It gives the range and dtype
of the operands, and says whether the value reached the loss or a gradient. All of it is collected when the operation
runs, while its operands still exist.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from narrowgauge.spec.formats import FORMATS

Phase = Literal["input", "forward", "backward"]

# Operators that return uninitialized memory.
ALLOCATES = {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided", "resize_"}
_MOST_OPERANDS = 4


@dataclass(frozen=True, slots=True)
class Operand:
    """An operand of an operation.

    Args:
        name: the parameter or buffer (or a view of it), or else the name of the operation's argument.
        shape, dtype: of the tensor; the dtype as PyTorch names it.
        amin, amax: the smallest nonzero and the largest finite magnitude; ``None`` if there is none.
        num_nonfinite: number of NaNs and infinities.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    amin: float | None
    amax: float | None
    num_nonfinite: int

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
        shape, dtype: of the bad result, or of the input.
        num_bad, num_values: number of non-finite values, and of all values.
        place: index of the first non-finite value.
        operands: the operands; for ``input`` the tensor itself.
        parameter: the parameter, buffer or argument that was non-finite before, or whose gradient was being accumulated.
        compute: name of the module's compute, if it is a low-precision layer.
        reached: its destination: ``the loss`` or ``the gradient of NAME``.
    """

    phase: Phase
    module: str
    operation: str
    what: Literal["nan", "inf"]
    shape: tuple[int, ...]
    dtype: str
    num_bad: int
    num_values: int
    place: tuple[int, ...]
    operands: tuple[Operand, ...] = ()
    parameter: str | None = None
    compute: str | None = None
    reached: str = ""

    @property
    def tensor(self) -> str:
        """Return the tensor's name for an event: the parameter, or else the module."""
        return self.parameter or self.module

    @property
    def message(self) -> str:
        """Return a sentence that describes the operation, and one of advice."""
        return f"{self._as_input() if self.phase == 'input' else self._as_result()} {self.advice}".strip()

    @property
    def advice(self) -> str:
        """Return advice, if the remedy is clear."""
        if self.phase == "input":
            is_stored = self.parameter is not None and not self.parameter.startswith("argument ")
            stored = "the update that wrote it, or the checkpoint it was loaded from"
            return f"Check {stored if is_stored else 'the batch of this step'}."
        if self.operation.removeprefix("aten.") in ALLOCATES:
            return "This operation returns uninitialized memory, which was read before it was written."
        number_format = FORMATS.get(self.dtype)
        largest = None if number_format is None else number_format.max
        if self.what == "inf" and largest is not None and largest < 1e6:
            return f"The largest finite {self.dtype} is {largest:.6g}: scale the operands down, or use a wider format here."
        return ""

    def _as_input(self) -> str:
        name = self.parameter or "a tensor from outside the step"
        return (
            f"{name} held {self._count()} before any operation; {self.operation}{_inside(self.module)} is the first to read it"
            f"{self._end()}."
        )

    def _as_result(self) -> str:
        whose = f" for {self.parameter}" if self.parameter else ""
        operands = "; ".join(str(operand) for operand in self.operands[:_MOST_OPERANDS]) or "nothing"
        compute = f" Its compute is {self.compute}." if self.compute else ""
        phase = "in backward" if self.phase == "backward" else "forward"
        return (
            f"{self.operation}{_inside(self.module)}{whose} ({phase}) made {self._count()}, "
            f"from {operands}{self._end()}.{compute}"
        )

    def _count(self) -> str:
        where = f", the first at {list(self.place)}" if self.place else ""
        return f"{self.what} in {self.num_bad} of {self.num_values} values ({self.dtype} {list(self.shape)}{where})"

    def _end(self) -> str:
        return f"; it reaches {self.reached}" if self.reached else ""


def _inside(module: str) -> str:
    return f" in {module}" if module else " outside the model's modules"
