"""A weight that other code writes stays as written, and what is exported rounds to what the model
has: every storage.
"""

import pytest
import torch
from torch import Tensor, nn

import narrowgauge as ng
from narrowgauge.optim.step import codes
from narrowgauge.spec.storages import STORAGES
from optim.pairs import build, every_value, parameters
from tables import exhaustive
from tensors import gaussian, take_steps


def pruned(weight: Tensor) -> Tensor:
    return weight * (torch.arange(weight.numel()).view(weight.shape) % 2)


WRITERS = {
    "pruned": pruned,
    "negated": lambda weight: -weight,
    "shrunk": lambda weight: weight * 1e-3,
    "clamped": lambda weight: weight.clamp(-0.1, 0.1),
    "filled": lambda weight: torch.full_like(weight, torch.finfo(weight.dtype).max),
    "ones": torch.ones_like,
    "flipped": lambda weight: weight.flip(0),
    "loaded": lambda weight: gaussian(*weight.shape, seed=7).to(weight.dtype),
}


@pytest.mark.parametrize("storage", STORAGES)
def test_what_is_written_stays(storage):
    """With a rate of 0: next to random low bits, and after steps."""
    for name, write in WRITERS.items():
        shapes = [(64, 1024), (65,)] if name == "loaded" else [(6, 9), (7,)]
        weights = parameters(storage, shapes)
        optimizer = build("adamw", weights, storage, lr=1e-2)
        take_steps(optimizer, range(2))
        for p in weights:
            assert torch.equal(optimizer.stored(p).to(p.dtype), p), "what is exported is seen"
        optimizer.param_groups[0]["lr"] = 0.0
        written = [write(p.detach()) for p in weights]
        for p, value in zip(weights, written, strict=True):
            p.data.copy_(value)
        take_steps(optimizer, range(2, 4))
        for p, value in zip(weights, written, strict=True):
            assert torch.equal(p, value), name


@exhaustive("storage", [row for row in STORAGES.values() if row.visible != "float32"])
def test_what_is_stored_rounds_to_what_is_seen(storage):
    """Every visible value, beside the ends of what is stored next to it; and after a change of
    storage.
    """
    every = every_value(storage.visible)
    weight = nn.Parameter(every.clone())
    optimizer = ng.AdamW([weight], lr=0.0, storage=storage.name, compile=False, low_bits="zero")
    bits = codes.visible_bits(storage.visible, every.float())
    most = 1 << ({"bfloat16": 16, "float16": 13}[storage.visible] - 1)
    for offset in (-most, -most + 1, -1, 0, 1, most - 1, most):
        near = codes.visible_value(storage.visible, bits + offset)
        near = torch.where(every == 0, every.float(), near)
        optimizer.adopt({weight: near})
        stored = optimizer.stored(weight)
        if storage.extra_fields or offset == 0:
            assert torch.equal(weight, near.to(every.dtype))
        assert torch.equal(stored.to(every.dtype), weight)
        for second_storage in ("word", "exact", "master", "float16/split"):
            if STORAGES[second_storage].visible == storage.visible:
                second = nn.Parameter(weight.detach().clone())
                taken = ng.AdamW([second], storage=second_storage, compile=False, low_bits="zero")
                taken.adopt({second: stored})
                assert torch.equal(second, weight)
        weight.data.copy_(every)
