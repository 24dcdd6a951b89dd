"""What the value of a loss says: beside that of equal probabilities, and in its format."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge.checks.set_up import NARROW
from narrowgauge.spec.formats import dtype_name

LEAST_VOCABULARY = 16
"""Rows of the smallest embedding that counts as one of tokens."""


def vocabulary_of(model: nn.Module) -> int:
    """Return the outputs of the last linear layer with as many as an embedding has rows, the
    logits; 0 without one.

    Example:
        >>> vocabulary_of(nn.Sequential(nn.Embedding(65, 8), nn.Embedding(256, 8), nn.Linear(8, 65)))  # 256 positions
        65
    """
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if isinstance(head, nn.Linear):
        return head.out_features
    modules = list(model.modules())
    sizes = {m.num_embeddings for m in modules if isinstance(m, nn.Embedding)}
    for m in reversed(modules):
        size = m.out_features if isinstance(m, nn.Linear) else 0
        if size in sizes and size >= LEAST_VOCABULARY:  # two token types are no vocabulary
            return size
    return 0


def coarse_loss(loss: Any) -> list[str]:
    """Return a line about a loss computed in 16 bits: it is read off by up to half an ulp.

    Example:
        >>> coarse_loss(torch.tensor(3.0, dtype=torch.bfloat16))
        ['loss in bfloat16: near 3 its values lie 0.0156 apart; take the loss of logits.float()']
    """
    if not isinstance(loss, Tensor) or loss.dtype not in NARROW or not loss.isfinite():
        return []
    exponent = math.floor(math.log2(max(abs(float(loss)), 2.0**-14)))
    spacing = torch.finfo(loss.dtype).eps * 2.0**exponent
    return [
        f"loss in {dtype_name(loss.dtype)}: near {float(loss):.3g} its values lie {spacing:.3g} "
        "apart; take the loss of logits.float()"
    ]
