"""Rows of logits of a step: which softmaxes teach, and the sequence, column and token of each row."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from narrowgauge.checks.batch_facts import padding_of
from narrowgauge.checks.sight import num_columns, tokens_of
from narrowgauge.checks.softmaxes import LABEL, LOG_SUM, Target, Term, joined


def main_terms(terms: Sequence[Term]) -> list[Term]:
    """Return the softmaxes with the most classes that teach labels, or else distributions."""
    kinds = {}
    live = set()
    for term in terms:
        if term.target is not None:
            kinds[term] = term.teaches
            if term.target.is_live.any():
                live.add(term.kind)
    for term, kind in list(kinds.items()):
        name, classes = term.kind
        is_z_loss = name == LOG_SUM and live & {
            ("log_softmax", classes),
            ("cross_entropy", classes),
        }
        # Chunks whose labels are all ignored stay: they hold the others' places.
        if term.kind not in live or is_z_loss or kind == "another gradient":
            del kinds[term]
    taught = "a label" if "a label" in kinds.values() else "a distribution"
    most = max((term.kind[1] for term, kind in kinds.items() if kind == taught), default=0)
    return [term for term, kind in kinds.items() if kind == taught and term.kind[1] == most]


def _places(members: Sequence[Term], ids: Tensor | None, first: int) -> Tensor:
    """Return the backward pass, head, sequence and column of rows over the same tokens, ``[4, rows]``.

    Args:
        first: number of sequences before these.
    """
    sizes = [len(term.source) for term in members]
    if ids is not None and len(ids) not in sizes and sum(sizes) <= ids.numel():
        sizes = [sum(sizes)]
    places = []
    for head, size in enumerate(sizes):
        place = torch.full((4, size), -1)
        place[0] = members[0].number
        place[1] = head
        length = 0 if ids is None else num_columns(size, ids)
        if length:
            row = torch.arange(size)
            place[2] = row // length + first
            place[3] = row % length
        places.append(place)
    return torch.cat(places, 1)


def _in_one(tokens: Sequence[Tensor]) -> Tensor:
    """Return ids of several passes as one matrix, filled with −1."""
    width = max((ids.shape[1] for ids in tokens), default=0)
    filled = [torch.zeros(0, width, dtype=torch.long)]
    for ids in tokens:
        filled.append(nn.functional.pad(ids, (0, width - ids.shape[1]), value=-1).cpu())
    return torch.cat(filled)


class Rows:
    """Rows of logits over all backward passes: columns with a value for each row.

    Softmaxes over the same tokens are chunks of one, unless they have more rows than there are
    tokens.

    Attributes:
        target: what each row learns.
        offset: tokens from a row's own to the last one that it sees.
        number: backward pass of each row.
        head: softmax among several over the same tokens.
        sequence: row of ``tokens``; −1 if unknown.
        column: place in it; −1 if unknown.
        tokens: of each pass and forward pass.
        first_tokens: of the first one.
    """

    def __init__(self, terms: Sequence[Term]) -> None:
        groups = dict[int, tuple[Tensor | None, list[Term]]]()
        for term in terms:
            ids = tokens_of(term)
            groups.setdefault(id(ids), (ids, []))[1].append(term)
        targets = []
        places = []
        tokens = list[Tensor]()
        for ids, members in groups.values():
            targets += [term.target for term in members if term.target is not None]
            places.append(_places(members, ids, sum(map(len, tokens))))
            if ids is not None:
                tokens.append(ids)
        self.target: Target = joined(targets)
        self.number, self.head, self.sequence, self.column = torch.cat(places, 1)
        self.weight = self.target.weight
        self.offset = 0
        self.first_tokens = tokens[0] if tokens else None
        self.tokens = _in_one(tokens)
        self.padding = padding_of(self.tokens)
        has_label = self.target.is_live & (self.target.form == LABEL)
        self.is_smoothed = has_label & (self.target.smoothing > 0.95)
        self.is_learned = self.target.is_live & ~self.is_smoothed

    def labels_at(self, places: Tensor, mask: Tensor) -> Tensor:
        """Return which of some rows learn the token behind theirs, if it is at one of some places."""
        width = places.shape[1]
        sequence = self.sequence[mask]
        behind = self.column[mask] + 1
        place = behind.clamp(0, width - 1)
        is_label: Tensor = self.tokens[sequence, place] == self.target.label[mask]
        is_label &= self.is_learned[mask] & places[sequence, place] & (behind < width)
        return is_label

    def share_at(self, shift: int, mask: Tensor) -> float:
        """Return the share of rows whose label is the token at a distance from the last one that
        they see.
        """
        place = (self.column + shift)[mask]
        width = self.tokens.shape[1]
        tokens = self.tokens[self.sequence[mask], place.clamp(0, width - 1)]
        is_inside = (place >= 0) & (place < width)
        return float((is_inside & (tokens == self.target.label[mask])).double().mean())
