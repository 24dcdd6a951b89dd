"""Casts at work: the operand is what the definition says, in a dtype that loses nothing; compiled, cut and laid as may be."""

from __future__ import annotations

import itertools
import math
from types import FunctionType

import pytest
import torch
from torch import Tensor

from covering import exhaustive, whole
from matmul.scenarios import CPU, DIMS, KEY, ROWS, exact, gaussian, quantized, words_for
from narrowgauge.matmul.gemm import operand_dtype
from narrowgauge.matmul.operand import Operand, cast_matrix, outer_shape
from narrowgauge.numerics import fusion
from narrowgauge.numerics.edge_values import edge_values
from narrowgauge.numerics.quantization import padded
from narrowgauge.spec.computes import BLOCKS, COMPUTES, PLACES, Cast
from tensors import bits_with_one_nan

SIDES = {"left": 0, "right": 1}


def used() -> list[tuple[Cast, int, torch.dtype]]:
    """Every cast of the table, with the dimension it contracts and the dtype in which it is handed over; each once."""
    found = {}
    for row, place, side in itertools.product(ROWS, PLACES, SIDES):
        matmul = row.products[place]
        cast, dim = getattr(matmul, side), DIMS[place][SIDES[side]]
        for as_codes in (False, True):
            found[cast, dim, operand_dtype(cast, matmul, CPU, as_codes=as_codes)] = None
    return list(found)


USED = used()
every_cast = exhaustive(("cast", "dim", "dtype"), USED)
SHAPES = [(33, 65), (1, 40), (40, 1), (1, 1), (128, 256)]
STEPS = [(cast, dim, dtype) for cast, dim, dtype in USED if cast.granularity != "none"]
# One for each way through the code: whole and blocks, codes and values, words, a fold, two levels, a rotation.
COMPILED = [
    (Cast("float8_e4m3fn", "row"), 1, torch.bfloat16, False),
    (Cast("int8", "row", rounding="stochastic"), 0, torch.int8, True),
    (COMPUTES["float8-block"].output.right, 1, torch.bfloat16, False),
    (COMPUTES["nvfp4"].grad_weight.left, 0, torch.bfloat16, False),
]


def made(
    x: Tensor, cast: Cast, dim: int, dtype: torch.dtype, *, first_row: Tensor | int = 0, **options: Tensor | None
) -> Operand:
    """A matrix cast, with the random words that it asks for."""
    return cast_matrix(x, cast, dim, dtype, words=words_for(x, cast, dim, KEY, first_row), **options)


def values(operand: Operand) -> Tensor:
    """What it stands for, in float64."""
    found = operand.data.double()
    return found if operand.outer is None else found * operand.outer.double()


def fold_for(shape: tuple[int, int], dim: int) -> Tensor:
    size = [1, 1]
    size[dim] = shape[dim]
    return gaussian(*size, dtype=torch.float32, seed=9).abs() + 0.1


