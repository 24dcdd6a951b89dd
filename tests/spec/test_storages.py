"""Storages: the table's figures, and how fields share words."""

import itertools

import pytest

import expectations
from narrowgauge.spec.storages import STATE_NAMES, STORAGES, VISIBLE, width_of
from narrowgauge.spec.update_rules import UPDATE_RULES

every_storage = pytest.mark.parametrize("storage", STORAGES.values(), ids=STORAGES)


def test_every_row_has_its_figures():
    assert expectations.STORAGES.keys() == STORAGES.keys(), (
        "tests/expectations.py states each storage a second time"
    )
    for name, row in STORAGES.items():
        expected = expectations.STORAGES[name]
        assert row.bytes_per_param == expected.bytes_per_param, name
        assert 4 * len(row.scaled) == expected.block_bytes, name
        assert (row.tail_bits, row.extra_fields) == (expected.tail_bits, expected.beside), name
        assert row.is_stochastic == bool(expected.dealt), name


@every_storage
def test_bytes_are_those_of_the_words_that_hold_the_fields(storage):
    """With the states of every rule; words of 16, 32 and 64 bits are alone."""
    for rule in UPDATE_RULES.values():
        row = storage.with_states(rule.moments.items())
        in_words = sum(width_of(group) for group in row.packing) / 8
        assert row.bytes_per_param == 2 * VISIBLE[row.visible][0] / 8 + in_words
        assert in_words >= sum(bits for _, bits in row.fields) / 8
        assert sorted(itertools.chain(*row.packing)) == sorted(row.fields)
        assert all(len(word) == 1 for word in row.packing if {16, 32, 64} & {*dict(word).values()})


@every_storage
def test_second_moments_alone_are_held_above_zero(storage):
    """In every code that has an end below: a second moment of zero makes the next step unbounded."""
    for role in ("weight", *STATE_NAMES):
        code = storage.code(role)
        assert code.hold == (role == "exp_avg_sq" and code.is_window)
