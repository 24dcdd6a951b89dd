"""Strikes at what is around the model: learning rate, data, the loss's weights, a resume, time, and single ranks.

Beside ``injections_strikes.py``, which strikes the model itself; the table of both is ``injections.py``.

Claim: none of its own; ``diagnosis.py`` measures. Baseline: the undisturbed run. Run: ``./dev bench diagnosis``.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

import numpy as np
import torch
from _injections_strikes import several
from faults import Strike, once
from torch import Tensor

from narrowgauge.distributed.ranks import all_ranks
from narrowgauge.trainer.session import Session

# ── rates ────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def changed_rate(factor: Callable[[int], float]) -> Strike:
    """The learning rate times ``factor(steps since)``."""
    usual: list[float] = []

    def strike(session: Session, since: int) -> None:
        if since == 0:
            assert session.config.lr is not None
            usual[:] = [session.config.lr]
        session.config = dataclasses.replace(session.config, lr=usual[0] * factor(since))

    return strike


def rate_burst(factor: float, length: int = 3) -> Strike:
    """A few steps with a far larger learning rate; then as before."""
    return changed_rate(lambda since: factor if since < length else 1.0)


def half_precision_divergence(growth: float, after: int, most: float) -> Strike:
    """Gradients that grow 2^12 times, so that the loss scale turns; later the updates grow too, and the loss with them."""

    def begin(session: Session) -> None:
        true_loss, began = session.loss, session.step

        def loss(tokens: Tensor) -> Tensor:
            value, now = true_loss(tokens), min(growth ** (session.step - began), 2.0**12)
            return value.detach() + now * (value - value.detach()) if torch.is_grad_enabled() else value

        session.loss = loss

    return several(once(begin), changed_rate(lambda since: min(1.4 ** max(0, since - after), most)))


# ── data and the loss ────────────────────────────────────────────────────────────────────────────────────────────────────


def repeated_batches(number: int) -> Strike:
    """The same few batches again and again."""

    def begin(session: Session) -> None:
        began, true_batch = session.step, session.batch

        def batch() -> list[Tensor]:
            now = session.step
            session.step = began + (now - began) % number
            try:
                return true_batch()
            finally:
                session.step = now

        session.batch = batch  # type: ignore[method-assign]

    return once(begin)


def nonsense_tokens(share: float, length: int) -> Strike:
    """A share of tokens that mean nothing, for so many steps."""

    def begin(session: Session) -> None:
        began, true_batch, size = session.step, session.data.batch, session.data.vocab_size

        def batch(step: int, *which: int) -> np.ndarray:
            tokens = true_batch(step, *which)
            if session.step - began >= length:
                return tokens
            draw = np.random.default_rng(session.step)
            return np.where(draw.random(tokens.shape) < share, draw.integers(size, size=tokens.shape), tokens)

        # The data hold them: what the trainer reads and records of its tokens is theirs.
        object.__setattr__(session.data, "batch", batch)

    return once(begin)


def unequal_weights(spread: float) -> Strike:
    """Each micro-batch is divided by its own number of tokens, so that its weight in the step varies by ``exp(± spread)``."""

    def begin(session: Session) -> None:
        true_loss, calls = session.loss, [0]

        def loss(tokens: Tensor) -> Tensor:
            calls[0] += 1
            draw = torch.rand((), generator=torch.Generator().manual_seed(calls[0]))
            weight = float(torch.exp(spread * (2 * draw - 1)))
            return true_loss(tokens) * weight if torch.is_grad_enabled() else true_loss(tokens)

        session.loss = loss

    return once(begin)


# ── a resume ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def data_from_the_start(session: Session, since: int) -> None:
    """The order of the data begins anew, as with a loader whose position was not saved."""
    if since == 0:
        began, true_batch = session.step, session.batch

        def batch() -> list[Tensor]:
            session.step -= began
            try:
                return true_batch()
            finally:
                session.step += began

        session.batch = batch  # type: ignore[method-assign]


def lost_moments(session: Session, since: int) -> None:
    """The optimizer's states are those of a first step, as where only the weights were loaded."""
    if since == 0:
        with torch.no_grad():
            for _, parameter in session.named_parameters():
                for name in ("exp_avg", "exp_avg_sq"):
                    session.optimizer.state[parameter][name].zero_()


# ── time, and ranks ──────────────────────────────────────────────────────────────────────────────────────────────────────


def slow_batches(seconds: float) -> Strike:
    """Every batch comes so many seconds late."""

    def begin(session: Session) -> None:
        true_batch = session.batch

        def batch() -> list[Tensor]:
            time.sleep(seconds)
            return true_batch()

        session.batch = batch  # type: ignore[method-assign]

    return once(begin)


def throttled(factor: float, over: int = 20) -> Strike:
    """Computing takes longer and longer, up to a factor after so many steps, as on a processor that gets too hot."""

    def begin(session: Session) -> None:
        began, true_loss = session.step, session.loss

        def loss(tokens: Tensor) -> Tensor:
            at = time.perf_counter()
            value = true_loss(tokens)
            share = min(1.0, (session.step - began) / over)
            # A forward pass is a quarter of a step this small, which has the optimizer's calls too. A slow clock computes
            # for longer: it does not wait.
            until = time.perf_counter() + 4 * (factor - 1) * share * (time.perf_counter() - at)
            while time.perf_counter() < until:
                pass
            return value

        session.loss = loss

    return once(begin)


def on_rank(rank: int, strike: Strike) -> Strike:
    """A strike that only one rank gets."""
    return lambda session, since: strike(session, since) if all_ranks().rank == rank else None


def slow_loss(seconds: float) -> Strike:
    """Every micro-batch takes so many seconds longer."""

    def begin(session: Session) -> None:
        true_loss = session.loss

        def loss(tokens: Tensor) -> Tensor:
            time.sleep(seconds)
            return true_loss(tokens)

        session.loss = loss

    return once(begin)


def drifting_vectors(factor: float, length: int) -> Strike:
    """Norm gains that move by a factor a step, for so many steps."""

    @torch.no_grad()
    def strike(session: Session, since: int) -> None:
        for _, parameter in session.named_parameters() if since < length else ():
            if parameter.ndim == 1:
                parameter.mul_(factor)

    return strike
