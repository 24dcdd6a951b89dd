"""A stateless shuffle: a formula gives the position of every sample in the epoch.

A random generator must run from its start, or save its state. A Feistel network is a permutation given by a formula.
It splits a number into two halves and scrambles each in turn with a hash of the other. This is invertible.
On a range that is not a power of two it is repeated until the result is in range. The hash is keyed by (seed,
epoch), so every epoch has its own order. Only this file's integer arithmetic is used. So no library release can change the
order of an old run.
"""

from __future__ import annotations

import numpy as np

_ROUNDS = 6


def shuffled(items: np.ndarray, num_windows: int, seed: int) -> np.ndarray:
    """Return the windows at given positions of the infinite stream of epochs.

    Invariant: a pure function; over each epoch (``num_windows`` consecutive positions) a permutation.

    Args:
        items: positions in the stream, uint64.
    Returns:
        int64 of the same shape, values below ``num_windows``.
    Example:
        >>> sorted(shuffled(np.arange(5, dtype=np.uint64), 5, seed=3).tolist())
        [0, 1, 2, 3, 4]

    Source: Luby and Rackoff 1988 (Feistel networks); Black and Rogaway 2002 (walking the cycle to any size).
    """
    items = np.asarray(items, dtype=np.uint64)
    epochs, places = items // np.uint64(num_windows), items % np.uint64(num_windows)
    keys = _mix(_mix(np.full_like(items, seed & (1 << 64) - 1)) + epochs)
    # At least six bits: with fewer, a Feistel network reaches too few permutations.
    half = np.uint64(max(3, ((num_windows - 1).bit_length() + 1) // 2))
    places = _feistel(places, keys, half)
    while (outside := places >= num_windows).any():
        places[outside] = _feistel(places[outside], keys[outside], half)
    return places.astype(np.int64)


def _feistel(places: np.ndarray, keys: np.ndarray, half: np.uint64) -> np.ndarray:
    mask = (np.uint64(1) << half) - np.uint64(1)
    high, low = places >> half, places & mask
    for number in range(_ROUNDS):
        high, low = low, high ^ (_mix(keys + _mix(low + np.uint64(number << 40))) & mask)
    joined: np.ndarray = high << half | low
    return joined


def _mix(words: np.ndarray) -> np.ndarray:
    """splitmix64 (Steele, Lea and Flood 2014): every input bit moves every output bit."""
    words = words + np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ words >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ words >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = words ^ words >> np.uint64(31)
    return mixed
