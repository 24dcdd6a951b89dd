"""Bad values: what is known of the operation that made the first NaN or infinity of a step, and how it is told.

A report of a bad value has to answer what its reader would look up next: which operation of which module, on the way forward
or back, what went in (how small, how large, in which format), and whether it mattered: whether it reached the loss or a
gradient. All of it is noted at the moment of the operation, while its operands still exist.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from narrowgauge.spec.formats import ALIASES, FORMATS

Phase = Literal["input", "forward", "backward", "backward-recompute"]

# Their result is whatever memory held.
ALLOCATES = {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided", "resize_"}
_IN_PHASE = {
    "forward": "forward",
    "backward": "in backward",
    "backward-recompute": "computed again in backward, for activation checkpointing",
}
_MOST_OPERANDS = 4


@dataclass(frozen=True, slots=True)
class Operand:
    """One tensor that went into an operation.

    Args:
        position: among the operation's tensors of numbers.
        name: the parameter or buffer that it is or looks at, else the operation's own word for it.
        shape: of the tensor.
        dtype: PyTorch's name of its format.
        amin: the smallest finite magnitude that is not 0; ``None`` where there is none.
        amax: the largest finite magnitude; ``None`` where there is none.
        num_nonfinite: NaN and infinities in it.
    """

    position: int
    name: str
    shape: tuple[int, ...]
    dtype: str
    amin: float | None
    amax: float | None
    num_nonfinite: int

    def __str__(self) -> str:
        words = f"{self.name} {self.dtype} {list(self.shape)}"
        if self.amin is not None:
            words += f" of {self.amin:.3g} to {self.amax:.3g}"
        elif self.amax is not None:
            words += " of zeros"
        return words + (f" with {self.num_nonfinite} not finite" if self.num_nonfinite else "")


@dataclass(frozen=True, slots=True)
class BadValue:
    """The first value that is not finite, and the operation that made it.

    Args:
        phase: ``input``: it was there before any operation; ``forward``; ``backward``; ``backward-recompute``: in what
            activation checkpointing computes again on the way back.
        module: dotted name of the innermost module; ``""`` outside of the model's modules.
        operation: as PyTorch names it; for ``input`` the first that read the tensor.
        what: ``nan`` or ``inf`` (without any NaN).
        shape, dtype: of the output that holds it, or of the input.
        num_bad, num_values: how many of its values are not finite, of how many.
        place: index of the first of them.
        operands: what went in; for ``input`` the tensor itself.
        parameter: the parameter, buffer or argument that was bad before, or whose gradient was being added up.
        row: the module's row of computes, where it is a narrow layer.
        casts: how that operation casts its operands there.
        reached: what became of it: ``the loss`` or ``the gradient of NAME``.
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
    row: str | None = None
    casts: tuple[str, ...] = ()
    reached: str = ""

    @property
    def tensor(self) -> str:
        """What an event about it names: the parameter, else the module."""
        return self.parameter or self.module

    @property
    def message(self) -> str:
        """What happened and where, in a sentence, and one of advice."""
        return f"{self._as_input() if self.phase == 'input' else self._as_result()} {self.advice}".strip()

    @property
    def advice(self) -> str:
        """What to do, where that is plain."""
        if self.phase == "input":
            stored = "the update that wrote it, or the checkpoint that it came from"
            return f"Look at {stored if self.is_stored else 'the batch of this step'}."
        if self.operation.removeprefix("aten.") in ALLOCATES:
            return "It only takes memory: this was read before anything was written there."
        largest = _largest(self.dtype)
        if self.what == "inf" and largest is not None and largest < 1e6:
            return f"{self.dtype} ends at {largest:.6g}: scale the operands down, or take a wider format here."
        return ""

    @property
    def is_stored(self) -> bool:
        """Whether what was bad before any operation is a parameter or a buffer of the model."""
        return self.phase == "input" and self.parameter is not None and not self.parameter.startswith("argument ")

    def _as_input(self) -> str:
        name = self.parameter or "a tensor that no operation of the step made"
        return (
            f"{name} held {self._count()} before any operation; {self.operation}{_inside(self.module)} reads it first"
            f"{self._end()}."
        )

    def _as_result(self) -> str:
        whose = f" for {self.parameter}" if self.parameter else ""
        told = "; ".join(str(operand) for operand in self.operands[:_MOST_OPERANDS]) or "nothing"
        row = f" Its compute is {self.row}{': ' + '; '.join(self.casts) if self.casts else ''}." if self.row else ""
        return (
            f"{self.operation}{_inside(self.module)}{whose} ({_IN_PHASE[self.phase]}) made {self._count()}, "
            f"from {told}{self._end()}.{row}"
        )

    def _count(self) -> str:
        where = f", the first at {list(self.place)}" if self.place else ""
        return f"{self.what} in {self.num_bad} of {self.num_values} values ({self.dtype} {list(self.shape)}{where})"

    def _end(self) -> str:
        return f"; it reaches {self.reached}" if self.reached else ""


def _inside(module: str) -> str:
    return f" in {module}" if module else " outside of the model's modules"


def _largest(dtype: str) -> float | None:
    row = FORMATS.get(ALIASES.get(dtype, dtype))
    return None if row is None else row.max
