"""``narrowgauge.teaches``: read from one backward pass what each position learns, and from a few
forward passes what it sees.

The graph of the loss leads to its softmax (:mod:`narrowgauge.checks.softmaxes`). Tokens are the
indices of the largest embedding. A row's place is the last token that it sees
(:mod:`narrowgauge.checks.sight`), so a shift is counted from there.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from narrowgauge.analysis.kinds import KINDS
from narrowgauge.analysis.reading import Reading, Readings
from narrowgauge.checks.gradients import (
    LEAST_VOCABULARY,
    has_own_batches,
    reason_for_none,
    weights_of_ranks,
)
from narrowgauge.checks.passes import Backward, Loss, Passes, leaves_of, micro_batches
from narrowgauge.checks.set_up import SetUp
from narrowgauge.checks.sight import num_columns, restart, seen, sight_of
from narrowgauge.checks.softmaxes import LABEL, Target, Term, Trace, joined, terms_of
from narrowgauge.distributed.ranks import all_ranks
from narrowgauge.distributed.replica_verification import unlike
from narrowgauge.spec.formats import dtype_name
from narrowgauge.spec.tables import Table, number_columns, text_columns
from narrowgauge.torch_support.put_back import put_back

Facts = dict[str, Any]
SHIFTS = (1, 0, -1, 2, 3)
"""Distances of a label from its position that are tried; the first of equals counts."""
MOST = 0.9
HALF = 0.5
IGNORED = -100
"""Shares of the labels that settle a shift, and that exclude one."""
_COLUMNS = (
    (
        *text_columns(learns="learns"),
        *number_columns(
            rows="rows",
            learn="learned",
            before="before",
            after="after",
            weight="weight",
            sum="weight_sum",
        ),
        *text_columns(weights_by="weights"),
        *number_columns(unlearned="unlearned", not_read="not_sure"),
    ),
    (
        *text_columns(softmax="function", format="dtype"),
        *number_columns(smoothing="smoothing", z_loss="z_loss"),
        *text_columns(other_terms="other_terms"),
    ),
    (
        *text_columns(sees_later_tokens="sees_later", other_sequences="sees_others"),
        *number_columns(from_token="first_seen", positions_begin_anew="restart", padding="padding"),
        *text_columns(sees_padding="sees_padding"),
    ),
)
"""The facts that are printed, as tables of one row."""
_COUNTS = (
    "rows",
    "learned",
    "sequences",
    "smoothed_alone",
    "not_sure",
    "padding_learned",
    "before",
    "after",
    "unlearned",
)
"""Facts that are summed over ranks."""
_SUM_ERROR = 0.01
"""Of the sum of a row of probabilities in 16 bits."""
_SAME = 2e-3
"""Relative distance of weights that are equal, where the arithmetic is exact enough to tell."""


def teaches(
    model: nn.Module,
    batch: Any,
    loss: Loss,
    *,
    backward: Backward | None = None,
    loss_scale: float = 1.0,
) -> Readings:
    """Read what a loss teaches: which token each position learns, with which weight, in which
    arithmetic, and what it sees.

    Print the result: at most six lines of facts, and warnings of kinds that no healthy loop has.
    All ranks make the call. Gradients, buffers, generators and attributes of modules are as before
    at the end.

    Args:
        model: as the loop calls it, possibly wrapped or compiled. Compiled parts run eagerly here.
        batch: this rank's batch. A list holds micro-batches; a list of tensors is one batch.
        loss: ``loss(model, batch)`` returns the objective of a batch.
        backward: ``backward(model, batch)`` computes the gradients of a step as the loop does, by
            calls of ``.backward()``, without the optimizer's step. ``None``: each micro-batch's
            loss, divided by their number.
        loss_scale: factor of the losses on which ``backward`` begins.
    Returns:
        Warnings and lines. ``taught`` is a flat dict of the facts, for assertions: ``shift``,
            ``learned``, ``weight_sum`` …

    Cost: one step as configured, three of the first batch, and about five copies of the logits.

    Example:
        >>> import torch, narrowgauge as ng
        >>> model = torch.nn.Sequential(torch.nn.Embedding(16, 8), torch.nn.Linear(8, 16))
        >>> def loss(model, tokens):
        ...     return torch.nn.functional.cross_entropy(model(tokens)[:, :-1].mT, tokens[:, 1:])
        >>> ng.teaches(model, torch.arange(24).view(2, 12) % 7, loss).taught["shift"]
        1
    """
    is_split = isinstance(batch, list) and not any(isinstance(part, Tensor) for part in batch)
    parts = batch if is_split else [batch]

    def run() -> float:
        if backward is not None:
            backward(model, batch)
            return loss_scale
        for part in parts:
            (loss(model, part) / len(parts)).backward()
        return 1.0

    with put_back(model, model.parameters()):
        return lesson(model, parts[0], loss, run)


def checked_lesson(
    set_up: SetUp, batch: Any, loss: Loss, backward: Backward | None, unseen: dict[str, str]
) -> Readings:
    """Read what the loss of a set-up teaches, for :func:`narrowgauge.check`.

    Errors become reasons in ``unseen``.
    """
    model = set_up.model
    parts = micro_batches(model, batch, loss)
    passes = Passes(
        model, set_up.optimizers, leaves_of(set_up), parts, batch, loss, backward, unseen
    )

    def run() -> float:
        return passes.run(passes.step).loss_scale

    readings = Readings()
    with reason_for_none("what the loss teaches", unseen), put_back(model, set_up.outside.values()):
        readings = lesson(model, parts[0], loss, run)
    unseen |= readings.unseen
    return readings


def lesson(model: nn.Module, batch: Any, loss: Loss, run: Callable[[], float]) -> Readings:
    """Read what the backward passes of ``run`` teach.

    ``run`` returns the loss scale. All ranks make the call.

    Args:
        batch: of the first backward pass.
    """
    passes = list[Pass]()

    def note(value: Tensor) -> None:
        terms, other_terms = terms_of(value, trace)
        passes.append(Pass(terms, other_terms, trace.lookups))
        trace.lookups = []
        trace.tensors.clear()

    with torch.compiler.set_stance("force_eager"), Trace(before_backward=note) as trace:
        scale = run()
    terms, other_terms = main_terms(passes)
    if all_ranks().largest(int(not terms)):
        return _unread(passes, other_terms)
    rows = rows_of(passes, terms)
    rows.weight /= scale
    if rows.first_tokens is None or not is_declared(model, batch, rows.first_tokens, rows.padding):
        rows.padding = None
    facts: Facts = dict.fromkeys(str(column.key) for columns in _COLUMNS for column in columns)
    facts |= arithmetic_facts(rows, terms) | {"other_terms": ", ".join(other_terms)}
    facts |= look(model, loss, batch, rows, terms)
    facts |= label_facts(rows, terms[0].teaches) | weight_facts(rows, _format_of(terms)[1])
    if has_own_batches(model) and not unlike(weights_of_ranks(model, all_ranks())):
        facts = over_ranks(facts)
    lines = []
    for columns in _COLUMNS:
        if any(facts[str(column.key)] is not None for column in columns):
            lines += Table(columns, [facts]).plain().splitlines()
    return Readings(_warnings(facts), lines, "what the loss teaches", taught=facts)


class Pass(NamedTuple):
    """The softmaxes, names of other terms, and token lookups before one call of ``backward``."""

    terms: list[Term]
    others: set[str]
    lookups: list[tuple[int, Tensor, int]]

    def tokens(self, term: Term) -> Tensor | None:
        """Return the ids to which rows of logits belong: the last lookup before them that fits.

        Take a table of as many rows as there are classes, else the largest.
        """
        earlier = [lookup for lookup in self.lookups if lookup[0] <= term.order]
        lookups = [lookup for lookup in earlier if not _are_positions(lookup[1])]
        if not lookups:  # tokens may count up as well
            lookups = [lookup for lookup in earlier if lookup[2] == term.classes]
        tables = {}
        fitting = {}
        for _, ids, size in lookups:
            tables[size] = ids
            if num_columns(len(term.rows), ids):
                fitting[size] = ids
        tables = fitting or tables
        size = term.classes if term.classes in tables else max(tables, default=0)
        return tables.get(size)


def _are_positions(ids: Tensor) -> bool:
    """Return whether ids count up in each row, stand still over padding, or begin anew."""
    steps = ids.diff(dim=1)
    counts_up = steps == 1
    is_position = counts_up | (steps == 0) | (ids[:, 1:] == ids.min())
    return bool(is_position.all() and counts_up.any())


class Rows:
    """Rows of logits over all backward passes: columns with a value for each row.

    Args:
        target: what each row learns.
        offset: tokens from a row's own to the last one that it sees.
        marks: backward pass, softmax among several over the same tokens, row of ``tokens``, place
            in it; −1 if unknown.
        tokens: of each pass and forward pass.
    """

    def __init__(self, target: Target, marks: Tensor, tokens: list[Tensor]) -> None:
        self.target = target
        self.weight = target.weight
        self.number, self.head, self.sequence, self.column = marks
        self.first_tokens = None
        self.offset = 0
        self.tokens = torch.zeros(0, 0, dtype=torch.long)
        if tokens:
            self.first_tokens = tokens[0]
            width = max(ids.shape[1] for ids in tokens)
            filled = [nn.functional.pad(ids, (0, width - ids.shape[1]), value=-1) for ids in tokens]
            self.tokens = torch.cat(filled).cpu()
        self.padding = padding_of(self.tokens)
        has_label = target.is_live & (target.form == LABEL)
        self.is_smoothed = has_label & target.is_sure & (target.smoothing > 0.95)
        self.is_learned = target.is_live & ~self.is_smoothed
        self.is_known = self.is_learned & target.is_sure

    def share_at(self, shift: int, mask: Tensor) -> float:
        """Return the share of rows whose label is the token at a distance from the last one that
        they see.
        """
        place = (self.column + shift)[mask]
        width = self.tokens.shape[1]
        tokens = self.tokens[self.sequence[mask], place.clamp(0, width - 1)]
        is_inside = (place >= 0) & (place < width)
        return float((is_inside & (tokens == self.target.label[mask])).double().mean())


def rows_of(passes: Sequence[Pass], terms: Sequence[Term]) -> Rows:
    """Put the rows of terms in order.

    Terms over the same tokens are chunks of one softmax, unless they have more rows than there are
    tokens.
    """
    targets = []
    marks = []
    tokens = list[Tensor]()
    for number, one_pass in enumerate(passes):
        groups = dict[int, tuple[Tensor | None, list[Term]]]()
        for term in one_pass.terms:
            if term in terms:
                ids = one_pass.tokens(term)
                groups.setdefault(id(ids), (ids, []))[1].append(term)
        for ids, members in groups.values():
            sizes = []
            for term in members:
                assert term.target is not None
                targets.append(term.target)
                sizes.append(len(term.rows))
            if ids is not None and len(ids) not in sizes and sum(sizes) <= ids.numel():
                sizes = [sum(sizes)]
            first = sum(map(len, tokens))
            for head, size in enumerate(sizes):
                length = 0 if ids is None else num_columns(size, ids)
                place = torch.arange(size)
                mark = torch.full((4, size), -1)
                mark[0] = number
                mark[1] = head
                if length:
                    mark[2] = place // length + first
                    mark[3] = place % length
                marks.append(mark)
            if ids is not None:
                tokens.append(ids)
    return Rows(joined(targets), torch.cat(marks, 1), tokens)


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


def is_declared(model: nn.Module, batch: Any, tokens: Tensor, padding: int | None) -> bool:
    """Return whether a token that looks like padding is said to be: by an embedding, by the model's
    settings, or by a mask or ignored labels of the batch.

    A run of equal tokens at the end of sequences may be text.
    """
    for module in model.modules():
        settings = getattr(module, "config", None)
        declared = getattr(module, "padding_idx", None), getattr(settings, "pad_token_id", None)
        if padding is not None and padding in declared:
            return True
    is_padding = tokens == padding
    for x in tree_leaves(batch):
        if not isinstance(x, Tensor) or x.shape != tokens.shape:
            continue
        is_left_out = x == IGNORED
        if x.max() <= 1:  # a mask
            is_left_out = x == 0
        if bool((is_left_out | ~is_padding).all()):
            return True
    return False


def main_terms(passes: Sequence[Pass]) -> tuple[list[Term], list[str]]:
    """Return the softmaxes with the most classes that teach labels, or else distributions, and
    names of the other terms.
    """
    terms = []
    other_terms = set()
    live = set()
    roots = set()
    for one_pass in passes:
        other_terms |= one_pass.others
        for term in one_pass.terms:
            if term.target is None:
                continue
            terms.append(term)
            if term.target.is_live.any():
                live.add(term.name)
            if term.name == "LogSoftmax":
                roots.add(term.root)
    kinds = {}
    for term in terms:
        if term.name not in live:
            continue  # chunks whose labels are all ignored stay: they hold the others' places
        kinds[term] = term.teaches
        if term.name == "Logsumexp" and term.root in roots:
            kinds[term] = "a term such as a z-loss"
    taught = "a label" if "a label" in kinds.values() else "a distribution"
    classes = max((term.classes for term, kind in kinds.items() if kind == taught), default=0)
    main = []
    for term, kind in kinds.items():
        if kind == taught and term.classes == classes:
            main.append(term)
        else:
            other_terms.add(f"{kind} ({term.name} over {term.classes})")
    return main, sorted(other_terms)


def _unread(passes: Sequence[Pass], other_terms: list[str]) -> Readings:
    """Return a line about a loss without a softmax, or with one whose target cannot be read."""
    unread = set()
    for one_pass in passes:
        unread |= {
            f"the target of {term.name}" for term in one_pass.terms if term.name != "Softmax"
        }
    if unread:
        return Readings(unseen={"what the loss teaches": ", ".join(sorted(unread))})
    if not passes:
        return Readings(unseen={"what the loss teaches": "no call of .backward() was seen"})
    line = "not a softmax loss"
    names = ", ".join(name for name in other_terms if name != "a sum")
    if names:
        line += f": {names}"
    return Readings([], [line], "what the loss teaches")


def look(model: nn.Module, loss: Loss, batch: Any, rows: Rows, terms: Sequence[Term]) -> Facts:
    """Return what rows of logits see, and put their place right: the last token that they see."""
    facts: Facts = {"padding": rows.padding}
    tokens = rows.first_tokens
    is_first = (rows.number == 0) & (rows.head == 0) & (rows.sequence >= 0)
    is_unknown = tokens is None or not is_first.any()
    if all_ranks().largest(int(is_unknown)) or tokens is None:
        return facts
    is_first &= rows.sequence < len(tokens)
    learned = rows.is_learned[is_first].view(len(tokens), -1)
    seen_by = sight_of(model, loss, batch, tokens, terms[0].kind)
    try:
        facts |= seen(seen_by, learned, tokens.cpu(), rows.padding)
    except ArithmeticError:
        return facts
    rows.offset = facts["offset"]
    rows.column = torch.where(rows.column < 0, -1, rows.column + rows.offset)
    return facts | {"restart": restart(batch, tokens)}


def over_ranks(facts: Facts) -> Facts:
    """Return counts of all ranks, the mean of their weights, since gradients are averaged, and the
    other facts of rank 0.
    """
    of_ranks = [facts for facts in all_ranks().gather(facts) if facts["weights"] is not None]
    if len(of_ranks) < 2:
        return facts
    facts = dict(of_ranks[0])
    sums = Counter[str]()
    for of_rank in of_ranks:
        for name in (*_COUNTS, "weight", "weight_sum"):
            sums[name] += of_rank[name] or 0
    facts |= sums
    facts["weight"] = sums["weight"] / len(of_ranks) ** 2
    facts["weight_sum"] = sums["weight_sum"] / len(of_ranks)
    weights = [of_rank["weight"] for of_rank in of_ranks]
    if max(weights) - min(weights) > _SAME * max(weights):
        facts["weights"] = "rank"
    return facts


# ── the facts ─────────────────────────────────────────────────────────────────────────────────────


def label_facts(rows: Rows, taught: str) -> Facts:
    """Return how many rows learn, which token, and how many rows before and after do not, in each
    sequence.
    """
    learned = rows.is_learned
    has_label = rows.is_known & (rows.column >= 0)
    facts: Facts = {"rows": len(learned), "learned": int(learned.sum()), "learns": taught}
    facts["sequences"] = len(rows.tokens)
    facts["smoothed_alone"] = int(rows.is_smoothed.sum())
    facts["not_sure"] = int((learned & ~rows.is_known).sum())
    facts["padding_learned"] = 0
    facts["shift"] = None
    if not has_label.any():
        return facts
    if rows.padding is not None:
        facts["padding_learned"] = int((rows.target.label[has_label] == rows.padding).sum())
    facts["next_share"] = rows.share_at(1, has_label)
    tried = dict.fromkeys((*SHIFTS, 1 - rows.offset))
    shifts = []
    for head in rows.head.unique():
        of_head = has_label & (rows.head == head)
        shares = {shift: rows.share_at(shift, of_head) for shift in tried}
        best = max(tried, key=shares.__getitem__)
        if shares[best] >= MOST:
            shifts.append(best)
    if shifts:
        facts["learns"] = "token " + " and ".join(f"t{shift:+d}" for shift in shifts)
        facts["shift"] = shifts[0]
        if shifts[0] == 1 - rows.offset < 1:
            facts["sees_later"] = True  # its label, the token after its own, among them
    # The first and the last row of each sequence that learn.
    far = torch.where(learned, rows.column, 1 << 40)
    near = torch.where(learned, rows.column, -1)
    place = rows.sequence.clamp_min(0)
    empty = torch.zeros(len(rows.tokens), dtype=torch.long)
    first = empty.scatter_reduce(0, place, far, "amin", include_self=False)[place]
    last = empty.scatter_reduce(0, place, near, "amax", include_self=False)[place]
    facts["before"] = int((rows.column < first).sum())
    facts["after"] = int(((rows.column > last) & (rows.column >= first)).sum())
    return facts


def weight_facts(rows: Rows, unit: float) -> Facts:
    """Return the weights of rows that learn: their sum, and by what they differ.

    Args:
        unit: relative rounding of the gradients from which weights are read.
    """
    weights = rows.weight[rows.is_known]
    if not len(weights):
        return {"weights": None}
    misfit = float(rows.target.misfit[rows.is_known].max())
    tolerance = max(_SAME, 5 * misfit, 2 * unit)
    low, high = weights.aminmax()
    facts: Facts = {"weight": float(weights.median()), "weight_sum": float(weights.sum())}
    facts |= {"misfit": misfit, "unlearned": int((weights < 0).sum())}
    facts["weights"] = "token"
    keys = (
        ("label", rows.target.label),
        ("sequence", rows.sequence),
        ("pass", rows.number),
        ("head", rows.head),
    )
    for name, key in keys:
        if _spread_within(weights, key[rows.is_known]) <= tolerance:
            facts["weights"] = name
    if high - low <= tolerance * high:
        facts["weights"] = "equal"
    return facts


def _spread_within(weights: Tensor, keys: Tensor) -> float:
    """Return the largest relative spread of weights within a group; infinite for one group, or for
    as many as weights.
    """
    groups, place = keys.unique(return_inverse=True)
    if len(groups) in (1, len(weights)):
        return math.inf
    zeros = torch.zeros(len(groups), dtype=weights.dtype)
    high = zeros.scatter_reduce(0, place, weights, "amax", include_self=False)
    low = zeros.scatter_reduce(0, place, weights, "amin", include_self=False)
    return float(((high - low) / torch.maximum(high.abs(), low.abs())).max())


def _format_of(terms: Sequence[Term]) -> tuple[torch.dtype, float]:
    """Return the narrowest format of the softmaxes' rows, and half its epsilon; 0 for float32."""
    dtype = min((term.rows.dtype for term in terms), key=lambda dtype: dtype.itemsize)
    unit = 0.0
    if dtype.itemsize < 4:
        unit = torch.finfo(dtype).eps / 2
    return dtype, unit


