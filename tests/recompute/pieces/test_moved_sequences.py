"""Moved sequences: relative positions and padding; and random numbers where evaluation has none."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from narrowgauge.recompute.pieces.moved_sequences import has_relative_positions
from narrowgauge.recompute.step_watcher import StepWatcher
from recompute.audited_loop import LENGTH, VOCABULARY, WIDTH, Loop, next_token


class RotaryEmbedding(nn.Module):
    """Turns pairs of channels by an angle that grows with the position."""

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        angles = positions[..., None].float() * 100.0 ** -(torch.arange(half, dtype=torch.float32) / half)
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)


class Turned(nn.Module):
    """A layer of attention with rotary positions; its attributes are the places for a fault."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.rotary = RotaryEmbedding()
        self.attention_dropout, self.asks_for_mode = 0.0, True
        self.turns_keys, self.masks, self.scales = True, True, False
        self.casts = False
        self.table: nn.Embedding | None = None

    def forward(self, tokens: Tensor, position_ids: Any = None, attention_mask: Any = None) -> Tensor:
        length = tokens.shape[1]
        positions = torch.arange(length).expand(len(tokens), -1) if position_ids is None else position_ids
        x = self.embedding(tokens)
        x = x if self.table is None else x + self.table(positions)
        q, k, v = self.qkv(x).chunk(3, -1)
        q, k = self.rotary(q, positions), self.rotary(k, positions) if self.turns_keys else k
        seen = torch.ones(length, length, dtype=torch.bool).tril().expand(len(tokens), -1, -1)
        if attention_mask is not None and self.masks:
            seen = seen & attention_mask.bool()[:, None, :] | torch.eye(length, dtype=torch.bool)
        dropout = self.attention_dropout if self.training or not self.asks_for_mode else 0.0
        heads = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, dropout_p=dropout)
        x = x + self.out(heads)
        x = x.bfloat16().float() if self.casts else x
        logits: Tensor = self.head(x * (1 + positions[..., None] / 1000) if self.scales else x)
        return logits


def watched(inputs: dict[str, Tensor] | None = None, table: bool = False, **attributes: Any) -> Loop:
    loop = Loop(every=0, micro_batches=1)
    model = Turned()
    model.table = nn.Embedding(LENGTH, WIDTH) if table else None
    for name, value in attributes.items():
        setattr(model, name, value)
    loop.model, loop.optimizer = model, torch.optim.AdamW(model.parameters())  # type: ignore[assignment]
    loop.watcher = StepWatcher(model, loop.optimizer, 2, loop.keep)
    given = inputs or {}
    loop.loss = lambda tokens: next_token(loop.model(tokens[:, :-1], **given), tokens)  # type: ignore[method-assign]
    return loop


def named(loop: Loop) -> set[str]:
    return {each.cause for each in loop.run(2).results[2] if each.piece == "forward" and each.cause}


POSITIONS = torch.arange(LENGTH).expand(4, -1)
MASK = {"attention_mask": torch.ones(4, LENGTH, dtype=torch.long)}
CASES: dict[str, tuple[dict[str, Any], set[str]]] = {
    "rotary": ({}, set()),
    "rotary, positions given": ({"inputs": {"position_ids": POSITIONS}}, set()),
    "rotary, mask given": ({"inputs": MASK}, set()),
    "a table beside it": ({"table": True}, set()),
    "queries alone are turned": ({"turns_keys": False}, {"positions-absolute", "order-unseen"}),
    "outputs grow with the position": ({"scales": True}, {"positions-absolute"}),
    "padding is attended to": ({"masks": False, "inputs": MASK}, {"padding-seen"}),
    "padding, and a loop that has none": ({"masks": False}, set()),
    "rounded inside": ({"casts": True}, set()),
    "packed": ({"inputs": {"position_ids": POSITIONS % 12}, "turns_keys": False}, {"border-ignored"}),
}


@pytest.mark.parametrize("name", CASES)
def test_a_moved_sequence_has_the_same_outputs_where_positions_are_relative(name: str) -> None:
    settings, names = CASES[name]
    assert named(watched(**settings)) == names


def test_positions_are_relative_where_they_are_named_so() -> None:
    assert has_relative_positions(Turned()) and not has_relative_positions(Loop(every=0).model)
    model: Any = nn.Linear(2, 2)
    for config, is_relative in ({"rope_theta": 1e4}, True), ({"rope_theta": None}, False), ({"alibi": False}, False):
        model.config = SimpleNamespace(**config)  # type: ignore[arg-type]
        assert has_relative_positions(model) is is_relative, config


@pytest.mark.parametrize("asks", [True, False])
def test_dropout_that_stays_on_in_evaluation_mode_is_named(asks: bool) -> None:
    loop = watched(attention_dropout=0.2, asks_for_mode=asks)
    assert named(loop) == (set() if asks else {"random-in-evaluation"})


@pytest.mark.parametrize("is_training", [True, False])
def test_an_evaluation_with_dropout_as_a_number_is_named(is_training: bool) -> None:
    loop = watched(attention_dropout=0.2)
    loop.run(2)
    loop.model.train(is_training)
    state = torch.get_rng_state()
    with torch.no_grad():
        loop.model(next(loop.data)[:, :-1])
    assert is_training is not torch.get_rng_state().equal(state)
    loop.model.train()
    loop.run(2)
    assert loop.names() == ({"evaluated-in-training"} if is_training else set())


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_number_that_draws_nothing_is_not_named(dropout: float) -> None:
    """Nothing is random where a module holds a number that it does not use."""
    loop = watched()
    loop.model.unused_dropout = dropout  # type: ignore[assignment]
    loop.run(2)
    with torch.no_grad():
        loop.model(next(loop.data)[:, :-1])
    loop.run(2)
    assert not loop.names()
