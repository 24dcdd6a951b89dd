"""Pieces: copies of a parameter and gradient that cannot be read as words in place.

An oddly strided or placed tensor is copied a piece at a time into words, stepped there, and the weights are copied back.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from narrowgauge.optim import packing
from narrowgauge.optim.kernel import Work
from narrowgauge.optim.stores import Store

PIECE_WORDS = 1 << 16
"""The longest piece, in words."""


def pieces(store: Store) -> Iterator[tuple[Work, list[tuple[Tensor, Tensor]]]]:
    """A store's weights and gradients in copies of at most ``PIECE_WORDS`` words.

    Yields:
        ``(work, copies)``: after the step the caller writes each copied weight's words back with :func:`write_back`.
    """
    if packing.by_rows(store.storage):
        yield from _row_pieces(store)
        return
    lanes = packing.num_lanes(store.storage)
    for start, weight, gradient in _even_pieces(store.parameter.detach(), store.gradient, PIECE_WORDS * lanes):
        first, count = start // lanes, -(-weight.numel() // lanes)
        planes = [words[first : first + count] for words in store.plane_words]
        copies = [_padded(values.reshape(1, -1), (1, count)).view(-1) for values in (weight, gradient)]
        yield Work([*copies, *planes]), [(copies[0], weight)]


def _row_pieces(store: Store) -> Iterator[tuple[Work, list[tuple[Tensor, Tensor]]]]:
    storage, shape = store.storage, store.parameter.shape
    rows, columns = packing.matrix_of(storage, shape)
    parts = packing.num_parts(storage)
    group, width = packing.extent(storage, shape)
    weights = store.parameter.detach()
    # Oddly strided tensors of more than two dims are copied whole: their rows are no matrix in memory.
    whole = weights.reshape(rows, columns)
    gradients = store.gradient.reshape(rows, columns)
    step = max(1, PIECE_WORDS // max(1, width))
    for start in range(0, group, step):
        stop = min(start + step, group)
        ranges = [(min(p * group + start, rows), min(p * group + stop, rows)) for p in range(parts)]
        copies = [
            _padded(values[first:last], (stop - start, width))
            for values in (whole, gradients)
            for first, last in ranges
        ]
        words = [*copies, *(words[start:stop] for words in store.plane_words)]
        work = Work(words, [scale[start:stop] for scale in store.scales])
        yield work, [(copies[p], whole[first:last]) for p, (first, last) in enumerate(ranges)]
    if whole.data_ptr() != weights.data_ptr():
        weights.copy_(whole.view(shape))


def write_back(words: Tensor, piece: Tensor) -> None:
    """Copy stepped words back into the piece of the parameter they were copied from."""
    values = words.view(piece.dtype)
    if values.ndim == 2:
        piece.copy_(values[: piece.shape[0], : piece.shape[1]])
    else:
        piece.copy_(values[: piece.numel()].view(piece.shape))


def _even_pieces(weight: Tensor, gradient: Tensor, limit: int) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Pieces in row-major order that begin at even elements and hold about ``limit`` of them: ``(start, w, g)``."""
    if weight.is_contiguous() and gradient.is_contiguous():
        weight, gradient = weight.view(-1), gradient.view(-1)
    if weight.ndim == 1:
        for start in range(0, weight.numel(), limit):
            yield start, weight[start : start + limit], gradient[start : start + limit]
    elif weight.numel() <= limit:
        yield 0, weight, gradient
    elif (row := weight[0].numel()) > limit and row % 2 == 0:
        for index in range(weight.shape[0]):
            for start, w, g in _even_pieces(weight[index], gradient[index], limit):
                yield index * row + start, w, g
    else:
        rows = max(2, limit // row // 2 * 2)
        for first in range(0, weight.shape[0], rows):
            yield first * row, weight[first : first + rows], gradient[first : first + rows]


def _padded(values: Tensor, words: tuple[int, int]) -> Tensor:
    """A copy of a matrix as a matrix of words of that shape, filled up with zeros."""
    # Words first: rows of nothing have no stride that narrower values could be viewed as words by.
    buffer = torch.zeros(words, dtype=torch.int32, device=values.device)
    buffer.view(values.dtype)[: values.shape[0], : values.shape[1]].copy_(values)
    return buffer