def arithmetic_facts(rows: Rows, terms: Sequence[Term]) -> Facts:
    """Return smoothing, z-loss, and the arithmetic of the softmax."""
    target = rows.target
    has_label = rows.is_known
    dtype, unit = _format_of(terms)
    facts: Facts = {"dtype": dtype_name(dtype), "function": terms[0].name, "log_error": 0.0}
    facts["classes"] = terms[0].classes
    facts["probabilities"] = all(map(_holds_probabilities, terms))
    if unit and terms[0].name == "LogSoftmax":
        facts["log_error"] = unit * float(terms[0].rows.abs().median())
    facts |= {"smoothing": 0.0, "z_loss": 0.0}
    for name, floor in (("smoothing", 1e-4), ("z_loss", 3e-6 + unit)):
        values = getattr(target, name)[has_label]
        value = float(values.nanmedian()) if has_label.any() else 0.0
        if abs(value) <= floor:
            continue
        # One value for all rows. An entropy looks like another one in each row.
        spread = (values - value).abs().nanmedian()
        is_one = value > 0 and spread < _SAME * value + unit
        facts[name] = value if is_one else None
    return facts


def _holds_probabilities(term: Term) -> bool:
    """Return whether the logits of a softmax are positive and sum to 1 in each row."""
    if term.source is None or term.source.shape[-1] != term.classes:
        return False
    values = term.source.detach().float()
    sums = values.sum(-1)
    return bool((values >= 0).all() and ((sums - 1).abs() < _SUM_ERROR).all())


