"""The loss, read from the gradient of the logits."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from narrowgauge.recompute.departures import unchecked
from narrowgauge.recompute.piece_results import EQUAL, PieceResult
from narrowgauge.recompute.step_watcher import StepWatcher
from narrowgauge.recompute.task import task
from recompute.audited_loop import VOCABULARY, WIDTH, Loop

PADDING = 7


def audited(
    loss: Callable[[Tensor, Tensor], Tensor], batch: Callable[[Tensor], Tensor] = torch.clone, **settings: Any
) -> tuple[Loop, list[PieceResult]]:
    """The results of the loss piece in a loop whose loss is ``loss(logits, tokens)``."""
    loop = Loop(**settings)
    loop.data = map(batch, loop.data)

    def backward(tokens: Tensor, number: int) -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=loop.autocast):
            logits = loop.model(tokens[:, :-1])
        loss(logits.float(), tokens).backward()

    loop.backward = backward  # type: ignore[method-assign]
    loop.run(2)
    return loop, [each for each in loop.results[2] if each.piece == "loss"]


def mean(logits: Tensor, targets: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), **options)


def padded(tokens: Tensor) -> Tensor:
    tokens = tokens.clone()
    tokens[0, 12:] = PADDING
    return tokens


HEALTHY: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], dict[str, Any]]] = {
    "mean of micro-batches": (lambda z, x: mean(z, x[:, 1:]) / 2, {}),
    "one micro-batch": (lambda z, x: mean(z, x[:, 1:]), {"micro_batches": 1}),
    "autocast": (lambda z, x: mean(z, x[:, 1:]) / 2, {"autocast": True}),
    "shifted inside": (lambda z, x: mean(z[:, :-1], x[:, 1:-1]) / 2, {}),
    "some ignored": (
        lambda z, x: mean(z, x[:, 1:], ignore_index=PADDING, reduction="sum") / (x[:, 1:] != PADDING).sum(),
        {"task": task(ignore=PADDING), "micro_batches": 1},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_loss_is_equal(name: str) -> None:
    loss, settings = HEALTHY[name]
    loop, results = audited(loss, **settings)
    assert [each.status for each in results] == [EQUAL], results
    assert not loop.findings()


FAULTS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], str, dict[str, Any]]] = {
    "shifted twice": (lambda z, x: mean(z[:, :-1], x[:, 2:]) / 2, "labels-shifted", {"shift": 2}),
    "not shifted": (lambda z, x: mean(z, x[:, :-1]) / 2, "labels-shifted", {"shift": 0}),
    "the token before": (lambda z, x: mean(z[:, 1:], x[:, :-2]) / 2, "labels-shifted", {"shift": -1}),
    "a row of another": (
        lambda z, x: mean(z, torch.cat([x[1:2], x[1:]])[:, 1:]) / 2, "labels-other", {"share": 0.25},
    ),
    "all rows of others": (lambda z, x: mean(z, x.roll(1, 0)[:, 1:]) / 2, "labels-other", {"share": 1.0}),
    "sum": (lambda z, x: mean(z, x[:, 1:], reduction="sum"), "loss-scaled", {"equals": "the number of tokens"}),
    "not divided": (lambda z, x: mean(z, x[:, 1:]), "loss-scaled", {"factor": 2.0, "equals": "micro-batches"}),
    "mean over the batch": (
        lambda z, x: mean(z, x[:, 1:], reduction="sum") / 2 / len(x), "loss-scaled", {"factor": 24.0},
    ),
    "smoothed": (lambda z, x: mean(z, x[:, 1:], label_smoothing=0.1) / 2, "label-smoothing", {"value": 0.1}),
    "penalty": (
        lambda z, x: (mean(z, x[:, 1:]) + 1e-2 * z.logsumexp(-1).square().mean()) / 2, "z-loss", {"value": 1e-2},
    ),
    "maximized": (lambda z, x: -mean(z, x[:, 1:]) / 2, "loss-sign", {}),
    "smoothed otherwise": (
        lambda z, x: mean(z, x[:, 1:], label_smoothing=0.1) / 2, "label-smoothing-other", {"value": 0.1, "wanted": 0.05},
    ),
    "nothing counts": (lambda z, x: mean(z, torch.full_like(x[:, 1:], -100)), "loss-zero", {}),
    "padding": (lambda z, x: mean(z, padded(x)[:, 1:]) / 2, "ignored-counted", {"token": PADDING}),
    "weighted": (
        lambda z, x: (mean(z, x[:, 1:], reduction="none").view(4, -1) * torch.arange(24) / 12).mean() / 2,
        "tokens-weighted",
        {},
    ),
}  # fmt: skip
DECLARED = {"padding": task(ignore=PADDING), "smoothed otherwise": task(label_smoothing=0.05)}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_the_loss_is_named_with_its_size(name: str) -> None:
    loss, cause, values = FAULTS[name]
    loop, results = audited(loss, task=DECLARED.get(name))
    assert cause in [each.cause for each in results], results
    if name != "padding":
        assert loop.names() == {cause}, "one fault, one name: the gradient of this loss is right"
    found = next(each for each in results if each.cause == cause)
    for key, value in values.items():
        now = found.values[key]
        assert math.isclose(now, value, rel_tol=5e-2) if isinstance(value, float) else now == value, (key, now)


OWN: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "one is chosen and one rejected": lambda z, x: (mean(z[:2], x[:2, 1:]) - 3 * mean(z[2:], x[2:, 1:])) / 2,
    "advantages of both signs": (
        lambda z, x: (mean(z, x[:, 1:], reduction="none").view(4, -1) * torch.randn(4, 24)).mean() - mean(z, x[:, 1:])
    ),
}


@pytest.mark.parametrize("name", OWN)
def test_a_loss_that_lowers_some_sequences_is_not_one_of_wrong_sign(name: str) -> None:
    loop, _ = audited(OWN[name])
    assert loop.names() <= {"tokens-weighted"}, loop.names()


def test_tokens_that_are_hidden_and_predicted_need_no_causal_mask() -> None:
    """As a masked language model has them: no next token is predicted, and later ones may be seen."""
    loop = Loop(micro_batches=1)
    for block in loop.model.blocks:
        block.is_causal = False  # type: ignore[assignment]

    def loss(tokens: Tensor) -> Tensor:
        targets = tokens[:, :-1].clone()
        hidden = torch.rand(targets.shape, generator=torch.Generator().manual_seed(loop.step)) < 0.15
        logits = loop.model(targets.masked_fill(hidden, 0))
        return F.cross_entropy(logits.flatten(0, 1), targets.masked_fill(~hidden, -100).flatten())

    loop.loss = loss  # type: ignore[method-assign]
    loop.run(4)
    assert "sees-future" not in loop.names(), loop.names()


def test_of_two_heads_none_is_said_to_be_shifted() -> None:
    """One predicts the next token and one that after it."""
    loop = Loop(micro_batches=1)
    second, plain = nn.Linear(WIDTH, VOCABULARY, bias=False), loop.model.forward
    loop.model.second = second

    def forward(tokens: Tensor) -> tuple[Tensor, Tensor]:
        hidden: list[Tensor] = []
        handle = loop.model.norm.register_forward_hook(lambda module, args, output: hidden.append(output))
        logits = plain(tokens)
        handle.remove()
        return second(hidden.pop()), logits

    def loss(tokens: Tensor) -> Tensor:
        later, logits = loop.model(tokens[:, :-1])
        return mean(logits, tokens[:, 1:]) + 0.3 * mean(later[:, :-1], tokens[:, 2:])

    loop.model.forward = forward  # type: ignore[method-assign]
    loop.optimizer.add_param_group({"params": second.parameters()})
    loop.loss = loss  # type: ignore[method-assign]
    loop.run(4)
    assert not loop.findings()


def test_ignored_tokens_that_are_smoothed_count_otherwise() -> None:
    def loss(z: Tensor, x: Tensor) -> Tensor:
        targets = x[:, 1:].clone()
        targets[:, :8] = -100
        log_p = z.log_softmax(-1)
        hard = F.nll_loss(log_p.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")
        return (0.9 * hard - 0.1 * log_p.mean(-1).sum()) / int((targets >= 0).sum()) / 2

    loop, _ = audited(loss, task=task(label_smoothing=0.1))
    assert loop.names() == {"tokens-weighted"}


def test_micro_batches_of_other_lengths_that_have_means_of_their_own() -> None:
    calls: list[int] = []

    def loss(z: Tensor, x: Tensor) -> Tensor:
        calls.append(0)
        targets = x[:, 1:].clone()
        if len(calls) % 2:
            targets[:, 6:] = -100
        return mean(z, targets) / 2

    loop, _ = audited(loss)
    assert loop.names() == {"micro-batches-uneven"}


@pytest.mark.parametrize("is_declared", [False, True])
def test_a_token_that_is_ignored_inside_of_rows_is_a_note_unless_it_is_declared(is_declared: bool) -> None:
    def without(tokens: Tensor) -> Tensor:
        return tokens[:, 1:].masked_fill(tokens[:, 1:] == PADDING, -100)

    told = task(ignore=PADDING) if is_declared else None
    loop, _ = audited(lambda z, x: mean(z, without(x)), task=told, micro_batches=1)
    assert [(each.name, each.severity) for each in loop.findings()] == [("token-ignored", "note")] * (not is_declared)
    assert is_declared or f"token {PADDING} is never" in loop.findings()[0].message


@pytest.mark.parametrize("place", [slice(12, None), slice(1, 12)], ids=["behind", "before"])
def test_padding_is_no_token_that_is_ignored(place: slice) -> None:
    def padded(tokens: Tensor) -> Tensor:
        tokens[tokens == PADDING] = PADDING + 1
        tokens[:, place] = PADDING
        return tokens

    def loss(z: Tensor, x: Tensor) -> Tensor:
        return mean(z, x[:, 1:].masked_fill(x[:, 1:] == PADDING, -100))

    assert not audited(loss, padded, micro_batches=1)[0].findings()


def test_another_loss_is_not_checked() -> None:
    loop, results = audited(lambda z, x: z.square().mean())
    assert not loop.findings() and "loss" in unchecked(results)
    loop, results = audited(lambda z, x: mean(z, x[:, :-1]), task=task(loss="own"))
    assert not loop.findings() and "loss" in unchecked(results)


def test_a_model_that_is_sure_and_wrong_predicts_its_targets_all_the_same() -> None:
    loop = Loop(every=0)
    loop.model.head.weight = loop.model.embedding.weight  # of standard deviation 1, so that the first outputs are sure
    loop.optimizer = torch.optim.AdamW(loop.model.parameters(), lr=1e-3)
    loop.watcher = StepWatcher(loop.model, loop.optimizer, 2, loop.keep)
    assert not loop.run(6).findings()


def with_padding(tokens: Tensor, mask: Tensor, is_ignored: bool) -> set[str]:
    """What is said of a step whose rows are padded to the right, as the mask says; also outside of ``ng.task``."""
    loop = Loop(micro_batches=1)
    plain = loop.model.forward
    loop.model.forward = lambda tokens, attention_mask: plain(tokens)  # type: ignore[method-assign]
    labels = tokens[:, 1:].masked_fill(mask[:, 1:] == 0, -100) if is_ignored else tokens[:, 1:]
    for _ in range(2):
        logits = loop.model(tokens[:, :-1], attention_mask=mask[:, :-1])
        mean(logits, labels).backward()
        loop.optimizer.step()
        loop.optimizer.zero_grad()
    return loop.names()


@pytest.mark.parametrize("is_ignored", [False, True])
def test_padding_that_counts_is_read_from_the_mask(is_ignored: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(8, 48, (4, 25), generator=generator)
    mask = torch.ones_like(tokens)
    for row, length in enumerate((12, 18, 25, 9)):
        mask[row, length:], tokens[row, length:] = 0, PADDING
    assert with_padding(tokens, mask, is_ignored) == (set() if is_ignored else {"padding-counted"})
