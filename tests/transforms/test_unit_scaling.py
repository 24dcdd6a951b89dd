"""Unit scaling against a float64 model written by hand; unit variance where it is promised; and that it trains."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from covering import whole
from narrowgauge.errors import RecipeError
from narrowgauge.trainer.language_model import compiled_loss, enable_activation_checkpointing, loss_sum
from narrowgauge.transforms.unit_layers import attention_output, residual_weights
from narrowgauge.transforms.unit_scaling import fix_batch, learning_rate_factors, plain_state_dict, unit_scale
from oracles.unit_scaling import Oracle
from tensors import gradients, largest_relative_error, random_tokens, rms

KINDS = ["llama", "llama-tied", "gpt2"]


def plain(kind: str, *, width: int = 32, layers: int = 2, vocabulary: int = 48, heads: int = 4, **options: Any) -> Any:
    """A tiny model as it comes: grouped heads and an odd MLP width in Llama, tied weights in GPT-2."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return _plain(kind, width, layers, vocabulary, heads, options)


def _plain(kind: str, width: int, layers: int, vocabulary: int, heads: int, options: dict[str, Any]) -> Any:
    if kind == "gpt2":
        quiet = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
        shape = {"vocab_size": vocabulary, "n_embd": width, "n_layer": layers, "n_head": heads, "n_positions": 128}
        special = dict.fromkeys(("bos_token_id", "eos_token_id"))
        return GPT2LMHeadModel(GPT2Config(**shape, **{**quiet, **special, "use_cache": False, **options})).train()
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=5 * width // 2,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        max_position_embeddings=128,
        tie_word_embeddings=kind == "llama-tied",
        use_cache=False,
        **options,
    )
    return LlamaForCausalLM(config).train()


def scaled_model(kind: str, seed: int = 0, **options: Any) -> Any:
    model = plain(kind, **options)
    unit_scale(model, seed)
    return model


def mean_gradients(model: Any, ids: Tensor, divisor: int | None = None, loss: Any = None) -> dict[str, Tensor]:
    """Gradients of the sum of the losses over the number of tokens, which is the trainer's loss."""
    summed = loss_sum(model, ids, chunked=False) if loss is None else loss(ids)
    return gradients(model, summed / (divisor or ids[:, 1:].numel()))


