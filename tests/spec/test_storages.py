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
        expected[n] = (row.bytes_per_param, row.block_bytes, row.tail_bits, row.beside)
    assert figures == expected, "tests/expectations.py states each storage a second time"


@every_storage
def test_bytes_are_those_of_the_words_that_hold_the_fields(storage: Storage) -> None:
    """With the states of every rule; words of 16, 32 and 64 bits are alone."""
    for rule in UPDATE_RULES.values():
        row = storage.keeping(rule.moments)
        in_words = sum(width_of(group) for group in row.packing) / 8
        assert row.bytes_per_param == 2 * VISIBLE[row.visible][0] / 8 + in_words
        assert in_words >= sum(bits for _, bits in row.fields) / 8
        assert sorted(itertools.chain(*row.packing)) == sorted(row.fields)
        assert all(len(word) == 1 for word in row.packing if {16, 32, 64} & {*dict(word).values()})


def test_stochastic_rows_are_those_with_a_stochastic_code() -> None:
    stochastic = {name for name, row in STORAGES.items() if row.is_stochastic}
    assert stochastic == {name for name, row in expectations.STORAGES.items() if row.dealt}


@every_storage
def test_second_moments_alone_are_held_above_zero(storage: Storage) -> None:
    """In every code that has an end below: a second moment of zero makes the next step unbounded."""
    for role in ("weight", *STATE_NAMES):
        code = storage.code(role)
        assert code.hold == (role == "exp_avg_sq" and code.is_window)
