"""Evaluation: its weights, its rows, and how its loss counts tokens; and healthy evaluations, of which nothing is named."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn

import narrowgauge as ng
from narrowgauge.recompute.departures import unchecked
from narrowgauge.recompute.piece_results import EQUAL, NOT_CHECKED, PieceResult
from narrowgauge.recompute.pieces.evaluation import PassLoss, Reported, check_loss_of_evaluation, pass_loss
from recompute.audited_loop import LENGTH, VOCABULARY, Loop


def drawn(rows: int, seed: int, length: int = LENGTH + 1) -> Tensor:
    return torch.randint(0, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))


def losses_of(loop: Loop, parts: Sequence[Tensor]) -> list[Tensor]:
    """The loss of each token of each batch, evaluated as it should be."""
    loop.model.eval()
    with torch.no_grad():
        found = [
            F.cross_entropy(loop.model(part[:, :-1]).flatten(0, 1), part[:, 1:].flatten(), reduction="none")
            for part in parts
        ]
    loop.model.train()
    return found


def evaluated(loop: Loop, parts: Sequence[Tensor]) -> float:
    return float(torch.cat(losses_of(loop, parts)).mean())


VALIDATION = drawn(12, 99).split(4)


def alternating(loop: Loop, evaluate: Callable[[int], object], times: int = 6, steps: int = 2) -> Loop:
    """Some steps and an evaluation by turns; its end is judged before the next step."""
    for number in range(times):
        loop.run(steps)
        evaluate(number)
    return loop.run(1)


def evaluation_results(loop: Loop) -> list[str]:
    return [each.status for results in loop.results.values() for each in results if each.piece == "evaluation"]


# ── weights ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def exchanged(loop: Loop, weights: Sequence[Tensor], function: Callable[[], object]) -> None:
    """Call a function while the model has other weights."""
    own = [p.detach().clone() for p in loop.model.parameters()]
    with torch.no_grad():
        for chosen in (weights, own):
            for p, w in zip(loop.model.parameters(), chosen, strict=True):
                p.copy_(w)
            if chosen is weights:
                function()


class Weights:
    """Weights to evaluate with, from the trained ones of every step."""

    def __init__(self, loop: Loop, update: Callable[[Tensor, Tensor, int], Tensor]) -> None:
        self.kept = [
            torch.zeros_like(p) if update is without_start else p.detach().clone() for p in loop.model.parameters()
        ]
        self.number = 0
        line = loop.after_update

        def both() -> None:
            line()
            self.number += 1
            self.kept = [
                update(w, p.detach(), self.number) for w, p in zip(self.kept, loop.model.parameters(), strict=True)
            ]

        loop.after_update = both  # type: ignore[method-assign]


def average(kept: Tensor, now: Tensor, number: int) -> Tensor:
    return 0.9 * kept + 0.1 * now


def without_start(kept: Tensor, now: Tensor, number: int) -> Tensor:
    return 0.9 * kept + 0.1 * now


WEIGHTS: dict[str, tuple[Callable[[Tensor, Tensor, int], Tensor], set[str]]] = {
    "the trained ones": (lambda kept, now, number: now.clone(), set()),
    "an average": (average, set()),
    "an average that is updated every sixth step": (lambda k, now, n: average(k, now, n) if n % 6 == 0 else k, set()),
    "those of the beginning": (lambda kept, now, number: kept, {"evaluated-stale"}),
    "those of the fifth step": (lambda kept, now, number: now.clone() if number < 6 else kept, {"evaluated-stale"}),
    "an average that begins at zero": (without_start, {"evaluated-scaled"}),
    "a sum": (lambda kept, now, number: 1.3 * now, {"evaluated-scaled"}),
    "rounded": (lambda kept, now, number: now.bfloat16().float(), {"evaluated-narrow"}),
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_evaluated_weights_that_are_no_average_are_named(name: str) -> None:
    update, causes = WEIGHTS[name]
    loop = Loop(every=4, lr=1e-3)
    weights = Weights(loop, update)
    alternating(loop, lambda _: exchanged(loop, weights.kept, lambda: evaluated(loop, VALIDATION)), times=9)
    assert loop.names() == causes, loop.results
    named = [each for each in loop.findings() if each.name in causes]
    assert len(named) == len(causes), "once"


def test_an_average_of_weights_that_shrink_is_not_scaled() -> None:
    loop = Loop(every=4, optimizer=torch.optim.SGD, lr=0.1, weight_decay=0.5)
    weights = Weights(loop, average)
    alternating(loop, lambda _: exchanged(loop, weights.kept, lambda: evaluated(loop, VALIDATION)), times=9)
    assert not loop.findings()


def test_the_step_of_stale_weights_is_told() -> None:
    loop = Loop(every=4)
    loop.run(4)
    kept = [p.detach().clone() for p in loop.model.parameters()]
    for _ in range(3):
        assert not loop.findings()
        exchanged(loop.run(2), kept, lambda: evaluated(loop, VALIDATION))
        loop.run(1)
    assert [(each.name, each.message) for each in loop.findings()] == [
        ("evaluated-stale", "the evaluated weights are those of step 4.")
    ]


def test_a_copy_of_the_model_is_another_model() -> None:
    loop = Loop(every=2)
    ema = AveragedModel(loop.model, avg_fn=get_ema_avg_fn(0.9))
    reference = copy.deepcopy(loop.model)

    def evaluate(_: int) -> None:
        with torch.no_grad():
            for model in (ema, reference):
                model(VALIDATION[0][:, :-1])

    alternating(loop, evaluate)
    assert not loop.findings() and not evaluation_results(loop)
    assert reference._forward_hooks, "the copy has the hooks: the test is not empty"


def test_an_evaluation_changes_no_bit() -> None:
    loops = []
    for every in (2, 0):
        loop = Loop(every=every, dropout=0.1)
        loops.append(alternating(loop, lambda _, loop=loop: evaluated(loop, VALIDATION)))  # type: ignore[misc]
    assert loops[0].bits().equal(loops[1].bits()) and set(evaluation_results(loops[0])) == {EQUAL}


# ── rows ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def with_leak(share: float) -> Callable[[Loop], Callable[[int], Sequence[Tensor]]]:
    def prepare(loop: Loop) -> Callable[[int], Sequence[Tensor]]:
        data = [next(loop.data) for _ in range(30)]
        loop.data = iter(data)
        held = drawn(64, 99)
        number = int(share * len(held))
        held[:number] = torch.cat(data[:16])[:number]
        held = held[torch.randperm(len(held), generator=torch.Generator().manual_seed(0))]
        return lambda _: held.split(16)

    return prepare


def first_batches(loop: Loop) -> Callable[[int], Sequence[Tensor]]:
    """A few batches of the training data, and no others."""
    data = [next(loop.data) for _ in range(30)]
    loop.data = iter(data)
    return lambda _: data[:3]


def both_splits(loop: Loop) -> Callable[[int], Sequence[Tensor]]:
    """Some batches of the training data, and some of validation."""
    data = [next(loop.data) for _ in range(30)]
    loop.data = iter(data)
    return lambda number: [*data[: 2 * number + 2], *drawn(24, 99).split(4)]


def second_epoch(loop: Loop) -> Callable[[int], Sequence[Tensor]]:
    data = [next(loop.data) for _ in range(8)]
    loop.data = iter([*data * 4])
    return lambda _: VALIDATION


def tiny_whole(loop: Loop) -> Callable[[int], Sequence[Tensor]]:
    data = [next(loop.data) for _ in range(2)]
    loop.data = iter([*data * 20])
    return lambda _: data


def of_few_rows(loop: Loop) -> Callable[[int], Sequence[Tensor]]:
    """Rows of so few kinds that every one comes by chance, in training as in evaluation."""
    kinds = drawn(60, 5)
    generator = torch.Generator().manual_seed(0)

    def some() -> Tensor:
        return kinds[torch.randint(0, 60, (8,), generator=generator)]

    loop.data = iter(some, None)
    return lambda _: [some() for _ in range(8)]


def changing(at: int, part: slice, rows: int = 12) -> Callable[[Loop], Callable[[int], Sequence[Tensor]]]:
    def prepare(_: Loop) -> Callable[[int], Sequence[Tensor]]:
        other = drawn(12, 99)
        other[part] = drawn(12, 100)[part]
        return lambda number: (VALIDATION if number < at else [other[:rows]])

    return prepare


ROWS: dict[str, tuple[Callable[[Loop], Callable[[int], Sequence[Tensor]]], set[str]]] = {
    "held out": (lambda loop: lambda _: VALIDATION, set()),
    "a second epoch": (second_epoch, set()),
    "the whole of a tiny data set": (tiny_whole, set()),
    "few kinds of rows": (of_few_rows, set()),
    "both splits": (both_splits, set()),
    "other rows at random": (lambda loop: lambda number: drawn(12, 50 + number).split(4), set()),
    "a longer one at the end": (lambda loop: lambda n: [*VALIDATION, drawn(4, 7)] if n == 5 else VALIDATION, set()),
    "another set now and then": (lambda loop: lambda n: [drawn(12, 7)] if n == 3 else VALIDATION, set()),
    "batches of training": (first_batches, {"evaluated-on-training"}),
    "a quarter is trained on": (with_leak(0.25), {"rows-evaluated"}),
    "all is trained on": (with_leak(1.0), {"rows-evaluated"}),
    "some rows change": (changing(3, slice(0, 4)), {"evaluation-data-changed"}),
    "all rows change": (changing(3, slice(0, 12)), {"evaluation-data-changed"}),
    "another set from a step on": (changing(3, slice(0, 12), 10), set()),
}


@pytest.mark.parametrize("name", ROWS)
def test_rows_of_evaluations_are_compared_with_those_trained_on_and_those_before(name: str) -> None:
    prepare, causes = ROWS[name]
    loop = Loop(every=4)
    parts = prepare(loop)
    alternating(loop, lambda number: evaluated(loop, parts(number)))
    assert loop.names() == causes, loop.findings()


def test_passes_in_every_step_are_no_evaluation() -> None:
    loop = Loop(every=4)
    backward = loop.backward

    def with_old_outputs(tokens: Tensor, number: int) -> None:
        with torch.no_grad():
            loop.model(tokens[:, :-1])
        backward(tokens, number)

    loop.backward = with_old_outputs  # type: ignore[method-assign]
    loop.run(12)
    assert not loop.findings()


# ── how its loss counts ───────────────────────────────────────────────────────────────────────────────────────────────


def uneven(losses: list[Tensor]) -> float:
    return float(torch.stack([each.mean() for each in losses]).mean())


def over(more: int, rows: bool) -> Callable[[list[Tensor]], float]:
    def count(losses: list[Tensor]) -> float:
        number = sum(map(len, losses))
        return float(torch.cat(losses).sum()) / (number + more * (number // LENGTH if rows else 1))

    return count


COUNTS: dict[str, tuple[Callable[[list[Tensor]], float], str, dict[str, object]]] = {
    "over all tokens": (lambda losses: float(torch.cat(losses).mean()), "", {}),
    "one token a row more": (over(1, True), "evaluation-count", {"more": 1, "per": "a row"}),
    "one token a row less": (over(-1, True), "evaluation-count", {"more": -1, "per": "a row"}),
    "means of batches": (uneven, "evaluation-mean-of-means", {"passes": 3}),
    "their sum": (lambda losses: 3 * float(torch.cat(losses).mean()), "evaluation-scaled", {"factor": 3.0}),
    "bits": (lambda losses: float(torch.cat(losses).mean()) / math.log(2), "evaluation-scaled", {}),
    "something else": (lambda losses: 0.87 * float(torch.cat(losses).mean()), "", {}),
}


class Named(nn.Module):
    """A model of which the first half of the tokens is easy, so that batches of other lengths have other means."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, tokens: Tensor) -> Tensor:
        easy = F.one_hot((tokens + 1) % VOCABULARY, VOCABULARY) * (torch.arange(tokens.shape[1]) < 8)[:, None]
        logits: Tensor = self.inner(tokens) + 3.0 * easy
        return logits