def oracle(model: Any, **options: Any) -> Oracle:
    config = model.config
    return Oracle(
        {name: p.detach().double().numpy() for name, p in model.named_parameters()},
        config.num_hidden_layers,
        config.num_attention_heads,
        getattr(config, "num_key_value_heads", config.num_attention_heads),
        getattr(config, "rms_norm_eps", None) or config.layer_norm_epsilon,
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
def test_every_gradient_is_a_multiple_of_the_true_one(kind: str) -> None:
    """The rules change no direction, not even a tied embedding's, which gets gradients from both ends of the model."""
    model, ids = disturbed(scaled_model(kind)), random_tokens().numpy()
    by_rules, by_calculus = oracle(model), oracle(model, rules=False)
    by_rules.run(ids), by_calculus.run(ids)
    for name, true in by_calculus.gradients.items():
        found = by_rules.gradients[name]
        factor = (found * true).sum() / (true * true).sum()
        assert factor > 0
        assert np.abs(found - factor * true).max() < 1e-12 * np.abs(found).max(), name


@pytest.mark.parametrize("kind", KINDS)
def test_the_oracles_calculus_is_that_of_differences(kind: str) -> None:
    model, ids = disturbed(scaled_model(kind)), random_tokens()
    exact = oracle(model, rules=False)
    exact.run(ids.numpy())
    generator = np.random.default_rng(0)
    for name in exact.weights:
        direction = generator.standard_normal(exact.weights[name].shape)
        losses = []
        for step in (1e-5, -1e-5):
            moved = oracle(model, rules=False)
            moved.weights[name] = moved.weights[name] + step * direction
            losses.append(moved.run(ids.numpy())[1])
        slope = (losses[0] - losses[1]) / 2e-5 / ids[:, 1:].numel()
        assert slope == pytest.approx((exact.gradients[name] * direction).sum(), rel=1e-5, abs=1e-9), name


@pytest.mark.parametrize("kind", KINDS)
def test_a_plain_model_can_take_the_weights(kind: str) -> None:
    model, ids = disturbed(scaled_model(kind, layers=3)), random_tokens()
    before = copy.deepcopy(model.state_dict())
    other = plain(kind, layers=3)
    other.load_state_dict(plain_state_dict(model, sequence_length=10))
    found, wanted = other(ids).logits, model(ids).logits
    assert (found - wanted).norm() < 1e-4 * wanted.norm()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with pytest.raises(RecipeError, match="takes it from each input's length"):
        plain_state_dict(model)


# -- unit variance


def operands(model: Any, ids: Tensor) -> dict[str, list[float]]:
    """Root mean squares of what each linear layer inside the decoder multiplies: input, weight, output's gradient."""
    found: dict[str, list[float]] = {}

    def note(module: nn.Module, args: Any, output: Tensor) -> None:
        name = names[module]
        found[name] = [rms(args[0]), rms(model.get_submodule(name).weight)]
        output.register_hook(lambda g: found[name].append(rms(g)))

    names = {m: name for name, m in model.named_modules() if type(m).__name__ in ("Linear", "Conv1D")}
    handles = [module.register_forward_hook(note) for module in names]
    mean_gradients(model, ids)
    for handle in handles:
        handle.remove()
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_multiplied_has_unit_variance(kind: str) -> None:
    """All within a factor of 3 of 1, but the gradients of queries and keys, which softmax makes small: 0.05 to 0.5."""
    model = scaled_model(kind, width=96, layers=3, vocabulary=384, heads=6)
    found = operands(model, random_tokens(8, 65, 384))
    assert len(found) == (3 * 4 if kind == "gpt2" else 3 * 7)
    for name, (x, weight, gradient) in found.items():
        assert 0.95 < weight < 1.05, name
        assert 1 / 3 < x < 3, (name, x)
        if name.endswith(("q_proj", "k_proj")):
            assert 0.05 < gradient < 0.5, (name, gradient)
        else:
            assert 1 / 3 < gradient < 3, (name, gradient)


@pytest.mark.parametrize("kind", KINDS)
def test_stream_and_weight_gradients_have_unit_variance(kind: str) -> None:
    model = scaled_model(kind, width=96, layers=3, vocabulary=384, heads=6)
    stream: list[float] = []
    layers = model.transformer.h if kind == "gpt2" else model.model.layers
    handles = [layer.register_forward_hook(lambda _m, _a, out: stream.append(rms(out))) for layer in layers]
    found = mean_gradients(model, random_tokens(8, 65, 384))
    for handle in handles:
        handle.remove()
    assert len(stream) == 3
    assert all(0.9 < value < 2 for value in stream), stream
    for name, gradient in found.items():
        value = rms(gradient)
        if "q_proj" in name or "k_proj" in name:
            assert 0.05 < value < 0.5, (name, value)
        elif name.endswith("bias"):
            # The tokens of a sequence share a part of their gradient, and a bias adds it up.
            assert 1 / 3 < value < 8, (name, value)
        else:
            assert 1 / 3 < value < 3, (name, value)


class NarrowLinear(nn.Linear):
    """Casts to float8 without any scale: e4m3 forward, e5m2 backward."""

    def forward(self, input: Tensor) -> Tensor:
        x, weight = (_Narrow.apply(t, torch.float8_e4m3fn, None) for t in (input, self.weight))
        return _Narrow.apply(F.linear(x, weight), None, torch.float8_e5m2)


class _Narrow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Any, backward: Any) -> Tensor:
        ctx.format = backward
        return x.view_as(x) if forward is None else x.clamp(-448, 448).to(forward).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return (g if ctx.format is None else g.to(ctx.format).to(g.dtype)), None, None


