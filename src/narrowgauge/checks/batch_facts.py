"""What a batch says of its tokens: where documents begin, what is padding, and what has no label."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from narrowgauge.checks.shadow import is_integer

IGNORED = -100


def beside(batch: Any, tokens: Tensor) -> Iterator[Tensor]:
    """Yield the tensors of a batch that have a value for each token, on the tokens' device."""
    for x in tree_leaves(batch):
        if isinstance(x, Tensor) and x.shape == tokens.shape:
            yield x.to(tokens.device)


def starts_of(batch: Any, tokens: Tensor) -> Tensor | None:
    """Return where positions of the batch begin anew within packed rows, ``[sequences, columns]``;
    ``None`` without such positions.
    """
    for x in beside(batch, tokens):
        if not is_integer(x):
            continue
        is_start = x == 0
        is_start[:, 0] = False
        counts_up = (x[:, 1:] - x[:, :-1] == 1) | is_start[:, 1:]
        if bool(counts_up.all()) and bool(is_start.any()):
            return is_start
    return None


def unlearned_ends(batch: Any, tokens: Tensor, last: Tensor, padding: int | None) -> int:
    """Return the number of rows whose last label is followed by a padding token that a mask does
    not hide: the end of the text. 0 unless all rows that hold another token are so.

    Args:
        last: column of the last label of each row; negative without one.
    """
    if padding is None:
        return 0
    rows = torch.arange(len(tokens), device=tokens.device)
    is_inside = (last >= 0) & (last + 1 < tokens.shape[1])
    behind = (last + 1).clamp(0, tokens.shape[1] - 1)
    is_padding = tokens == padding
    for x in beside(batch, tokens):
        hides = x == 0
        is_mask = bool((hides | (x == 1)).all()) and bool(hides.any())
        # A mask that is 1 at padding hides all other tokens.
        if is_mask and not bool((hides & ~is_padding).any()) and int(is_inside.sum()) > 1:
            is_end = (is_padding & ~hides)[rows, behind]
            if bool(is_end[is_inside].all()):
                return int(is_inside.sum())
    return 0


def padding_of(tokens: Tensor) -> int | None:
    """Return the id found only in runs at the ends, or starts, of two or more rows, of different
    lengths; ``None`` without one.

    Example:
        >>> padding_of(torch.tensor([[5, 6, 7, 8], [5, 0, 0, 0], [7, 9, 0, 0]]))
        0
    """
    for side in (tokens, tokens.flip(1)):
        for token in side[:, -1:].unique():
            is_token = side == token
            runs = is_token.flip(1).cumprod(1).sum(1)
            is_common = int((runs > 1).sum()) >= max(2, len(tokens) // 4)
            if int(is_token.sum()) == int(runs.sum()) and is_common and len(runs.unique()) > 1:
                return int(token)
    return None


def is_declared(model: nn.Module, batch: Any, tokens: Tensor | None, padding: int | None) -> bool:
    """Return whether a token that looks like padding is said to be: by an embedding, by the model's
    settings, or by a mask or ignored labels of the batch.

    A run of equal tokens at the end of sequences may be text.
    """
    if tokens is None or padding is None:
        return False
    for module in model.modules():
        settings = getattr(module, "config", None)
        declared = getattr(module, "padding_idx", None), getattr(settings, "pad_token_id", None)
        if padding in declared:
            return True
    is_padding = tokens == padding
    for x in beside(batch, tokens):
        is_left_out = x == IGNORED
        if x.max() <= 1:  # a mask
            is_left_out = x == 0
        if bool((is_left_out | ~is_padding).all()):
            return True
    return False
