"""Smooth-SwiGLU moves outliers without changing a bit, and what it saves a narrow cast is what was claimed."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP

from narrowgauge.errors import RecipeError
from narrowgauge.transforms.smooth_swiglu import channel_scales, smooth
from narrowgauge.transforms.unit_scaling import unit_scale


def llama(layers: int = 2) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        mlp_bias=True,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).train()
    for layer in model.model.layers:  # one channel far above the others
        with torch.no_grad():
            layer.mlp.up_proj.weight[5] *= 1000.0
    return model


def tokens(rows: int = 3) -> Tensor:
    return torch.randint(0, 64, (rows, 17), generator=torch.Generator().manual_seed(1))


def everything(model: nn.Module, ids: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    logits = model(input_ids=ids, use_cache=False).logits
    F.cross_entropy(logits.flatten(0, 1).float(), ids.flatten(), reduction="sum").backward()
    return {"logits": logits.detach(), **{name: p.grad.clone() for name, p in model.named_parameters()}}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_not_a_bit_changes(dtype: torch.dtype) -> None:
    plain = llama().to(dtype)
    smoothed = copy.deepcopy(plain)
    smooth(smoothed)
    assert list(smoothed.state_dict()) == list(plain.state_dict())
    wanted, found = everything(plain, tokens()), everything(smoothed, tokens())
    assert wanted["model.layers.1.mlp.down_proj.weight"].abs().sum() > 0
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name


def test_the_product_sees_magnitudes_between_one_and_two() -> None:
    model, seen = llama(), []
    smooth(model)
    for layer in model.model.layers:
        layer.mlp.down_proj.register_forward_pre_hook(lambda _m, args: seen.append(args[0].detach()))
    everything(model, tokens())
    assert len(seen) == 2
    for x in seen:
        largest = x.abs().flatten(0, -2).amax(0)
        assert (largest >= 1).all()
        assert (largest < 2).all()


def test_scales_of_every_kind_of_channel() -> None:
    columns = [0.0, 1.0, 1.999, -4.0, 2.0**-140, float("inf"), float("nan"), 2.0**90, 2.0**-90]
    x = torch.tensor([columns, [0.0] * len(columns)])
    assert channel_scales(x).tolist() == [1.0, 1.0, 1.0, 4.0, 1.0, 1.0, 1.0, 2.0**64, 2.0**-64]
    flipped = torch.randn(6, 5, 9, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert torch.equal(channel_scales(flipped), channel_scales(flipped.flip(0, 1)))
    powers = torch.log2(channel_scales(flipped))
    assert torch.equal(powers, powers.round())


def test_what_is_not_finite_still_shows() -> None:
    mlp = llama().model.layers[0].mlp
    smooth(mlp)
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
    x[2, 3] = float("nan")
    out = mlp(x)
    assert out[2].isnan().all()
    assert out[[0, 1, 3]].isfinite().all()


def e4m3(x: Tensor, largest: Tensor) -> Tensor:
    """One scale for the whole tensor, from a largest magnitude of now or of an earlier step; saturating."""
    scale = 448 / largest
    return (x * scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() / scale


def with_outlier(ratio: float) -> tuple[Tensor, Tensor]:
    """What enters a down projection, 512 tokens of 256 channels; the first grows by ``ratio``."""
    gate, up = torch.randn(2, 512, 256, generator=torch.Generator().manual_seed(0))
    before = F.silu(gate) * up
    after = before.clone()
    after[:, 0] *= ratio
    return before, after


def flushed(cast: Tensor, x: Tensor) -> float:
    """The share of the other channels' values that became zero."""
    return ((cast == 0) & (x != 0))[:, 1:].float().mean().item()


def test_a_fresh_scale_loses_the_other_channels() -> None:
    """e4m3 spans 2^-9 … 448 and forgives a ratio of a thousand; at a million everything else is gone."""
    for ratio, least, most in ((1e3, 0.05, 0.08), (1e5, 0.9, 0.95), (1e6, 0.999, 1.0)):
        x = with_outlier(ratio)[1]
        assert least <= flushed(e4m3(x, x.abs().max()), x) <= most
        scales = channel_scales(x)
        smooth_x = x / scales
        cast = e4m3(smooth_x, smooth_x.abs().max()) * scales
        assert flushed(cast, x) < 0.001
        assert ((cast - x)[:, 1:].norm() / x[:, 1:].norm()).item() < 0.03


def test_a_stale_scale_loses_the_outlier() -> None:
    """A scale from the step before a jump by a thousand saturates; smoothed inputs never leave [1, 2), so theirs fits."""
    before, x = with_outlier(1e3)
    cast = e4m3(x, before.abs().max())
    assert ((cast - x)[:, 0].norm() / x[:, 0].norm()).item() > 0.95
    scales = channel_scales(x)
    stale = (before / channel_scales(before)).abs().max()
    cast = e4m3(x / scales, stale) * scales
    assert ((cast - x)[:, 0].norm() / x[:, 0].norm()).item() < 0.03


def test_compiled_is_eager() -> None:
    torch._dynamo.reset()
    eager = llama(1).model.layers[0].mlp
    smooth(eager)
    compiled = copy.deepcopy(eager)
    compiled.compile(fullgraph=True)
    x = torch.randn(2, 7, 32, generator=torch.Generator().manual_seed(0))
    results = []
    for mlp in (eager, compiled):
        leaf = x.clone().requires_grad_()
        mlp(leaf).square().sum().backward()
        results.append([leaf.grad, mlp.down_proj.weight.grad, mlp.gate_proj.weight.grad])
    for found, wanted in zip(results[1], results[0], strict=True):
        assert (found - wanted).norm() <= 1e-5 * wanted.norm()


def test_a_smooth_model_is_copied_and_pickled() -> None:
    model = llama(1)
    smooth(model)
    wanted = everything(model, tokens())["logits"]
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(everything(other, tokens())["logits"], wanted)


def test_autocast_casts_after_the_move() -> None:
    model = llama(1)
    plain = copy.deepcopy(model)
    smooth(model)
    with torch.autocast("cpu", torch.bfloat16):
        wanted, found = plain(input_ids=tokens()).logits, model(input_ids=tokens()).logits
    assert torch.equal(found, wanted)


def test_what_cannot_be_smoothed_says_so() -> None:
    with pytest.raises(RecipeError, match="there is no LlamaMLP in this GPT2LMHeadModel"):
        smooth(GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=8, bos_token_id=0, eos_token_id=0)))
    model = llama(1)
    smooth(model)
    with pytest.raises(RecipeError, match="there is a SmoothLlamaMLP in this LlamaForCausalLM"):
        smooth(model)
    other = llama(1)
    unit_scale(other)
    with pytest.raises(RecipeError, match="there is a UnitLlamaMLP"):
        smooth(other)
    assert LlamaMLP not in {type(module) for module in model.modules()}
