"""Layouts lose nothing: planes to parameters and back, lanes apart and together, fields beside each other."""

from __future__ import annotations

import math

import torch
from torch import Tensor

import expectations
from covering import exhaustive
from narrowgauge.optim import codec
from narrowgauge.spec.storages import STATE_NAMES, STORAGES, VISIBLE, Storage
from optim.scenarios import CUT, REPRESENTATIVES, kind, row_of

SHAPES = [(), (0,), (1,), (5,), (64,), (1001,), (0, 4), (3, 0), (4, 0, 2), (1, 3), (3, 7), (6, 8), (5, 3, 4), (2, 4, 6)]
ONE_MOMENT = STORAGES["compact"].keeping((("momentum_buffer", "exp_avg"),))
# What no row of the table has: four lanes without scales, lone 8-bit planes, no state at all, five states in two words.
ROWS = [
    *CUT.values(),
    *map(row_of, ("tail8+bfloat16+float32", "bfloat16+e4m3-row+float32", "bfloat16-pair+bfloat16-pair+e7m5")),
    ONE_MOMENT,
    STORAGES["compact"].keeping(()),
    STORAGES["word"].keeping(tuple((f"state{k}", "exp_avg") for k in range(5))),
]
every_row = exhaustive("storage", ROWS)


def random_integers(shape: tuple[int, ...] | torch.Size, bits: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    limit = 2 ** (bits - 1)
    return torch.randint(-limit, limit, tuple(shape), generator=generator).to(codec.INTEGER[bits])


def integers(values: Tensor) -> Tensor:
    """Bits, so that NaNs compare."""
    return values.reshape(-1).view(codec.INTEGER[8 * values.element_size()]).view(values.shape)


def test_every_kind_of_storage_has_a_representative() -> None:
    stand_ins = {kind(STORAGES[name]) for name in REPRESENTATIVES}
    assert {kind(row) for row in CUT.values()} == stand_ins
    assert len(stand_ins) == len(REPRESENTATIVES)


@every_row
@exhaustive("shape", SHAPES)
def test_parameter_order_and_back(storage: Storage, shape: tuple[int, ...]) -> None:
    for plane in codec.planes(storage):
        values = random_integers(shape, plane.bits).reshape(-1).view(plane.dtype).view(shape)
        words = codec.from_parameter_order(storage, plane, values)
        assert words.shape == codec.allocate(storage, plane, shape, values.device).shape
        assert words.dtype is torch.int32 and words.is_contiguous()
        back = codec.to_parameter_order(storage, plane, words, shape)
        assert back.dtype is plane.dtype and back.shape == shape and torch.equal(integers(back), integers(values))
        assert torch.equal(codec.from_parameter_order(storage, plane, back), words)
        assert back.data_ptr() != words.data_ptr() or not math.prod(shape)
        # All the bits of the parameter's values and no others: what fills odd ends up is zero.
        ones = codec.from_parameter_order(storage, plane, torch.full_like(integers(values), -1).view(plane.dtype))
        assert sum(bin(word % 2**32).count("1") for word in ones.reshape(-1).tolist()) == plane.bits * math.prod(shape)


@every_row
@exhaustive("shape", [(5, 7), (6, 8), (3, 4, 2)])
def test_parameter_order_of_strided_values(storage: Storage, shape: tuple[int, ...]) -> None:
    for plane in codec.planes(storage):
        values = random_integers(shape, plane.bits).view(plane.dtype)
        crossed = values.transpose(0, -1).contiguous().transpose(0, -1)
        assert not crossed.is_contiguous()
        words = codec.from_parameter_order(storage, plane, values)
        assert torch.equal(codec.from_parameter_order(storage, plane, crossed), words)


def numbered(storage: Storage, shape: tuple[int, ...]) -> list[Tensor]:
    """The words of a weight whose elements are the numbers of their places, as a kernel takes them."""
    bits = VISIBLE[storage.visible][0]
    flat = torch.arange(math.prod(shape), dtype=codec.INTEGER[bits]).view(torch.int32)
    return list(flat.view(codec.num_parts(storage), *codec.extent(storage, shape)).unbind(0))


@every_row
@exhaustive("shape", [(24,), (6, 8), (4, 2, 6)])
def test_words_hold_neighbours_where_the_weight_does(storage: Storage, shape: tuple[int, ...]) -> None:
    """Element k of a plane meets element k of the weight in the same place of the same lane."""
    if not codec.fits(storage, shape):
        assert codec.by_rows(storage) and len(shape) == 1  # a single row has no two halves
        return
    words = []
    for plane in codec.planes(storage):
        values = torch.arange(math.prod(shape), dtype=codec.INTEGER[plane.bits]).view(plane.dtype).view(shape)
        words += codec.from_parameter_order(storage, plane, values).unbind(0)
    weight = codec.lanes_of_weight(storage.visible, numbered(storage, shape))
    assert len(weight) == codec.num_lanes(storage)
    lanes = codec.by_lane(storage, words)
    begins = {"float32": 0, "bfloat16": 16, "float16": 13}[storage.visible]
    for seen, fields in zip(weight, lanes, strict=True):
        number = seen >> begins  # none so large that it would have a sign
        for plane in codec.planes(storage):
            word, shift = fields[plane.fields[0][0]]
            assert torch.equal((word >> shift) & ((1 << plane.bits) - 1 if plane.bits < 32 else -1), number)


@every_row
def test_lanes_apart_and_together_again(storage: Storage) -> None:
    words = [
        random_integers((3, 5), 32, seed=10 * k + t)
        for k, plane in enumerate(codec.planes(storage))
        for t in range(codec.num_tensors(storage, plane.bits))
    ]
    widths = {name: bits for plane in codec.planes(storage) for name, _, bits in plane.fields}
    apart = codec.by_lane(storage, words)
    assert len(apart) == codec.num_lanes(storage) and all(fields.keys() == widths.keys() for fields in apart)
    # What a code leaves: its bits in their place, zeros elsewhere.
    fields = [
        {n: word & (((1 << widths[n]) - 1) << shift if widths[n] < 32 else -1) for n, (word, shift) in lane.items()}
        for lane in apart
    ]
    together = iter(codec.join_lanes(storage, fields))
    given = iter(words)
    for plane in codec.planes(storage):
        used = sum(((1 << bits) - 1) << shift for _, shift, bits in plane.fields)
        everywhere = sum(used << place for place in range(0, 32, plane.bits))
        for _ in range(codec.num_tensors(storage, plane.bits)):
            assert torch.equal(next(together), next(given) & (everywhere - (everywhere >> 31 << 32)))
    assert next(together, None) is None


@every_row
def test_every_field_has_one_place_and_no_two_share_a_bit(storage: Storage) -> None:
    taken: dict[str, int] = {}
    assert codec.places(storage).keys() == dict(storage.fields).keys()
    for name, bits in storage.fields:
        place = codec.places(storage)[name]
        assert (name, place.shift, bits) in place.plane.fields
        mask = ((1 << bits) - 1) << place.shift
        assert mask < 1 << place.plane.bits and not taken.get(place.plane.name, 0) & mask
        taken[place.plane.name] = taken.get(place.plane.name, 0) | mask
    assert sorted(plane.name for plane in codec.planes(storage)) == sorted(taken)
    assert sum(len(plane.fields) for plane in codec.planes(storage)) == len(storage.fields)


@every_row
@exhaustive("shape", SHAPES)
def test_the_bytes_allocated_are_those_of_the_table(storage: Storage, shape: tuple[int, ...]) -> None:
    planes = codec.planes(storage)
    allocated = [codec.allocate(storage, plane, shape, torch.device("cpu")) for plane in planes]
    assert not any(words.any() for words in allocated)
    states = storage.bytes_per_param - 2 * VISIBLE[storage.visible][0] / 8
    wanted = math.prod(shape) * states
    total = sum(words.numel() * 4 for words in allocated)
    if codec.fits(storage, shape):
        assert total == wanted
    else:
        # An odd row ends one weight early, an odd number of rows one row early.
        rows = codec.matrix_of(storage, shape)[0] if codec.by_rows(storage) else 1
        assert wanted < total or not states
        assert total <= states * (math.prod(shape) + rows + codec.extent(storage, shape)[-1] * codec.per_word(storage))
    per_plane = [codec.num_tensors(storage, plane.bits) for plane in planes]
    assert per_plane == [codec.num_lanes(storage) * plane.bits // 32 for plane in planes] and 0 not in per_plane


# ── the visible weight ──────────────────────────────────────────────────────────────────────────────────────────────


@exhaustive("visible", [name for name, (bits, *_) in VISIBLE.items() if bits <= 32])
def test_lanes_of_a_weight_hold_every_value_in_order(visible: str) -> None:
    """All 65,536 values of the 16-bit formats, NaNs of every payload among them."""
    bits = VISIBLE[visible][0]
    numbers = torch.arange(-(2**15), 2**15).to(torch.int32) * (65537 if bits == 32 else 1)
    words = list(numbers.to(codec.INTEGER[bits]).view(torch.int32).view(4, -1).unbind(0))
    lanes = codec.lanes_of_weight(visible, words)
    assert len(lanes) == 4 * 32 // bits
    for before, after in zip(words, codec.words_of_weight(visible, lanes), strict=True):
        assert torch.equal(before, after)
    if bits == 32:
        return
    values = [word.view(getattr(torch, visible)) for word in words]
    for k, lane in enumerate(lanes):
        value, scale = values[k // 2][k % 2 :: 2].float(), 2.0**-112 if visible == "float16" else 1.0
        fine = value.isfinite()
        assert torch.equal(lane[fine], (value * scale)[fine].view(torch.int32))
        beyond = lane[~fine].view(torch.float32) * (1 / scale)
        assert (beyond.abs() >= 65536).all() if visible == "float16" else not beyond.isfinite().any()


def test_word_fills_its_word_with_the_signed_code_at_the_top() -> None:
    (plane,) = codec.planes(STORAGES["word"])
    assert (plane.name, plane.dtype) == ("packed", torch.int32)
    assert plane.fields == (("tail", 0, 8), ("exp_avg_sq", 8, 12), ("exp_avg", 20, 12))
    assert set(STATE_NAMES) < {name for name, _, _ in plane.fields}


def test_plain_states_have_their_own_dtypes() -> None:
    dtypes = {name: {p.name: p.dtype for p in codec.planes(row)} for name, row in STORAGES.items()}
    bfloat16, single = torch.bfloat16, torch.float32
    assert dtypes["split"] == {"tail": torch.int16, "exp_avg": bfloat16, "exp_avg_sq": single}
    assert dtypes["naive"] == {"exp_avg": bfloat16, "exp_avg_sq": bfloat16}
    assert dtypes["master"] == dict.fromkeys(("master", "exp_avg", "exp_avg_sq"), single)
    assert dtypes["kahan"] == dict.fromkeys(("weight_low", "exp_avg", "exp_avg_sq"), bfloat16)
    assert dtypes["compact"] == {"tail": torch.int8, "packed": torch.int16}
    assert dtypes["states8"] == dtypes["float32-states8"] == {"packed": torch.int16}
    assert dtypes["split8"] == {"exp_avg": bfloat16, "packed": torch.int32}
    assert dtypes["float16/split"] == {"exp_avg": bfloat16, "exp_avg_sq": single, "tail": torch.int16}
    assert dtypes["float8/collage-plus"] == {"packed": torch.int16, "packed2": torch.int32}


def test_a_rule_may_name_its_states_as_it_likes() -> None:
    """A name that looks like the low part of another is a state all the same."""
    for storage in STORAGES.values():
        plain, odd = (storage.keeping(((name, "exp_avg"),)) for name in ("exp_avg", "ema_lowpass"))
        assert [p.dtype for p in codec.planes(odd)] == [p.dtype for p in codec.planes(plain)], storage.name


def test_scales_and_eight_bit_planes_lie_in_rows_and_nothing_else_does() -> None:
    in_rows = {row.name for row in STORAGES.values() if codec.by_rows(row)}
    assert in_rows == {name for name, row in expectations.STORAGES.items() if row.row_bytes}
    assert [codec.num_lanes(STORAGES[n]) for n in ("float32", "word", "states8", "compact")] == [1, 2, 2, 4]
    assert codec.num_parts(STORAGES["float32-states8"]) == codec.num_lanes(STORAGES["float32-states8"]) == 2
    assert codec.matrix_of(STORAGES["compact"], (5, 3, 4)) == (15, 4)
    assert codec.matrix_of(STORAGES["word"], (5, 3, 4)) == (60,)
    assert codec.extent(STORAGES["compact"], (5, 3, 5)) == (8, 3)
    assert codec.extent(STORAGES["states8"], (5, 3, 5)) == (15, 3)
    assert codec.extent(STORAGES["float32-states8"], (5, 3, 5)) == (8, 5)
    assert codec.extent(STORAGES["word"], (5, 3, 5)) == (38,)
    assert codec.extent(STORAGES["float32"], (5, 3, 5)) == (75,)
