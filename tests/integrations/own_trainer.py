"""What Narrowgauge's own trainer computes on a tiny Llama: the reference that a loop of one's own
is held against.

:func:`reference` runs the trainer's own ``train_step``. It returns what
another loop needs to do the same (initial weights, batches, learning rates, settings), and what
that loop must then compute: losses, rows, weights.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from narrowgauge.assembly.preparation import matrices_decay, prepare
from narrowgauge.measuring.recorder import RunRecorder
from narrowgauge.runs.record import read_run
from narrowgauge.spec.notation import parse
from narrowgauge.trainer import language_model
from narrowgauge.trainer.session import Session, train_step
from narrowgauge.trainer.settings import Settings
from narrowgauge.trainer.tokens import Tokens

RECIPE = "bfloat16/word"
STEPS = 6
VOCABULARY = 128
SHAPE: dict[str, Any] = {
    "model_type": "llama", "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip
_SETTINGS: dict[str, Any] = {
    "steps": STEPS, "batch_size": 4, "sequence_length": 32, "lr": 3e-3, "warmup_steps": 2,
    "gauges_every": 0, "eval_every": 0, "checkpoint_every": 0,
}  # fmt: skip


@dataclass(frozen=True)
class OwnRun:
    """A run of the trainer's: float32 weights before, and batch, rate, loss and row of each step;
    the weights after.
    """

    settings: Settings
    initial: dict[str, Tensor]
    batches: list[Tensor]
    rates: list[float]
    losses: list[float]
    rows: list[dict[str, Any]]
    state: dict[str, Tensor]
    recipe: str = RECIPE

    @property
    def prepare_settings(self) -> dict[str, Any]:
        """What the trainer gave to ``prepare``: keyword arguments, with the peak learning rate."""
        return options_of(self.settings)

    def model(self) -> LlamaForCausalLM:
        """A model of the same configuration in float32 with the initial weights, as a user builds
        it.
        """
        model = LlamaForCausalLM(LlamaConfig(**SHAPE))
        model.load_state_dict(self.initial)
        return model.train()

    def loss(self, model: nn.Module, tokens: Tensor) -> Tensor:
        """The loss of one batch as the trainer computes it: the sum over tokens, divided once."""
        return language_model.loss_sum(model, tokens) / self.settings.tokens_per_step  # type: ignore[arg-type]


def options_of(settings: Settings) -> dict[str, Any]:
    options: dict[str, Any] = {"betas": (0.9, 0.95), "audit_every": 2, "optimizer": matrices_decay}
    for name in ("lr", "weight_decay", "max_grad_norm", "seed"):
        options[name] = getattr(settings, name)
    return options


@cache
def reference() -> OwnRun:
    """Return what ``narrowgauge train`` computes; each call returns the same run, so do not change
    what is in it.
    """
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(SHAPE))
        config = Settings(model=folder, recipe=parse(RECIPE), **_SETTINGS)
        # A walk over the vocabulary in small strides, of which a model can learn a little.
        tokens = (np.cumsum(np.random.default_rng(0).integers(0, 4, 8192)) % VOCABULARY).astype(
            np.uint16
        )
        model = language_model.build(config.model, vocab_size=VOCABULARY, seed=config.seed)
        initial = _copied(model)
        _, optimizer = prepare(model, RECIPE, **options_of(config))
        session = Session(
            config, Tokens(tokens[:7168], tokens[7168:], VOCABULARY), model, optimizer
        )
        batches = []
        options: dict[str, Any] = {"fingerprints_every": 0, "tables": {"recorder": None}}
        run = Path(folder) / "run"
        with RunRecorder(run, session.model, session.optimizer, **options) as recorder:
            for _ in range(STEPS):
                batches.append(torch.cat(session.batch()))
                recorder.step(tokens=config.tokens_per_step, **train_step(session))
        rows = read_run(run).steps
    rates, losses = ([row[name] for row in rows] for name in ("lr", "loss"))
    return OwnRun(session.settings, initial, batches, rates, losses, rows, _copied(session.model))


def _copied(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
