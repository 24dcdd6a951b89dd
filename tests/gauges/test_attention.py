"""Attention under gauges: whoever computes it, what is read is right, and the run is the one without gauges."""

from __future__ import annotations

import math
import subprocess
import sys
import textwrap
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaAttention

from narrowgauge.gauges.attach import attach_gauges

WIDTH, HEADS, LENGTH = 32, 4, 16
MASK = nn.Transformer.generate_square_subsequent_mask(LENGTH)


class OwnAttention(nn.Module):
    """As people write it: the kernel called in a method, with a scale, and key heads that are shared."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, WIDTH * 2), nn.Linear(WIDTH, WIDTH)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.attend(*self.split(x)).transpose(1, 2).flatten(2))

    def split(self, x: Tensor) -> list[Tensor]:
        parts = self.qkv(x).split([WIDTH, WIDTH // 2, WIDTH // 2], -1)
        return [part.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for part in parts]

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        options = {"dropout_p": self.dropout, "is_causal": True, "scale": 0.7, "enable_gqa": True}
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, **options)


class OneAttention(LlamaAttention):
    """Transformers' own; ``forward`` is wrapped so that it takes hidden states alone."""

    def __init__(self) -> None:
        shape = {"hidden_size": WIDTH, "num_attention_heads": HEADS, "num_key_value_heads": 2}
        super().__init__(LlamaConfig(**shape, attn_implementation="sdpa"), layer_idx=0)
        angles = torch.arange(LENGTH)[:, None] * 0.3 ** torch.arange(WIDTH // HEADS)
        self.register_buffer("turns", torch.stack([angles.cos(), angles.sin()])[:, None], persistent=False)


class Multihead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, x, x, need_weights=False, is_causal=True, attn_mask=MASK)[0]


class Model(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + self.run(layer, x)
        return x

    def run(self, layer: nn.Module, x: Tensor) -> Tensor:
        if isinstance(layer, OneAttention):
            return layer(x, position_embeddings=(layer.turns[0], layer.turns[1]), attention_mask=None)[0]
        return layer(x)


def read(layer: nn.Module, x: Tensor) -> dict[str, list[float]]:
    """What is read of a layer's attention in one step."""
    model = Model(layer)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gauges = attach_gauges(model, optimizer, every=1)
    model(x).sum().backward()
    optimizer.step()
    gauges.detach()
    assert gauges.last is not None
    return gauges.last["attention"]


def direct(query: Tensor, key: Tensor, scale: float) -> Any:
    """Largest logit and mean relative entropy of the first sequence's sampled queries."""
    key = key[0].repeat_interleave(query.shape[1] // key.shape[1], 0)
    maxima, entropies = [], []
    for place in range(1, LENGTH, 2):
        logits = scale * torch.einsum("hd,htd->ht", query[0][:, place], key)
        logits = logits[:, : place + 1]
        entropy = torch.distributions.Categorical(logits=logits).entropy()
        maxima.append(logits.max().item())
        entropies.append((entropy / math.log(logits.shape[1])).mean().item())
    return pytest.approx([max(maxima), sum(entropies) / len(entropies)], rel=1e-3)


def test_what_is_read_of_ones_own_attention() -> None:
    torch.manual_seed(0)
    layer, x = OwnAttention(), 2 * torch.randn(2, LENGTH, WIDTH)
    query, key, _ = layer.split(x)
    assert read(layer, x) == {"layers.0": direct(query, key, 0.7)}


def test_what_is_read_of_torchs_attention() -> None:
    torch.manual_seed(0)
    layer, x = Multihead(), 2 * torch.randn(2, LENGTH, WIDTH)
    q, k = layer.inner.in_proj_weight.chunk(3)[:2]
    query, key = (F.linear(x, weight).unflatten(-1, (HEADS, -1)).transpose(1, 2) for weight in (q, k))
    assert read(layer, x) == {"layers.0.inner": direct(query, key, (WIDTH / HEADS) ** -0.5)}


def test_what_is_read_of_transformers_attention() -> None:
    torch.manual_seed(0)
    layer, x, operands = OneAttention(), 2 * torch.randn(2, LENGTH, WIDTH), []
    kernel = F.scaled_dot_product_attention

    def kept(query: Tensor, key: Tensor, *args: Any, **options: Any) -> Tensor:
        operands.extend([query, key])
        return kernel(query, key, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "scaled_dot_product_attention", kept)
        found = read(layer, x)
    assert found == {"layers.0": direct(*operands, (WIDTH / HEADS) ** -0.5)}


def test_scalify_that_is_imported_under_gauges_has_a_rule_for_the_kernel() -> None:
    program = """
        import torch, torch.nn.functional as F, narrowgauge as ng
        kernel, model = F.scaled_dot_product_attention, torch.nn.MultiheadAttention(4, 2)
        gauges = ng.attach_gauges(model, torch.optim.SGD(model.parameters()), every=1)
        model(*[torch.ones(1, 2, 4)] * 3, need_weights=False)
        from narrowgauge.transforms.scalify import FUNCTIONS
        print(F.scaled_dot_product_attention is not kernel, kernel in FUNCTIONS)
    """
    result = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True)
    assert result.stdout == "True True\n", result.stderr