@every_cast
@exhaustive("shape", SHAPES)
def test_an_operand_is_the_definition_s_bit_for_bit(
    cast: Cast, dim: int, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    for source in (torch.bfloat16, torch.float32):
        x = gaussian(*shape, dtype=source)
        found, defined = made(x, cast, dim, dtype), quantized(x, cast, dim)
        assert found.data.dtype == dtype
        assert torch.equal(values(found), exact(defined))
        assert (found.outer is None) == (defined.outer is None)
        if found.outer is not None and defined.outer is not None:
            assert torch.equal(found.outer, defined.outer)
        assert found.data.shape == padded(x, cast, dim).shape
        shape_of_scale = outer_shape(found.data.shape, cast, dim)
        assert shape_of_scale == (None if found.outer is None else tuple(found.outer.shape))


@every_cast
def test_an_operand_does_not_depend_on_how_its_matrix_lies(cast: Cast, dim: int, dtype: torch.dtype) -> None:
    x = gaussian(33, 65)
    wide = gaussian(66, 130)
    wide[::2, ::2] = x
    expected = made(x, cast, dim, dtype)
    for lying in (x.t().contiguous().t(), wide[::2, ::2]):
        found = made(lying, cast, dim, dtype)
        assert torch.equal(bits_with_one_nan(found.data), bits_with_one_nan(expected.data))
        assert found.outer is None or torch.equal(found.outer, expected.outer)


@every_cast
def test_what_fills_a_matrix_up_is_zero(cast: Cast, dim: int, dtype: torch.dtype) -> None:
    data = made(gaussian(33, 65), cast, dim, dtype).data.float()
    if cast.rotation == "none":
        assert not data[33:].any() and not data[:, 65:].any()
    else:
        # A rotation mixes 16 places: what is added beside them stays zero.
        rest = data[48:] if dim == 0 else data[:, 80:]
        assert not rest.any()


@every_cast
def test_a_cast_does_not_change_what_it_casts(cast: Cast, dim: int, dtype: torch.dtype) -> None:
    x = gaussian(32, 128).requires_grad_()
    before = x.detach().clone()
    found = made(x, cast, dim, dtype)
    assert not found.data.requires_grad
    assert torch.equal(x.detach(), before)


@exhaustive("row", [row for row in ROWS if row.is_stochastic])
def test_rows_of_a_micro_batch_get_the_words_they_have_in_the_batch(row) -> None:  # type: ignore[no-untyped-def]
    cast = row.grad_input.left
    x = gaussian(64, 96, seed=3)
    whole = made(x, cast, 1, torch.bfloat16, amax=torch.full((1, 1), 4.0))
    for first in (torch.tensor(24, dtype=torch.int32), 24):
        part = made(
            x[24:40], cast, 1, torch.bfloat16, first_row=first, amax=torch.full((1, 1), 4.0)
        )  # two levels share one scale of the tensor: given, so that only the words can differ
        assert torch.equal(part.data, whole.data[24:40])
    other = made(x[24:40], cast, 1, torch.bfloat16, amax=torch.full((1, 1), 4.0))
    assert not torch.equal(other.data, whole.data[24:40])


@exhaustive(("cast", "dim", "dtype"), STEPS)
@exhaustive("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_makes_its_group_nan(cast: Cast, dim: int, dtype: torch.dtype, bad: float) -> None:
    if cast.scaling == "static" and bad == bad:
        pytest.skip("without a scale an infinity saturates, like whatever lies beyond the format's end")
    x = gaussian(256, 256)
    x[3, 130] = bad
    found = values(made(x, cast, dim, dtype)).isnan()
    rows, columns = (cast.block or (1, 1)) if dim == 1 else (cast.block or (1, 1))[::-1]
    group = torch.zeros(256, 256, dtype=torch.bool)
    if cast.scale == "float8_e4m3fn" or cast.granularity == "tensor":
        group[:] = cast.scaling != "static"
        group[3, 130] = True
    elif cast.block is not None:
        top, left = 3 // rows * rows, 130 // columns * columns
        group[top : top + rows, left : left + columns] = True
    elif (cast.granularity == "row") == (dim == 1):
        group[3] = True
    else:
        group[:, 130] = True
    assert torch.equal(found, group)


@exhaustive(("cast", "dim", "dtype"), STEPS)
def test_zeros_stay_zeros_and_tiny_values_stay_finite(cast: Cast, dim: int, dtype: torch.dtype) -> None:
    assert not values(made(torch.zeros(33, 65).bfloat16(), cast, dim, dtype)).any()
    for size in (2.0**-133, 2.0**-120, 1e-30):
        found = values(made(torch.full((33, 65), size), cast, dim, dtype))
        assert found.isfinite().all()
    largest = torch.full((32, 128), 2.0**120)
    found = values(made(largest, cast, dim, dtype))[:32, :128]
    assert found.isfinite().all() and (cast.rotation != "none" or (found > 0).all())


@every_cast
def test_a_matrix_without_rows_is_an_operand_without_rows(cast: Cast, dim: int, dtype: torch.dtype) -> None:
    found = made(torch.zeros(0, 65).bfloat16(), cast, dim, dtype)
    full = made(torch.zeros(128, 65).bfloat16(), cast, dim, dtype)
    assert found.data.dtype == dtype and found.data.shape == (0, full.data.shape[1])
    assert (found.outer is None) == (full.outer is None)
    if found.outer is not None and full.outer is not None:
        assert found.outer.shape == (0 if full.outer.shape[0] == 128 else 1, full.outer.shape[1])


@exhaustive("cast", [COMPUTES["int8-row"].grad_input.left, COMPUTES["float8-row"].output.left])
@exhaustive("dim", [0, 1])
def test_a_fold_is_a_factor_of_the_matrix(cast: Cast, dim: int) -> None:
    """Scales of the other operand that lie along the contraction: cast with them is the cast of the product."""
    x, fold = gaussian(33, 65), fold_for((33, 65), dim)
    dtype = torch.int8 if cast.format == "int8" else torch.bfloat16
    found = made(x, cast, dim, dtype, fold=fold)
    expected = made(x.float() * fold, cast, dim, dtype)
    assert torch.equal(found.data, expected.data)
    assert found.outer is not None and torch.equal(found.outer, expected.outer)


@exhaustive("name", ["float8-delayed", "nvfp4"])
def test_a_largest_magnitude_from_elsewhere_makes_the_tensor_s_scale(name: str) -> None:
    cast, x = COMPUTES[name].output.left, gaussian(32, 64)
    dtype = operand_dtype(cast, COMPUTES[name].output, CPU)
    own = x.float().abs().amax().view(1, 1)
    assert torch.equal(made(x, cast, 1, dtype, amax=own).data, made(x, cast, 1, dtype).data)
    wider = made(x, cast, 1, dtype, amax=own * 2)
    narrow = made(x, cast, 1, dtype)
    assert wider.outer is not None and narrow.outer is not None
    assert torch.equal(wider.outer, narrow.outer * 2)


def test_beyond_a_given_magnitude_values_saturate() -> None:
    cast = COMPUTES["float8-delayed"].output.left
    x = torch.tensor([[1.0, -3.0, 0.5, 1000.0]])
    found = made(x, cast, 1, torch.float8_e4m3fn, amax=torch.ones(1, 1))
    assert found.data.float().tolist() == [[448.0, -448.0, 224.0, 448.0]]


@whole
@pytest.mark.parametrize(("cast", "dim", "dtype", "is_folded"), COMPILED, ids=lambda value: str(value))
def test_compiled_casts_give_the_same_bits_for_any_shape(
    cast: Cast, dim: int, dtype: torch.dtype, is_folded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert fusion.can_compile("cpu")
    # At least two blocks along each side: a side of one is another kernel.
    shapes = [(200, 260), (300, 129), (130, 513)]
    cases = [
        (gaussian(*shape, seed=seed), fold_for(shape, dim) if is_folded else None) for seed, shape in enumerate(shapes)
    ]
    # Zeros, and a group that is not finite.
    cases[1][0][:32] = 0.0
    cases[1][0][40, 7] = torch.nan
    cases[2][0][:64] = edge_values(torch.float32, (64, 513), finite=True)

    def run(x: Tensor, fold: Tensor | None) -> Operand:
        first = torch.tensor(12, dtype=torch.int32)
        return made(x, cast, dim, dtype, first_row=first, fold=fold)

    expected = [run(*case) for case in cases]
    calls: list[str] = []
    real = fusion.compiled_for_pattern

    def counted(definition: FunctionType, *arguments: Tensor | None) -> object:
        calls.append(definition.__name__)
        return real(definition, *arguments)

    monkeypatch.setattr(fusion, "COMPILE_ELEMENTS", 1)
    monkeypatch.setattr(fusion, "compiled_for_pattern", counted)
    found = [run(*cases[0])]
    with torch.compiler.set_stance("fail_on_recompile"):
        found += [run(*case) for case in cases[1:]]
    kind = "cast_whole" if cast.block is None else "cast_blocks"
    assert calls == [*(["rotate_blocks"] if cast.rotation == "hadamard" else []), kind] * 3
    for one, other in zip(found, expected, strict=True):
        assert one.data.dtype == other.data.dtype and (one.outer is None) == (other.outer is None)
        # What the code of a NaN is, an int8 does not say: its scale does.
        assert torch.equal(bits_with_one_nan(values(one)), bits_with_one_nan(values(other)))


def test_small_matrices_and_machines_without_a_compiler_cast_uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object) -> object:
        raise AssertionError("compiled")

    monkeypatch.setattr(fusion, "compiled_for_pattern", forbidden)
    cast, limit = COMPUTES["float8-row"].output.left, fusion.COMPILE_ELEMENTS
    side = math.isqrt(limit)
    made(torch.zeros(side, side - 1), cast, 1, torch.bfloat16)
    with pytest.raises(AssertionError, match="compiled"):
        made(torch.zeros(side, limit // side + 1), cast, 1, torch.bfloat16)
    monkeypatch.setattr(fusion, "model_compiler_missing", lambda: "no C++ compiler is on PATH")
    fusion.can_compile.cache_clear()
    try:
        with pytest.warns(UserWarning, match=r"no C\+\+ compiler is on PATH: casts run uncompiled"):
            made(torch.zeros(side, limit // side + 1), cast, 1, torch.bfloat16)
    finally:
        fusion.can_compile.cache_clear()


def test_the_table_has_casts_of_every_kind() -> None:
    """What the tests above go through: each granularity, scale and rounding stands in some row."""
    seen = {cast.granularity for cast, _, _ in USED}
    assert seen == {"none", "tensor", "row", "column", *BLOCKS}
    assert {cast.scale for cast, _, _ in USED} == {"float32", "power-of-two", "float8_e8m0fnu", "float8_e4m3fn"}
    assert {cast.rounding for cast, _, _ in USED} == {"nearest", "stochastic"}
    assert {cast.scaling for cast, _, _ in USED} == {"current", "delayed", "static"}
