"""The reference for other loops is what the trainer computes, and a plain loop over ``prepare`` repeats it bit for bit."""

from __future__ import annotations

import pytest
import torch

import narrowgauge as ng
from integrations.own_trainer import OwnRun, reference
from narrowgauge.numerics.widening import float32_attention


def repeated(run: OwnRun) -> tuple[list[float], dict[str, torch.Tensor]]:
    """A user's loop on the same batches, rates and initial weights; its losses and weights."""
    model, optimizer = ng.prepare(run.model(), run.recipe, **run.prepare_settings)
    losses = []
    for tokens, rate in zip(run.batches, run.rates, strict=True):
        for group in optimizer.param_groups:
            group["lr"] = rate
        with float32_attention():
            loss = run.loss(model, tokens)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
    return losses, model.state_dict()


@pytest.mark.parametrize("recipe", ["bfloat16/word", "bfloat16/split", "float32/float32"])
def test_a_plain_loop_repeats_the_trainer_bit_for_bit(recipe: str) -> None:
    run = reference(recipe)
    losses, state = repeated(run)
    assert losses == run.losses and losses[-1] < losses[0]
    assert all(torch.equal(state[name], tensor) for name, tensor in run.state.items()) and len(state) == len(run.state)
    assert not torch.equal(run.state["lm_head.weight"].float(), run.initial["lm_head.weight"])
