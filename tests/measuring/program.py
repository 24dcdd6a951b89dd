"""A small language model, its batch, its loss and its optimizer: the text that rows of ``programs.toml`` edit."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

IGNORED = -100


class Model(nn.Module):
    """An embedding, a projection that is used twice, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.shared = nn.Linear(16, 16)
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
