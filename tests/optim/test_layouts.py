"""Layouts lose nothing: planes to parameters and back, lanes apart and together, fields beside each other."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from narrowgauge.optim import layouts
from narrowgauge.storages import STATE_NAMES, STORAGES, Code, Storage

LENGTHS = (0, 1, 2, 3, 16, 17, 1000, 1001)
every_storage = pytest.mark.parametrize("storage", STORAGES.values(), ids=STORAGES)


def random_words(shape: tuple[int, ...] | torch.Size, seed: int = 0) -> Tensor:
    return torch.randint(-(2**31), 2**31, tuple(shape), generator=torch.Generator().manual_seed(seed)).to(torch.int32)


def integers(values: Tensor) -> Tensor:
    """Bits, so that NaNs compare."""
    return values.view({2: torch.int16, 4: torch.int32}[values.element_size()])


@every_storage
@pytest.mark.parametrize("length", LENGTHS)
def test_parameter_order_and_back(storage: Storage, length: int) -> None:
    for plane in layouts.planes(storage):
        dtype = torch.int16 if plane.bits == 16 else torch.int32
        values = random_words((length,)).to(dtype).view(plane.dtype)
        words = layouts.from_parameter_order(storage, plane, values)
        assert words.shape == layouts.allocate(storage, plane, length, values.device).shape
        back = layouts.to_parameter_order(plane, words, values.shape)
        assert back.dtype is plane.dtype and torch.equal(integers(back), integers(values))
        again = layouts.from_parameter_order(storage, plane, back)
        assert torch.equal(again, words)
        assert back.data_ptr() != words.data_ptr() or not length


@every_storage
def test_parameter_order_of_matrices_and_strided_values(storage: Storage) -> None:
    for plane in layouts.planes(storage):
        dtype = torch.int16 if plane.bits == 16 else torch.int32
        values = random_words((5, 7)).to(dtype).view(plane.dtype)
        crossed = values.t().contiguous().t()
        words = layouts.from_parameter_order(storage, plane, values)
        assert torch.equal(layouts.from_parameter_order(storage, plane, crossed), words)
        assert torch.equal(integers(layouts.to_parameter_order(plane, words, values.shape)), integers(values))


@every_storage
@pytest.mark.parametrize("length", [2, 7])
def test_words_hold_neighbours_where_the_weight_does(storage: Storage, length: int) -> None:
    """Element k of a plane meets element k of the weight in the same lane of the same word."""
    lanes = layouts.num_lanes(storage)
    for plane in layouts.planes(storage):
        values = torch.arange(1, length + 1).to(torch.int16 if plane.bits == 16 else torch.int32)
        words = layouts.from_parameter_order(storage, plane, values.view(plane.dtype))
        count = layouts.num_words(storage, length)
        assert words.shape[-1] == count == -(-length // lanes)
        padded = [*values.tolist(), *[0] * (count * lanes - length)]
        if plane.bits == 16:
            expected = [padded[k] + 2**16 * padded[k + 1] for k in range(0, len(padded), 2)]
            assert words.tolist() == expected
        else:
            assert words.tolist() == [padded[lane::lanes] for lane in range(lanes)]


@every_storage
def test_lanes_apart_and_together_again(storage: Storage) -> None:
    lanes, planes = layouts.num_lanes(storage), layouts.planes(storage)
    weight = random_words((100,))
    words = [w for n, p in enumerate(planes) for w in layouts.kernel_words(p, random_words(
        layouts.allocate(storage, p, 100 * lanes, weight.device).shape, n))]  # fmt: skip
    weights = layouts.lanes_of_pairs(weight) if lanes == 2 else (weight,)
    apart = layouts.by_lane(planes, lanes, words)
    fields = []
    for lane in range(lanes):
        read = {}
        for plane, word in zip(planes, apart[lane], strict=True):
            for name, shift, bits in plane.fields:
                # What a code leaves: its bits in their place, zeros elsewhere.
                read[name] = word & (((1 << bits) - 1) << shift)
        fields.append(read)
    together = layouts.join_lanes(planes, weights, fields)
    assert len(together) == 1 + len(words)
    assert torch.equal(together[0], weight)
    used = {p.name: sum(((1 << bits) - 1) << shift for _, shift, bits in p.fields) for p in planes}
    names = [p.name for p in planes for _ in range(1 if p.bits == 16 else lanes)]
    for name, new, old in zip(names, together[1:], words, strict=True):
        plane = next(p for p in planes if p.name == name)
        expected = old if plane.bits == 16 else old & used[name]
        assert torch.equal(new, expected)


@every_storage
def test_every_field_has_one_place_and_no_two_share_a_bit(storage: Storage) -> None:
    taken: dict[str, int] = {}
    for name, bits in storage.fields:
        place = layouts.place_of(storage, name)
        assert place is not None and (name, place.shift, bits) in place.plane.fields
        mask = ((1 << bits) - 1) << place.shift
        assert mask < 1 << 32 and not taken.get(place.plane.name, 0) & mask
        taken[place.plane.name] = taken.get(place.plane.name, 0) | mask
    assert {p.name for p in layouts.planes(storage)} == taken.keys()
    assert layouts.place_of(storage, None) is None and layouts.place_of(storage, "no such field") is None
    allocated = sum(
        layouts.allocate(storage, p, 1000, torch.device("cpu")).numel() * 4 for p in layouts.planes(storage)
    )
    visible = 4 if storage.visible == "float32" else 2
    assert allocated == 1000 * (storage.bytes_per_param - 2 * visible)


def test_word_fills_its_word_with_the_signed_code_at_the_top() -> None:
    (plane,) = layouts.planes(STORAGES["word"])
    assert (plane.name, plane.dtype) == ("packed", torch.int32)
    assert plane.fields == (("tail", 0, 8), ("exp_avg_sq", 8, 12), ("exp_avg", 20, 12))
    assert set(STATE_NAMES) < {name for name, _, _ in plane.fields}


def test_plain_states_have_their_own_dtypes() -> None:
    dtypes = {name: {p.name: p.dtype for p in layouts.planes(row)} for name, row in STORAGES.items()}
    assert dtypes["split"] == {"tail": torch.int16, "exp_avg": torch.bfloat16, "exp_avg_sq": torch.float32}
    assert dtypes["naive"] == {"exp_avg": torch.bfloat16, "exp_avg_sq": torch.bfloat16}
    assert dtypes["master"] == dict.fromkeys(("master", "exp_avg", "exp_avg_sq"), torch.float32)


def test_more_than_a_word_is_refused() -> None:
    row = dataclasses.replace(STORAGES["word"], name="wide", exp_avg=Code("e6m8", 6, 8))
    with pytest.raises(ValueError, match="'wide' packs 35 bits"):
        layouts.planes(row)
