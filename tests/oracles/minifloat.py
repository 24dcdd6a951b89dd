"""The values of a narrow format, their spacing, and the nearest scale. No bits are handled."""

import math

from narrowgauge.spec.formats import FORMATS


def values_of(name: str, step: int = 1) -> list[float]:
    """The finite values of a format, ascending; of a float, those of every ``step``th code."""
    row = FORMATS[name]
    if row.kind == "int":
        return [float(value) for value in range(int(row.min), int(row.max) + 1)]
    if row.kind == "scale":
        return [2.0 ** (field - row.bias) for field in range((1 << row.bits) - 1)]
    magnitudes = set()
    for code in range(0, 1 << (row.exponent_bits + row.mantissa_bits), step):
        field, mantissa = divmod(code, 1 << row.mantissa_bits)
        significand = mantissa + ((field > 0) << row.mantissa_bits)
        magnitudes.add(math.ldexp(significand, max(field, 1) - row.bias - row.mantissa_bits))
    finite = [value for value in magnitudes if value <= row.max]
    return sorted({sign * value for value in finite for sign in (-1, 1)})


def spacing(name: str, value: float) -> float:
    """The ulp at a value; at the end of the range for larger ones."""
    row = FORMATS[name]
    if row.kind == "int":
        return 1.0
    magnitude = min(abs(value), row.max)
    exponent = math.frexp(magnitude)[1] - 1 if magnitude else row.min_exponent
    return math.ldexp(1.0, max(exponent, row.min_exponent) - row.mantissa_bits)
