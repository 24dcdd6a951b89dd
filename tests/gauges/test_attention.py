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
from torch.nn.attention.bias import causal_upper_left
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaAttention

from narrowgauge.gauges.attach import attach_gauges

WIDTH, HEADS, LENGTH = 32, 4, 16
MASK = nn.Transformer.generate_square_subsequent_mask(LENGTH)


class OwnAttention(nn.Module):
    """As people write it: the kernel called in a method, with a scale, and key heads that are shared."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, WIDTH * 2), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).split([WIDTH, WIDTH // 2, WIDTH // 2], -1)
        q, k, v = (part.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for part in parts)
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.7, enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(2))


class BiasedAttention(OwnAttention):
    """With PyTorch's object for a causal mask, by position."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (x.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for _ in range(3))
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, causal_upper_left(LENGTH, LENGTH))
        return self.out(y.transpose(1, 2).flatten(2))


class OneAttention(LlamaAttention):
    """Transformers' own, of hidden states alone."""

    def __init__(self) -> None:
        shape = {"hidden_size": WIDTH, "num_attention_heads": HEADS, "num_key_value_heads": 2}
        super().__init__(LlamaConfig(**shape, attn_implementation="sdpa"), layer_idx=0)
        angles = torch.arange(LENGTH)[:, None] * 0.3 ** torch.arange(WIDTH // HEADS)
        self.turns = angles.cos()[None], angles.sin()[None]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x, position_embeddings=self.turns, attention_mask=None)[0]


class SelfAttention(nn.MultiheadAttention):
    """PyTorch's own, in self-attention with a causal mask."""

    def __init__(self) -> None:
        super().__init__(WIDTH, HEADS, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x, x, x, need_weights=False, is_causal=True, attn_mask=MASK)[0]


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


@pytest.mark.parametrize(
    ("kind", "scale"),
    [
        (OwnAttention, 0.7),
        *((kind, (WIDTH / HEADS) ** -0.5) for kind in (SelfAttention, OneAttention, BiasedAttention)),
    ],
)
def test_what_the_kernel_reads_is_read(kind: type[nn.Module], scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, operands, kernel = nn.Sequential(kind()), list[Tensor](), F.scaled_dot_product_attention

    def kept(query: Tensor, key: Tensor, *args: Any, **options: Any) -> Tensor:
        operands.extend([query, key])
        return kernel(query, key, *args, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", kept)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gauges = attach_gauges(model, optimizer, every=1)
    model(2 * torch.randn(2, LENGTH, WIDTH)).sum().backward()
    optimizer.step()
    gauges.detach()
    assert F.scaled_dot_product_attention is kept
    assert gauges.last is not None and gauges.last["attention"] == {"0": direct(*operands, scale)}


def test_a_kernel_that_other_code_replaced_under_gauges_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(F, "scaled_dot_product_attention", F.scaled_dot_product_attention)  # to be put back
    model = OwnAttention()
    gauges = attach_gauges(model, torch.optim.SGD(model.parameters()), every=1)
    monkeypatch.setattr(F, "scaled_dot_product_attention", print)
    gauges.detach()
    assert F.scaled_dot_product_attention is print


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
