"""What is kept of the data that a loop hands to its model: a hash and a few keys of each row, and how often tokens come.

A row is one sequence of a batch. It is reduced on its device, and read by the host a few steps later; a hash is linear in the
tokens with random odd factors, so that two rows that differ have the same hash once in 2^40 pairs. Memory is bounded: of many
rows a sample is kept, chosen by their hashes, so that a row that comes again is chosen again.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

BUCKETS = 64
"""Groups of tokens that are counted: a token's number modulo this."""
KEYS = ("start", "mean", "length")
"""By what rows may be sorted: their first three tokens, the mean of all, the place of the last token unlike its neighbour."""
MOST_ROWS = 1 << 17
"""Rows whose hashes are kept."""
MOST_PENDING = 1 << 15
"""Rows that stay on their device until they are read."""


class Digest(NamedTuple):
    """What is kept of one batch: int64 ``[rows, 1 + len(KEYS)]``, hash and keys, and the counts of ``BUCKETS`` groups."""

    rows: Tensor
    counts: Tensor


@functools.lru_cache(maxsize=64)
def _factors(length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Odd random factors for the places of a row, and the places."""
    generator = torch.Generator().manual_seed(length)
    drawn = torch.randint(-(1 << 62), 1 << 62, (length,), generator=generator, dtype=torch.int64)
    return (2 * drawn + 1).to(device), torch.arange(1, length, dtype=torch.int64, device=device)


@torch.no_grad()
def digest_of(tokens: Tensor) -> Digest:
    """Reduce a batch on its device.

    Args:
        tokens: integers ``[rows, length]``.
    """
    tokens = tokens.detach().long()
    factors, places = _factors(tokens.shape[1], tokens.device)
    hashes = ((tokens + 1) * factors).sum(1)
    last = ((tokens[:, 1:] != tokens[:, :-1]) * places).amax(1) if len(places) else torch.zeros_like(hashes)
    first, second, third = (tokens[:, min(place, tokens.shape[1] - 1)] for place in range(3))
    keys = (((first << 21) + second << 21) + third, tokens.sum(1), last)
    flat = tokens.reshape(-1) % BUCKETS
    counts = torch.zeros(BUCKETS, dtype=torch.int64, device=tokens.device)
    return Digest(torch.stack([hashes, *keys], 1), counts.index_add_(0, flat, torch.ones_like(flat)))


@dataclass
class StepRows:
    """The rows of one step, or of one evaluation, on the host.

    Args:
        step: its number.
        hashes: of the rows in their order; without those of a single token, which are padding.
        keys: of all rows, in the order of :data:`KEYS`.
        counts: float64 ``[BUCKETS]``.
        passes: the hashes of each batch.
    """

    step: int
    hashes: list[int]
    keys: list[list[int]]
    counts: Tensor
    passes: list[list[int]] = field(default_factory=list)


def read_rows(step: int, digests: Sequence[Digest]) -> StepRows:
    """Read the batches of a step from their device."""
    rows = torch.cat([each.rows for each in digests]).tolist()
    counts = torch.stack([each.counts for each in digests]).sum(0).double().cpu()
    passes, place = [], 0
    for each in digests:
        part = rows[place : place + len(each.rows)]
        passes.append([row[0] for row in part if row[-1] > 0])
        place += len(part)
    return StepRows(step, [h for part in passes for h in part], [row[1:] for row in rows], counts, passes)


class SeenRows:
    """The rows that a loop was trained on, each with the last step that had it.

    Attributes:
        last: the last step by hash; of many rows a sample.
        often: those that came in two steps or more.
    """

    def __init__(self, most: int = MOST_ROWS) -> None:
        self.last: dict[int, int] = {}
        self.often: set[int] = set()
        self._most, self._mask = most, 0

    def __len__(self) -> int:
        return len(self.last)

    def chosen(self, hashes: Iterable[int]) -> list[int]:
        """Those rows that belong to the sample."""
        return [h for h in hashes if not (h >> 32) & self._mask] if self._mask else list(hashes)

    def add(self, step: int, hashes: Iterable[int]) -> None:
        """Keep the rows of a step."""
        for each in self.chosen(hashes):
            if self.last.get(each, step) != step:
                self.often.add(each)
            self.last[each] = step
        while len(self.last) > self._most:
            self._mask = 2 * self._mask + 1
            self.last = {h: at for h, at in self.last.items() if not (h >> 32) & self._mask}
            self.often.intersection_update(self.last)