def narrowed(model: Any) -> Any:
    for module in model.model.layers.modules():
        if type(module) is nn.Linear:
            module.__class__ = NarrowLinear
    return model


@pytest.mark.parametrize("when", ["before", "after"])
def test_float8_needs_no_scale(when: str) -> None:
    """Linear layers of another class, there before or put in afterwards, get operands that fit float8 as they are."""
    wide, ids = scaled_model("llama", width=96, layers=3, vocabulary=384, heads=6), random_tokens(8, 65, 384)
    model = plain("llama", width=96, layers=3, vocabulary=384, heads=6)
    if when == "before":
        unit_scale(narrowed(model), 0)
    else:
        unit_scale(model, 0)
        narrowed(model)
    assert sum(type(module) is NarrowLinear for module in model.modules()) == 3 * 7
    found, wanted = mean_gradients(model, ids), mean_gradients(wide, ids)
    # e4m3 keeps 4 bits and e5m2 3: single roundings are off by 2.6 and 5 percent; six matmuls deep, by 15.
    assert 0.01 < largest_relative_error(found, wanted) < 0.25


def test_float8_without_scales_breaks_a_plain_model() -> None:
    """The same casts where nothing is scaled, in a step of 65,536 tokens: gradients fall below e5m2's smallest, 2^-16."""
    ids, divisor = random_tokens(8, 65, 384), 65_536
    for unit, least, most in ((True, 0.01, 0.25), (False, 0.9, 1.1)):
        model = plain("llama", width=96, layers=3, vocabulary=384, heads=6)
        if unit:
            unit_scale(model)
            fix_batch(model, tokens=divisor)
        wanted = mean_gradients(model, ids, divisor)
        found = mean_gradients(narrowed(model), ids, divisor)
        name = "model.layers.0.mlp.up_proj.weight"
        assert least < (found[name] - wanted[name]).norm() / wanted[name].norm() < most


# -- in place


@pytest.mark.parametrize("kind", KINDS)
def test_names_and_ties_stay(kind: str) -> None:
    model = plain(kind)
    names, shapes = list(model.state_dict()), {name: p.shape for name, p in model.named_parameters()}
    unit_scale(model)
    assert list(model.state_dict()) == names
    assert {name: p.shape for name, p in model.named_parameters()} == shapes
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert tied == (kind != "llama")


def test_weights_are_a_function_of_the_seed() -> None:
    one, two, three = scaled_model("gpt2", seed=5), plain("gpt2"), scaled_model("gpt2", seed=6)
    before = torch.get_rng_state()
    unit_scale(two, 5)
    assert torch.equal(torch.get_rng_state(), before)
    for name, p in one.named_parameters():
        assert torch.equal(p, two.get_parameter(name))
        if p.ndim == 2:
            assert not torch.equal(p, three.get_parameter(name))
            assert abs(rms(p) - 1) < 0.1
        else:
            assert torch.equal(p, torch.full_like(p, float("ln" in name and "weight" in name)))


@pytest.mark.parametrize("kind", KINDS)
def test_copies_and_pickles_compute_the_same(kind: str) -> None:
    model, ids = scaled_model(kind), random_tokens()
    fix_batch(model, sequence_length=20)
    wanted = mean_gradients(model, ids)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert largest_relative_error(mean_gradients(other, ids), wanted) == 0
    copied = copy.deepcopy(model)
    fix_batch(copied, sequence_length=50)
    assert largest_relative_error(mean_gradients(model, ids), wanted) == 0
    assert largest_relative_error(mean_gradients(copied, ids), wanted) > 0.01


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_checkpointing_narrow_weights_and_autocast(kind: str) -> None:
    model, ids = scaled_model(kind), random_tokens()
    wanted = mean_gradients(model, ids)
    light = copy.deepcopy(model)
    enable_activation_checkpointing(light)
    assert largest_relative_error(mean_gradients(light, ids), wanted) == 0
    with torch.autocast("cpu", torch.bfloat16):
        assert 0 < largest_relative_error(mean_gradients(model, ids), wanted) < 0.06
    for p in light.parameters():
        p.data = p.data.bfloat16()
    assert 0 < largest_relative_error(mean_gradients(light, ids), wanted) < 0.06
    assert {p.grad.dtype for p in light.parameters()} == {torch.bfloat16}


