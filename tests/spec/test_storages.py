"""Storages: the table's figures, and how fields share words."""

from __future__ import annotations

import itertools

import pytest

import expectations
from narrowgauge.spec.storages import STATE_NAMES, STORAGES, VISIBLE, Storage, width_of
from narrowgauge.spec.update_rules import UPDATE_RULES

every_storage = pytest.mark.parametrize("storage", STORAGES.values(), ids=STORAGES)


def test_every_row_has_its_figures() -> None:
    figures = {}
    for n, row in STORAGES.items():
        figures[n] = (row.bytes_per_param, 4 * len(row.scaled), row.tail_bits, row.beside)
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


def test_fields_share_words_in_the_fewest_bits() -> None:
    """With the states of every rule; words of 16 and 32 bits are alone."""
    for storage, rule in itertools.product(STORAGES.values(), UPDATE_RULES.values()):
        row = storage.keeping(rule.moments)
        sizes = tuple(bits for _, bits in row.fields if bits not in (16, 32, 64))
        narrow = [
            word
            for word in row.packing
            if width_of(word) != sum(b for _, b in word) or len(word) > 1
        ]
        alone = [
            word for word in row.packing if word not in narrow and word[0][1] not in (16, 32, 64)
        ]
        assert sum(map(width_of, narrow + alone)) == fewest_bits(sizes), row.name
        assert sorted(itertools.chain(*row.packing)) == sorted(row.fields)
