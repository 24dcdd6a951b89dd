"""The gauges bound every logit of attention, under any mask, by what the kernel reads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from narrowgauge.gauges.attach import attach_gauges

WIDTH = 32
HEADS = 4
LENGTH = 16
SHAPE: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": HEADS,
    "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip


class OwnAttention(nn.Module):
    """As people write it: one projection, a number of heads, and a mask of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.n_head, self.c_attn = HEADS, nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.c_attn(x).chunk(3, -1)
        )
        mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(-3)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)


class OwnModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.attention, self.head = (
            nn.Embedding(64, WIDTH),
            OwnAttention(),
            nn.Linear(WIDTH, 64),
        )

    def forward(self, input_ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.attention(self.embedding(input_ids)))
        return logits


MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE)),
    "norms after projections": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE)),
    "one projection": lambda: GPT2LMHeadModel(
        GPT2Config(vocab_size=64, n_positions=LENGTH, n_embd=WIDTH, n_layer=1, n_head=HEADS)
    ),
    "own": OwnModel,
}


@pytest.mark.parametrize("name", MODELS)
def test_the_bound_is_the_product_of_the_largest_norms(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().train()
    operands = list[Tensor]()
    kernel = F.scaled_dot_product_attention

    def recording_kernel(query: Tensor, key: Tensor, *args: Any, **options: Any) -> Tensor:
        operands.extend([query, key])
        return kernel(query, key, *args, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", recording_kernel)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gauges = attach_gauges(model, optimizer, every=1)
    output = model(input_ids=torch.arange(2 * LENGTH).reshape(2, LENGTH))
    (output if isinstance(output, Tensor) else output.logits).square().sum().backward()
    optimizer.step()
    gauges.detach()
    query, key = (x.detach().float() for x in operands)
    largest = [float(x.norm(dim=-1).max()) for x in (query, key)]
    assert gauges.last is not None
    ((bound,),) = gauges.last["attention"].values()
    assert bound == pytest.approx(largest[0] * largest[1] * (WIDTH / HEADS) ** -0.5, rel=1e-3)
    logits = (
        query
        @ key.repeat_interleave(query.shape[1] // key.shape[1], 1).transpose(-1, -2)
        * (WIDTH / HEADS) ** -0.5
    )
    assert float(logits.abs().max()) <= bound * 1.001
    assert not any(hasattr(module, "gauge_entries") for module in model.modules())
