"""Stores and buckets: where words lie, what is copied in and out, and what a store gives back."""

from __future__ import annotations

import math
from itertools import accumulate

import numpy as np
import pytest
import torch
from torch import Tensor

from covering import exhaustive
from narrowgauge.errors import RecipeError
from narrowgauge.numerics.rounding import bits_of
from narrowgauge.optim import codec
from narrowgauge.optim.kernel import StepKernel
from narrowgauge.optim.rules.elementwise import ADAMW
from narrowgauge.optim.state import (
    ALIGNMENT,
    BUCKET_WORDS,
    SMALL,
    SMALLEST_BOUND,
    ParameterState,
    as_words,
    make_states,
    weight_bound,
)
from narrowgauge.optim.step import strided_copies, write_back
from narrowgauge.spec.storages import STORAGES, Storage
from optim.scenarios import REPRESENTATIVES, finest, row_of
from oracles import codes as oracle
from tensors import gaussian

# Two that no row of the table is like: four lanes without scales, and scales for one of the moments only.
ROWS = [STORAGES[name] for name in REPRESENTATIVES]
ROWS += [row_of("tail8+bfloat16+float32"), row_of("bfloat16-pair+e4m3-row+float32")]
FLAT = [row for row in ROWS if not codec.by_rows(row)]
IN_ROWS = [row for row in ROWS if codec.by_rows(row)]
names = {"ids": lambda row: row.name}
every_storage = exhaustive("storage", ROWS)
every_flat = exhaustive("storage", FLAT)
every_in_rows = pytest.mark.parametrize("storage", IN_ROWS, **names)
SHAPES = [(3,), (0,), (1,), (5, 7), (64, 64), (65, 63), (2, 3, 4), ()]
STATES = ("exp_avg", "exp_avg_sq")


def kernel(storage: Storage) -> StepKernel:
    return StepKernel(ADAMW, storage, compile=False)


def visible(storage: Storage) -> torch.dtype:
    return getattr(torch, storage.visible)


def alone(parameter: Tensor, storage: Storage) -> ParameterState:
    """A store with words of its own, whatever its size."""
    (store,), _ = make_states([parameter], storage, kernel(storage), joined=False)
    return store


def odd_offset(values: Tensor) -> Tensor:
    """The same values, beginning at the second element of a buffer."""
    base = torch.zeros(values.numel() + 1, dtype=values.dtype)
    base[1:] = values.reshape(-1)
    return base[1:].view(values.shape)


