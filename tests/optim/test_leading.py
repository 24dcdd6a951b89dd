"""The first values, read without the others, are those that a whole reading gives."""

from __future__ import annotations

from typing import Any

import torch

import narrowgauge as ng
from covering import exhaustive
from narrowgauge.spec.storages import STORAGES

SHAPES = ((64, 48), (7, 10), (6, 4, 8), (33,), (1, 1), (5, 200))


def stepped(storage: str, **options: Any) -> tuple[list[torch.nn.Parameter], ng.AdamW]:
    dtype = getattr(torch, STORAGES[storage].visible)
    generator = torch.Generator().manual_seed(0)
    weights = [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]
    optimizer = ng.AdamW(weights, lr=1e-2, storage=storage, **options)
    for _ in range(3):
        for weight in weights:
            weight.grad = torch.randn(weight.shape, generator=generator).to(dtype)
        optimizer.step()
    return weights, optimizer


@exhaustive("storage", [name for name in STORAGES if not name.startswith("float8/")])
@exhaustive("count", [1, 5, 40])
def test_leading_values_are_the_stored_ones(storage: str, count: int) -> None:
    weights, optimizer = stepped(storage)
    for name in ("weight", "exp_avg", "exp_avg_sq"):
        for weight, found in zip(weights, optimizer.leading(weights, count, name), strict=True):
            assert found is not None
            assert torch.equal(found, optimizer.stored(weight, name).reshape(-1)[:count])


def test_nothing_is_known_of_strangers_and_other_names() -> None:
    weights, optimizer = stepped("word")
    stranger = torch.nn.Parameter(torch.ones(4, 4))
    assert optimizer.leading([stranger, weights[0]], 4, "exp_avg")[0] is None
    assert optimizer.leading(weights, 4, "momentum_buffer") == [None] * len(weights)
