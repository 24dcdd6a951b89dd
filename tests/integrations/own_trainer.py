"""What Narrowgauge's own trainer computes on a tiny Llama: the reference that every other loop is held against.

:func:`reference` runs the trainer's own ``session.build`` and ``step.train_step``, and returns all that another loop needs to
do the same: initial weights, batches, learning rates, settings; and what it must then find: losses, gradient norms, weights.

    run = reference("bfloat16/word", steps=6)
    model, optimizer = ng.prepare(run.model(), run.recipe, **run.prepare_settings)
    for tokens, rate, expected in zip(run.batches, run.rates, run.losses):
        ...                                   # lr = rate for this step; loss = run.loss(model, tokens)
"""

from __future__ import annotations

import copy
import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from narrowgauge.assembly.preparation import is_matrix
from narrowgauge.spec.notation import parse
from narrowgauge.trainer import language_model
from narrowgauge.trainer.config import TrainConfig
from narrowgauge.trainer.data.dataset import Dataset
from narrowgauge.trainer.session import Session, build
from narrowgauge.trainer.step import train_step

VOCABULARY, SEQUENCE, BATCH = 128, 32, 4
SHAPE: dict[str, Any] = {
    "model_type": "llama", "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip
_SETTINGS: dict[str, Any] = {
    "batch_size": BATCH, "sequence_length": SEQUENCE, "lr": 3e-3, "warmup_steps": 2, "audit_every": 2, "gauges_every": 0,
    "eval_every": 0, "checkpoint_every": 0, "compile": False,
}  # fmt: skip


@dataclass(frozen=True)
class OwnRun:
    """A run of the trainer's.

    Attributes:
        recipe: its recipe.
        settings: all settings of the trainer, filled in.
        config: of the model.
        initial: float32 weights before the first step, by name.
        batches: int64 ``[batch, sequence + 1]`` for each step; the model sees ``[:, :-1]`` and predicts ``[:, 1:]``.
        rates: learning rate of each step.
        losses, grad_norms: what each step recorded: nats per token, and the norm before clipping.
        rows: each step's row of ``steps.jsonl``.
        state: weights after the last step by name, as the model sees them.
        stored: the same as the storage holds them, in float32 (word and tail together).
        num_skipped: number of steps that changed nothing.
    """

    recipe: str
    settings: TrainConfig
    config: LlamaConfig
    initial: dict[str, Tensor]
    batches: list[Tensor]
    rates: list[float]
    losses: list[float]
    grad_norms: list[float]
    rows: list[dict[str, Any]]
    state: dict[str, Tensor]
    stored: dict[str, Tensor]
    num_skipped: int

    @property
    def prepare_settings(self) -> dict[str, Any]:
        """What the trainer gave to ``prepare``: keyword arguments, with the peak learning rate."""
        c = self.settings
        names = ("lr", "betas", "eps", "weight_decay", "max_grad_norm", "seed", "audit_every")
        return {**{name: getattr(c, name) for name in names}, "decays": is_matrix}

    def model(self) -> LlamaForCausalLM:
        """A model of the same configuration in float32 with the initial weights, as a user builds it."""
        model = LlamaForCausalLM(copy.deepcopy(self.config))  # frameworks write to a model's configuration
        model.load_state_dict(self.initial)
        return model.train()

    def loss(self, model: nn.Module, tokens: Tensor) -> Tensor:
        """The loss of one batch as the trainer computes it: the sum over tokens, divided once."""
        return language_model.loss_sum(model, tokens, chunked=False) / self.settings.tokens_per_step  # type: ignore[arg-type]

    def micro_batches(self, tokens: Tensor) -> tuple[Tensor, ...]:
        """A step's batch as the trainer splits it for gradient accumulation."""
        return tokens.split(self.settings.micro_batch_size)


def reference(recipe: str = "bfloat16/word", steps: int = 6, **settings: Any) -> OwnRun:
    """What ``narrowgauge train`` computes with that recipe and those settings.

    Args:
        recipe: its name.
        steps: number of optimizer steps; the schedule ends there.
        settings: of :class:`TrainConfig`, and ``shape``, a table of changes to the model's ``config.json``.
    Returns:
        The run; equal arguments return the same one, so do not change what is in it.
    """
    shape = json.dumps({**SHAPE, **settings.pop("shape", {})}, sort_keys=True)
    return _reference(recipe, steps, shape, tuple(sorted(settings.items())))


@lru_cache(maxsize=16)
def _reference(recipe: str, steps: int, shape: str, settings: tuple[tuple[str, Any], ...]) -> OwnRun:
    with tempfile.TemporaryDirectory() as folder:
        session = _session(Path(folder), shape, {"recipe": parse(recipe), "steps": steps, **dict(settings)})
        config = session.config
        initial = _copied(language_model.build(config.model, vocab_size=session.data.vocab_size, seed=config.seed))
        batches, rows = [], []
        for _ in range(steps):
            batches.append(torch.cat(session.batch()))
            rows.append(train_step(session))
    return OwnRun(
        recipe=recipe,
        settings=config,
        config=LlamaConfig(**json.loads(shape)),
        initial=initial,
        batches=batches,
        rates=[row["lr"] for row in rows],
        losses=[row["loss"] for row in rows],
        grad_norms=[row["grad_norm"] for row in rows],
        rows=rows,
        state=_copied(session.model),
        stored={name: session.optimizer.stored(p).clone() for name, p in session.model.named_parameters()},
        num_skipped=session.optimizer.num_skipped,
    )


def _session(folder: Path, shape: str, settings: Mapping[str, Any]) -> Session:
    (folder / "config.json").write_text(shape)
    config = TrainConfig(model=str(folder), **{**_SETTINGS, **settings})
    config.require_agreement()
    return build(config, folder, fixed_data(folder, json.loads(shape)["vocab_size"]))


def fixed_data(folder: Path, vocab_size: int = VOCABULARY) -> Dataset:
    """Tokens that a model can learn a little of: a walk over the vocabulary in small strides."""
    strides = np.random.default_rng(0).integers(0, 4, 8192)
    tokens = (np.cumsum(strides) % vocab_size).astype(np.uint16)
    return Dataset(tokens[:7168], tokens[7168:], vocab_size)


def _copied(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