def counting(rows: int, seed: int, length: int) -> Tensor:
    """Rows whose tokens count up."""
    return (torch.arange(length + 1) + drawn(rows, seed, 1)) % VOCABULARY


@pytest.mark.parametrize("name", COUNTS)
def test_a_loss_that_counts_otherwise_is_named(name: str, tmp_path: Path) -> None:
    count, cause, values = COUNTS[name]
    loop = Loop(every=0)
    parts = [
        counting(48, 3, LENGTH),
        counting(48, 4, LENGTH),
        counting(32, 5, 8 if name == "means of batches" else LENGTH),
    ]
    loop.model = Named(loop.model)  # type: ignore[assignment]
    with ng.RunRecorder(tmp_path / "run", loop.model, loop.optimizer, audit_every=4) as recorder:
        results = recorder._audited
        assert results is not None
        for _ in range(3):
            loop.run(1)
            recorder.step(1.0)
        recorder.evaluate(count(losses_of(loop, parts)))
        assert not results._counts_loss, "it was compared"
    found = [event for event in ng.read_run(tmp_path / "run").events if str(event.get("detector")).startswith("eval")]
    assert [each["detector"] for each in found] == [cause] * bool(cause), found
    for value in values.values():
        assert (f"{value:+d}" if value in (1, -1) else str(value).removesuffix(".0")) in found[0]["message"]


