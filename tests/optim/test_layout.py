"""Layouts lose nothing: planes to parameters and back, lanes apart and together, fields beside each other."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from narrowgauge.optim import codes, layout
from narrowgauge.spec.storages import STORAGES, VISIBLE, Storage
from optim.scenarios import CUT, REPRESENTATIVES, kind, row_of
from tables import exhaustive

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
    return torch.randint(-limit, limit, tuple(shape), generator=generator).to(codes.INTEGER[bits])


def integers(values: Tensor) -> Tensor:
    """Bits, so that NaNs compare."""
    return values.reshape(-1).view(codes.INTEGER[8 * values.element_size()]).view(values.shape)


def test_every_kind_of_storage_has_a_representative() -> None:
    stand_ins = {kind(STORAGES[name]) for name in REPRESENTATIVES}
    assert {kind(row) for row in CUT.values()} == stand_ins
    assert len(stand_ins) == len(REPRESENTATIVES)


@every_row
@exhaustive("shape", SHAPES)
def test_parameter_order_and_back(storage: Storage, shape: tuple[int, ...]) -> None:
    for plane in layout.planes(storage):
        values = random_integers(shape, plane.bits).reshape(-1).view(plane.dtype).view(shape)
        words = layout.from_parameter_order(storage, plane, values)
        assert words.shape == layout.allocate(storage, plane, shape, values.device).shape
        assert words.dtype is torch.int32 and words.is_contiguous()
        back = layout.to_parameter_order(storage, plane, words, shape)
        assert back.dtype is plane.dtype and back.shape == shape and torch.equal(integers(back), integers(values))
        assert torch.equal(layout.from_parameter_order(storage, plane, back), words)
        assert back.data_ptr() != words.data_ptr() or not math.prod(shape)
        # All the bits of the parameter's values and no others: what fills odd ends up is zero.
        ones = layout.from_parameter_order(storage, plane, torch.full_like(integers(values), -1).view(plane.dtype))
        assert sum(bin(word % 2**32).count("1") for word in ones.reshape(-1).tolist()) == plane.bits * math.prod(shape)


def fits(storage: Storage, shape: tuple[int, ...]) -> bool:
    """Return whether a parameter of ``shape`` fills its words without padding."""
    return math.prod(layout.extent(storage, shape)) * layout.num_lanes(storage) == math.prod(shape)


@every_row
@exhaustive("shape", SHAPES)
def test_the_bytes_allocated_are_those_of_the_table(storage: Storage, shape: tuple[int, ...]) -> None:
    planes = layout.planes(storage)
    allocated = [layout.allocate(storage, plane, shape, torch.device("cpu")) for plane in planes]
    assert not any(words.any() for words in allocated)
    states = storage.bytes_per_param - 2 * VISIBLE[storage.visible][0] / 8
    wanted = math.prod(shape) * states
    total = sum(words.numel() * 4 for words in allocated)
    if fits(storage, shape):
        assert total == wanted
    else:
        # An odd row ends one weight early, an odd number of rows one row early.
        rows = layout.matrix_of(storage, shape)[0] if layout.by_rows(storage) else 1
        assert wanted < total or not states
        assert total <= states * (
            math.prod(shape) + rows + layout.extent(storage, shape)[-1] * layout.per_word(storage)
        )
    per_plane = [layout.num_tensors(storage, plane.bits) for plane in planes]
    assert per_plane == [layout.num_lanes(storage) * plane.bits // 32 for plane in planes] and 0 not in per_plane
