"""Stores and buckets: where words lie, what is copied in and out, and what a store gives back."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from narrowgauge.errors import RecipeError
from narrowgauge.numerics.rounding import bits_of
from narrowgauge.optim import codes, layouts
from narrowgauge.optim.elementwise import ADAMW
from narrowgauge.optim.kernels import StepKernel
from narrowgauge.optim.stores import (
    ALIGNMENT,
    BUCKET_WORDS,
    SMALL,
    Store,
    as_words,
    make_stores,
    write_back,
)
from narrowgauge.storages import STORAGES, Storage
from oracles import codes as oracle

every_storage = pytest.mark.parametrize("storage", STORAGES.values(), ids=STORAGES)
SHAPES = [(3,), (0,), (1,), (5, 7), (64, 64), (65, 63), (2, 3, 4), ()]


def kernel(storage: Storage) -> StepKernel:
    return StepKernel(ADAMW, storage, compile=False)


def visible(storage: Storage) -> torch.dtype:
    return getattr(torch, storage.visible)


def gaussian(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def odd_offset(values: Tensor) -> Tensor:
    """The same values, beginning at the second element of a buffer."""
    base = torch.zeros(values.numel() + 1, dtype=values.dtype)
    base[1:] = values.reshape(-1)
    return base[1:].view(values.shape)


def fill(store: Store, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for words in store.words.values():
        words.copy_(torch.randint(-(2**31), 2**31, tuple(words.shape), generator=generator).to(torch.int32))


@every_storage
def test_small_parameters_share_a_bucket_and_large_ones_stand_alone(storage: Storage) -> None:
    dtype = visible(storage)
    shapes = [*SHAPES, (SMALL + 2,), (SMALL + 1,), (130, 66)]
    stores, buckets = make_stores([gaussian(s, dtype) for s in shapes], storage, kernel(storage))
    assert [tuple(s.parameter.shape) for s in stores] == shapes
    assert len(buckets) == 1
    inside = {id(m) for m in buckets[0].members}
    for store in stores:
        size = store.parameter.numel()
        in_words = as_words(store.parameter) is not None
        assert (id(store) in inside) == (size <= SMALL or not in_words)
        for plane in layouts.planes(storage):
            assert not store.words[plane.name].any()
            assert store.words[plane.name].shape == layouts.allocate(storage, plane, size, torch.device("cpu")).shape


@every_storage
def test_segments_are_aligned_disjoint_and_seen_through_the_members(storage: Storage) -> None:
    stores, (bucket,) = make_stores([gaussian(s, visible(storage)) for s in SHAPES], storage, kernel(storage))
    end = 0
    for member, segment in zip(bucket.members, bucket.segments(), strict=True):
        assert segment.start % ALIGNMENT == 0 and segment.start >= end
        assert segment.stop - segment.start == layouts.num_words(storage, member.parameter.numel())
        end = segment.stop
    assert bucket.weights.numel() >= end
    for number, store in enumerate(stores):
        for words in store.words.values():
            words.fill_(number + 1)
    for number, segment in enumerate(bucket.segments()):
        assert all((words[..., segment] == number + 1).all() for words in bucket.words.values())
    # Nobody's words are the padding's.
    counts = sum(s.parameter.numel() and layouts.num_words(storage, s.parameter.numel()) for s in stores)
    for words in bucket.words.values():
        assert int((words != 0).sum()) == counts * (words.numel() // bucket.weights.numel())


@every_storage
def test_buckets_are_closed_when_full(storage: Storage) -> None:
    size = SMALL // layouts.num_lanes(storage)
    parameters = [torch.zeros(SMALL, dtype=visible(storage)) for _ in range(2 * BUCKET_WORDS // size + 1)]
    _, buckets = make_stores(parameters, storage, kernel(storage))
    assert [len(b.members) for b in buckets] == [BUCKET_WORDS // size, BUCKET_WORDS // size, 1]
    assert make_stores([], storage, kernel(storage)) == ([], [])


@every_storage
def test_gather_and_scatter_copy_every_member_and_nothing_else(storage: Storage) -> None:
    dtype = visible(storage)
    parameters = [gaussian(s, dtype, n) for n, s in enumerate(SHAPES)]
    parameters[3] = parameters[3].t().contiguous().t()
    parameters[4] = odd_offset(parameters[4])
    gradients = [gaussian(s, dtype, 100 + n) for n, s in enumerate(SHAPES)]
    gradients[5] = gradients[5].t().contiguous().t()
    before = [p.clone() for p in parameters]
    _, (bucket,) = make_stores(parameters, storage, kernel(storage))
    for member, gradient in zip(bucket.members, gradients, strict=True):
        member.gradient = gradient
    bucket.gather()
    for source, wanted in ((bucket.weights, before), (bucket.gradients, gradients)):
        untouched = source.clone()
        for segment, values in zip(bucket.segments(), wanted, strict=True):
            flat = source[segment].view(dtype)
            assert torch.equal(flat[: values.numel()], values.reshape(-1))
            assert not flat[values.numel() :].any()
            untouched[segment] = 0
        assert not untouched.any()
    bucket.weights.view(dtype).mul_(2)
    bucket.scatter()
    for parameter, old in zip(parameters, before, strict=True):
        assert torch.equal(parameter, 2 * old)


def test_as_words_only_where_length_address_and_order_allow() -> None:
    even = gaussian((4, 6), torch.bfloat16)
    words = as_words(even)
    assert words is not None and words.data_ptr() == even.data_ptr() and words.shape == (12,)
    assert as_words(even.t()) is None
    assert as_words(odd_offset(even)) is None
    assert as_words(gaussian((3, 5), torch.bfloat16)) is None
    single = as_words(odd_offset(gaussian((3, 5), torch.float32)))
    assert single is not None and single.numel() == 15
    assert as_words(torch.zeros(0)) is not None


LAYOUTS = {
    "odd offset": (odd_offset, odd_offset),
    "odd gradient": (lambda x: x, odd_offset),
    "transposed": (lambda x: x.t().contiguous().t(), lambda x: x),
    "transposed gradient": (lambda x: x, lambda x: x.t().contiguous().t()),
    "every second column": (lambda x: torch.stack([x, x], -1)[..., 0], lambda x: x),
}


@pytest.mark.parametrize("name", ["word", "split", "float32"])
@pytest.mark.parametrize("how", LAYOUTS)
@pytest.mark.parametrize("shape", [(70, 61), (701, 33), (5, 30001)])
def test_pieces_cover_the_parameter_once_in_order(
    monkeypatch: pytest.MonkeyPatch, name: str, how: str, shape: tuple[int, int]
) -> None:
    monkeypatch.setattr("narrowgauge.optim.stores.BUCKET_WORDS", 512)
    storage, lanes = STORAGES[name], layouts.num_lanes(STORAGES[name])
    weight, gradient = (gaussian(shape, visible(storage), n) for n in range(2))
    placed, slopes = (place(x) for place, x in zip(LAYOUTS[how], (weight.clone(), gradient), strict=True))
    planes = {p.name: layouts.allocate(storage, p, weight.numel(), weight.device) for p in layouts.planes(storage)}
    store = Store(placed, storage, kernel(storage), planes)
    store.gradient = slopes
    fill(store)
    start, before = 0, {k: w.clone() for k, w in store.words.items()}
    for words, slope_words, plane_words, piece in store.pieces():
        count = piece.numel()
        assert start % lanes == 0
        flat = slice(start, start + count)
        assert torch.equal(words.view(weight.dtype)[:count], weight.reshape(-1)[flat])
        assert torch.equal(slope_words.view(weight.dtype)[:count], gradient.reshape(-1)[flat])
        assert not words.view(weight.dtype)[count:].any()
        assert len({w.numel() for w in (words, slope_words, *plane_words)}) == 1
        for got, whole in zip(plane_words, store.plane_words, strict=True):
            assert got.data_ptr() == whole[start // lanes :].data_ptr()
            got.add_(1)
        words.view(weight.dtype).mul_(-2)
        write_back(words, piece)
        start += count
    assert start == weight.numel()
    assert torch.equal(placed, -2 * weight)
    assert all(torch.equal(words, before[key] + 1) for key, words in store.words.items())


@every_storage
@pytest.mark.parametrize("shape", [(1,), (7, 13), (64, 66)])
def test_adopt_keeps_the_nearest_and_shows_its_bfloat16(storage: Storage, shape: tuple[int, ...]) -> None:
    values = gaussian(shape, torch.float32)
    (store,), _ = make_stores([torch.nn.Parameter(values.to(visible(storage)))], storage, kernel(storage))
    store.adopt(values)
    exact = bits_of(values).numpy().astype("int64") % 2**32
    dropped = codes.dropped_bits(storage.weight)
    kept = oracle.cut(exact, dropped) if dropped else exact
    assert (bits_of(store.stored("weight")).numpy().astype("int64") % 2**32 == kept).all()
    seen = oracle.cut(kept, 16) if storage.visible == "bfloat16" else kept
    shown = store.parameter.detach().float()
    assert (bits_of(shown).numpy().astype("int64") % 2**32 == seen).all()
    assert store.parameter.dtype is visible(storage)
    for name in ("exp_avg", "exp_avg_sq"):
        assert not store.stored(name).any() and store.stored(name).shape == values.shape


def test_adopt_writes_where_the_parameter_lies_and_keeps_no_view_of_the_values() -> None:
    base = torch.zeros(10, dtype=torch.bfloat16)
    (store,), _ = make_stores([base[2:8]], STORAGES["master"], kernel(STORAGES["master"]))
    values = torch.full((6,), 1.0 + 2.0**-12)
    store.adopt(values)
    values.zero_()
    assert base.tolist() == [0, 0, *[1] * 6, 0, 0]
    assert store.stored("weight").tolist() == [1.0 + 2.0**-12] * 6


def test_adopt_narrows_a_wide_parameter_and_quiets_nans() -> None:
    nan = torch.tensor([0x7FFFFFFF, 0x3F800000], dtype=torch.int32).view(torch.float32)
    (store,), _ = make_stores([torch.nn.Parameter(nan.clone())], STORAGES["exact"], kernel(STORAGES["exact"]))
    store.adopt(nan)
    assert store.parameter.dtype is torch.bfloat16
    assert store.parameter.isnan().tolist() == store.stored("weight").isnan().tolist() == [True, False]


@every_storage
@pytest.mark.parametrize("shape", [(0,), (1,), (7, 13), (130, 65)])
def test_what_is_taken_out_goes_in_again(storage: Storage, shape: tuple[int, ...]) -> None:
    parameter = gaussian(shape, visible(storage))
    (one, other), _ = make_stores([parameter, parameter.clone()], storage, kernel(storage))
    fill(one)
    saved = one.in_parameter_order()
    assert all(value.shape == parameter.shape for value in saved.values())
    other.take(saved)
    for name in ("weight", "exp_avg", "exp_avg_sq"):
        assert torch.equal(bits_of(other.stored(name)), bits_of(one.stored(name)))
    saved["exp_avg" if "exp_avg" in saved else "packed"].zero_()
    assert one.in_parameter_order().keys() == saved.keys()


def test_stored_is_a_copy_and_knows_its_names() -> None:
    for storage in STORAGES.values():
        parameter = gaussian((6,), visible(storage))
        (store,), _ = make_stores([parameter], storage, kernel(storage))
        store.adopt(parameter.float())
        for name in ("weight", "exp_avg", "exp_avg_sq"):
            before = store.stored(name)
            store.stored(name).fill_(7)
            assert torch.equal(store.stored(name), before)
        with pytest.raises(KeyError):
            store.stored("momentum")


def test_take_refuses_what_does_not_fit() -> None:
    (store,), _ = make_stores([gaussian((4,), torch.bfloat16)], STORAGES["word"], kernel(STORAGES["word"]))
    with pytest.raises(RecipeError, match="needs 'packed'"):
        store.take({"exp_avg": torch.zeros(4)})
    with pytest.raises(RecipeError, match=r"shape \(5,\) was given"):
        store.take({"packed": torch.zeros(5, dtype=torch.int32)})
    with pytest.raises(RecipeError, match=r"torch\.float32 of shape"):
        store.take({"packed": torch.zeros(4)})