def _pass_of(rows: int, length: int, seed: int) -> PassLoss:
    tokens = drawn(rows, seed, length)
    logits = seed * torch.randn(rows, length, VOCABULARY, generator=torch.Generator().manual_seed(seed))
    found = pass_loss(tokens, logits)
    assert found is not None
    return found


PASSES = (_pass_of(5, 8, 1), _pass_of(5, 8, 2), _pass_of(2, 4, 3))
SUMS, NUMBERS = [float(each.sums[0]) for each in PASSES], [each.known for each in PASSES]
MEANS = [total / number for total, number in zip(SUMS, NUMBERS, strict=True)]
MEAN = sum(SUMS) / sum(NUMBERS)
REPORTS: dict[str, tuple[float, Reported, str]] = {
    "sound": (MEAN, Reported(3, 2.0), ""),
    "the first batch": (MEANS[0], Reported(), ""),
    "the last batch": (MEANS[2], Reported(), "evaluation-of-one-batch"),
    "the one between": (MEANS[1], Reported(), ""),
    "means": (sum(MEANS) / 3, Reported(), "evaluation-mean-of-means"),
    "means, by rows": ((5 * MEANS[0] + 5 * MEANS[1] + 2 * MEANS[2]) / 12, Reported(), "evaluation-mean-of-means"),
    "the second, not cleared": ((5.0 + MEAN) / 2, Reported(1, 5.0), "evaluation-not-cleared"),
    "the fourth, not cleared": ((3 * 5.0 + MEAN) / 4, Reported(3, 5.0), "evaluation-not-cleared"),
    "a mean of something else": ((5.0 + MEAN) / 2, Reported(2, 5.0), ""),
}


