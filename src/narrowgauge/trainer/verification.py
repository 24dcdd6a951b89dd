"""What a run on several ranks verifies: that they hold the same, compute the same, and that nothing changes at rest.

Every ``verify_every`` steps the states of all ranks are compared and one micro-batch is computed by all of them; states are also
compared before a checkpoint is written, so that the last checkpoint is always from before the damage.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from narrowgauge.trainer.detours import batch_index

if TYPE_CHECKING:
    from narrowgauge.trainer.session import Session


def verify(session: Session) -> None:
    """Compare what the ranks hold, and what they compute from one micro-batch of the next step; another one each time.

    Raises:
        CorruptionError: on all ranks.
    """
    config, verifier = session.config, session.verifier
    verifier.verify_state(session.step)
    if session.reduction is None:
        return
    leaf = (session.step // config.verify_every) % config.gradient_accumulation_steps
    is_sampled = session.gauges is not None and session.gauges.sampling
    if session.gauges is not None:
        session.gauges.sampling = False  # this micro-batch is counted when its turn comes
    verifier.verify_gradients(session.step, session.model, lambda: _differentiate(session, leaf))
    if session.gauges is not None:
        session.gauges.sampling = is_sampled


def _differentiate(session: Session, leaf: int) -> None:
    """Compute the gradients of one micro-batch, and forget them."""
    config, reduction, linears = session.config, session.reduction, session.linears
    assert reduction is not None
    place = batch_index(session.step, session.detours)
    batch = session.data.batch(place, config.batch_size, config.sequence_length, config.seed)
    tokens = torch.from_numpy(batch).split(config.micro_batch_size)[leaf].to(session.device)
    if linears is not None:
        session.set_compute()
        linears.step = session.step
        linears.set_first_sequence(leaf * config.micro_batch_size)
    with reduction.micro_batch(is_last=False):
        (session.loss(tokens) / config.tokens_per_step).backward()
    reduction.discard()
