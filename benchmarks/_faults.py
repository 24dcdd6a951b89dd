"""Faults that a training run should notice: each put into a running session, and the event that
must report it.

A row says how the fault gets in, what is expected (kinds of event, any of which will do, and the
tensor they must name) and how soon. Spikes and values that are not finite are judged on every step;
all else is seen in samples of the gauges only, so there the time is counted in samples. The faults
are put into the session that the trainer has built, between two steps, as a broken memory, data
file or setting would: no part of the trainer knows of them.

Claim: none of its own; ``alarms.py`` measures every row at full size.
Baseline: the undisturbed run. ``chaos.py`` disturbs runs from outside.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge.spec.computes import COMPUTES, Cast, Compute, Product
from narrowgauge.trainer import loop
from narrowgauge.trainer.session import Session
from narrowgauge.trainer.step import train_step

Strike = Callable[[Session, int], None]
"""Called before every step from the fault's own on, with the number of steps since."""
Events = Sequence[Mapping[str, Any]]

LAYER = "model.layers.1"
WEIGHT = f"{LAYER}.mlp.down_proj.weight"


@dataclass(frozen=True)
class Fault:
    """One fault and what is expected of a run that it strikes.

    Args:
        name: of the row.
        strike: puts it in.
        kinds: of events, any of which reports it.
        names: shell pattern of the tensor that such an event must name; empty where the fault is of
            no tensor.
        steps: from the struck step on, within which it must come.
        samples: of the gauges, the same.
        settings: the trainer's, where the fault needs other ones than usual.
        earliest: the first step at which it can be detected: some detectors leave out a run's
            beginning.
        from_start: whether the settings are the fault, so that it is there from the first step on.
    """

    name: str
    strike: Strike
    kinds: tuple[str, ...]
    names: str = ""
    steps: int = 0
    samples: int = 0
    settings: Mapping[str, Any] = field(default_factory=dict)
    earliest: int = 1
    from_start: bool = False

    def at(self, usual: int) -> int:
        """The first step that it spoils, where ``usual`` is that of most faults."""
        if self.from_start:
            return 1
        return max(self.earliest, usual)

    def deadline(self, at: int, every: int) -> int:
        """The last step at which the event is in time, with gauges sampled every so many steps."""
        return at + max(self.steps, self.samples * every - 1)

    def first_event(self, events: Events, at: int) -> Mapping[str, Any] | None:
        """The first event that reports the fault, whether in time or not."""
        return next(
            (event for event in events if event["step"] >= at and self.matches(event)), None
        )

    def matches(self, event: Mapping[str, Any]) -> bool:
        """Whether an event is of an expected kind and names the right tensor."""
        names_it = not self.names or fnmatch.fnmatchcase(event.get("tensor") or "", self.names)
        return event["what"] in self.kinds and names_it


@contextmanager
def struck(fault: Fault, at: int) -> Iterator[None]:
    """Within it every run of the trainer is struck before its step ``at``."""

    def step(session: Session, *arguments: Any) -> Any:
        since = session.step + 1 - at
        if since >= 0:
            fault.strike(session, since)
        return train_step(session, *arguments)

    before = loop.train_step
    loop.train_step = step
    try:
        yield
    finally:
        loop.train_step = before


# ── how faults get in ─────────────────────────────────────────────────────────────────────────────


def once(strike: Callable[[Session], None]) -> Strike:
    """A fault that is put in at one step, and stays or does not by itself."""
    return lambda session, since: strike(session) if since == 0 else None


def nothing(session: Session, since: int) -> None:
    """For settings that are the fault."""


