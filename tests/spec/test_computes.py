"""Computes: what each row keeps and reuses, which casts serve two matmuls, how far sums may be off,
and what rows promise.
"""

import contextlib
import itertools
import math
from dataclasses import replace

import pytest

import expectations
from narrowgauge.errors import RecipeError
from narrowgauge.spec.computes import COMPUTES, SLOTS, Cast, Product
from tables import exhaustive
from text.refusals import refused


def test_every_row_keeps_and_reuses_what_its_scales_allow():
    assert expectations.COMPUTES.keys() == COMPUTES.keys(), (
        "tests/expectations.py states each compute a second time"
    )
    for name, row in COMPUTES.items():
        expected = expectations.COMPUTES[name]
        assert (row.kept_bytes, row.default_storage) == (
            expected.kept_bytes,
            expected.default_storage,
        ), name
        reused = set()
        for slot_name, slot in SLOTS.items():
            if slot.reuses and not row.is_wide and row.cast_slots[slot_name] != slot_name:
                reused.add(slot.tensor)
        assert reused == set(expected.reused), name
        assert row.is_stochastic == ("stochastic" in expected.has), name
        assert row.scales_loss == ("scaled loss" in expected.has), name


_MX = Cast("float8_e4m3fn", "1x32", "float8_e8m0fnu")


def test_252_casts_of_12096_go_together():
    """Each of them multiplies (tests/matmul/test_linear.py); all others are refused."""
    words = (
        ("bfloat16", "float32", "float64", "tfloat32", "float8_e4m3fn", "int8", "float4_e2m1fn", "float8_e8m0fnu"),
        ("none", "tensor", "row", "column", "1x32", "3x5", "x"),
        ("float32", "float8_e8m0fnu", "float8_e4m3fn", "bad"),
        ("nearest", "stochastic", "bad"),
        ("up", "floor", "bad"),
        ("none", "hadamard", "bad"),
        (0.0, 6.0),
    )  # fmt: skip
    accepted = 0
    for fields in itertools.product(*words):
        with contextlib.suppress(RecipeError):
            accepted += isinstance(Cast(*fields), Cast)
    assert accepted == 252
    for outliers in (-1.0, math.inf, math.nan):
        with pytest.raises(RecipeError):
            Cast("int8", "row", outliers=outliers)


_INT8 = COMPUTES["int8-row"]
_OUTLIERS = COMPUTES["int8-outlier-codes"].output
REFUSED = {
    "one rotated operand": lambda: Product(_MX, replace(_MX, rotation="hadamard")),
    "an unknown accumulation": lambda: Product(_MX, _MX, "bfloat16"),
    "a left column": lambda: Product(Cast("int8", "column"), Cast("int8", "row")),
    "a narrow dtype": lambda: replace(_INT8, name="mine", dtype="float8_e4m3fn"),
    "outliers of a gradient": lambda: replace(_INT8, name="mine", grad_input=_OUTLIERS),
    "an input that rounds stochastically": lambda: replace(_INT8, output=_INT8.grad_input),
    "an unknown transform": lambda: replace(_INT8, transform="fp8"),
    "outliers beside blocks": lambda: replace(
        _INT8, output=Product(_OUTLIERS.left, Cast("int8", "1x32"))
    ),
}


@exhaustive("name", REFUSED)
def test_words_that_do_not_go_together_are_refused_when_they_are_written(name):
    with refused("words that do not go together"):
        REFUSED[name]()


def test_codes_beside_outlier_columns_serve_no_other_matmul():
    for outliers in (0.0, 6.0):
        row, column = (
            Cast("int8", granularity, outliers=outliers) for granularity in ("row", "column")
        )
        assert row.serves(column) == (not outliers)
