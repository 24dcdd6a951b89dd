"""Experts of transformers' mixtures: swapped in place, nothing renamed; they learn, and compute
what their layers would.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import Llama4ForCausalLM, Llama4TextConfig, MixtralConfig, MixtralForCausalLM

from matmul.scenarios import names, with_threshold
from narrowgauge.errors import RecipeError
from narrowgauge.matmul.experts import IMPLEMENTATION
from narrowgauge.matmul.inference import quantize_for_inference
from narrowgauge.matmul.swapping import NarrowLayers, swap_linears
from narrowgauge.spec.computes import COMPUTES, Compute
from tensors import random_tokens

pytestmark = pytest.mark.filterwarnings("ignore")

SHAPE = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 16,
}  # fmt: skip
TOKENS = random_tokens(2, 24, 64, seed=1)
FLOAT8 = COMPUTES["float8-row"]
OUTLIERS = with_threshold("int8-outlier", 2.0)


def mixtral(dtype: torch.dtype = torch.bfloat16) -> MixtralForCausalLM:
    torch.manual_seed(0)
    return MixtralForCausalLM(MixtralConfig(**SHAPE)).to(dtype)


def swap_experts(model: nn.Module, row: str | Compute) -> NarrowLayers:
    return swap_linears(model, lambda name: row if ".experts." in name else None)


def test_names_and_config_stay_and_values_are_transformers_own_where_the_row_is() -> None:
    model = mixtral()
    plain = mixtral()
    before = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
    linears = swap_experts(model, "bfloat16")
    assert sorted(linears.layers) == [
        f"model.layers.{k}.mlp.experts.{own}"
        for k in (0, 1)
        for own in ("down_proj", "gate_up_proj")
    ]
    assert {name: tensor.data_ptr() for name, tensor in model.state_dict().items()} == before
    assert [name for name, _ in model.named_parameters()] == [
        name for name, _ in plain.named_parameters()
    ]
    assert (
        model.config._experts_implementation
        == plain.config._experts_implementation
        != IMPLEMENTATION
    )
    losses = []
    for each in (model, plain):
        out = each(TOKENS, labels=TOKENS)
        out.loss.backward()
        losses.append(out.logits)
    # A CPU without bfloat16 products computes transformers' own in another order.
    torch.testing.assert_close(*losses, rtol=2**-7, atol=2**-9)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        # Transformers adds up the gradients of a token's experts in bfloat16.
        assert (ours.grad - theirs.grad).norm() <= 0.01 * theirs.grad.norm()


@pytest.mark.parametrize("row", [FLOAT8, OUTLIERS], **names)
def test_a_token_gets_the_weighted_sum_of_what_its_experts_layers_say(row: Compute) -> None:
    model = mixtral()
    experts = model.model.layers[0].mlp.experts
    swap_experts(model, row)
    draw = torch.Generator().manual_seed(2)
    chosen = torch.stack(
        [torch.randperm(4, generator=draw)[:2] for _ in range(20)]
    )  # the last two experts get none
    x = torch.randn(20, 32, generator=draw).bfloat16()
    shares = torch.rand(20, 2, generator=draw)
    y = experts(x, chosen, shares)
    sums = torch.zeros(20, 2, 32)
    for expert in range(4):
        token, place = (chosen == expert).nonzero(as_tuple=True)
        layers = nn.ModuleDict()
        for own in ("gate_up_proj", "down_proj"):
            weight = getattr(experts, own).detach()[expert]
            layers[own] = nn.Linear(*weight.shape[::-1], bias=False, dtype=torch.bfloat16)
            layers[own].weight.data.copy_(weight)
        swap_linears(layers, row)
        gate, up = layers["gate_up_proj"](x[token]).chunk(2, -1)
        sums[token, place] = layers["down_proj"](nn.functional.silu(gate) * up).float()
    assert torch.equal(y, (sums * shares[..., None]).sum(1).bfloat16())


def test_experts_that_cannot_be_swapped_are_refused() -> None:
    with pytest.raises(
        RecipeError, match=r"keep=\(\"lm_head\", \"model.layers.0.feed_forward.experts.\*\"\)"
    ):
        swap_experts(
            Llama4ForCausalLM(Llama4TextConfig(**SHAPE, intermediate_size_mlp=48)), "float8-row"
        )
    spread = mixtral()
    spread.model.layers[0].mlp.experts._is_expert_parallel = True
    with pytest.raises(RecipeError, match="expert parallelism"):
        swap_experts(spread, "float8-row")


def test_experts_are_not_stored_as_codes() -> None:
    with pytest.raises(
        RecipeError, match=r"keep = \(\"lm_head\", \"model.layers.0.mlp.experts\"\)"
    ):
        quantize_for_inference(mixtral())
