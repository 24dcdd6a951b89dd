"""The ten-step trainings whose losses ``golden/curves.json`` holds: one for each storage and one for each compute.

Weights and data come from integer draws and exact scaling, so that they are the same everywhere; only the training itself
depends on the machine. The model is as small as every format allows, and nothing is compiled.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import narrowgauge as ng
from narrowgauge.spec import show

STEPS, VOCABULARY, SEQUENCES, LENGTH = 10, 64, 8, 64
SHAPE = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": LENGTH, "tie_word_embeddings": True,
}  # fmt: skip


def recipes() -> list[str]:
    """One for each storage, with the compute it belongs to or else bfloat16; one for each compute, with its usual storage."""
    stored = (name if "/" in name else f"bfloat16/{name}" for name in ng.STORAGES)
    computed = (ng.parse(str(row["name"])).name for row in show.rows("computes"))
    return list(dict.fromkeys([*stored, *computed]))


def curve(recipe: str) -> list[float]:
    """The losses of a recipe's ten steps."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of emulation, and of what naive storages lose
            return _losses(recipe)
    finally:
        torch.set_num_threads(threads)


def _losses(recipe: str) -> list[float]:
    model, optimizer = ng.prepare(_model(), recipe, lr=_rate(recipe), audit_every=0, compile=False)
    losses = []
    for tokens in _batches():
        loss = model(input_ids=tokens, labels=tokens).loss
        (loss if optimizer.loss_scaler is None else optimizer.loss_scaler.scale(loss)).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _rate(recipe: str) -> float:
    """Small enough that curves of different machines stay within a thousandth: another order of a sum flips some roundings."""
    if ng.parse(recipe).compute.transform == "unit":
        return 0.05  # a unit-scaled model's rate is of another size
    return 1e-4 if "fp4" in recipe else 5e-4


def _model() -> LlamaForCausalLM:
    model = LlamaForCausalLM(LlamaConfig(**SHAPE)).train()
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.copy_(torch.randint(-255, 256, parameter.shape, generator=draw) / 2048)
    return model


def _batches() -> Iterator[Tensor]:
    """Sequences in which three tokens of four follow from the one before."""
    draw = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        tokens = torch.randint(0, VOCABULARY, (SEQUENCES, LENGTH), generator=draw)
        follows = torch.randint(0, 4, (SEQUENCES, LENGTH), generator=draw) > 0
        for place in range(1, LENGTH):
            following = (5 * tokens[:, place - 1] + 3) % VOCABULARY
            tokens[:, place] = torch.where(follows[:, place], following, tokens[:, place])
        yield tokens
