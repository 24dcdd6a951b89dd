"""The order of windows: a permutation per epoch, random to look at, the same in every version and on every machine."""

from __future__ import annotations

import numpy as np
import pytest

from narrowgauge.trainer.data.dataset import shuffled


def mix(word: int) -> int:
    """splitmix64 as published, in integers that cannot overflow."""
    word = (word + 0x9E3779B97F4A7C15) % 2**64
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    word = (word ^ word >> 27) * 0x94D049BB133111EB % 2**64
    return word ^ word >> 31


def place_in_order(item: int, num_windows: int, seed: int) -> int:
    epoch, place = divmod(item, num_windows)
    key = mix((mix(seed % 2**64) + epoch) % 2**64)
    half = 3
    while 4**half < num_windows:
        half += 1
    while True:
        left, right = divmod(place, 2**half)
        for number in range(6):
            left, right = right, left ^ mix((key + mix(right + (number << 40))) % 2**64) % 2**half
        place = left * 2**half + right
        if place < num_windows:
            return place


@pytest.mark.parametrize("num_windows", [1, 2, 5, 64, 65, 4097])
def test_each_epoch_holds_every_window_once(num_windows: int) -> None:
    items = np.arange(3 * num_windows, dtype=np.uint64)
    epochs = shuffled(items, num_windows, seed=7).reshape(3, num_windows)
    assert (np.sort(epochs, axis=1) == np.arange(num_windows)).all()
    if num_windows > 60:
        assert not (epochs[0] == epochs[1]).all()


@pytest.mark.parametrize(("num_windows", "seed"), [(1, 0), (7, -1), (1000, 42), (2**33 + 1, 2**70 + 5)])
def test_it_is_the_order_of_python_integers(num_windows: int, seed: int) -> None:
    """An old run must find its order again in every later version."""
    items = [0, 1, num_windows - 1, num_windows, 5 * num_windows + 3, 2**40]
    found = shuffled(np.array(items, dtype=np.uint64), num_windows, seed).tolist()
    assert found == [place_in_order(item, num_windows, seed) for item in items]
