"""The ten-step training runs whose losses are in ``golden/curves.json``: one for each storage and one for each compute.

Weights and data are random integers, scaled exactly, so they are the same on every machine; only the training depends on
the processor. The model is small and nothing is compiled.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import narrowgauge as ng
from narrowgauge.assembly.preparation import is_matrix
from narrowgauge.numerics.widening import float32_attention
from narrowgauge.spec import show

# What ``narrowgauge train`` takes by default.
OF_LANGUAGE_MODELS: dict[str, Any] = {
    "betas": (0.9, 0.95), "weight_decay": 0.1, "decays": is_matrix, "max_grad_norm": 1.0
}  # fmt: skip
STEPS, VOCABULARY, SEQUENCES, LENGTH = 10, 64, 8, 64
SHAPE = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": LENGTH, "tie_word_embeddings": True,
}  # fmt: skip


def recipes() -> list[str]:
    """Each storage with its own compute, or with bfloat16; each compute with its default storage."""
    stored = (name if "/" in name else f"bfloat16/{name}" for name in ng.spec.STORAGES)
    computed = (f"{row['name']}/{row['storage']}" for row in show.table("computes").rows)
    return list(dict.fromkeys([*stored, *computed]))


def curve(recipe: str) -> list[float]:
    """The losses of ten steps with a recipe."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with warnings.catch_warnings(), float32_attention():  # as narrowgauge train has it
            warnings.simplefilter("ignore")  # about emulation, and about updates that naive storages lose
            return _losses(recipe)
    finally:
        torch.set_num_threads(threads)


def _losses(recipe: str) -> list[float]:
    model, optimizer = ng.prepare(
        _model(), recipe, lr=_rate(recipe), **OF_LANGUAGE_MODELS, audit_every=0, compile=False
    )
    losses = []
    for tokens in _batches():
        loss = model(input_ids=tokens, labels=tokens).loss
        (loss if optimizer.loss_scaler is None else optimizer.loss_scaler.scale(loss)).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _rate(recipe: str) -> float:
    """Small enough that processors agree within the tolerance: a different order of summation changes some roundings."""
    return 1e-4 if "fp4" in recipe or "weight8" in recipe else 5e-4


def _model() -> LlamaForCausalLM:
    model = LlamaForCausalLM(LlamaConfig(**SHAPE)).train()
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.copy_(torch.randint(-255, 256, parameter.shape, generator=draw) / 2048)
    return model


def _batches() -> Iterator[Tensor]:
    """Sequences in which three of four tokens are a function of the previous one."""
    draw = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        tokens = torch.randint(0, VOCABULARY, (SEQUENCES, LENGTH), generator=draw)
        follows = torch.randint(0, 4, (SEQUENCES, LENGTH), generator=draw) > 0
        for place in range(1, LENGTH):
            following = (5 * tokens[:, place - 1] + 3) % VOCABULARY
            tokens[:, place] = torch.where(follows[:, place], following, tokens[:, place])
        yield tokens
