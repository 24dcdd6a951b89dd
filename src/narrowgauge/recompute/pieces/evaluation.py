"""Evaluation: with which weights, over which rows, and how its loss counts tokens.

An evaluation is what the model computes without gradients between two steps. Weights may be exchanged for it, for those of an
average say, so others than the trained ones are no fault; weights of an earlier time, or a multiple of the trained ones, are.
The loss that a loop reports is compared with that of the logits. Which token follows the last one is often not an input, and
then the last loss of each row is estimated from the others, and the envelope is the error of that.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from narrowgauge.recompute.capture import spread
from narrowgauge.recompute.fitting import fitted
from narrowgauge.recompute.piece_results import DEPARTS, EQUAL, PieceResult, not_checked
from narrowgauge.recompute.pieces.data import ODDS, DataHistory, log_odds
from narrowgauge.recompute.pieces.update import narrower_format
from narrowgauge.recompute.seen_rows import Digest, StepRows, digest_of, read_rows

PIECE = "evaluation"
_ELEMENTS = 64
"""Elements of each parameter by which weights are recognized."""
_KEPT = 8
"""Earlier weights that are kept."""
_MOST_PASSES = 1 << 12
_STILL = 3
"""Evaluations in a row with weights of earlier steps after which that is reported."""
_MOST_SETS = 64
"""Of the passes between two reports, as many as are looked at as parts."""
_SIGMAS = 6.0
_TOLERANCE = 2e-4


def weights_sample(parameters: Mapping[str, Tensor]) -> Tensor:
    """A few elements of each parameter on the host, 1-D float64."""
    parts = [spread(p, _ELEMENTS).float() for p in parameters.values()]
    return torch.cat([part.to(parts[0].device) for part in parts]).cpu().double()


# ── how its loss counts ───────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class PassLoss:
    """The loss of one batch without gradients, as far as its own tokens tell.

    Args:
        sums: float64 ``[3]``: of the losses of the known targets, of their squares, of those in the last quarter of each row.
        rows, length: of the batch.
        rounding: spacing of the logits' format at 1.
    """

    sums: Tensor
    rows: int
    length: int
    rounding: float

    @property
    def known(self) -> int:
        """Targets that are among the batch's own tokens."""
        return self.rows * (self.length - 1)