def wrap_forward(module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """Change what a module gives."""
    forward = module.forward
    module.forward = lambda *args, **options: change(forward(*args, **options))  # type: ignore[method-assign]


def nan_batch(session: Session) -> None:
    """One batch whose embeddings are NaN; done again, it is the same batch."""
    spoiled = session.step

    def change(hidden: Tensor) -> Tensor:
        if session.step == spoiled and torch.is_grad_enabled():
            return hidden * math.nan
        return hidden

    wrap_forward(session.model.get_input_embeddings(), change)  # type: ignore[operator]


def random_batch(session: Session) -> None:
    """One batch of tokens that mean nothing."""
    spoiled = session.step
    true_batch = session.batch
    size = session.data.vocab_size

    def batch() -> list[Tensor]:
        generator = torch.Generator().manual_seed(0)
        parts = true_batch()
        if session.step != spoiled:
            return parts
        drawn = []
        for part in parts:
            drawn.append(torch.randint(size, part.shape, generator=generator).to(part.device))
        return drawn

    session.batch = batch  # type: ignore[method-assign]


def rows_without_gradient(session: Session) -> None:
    """Seven of eight rows have no gradient, as those of tokens or experts that no batch meets:
    decay alone moves them.
    """
    weight = session.model.get_parameter(WEIGHT)
    is_met = (torch.arange(len(weight), device=weight.device) % 8 == 0)[:, None]
    weight.register_hook(lambda gradient: gradient * is_met.to(gradient.dtype))


@torch.no_grad()
def scaled_layer(session: Session) -> None:
    """A weight times 2^12."""
    session.model.get_parameter(WEIGHT).mul_(2.0**12)


@torch.no_grad()
def flipped_bit(session: Session) -> None:
    """The highest exponent bit of one bfloat16 weight: times 2^128."""
    bits = session.model.get_parameter(WEIGHT).view(-1).view(torch.int16)
    bits[bits.numel() // 2] ^= 1 << 14


@torch.no_grad()
def flipped_lower_bit(session: Session) -> None:
    """An exponent bit that stands for 2^4, of the largest weight that has it not set: times 16."""
    weight = session.model.get_parameter(WEIGHT).view(-1)
    bits = weight.view(torch.int16)
    bit = 1 << 9
    bits[int(torch.where((bits & bit) == 0, weight.abs(), 0.0).argmax())] |= bit


def large_rate(session: Session) -> None:
    """The learning rate times 100."""
    assert session.config.lr is not None
    session.config = dataclasses.replace(session.config, lr=100 * session.config.lr)


def scale_gradients(session: Session, factor: float) -> None:
    """Gradients times a factor; the loss keeps its value."""
    true_loss = session.loss

    def loss(tokens: Tensor) -> Tensor:
        value = true_loss(tokens)
        if torch.is_grad_enabled():
            return value.detach() + factor * (value - value.detach())
        return value

    session.loss = loss


def unscaled(gradients: str) -> Compute:
    """float8-row whose gradients enter as they are, in that format: most are below the smallest
    float8.
    """
    row = COMPUTES["float8-row"]
    static = Cast(gradients, "tensor", scaling="static")
    products = {}
    for place in ("grad_input", "grad_weight"):
        products[place] = Product(static, getattr(row, place).right, row.grad_input.accumulation)
    return dataclasses.replace(row, name=f"float8-unscaled-{gradients}", **products)  # type: ignore[arg-type]


UNSCALED = unscaled("float8_e4m3fn")


def go_on_in(compute: Compute) -> Callable[[Session], None]:
    """The narrow layers go on in another compute, except for the head."""

    def strike(session: Session) -> None:
        linears = session.linears
        assert linears is not None
        keep = COMPUTES["bfloat16"]
        linears.set_compute(lambda name: keep if name == "lm_head" else compute)

    return strike


def set_loss_scale(scale: float) -> Callable[[Session], None]:
    """A loss scale at which float16 gradients are lost."""

    def strike(session: Session) -> None:
        scaler = session.optimizer.loss_scaler
        assert scaler is not None
        scaler.scale_tensor.fill_(scale)

    return strike


@torch.no_grad()
def growing_attention(session: Session, since: int) -> None:
    """Queries and keys that grow by six percent a step."""
    for name in ("q_proj", "k_proj"):
        session.model.get_parameter(f"{LAYER}.self_attn.{name}.weight").mul_(1.06)


@torch.no_grad()
def growing_weight(session: Session, since: int) -> None:
    """A weight that grows by five percent a step."""
    session.model.get_parameter(WEIGHT).mul_(1.05)


# ── the table ─────────────────────────────────────────────────────────────────────────────────────

_ROWS = (
    Fault(
        "a batch of NaN", once(nan_batch), ("nonfinite-step", "nonfinite"),
    ),
    Fault(
        "a batch of noise", once(random_batch), ("loss-spike",),
    ),
    Fault(
        "a layer × 2^12", once(scaled_layer), ("growing-outliers",), f"weight:{WEIGHT}", samples=1,
    ),
    Fault(
        "a flipped exponent bit, × 2^128", once(flipped_bit), ("growing-outliers",), f"weight:{WEIGHT}", samples=1,
    ),
    Fault(
        "a flipped exponent bit, × 2^4", once(flipped_lower_bit), ("growing-outliers",), f"weight:{WEIGHT}", samples=1,
    ),
    Fault(
        "learning rate × 100", once(large_rate), ("loss-spike", "gradient-spike"), steps=10,
    ),
    Fault(
        "a format too small for gradients", once(go_on_in(UNSCALED)), ("underflow",), "output_grad:model.layers.*", samples=2,
        settings={"recipe": "float8-row/word"},
    ),
    Fault(
        "lost updates", nothing, ("lost-updates",), "model.*", steps=60,
        settings={"recipe": "bfloat16/naive", "lr": 1e-5}, from_start=True,
    ),
    Fault(
        "lost weight decay", once(rows_without_gradient), ("lost-decay",), WEIGHT, samples=4,
        settings={"recipe": "bfloat16/naive", "lr": 1e-3, "weight_decay": 1.0}, from_start=True,
    ),
    Fault(
        "gradients that overflow at any loss scale", once(lambda session: scale_gradients(session, 2.0**120)),
        ("scale-halvings", "scale-floor"), steps=6, settings={"recipe": "float16/split"}, earliest=111,
    ),
    Fault(
        "a loss scale too small", once(set_loss_scale(2.0**-20)), ("scale-halvings", "scale-floor"),
        settings={"recipe": "float16/split"},
    ),
    Fault(
        "attention logits that grow", growing_attention, ("attention-logits",), f"{LAYER}.self_attn", samples=10,
    ),
    Fault(
        "a weight that grows", growing_weight, ("growth",), f"weight:{WEIGHT}", samples=20, earliest=105,
        settings={"gauges_every": 2},
    ),
)  # fmt: skip

FAULTS: dict[str, Fault] = {row.name: row for row in _ROWS}
"""Every fault by name."""
