"""The loss, read from the gradient of the logits: which token each position predicts, and what the position counts.

The gradient of a cross entropy with respect to the logits of one position is ``w · (p − q)``, with ``p`` the softmax, ``q``
the target and ``w`` what the position counts. So each position tells, without the loss function, its target (the one logit
that is pushed up), its weight, whether targets are smoothed (part of ``q`` is spread over all tokens), and a penalty on the
logarithm of the partition function (part of ``w`` times ``p`` alone). Where the gradient has another form, the loss is
another, and this says that it was not checked.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from narrowgauge.recompute.capture import ForwardCall, StepCapture
from narrowgauge.recompute.fitting import fitted, near
from narrowgauge.recompute.output_samples import CrossEntropy
from narrowgauge.recompute.piece_results import DEPARTS, EQUAL, PieceResult, not_checked
from narrowgauge.recompute.pieces.gradient import what_it_equals
from narrowgauge.recompute.task import Task

PIECE = "loss"
SHIFTS = (1, 0, -1, 2, 3)
_FITS = 0.02
_AGREE = 0.9
_SURE = 3e-3
_MOST_SURE = 0.9
"""Of a probability: where the model is less sure, a position that counts has a gradient by which it is known."""
_CERTAIN = 1 - 1e-6
"""Of a probability, whose position has a gradient of zero in float32 if it is the target's."""
_AT_ONCE = 1 << 22
"""Elements of the logits that are fitted at once."""
_SIGMAS = 6.0
_FEWEST = 8
"""Padded positions that say whether padding counts."""
_UNEVEN = 0.05
"""Of the weight of a position, by which it counts otherwise than another."""
_PLAIN = 1e-5
"""Of its gradient: what a cross entropy that is computed again may have besides."""


@dataclass(frozen=True)
class _Positions:
    """Sampled positions of one forward pass: place in its sequence, what was fitted, and how well.

    ``weight`` is what a position counts; ``smoothed`` the share of its target spread over all tokens, and ``penalty`` what the
    gradient has of ``p`` beyond the cross entropy, both relative to the weight; ``unexplained`` is the rest, likewise. Where the
    model is sure of the target, its gradient is next to nothing and tells neither: that is not ``is_known``.
    Where smoothing is all that is left, no target is told either. Of the whole pass ``number_counted`` positions have a gradient,
    and ``number_sure`` have none because the model is certain of a token, so they may count or not. ``masked`` is whether the
    next token is one that the mask of attention leaves out, where the pass is given one.
    ``rounding`` is the spacing of logits or gradients at 1, the coarser one.
    """

    tokens: Tensor
    row: Tensor
    place: Tensor
    target: Tensor
    weight: Tensor
    smoothed: Tensor
    penalty: Tensor
    unexplained: Tensor
    log_partition: Tensor
    is_known: Tensor
    number: int
    number_counted: int
    number_sure: float
    masked: Tensor | None
    rounding: float

    @property
    def has_target(self) -> Tensor:
        return self.is_known & (self.smoothed < 0.5)


def check_loss(step: StepCapture, task: Task) -> list[PieceResult]:
    """Read the loss of every forward pass from the gradients that arrived at its logits.

    Args:
        step: with its forward passes.
        task: ``ignore`` is the token that must not count; a loss of one's own is not checked.
    """
    if task.loss == "own":
        return [not_checked(PIECE, "declared as a loss of its own", step.step)]
    if "calls" in step.missing:
        return [not_checked(PIECE, step.missing["calls"], step.step)]
    calls = [call for call in step.calls if call.logits is not None and call.tokens is not None]
    if not calls:
        return [not_checked(PIECE, "no gradient arrived at logits of (batch, sequence, vocabulary)", step.step)]
    if any(call.number_of_logits > 1 for call in calls):
        return [not_checked(PIECE, "several outputs have gradients and the dims of logits", step.step)]
    if why := next(filter(None, (call.why_values_moved for call in calls)), ""):
        return [not_checked(PIECE, why, step.step)]
    found = [positions for call in calls if (positions := _fitted_positions(call)) is not None]
    if not found:
        return [not_checked(PIECE, "logits and tokens have other shapes", step.step)]
    counted = torch.cat([each.is_known for each in found])
    if not bool(counted.any()):
        return [PieceResult(PIECE, DEPARTS, (), 1.0, 0.0, "loss-zero", {}, step.step)]
    unexplained = torch.cat([each.unexplained for each in found])[counted]
    if float(unexplained.median()) > _FITS:
        return [not_checked(PIECE, "the gradient of the logits is not that of a cross entropy", step.step)]
    results = [*_targets(found, step), *_ignored(found, step, task), *_shape(found, step, task), *_counts(found, step)]
    if results:
        return results
    values: dict[str, object] = {"counted": counted_positions(found)}
    return [PieceResult(PIECE, EQUAL, (), float(unexplained.median()), _FITS, values=values, step=step.step)]


