"""``narrowgauge.teaches``: read from one backward pass what each position learns, and from a few
forward passes what it sees.

The gradient on the logits says it (:mod:`narrowgauge.checks.softmaxes`). Tokens are the indices of
the largest embedding. A row's place is the last token that it sees
(:mod:`narrowgauge.checks.sight`), so a shift is counted from there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge.analysis.kinds import KINDS
from narrowgauge.analysis.reading import Readings
from narrowgauge.checks.batch_facts import is_declared, starts_of, unlearned_ends
from narrowgauge.checks.findings import Findings
from narrowgauge.checks.gradients import has_own_batches, weights_of_ranks
from narrowgauge.checks.lesson_readings import Facts, lesson_readings
from narrowgauge.checks.lesson_rows import Rows, main_terms
from narrowgauge.checks.passes import Backward, Loss, Passes, micro_batches
from narrowgauge.checks.set_up import inner_name
from narrowgauge.checks.sight import seen, tokens_seen
from narrowgauge.checks.softmaxes import Term, Trace
from narrowgauge.distributed.ranks import all_ranks
from narrowgauge.distributed.replica_verification import unlike
from narrowgauge.spec.formats import dtype_name
from narrowgauge.spec.tables import Table, number_columns, text_columns
from narrowgauge.torch_support.put_back import put_back

SHIFTS = (1, 0, -1, 2, 3)
"""Distances of a label from its position that are tried; the first of equals counts."""
MOST = 0.9
"""Share of the labels that settles a shift."""
_COLUMNS = (
    (
        *text_columns(learns="learns"),
        *number_columns(rows="rows", learn="learned", weights_sum_to="weight_sum"),
        *text_columns(softmax="function", format="dtype"),
    ),
    (
        *text_columns(sees_later_tokens="sees_later", other_sequences="sees_others"),
        *number_columns(from_token="first_seen", positions_begin_anew="restart", padding="padding"),
        *text_columns(sees_padding="sees_padding"),
    ),
)
"""The facts that are printed, as tables of one row."""
_SUMS = (
    "rows", "learned", "sequences", "smoothed_alone", "padding_learned", "unlearned", "starts",
    "starts_learned", "ends_unlearned",
)  # fmt: skip
"""Facts that are summed over ranks."""
_SUM_ERROR = 0.01
"""Of the sum of a row of probabilities in 16 bits."""
_SAME = 2e-3
"""Relative distance of weights that are equal."""


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

    Print the result: four lines of facts, and warnings of kinds that no healthy loop has. All ranks
    make the call. Gradients, buffers, generators and attributes of modules are as before at the end.

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
            ``learned``, ``weight_sum`` … It is empty, and the reason printed, where the loss calls
            neither ``cross_entropy``, ``log_softmax`` nor ``logsumexp``, as a fused one.

    Cost: one step as configured, three of the first batch, and about five copies of the logits.

    Example:
        >>> import torch, narrowgauge as ng
        >>> model = torch.nn.Sequential(torch.nn.Embedding(16, 8), torch.nn.Linear(8, 16))
        >>> def loss(model, tokens):
        ...     return torch.nn.functional.cross_entropy(model(tokens)[:, :-1].mT, tokens[:, 1:])
        >>> ng.teaches(model, torch.arange(24).view(2, 12) % 7, loss).taught["shift"]
        1
    """
    leaves = {inner_name(n): p for n, p in model.named_parameters() if p.requires_grad}
    parts = micro_batches(model, batch, loss)
    passes = Passes(model, [], leaves, parts, batch, loss, backward, {}, model.training)
    with put_back(model, model.parameters()):
        return lesson(passes, loss_scale)


def checked_lesson(passes: Passes) -> Readings:
    """Read what the loss of a set-up teaches, for :func:`narrowgauge.check`."""
    findings = Findings()
    with (
        findings.reason_for_none("what the loss teaches"),
        put_back(passes.model, passes.leaves.values()),
    ):
        return lesson(passes)
    return Readings(unseen=findings.unseen)