def loss_readings(value: float, facts: Facts) -> tuple[list[Reading], list[str]]:
    """Compare a mean over labels with that of equal probabilities, ln V.

    Sums, losses with other terms, and those that also push probabilities down have no such value.

    Args:
        value: the loss; NaN if it was not read.
        facts: that the loss teaches; empty if they were not read.
    """
    classes = facts.get("classes", 0)
    if classes < 2 or not math.isfinite(value) or facts["learns"] == "a distribution":
        return [], []
    if facts["unlearned"] or facts["other_terms"] or abs(facts["weight_sum"] - 1) > 0.01:
        return [], []
    uniform = math.log(classes)
    kind = KINDS["loss-at-start"]
    off = abs(value / uniform - 1)
    line = f"loss {value:.4g} = ln {classes:,}"
    if off > 0.01:
        line = f"loss {value:.4g} beside ln {classes:,} = {uniform:.4g}"
    elif off < 1e-5:
        line += ", so the logits are equal"
    words = ""
    bound = kind.bound * uniform
    if 0 <= value < 1e-3 * uniform:
        kind = replace(kind, side="below")
        words = "nearly zero: do the inputs hold the labels, or are all labels ignored?"
        bound = 1e-3 * uniform
    elif value > bound:
        words = "more than equal probabilities give: look at the initial weights"
    if words and classes >= LEAST_VOCABULARY:
        return [kind.reading("", value, None, bound, words=words)], [line]
    return [], [line]


