"""The formats' derived figures, against NumPy, ml_dtypes and integers by hand."""

import ml_dtypes
import pytest

from expectations import ELSEWHERE, FLOATS, INTEGERS
from narrowgauge.spec.formats import FORMATS

ML_DTYPES = [name for name in FORMATS if hasattr(ml_dtypes, name) and FORMATS[name].kind != "int"]


def test_the_tables_know_what_they_should():
    assert {*FLOATS, *INTEGERS, *ELSEWHERE} == set(FORMATS), (
        "tests/expectations.py states each format a second time"
    )
    assert len(ML_DTYPES) >= 5
    assert all(row.source and row.purpose for row in FORMATS.values())


@pytest.mark.parametrize("name", [*ML_DTYPES, "float16", "float32", "float64"])
def test_figures_against_numpy_and_ml_dtypes(name):
    row = FORMATS[name]
    info = ml_dtypes.finfo(getattr(ml_dtypes, name, name))
    assert (row.bits, row.exponent_bits, row.mantissa_bits) == (info.bits, info.nexp, info.nmant)
    assert (row.max, row.min, row.epsilon) == (float(info.max), float(info.min), float(info.eps))
    assert (row.min_exponent, row.max_exponent + 1) == (info.minexp, info.maxexp)
    assert row.smallest_normal == float(info.smallest_normal)
    if row.kind == "float":
        assert row.smallest_subnormal == float(info.smallest_subnormal)


@pytest.mark.parametrize("name", INTEGERS)
def test_integers_by_hand(name):
    row = FORMATS[name]
    assert (row.min, row.max) == INTEGERS[name]
    assert (row.smallest_subnormal, row.smallest_normal, row.epsilon) == (None, None, 1.0)
