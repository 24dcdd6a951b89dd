"""A model in float64/float64 is float64 throughout, also where transformers' own code asks for float32 by name."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import narrowgauge as ng
from narrowgauge.errors import RecipeError
from narrowgauge.spec.notation import parse_table
from narrowgauge.trainer.language_model import build, enable_activation_checkpointing, loss_sum

TOKENS = torch.randint(0, 2000, (2, 17), generator=torch.Generator().manual_seed(0))
LOSSES: dict[str, Callable[[nn.Module], Tensor]] = {
    "whole": lambda model: loss_sum(model, TOKENS, chunked=False) / 32,  # type: ignore[arg-type]
    "chunked": lambda model: loss_sum(model, TOKENS, chunked=True) / 32,  # type: ignore[arg-type]
    "the model's own": lambda model: model(input_ids=TOKENS, labels=TOKENS).loss,
}


def losses_of(recipe: str, steps: int = 6) -> tuple[list[float], torch.dtype]:
    model, optimizer = ng.prepare(build("llama-1m", seed=0), recipe, lr=1e-3, max_grad_norm=1.0, compile=False)
    found = []
    for _ in range(steps):
        loss = LOSSES["whole"](model)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found, loss.dtype


@pytest.mark.parametrize("how", LOSSES)
@pytest.mark.parametrize("name", ["llama-1m", "gpt2"])
def test_gradients_are_the_slopes_of_the_loss_to_eight_digits(name: str, how: str) -> None:
    """Central differences over steps of 1e-5: a single rounding to float32 on the way would leave two digits."""
    if name == "gpt2":
        from transformers import GPT2Config, GPT2LMHeadModel

        small = GPT2Config(vocab_size=2000, n_positions=32, n_embd=32, n_layer=2, n_head=2)
        built: nn.Module = GPT2LMHeadModel(small).eval()
    else:
        built = build(name, seed=0)
    model, _ = ng.prepare(built, "float64/float64")
    loss = LOSSES[how](model)
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
            value = LOSSES[how](model).item()
            for p, way in zip(model.parameters(), ways, strict=True):
                p.sub_(way, alpha=distance)
        return value

    h = 1e-5
    measured = (8 * (at(h) - at(-h)) - (at(2 * h) - at(-2 * h))) / (12 * h)
    assert measured == pytest.approx(slope, rel=1e-8)


def test_recomputed_activations_give_the_same_bits() -> None:
    found = []
    for recomputes in (False, True):
        model, _ = ng.prepare(build("llama-1m", seed=0), "float64/float64")
        if recomputes:
            enable_activation_checkpointing(model)  # type: ignore[arg-type]
        LOSSES["whole"](model).backward()
        found.append([p.grad for p in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True) if one is not None)


def test_a_training_differs_from_float32_by_rounding_alone() -> None:
    (double, dtype), (single, _) = losses_of("float64/float64"), losses_of("float32/float32")
    assert dtype is torch.float64
    assert double != single and double == pytest.approx(single, rel=1e-5)
    assert any(loss != torch.tensor(loss, dtype=torch.float32).item() for loss in double)


def test_a_float64_master_follows_the_float32_one() -> None:
    (double, _), (single, _) = losses_of("bfloat16/master64", 3), losses_of("bfloat16/master", 3)
    assert double == pytest.approx(single, rel=1e-3)


def test_buffers_are_widened_and_running_statistics_too() -> None:
    model, _ = ng.prepare(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), "float64/float64")
    assert {t.dtype for t in model.state_dict().values()} == {torch.float64, torch.int64}
    assert model(torch.ones(3, 4, dtype=torch.float64)).dtype is torch.float64


@pytest.mark.parametrize(
    ("table", "why"),
    [
        ({"recipe": "float64/float64", "keep": ["lm_head"]}, "which would be float32"),
        (
            {"recipe": "float64/float64", "override": [{"pattern": "*norm*", "storage": "float32"}]},
            "an override that stores 'float32'.* Leave the override out",
        ),
        ({"recipe": "float64/float64/reproducible"}, "sums gradients of at most 32 bits"),
        ({"recipe": "float64/float64", "evaluation": "float32"}, "which casts float64 weights to float64"),
        ({"recipe": "bfloat16/word", "evaluation": "float64"}, "takes its own storages only"),
        ({"recipe": "float64/word"}, "Take storage 'float64'"),
        ({"recipe": "bfloat16/float64"}, "belongs to compute 'float64'"),
    ],
)
def test_what_would_be_in_fewer_bits_is_refused(table: dict[str, object], why: str) -> None:
    with pytest.raises(RecipeError, match=why):
        parse_table(table)