@pytest.mark.parametrize("name", REPORTS)
def test_what_a_reported_loss_is_instead_of_the_mean_is_named(name: str) -> None:
    loss, earlier, cause = REPORTS[name]
    (found,) = check_loss_of_evaluation(PASSES, loss, "all-but-last", 1, earlier)
    assert found.cause == cause and (found.status == EQUAL) is (name == "sound")


def test_the_last_of_passes_of_several_kinds_may_be_the_evaluation() -> None:
    """As of two sets of data, of which one is reported, and behind passes that sample a text."""
    sampled = [_pass_of(1, length, 4) for length in range(3, 8)]
    for passes in PASSES[:2], (*sampled, PASSES[1]):
        loss = float(passes[-1].sums[0]) / passes[-1].known
        (found,) = check_loss_of_evaluation(passes, loss, "all-but-last", 1, Reported())
        assert found.status == NOT_CHECKED


@pytest.mark.parametrize("is_cleared", [True, False])
def test_the_losses_that_a_loop_has_told_are_followed(is_cleared: bool) -> None:
    loop, kept = Loop(every=2, lr=3e-2), 0.0
    assert loop.watcher is not None
    loop.loss = lambda tokens: F.cross_entropy(  # type: ignore[method-assign]
        loop.model(tokens[:, :-1])[:, :-1].flatten(0, 1), tokens[:, 1:-1].flatten()
    ) / loop.micro_batches  # fmt: skip
    for number in range(1, 4):
        loop.run(2)
        with torch.no_grad():
            logits = loop.model.eval()(VALIDATION[0][:, :-1])
        loop.model.train()
        now = float(F.cross_entropy(logits[:, :-1].flatten(0, 1), VALIDATION[0][:, 1:-1].flatten()))
        kept = now if is_cleared else kept + (now - kept) / number
        loop.watcher.evaluated(kept)
    assert loop.names() == (set() if is_cleared else {"evaluation-not-cleared"})


