"""Number formats: bit fields, range and precision.

A floating-point format has a sign, ``exponent_bits`` that select a power of two, and
``mantissa_bits`` that divide the interval up to the next power into equal steps. ``bias`` sets the
range of the powers. Below the smallest power the steps no longer shrink (subnormals). A convention
defines which codes are infinity or NaN. Everything else follows: largest and smallest value, epsilon. An
integer format has equal steps everywhere.

    sign  exponent  mantissa     value = ± 2^(exponent − bias) × 1.mantissa     exponent > 0
     0      0111      100              ± 2^(1 − bias)          × 0.mantissa     exponent = 0
"""

import math
from dataclasses import dataclass
from functools import cache, cached_property

from narrowgauge.errors import FormatError
from narrowgauge.spec.require import unknown
from narrowgauge.spec.toml import load_rows


@dataclass(frozen=True)
class Format:
    """One number format.

    Attributes:
        name: PyTorch's full spelling.
        bits: of a code.
        exponent_bits, mantissa_bits: bits of the two fields; an integer has mantissa bits only,
            without the sign.
        bias: subtracted from the exponent field.
        specials: codes that are not numbers. ``ieee``: the top exponent holds infinities and NaNs;
            ``all_ones``: the code of all ones (of each sign) is NaN; ``none``: every code is a
            number.
        kind: ``float``, ``int`` or ``scale`` (powers of two only: no sign, no zero).
        purpose: its use, in one line.
        source: the document that defines it.
    """

    name: str
    bits: int
    exponent_bits: int
    mantissa_bits: int
    bias: int
    specials: str
    purpose: str
    source: str
    kind: str = "float"

    @cached_property
    def max(self) -> float:
        """Return the value of the largest code that is a number."""
        mantissas = 1 << self.mantissa_bits
        if self.kind == "int":
            return float(mantissas - 1)
        code = (1 << (self.exponent_bits + self.mantissa_bits)) - 1
        code -= {"ieee": mantissas, "all_ones": 1}.get(self.specials, 0)
        exponent, mantissa = divmod(code, mantissas)
        return math.ldexp(mantissas + mantissa, self.finest_exponent + exponent - self.signed)

    @cached_property
    def min(self) -> float:
        """Return the value of the least code that is a number."""
        if not self.signed:
            return math.ldexp(1.0, self.min_exponent)
        return -self.max - (self.kind == "int")

    @property
    def infinities(self) -> bool:
        return self.specials == "ieee"

    @property
    def nans(self) -> bool:
        return self.specials != "none"

    @property
    def signed(self) -> bool:
        """Return whether negative values and zero exist, which a scale lacks."""
        return self.kind != "scale"

    @property
    def min_exponent(self) -> int:
        """Exponent of the smallest normal value (0 for integers)."""
        return 0 if self.kind == "int" else self.signed - self.bias

    @property
    def max_exponent(self) -> int:
        """Exponent of the largest value: ``2**max_exponent <= max < 2**(max_exponent + 1)``."""
        return math.frexp(self.max)[1] - 1

    @property
    def finest_exponent(self) -> int:
        """Return the exponent of the smallest ulp."""
        return 0 if self.kind == "int" else self.min_exponent - self.mantissa_bits

    @property
    def smallest_normal(self) -> float | None:
        """Return the smallest positive value with a full mantissa; ``None`` for integers."""
        return None if self.kind == "int" else math.ldexp(1.0, self.min_exponent)

    @property
    def smallest_subnormal(self) -> float | None:
        """Return the smallest positive value; ``None`` for integers and formats without subnormals."""
        return math.ldexp(1.0, self.finest_exponent) if self.kind == "float" else None

    @property
    def epsilon(self) -> float:
        """Return the distance from 1 to the next larger value."""
        return 1.0 if self.kind == "int" else math.ldexp(1.0, -self.mantissa_bits)


FORMATS = load_rows(Format, "formats")


def dtype_name(dtype: object) -> str:
    """``"bfloat16"`` for ``torch.bfloat16``: the name of the format that a PyTorch dtype holds."""
    return str(dtype).removeprefix("torch.")


def get_format(name: str | Format) -> Format:
    """Return the format of that name, in PyTorch's full spelling; a Format passes through.

    Raises:
        FormatError: unknown format.
    """
    if isinstance(name, Format):
        return name
    if name not in FORMATS:
        raise unknown("format", name, FORMATS, FormatError)
    return FORMATS[name]


@cache
def bytes_per_number(name: str) -> float:
    """Return the bytes that a number of a format takes in memory: the next power of two of bits."""
    return (1 << (get_format(name).bits - 1).bit_length()) / 8
