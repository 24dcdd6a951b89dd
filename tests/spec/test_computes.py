"""Computes: what each row keeps and reuses, which casts serve two matmuls, how far sums may be off, and what rows promise."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import expectations
from narrowgauge.spec import computes
from narrowgauge.spec.computes import BLOCKS, COMPUTES, ROTATION_SIZE, Cast, Compute, Product, why_gathered_wide
from narrowgauge.spec.formats import FORMATS, get_format
from tables import exhaustive

every_row = exhaustive("row", COMPUTES.values())
CASTS = list(dict.fromkeys(cast for row in COMPUTES.values() for cast in row.casts.values()))
PRODUCTS = list(dict.fromkeys(product for row in COMPUTES.values() for product in row.products.values()))
SCALED = ("tensor", "row", "column", *BLOCKS)


# ── rows ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_every_row_keeps_and_reuses_what_its_scales_allow() -> None:
    assert expectations.COMPUTES.keys() == COMPUTES.keys(), "tests/expectations.py states each compute a second time"
    for name, row in COMPUTES.items():
        expected = expectations.COMPUTES[name]
        assert (row.kept_bytes, row.default_storage) == (expected.kept_bytes, expected.default_storage), name
        reused = {s.tensor: not row.is_wide and row.cast_slots[n] != n for n, s in computes.SLOTS.items() if s.reuses}
        assert {slot for slot, is_so in reused.items() if is_so} == set(expected.reused), name
        has = {"stochastic": row.is_stochastic, "delayed": row.is_delayed, "scaled loss": row.scales_loss}
        has["gathered"] = not why_gathered_wide(row)
        assert {slot for slot, is_so in has.items() if is_so} == set(expected.has) - {"served"}, name


@every_row
def test_only_gradients_are_rounded_stochastically(row: Compute) -> None:
    """Weights and activations are rounded to the nearest, so that evaluation and recomputation give the same bits."""
    gradients = {"grad_input.left", "grad_weight.left"}
    assert {place for place, cast in row.casts.items() if cast.rounding == "stochastic"} in (set(), gradients)


# ── what the casts of a product have in common ──────────────────────────────────────────────────────────────────────


@exhaustive("product", PRODUCTS)
def test_operands_of_a_product_can_be_multiplied(product: Product) -> None:
    left, right = product.left, product.right
    assert left.rotation == right.rotation
    # Scales change at the same places of the contraction, or nowhere along it.
    steps = {cast.block[1] for cast in (left, right) if cast.block}
    assert len(steps) <= 1 and (left.block is None) == (right.block is None)
    # A scale for each term goes into the other operand before that is cast, whose own scale must lie outside the sum.
    assert left.granularity != "column"
    assert right.granularity != "column" or left.granularity in ("row", "tensor")
    assert left.is_wide == right.is_wide
    assert (product.accumulation == "int32") == (left.element.kind == "int" == right.element.kind)
    assert product.is_wide == (left.is_wide and right.is_wide)


@exhaustive("cast", CASTS)
def test_a_cast_is_one_that_can_be_made(cast: Cast) -> None:
    assert cast.format in FORMATS and cast.element is get_format(cast.format)
    assert cast.is_wide == (cast.granularity == "none") == (cast.element.bits > 8)
    assert cast.granularity in {"none", *SCALED}
    # Scales of blocks are powers of two or numbers of 8 bits; whole scales, which are few, are float32.
    assert (cast.block is None) == (cast.scale == "float32")
    assert (cast.block is None) or cast.block == BLOCKS[cast.granularity]
    assert cast.rotation == "none" or (cast.block is not None and cast.block[1] % ROTATION_SIZE == 0)
    assert cast.scaling == "current" or cast.granularity == "tensor"
    of_outliers = [COMPUTES[name].output.left for name in ("int8-outlier", "int8-outlier-codes")]
    assert not cast.outliers or cast in of_outliers


def test_bits_of_a_value_have_its_share_of_a_scale() -> None:
    expected = {
        "float8-tensor": 8.0, "float8-row": 8.0, "int8-row": 8.0, "mxfp8": 8.25, "mxfp6": 6.25, "mxfp4": 4.25, "nvfp4": 4.5,
        "float8-block": 8.25, "bfloat16": 16.0, "tfloat32": 19.0,
    }  # fmt: skip
    assert {name: COMPUTES[name].output.left.bits for name in expected} == expected
    assert COMPUTES["float8-block"].output.right.bits == 8 + 32 / 128**2


def test_what_is_stored_without_training_is_counted_to_the_byte() -> None:
    sizes = {
        name: computes.stored_bytes(COMPUTES[name], 40, 168)
        for name in ("int8-row", "float8-tensor", "float8-block", "mxfp8")
    }
    scales = {"int8-row": 4 * 40, "float8-tensor": 4, "float8-block": 1 * 2, "mxfp8": 40 * 6}
    assert sizes == {name: 40 * 168 + number for name, number in scales.items()}
    assert computes.stored_bytes(COMPUTES["int8-outlier"], 40, 168, 3) == 40 * 168 + 160 + 3 * (2 * 40 + 4)
    served = {name for name, row in expectations.COMPUTES.items() if "served" in row.has}
    assert {name for name, row in COMPUTES.items() if computes.stores_codes(row)} == served
    assert [name for name, row in COMPUTES.items() if computes.keeps_outlier_weights(row)] == ["int8-outlier"]


# ── serves ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def grouped(granularity: str, dim: int) -> list[tuple[int, ...]]:
    """Which of 256 × 256 places share a scale with each, where ``dim`` is contracted; the first of its group stands for it."""
    high, wide = {"tensor": (256, 256), "row": (1, 256), "column": (256, 1), "none": (256, 256), **BLOCKS}[granularity]
    high, wide = (high, wide) if dim == 1 else (wide, high)
    return [(row // high, column // wide) for row in range(0, 256, 8) for column in range(0, 256, 8)]


@exhaustive("one", ["none", *SCALED])
@exhaustive("other", ["none", *SCALED])
def test_codes_serve_where_scales_are_shared_by_the_same_places(one: str, other: str) -> None:
    """Along the one dimension and along the other: worked out from places, not from names."""
    if "none" in (one, other) and one != other:
        assert not Cast("int8", one).serves(Cast("int8", other))  # type: ignore[arg-type]
        return
    same = grouped(one, 1) == grouped(other, 0)
    # Codes of columns would serve rows as well; no row of the table has them that way.
    assert Cast("int8", one).serves(Cast("int8", other)) == (same and one != "column")  # type: ignore[arg-type]


def variations(cast: Cast) -> Iterator[Cast]:
    """Casts that differ in one other field, each of which makes other codes."""
    yield replace(cast, format="float8_e5m2")
    yield replace(cast, scale="float8_e8m0fnu")
    yield replace(cast, rounding="stochastic")
    yield replace(cast, scaling="delayed")
    yield replace(cast, rotation="hadamard")
    yield replace(cast, outliers=6.0)
    yield replace(cast, outlier_weights="codes")


@exhaustive(("one", "other"), [("tensor", "tensor"), ("row", "column"), ("128x128", "128x128")])
def test_codes_of_another_cast_do_not_serve(one: str, other: str) -> None:
    cast, turned = Cast("float8_e4m3fn", one), Cast("float8_e4m3fn", other)  # type: ignore[arg-type]
    assert cast.serves(turned)
    for varied in variations(turned):
        assert not cast.serves(varied)
    for varied in variations(cast):
        assert not varied.serves(turned)
    # A rotation mixes along one contraction and outliers are columns of one operand: neither serves itself.
    for field, value in (("rotation", "hadamard"), ("outliers", 6.0)):
        assert not replace(cast, **{field: value}).serves(replace(turned, **{field: value}))  # type: ignore[arg-type]
