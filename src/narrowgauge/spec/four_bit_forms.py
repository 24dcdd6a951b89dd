"""Forms of the four-bit computes: what newer publications change of ``mxfp4`` and ``nvfp4``, a row each.

A form changes some of the six casts and nothing else. It is named by a suffix, ``nvfp4+four-over-six``; where one may follow
another, by both: ``nvfp4+four-over-six+eden``. What each form costs and gains is measured by ``benchmarks/four_bits.py``; the
figures are in the log of the matmuls.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass

Changes = Mapping[str, Mapping[str, str]]


@dataclass(frozen=True)
class Form:
    """One form of a four-bit compute.

    Args:
        word: its name after the plus sign.
        base: the compute that it changes.
        changes: fields of :class:`~narrowgauge.spec.computes.Cast`, by a pattern of slots such as ``"grad_*.left"``.
        purpose: when to use it.
        source: the publication, and what of it could not be confirmed.
        after: the forms that it may follow; ``""``: the row itself.
        is_native: whether the chips that multiply the compute multiply this form too.
    """

    word: str
    base: str
    changes: Changes
    purpose: str
    source: str
    after: tuple[str, ...] = ("",)
    is_native: bool = True

    @property
    def sequences(self) -> list[tuple[str, ...]]:
        """The words of each name that ends in this form."""
        return [(*([before] if before else []), self.word) for before in self.after]

    def changes_of(self, slot: str) -> dict[str, str]:
        """What it changes of the cast of one slot."""
        found = [fields for pattern, fields in self.changes.items() if fnmatch.fnmatchcase(slot, pattern)]
        return {name: value for fields in found for name, value in fields.items()}


_BETTER_SCALE = {"fit": "least-error"}
# All casts but those of the gradient, which are stochastic.
_OF_NEAREST = {"output.*": _BETTER_SCALE, "grad_*.right": _BETTER_SCALE}

FORMS = (
    Form(
        "deterministic", "mxfp4", {"grad_weight.*": {"rounding": "nearest", "rotation": "hadamard-plain"}},
        "mxfp4 with a weight gradient that is rotated without signs and rounded to nearest",
        "Cim et al. 2026 (2605.09825): which intervention, by its abstract; no signs, by a third party's account of it",
    ),
    Form(
        "two-scales", "mxfp4", _OF_NEAREST,
        "mxfp4 with blocks that take the better of two powers of two as their scale",
        "as four-over-six of nvfp4, for the two powers of two between which OCP's rule and saturation lie",
    ),
    Form(
        "four-over-six", "nvfp4", _OF_NEAREST,
        "nvfp4 with blocks that map their largest value to 6 or to 4, whichever errs less",
        "Cook et al. 2025, Four Over Six (2512.02010), with mean squared error and scales of up to 256",
    ),
    Form(
        "eden", "nvfp4", {"grad_*": {"rounding": "eden", "rotation": "hadamard-drawn", "fit": "end"}},
        "nvfp4 with gradients whose randomness is in the rotation and the scales; all four operands of the backward pass",
        "Panferov et al. 2026, Quartet II (2601.22813), MS-EDEN; rotations of 16 here, of 128 there",
        after=("", "four-over-six"),
    ),
    Form(
        "uniform", "nvfp4", {"*": {"format": "int4", "rotation": "hadamard"}},
        "for studies: equally spaced four-bit numbers, rotated in all three matmuls; no chip multiplies them with such scales",
        "Zhao et al. 2026, UFP4 (2606.20381), by its abstract; blocks and scales are nvfp4's",
        is_native=False,
    ),
)  # fmt: skip
"""Every form, in the order in which they are listed."""