def lesson(passes: Passes, loss_scale: float = 1.0) -> Readings:
    """Read what a step teaches. All ranks make the call.

    Args:
        loss_scale: of the losses, where no scaler of torch scales them.
    """
    model = passes.model
    batch = passes.parts[0]
    with torch.compiler.set_stance("force_eager"), Trace() as trace:
        scale = passes.run(passes.step).loss_scale
    if loss_scale != 1.0:
        scale = loss_scale
    readings = []
    if trace.draws:
        readings.append(KINDS["wrong-mode"].case("teacher").reading("", trace.draws, 0))
    terms = main_terms(trace.terms)
    if all_ranks().largest(int(not terms)):
        words = "no cross_entropy, log_softmax or logsumexp of logits"
        if not trace.terms and trace.number:
            return Readings(readings, [f"what the loss teaches is not read: {words}"])
        return Readings(readings, unseen={"what the loss teaches": f"{words} that learn a label"})
    rows = Rows(terms)
    rows.weight /= scale
    if not is_declared(model, batch, rows.first_tokens, rows.padding):
        rows.padding = None
    facts: Facts = dict.fromkeys(str(column.key) for columns in _COLUMNS for column in columns)
    facts |= (
        dict.fromkeys(_SUMS, 0)
        | arithmetic_facts(terms)
        | look(model, passes.loss, batch, rows, terms)
    )
    facts |= label_facts(rows, terms[0].teaches)
    if has_own_batches(model) and not unlike(weights_of_ranks(model, all_ranks())):
        facts = over_ranks(facts)
    lines = []
    for columns in _COLUMNS:
        if any(facts[str(column.key)] is not None for column in columns):
            lines += Table(columns, [facts]).plain().splitlines()
    readings += lesson_readings(facts)
    return Readings(readings, lines, "what the loss teaches", taught=facts)


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
    seen_by = partial(tokens_seen, model, loss, batch, tokens, terms[0].kind)
    try:
        facts |= seen(seen_by, learned, tokens.cpu(), rows.padding)
    except ArithmeticError:
        return facts
    rows.offset = facts["offset"]
    rows.column = torch.where(rows.column < 0, -1, rows.column + rows.offset)
    starts = starts_of(batch, tokens)
    if starts is not None:
        facts["restart"] = int(starts.any(0).nonzero()[-1])
        facts["starts"] = int(starts.sum())
        facts["starts_learned"] = int(rows.labels_at(starts.cpu(), is_first).sum())
    last = rows.column[is_first].view(len(tokens), -1).where(learned, -2).amax(1) + 1
    ends = unlearned_ends(batch, tokens.cpu(), last, rows.padding)
    return facts | {"ends_unlearned": ends}


def over_ranks(facts: Facts) -> Facts:
    """Return counts of all ranks, the mean of the sums of their weights, since gradients are
    averaged, and the other facts of rank 0.
    """
    of_ranks = all_ranks().gather(facts)
    facts = dict(of_ranks[0])
    facts |= dict.fromkeys((*_SUMS, "weight_sum"), 0)
    total = 0.0
    for of_rank in of_ranks:
        total += of_rank["cross_entropy"] * of_rank["weight_sum"]
        for name in (*_SUMS, "weight_sum"):
            facts[name] += of_rank[name]
    facts["cross_entropy"] = total / (facts["weight_sum"] or math.nan)
    facts["weight_sum"] /= len(of_ranks)
    return facts


# ── the facts ─────────────────────────────────────────────────────────────────────────────────────


def label_facts(rows: Rows, taught: str) -> Facts:
    """Return how many rows learn, which token, and with which weights."""
    learned = rows.is_learned
    target = rows.target
    has_label = learned & (rows.column >= 0)
    weights = rows.weight[learned]
    facts: Facts = {"rows": len(learned), "learned": int(learned.sum()), "learns": taught}
    facts |= {"sequences": len(rows.tokens), "smoothed_alone": int(rows.is_smoothed.sum())}
    facts |= {
        "weight_sum": float(weights.sum()),
        "unlearned": int((weights < 0).sum()),
        "shift": None,
    }
    facts["is_even"] = False
    if len(weights):
        low, high = weights.aminmax()
        facts["is_even"] = bool(high - low <= _SAME * high)
    of_passes = []
    for number in rows.number[learned].unique():
        of_passes.append(float(rows.weight[learned & (rows.number == number)].mean()))
    facts["pass_weights"] = of_passes
    mean = (weights * target.cross_entropy[learned]).sum() / weights.sum()
    facts["cross_entropy"] = float(mean)
    is_padding = has_label & (target.label == (-1 if rows.padding is None else rows.padding))
    facts["padding_learned"] = int(is_padding.sum())
    if has_label.any():
        facts |= shift_facts(rows, has_label)
    return facts


def shift_facts(rows: Rows, has_label: Tensor) -> Facts:
    """Return which token most rows learn."""
    facts: Facts = {"next_share": rows.share_at(1, has_label)}
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
    return facts


def arithmetic_facts(terms: Sequence[Term]) -> Facts:
    """Return the arithmetic of the softmax."""
    name, classes = terms[0].kind
    dtype = min((term.dtype for term in terms), key=lambda dtype: dtype.itemsize)
    facts: Facts = {"function": name, "classes": classes, "dtype": dtype_name(dtype)}
    facts["probabilities"] = all(map(_holds_probabilities, terms))
    facts["log_error"] = 0.0
    if dtype.itemsize < 4:
        log_p = terms[0].source.detach().float().log_softmax(-1)
        facts["log_error"] = torch.finfo(dtype).eps / 2 * float(log_p.abs().median())
    return facts


def _holds_probabilities(term: Term) -> bool:
    """Return whether the logits of a softmax are positive and sum to 1 in each row."""
    values = term.source.detach().float()
    sums = values.sum(-1)
    return bool((values >= 0).all() and ((sums - 1).abs() < _SUM_ERROR).all())