@whole
def test_compiled_is_eager() -> None:
    torch._dynamo.reset()
    model, ids = scaled_model("llama-tied"), random_tokens()
    wanted = mean_gradients(model, ids)
    assert largest_relative_error(mean_gradients(model, ids, loss=compiled_loss(model, chunked=False)), wanted) < 1e-5


@whole
def test_all_layers_share_one_graph_for_each_length() -> None:
    """Nine layers with nine pairs of residual weights: more than the eight graphs that a function may have."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = scaled_model("llama", layers=9)
    pieces = (random_tokens(3, 10), random_tokens(2, 14))
    wanted = [mean_gradients(model, ids) for ids in pieces]
    for layer in model.model.layers:
        layer.compile(fullgraph=True, backend="aot_eager")
    for ids, expected in zip(pieces, wanted, strict=True):
        assert largest_relative_error(mean_gradients(model, ids), expected) < 1e-5
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2


def test_the_whole_model_is_one_graph() -> None:
    torch._dynamo.reset()
    model, ids = scaled_model("gpt2", layers=1), random_tokens()
    loss = torch.compile(lambda t: loss_sum(model, t, chunked=False), fullgraph=True, backend="aot_eager")
    assert largest_relative_error(mean_gradients(model, ids, loss=loss), mean_gradients(model, ids)) < 1e-5


# -- the batch


def test_micro_batches_add_up() -> None:
    """With the step's tokens fixed, uneven pieces give the gradient of the whole; otherwise each has its own constants."""
    for kind in KINDS:
        model, ids = scaled_model(kind), random_tokens(6)
        for fixed in (True, False):
            fix_batch(model, tokens=ids[:, 1:].numel() if fixed else None)
            whole = mean_gradients(model, ids, ids[:, 1:].numel())
            parts = [mean_gradients(model, part, ids[:, 1:].numel()) for part in (ids[:1], ids[1:])]
            summed = {name: parts[0][name] + parts[1][name] for name in whole}
            assert (largest_relative_error(summed, whole) < 1e-5) == fixed


def test_a_fixed_length_makes_the_model_causal() -> None:
    model, ids = scaled_model("llama"), random_tokens()
    assert (model(ids).logits[:, :5] - model(ids[:, :5]).logits).abs().max() > 1e-3
    fix_batch(model, sequence_length=10)
    assert (model(ids).logits[:, :5] - model(ids[:, :5]).logits).abs().max() < 1e-6


def test_a_cache_gives_the_same_logits() -> None:
    for kind in ("llama", "gpt2"):
        model, ids = scaled_model(kind).eval(), random_tokens()
        fix_batch(model, sequence_length=10)
        first = model(ids[:, :6], use_cache=True)
        rest = model(ids[:, 6:], past_key_values=first.past_key_values, use_cache=True)
        assert (rest.logits - model(ids).logits[:, 6:]).abs().max() < 1e-5


# -- rules by themselves


def test_attentions_constant() -> None:
    for length in (3, 16, 2048):
        assert attention_output(length, 10**9) == pytest.approx(math.sqrt(length / math.log(length)), rel=1e-6)
    assert attention_output(1, 64) == 1.0


@pytest.mark.parametrize("num_layers", [1, 2, 7])
def test_embedding_attentions_and_mlps_contribute_alike(num_layers: int) -> None:
    variances = [1.0]
    for branch in range(2 * num_layers):
        skip, share = residual_weights(branch, num_layers)
        variances = [v * skip**2 for v in variances] + [share**2]
    assert sum(variances) == pytest.approx(1)
    assert variances[0] == pytest.approx(1 / 3)
    assert sum(variances[1::2]) == pytest.approx(sum(variances[2::2])) == pytest.approx(1 / 3)