def _last_quarter(length: int) -> int:
    return max(1, (length - 1) // 4)


@torch.no_grad()
def pass_loss(tokens: Tensor, logits: Tensor) -> PassLoss | None:
    """The losses of the next tokens that a batch itself has; ``None`` where shapes say nothing."""
    if logits.ndim != 3 or logits.shape[:2] != tokens.shape or tokens.shape[1] < 3:
        return None
    rows, length = tokens.shape
    losses = torch.stack(
        [F.cross_entropy(z[:-1].float(), t[1:].long(), reduction="none") for z, t in zip(logits, tokens, strict=True)]
    ).double()
    late = losses[:, -_last_quarter(length) :]
    sums = torch.stack([losses.sum(), losses.square().sum(), late.sum()])
    return PassLoss(sums, rows, length, torch.finfo(logits.dtype).eps)


@dataclass(frozen=True)
class Reported:
    """The evaluations that a loop has reported: how many, and the last one's loss in nats per token."""

    number: int = 0
    last: float = 0.0


@dataclass(frozen=True)
class _Counted:
    """What the batches of an evaluation sum up to: tensors by batch, and the relative error of each batch's sum."""

    sums: Tensor
    numbers: Tensor
    errors: Tensor

    @property
    def mean(self) -> float:
        return float(self.sums.sum() / self.numbers.sum())

    @property
    def error(self) -> float:
        return float(self.errors.square().sum().sqrt() / self.sums.sum())


def _counted(passes: Sequence[PassLoss], has_last: bool) -> _Counted:
    """With the last target of each row, which is estimated from those before, or without."""
    sums = torch.stack([each.sums for each in passes]).cpu()
    numbers = torch.tensor([each.known for each in passes], dtype=torch.float64)
    rows = torch.tensor([each.rows for each in passes], dtype=torch.float64)
    known, squares, late = sums.unbind(1)
    if not has_last:
        return _Counted(known, numbers, torch.zeros_like(known))
    mean = float(known.sum() / numbers.sum())
    wanders = math.sqrt(max(0.0, float(squares.sum() / numbers.sum()) - mean**2))
    quarter = torch.tensor([_last_quarter(each.length) for each in passes], dtype=torch.float64)
    errors = _SIGMAS * wanders * (rows * (1 + 1 / quarter)).sqrt()
    return _Counted(known + late / quarter, numbers + rows, errors)


def check_loss_of_evaluation(
    passes: Sequence[PassLoss], loss: float, counted: str, step: int, earlier: Reported
) -> list[PieceResult]:
    """Compare a reported loss with that of the logits, and with what it is by other ways to count.

    Args:
        passes: of the evaluation.
        loss: that the loop reports, in nats per token.
        counted: which positions count in training, a value of :func:`narrowgauge.recompute.pieces.loss.counted_positions`;
            where some are left out, an evaluation leaves out others too, and is not compared.
        earlier: what the loop reported before.
    """
    if counted not in ("all", "all-but-last"):
        return [not_checked(PIECE, "it is not known that every position counts in training", step)]
    if not passes or not math.isfinite(loss):
        return [not_checked(PIECE, "no logits of (batch, sequence, vocabulary) were seen without gradients", step)]
    all_of = _counted(passes, counted == "all")
    mean = all_of.mean
    tolerance = _TOLERANCE + 2 * max(each.rounding for each in passes) + all_of.error
    apart = abs(loss / mean - 1)
    result = PieceResult(PIECE, EQUAL, (), apart, tolerance, step=step)
    if apart <= tolerance:
        return [result]
    if any(abs(loss / part.mean - 1) <= tolerance - all_of.error + part.error for part in _sets(passes, counted)):
        return [not_checked(PIECE, "the reported loss is that of some of the passes, as of one of two sets", step)]
    found = {
        cause: values
        for cause, other, within, values in _other_ways(passes, all_of, tolerance, earlier)
        if abs(other / mean - 1) > 1.5 * (tolerance + within) and abs(loss / other - 1) <= within
    }
    if len(found) != 1:
        return [not_checked(PIECE, "the reported loss is not that of the logits' next tokens", step)]
    ((cause, values),) = found.items()
    return [replace(result, status=DEPARTS, cause=cause, values={**values, "loss": loss, "wanted": mean})]


def _sets(passes: Sequence[PassLoss], counted: str) -> Iterator[_Counted]:
    """Passes that may be a set of data beside others: the first of one is larger than the last of the one before.

    So is each pass that samples a text, which is longer by a token.
    """
    grows = [
        place
        for place, (one, two) in enumerate(itertools.pairwise(passes), 1)
        if two.rows > one.rows or two.length > one.length
    ]
    starts = [0, *grows, len(passes)]
    for first, end in itertools.combinations(starts if len(starts) <= _MOST_SETS else starts[-_MOST_SETS:], 2):
        if end - first < len(passes):
            yield _counted(passes[first:end], counted == "all")


def _are_one_set(passes: Sequence[PassLoss]) -> bool:
    """Whether passes look like the batches of one set of data: alike, but for a smaller last one.

    Two may be of two sets, of which one is reported; passes that sample a text are of other lengths.
    """
    *most, last = passes
    shapes = {(each.rows, each.length) for each in most}
    return len(most) > 1 and len(shapes) == 1 and last.rows <= most[0].rows and last.length <= most[0].length


def _other_ways(
    passes: Sequence[PassLoss], all_of: _Counted, tolerance: float, earlier: Reported
) -> Iterator[tuple[str, float, float, dict[str, object]]]:
    """Ways to count by mistake: the id, the loss, its tolerance, and values."""
    total, number, number_rows = float(all_of.sums.sum()), float(all_of.numbers.sum()), sum(p.rows for p in passes)
    means, errors, sure = all_of.sums / all_of.numbers, all_of.errors / all_of.numbers, tolerance - all_of.error
    if len({(each.rows, each.length) for each in passes}) > 1:
        rows = torch.tensor([each.rows for each in passes], dtype=torch.float64)
        for weights in (torch.ones_like(rows), rows):
            within = sure + float((weights * errors).square().sum().sqrt() / (weights * means).sum())
            mean = float((weights * means).sum() / weights.sum())
            yield "evaluation-mean-of-means", mean, within, {"passes": len(passes)}
    if _are_one_set(passes):
        within = sure + float(errors[-1] / means[-1])
        yield "evaluation-of-one-batch", float(means[-1]), within, {"passes": len(passes)}
    if earlier.number:
        # Evaluations of as many tokens each: what was summed before is in the mean as often as this one.
        mean_of_all = earlier.last + (total / number - earlier.last) / (earlier.number + 1)
        yield "evaluation-not-cleared", mean_of_all, tolerance, {"number": earlier.number}
    for per, more in (("a row", number_rows), ("in all", 1)):
        for times in (-2, -1, 1, 2):
            yield "evaluation-count", total / (number + times * more), tolerance, {"more": times, "per": per}
    known = {"the number of batches": float(len(passes)), "1 / log 2: bits": 1 / math.log(2)}
    for name, factor in known.items():
        if factor != 1:
            yield "evaluation-scaled", factor * total / number, tolerance, {"factor": factor, "equals": name}


# ── with which weights ────────────────────────────────────────────────────────────────────────────────────────────────


def check_weights(evaluated: Tensor, trained: Tensor, dtype: torch.dtype, step: int) -> list[PieceResult]:
    """Say what evaluated weights are that are not the trained ones; an average is none of it.

    Args:
        evaluated, trained: samples, 1-D float64.
        dtype: of the parameters.
    """
    if evaluated.shape != trained.shape:
        return [not_checked(PIECE, "the parameters of an evaluation have other shapes", step)]
    if evaluated.equal(trained):
        return [PieceResult(PIECE, EQUAL, step=step)]
    length = max(float(trained.norm()), 1e-300)
    result = PieceResult(PIECE, DEPARTS, (), float((evaluated - trained).norm()) / length, 0.0, step=step)
    if (narrow := narrower_format(evaluated, trained, dtype)) is not None:
        return [replace(result, cause="evaluated-narrow", values={"format": narrow})]
    (factor,), rest = fitted(evaluated, [trained])
    if abs(factor - 1) > 0.02 and rest <= 0.2 * abs(factor - 1) * length:
        return [replace(result, cause="evaluated-scaled", values={"factor": factor})]
    return [not_checked(PIECE, "the evaluated weights are others than the trained ones, as an average's are", step)]


# ── over which rows ───────────────────────────────────────────────────────────────────────────────────────────────────


def check_leak(rows: StepRows, data: DataHistory) -> list[PieceResult]:
    """Compare the rows of an evaluation with those that were trained on.

    The yardstick are the training steps: of how many of their rows the same is true in the first pass, and lately. An evaluation
    some of whose batches are of trained rows and others not at all is one of both kinds of data, and is not judged.
    """
    seen = data.seen
    each = seen.chosen(dict.fromkeys(rows.hashes))
    hits = sum(h in seen.last for h in each)
    if not each or not hits:
        return []
    share = hits / len(each)
    values: dict[str, object] = {"share": share}
    result = PieceResult("data", DEPARTS, (), share, 0.0, "rows-evaluated", values, rows.step)
    if share >= 0.99:
        is_part = 2 * len(each) <= len(seen)
        return [replace(result, cause="evaluated-on-training")] if is_part else []
    again, number = data.own
    own = (again + 1) / max(1, number)
    if data.recent * 0.8 <= share <= data.recent * 1.25 or log_odds(hits, 3 * own * len(each)) > ODDS / 2:
        return []
    by_pass = [(sum(h in seen.last for h in part), len(part)) for part in map(seen.chosen, rows.passes) if part]
    without = sum(n for found, n in by_pass if not found)
    if without * math.log1p(-share) < ODDS / 2:
        return []
    return [replace(result, envelope=own, values={"share": share, "own": again / max(1, number)})]


@dataclass
class EvaluationHistory:
    """Follows the evaluations between a loop's steps.

    Attributes:
        losses: of the passes since the last reported loss.
        reported: the losses that the loop has told.
    """

    losses: list[PassLoss] = field(default_factory=list)
    reported: Reported = Reported()
    _digests: list[Digest] = field(default_factory=list)
    _weights: Tensor | None = None
    _earlier: dict[int, Tensor] = field(default_factory=dict)
    _evaluated: list[tuple[int, Tensor]] = field(default_factory=list)
    _rows: list[frozenset[int]] = field(default_factory=list)
    _last: int = -2
    _in_a_row: int = 0
    _stale: int = 0
    _named: set[str] = field(default_factory=set)

    @property
    def is_each_step(self) -> bool:
        """Whether the loop computes without gradients in every step, which is no evaluation."""
        return self._in_a_row >= 3

    @property
    def is_open(self) -> bool:
        """Whether there was a pass without gradients since the last step."""
        return self._weights is not None

    def keep_weights(self, step: int, parameters: Mapping[str, Tensor]) -> None:
        """Keep trained weights, to recognize them when they are evaluated later."""
        self._earlier[step] = weights_sample(parameters)
        for old in list(self._earlier)[1:-_KEPT]:  # the first is where the loop began
            del self._earlier[old]

    def add(self, parameters: Mapping[str, Tensor], tokens: Tensor | None, logits: Tensor | None) -> None:
        """Take a pass: the weights of the first, its rows, and its loss if there are ``logits``."""
        if self._weights is None:
            self._weights = weights_sample(parameters)
        if tokens is None or self.is_each_step or len(self._digests) >= _MOST_PASSES:
            return
        self._digests.append(digest_of(tokens))
        if logits is not None and (found := pass_loss(tokens, logits)) is not None:
            self.losses.append(found)

    def end(
        self, step: int, parameters: Mapping[str, Tensor], data: DataHistory, dtype: torch.dtype
    ) -> list[PieceResult]:
        """Judge the passes between a step and the next one; each departure once.

        Args:
            parameters: before the next step, so the trained ones.
        """
        self._in_a_row = self._in_a_row + 1 if step - self._last == 1 else 0
        evaluated, self._weights, self._last = self._weights, None, step
        digests, self._digests, self.losses = self._digests, [], []
        results: list[PieceResult] = []
        if evaluated is not None:
            results += self._weights_of(evaluated, parameters, dtype, step)
        if digests:
            data.read()
            rows = read_rows(step, digests)
            results += [*check_leak(rows, data), *self._changed(rows, data)]
        return self.once(results)

    def once(self, results: Sequence[PieceResult]) -> list[PieceResult]:
        """Those results whose cause was not named before."""
        new = [each for each in results if each.cause not in self._named]
        self._named |= {each.cause for each in new if each.cause}
        return new

    def _weights_of(
        self, evaluated: Tensor, parameters: Mapping[str, Tensor], dtype: torch.dtype, step: int
    ) -> list[PieceResult]:
        trained = weights_sample(parameters)
        results = check_weights(evaluated, trained, dtype, step)
        if any(each.cause == "evaluated-scaled" for each in results) and self._is_between(evaluated, trained):
            results = [
                not_checked(PIECE, "the evaluated weights are a multiple of the trained ones, as earlier were", step)
            ]
        if any(each.status != EQUAL and not each.cause for each in results):
            now = [at for at, sample in [*self._earlier.items(), *self._evaluated] if evaluated.equal(sample)]
            self._stale = self._stale + 1 if now else 0
            # An average that begins late, or is updated once an epoch, stands still over some evaluations.
            if self._stale >= _STILL:
                results = [replace(results[0], status=DEPARTS, cause="evaluated-stale", values={"at": now[0]})]
            self._evaluated = [(now[0] if now else step, evaluated)]
        else:
            self._stale, self._evaluated = 0, []
        self.keep_weights(step, parameters)
        return results

    def _is_between(self, evaluated: Tensor, trained: Tensor) -> bool:
        """Whether an average of earlier weights can be so long: where decay shrinks weights, it is longer than the last ones."""
        (factor,), _ = fitted(evaluated, [trained])
        factors = [1.0, *(fitted(each, [trained])[0][0] for each in self._earlier.values())]
        return min(factors) - 0.02 <= factor <= max(factors) + 0.02

    def _changed(self, rows: StepRows, data: DataHistory) -> list[PieceResult]:
        """An evaluation that had the same rows twice, some of which others have replaced."""
        now = frozenset(data.seen.chosen(rows.hashes))
        earlier = [frozenset(data.seen.chosen(each)) for each in self._rows]
        self._rows = [*self._rows[-2:], frozenset(rows.hashes)]
        if len(earlier) < 3 or not earlier[0] or earlier[0] != earlier[1] or earlier[0] in (earlier[2], now):
            return []
        before = earlier[0]
        # More rows or fewer are a longer or shorter evaluation; others altogether, of another number, another set of data.
        share = max(_replaced(before, other) for other in (earlier[2], now))
        is_for_good = _replaced(before, earlier[2]) > 0 and _replaced(before, now) > 0
        if not is_for_good or (share == 1 and len(now) != len(before)):
            return []
        values: dict[str, object] = {"share": share, "rows": len(now)}
        return [PieceResult(PIECE, DEPARTS, (), share, 0.0, "evaluation-data-changed", values, rows.step)]


def _replaced(before: frozenset[int], now: frozenset[int]) -> float:
    """The share of rows that others have replaced; 0 where one set is part of the other."""
    gone = len(before - now)
    return gone / len(before) if gone and now - before else 0.0
