"""What a loss teaches: facts of losses of many kinds, healthy and with one fault, over a model
whose sight is known.
"""

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
Loss = Callable[[nn.Module, Any], Tensor]


class Model(nn.Module):
    """A language model: each position sees the mean of a window of tokens.

    Args:
        ahead: later tokens that it sees.
        documents: places where a new document begins.
    """

    def __init__(self, ahead: int = 0, documents: tuple[int, ...] = ()) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(V, WIDTH)
        self.mix, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, V, bias=False)
        self.second = nn.Linear(WIDTH, V, bias=False)
        self.dropout = nn.Dropout(0.1)
        self.mask = torch.ones(LENGTH, LENGTH).tril(ahead)
        for place in documents:
            self.mask[place:, :place] = 0

    def hidden(self, tokens: Tensor, real: Tensor | None = None) -> Tensor:
        mask = self.mask if real is None else self.mask * real[:, None]
        mask = mask / mask.sum(-1, keepdim=True).clamp_min(1)
        x = self.embedding(tokens)
        return self.dropout((x + mask @ self.mix(x)).tanh())

    def forward(self, tokens: Tensor, real: Tensor | None = None) -> Tensor:
        return self.head(self.hidden(tokens, real))


def data(padded: bool = True, prompt: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens, which of them are real, and labels that are not shifted."""
    tokens = torch.randint(5, V, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    real = torch.ones_like(tokens)
    if padded:
        real[2, 14:] = real[3, 9:] = 0
        tokens[real == 0] = PADDING
    labels = tokens.masked_fill(real == 0, IGNORED)
    labels[:, :prompt] = IGNORED
    return tokens, real, labels


LEARNED = 19 + 19 + 13 + 8


def usual(model: Any, batch: Any, **options: Any) -> Tensor:
    tokens, real, labels = batch
    return F.cross_entropy(
        model(tokens, real)[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), **options
    )


def log_probabilities(model: Any, batch: Any) -> Tensor:
    """Return the log-probabilities of labels, by rows, as a log-sum-exp of each sequence."""
    tokens, real, labels = batch
    logits = model(tokens, real)[:, :-1]
    labels = labels[:, 1:]
    normalizer = torch.stack([row.logsumexp(-1) for row in logits])
    chosen = logits.gather(-1, labels.clamp_min(0)[..., None])[..., 0] - normalizer
    return chosen * (labels != IGNORED)


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
    tokens, real, labels = batch
    hidden = model.hidden(tokens, real)[:, :-1].flatten(0, 1)
    return Fused.apply(hidden, model.head.weight, labels[:, 1:].flatten())


def chunked(model: Any, batch: Any) -> Tensor:
    tokens, real, labels = batch
    hidden = model.hidden(tokens, real)[:, :-1].flatten(0, 1)
    labels = labels[:, 1:].flatten()

    def of_chunk(hidden: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(model.head(hidden), labels, reduction="sum")

    sums = [
        checkpoint(of_chunk, *chunk, use_reentrant=False)
        for chunk in zip(hidden.split(16), labels.split(16), strict=True)
    ]
    return sum(sums) / (labels != IGNORED).sum()


def heads(model: Any, batch: Any) -> Tensor:
    tokens = batch[0]
    hidden = model.hidden(tokens)
    first = F.cross_entropy(model.head(hidden[:, :-1]).mT, tokens[:, 1:])
    return first + 0.5 * F.cross_entropy(model.second(hidden[:, :-2]).mT, tokens[:, 2:])


def with_z_loss(model: Any, batch: Any) -> Tensor:
    tokens, real, labels = batch
    logits = model(tokens, real)[:, :-1]
    labels = labels[:, 1:]
    normalizer = logits.logsumexp(-1)
    chosen = logits.gather(-1, labels.clamp_min(0)[..., None])[..., 0]
    is_label = labels != IGNORED
    return ((normalizer - chosen + 1e-3 * normalizer.square()) * is_label).sum() / is_label.sum()


def preferences(model: Any, batch: Any, reference: Any = Model().eval()) -> Tensor:  # noqa: B008
    with torch.no_grad():
        base = log_probabilities(reference, batch).sum(-1)
    margin = log_probabilities(model, batch).sum(-1) - base
    return -F.logsigmoid(0.1 * (margin[:2] - margin[2:])).mean()


def distilled(model: Any, batch: Any) -> Tensor:
    teacher = torch.randn(ROWS * LENGTH, V, generator=torch.Generator().manual_seed(5)).softmax(-1)
    return F.kl_div(model(batch[0]).log_softmax(-1).flatten(0, 1), teacher, reduction="batchmean")


def selected(model: Any, batch: Any) -> Tensor:
    tokens, real, labels = batch
    is_label = labels[:, 1:] != IGNORED
    return F.cross_entropy(
        model.head(model.hidden(tokens, real)[:, :-1][is_label]), labels[:, 1:][is_label]
    )


def pads_seen(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[2].flatten())


def autoencoded(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]).mT, batch[2])


def by_class(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], weight=torch.arange(1.0, 6.0))


def contrastive(model: Any, batch: Any) -> Tensor:
    x = model(batch[0])
    y = model(batch[0] + 0.1)
    logits = 5 * F.normalize(x, dim=-1) @ F.normalize(y, dim=-1).T
    labels = torch.arange(len(x))
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2


def segmentation(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]).movedim(-1, 1), batch[1])


def packed(model: Any, batch: Any) -> Tensor:
    return usual(model, batch[:3])


def ended(is_learned: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return a batch whose texts end with the token that also pads."""
    tokens, real, labels = data()
    for row, length in enumerate(real.sum(1).tolist()):
        tokens[row, length - 1] = PADDING
        labels[row, length - 1] = PADDING if is_learned else IGNORED
    return tokens, real, labels


def hidden_by_ones(model: Any, batch: Any) -> Tensor:
    """Return the loss of a batch whose mask is 1 at padding, as torch's key_padding_mask."""
    tokens, hides, labels = batch
    return usual(model, (tokens, 1 - hides, labels))


def taught_by(is_training: bool) -> Loss:
    teacher = Model().train(is_training)

    def loss(model: Any, batch: Any) -> Tensor:
        with torch.no_grad():
            target = teacher(batch[0]).softmax(-1).flatten(0, 1)
        log_p = model(batch[0]).log_softmax(-1).flatten(0, 1)
        return F.kl_div(log_p, target, reduction="batchmean")

    return loss


def restarted(is_learned: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return packed rows of two documents, with positions."""
    tokens, real, labels = data(False)
    if not is_learned:
        labels[:, 7] = IGNORED
    return tokens, real, labels, torch.cat([torch.arange(7), torch.arange(13)]).expand(ROWS, -1)


PADDED = data()
PACKED = restarted(True)
CLASSES = (torch.randn(12, 8), torch.arange(12) % 5)
PIXELS = torch.randn(2, 6, 6, 8), torch.randint(0, 5, (2, 6, 6))
MEAN = {"weight_sum": 1.0}
NEXT = {
    "shift": 1,
    "learned": LEARNED,
    "sees_later": False,
    "sees_others": False,
    "dtype": "float32",
}
HEALTHY: dict[str, tuple[Any, Any, Loss, dict[str, Any]]] = {
    "usual": (Model(), PADDED, usual, NEXT | MEAN | {"sees_padding": False}),
    "smoothed": (Model(), PADDED, lambda m, b: usual(m, b, label_smoothing=0.1), NEXT | MEAN),
    "sum": (Model(), PADDED, lambda m, b: usual(m, b, reduction="sum"), NEXT | {"weight_sum": float(LEARNED)}),
    "prompts": (Model(), data(False, 6), usual, {"learned": 56, "shift": 1} | MEAN),
    "packed": (Model(documents=(7, 12)), data(False), usual, {"first_seen": 12, "shift": 1}),
    "compiled": (torch.compile(Model()), PADDED, usual, NEXT | MEAN),
    "frozen embedding": (Model(), PADDED, usual, NEXT | MEAN),
    "end learned": (Model(), ended(True), usual, {"learned": LEARNED, "shift": 1}),
    "masks of ones": (Model(), (PADDED[0], 1 - PADDED[1], PADDED[2]), hidden_by_ones, NEXT | MEAN),
    "quiet teacher": (Model(), PADDED, taught_by(False), {"learns": "a distribution"}),
    "packed, with positions": (Model(documents=(7,)), restarted(False), packed, {"first_seen": 7, "restart": 7, "shift": 1}),
    "checkpointed chunks": (Model(), PADDED, chunked, NEXT | MEAN),
    "by rows": (Model(), PADDED, lambda m, b: -log_probabilities(m, b).sum() / LEARNED, NEXT | MEAN),
    "z-loss": (Model(), PADDED, with_z_loss, NEXT | MEAN),
    "heads": (Model(), data(False), heads, {"shift": 1, "learns": "token t+1 and t+2", "weight_sum": 1.5}),
    "preferences": (Model(), PADDED, preferences, {"shift": 1, "unlearned": 21, "smoothed_alone": 0}),
    "distilled": (Model(), PADDED, distilled, {"learns": "a distribution", "smoothed_alone": 0, "weight_sum": 1.0}),
    "all positions": (Model(ahead=LENGTH), data(False), autoencoded, {"shift": 0, "sees_later": True}),
    "selected rows": (Model(), PADDED, selected, {"shift": None, "learns": "a label", "learned": LEARNED} | MEAN),
    "classes": (nn.Linear(8, 5), CLASSES, by_class, {"learned": 12, "shift": None, "sees_later": None}),
    "contrastive": (nn.Linear(8, 5), CLASSES, contrastive, {"learned": 24, "learns": "a label"} | MEAN),
    "segmentation": (nn.Linear(8, 5), PIXELS, segmentation, {"learned": 72, "learns": "a label"} | MEAN),
}  # fmt: skip
HEALTHY["frozen embedding"][0].embedding.requires_grad_(False)
# The corpus has the other kinds of faults.
FAULTS: dict[str, tuple[Any, Any, Loss, str]] = {
    "one token ahead": (Model(ahead=1), PADDED, usual, "wrong-shift"),
    "seven tokens ahead": (Model(ahead=7), data(False), usual, "wrong-shift"),
    "padding seen": (Model(ahead=LENGTH), PADDED, pads_seen, "unmasked"),
    "smoothed alone": (
        Model(),
        PADDED,
        lambda m, b: usual(m, b, label_smoothing=1.0),
        "wrong-labels",
    ),
    "documents see each other": (Model(), PACKED, packed, "unmasked"),
    "first tokens of documents": (Model(documents=(7,)), PACKED, packed, "wrong-labels"),
    "end taken for padding": (Model(), ended(False), usual, "wrong-labels"),
    "noisy teacher": (Model(), PADDED, taught_by(True), "wrong-mode"),
    "softmax twice": (
        nn.Sequential(nn.Linear(8, 5), nn.Softmax(-1)),
        CLASSES,
        by_class,
        "softmax",
    ),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_loss_has_its_facts_and_no_reading(name: str) -> None:
    model, batch, loss, expected = HEALTHY[name]
    lesson = ng.teaches(model, batch, loss)
    for fact, value in expected.items():
        taught = lesson.taught[fact]
        assert taught == (pytest.approx(value, rel=1e-4) if isinstance(value, float) else value), (
            fact
        )
    assert not lesson.readings
    assert len(lesson.lines) <= 6


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_the_loss_is_named(name: str) -> None:
    model, batch, loss, expected = FAULTS[name]
    lesson = ng.teaches(model, batch, loss)
    assert {reading.what for reading in lesson} == {expected}


class Positioned(Model):
    """A model that looks positions up in a table as large as that of tokens."""

    def __init__(self, positions: Tensor) -> None:
        super().__init__()
        self.positions = positions
        self.table = nn.Embedding(V, WIDTH)

    def hidden(self, tokens: Tensor, real: Tensor | None = None) -> Tensor:
        return super().hidden(tokens, real) + self.table(self.positions)


COUNT = torch.arange(LENGTH).expand(ROWS, -1)
POSITIONS = {
    "counted": COUNT,
    "one row": COUNT[:1],
    "padded on the left": (COUNT - torch.tensor([[0], [3], [6], [1]])).clamp_min(0),
    "padded on the left with ones": (COUNT - 4).where(COUNT >= 4, 1),
    "padded on the right": COUNT.clamp_max(12),
    "packed": torch.cat([COUNT[:, :7], COUNT[:, :13]], 1),
}


@pytest.mark.parametrize("kind", POSITIONS)
def test_positions_are_not_taken_for_tokens(kind: str) -> None:
    lesson = ng.teaches(Positioned(POSITIONS[kind]), PADDED, usual)
    assert lesson.taught["shift"] == 1 and lesson.taught["learns"] == "token t+1"
    assert lesson.taught["sees_padding"] is False and lesson.ok


def test_tokens_that_count_up_are_tokens() -> None:
    tokens = (torch.arange(LENGTH) + torch.arange(ROWS)[:, None]) % 7
    lesson = ng.teaches(Model(), (tokens, torch.ones_like(tokens), tokens), usual)
    assert lesson.taught["shift"] == 1 and lesson.taught["sees_later"] is False


def test_what_one_sequence_repeats_at_its_start_is_no_padding() -> None:
    tokens = data(False)[0][:2]
    tokens[1, :4] = 6
    tokens[tokens == 6] = 7
    tokens[1, :4] = 6
    lesson = ng.teaches(Model(), (tokens, torch.ones_like(tokens), tokens), usual)
    assert lesson.taught["padding"] is None and lesson.ok


def test_a_run_of_equal_tokens_is_no_padding_until_it_is_said_to_be() -> None:
    tokens, real, labels = data()
    told = ng.teaches(Model(ahead=LENGTH), (tokens, real, labels), pads_seen)
    assert [reading.what for reading in told] == ["unmasked"]
    ends = labels.where(labels != IGNORED, tokens)  # as a text that ends so
    readings = ng.teaches(Model(), (tokens, torch.ones_like(tokens), ends), usual)
    assert readings.taught["padding"] is None and readings.ok, readings


class Classifier(Model):
    """A classifier of sequences, with a hidden layer as wide as the table of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.labels = nn.Linear(V, 4)

    def forward(self, tokens: Tensor, real: Tensor | None = None) -> Tensor:
        return self.labels(self.head(self.hidden(tokens, real)).mean(1))


def policy(model: Any, batch: Any) -> Tensor:
    """A policy's loss, which is about 0 and not learned."""
    log_p = model(batch[0])[:, :-1].log_softmax(-1).gather(-1, batch[0][:, 1:, None])
    advantages = torch.tensor([1.0, -1.0, 0.5, -0.5])
    ratio = (log_p - log_p.detach()).exp()
    return -(ratio * advantages[:, None, None]).mean()


@pytest.mark.parametrize("ahead", [1, 2, 7])
def test_positions_that_see_their_label_see_later_tokens(ahead: int) -> None:
    lesson = ng.teaches(Model(ahead=ahead), data(False), usual)
    assert lesson.taught["sees_later"] is True
    assert [reading.what for reading in lesson] == ["wrong-shift"]


def test_a_mask_of_booleans_is_no_position() -> None:
    tokens, real, labels = data()
    lesson = ng.teaches(Model(), (tokens, real.bool(), labels), usual)
    assert lesson.taught["shift"] == 1 and lesson.taught["restart"] is None


@pytest.mark.parametrize("teacher_first", [False, True])
def test_a_teacher_over_more_rows_is_no_look_ahead(teacher_first: bool) -> None:
    teacher = torch.randn(ROWS * LENGTH, V, generator=torch.Generator().manual_seed(5)).softmax(-1)

    def loss(model: Any, batch: Any) -> Tensor:
        tokens, _, labels = batch
        logits = model(tokens)
        soft = F.kl_div(logits.log_softmax(-1).flatten(0, 1), teacher, reduction="batchmean")
        hard = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return soft + hard if teacher_first else hard + soft

    lesson = ng.teaches(Model(), data(False), loss)
    assert lesson.ok and lesson.taught["sees_later"] is not True


def test_a_loss_without_logits_is_not_read() -> None:
    lesson = ng.teaches(Model(), PADDED, fused)
    assert not lesson.taught and lesson.ok and "no cross_entropy" in str(lesson)
