"""Storages: the table's figures, and how fields share words."""

from __future__ import annotations

import itertools
import random

import pytest

import expectations
from narrowgauge.spec.storages import STATE_NAMES, STORAGES, VISIBLE, Storage, packed, width_of

every_storage = pytest.mark.parametrize("storage", STORAGES.values(), ids=STORAGES)


def test_every_row_has_its_figures() -> None:
    figures = {}
    for n, row in STORAGES.items():
        figures[n] = (row.bytes_per_param, row.bytes_per_row, row.tail_bits, row.beside)
    expected = {}
    for n, row in expectations.STORAGES.items():
        expected[n] = (row.bytes_per_param, row.row_bytes, row.tail_bits, row.beside)
    assert figures == expected, "tests/expectations.py states each storage a second time"


@every_storage
def test_bytes_are_those_of_the_words_that_hold_the_fields(storage: Storage) -> None:
    in_words = sum(width_of(group) for group in storage.packing) / 8
    assert storage.bytes_per_param == 2 * VISIBLE[storage.visible][0] / 8 + in_words
    assert in_words >= sum(bits for _, bits in storage.fields) / 8
    assert sorted(itertools.chain(*storage.packing)) == sorted(storage.fields)


def test_stochastic_rows_are_those_with_a_stochastic_code() -> None:
    stochastic = {name for name, row in STORAGES.items() if row.is_stochastic}
    assert stochastic == {name for name, row in expectations.STORAGES.items() if row.dealt}


@every_storage
def test_second_moments_alone_are_held_above_zero(storage: Storage) -> None:
    """In every code that has an end below: a second moment of zero makes the next step unbounded."""
    for role in ("weight", *STATE_NAMES):
        code = storage.code(role)
        assert code.hold == (role == "exp_avg_sq" and code.is_window)


def fewest_bits(sizes: tuple[int, ...]) -> int:
    """By trying: the first field with any choice of the others, and what is left by itself."""
    if not sizes:
        return 0
    first = sizes[0]
    rest = sizes[1:]
    best = 1 << 30
    for count in range(len(rest) + 1):
        for chosen in itertools.combinations(range(len(rest)), count):
            total = first + sum(rest[k] for k in chosen)
            if total <= 32:
                width = 8 if total <= 8 else 16 if total <= 16 else 32
                remaining = tuple(size for k, size in enumerate(rest) if k not in chosen)
                best = min(best, width + fewest_bits(remaining))
    return best


def test_fields_share_words_without_overlap_and_in_the_fewest_bits() -> None:
    draw = random.Random(0)
    likely = (1, 3, 4, 7, 8, 8, 8, 9, 11, 12, 12, 13, 15, 16, 16, 17, 20, 24, 25, 31, 32)
    for _ in range(400):
        fields = tuple((f"f{k}", draw.choice(likely)) for k in range(draw.randint(0, 6)))
        groups = packed(fields)
        assert sorted(itertools.chain(*groups)) == sorted(fields)
        for group in groups:
            assert 0 < sum(bits for _, bits in group) <= width_of(group) <= 32
        assert sum(map(width_of, groups)) == fewest_bits(tuple(bits for _, bits in fields)), fields
        for group in groups:
            if any(bits in (16, 32) for _, bits in group):
                assert len(group) == 1
