"""The norm that clips is the norm of the summation module, bit for bit, and decides what a step is worth."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

import narrowgauge as ng
from narrowgauge.numerics import summation
from narrowgauge.optim import clip
from narrowgauge.optim.clip import GradientNorm, control_scalars
from narrowgauge.optim.state import SMALL
from oracles.norms import global_norm
from tensors import scalar_bits

CPU = torch.device("cpu")
SHAPES = [(3,), (0,), (), (64, 64), (SMALL + 2,), (SMALL + 1,), (71, 73), (190, 180)]


def gradients(dtypes: tuple[torch.dtype, ...], seed: int = 0, scale: float = 1e-2) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    cycle = itertools.cycle(dtypes)
    return [(torch.randn(shape, generator=generator) * scale).to(next(cycle)) for shape in SHAPES]


@pytest.mark.parametrize(
    "dtypes",
    [
        (torch.bfloat16,),
        (torch.float32,),
        (torch.float16,),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.bfloat16),
    ],
    ids=str,
)
@pytest.mark.parametrize("scale", [1e-30, 1e-2, 1e3])
def test_the_norm_is_the_exact_one(dtypes: tuple[torch.dtype, ...], scale: float) -> None:
    given = gradients(dtypes, scale=scale)
    expected = scalar_bits(global_norm(given))
    norm = GradientNorm(compile=False)
    assert norm(given).dtype is torch.float32
    assert scalar_bits(norm(given)) == expected
    assert scalar_bits(norm(given[::-1])) == expected
    assert scalar_bits(norm([torch.cat([g.reshape(-1).float() for g in given])])) == expected


def test_the_norm_is_right() -> None:
    """Against Python's own correctly rounded sum of exact squares."""
    given = gradients((torch.float32, torch.bfloat16))
    exact = math.sqrt(math.fsum(v * v for g in given for v in g.double().reshape(-1).tolist()))
    assert float(GradientNorm(compile=False)(given)) == pytest.approx(exact, rel=2.0**-23)


def test_places_and_layouts_do_not_enter() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        (plain,) = [g for g in gradients((dtype,)) if g.shape == (190, 180)]
        base = torch.zeros(plain.numel() + 1, dtype=dtype)
        base[1:] = plain.reshape(-1)
        forms = [plain, plain.t(), base[1:].view(190, 180), torch.stack([plain, plain], -1)[..., 0], plain.flatten()]
        forms_norms = {scalar_bits(GradientNorm(compile=False)([form])) for form in forms}
        assert forms_norms == {scalar_bits(global_norm([plain]))}
        pieces = list(plain.split([1, 7, 82, 100]))
        assert scalar_bits(GradientNorm(compile=False)(pieces)) in forms_norms