def test_learning_rates() -> None:
    llama = learning_rate_factors(scaled_model("llama", width=64, layers=4))
    inside = "model.layers.3"
    assert llama["model.embed_tokens.weight"] == 1 / 8
    assert llama["lm_head.weight"] == llama["model.norm.weight"] == 1
    assert llama[f"{inside}.self_attn.k_proj.weight"] == pytest.approx(1 / 8 / 2)
    assert llama[f"{inside}.mlp.down_proj.weight"] == pytest.approx(160**-0.5 / 2)
    assert llama[f"{inside}.input_layernorm.weight"] == 1 / 2
    model = scaled_model("gpt2", width=64, layers=4)
    gpt2 = learning_rate_factors(model)
    assert set(gpt2) == {name for name, _ in model.named_parameters()}
    assert gpt2["transformer.wpe.weight"] == 1 / 8
    assert gpt2["transformer.wte.weight"] == pytest.approx(64**-0.25)  # tied
    assert gpt2["transformer.h.0.mlp.c_proj.weight"] == pytest.approx(256**-0.5 / 2)
    assert gpt2["transformer.h.0.attn.c_attn.weight"] == pytest.approx(64**-0.5 / 2)
    assert gpt2["transformer.h.0.attn.c_attn.bias"] == 1 / 2
    assert gpt2["transformer.ln_f.bias"] == 1


def trained(kind: str, steps: int = 30) -> list[float]:
    """Losses on sequences in which each token is a fixed permutation of the one before."""
    model = scaled_model(kind, width=64)
    order = torch.randperm(48, generator=torch.Generator().manual_seed(7))
    factors = learning_rate_factors(model)
    optimizer = torch.optim.Adam(
        [{"params": [p], "lr": 0.5 * factors[name]} for name, p in model.named_parameters()], betas=(0.9, 0.95)
    )
    losses = []
    for step in range(steps):
        ids = [random_tokens(16, 1, seed=step)]
        for _ in range(16):
            ids.append(order[ids[-1]])
        loss = loss_sum(model, torch.cat(ids, 1), chunked=False) / 256
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("kind", KINDS)
def test_it_learns(kind: str) -> None:
    losses = trained(kind)
    assert losses[0] == pytest.approx(math.log(48), abs=0.1)
    assert losses[-1] < 0.5


# -- what it refuses


def test_what_it_does_not_know_it_refuses() -> None:
    mistral = MistralForCausalLM(
        MistralConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
                      num_key_value_heads=2)
    )  # fmt: skip
    with pytest.raises(RecipeError, match="was given a MistralForCausalLM"):
        unit_scale(mistral)
    with pytest.raises(RecipeError, match=r"attention_dropout = 0\.1"):
        unit_scale(plain("llama", attention_dropout=0.1))
    for kind, option in (("llama", "hidden_act"), ("gpt2", "activation_function")):
        other = {"llama": "gelu", "gpt2": "silu"}[kind]
        with pytest.raises(RecipeError, match=f"no rule for the activation '{other}'"):
            unit_scale(plain(kind, **{option: other}))
    with pytest.raises(RecipeError, match="scale_attn_by_inverse_layer_idx = True"):
        unit_scale(plain("gpt2", scale_attn_by_inverse_layer_idx=True))
    model = plain("llama")
    model.lm_head.__class__ = NarrowLinear
    with pytest.raises(RecipeError, match=r"is a NarrowLinear\. Keep it wide"):
        unit_scale(model)
    for function in (learning_rate_factors, fix_batch, plain_state_dict):
        with pytest.raises(RecipeError, match="is not unit-scaled"):
            function(plain("llama"))
    model = scaled_model("llama")
    with pytest.raises(RecipeError, match="unit-scaled already"):
        unit_scale(model)
