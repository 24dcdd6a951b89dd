"""A model in float64/float64 computes in float64, except where its own code asks for float32 by name."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import narrowgauge as ng
from narrowgauge.trainer.language_model import build, loss_sum

TOKENS = torch.randint(0, 2000, (2, 17), generator=torch.Generator().manual_seed(0))


def loss_of(model: nn.Module) -> Tensor:
    return loss_sum(model, TOKENS, chunked=False) / 32  # type: ignore[arg-type]


def losses_of(recipe: str, steps: int = 6) -> tuple[list[float], torch.dtype]:
    model, optimizer = ng.prepare(build("llama-1m", seed=0), recipe, lr=1e-3, max_grad_norm=1.0, compile=False)
    found = []
    for _ in range(steps):
        loss = loss_of(model)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found, loss.dtype


def test_gradients_are_the_slopes_of_the_loss_to_eight_digits() -> None:
    """Central differences over steps of 1e-5: a single rounding to float32 on the way would leave two digits."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    small = GPT2Config(vocab_size=2000, n_positions=32, n_embd=32, n_layer=2, n_head=2)
    built = GPT2LMHeadModel(small).eval()
    model, _ = ng.prepare(built, "float64/float64")
    loss = loss_of(model)
    loss.backward()
    assert loss.dtype is torch.float64
    generator = torch.Generator().manual_seed(1)
    ways = [torch.randn(p.shape, dtype=torch.float64, generator=generator) for p in model.parameters()]
    slope = sum(
        float((p.grad * way).sum()) for p, way in zip(model.parameters(), ways, strict=True) if p.grad is not None
    )

    def at(distance: float) -> float:
        with torch.no_grad():
            for p, way in zip(model.parameters(), ways, strict=True):
                p.add_(way, alpha=distance)
            value = loss_of(model).item()
            for p, way in zip(model.parameters(), ways, strict=True):
                p.sub_(way, alpha=distance)
        return value

    h = 1e-5
    measured = (8 * (at(h) - at(-h)) - (at(2 * h) - at(-2 * h))) / (12 * h)
    assert measured == pytest.approx(slope, rel=1e-8)


def test_a_training_differs_from_float32_by_rounding_alone() -> None:
    (double, dtype), (single, _) = losses_of("float64/float64"), losses_of("float32/float32")
    assert dtype is torch.float64
    assert double != single and double == pytest.approx(single, rel=1e-5)
    assert any(loss != torch.tensor(loss, dtype=torch.float32).item() for loss in double)
