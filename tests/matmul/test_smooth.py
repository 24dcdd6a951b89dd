"""Smooth-SwiGLU: what a runaway channel costs with and without, its factors, and recipes."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP

import narrowgauge as ng
from narrowgauge.matmul.swapping import swap_linears
from narrowgauge.numerics.quantization import quantize, smoothing
from narrowgauge.spec.computes import COMPUTES

pytestmark = pytest.mark.filterwarnings("ignore::narrowgauge.matmul.gemm.EmulationNotice")

CHANNEL = 3


def mlp() -> LlamaMLP:
    made = LlamaMLP(LlamaConfig(hidden_size=64, intermediate_size=128)).bfloat16()
    generator = torch.Generator().manual_seed(0)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.1, generator=generator)
    return made


def tokens(seed: int = 0) -> Tensor:
    return torch.randn(128, 64, generator=torch.Generator().manual_seed(seed)).bfloat16()


def run_away(module: LlamaMLP, by: float = 300.0) -> None:
    """One channel of gate and up grows, and so does its product, by the square."""
    with torch.no_grad():
        module.gate_proj.weight[CHANNEL] *= by
        module.up_proj.weight[CHANNEL] *= by


def off_beside_the_channel(compute: str) -> float:
    """The error of what the other channels add to the output."""
    module = mlp()
    run_away(module)
    with torch.no_grad():
        module.down_proj.weight[:, CHANNEL] = 0
    wanted = copy.deepcopy(module).double()(tokens().double())
    swap_linears(module, compute, keep=())
    return ((module(tokens()).double() - wanted).norm() / wanted.norm()).item()


def test_a_channel_that_runs_away_costs_the_others_nothing_if_smooth() -> None:
    assert off_beside_the_channel("float8-tensor") > 0.2
    assert off_beside_the_channel("float8-tensor+smooth") < 0.06


def test_factors_of_every_kind_of_channel() -> None:
    cast = COMPUTES["float8-tensor+smooth"].output.left
    columns = [0.0, 1.0, 1.999, -4.0, 2.0**-140, float("inf"), float("nan"), 2.0**90, 2.0**-90]
    x = torch.tensor([columns, [0.0] * len(columns)])
    factors, _ = smoothing(x, cast)
    assert factors is not None
    assert (1 / factors).tolist() == [[1.0, 1.0, 1.0, 4.0, 1.0, 1.0, 1.0, 2.0**64, 2.0**-64]]
    ordinary = torch.randn(30, 9, generator=torch.Generator().manual_seed(0)).bfloat16() * 37
    factors, amax = smoothing(ordinary, cast)
    assert factors is not None and amax is not None
    largest = (ordinary.float() * factors).abs().amax(0)
    assert (largest >= 1).all() and (largest < 2).all() and 2 <= amax < 4
    # Whatever the order of the tokens; and the codes of what was in range are those of an ordinary cast.
    assert torch.equal(smoothing(ordinary.flip(0), cast)[0], factors)
    plain = COMPUTES["float8-tensor"].output.left
    assert torch.equal(quantize(ordinary, cast).values(), quantize(ordinary, plain).values())
    assert smoothing(ordinary, plain, amax) == (None, amax)


# --- models -----------------------------------------------------------------------------------------------------------


def llama() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, bos_token_id=0, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LlamaForCausalLM(config).train()


@pytest.mark.usefixtures("native_formats")
def test_a_recipe_smooths_down_projections_alone() -> None:
    model, _ = ng.prepare(llama(), "float8-tensor+smooth/word")
    rows = {name: module.compute for name, module in model.named_modules() if hasattr(module, "compute")}
    assert len(rows) == 14
    for name, row in rows.items():
        assert row.output.left.smooth == name.endswith("down_proj")