def test_where_some_positions_are_left_out_the_loss_is_not_compared() -> None:
    loop = Loop(every=2)
    assert loop.watcher is not None

    def loss(tokens: Tensor) -> Tensor:
        labels = tokens[:, 1:].clone()
        labels[:, :6] = -100
        return F.cross_entropy(loop.model(tokens[:, :-1]).flatten(0, 1), labels.flatten()) / loop.micro_batches

    loop.loss = loss  # type: ignore[method-assign]
    loop.run(3)
    losses = losses_of(loop, VALIDATION)
    loop.watcher.evaluated(over(1, True)(losses))
    assert not loop.findings() and "evaluation" in unchecked(loop.results[3])


@pytest.mark.parametrize("place", [0, 1])
def test_the_loss_of_one_of_two_sets_is_not_judged_and_a_wrong_one_of_both_is(place: int) -> None:
    """Two sets, each with a smaller last batch; passes that sample a text are sets of one pass each."""

    def part(rows: int, length: int, mean: float) -> PassLoss:
        known = rows * (length - 1)
        sums = torch.tensor(
            [mean * known, (mean**2 + 0.1) * known, mean * rows * ((length - 1) // 4)], dtype=torch.float64
        )
        return PassLoss(sums, rows, length, 1e-7)

    sets = (
        [part(8, 33, 3.0), part(8, 33, 3.1), part(2, 33, 2.9)],
        [part(8, 33, 4.0), part(8, 33, 4.2), part(3, 33, 4.1)],
    )
    sampled = [part(1, length, 5.0 + length) for length in range(4, 9)]

    def found(passes: list[PassLoss], loss: float) -> list[PieceResult]:
        return check_loss_of_evaluation(passes, loss, "all-but-last", 7, Reported())

    def mean(passes: list[PassLoss]) -> float:
        return float(sum(each.sums[0] for each in passes)) / sum(each.known for each in passes)

    (result,) = found([*sets[0], *sets[1]], mean(sets[place]))
    assert result.status == "not checked" and "of some of the passes" in result.values["why"]
    (result,) = found([*sampled, *sets[place]], mean(sets[place]))
    assert result.status == "not checked"
    (result,) = found(sets[place], mean(sets[place]) / math.log(2))
    assert result.cause == "evaluation-scaled"