def fill(store: ParameterState, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for words in store.words.values():
        words.copy_(torch.randint(-(2**31), 2**31, tuple(words.shape), generator=generator).to(torch.int32))
    for bound in store.bounds.values():
        bound.copy_(torch.rand(bound.shape, generator=generator))


# ── buckets ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@every_flat
def test_small_parameters_share_a_bucket_and_large_ones_stand_alone(storage: Storage) -> None:
    dtype = visible(storage)
    shapes = [*SHAPES, (SMALL + 2,), (SMALL + 1,), (130, 66)]
    stores, buckets = make_states([gaussian(*s, dtype=dtype) for s in shapes], storage, kernel(storage))
    assert [tuple(s.parameter.shape) for s in stores] == shapes
    assert len(buckets) == 1
    inside = {id(m) for m in buckets[0].members}
    for store in stores:
        size = store.parameter.numel()
        in_words = as_words(store.parameter) is not None
        assert (id(store) in inside) == (size <= SMALL or not in_words)
        for plane in codec.planes(storage):
            assert not store.words[plane.name].any()
            shape = tuple(store.parameter.shape)
            assert store.words[plane.name].shape == codec.allocate(storage, plane, shape, torch.device("cpu")).shape


@every_in_rows
def test_what_lies_in_rows_stands_alone_and_so_does_what_is_not_to_be_joined(storage: Storage) -> None:
    stores, buckets = make_states([gaussian(*s, dtype=visible(storage)) for s in SHAPES], storage, kernel(storage))
    assert buckets == []
    for store, shape in zip(stores, SHAPES, strict=True):
        for plane in codec.planes(storage):
            assert store.words[plane.name].shape[1:] == codec.extent(storage, shape)
        rows = math.prod(shape[:-1])
        assert store.bounds.keys() == set(storage.scaled)
        assert all(bound.shape == (rows, 1) and bound.dtype is torch.float32 for bound in store.bounds.values())
    _, buckets = make_states([torch.zeros(3).bfloat16()], STORAGES["word"], kernel(STORAGES["word"]), joined=False)
    assert buckets == []


@every_flat
def test_segments_are_aligned_disjoint_and_seen_through_the_members(storage: Storage) -> None:
    stores, (bucket,) = make_states([gaussian(*s, dtype=visible(storage)) for s in SHAPES], storage, kernel(storage))
    end = 0
    for member, segment in zip(bucket.members, bucket.segments(), strict=True):
        assert segment.start % ALIGNMENT == 0 and segment.start >= end
        assert segment.stop - segment.start == codec.extent(storage, member.parameter.shape)[0]
        end = segment.stop
    assert bucket.weights.numel() >= end
    for number, store in enumerate(stores):
        for words in store.words.values():
            words.fill_(number + 1)
    for number, segment in enumerate(bucket.segments()):
        assert all((words[..., segment] == number + 1).all() for words in bucket.words.values())
    # Nobody's words are the padding's.
    counts = sum(codec.extent(storage, s.parameter.shape)[0] for s in stores)
    for words in bucket.words.values():
        assert int((words != 0).sum()) == counts * (words.numel() // bucket.weights.numel())


@every_flat
def test_buckets_are_closed_when_full(storage: Storage) -> None:
    size = SMALL // codec.num_lanes(storage)
    parameters = [torch.zeros(SMALL, dtype=visible(storage)) for _ in range(2 * BUCKET_WORDS // size + 1)]
    _, buckets = make_states(parameters, storage, kernel(storage))
    assert [len(b.members) for b in buckets] == [BUCKET_WORDS // size, BUCKET_WORDS // size, 1]
    assert make_states([], storage, kernel(storage)) == ([], [])


@every_flat
def test_gather_and_scatter_copy_every_member_and_nothing_else(storage: Storage) -> None:
    dtype = visible(storage)
    parameters = [gaussian(*s, dtype=dtype, seed=n) for n, s in enumerate(SHAPES)]
    parameters[3] = parameters[3].t().contiguous().t()
    parameters[4] = odd_offset(parameters[4])
    gradients = [gaussian(*s, dtype=dtype, seed=100 + n) for n, s in enumerate(SHAPES)]
    gradients[5] = gradients[5].t().contiguous().t()
    before = [p.clone() for p in parameters]
    _, (bucket,) = make_states(parameters, storage, kernel(storage))
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
    even = gaussian(4, 6, dtype=torch.bfloat16)
    words = as_words(even)
    assert words is not None and words.data_ptr() == even.data_ptr() and words.shape == (12,)
    assert as_words(even.t()) is None
    assert as_words(odd_offset(even)) is None
    assert as_words(gaussian(3, 5, dtype=torch.bfloat16)) is None
    single = as_words(odd_offset(gaussian(3, 5)))
    assert single is not None and single.numel() == 15
    assert as_words(torch.zeros(0)) is not None


LAYOUTS = {
    "odd offset": (odd_offset, odd_offset),
    "odd gradient": (lambda x: x, odd_offset),
    "transposed": (lambda x: x.t().contiguous().t(), lambda x: x),
    "transposed gradient": (lambda x: x, lambda x: x.t().contiguous().t()),
    "every second column": (lambda x: torch.stack([x, x], -1)[..., 0], lambda x: x),
}


@pytest.mark.parametrize("name", ["word", "split", "float32", "float16/split"])
@pytest.mark.parametrize("how", LAYOUTS)
@pytest.mark.parametrize("shape", [(70, 61), (701, 33), (5, 30001)])
def test_pieces_cover_the_parameter_once_in_order(
    monkeypatch: pytest.MonkeyPatch, name: str, how: str, shape: tuple[int, int]
) -> None:
    monkeypatch.setattr("narrowgauge.optim.step.PIECE_WORDS", 512)
    storage, lanes = STORAGES[name], codec.num_lanes(STORAGES[name])
    weight, gradient = (gaussian(*shape, dtype=visible(storage), seed=n) for n in range(2))
    placed, slopes = (place(x) for place, x in zip(LAYOUTS[how], (weight.clone(), gradient), strict=True))
    store = alone(placed, storage)
    store.gradient = slopes
    fill(store)
    start, before = 0, {k: w.clone() for k, w in store.words.items()}
    for work, ((words, piece),) in strided_copies(store):
        count = piece.numel()
        assert start % lanes == 0 and words is work.words[0] and work.scales == []
        slope_words, *plane_words = work.words[1:]
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


@every_in_rows
@pytest.mark.parametrize("how", LAYOUTS)
@pytest.mark.parametrize("shape", [(1, 5), (7, 61), (70, 33), (8, 64)])
def test_row_pieces_cover_every_row_once_with_its_scales(
    monkeypatch: pytest.MonkeyPatch, storage: Storage, how: str, shape: tuple[int, int]
) -> None:
    monkeypatch.setattr("narrowgauge.optim.step.PIECE_WORDS", 64)
    weight, gradient = (gaussian(*shape, dtype=visible(storage), seed=n) for n in range(2))
    placed, slopes = (place(x) for place, x in zip(LAYOUTS[how], (weight.clone(), gradient), strict=True))
    store, (rows, columns), parts = alone(placed, storage), shape, codec.num_parts(storage)
    store.gradient = slopes
    fill(store)
    numbers = {name: torch.arange(1.0, rows + 1).unsqueeze(1) for name in storage.scaled}
    store.set_scales(numbers, {name: -number for name, number in numbers.items()})
    before, done, total = {k: w.clone() for k, w in store.words.items()}, torch.zeros(rows), 0
    for work, copies in strided_copies(store):
        weights, gradients, planes = work.words[:parts], work.words[parts : 2 * parts], work.words[2 * parts :]
        (height,) = {words.shape[0] for words in work.words} | {scale.shape[0] for scale in work.scales}
        assert len(copies) == parts and len({w.shape for w in work.words}) == 1
        for part, ((words, piece), slope_words) in enumerate(zip(copies, gradients, strict=True)):
            first = min(part * codec.extent(storage, shape)[0] + total, rows)
            mine = slice(first, first + piece.shape[0])
            assert words is weights[part] and piece.shape[1] == columns
            for copied, source in ((words, weight), (slope_words, gradient)):
                values = copied.view(weight.dtype)
                assert torch.equal(values[: piece.shape[0], :columns], source[mine])
                assert not values[piece.shape[0] :].any() and not values[:, columns:].any()
            for place in range(len(storage.scaled)):
                into, back = work.scales[2 * (place * parts + part) :][:2]
                assert into[: piece.shape[0], 0].tolist() == list(range(first + 1, first + 1 + piece.shape[0]))
                assert (
                    torch.equal(back[: piece.shape[0]], -into[: piece.shape[0]]) and (into[piece.shape[0] :] == 1).all()
                )
            done[mine] += 1
            words.view(weight.dtype).mul_(-2)
            write_back(words, piece)
        for words in planes:
            words.add_(1)
        total += height
    assert (done == 1).all() and total == codec.extent(storage, shape)[0]
    # Only where the parameter's own rows are not what was copied is there something left to do after the last piece.
    assert torch.equal(placed, -2 * weight)
    assert all(torch.equal(words, before[key] + 1) for key, words in store.words.items())


@every_in_rows
def test_odd_strides_of_more_dims_are_written_back_whole(storage: Storage) -> None:
    weight = gaussian(4, 6, 5, dtype=visible(storage))
    placed = weight.clone().transpose(0, 1).contiguous().transpose(0, 1)
    store = alone(placed, storage)
    store.gradient = torch.ones_like(weight)
    store.set_scales(*[dict.fromkeys(storage.scaled, torch.ones(24, 1))] * 2)
    for _, copies in strided_copies(store):
        for words, piece in copies:
            words.view(weight.dtype).mul_(-2)
            write_back(words, piece)
    assert not placed.is_contiguous() and torch.equal(placed, -2 * weight)


@every_storage
@exhaustive("shape", [(64, 64), (2, 6, 8)])
def test_what_fits_is_stepped_where_it_lies(storage: Storage, shape: tuple[int, ...]) -> None:
    parameter, gradient = gaussian(*shape, dtype=visible(storage)), gaussian(*shape, dtype=visible(storage), seed=1)
    store = alone(parameter, storage)
    store.gradient = gradient
    work, parts = store.direct(), codec.num_parts(storage)
    assert work is not None
    size = parameter.numel() * parameter.element_size() // parts
    for part in range(parts):
        assert work.words[part].data_ptr() == parameter.data_ptr() + part * size
        assert work.words[parts + part].data_ptr() == gradient.data_ptr() + part * size
    assert [w.data_ptr() for w in work.words[2 * parts :]] == [w.data_ptr() for w in store.plane_words]
    assert {w.shape for w in work.words} == {codec.extent(storage, shape)}
    store.gradient = odd_offset(gradient)
    assert (store.direct() is None) == (storage.visible != "float32")  # any float32 begins at a word
    parameter.data = gaussian(*shape, dtype=visible(storage), seed=2)
    store.gradient = gradient
    moved = store.direct()
    assert moved is not None and moved.words[0].data_ptr() == parameter.data_ptr()


@every_in_rows
@pytest.mark.parametrize("shape", [(3, 8), (4, 7), (5,), ()])
def test_what_does_not_fit_is_copied(storage: Storage, shape: tuple[int, ...]) -> None:
    store = alone(gaussian(*shape, dtype=visible(storage)), storage)
    store.gradient = gaussian(*shape, dtype=visible(storage), seed=1)
    assert (store.direct() is None) == (not codec.fits(storage, shape))
    if codec.per_word(storage) > 1:  # of odd rows, whole words fit nowhere; of whole rows, two halves do
        assert not (codec.fits(storage, shape) and codec.num_parts(storage) > 1)


# ── values ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def expected_weight(storage: Storage, values: Tensor) -> Tensor:
    """What a weight of one part is to the nearest, float64."""
    if storage.weight.scaled:
        bound = values.abs().amax(-1, keepdim=True).clamp(min=2.0**-9).double() * 2
        floor = bound.log2().ceil() + storage.weight.lowest
        spacing = 2.0 ** (values.double().abs().log2().floor().maximum(floor) - storage.weight.mantissa_bits)
        return values.sign() * (values.double().abs() / spacing + 0.5).floor() * spacing
    if storage.master or storage.visible == "float32":
        return values.double()
    if storage.visible == "float16" and not storage.tail_bits:
        scaled = (
            bits_of(values * 2.0**-112).numpy().astype("int64") % 2**32
        )  # float16's own exponents, subnormals included
        return torch.from_numpy(oracle.cut(scaled, 13).astype(np.uint32).view(np.float32)).double() * 2.0**112
    if storage.visible == "float16":
        return torch.from_numpy(
            np.where(values.abs() < 2.0**-14, np.rint(values.double() * 2.0**37) * 2.0**-37, values)
        )
    exact = bits_of(values).numpy().astype("int64") % 2**32
    cut = oracle.cut(exact, codec.dropped_bits(storage.weight)) if codec.dropped_bits(storage.weight) else exact
    return torch.from_numpy(cut.astype(np.uint32).view(np.float32)).double()


@every_storage
@exhaustive("shape", [(1,), (7, 13), (64, 66), (3, 5, 2)])
@exhaustive("joined", [True, False])
def test_adopt_keeps_the_nearest_and_shows_what_the_model_sees(
    storage: Storage, shape: tuple[int, ...], joined: bool
) -> None:
    values = gaussian(*shape)
    parameter = torch.nn.Parameter(values.to(visible(storage)))
    (store,), _ = make_states([parameter], storage, kernel(storage), joined=joined)
    store.adopt(values)
    kept, shown = store.stored("weight"), store.parameter.detach().float()
    assert store.parameter.dtype is visible(storage) and kept.shape == shape
    if storage.weight.parts == 1 or storage.master:
        assert torch.equal(kept.double(), expected_weight(storage, values))
    if storage.weight.scaled:
        bound = values.reshape(-1, shape[-1]).abs().amax(1, keepdim=True).expand(-1, shape[-1]).reshape(shape)
        digits = storage.weight.parts * (storage.weight.mantissa_bits + 1)
        assert ((kept - values).abs() <= 2.0**-digits * values.abs() + 2.0 ** -(10 + digits) * bound).all()
        assert ((shown - values).abs() <= 2.0**-4 * values.abs() + 2.0**-13 * bound).all()
    else:
        seen = 2.0 ** {"float32": -149, "bfloat16": -8, "float16": -11}[storage.visible]
        assert ((shown - kept).abs() <= seen * 2 * kept.abs()).all()
        digits = 24 if storage.master else min(24, storage.weight.parts * (storage.weight.mantissa_bits + 1))
        assert ((kept - values).abs() <= 2.0**-digits * values.abs() + (finest(storage, "weight") or 2.0**-38)).all()
    if storage.visible == "bfloat16" and not storage.weight.is_window:
        seen_bits = oracle.cut(
            bits_of(values if storage.weight.parts > 1 else kept).numpy().astype("int64") % 2**32, 16
        )
        assert (bits_of(shown.contiguous()).numpy().astype("int64") % 2**32 == seen_bits).all()
    for name in STATES:
        assert not store.stored(name).any() and store.stored(name).shape == values.shape
    store.adopt(kept)
    assert torch.equal(store.stored("weight"), kept)
    if storage.weight.parts == 1:  # of a pair, a tie may be shared out the other way round
        assert torch.equal(store.parameter.detach().float(), shown)


@every_storage
@exhaustive("shape", [(7, 13), (8, 12)])
def test_what_is_put_is_kept_beside_all_else(storage: Storage, shape: tuple[int, ...]) -> None:
    store = alone(gaussian(*shape, dtype=visible(storage)), storage)
    values = {"weight": gaussian(*shape), "exp_avg": gaussian(*shape, seed=1)}
    values["exp_avg_sq"] = gaussian(*shape, seed=2).square()
    store.adopt(values["weight"])
    for name in STATES:
        store.put(name, values[name])
    weight = store.stored("weight")
    for name in STATES:
        code = storage.code(name)
        near = 2.0 ** -(code.parts * (code.mantissa_bits + 1)) * values[name].abs()
        floor = 2.0**-17 * values[name].abs().amax(1, keepdim=True) if code.scaled else finest(storage, name)
        assert ((store.stored(name) - values[name]).abs() <= near.clamp(min=1e-30) + floor).all()
        if name in storage.scaled:
            assert torch.equal(store.bounds[name], values[name].abs().amax(1, keepdim=True))
    store.put("exp_avg", torch.zeros(shape))
    assert torch.equal(store.stored("weight"), weight) and not store.stored("exp_avg").any()
    assert store.stored("exp_avg_sq").all()


@exhaustive("name", ["word", "compact", "states8"])
def test_with_a_seed_values_are_put_stochastically(name: str) -> None:
    """9/8 of a step above a value: an eighth of 4,096 equal ones go up, not none; |z| < 5."""
    storage = STORAGES[name]
    store, code = alone(torch.randn(64, 64).to(visible(storage)), storage), storage.exp_avg_sq
    values = 1.0 + torch.arange(4096).reshape(64, 64) * 2.0**-26 + 2.0 ** -(code.mantissa_bits + 3)
    values[:, 0] = 1.5
    for seed, share in ((None, 0.0), (torch.tensor(12345, dtype=torch.int32), 0.125)):
        store.put("exp_avg_sq", values, seed)
        risen = float((store.stored("exp_avg_sq")[:, 1:] > values[:, 1:]).double().mean())
        assert abs(risen - share) <= (5 * math.sqrt(0.125 * 0.875 / 4032) if share else 0.0)


def test_adopt_writes_where_the_parameter_lies_and_keeps_no_view_of_the_values() -> None:
    base = torch.zeros(10, dtype=torch.bfloat16)
    (store,), _ = make_states([base[2:8]], STORAGES["master"], kernel(STORAGES["master"]))
    values = torch.full((6,), 1.0 + 2.0**-12)
    store.adopt(values)
    values.zero_()
    assert base.tolist() == [0, 0, *[1] * 6, 0, 0]
    assert store.stored("weight").tolist() == [1.0 + 2.0**-12] * 6


def test_adopt_narrows_a_wide_parameter_and_quiets_nans() -> None:
    nan = torch.tensor([0x7FFFFFFF, 0x3F800000], dtype=torch.int32).view(torch.float32)
    (store,), _ = make_states([torch.nn.Parameter(nan.clone())], STORAGES["exact"], kernel(STORAGES["exact"]))
    store.adopt(nan)
    assert store.parameter.dtype is torch.bfloat16
    assert store.parameter.isnan().tolist() == store.stored("weight").isnan().tolist() == [True, False]


@every_storage
@exhaustive("shape", [(), (0,), (3, 0), (1,), (7, 13), (130, 65), (3, 5, 2)])
def test_what_is_taken_out_goes_in_again(storage: Storage, shape: tuple[int, ...]) -> None:
    parameter = gaussian(*shape, dtype=visible(storage))
    (one, other), _ = make_states([parameter, parameter.clone()], storage, kernel(storage))
    fill(one)
    saved = one.in_parameter_order()
    rows = (*shape[:-1], 1) if shape else (1,)
    assert saved.keys() == {p.name for p in codec.planes(storage)} | {f"{n}_bound" for n in storage.scaled}
    assert all(value.shape == (rows if name.endswith("_bound") else shape) for name, value in saved.items())
    other.take(saved)
    for name in ("weight", *STATES):
        assert torch.equal(bits_of(other.stored(name)), bits_of(one.stored(name)))
    for value in saved.values():
        value.zero_()
    again = one.in_parameter_order()
    assert again.keys() == saved.keys()
    assert not parameter.numel() or all(value.any() for value in again.values())


@every_storage
def test_a_store_counts_all_its_tensors(storage: Storage) -> None:
    store = alone(gaussian(16, 32, dtype=visible(storage)), storage)
    total = sum(t.numel() * t.element_size() for t in store.tensors())
    gradient_and_weight = 2 * store.parameter.element_size()
    assert total == 512 * (storage.bytes_per_param - gradient_and_weight) + 16 * storage.bytes_per_row


def test_stored_is_a_copy_and_knows_its_names() -> None:
    for storage in ROWS:
        parameter = gaussian(6, dtype=visible(storage))
        (store,), _ = make_states([parameter], storage, kernel(storage))
        store.adopt(parameter.float())
        for name in ("weight", *STATES):
            before = store.stored(name)
            store.stored(name).fill_(7)
            assert torch.equal(store.stored(name), before)
        with pytest.raises(KeyError):
            store.stored("momentum")


def test_take_refuses_what_does_not_fit() -> None:
    (store,), _ = make_states([gaussian(4, dtype=torch.bfloat16)], STORAGES["word"], kernel(STORAGES["word"]))
    with pytest.raises(RecipeError, match="needs 'packed'"):
        store.take({"exp_avg": torch.zeros(4)})
    with pytest.raises(RecipeError, match=r"shape \(5,\) was given"):
        store.take({"packed": torch.zeros(5, dtype=torch.int32)})
    with pytest.raises(RecipeError, match=r"torch\.float32 of shape"):
        store.take({"packed": torch.zeros(4)})
    store = alone(gaussian(4, 6, dtype=torch.bfloat16), STORAGES["compact"])
    saved = store.in_parameter_order()
    with pytest.raises(RecipeError, match="needs 'exp_avg_bound'"):
        store.take({name: value for name, value in saved.items() if name != "exp_avg_bound"})
    with pytest.raises(RecipeError, match=r"float32 of shape \(4, 1\)"):
        store.take({**saved, "exp_avg_bound": torch.zeros(4, 6)})


# ── scales ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@every_in_rows
@pytest.mark.parametrize("shape", [(), (5,), (0,), (3, 0), (0, 4), (7, 13), (8, 16), (2, 3, 4)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_peaks_are_the_largest_magnitudes_of_the_rows(
    storage: Storage, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    store, values = alone(gaussian(*shape, dtype=visible(storage)), storage), gaussian(*shape, dtype=dtype, seed=4)
    rows = values.reshape(math.prod(shape[:-1]), -1) if values.numel() else values.new_zeros(math.prod(shape[:-1]), 1)
    wanted = [max([abs(v) for v in row], default=0.0) for row in rows.tolist()]
    for form in (values, values.transpose(0, -1).contiguous().transpose(0, -1) if len(shape) > 1 else values):
        peaks = store.peaks_of(form)
        assert peaks.dtype is torch.float32 and peaks.tolist() == [[peak] for peak in wanted]


@every_in_rows
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_peaks_of_what_is_not_finite_are_not_finite(storage: Storage, bad: float) -> None:
    store = alone(gaussian(8, 16, dtype=visible(storage)), storage)
    values = gaussian(8, 16, dtype=torch.bfloat16)
    values[3, 5] = bad
    peaks = store.peaks_of(values).flatten()
    assert peaks.isfinite().tolist() == [k != 3 for k in range(8)] and bool(peaks[3].isnan()) == math.isnan(bad)


def test_scales_are_handed_out_by_code_and_part() -> None:
    store = alone(gaussian(5, 8, dtype=torch.bfloat16), STORAGES["compact"])
    rows = torch.arange(1.0, 6.0).unsqueeze(1)
    store.set_scales({n: rows * (10 if n == "exp_avg" else 1000) for n in STATES}, dict.fromkeys(STATES, -rows))
    # For each code and each half of the rows, into the window and back; the sixth row is filled up with ones.
    found = [scale.flatten().tolist() for scale in store.scales]
    assert found == [
        [10, 20, 30], [-1, -2, -3], [40, 50, 1], [-4, -5, 1],
        [1000, 2000, 3000], [-1, -2, -3], [4000, 5000, 1], [-4, -5, 1],
    ]  # fmt: skip


def test_a_row_of_weights_may_double_and_a_row_of_zeros_may_leave_zero() -> None:
    assert weight_bound(torch.tensor([0.0, 2.0**-12, 0.5, 3.0])).tolist() == [SMALLEST_BOUND, SMALLEST_BOUND, 1.0, 6.0]
    store = alone(torch.zeros(4, 6).bfloat16(), STORAGES["float8/collage-light"])
    assert store.bounds["weight"].flatten().tolist() == [SMALLEST_BOUND] * 4
    store.adopt(torch.ones(4, 6) * torch.arange(1.0, 5.0).unsqueeze(1))
    assert store.bounds["weight"].flatten().tolist() == list(accumulate([2.0] * 4))
