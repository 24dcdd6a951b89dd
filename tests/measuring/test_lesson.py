"""What a loss teaches: facts of losses of many kinds, healthy and with one fault."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import narrowgauge as ng

V = 48
WIDTH = 16
ROWS = 4
LENGTH = 20
PADDING = 0
IGNORED = -100
LEARNED = 19 + 19 + 13 + 8
Loss = Callable[[nn.Module, Any], Tensor]


class Model(nn.Module):
    """A language model: each position sees the mean of the tokens up to it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(V, WIDTH, padding_idx=PADDING)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.mix, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, V, bias=False)
        self.dropout = nn.Dropout(0.1)

    def hidden(self, tokens: Tensor) -> Tensor:
        mask = torch.ones(LENGTH, LENGTH).tril()
        x = self.embedding(tokens) + self.positions(torch.arange(LENGTH))
        return self.dropout((x + mask / mask.sum(-1, keepdim=True) @ self.mix(x)).tanh())

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.hidden(tokens))


def data(padded: bool = True, prompt: int = 0) -> tuple[Tensor, Tensor]:
    """Return tokens, and labels that are not shifted."""
    tokens = torch.randint(5, V, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    real = torch.ones_like(tokens)
    if padded:
        real[2, 14:] = real[3, 9:] = 0
        tokens[real == 0] = PADDING
    labels = tokens.masked_fill(real == 0, IGNORED)
    labels[:, :prompt] = IGNORED
    return tokens, labels


def usual(model: Any, batch: Any, **options: Any) -> Tensor:
    tokens, labels = batch
    logits = model(tokens)[:, :-1].flatten(0, 1)
    return F.cross_entropy(logits, labels[:, 1:].flatten(), **options)


def log_probabilities(model: Any, batch: Any) -> Tensor:
    tokens, labels = batch
    log_p = model(tokens)[:, :-1].log_softmax(-1)
    chosen = log_p.gather(-1, labels[:, 1:].clamp_min(0)[..., None])[..., 0]
    return chosen * (labels[:, 1:] != IGNORED)


class Fused(torch.autograd.Function):
    """A loss of hidden states and a head, which makes its gradient in the forward pass."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor, labels: Tensor) -> Tensor:
        with torch.enable_grad():
            h = hidden.detach().requires_grad_()
            w = head.detach().requires_grad_()
            loss = F.cross_entropy(h @ w.T, labels)
            ctx.save_for_backward(*torch.autograd.grad(loss, (h, w)))
        return loss.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        hidden, head = ctx.saved_tensors
        return gradient * hidden, gradient * head, None


def fused(model: Any, batch: Any) -> Tensor:
    tokens, labels = batch
    hidden = model.hidden(tokens)[:, :-1].flatten(0, 1)
    return Fused.apply(hidden, model.head.weight, labels[:, 1:].flatten())


def chunked(model: Any, batch: Any) -> Tensor:
    tokens, labels = batch
    hidden = model.hidden(tokens)[:, :-1].flatten(0, 1)
    labels = labels[:, 1:].flatten()

    def of_chunk(hidden: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(model.head(hidden), labels, reduction="sum")

    sums = [
        checkpoint(of_chunk, *chunk, use_reentrant=False)
        for chunk in zip(hidden.split(16), labels.split(16), strict=True)
    ]
    return sum(sums) / (labels != IGNORED).sum()


def preferences(model: Any, batch: Any, reference: Any = Model().eval()) -> Tensor:  # noqa: B008
    with torch.no_grad():
        base = log_probabilities(reference, batch).sum(-1)
    margin = log_probabilities(model, batch).sum(-1) - base
    return -F.logsigmoid(0.1 * (margin[:2] - margin[2:])).mean()


def distilled(model: Any, batch: Any) -> Tensor:
    teacher = torch.randn(ROWS * LENGTH, V, generator=torch.Generator().manual_seed(5)).softmax(-1)
    return F.kl_div(model(batch[0]).log_softmax(-1).flatten(0, 1), teacher, reduction="batchmean")


def selected(model: Any, batch: Any) -> Tensor:
    tokens, labels = batch
    is_label = labels[:, 1:] != IGNORED
    logits = model.head(model.hidden(tokens)[:, :-1][is_label])
    return F.cross_entropy(logits, labels[:, 1:][is_label])


def segmentation(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]).movedim(-1, 1), batch[1])


def in_bfloat16(model: Any, batch: Any) -> Tensor:
    logits = model(batch[0])[:, :-1].flatten(0, 1).bfloat16()
    return F.cross_entropy(logits, batch[1][:, 1:].flatten()).float()


def shifted_twice(model: Any, batch: Any) -> Tensor:
    tokens, labels = batch
    shifted = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
    return usual(model, (tokens, shifted))


PADDED = data()
PIXELS = torch.randn(2, 6, 6, 8), torch.randint(0, 5, (2, 6, 6))
MEAN = {"weight_sum": 1.0}
NEXT = {
    "shift": 1,
    "learned": LEARNED,
    "dtype": "float32",
    "padding": PADDING,
    "padding_learned": 0,
}
HEALTHY: dict[str, tuple[Any, Any, Loss, dict[str, Any]]] = {
    "usual": (Model(), PADDED, usual, NEXT | MEAN),
    "smoothed": (Model(), PADDED, lambda m, b: usual(m, b, label_smoothing=0.1), NEXT | MEAN),
    "sum": (Model(), PADDED, lambda m, b: usual(m, b, reduction="sum"), NEXT | {"weight_sum": float(LEARNED)}),
    "prompts": (Model(), data(False, 6), usual, {"learned": 56, "shift": 1} | MEAN),
    "compiled": (torch.compile(Model()), PADDED, usual, NEXT | MEAN),
    "checkpointed chunks": (Model(), PADDED, chunked, NEXT | MEAN),
    "by rows": (Model(), PADDED, lambda m, b: -log_probabilities(m, b).sum() / LEARNED, NEXT | MEAN),
    "preferences": (Model(), PADDED, preferences, {"shift": 1, "learned": LEARNED}),
    "distilled": (Model(), PADDED, distilled, {"learns": "a distribution", "weight_sum": 1.0}),
    "all positions": (Model(), data(False), lambda m, b: F.cross_entropy(m(b[0]).mT, b[1]), {"shift": 0}),
    "selected rows": (Model(), PADDED, selected, {"shift": None, "learns": "a label", "learned": LEARNED} | MEAN),
    "segmentation": (nn.Linear(8, 5), PIXELS, segmentation, {"learned": 72, "learns": "a label"} | MEAN),
}  # fmt: skip
FAULTS: dict[str, tuple[Any, Loss, str, float]] = {
    "shifted twice": (data(False), shifted_twice, "wrong-shift", 2),
    "padding learned": (PADDED, lambda m, b: usual(m, (b[0], b[0])), "wrong-labels", 17),
    "loss in bfloat16": (PADDED, in_bfloat16, "narrow-softmax", 2**-8),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_loss_has_its_facts_and_no_reading(name: str) -> None:
    model, batch, loss, expected = HEALTHY[name]
    lesson = ng.teaches(model, batch, loss)
    for fact, value in expected.items():
        approximate = pytest.approx(value, rel=1e-4) if isinstance(value, float) else value
        assert lesson.taught[fact] == approximate, fact
    assert not lesson.readings and len(lesson.lines) == 2, lesson
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_the_loss_is_named(name: str) -> None:
    batch, loss, kind, value = FAULTS[name]
    (reading,) = ng.teaches(Model(), batch, loss)
    assert reading.what == kind and reading.value == pytest.approx(value, rel=0.05)


def test_micro_batches_and_a_loss_scale_are_read() -> None:
    def backward(model: Any, batches: Any) -> None:
        for part in batches:
            (1024 * usual(model, part, reduction="sum") / LEARNED).backward()

    parts = [(PADDED[0][:2], PADDED[1][:2]), (PADDED[0][2:], PADDED[1][2:])]
    lesson = ng.teaches(Model(), parts, usual, backward=backward, loss_scale=1024.0)
    assert lesson.taught["weight_sum"] == pytest.approx(1) and lesson.taught["shift"] == 1
    means = ng.teaches(Model(), parts, usual)
    assert means.taught["learned"] == LEARNED and means.taught["weight_sum"] == pytest.approx(1)


def test_a_loss_without_logits_is_not_read() -> None:
    lesson = ng.teaches(Model(), PADDED, fused)
    assert not lesson.taught and lesson.ok and "is not read" in str(lesson)