def _warnings(facts: Facts) -> list[Reading]:
    """Return what no healthy loop teaches."""
    learned = facts["learned"]
    sequences = facts["sequences"]
    shift = facts["shift"]
    total = facts.get("weight_sum", 0.0)
    padding_learned = facts["padding_learned"] if shift is not None else 0
    sees_later = facts["sees_later"]
    is_single = facts["weights"] == "equal"
    is_other = shift not in (None, 1) and facts["next_share"] <= HALF
    is_twice = is_other and (sees_later is False or facts["offset"] > 0)
    is_exact = is_single and facts["misfit"] < _SAME / 5 and not facts["not_sure"]
    is_counted = is_exact and abs(total * (learned + sequences) / learned - 1) < 3e-4
    is_smoothed = facts["smoothing"] and facts["smoothed_alone"]
    first_seen = facts["first_seen"]
    is_unmasked = first_seen is not None and first_seen < (facts["restart"] or 0)
    rows = (
        ("wrong-shift", is_twice, shift, 1),
        ("sees-its-target", sees_later and shift == 1, 1, 0),
        ("padding-learned", padding_learned > sequences, padding_learned, 0),
        ("ignored-smoothed", is_smoothed, facts["smoothed_alone"], 0),
        ("counts-unlearned", is_counted and sequences, total, 1),
        ("narrow-log-softmax", facts["log_error"], facts["log_error"], 0),
        ("softmax-twice", facts["probabilities"], 1, None),
        ("padding-seen", facts["sees_padding"], facts["padding"], None),
        ("documents-seen", is_unmasked, first_seen, facts["restart"]),
    )
    readings = []
    for name, holds, value, expected in rows:
        if holds:
            readings.append(KINDS[name].reading("", value, expected, **facts))
    return readings
