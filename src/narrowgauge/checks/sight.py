"""Find which tokens a row of logits sees: those at whose embedding the gradient of its logits is
not zero.

Three forward and backward passes in evaluation mode answer, each for some rows of logits at once. A
mask of attention gives a gradient of exactly zero. What a model chooses by a token without a
gradient, such as the capacity of experts, is not seen here.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge.checks.passes import set_training
from narrowgauge.checks.softmaxes import Term, Trace, as_sequences
from narrowgauge.torch_support.put_back import put_back

_FAINT = 1e-7
"""Gradients over the largest one that are zero."""
_EXACT = 1e-5
"""What is left of an attached loss's gradient after it is subtracted, relative to it."""


def num_columns(rows: int, tokens: Tensor) -> int:
    """Return the logits of each sequence, if there are as many for each; 0 for one label a
    sequence, and otherwise.
    """
    columns, rest = divmod(rows, len(tokens))
    if rest == 0 and 1 < columns <= tokens.shape[1]:
        return columns
    return 0


def tokens_of(term: Term) -> Tensor | None:
    """Return the ids to which rows of logits belong: the last lookup before them that fits.

    Take a table of as many rows as there are classes, else the largest.
    """
    classes = term.kind[1]
    lookups = [lookup for lookup in term.lookups if not _are_positions(lookup[0])]
    if not lookups:  # tokens may count up as well
        lookups = [lookup for lookup in term.lookups if lookup[1] == classes]
    tables = {}
    fitting = {}
    for ids, size in lookups:
        tables[size] = ids
        if num_columns(len(term.source), ids):
            fitting[size] = ids
    tables = fitting or tables
    return tables.get(classes if classes in tables else max(tables, default=0))


def _are_positions(ids: Tensor) -> bool:
    """Return whether ids count up in each row, stand still over padding, or begin anew."""
    steps = ids.diff(dim=1)
    counts_up = steps == 1
    is_position = counts_up | (steps == 0) | (ids[:, 1:] == ids.min())
    return bool(is_position.all() and counts_up.any())


Seen = Callable[[Tensor], Tensor]
"""Which tokens some rows of logits see, ``[sequences, columns]``, given a mask of the rows."""


def tokens_seen(
    model: nn.Module,
    loss: Callable[[nn.Module, Any], Tensor],
    batch: Any,
    tokens: Tensor,
    kind: tuple[str, int],
    rows: Tensor,
) -> Tensor:
    """Make a forward and a backward pass, and return which tokens some rows of logits see.

    DistributedDataParallel reduces nothing here: it would wait for gradients that these passes do
    not make.

    Args:
        tokens: ids that the forward pass looks up, ``[sequences, columns]``.
        kind: function and number of classes of the softmaxes.
        rows: mask of the rows.
    """
    embedded = list[Tensor]()

    def begin_here(ids: Tensor, result: Tensor) -> Tensor:
        if not torch.equal(as_sequences(ids), tokens):
            return result
        embedded.append(result.detach().requires_grad_())
        return embedded[-1]

    trace = Trace(after_lookup=begin_here)
    eager = torch.compiler.set_stance("force_eager")
    unreduced = getattr(model, "no_sync", nullcontext)()
    with put_back(model, model.parameters()), unreduced, eager, trace:
        set_training(model, False)
        loss(model, batch)
        sources = [term.source for term in trace.terms if term.kind == kind]
        if sum(map(len, sources)) < len(rows) or not embedded:
            raise ArithmeticError("no such logits, or other tokens are looked up")
        # A loss may have another softmax over the same logits and more rows, as a teacher's.
        matching = [source for source in sources if len(source) == len(rows)]
        logits = torch.cat(matching or sources)[: len(rows)]
        noise = torch.randn(logits.shape, generator=torch.Generator().manual_seed(0))
        weights = noise.to(logits) * rows.to(logits)[:, None]
        asked: Any = torch.autograd.grad(
            (logits * weights).sum(), embedded, retain_graph=True, allow_unused=True
        )
        attached: Any = torch.autograd.grad((logits * 0).sum(), embedded, allow_unused=True)
    sizes = torch.zeros(tokens.shape, device=tokens.device)
    for gradient, unasked in zip(asked, attached, strict=True):
        if gradient is not None and unasked is not None:
            sizes = torch.maximum(sizes, as_sequences(_own(gradient, unasked).amax(-1)))
    return (sizes > _FAINT * sizes.max()).cpu()


def _own(gradient: Tensor, unasked: Tensor) -> Tensor:
    """Return the size of a gradient without what an attached loss sends, whatever arrives."""
    own = (gradient - unasked).abs()
    return own.where(own > _EXACT * unasked.abs(), 0.0)


def seen(seen_by: Seen, learned: Tensor, tokens: Tensor, padding: int | None) -> dict[str, Any]:
    """Return what rows of logits see.

    Args:
        learned: which rows of logits learn, ``[sequences, columns]``.
    Returns:
        ``offset``, the position of the last token that column 0 sees; ``sees_later``, whether rows
        that learn see later tokens; ``sees_others``: other sequences; ``sees_padding``;
        ``first_seen`` by the last row that learns.
    """
    places = torch.arange(tokens.shape[1])
    ranks = learned.cumsum(1)
    half = ranks[:, -1:] // 2
    # In every other sequence, the row in the middle of those that learn.
    middle = learned & (ranks == half + 1) & (torch.arange(len(tokens))[:, None] % 2 == 0)
    by_middle = seen_by(middle.flatten())
    ends = (by_middle * (places + 1)).amax(1) - 1
    is_tested = middle.any(1)
    offsets = (ends - middle.int().argmax(1))[is_tested].unique().tolist()
    offset = offsets[0] if len(offsets) == 1 else 0
    # The rows before it, of tokens that are no padding.
    is_padding = torch.zeros_like(by_middle)
    if padding is not None:
        is_padding = tokens == padding
    at = (torch.arange(learned.shape[1]) + offset).clamp(0, len(places) - 1)
    by_earlier = seen_by((learned & (ranks <= half) & ~is_padding[:, at]).flatten())
    by_last = seen_by((learned & (ranks == ranks[:, -1:])).flatten())
    earlier_ends = (by_earlier * (places + 1)).amax(1) - 1
    sees_later = len(offsets) > 1 or bool((earlier_ends >= ends)[is_tested].any())
    facts: dict[str, Any] = {"offset": offset, "first_seen": _first_seen(by_last, is_padding)}
    facts |= {"sees_later": None, "sees_others": None, "sees_padding": None}
    if sees_later:
        facts["offset"] = 0
    if by_middle.any():
        facts["sees_later"] = sees_later
    if len(tokens) > 1:
        facts["sees_others"] = bool(by_middle[1::2].any())
    if is_padding.any():
        facts["sees_padding"] = bool((by_earlier & is_padding).any())
    return facts


def _first_seen(by_last: Tensor, is_padding: Tensor) -> int:
    """Return the first token that the last rows see, the largest of all sequences; 0 where a
    sequence, or its part behind padding, begins there.
    """
    is_begin = is_padding.roll(1, 1)
    is_begin[:, 0] = True
    begins = by_last & ~is_padding & is_begin
    firsts = by_last.int().argmax(1)[by_last.any(1) & ~begins.any(1)].tolist()
    return max(firsts, default=0)