def test_large_gradients_in_odd_places_are_read_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a pass holds of them is bounded, however large they are."""
    longest: list[int] = []
    for name in ("largest_magnitude", "grid_sum_of_squares"):
        real = getattr(summation, name)
        monkeypatch.setattr(summation, name, lambda x, *rest, real=real: longest.append(x.numel()) or real(x, *rest))
    plain = torch.randn(301, 130, generator=torch.Generator().manual_seed(0))
    expected = scalar_bits(global_norm([plain]))
    longest.clear()
    assert scalar_bits(GradientNorm(compile=False)([plain.t(), *torch.zeros(40, 1000).unbind(0)])) == expected
    assert longest and max(longest) <= summation.CHUNK


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_gpus_rows_hold_each_value_once_and_have_the_same_norm(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients of no rows, of some and a rest, and of an odd number of them; of other dtypes, and of no words."""
    generator = torch.Generator().manual_seed(0)
    sizes = [2 * clip.ROW, 6 * clip.ROW, 22 * clip.ROW + 10, 2, 5000 * 2, 2 * clip.ROW - 2]
    given = [torch.randn(size, generator=generator).to(dtype) for size in sizes]
    in_words = [given_words for gradient in given if (given_words := clip._words_of(gradient)) is not None]
    assert len(in_words) == len(given)
    zeros = torch.zeros(clip.ROW, dtype=in_words[0].dtype)
    words, owners = clip.in_rows(enumerate(in_words), zeros)
    assert all(matrix.shape[1] == clip.ROW and len(matrix) % 2 == 0 for matrix in words)
    rows = [row for number, count in owners for row in [number] * count]
    for number, row in zip(rows, torch.cat(words), strict=True):
        own = row.view(dtype)
        assert torch.isin(own[own != 0], given[number]).all()
    held = torch.cat([matrix.reshape(-1) for matrix in words]).view(dtype)
    assert torch.equal(held[held != 0].sort().values, torch.cat(given)[torch.cat(given) != 0].sort().values)
    others = [torch.randn(7, generator=generator).half(), torch.randn(64, 64, generator=generator).to(dtype).t()]
    expected = scalar_bits(GradientNorm(compile=False)([*given, *others]))
    monkeypatch.setattr(clip, "_reads_rows", lambda gradient: True)
    assert scalar_bits(GradientNorm(compile=False)([*given, *others])) == expected
    nothing = torch.zeros(0, 4, dtype=dtype)  # of a rank that holds no row
    assert scalar_bits(GradientNorm(compile=False)([*given, nothing, *others])) == expected
    assert GradientNorm(compile=False)([nothing]) == 0
    monkeypatch.setattr(clip, "INDEXABLE", 4 * clip.ROW)
    cut, same = clip.in_rows(enumerate(in_words), zeros)
    assert len(cut) > len(words) and same == owners and all(len(matrix) % 2 == 0 for matrix in cut)
    assert scalar_bits(GradientNorm(compile=False)([*given, *others])) == expected


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_gpus_rows_tell_which_gradients_are_finite(value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large and small ones, with and without a rest, of two dtypes, and one beside all others."""
    monkeypatch.setattr(clip, "_reads_rows", lambda gradient: True)
    sizes = [2 * clip.ROW, 2, 22 * clip.ROW + 10, 6, 3 * clip.ROW, 0, 10]
    kinds = itertools.cycle([torch.bfloat16, torch.bfloat16, torch.float32])
    given = [torch.full((size,), 3e38, dtype=next(kinds)) for size in sizes]
    norm = GradientNorm(compile=False)
    for own in (None, given[3]):
        for bad in ((), (0,), (2, 3), (1, 4, 6)):
            now = [g.clone() if g is not own else g for g in given]
            for number in bad:
                now[number][-1] = value
            told = norm.sums(now, own)[2]
            if own is not None:
                own[-1] = 1.0
            assert told is not None and told() == [number not in bad for number in range(len(sizes))]
    assert norm.sums([*given, torch.ones(3, dtype=torch.float16)], None)[2] is None


def test_nothing_and_zeros_have_the_norm_zero() -> None:
    norm = GradientNorm(compile=False)
    for given in (
        [],
        [torch.zeros(0)],
        [torch.zeros(3, 0)] * 2,
        [torch.zeros(5), torch.zeros(0)],
        [torch.zeros(9000, dtype=torch.bfloat16)],
    ):
        assert float(norm(given)) == 0.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("place", range(len(SHAPES)))
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_one_bad_element_anywhere_skips_the_step(dtype: torch.dtype, place: int, value: float) -> None:
    given = gradients((dtype,))
    if not given[place].numel():
        return
    given[place].view(-1)[-1] = value
    norm = GradientNorm(compile=False)(given)
    assert math.isnan(float(norm)) == math.isnan(value) and not math.isfinite(float(norm))
    assert control_scalars(norm, 1.0, CPU).tolist() == [1.0, 1.0]
    assert control_scalars(norm, None, CPU).tolist() == [1.0, 1.0]


def test_nan_outweighs_infinity_and_a_norm_beyond_float32_is_infinite() -> None:
    norm = GradientNorm(compile=False)
    assert math.isnan(float(norm([torch.tensor([math.inf]), torch.tensor([math.nan])])))
    assert float(norm([torch.full((10_000,), 3e38)])) == math.inf


def test_control_scalars() -> None:
    assert control_scalars(None, 1.0, CPU).tolist() == [1.0, 0.0]
    assert control_scalars(torch.tensor(0.5), 1.0, CPU).tolist() == [1.0, 0.0]
    assert control_scalars(torch.tensor(0.0), 1.0, CPU).tolist() == [1.0, 0.0]
    assert control_scalars(torch.tensor(8.0), None, CPU).tolist() == [1.0, 0.0]
    scale, skip = control_scalars(torch.tensor(8.0), 2.0, CPU).tolist()
    assert skip == 0.0 and scale == float(torch.tensor(2.0) / (torch.tensor(8.0) + 1e-6))
    assert control_scalars(torch.tensor(8.0), 2.0, CPU).dtype is torch.float32


def test_clipping_scales_as_torch_does() -> None:
    (given,) = [g for g in gradients((torch.float32,), scale=1.0) if g.shape == (190, 180)]
    parameter = torch.nn.Parameter(torch.zeros_like(given))
    parameter.grad = given.clone()
    torch.nn.utils.clip_grad_norm_([parameter], 0.25)
    scale = control_scalars(GradientNorm(compile=False)([given]), 0.25, CPU)[0]
    torch.testing.assert_close(given * scale, parameter.grad, rtol=1e-6, atol=0)


def test_a_limit_of_the_norm_skips_without_clipping_too() -> None:
    weight = torch.nn.Parameter(torch.ones(4, 4))
    optimizer = ng.AdamW([weight], lr=0.1, storage="float32", audit_every=0)
    for limit, skipped in ((1.0, 1), (100.0, 1)):
        optimizer.skip_above = limit
        weight.grad = torch.ones(4, 4)
        optimizer.step()
        assert optimizer.num_skipped == skipped
    assert not torch.equal(weight, torch.ones(4, 4))


def test_a_spike_that_is_skipped_does_not_lower_the_loss_scale() -> None:
    scaler = ng.LossScaler(initial=4.0, hysteresis=1)
    weight = torch.nn.Parameter(torch.ones(4, 4).half())
    optimizer = ng.AdamW([weight], lr=0.1, storage="float16/split", audit_every=0, loss_scaler=scaler)
    optimizer.skip_above = 1.0
    scaler.scale((weight.float() * 2.0).sum()).backward()
    optimizer.step()
    assert optimizer.num_skipped == 1 and float(scaler.scale_tensor) == 4.0


@pytest.mark.parametrize("dtypes", [(torch.float32,), (torch.bfloat16,)], ids=str)
def test_the_norm_of_one_gradient_beside_that_of_all(dtypes: tuple[torch.dtype, ...]) -> None:
    norm, every = GradientNorm(compile=False), gradients(dtypes)
    for own in (every[0], every[-1]):
        whole, part = norm.with_own(every, own)
        assert scalar_bits(whole) == scalar_bits(norm(every))
        assert part is not None and scalar_bits(part) == scalar_bits(norm([own]))
    every[0].view(-1)[0] = math.inf
    assert not any(found is not None and math.isfinite(found.item()) for found in norm.with_own(every, every[0]))
