"""A small language model, its batch, its loss and its optimizer: the text that rows of ``programs.toml`` edit."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

IGNORED = -100


def straight(x: Tensor, values: Tensor) -> Tensor:
    """Return values with the gradient of ``x``."""
    return x + (values - x).detach()


def float8(x: Tensor, largest: Tensor, dtype=torch.float8_e4m3fn) -> Tensor:
    scale = torch.finfo(dtype).max / largest.clamp_min(1e-12).float()
    return ((x.float() * scale).to(dtype).float() / scale).to(x.dtype)


def cast(x: Tensor) -> Tensor:
    return x  # no cast


class Linear(nn.Linear):
    """A layer that may cast its operands."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(cast(x), cast(self.weight), self.bias)


class Model(nn.Module):
    """An embedding, a projection that is used twice, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.shared = Linear(16, 16)
        self.norm = nn.LayerNorm(16)
        self.dropout = nn.Dropout(0.0)
        self.head = nn.Linear(16, 32, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        h = self.shared(self.norm(x))
        x = x + self.shared(F.gelu(h))
        return self.head(self.dropout(x))


def tokens_of(part: int) -> tuple[Tensor, Tensor]:
    """Return tokens and labels. Later micro-batches have more ignored labels."""
    generator = torch.Generator().manual_seed(part)
    tokens = torch.randint(0, 32, (4, 17), generator=generator)
    labels = tokens[:, 1:].clone()
    if part:
        labels[:, 3 * part :] = IGNORED
    return tokens[:, :-1], labels


def count(batch) -> Tensor:
    return (batch[1] != IGNORED).sum()


def summed(model, batch) -> Tensor:
    logits = model(batch[0]).float().flatten(0, 1)
    return F.cross_entropy(logits, batch[1].flatten(), ignore_index=IGNORED, reduction="sum")


def loss(model, batch) -> Tensor:
    return summed(model, batch) / count(batch)


def optimizer_of(model) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


torch.manual_seed(0)
model = Model()
optimizer = optimizer_of(model)
batch = tokens_of(0)
backward = None