def counted_positions(found: list[_Positions]) -> str:
    """Which of the sampled positions count: ``"all"``, ``"all-but-last"`` of each row, or ``"some"``."""
    is_last = torch.cat([each.place == each.tokens.shape[1] - 1 for each in found])
    is_counted = torch.cat([each.weight.abs() > 0 for each in found])
    if bool(is_counted.all()):
        return "all"
    return "all-but-last" if bool((is_counted != is_last).all()) else "some"


def _fitted_positions(call: ForwardCall) -> _Positions | None:
    tokens, sample = call.tokens, call.logits_sample()
    if tokens is None or sample is None or sample.gradients is None or sample.counts is None:
        return None
    if sample.shape[:2] != tokens.shape:
        return None
    length, vocabulary = sample.shape[1:]
    if vocabulary < 3:
        return None
    at_once = max(1, _AT_ONCE // vocabulary)
    parts = zip(sample.values.split(at_once), sample.gradients.split(at_once), strict=True)
    fits = [torch.cat(each) for each in zip(*itertools.starmap(_fit, parts), strict=True)]
    target, a, b, c, rest, size, surest, log_partition = fits
    weight = b + c
    safe = torch.where(weight.abs() > 0, weight, torch.ones_like(weight))
    is_counted = size > 0
    is_known = is_counted & ((size > _SURE * size.max()) | (surest < _MOST_SURE))
    weight = torch.where(is_known, weight, weight[is_known].median()) if bool(is_known.any()) else weight
    zero = torch.zeros_like(weight)
    return _Positions(
        tokens.cpu(),
        (sample.chosen // length).cpu(),
        (sample.chosen % length).cpu(),
        target.cpu(),
        torch.where(is_counted, weight, zero).cpu(),
        torch.where(is_counted, c / safe, zero).cpu(),
        torch.where(is_counted, a / safe - 1, zero).cpu(),
        torch.where(is_counted, rest, zero).cpu(),
        log_partition.cpu(),
        (is_counted & is_known).cpu(),
        sample.number,
        int(sample.counts.sum()),
        sample.number * float((~is_counted & (surest > _CERTAIN)).double().mean()),
        _masked(call, sample.chosen),
        max(torch.finfo(t.dtype).eps for t in (sample.values, sample.gradients)),
    )


def _masked(call: ForwardCall, chosen: Tensor) -> Tensor | None:
    is_seen = call.seen
    if is_seen is None or bool(is_seen.all()):
        return None
    is_next_masked = torch.zeros_like(is_seen)
    is_next_masked[:, :-1] = ~is_seen[:, 1:]
    return is_next_masked.flatten()[chosen].cpu()


def _fit(logits: Tensor, gradients: Tensor) -> tuple[Tensor, ...]:
    """Each position's target, the factors of ``a p − b e_target − c``, what is left, and the sizes of what was fitted.

    A target is pushed up, so its gradient is the lowest. Where it is smoothed, or the loss is maximized, it may be the largest
    instead; of the two the one that explains more is taken.
    """
    z, d = logits.double(), gradients.double()
    log_partition = z.logsumexp(-1)
    p = (z - log_partition[:, None]).exp()
    lowest, largest = d.argmin(-1), d.abs().argmax(-1)
    taken, target = _solved(d, p, lowest), lowest.clone()
    doubtful = (lowest != largest).nonzero()[:, 0]
    other = _solved(d[doubtful], p[doubtful], largest[doubtful])
    better = other[-1] < 0.5 * taken[-1][doubtful]
    target[doubtful[better]] = largest[doubtful[better]]
    for here, there in zip(taken, other, strict=True):
        here[doubtful[better]] = there[better]
    return (target, *taken, d.abs().amax(-1), p.amax(-1), log_partition)


def _solved(d: Tensor, p: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Least squares with p, the target and a constant: the three factors, and the share of the gradient that is left."""
    one = torch.zeros_like(p).scatter_(1, target[:, None], 1.0)
    columns = torch.stack([p, -one, torch.full_like(p, -1.0 / p.shape[1])], dim=-1)
    scale = d.norm(dim=-1, keepdim=True).clamp_min(1e-300)
    # Columns of like length, so that the solution is well determined.
    lengths = columns.norm(dim=1, keepdim=True).clamp_min(1e-300)
    columns = columns / lengths
    gram = columns.mT @ columns + 1e-12 * torch.eye(3, dtype=torch.float64, device=d.device)
    solution = torch.linalg.solve(gram, columns.mT @ (d / scale)[..., None])
    rest = ((columns @ solution)[..., 0] - d / scale).norm(dim=-1)
    a, b, c = (solution[..., 0] / lengths[:, 0] * scale).unbind(-1)
    return a, b, c, rest


def cross_entropy_of(call: ForwardCall) -> CrossEntropy | None:
    """The loss of a call of whose logits positions are kept; ``None`` where it is not a cross entropy, or tokens count unlike."""
    found, sample = _fitted_positions(call), call.logits_sample()
    if found is None or sample is None or sample.lowest is None or sample.counts is None or sample.gradients is None:
        return None
    known = found.is_known
    if not bool(known.any()):
        return None
    eps = torch.finfo(sample.gradients.dtype).eps
    weights = found.weight[known]
    if float(weights.median()) <= 0 or float((weights / weights.median() - 1).abs().max()) > max(_UNEVEN, 20 * eps):
        return None
    # Of all sampled elements together: what each was rounded by averages out.
    d, z = (t.double().cpu()[known] for t in (sample.gradients, sample.values))
    form = z.softmax(-1)
    form.scatter_add_(1, found.target[known][:, None], torch.full((len(form), 1), -1.0, dtype=torch.float64))
    (weight,), rest = fitted(d.flatten(), [form.flatten()])
    unexplained = rest / float(d.norm())
    if unexplained > max(_PLAIN, eps):  # smoothing, a penalty, or another term, none of which averages out
        return None
    error = _SIGMAS * unexplained / math.sqrt(len(d)) + 4 * torch.finfo(torch.float32).eps
    return CrossEntropy(sample.lowest, sample.counts, weight, error)


# ── which token is predicted ──────────────────────────────────────────────────────────────────────────────────────────


def _agreement(found: list[_Positions], shift: int, rows: int = 0) -> float:
    """The share of counted positions whose target is the token ``shift`` places and ``rows`` rows later."""
    hits = number = 0.0
    for each in found:
        there = each.place + shift
        is_known = (there >= 0) & (there < each.tokens.shape[1]) & each.has_target
        if bool(is_known.any()):
            wanted = each.tokens[(each.row[is_known] + rows) % len(each.tokens), there[is_known]]
            hits += float((wanted == each.target[is_known]).sum())
            number += float(is_known.sum())
    return hits / number if number else 0.0


def _targets(found: list[_Positions], step: StepCapture) -> list[PieceResult]:
    shares = {shift: _agreement(found, shift) for shift in SHIFTS}
    wrong = 1 - shares[1]
    others = PieceResult(PIECE, DEPARTS, (), wrong, 0.01, "labels-other", {"share": wrong}, step.step)
    if shares[1] >= _AGREE:
        return [others] if wrong > 0.01 else []
    best = max(shares, key=lambda shift: shares[shift])
    if shares[best] >= _AGREE:
        return [replace(others, cause="labels-shifted", values={"shift": best})]
    of_rows = min(len(each.tokens) for each in found)
    if shares[1] > 0.5 or any(_agreement(found, 1, rows) >= _AGREE for rows in range(1, of_rows)):
        return [others]
    return [
        not_checked(PIECE, "the targets are not the next tokens; ng.task(loss=…) declares what they are", step.step)
    ]


def _token_ignored(found: list[_Positions], step: StepCapture) -> list[PieceResult]:
    """The one token at which no position counts, although positions of the same row count before and after it."""
    counted, absent, is_inside = set[int](), set[int](), False
    for each in found:
        has_next = each.place + 1 < each.tokens.shape[1]
        row, place, is_counted = each.row[has_next], each.place[has_next], each.weight[has_next] != 0
        following = each.tokens[row, place + 1]
        counted.update(following[is_counted].tolist())
        absent.update(following[~is_counted].tolist())
        for at, where in zip(row[~is_counted].tolist(), place[~is_counted].tolist(), strict=True):
            beside = place[is_counted & (row == at)]
            is_inside |= bool((beside < where).any()) and bool((beside > where).any())
    if len(absent) != 1 or not is_inside or counted & absent:
        return []
    token = absent.pop()
    share = float((torch.cat([each.weight for each in found]) == 0).double().mean())
    return [PieceResult(PIECE, DEPARTS, (), share, 0.0, "token-ignored", {"token": token, "share": share}, step.step)]


def _padding_counted(found: list[_Positions], step: StepCapture) -> list[PieceResult]:
    """Positions that predict padding; one a row may be meant, which ends the text."""
    with_mask = [(each.masked, each) for each in found if each.masked is not None]
    counted = sum(int((masked & each.is_known).sum()) for masked, each in with_mask)
    padded = sum(int(masked.sum()) for masked, _ in with_mask)
    if 2 * counted <= padded or padded < _FEWEST:
        return []
    share = counted / sum(int(each.is_known.sum()) for each in found)
    return [PieceResult(PIECE, DEPARTS, (), share, 0.0, "padding-counted", {"share": share}, step.step)]


def _ignored(found: list[_Positions], step: StepCapture, task: Task) -> list[PieceResult]:
    if task.ignore is None:
        return [*_padding_counted(found, step), *_token_ignored(found, step)]
    counted = torch.cat([each.has_target for each in found])
    targets = torch.cat([each.target for each in found])
    wrong = counted & (targets == task.ignore)
    if not bool(wrong.any()):
        return []
    share = float(wrong.sum()) / float(counted.sum())
    return [
        PieceResult(
            PIECE, DEPARTS, (), share, 0.0, "ignored-counted", {"token": task.ignore, "share": share}, step.step
        )
    ]


# ── its form, and what positions count ────────────────────────────────────────────────────────────────────────────────


def _shape(found: list[_Positions], step: StepCapture, task: Task) -> list[PieceResult]:
    counted = [each.is_known for each in found]
    smoothed = torch.cat([each.smoothed[c] for each, c in zip(found, counted, strict=True)])
    penalty = torch.cat([each.penalty[c] for each, c in zip(found, counted, strict=True)])
    partition = torch.cat([each.log_partition[c] for each, c in zip(found, counted, strict=True)])
    narrow = _rounding(found)
    results = []
    middle = float(smoothed.median())
    if abs(middle - task.label_smoothing) > max(5e-3, 20 * narrow) and (middle > 0 or task.label_smoothing):
        cause = "label-smoothing-other" if task.label_smoothing else "label-smoothing"
        values = {"value": middle, "wanted": task.label_smoothing}
        results.append(PieceResult(PIECE, DEPARTS, (), middle, 5e-3, cause, values, step.step))
    # 2 c log Z for a penalty c log² Z
    factor = float((penalty / (2 * partition)).median())
    if float(penalty.abs().median()) > max(1e-5, 20 * narrow):
        spread = float((penalty - 2 * factor * partition).abs().median()) / float(penalty.abs().median())
        if spread < 0.1:
            results.append(PieceResult(PIECE, DEPARTS, (), factor, 1e-5, "z-loss", {"value": factor}, step.step))
        elif spread > 0.1 and not results:
            results.append(PieceResult(PIECE, DEPARTS, (), float(penalty.median()), 1e-5, "", {}, step.step))
    return results


def _rounding(found: list[_Positions]) -> float:
    """The spacing of the coarsest logits or gradients of the step."""
    return max((each.rounding for each in found), default=0.0)


def _counts(found: list[_Positions], step: StepCapture) -> list[PieceResult]:
    """What a position counts: all alike, and all of the step together as much as one mean."""
    counting = [each for each in found if bool((each.weight.abs() > 0).any())]
    sampled = [each.weight[each.weight.abs() > 0] for each in counting]
    middles = [float(weights.median()) for weights in sampled]
    numbers = [each.number_counted for each in counting]
    total = sum(m * n for m, n in zip(middles, numbers, strict=True)) / step.loss_scale
    tolerance = max(0.02, 20 * _rounding(found))
    result = PieceResult(PIECE, DEPARTS, (), 0.0, tolerance, step=step.step)
    uneven = max(float((w - m).abs().max()) / abs(m) for w, m in zip(sampled, middles, strict=True))
    if uneven > max(tolerance, _UNEVEN):
        share = float(
            torch.cat([(w - m).abs() > tolerance * abs(m) for w, m in zip(sampled, middles, strict=True)])
            .double()
            .mean()
        )
        return [replace(result, difference=uneven, cause="tokens-weighted", values={"share": share})]
    if total < 0:
        return [replace(result, difference=2.0, cause="loss-sign")]
    if max(middles) > (1 + tolerance) * min(middles):
        values = {"least": min(middles) / max(middles)}
        return [replace(result, difference=1 - values["least"], cause="micro-batches-uneven", values=values)]
    most = total + sum(m * each.number_sure for m, each in zip(middles, counting, strict=True)) / step.loss_scale
    within = max(2e-3, 20 * _rounding(found))
    if total - within <= 1.0 <= most + within or not _is_whole(found):
        return []
    equals = what_it_equals(total, step, len(found))
    tokens = sum(numbers)
    if near(total, tokens, 0.05):
        equals = {"equals": "the number of tokens"}
    return [replace(result, difference=abs(total - 1), cause="loss-scaled", values={"factor": total, **equals})]


def _is_whole(found: list[_Positions]) -> bool:
    return all(each.number == len(each.weight) or bool((each.weight.abs() > 0).all()) for each in found)
