"""Ten losses of eight recipes equal the recorded ones: bit for bit on the same kind of processor,
nearly on any other.

Weights and data are random integers, scaled exactly, so they are the same on every machine; only
the training depends on the processor. The model is small and nothing is compiled. ``./dev test -n0
--update-golden`` records the losses again.
"""

import json
import math
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import narrowgauge as ng
from narrowgauge.assembly.preparation import matrices_decay
from processors import machine_key

CURVES = Path(__file__).parent / "golden" / "curves.json"
RECIPES = (
    "bfloat16/word", "bfloat16/exact", "bfloat16/compact", "bfloat16/states8",
    "float8-row/word", "int8-row/word", "float16/split", "mxfp8/word",
)  # fmt: skip
TOLERANCE = 1e-3
"""Relative difference of a loss that is allowed between processors."""
STEPS = 10
VOCABULARY = 64
SEQUENCES = 8
LENGTH = 64
SHAPE = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": LENGTH, "tie_word_embeddings": True,
}  # fmt: skip


def model() -> LlamaForCausalLM:
    llama = LlamaForCausalLM(LlamaConfig(**SHAPE)).train()
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in llama.parameters():
            if parameter.ndim > 1:
                parameter.copy_(torch.randint(-255, 256, parameter.shape, generator=draw) / 2048)
    return llama


def batches() -> Iterator[Tensor]:
    """Sequences in which three of four tokens are a function of the previous one."""
    draw = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        tokens = torch.randint(0, VOCABULARY, (SEQUENCES, LENGTH), generator=draw)
        follows = torch.randint(0, 4, (SEQUENCES, LENGTH), generator=draw) > 0
        for place in range(1, LENGTH):
            following = (5 * tokens[:, place - 1] + 3) % VOCABULARY
            tokens[:, place] = torch.where(follows[:, place], following, tokens[:, place])
        yield tokens


def trained(recipe: str) -> list[float]:
    """The losses of ten steps, with the options that ``narrowgauge train`` takes by default."""
    llama, optimizer = ng.prepare(
        model(), recipe, lr=5e-4, betas=(0.9, 0.95), weight_decay=0.1, optimizer=matrices_decay, max_grad_norm=1.0,
        audit_every=0, compile=False, low_bits="zero",  # the initial weights lie on bfloat16's grid
    )  # fmt: skip
    scaler = torch.amp.GradScaler("cpu", enabled=optimizer.scales_loss)
    losses = []
    for tokens in batches():
        loss = llama(input_ids=tokens, labels=tokens).loss
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_curve_is_as_recorded(recipe, update_golden):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about emulation
        losses = trained(recipe)
    assert len(losses) == STEPS and all(map(math.isfinite, losses)) and losses[-1] < losses[0]
    table = json.loads(CURVES.read_text(encoding="utf-8"))  # hexadecimal, by processor and recipe
    here = machine_key()
    text = " ".join(map(float.hex, losses))
    if update_golden and table.get(here, {}).get(recipe) != text:
        for curves in table.values():
            curves.pop(recipe, None)  # the curve has moved, so it has moved everywhere
        table.setdefault(here, {})[recipe] = text
        CURVES.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    assert any(recipe in curves for curves in table.values())
    assert table.get(here, {}).get(recipe, text) == text
    for key, curves in table.items():
        if recipe in curves:
            recorded = [float.fromhex(loss) for loss in curves[recipe].split()]
            assert losses == pytest.approx(recorded, rel=TOLERANCE), key
