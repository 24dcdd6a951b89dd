"""Unit scaling against a float64 model written by hand; unit variance where it is promised; and that it trains."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from narrowgauge.errors import RecipeError
from narrowgauge.trainer.language_model import loss_sum
from narrowgauge.transforms.unit_scaling import (
    fix_batch,
    learning_rate_factors,
    plain_state_dict,
    unit_scale,
)
from oracles.unit_scaling import Oracle
from tensors import gradients, largest_relative_error, random_tokens, rms

KINDS = ["llama", "llama-tied"]


def plain(kind: str, *, width: int = 32, layers: int = 2, vocabulary: int = 48, heads: int = 4) -> Any:
    """A tiny model as it comes, with grouped heads and an odd MLP width."""
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=width, intermediate_size=5 * width // 2, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=heads // 2, max_position_embeddings=128,
        tie_word_embeddings=kind == "llama-tied", use_cache=False,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LlamaForCausalLM(config).train()


def scaled_model(kind: str, seed: int = 0, **options: Any) -> Any:
    model = plain(kind, **options)
    unit_scale(model, seed)
    return model


def mean_gradients(model: Any, ids: Tensor, divisor: int | None = None) -> dict[str, Tensor]:
    """Gradients of the sum of the losses over the number of tokens, which is the trainer's loss."""
    return gradients(model, loss_sum(model, ids, chunked=False) / (divisor or ids[:, 1:].numel()))


def oracle(model: Any, **options: Any) -> Oracle:
    config = model.config
    return Oracle(
        {name: p.detach().double().numpy() for name, p in model.named_parameters()},
        config.num_hidden_layers,
        config.num_attention_heads,
        config.num_key_value_heads,
        config.rms_norm_eps,
        **options,
    )


def disturbed(model: Any) -> Any:
    """Gains and biases that are not 1 and 0, so that a mistake in either shows."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 1:
                p.add_(0.3 * torch.randn(p.shape, generator=generator))
    return model


# -- against the model by hand


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fixed", [False, True])
def test_forward_and_backward_are_the_formulas(kind: str, fixed: bool) -> None:
    model, ids = disturbed(scaled_model(kind)), random_tokens()
    options: dict[str, int] = {}
    if fixed:
        fix_batch(model, sequence_length=64, tokens=500)
        options = {"length": 64, "tokens": 500}
    by_hand = oracle(model, **options)
    logits, loss = by_hand.run(ids.numpy())
    found = mean_gradients(model, ids, 500 if fixed else None)
    assert loss_sum(model, ids, chunked=False).item() == pytest.approx(loss, rel=1e-6)
    assert np.abs(model(ids[:, :-1]).logits.detach().numpy() - logits).max() < 1e-5 * np.abs(logits).max()
    assert (
        largest_relative_error(found, {name: torch.from_numpy(by_hand.gradients[name]).float() for name in found})
        < 3e-6
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_plain_model_can_take_the_weights(kind: str) -> None:
    model, ids = disturbed(scaled_model(kind, layers=3)), random_tokens()
    before = copy.deepcopy(model.state_dict())
    other = plain(kind, layers=3)
    other.load_state_dict(plain_state_dict(model, sequence_length=10))
    found, wanted = other(ids).logits, model(ids).logits
    assert (found - wanted).norm() < 1e-4 * wanted.norm()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with pytest.raises(RecipeError, match="without a sequence length"):
        plain_state_dict(model)


# -- unit variance


def operands(model: Any, ids: Tensor) -> dict[str, list[float]]:
    """Root mean squares of what each linear layer inside the decoder multiplies: input, weight, output's gradient."""
    found: dict[str, list[float]] = {}

    def note(module: nn.Module, args: Any, output: Tensor) -> None:
        name = names[module]
        found[name] = [rms(args[0]), rms(model.get_submodule(name).weight)]
        output.register_hook(lambda g: found[name].append(rms(g)))

    names = {m: name for name, m in model.named_modules() if type(m) is nn.Linear}
    handles = [module.register_forward_hook(note) for module in names]
    mean_gradients(model, ids)
    for handle in handles:
        handle.remove()
    return found


def test_what_is_multiplied_has_unit_variance() -> None:
    """All within a factor of 3 of 1, but the gradients of queries and keys, which softmax makes small: 0.05 to 0.5."""
    model = scaled_model("llama-tied", width=96, layers=3, vocabulary=384, heads=6)
    found = operands(model, random_tokens(8, 65, 384))
    assert len(found) == 3 * 7
    for name, (x, weight, gradient) in found.items():
        assert 0.95 < weight < 1.05, name
        assert 1 / 3 < x < 3, (name, x)
        if name.endswith(("q_proj", "k_proj")):
            assert 0.05 < gradient < 0.5, (name, gradient)
        else:
            assert 1 / 3 < gradient < 3, (name, gradient)


# -- rules by themselves


def test_learning_rates() -> None:
    llama = learning_rate_factors(scaled_model("llama", width=64, layers=4))
    inside = "model.layers.3"
    assert llama["model.embed_tokens.weight"] == 1 / 8
    assert llama["lm_head.weight"] == llama["model.norm.weight"] == 1
    assert llama[f"{inside}.self_attn.k_proj.weight"] == pytest.approx(1 / 8 / 2)
    assert llama[f"{inside}.mlp.down_proj.weight"] == pytest.approx(160**-0.5 / 2)
    assert llama[f"{inside}.input_layernorm.weight"] == 1 / 2
    tied = learning_rate_factors(scaled_model("llama-tied", width=64, layers=4))
    assert tied["model.embed_tokens.weight"] == pytest.approx(64**-0.25)
