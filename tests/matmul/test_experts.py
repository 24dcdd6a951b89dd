"""Experts of transformers' mixtures: swapped in place, nothing renamed; they learn, and compute what their layers would."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    GptOssConfig,
    GptOssForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    MixtralConfig,
    MixtralForCausalLM,
)
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from narrowgauge.errors import RecipeError
from narrowgauge.matmul.experts import IMPLEMENTATION, GroupedLinear
from narrowgauge.matmul.swapping import swap_experts, swap_linears
from narrowgauge.spec.computes import COMPUTES

pytestmark = pytest.mark.filterwarnings("ignore")

SHAPE = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 16,
}  # fmt: skip
EXPERTS = "model.layers.0.mlp.experts"


def mixtral(dtype: torch.dtype = torch.bfloat16) -> MixtralForCausalLM:
    torch.manual_seed(0)
    return MixtralForCausalLM(MixtralConfig(**SHAPE)).to(dtype)


def tokens(rows: int = 2) -> Tensor:
    return torch.randint(0, 64, (rows, 24), generator=torch.Generator().manual_seed(1))


def routed(seed: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, the experts of each token (the last two get none), and their weights."""
    draw = torch.Generator().manual_seed(seed)
    chosen = torch.stack([torch.randperm(4, generator=draw)[:2] for _ in range(20)])
    return torch.randn(20, 32, generator=draw).bfloat16(), chosen, torch.rand(20, 2, generator=draw)


def test_names_and_config_stay_and_values_are_transformers_own_where_the_row_is() -> None:
    model, plain = mixtral(), mixtral()
    before = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
    linears = swap_experts(model, "bfloat16")
    assert sorted(linears.layers) == [
        f"model.layers.{k}.mlp.experts.{own}" for k in (0, 1) for own in ("down_proj", "gate_up_proj")
    ]
    assert {name: tensor.data_ptr() for name, tensor in model.state_dict().items()} == before
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]
    assert model.config._experts_implementation == plain.config._experts_implementation != IMPLEMENTATION
    losses = []
    for each in (model, plain):
        out = each(tokens(), labels=tokens())
        out.loss.backward()
        losses.append(out.logits)
    assert torch.equal(*losses)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        # Transformers adds up the gradients of a token's experts in bfloat16.
        assert (ours.grad - theirs.grad).norm() <= 0.01 * theirs.grad.norm()


@pytest.mark.parametrize("row", ["float8-row", "int8-row", "float8-tensor", "int8-outlier"])
def test_a_token_gets_the_weighted_sum_of_what_its_experts_layers_say(row: str) -> None:
    model = mixtral()
    experts, linears = model.model.layers[0].mlp.experts, swap_experts(model, row)
    x, chosen, shares = routed()
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
    assert not linears.layers[f"{EXPERTS}.down_proj"].state[0].any()


def test_a_tiny_mixtral_learns_in_float8() -> None:
    model = mixtral()
    swap_experts(model, "float8-row")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(10):
        loss = model(tokens(), labels=tokens()).loss
        loss.backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.5


def test_experts_with_biases_the_other_way_and_interleaved_are_computed_too() -> None:
    torch.manual_seed(0)
    model = GptOssForCausalLM(GptOssConfig(**SHAPE)).bfloat16()
    experts = model.model.layers[0].mlp.experts
    for name in ("gate_up_proj", "down_proj"):  # transformers leaves them uninitialized and zero
        nn.init.normal_(getattr(experts, name), std=0.2)
        nn.init.normal_(getattr(experts, f"{name}_bias"), std=0.2)
    x, chosen, shares = routed()
    expected = experts(x, chosen, shares)
    swap_experts(model, "bfloat16")
    assert (experts(x, chosen, shares) - expected).norm() < 0.01 * expected.norm()
    swap_experts(model, "mxfp8")
    y = experts(x, chosen, shares)
    assert 0.01 < (y - expected).norm() / expected.norm() < 0.1
    y.sum().backward()
    assert experts.gate_up_proj_bias.grad[:4].any() and not experts.gate_up_proj_bias.grad[4:].any()


def test_what_is_kept_goes_on_as_it_was() -> None:
    model = mixtral()
    first, second = (layer.mlp.experts for layer in model.model.layers)
    linears = swap_experts(model, "float8-row", keep=("model.layers.1.*", "*.down_proj"))
    assert list(linears.layers) == [f"{EXPERTS}.gate_up_proj"]
    assert type(first.narrow["gate_up_proj"]) is GroupedLinear and not hasattr(second, "narrow")
    assert second.config is model.config and first.config is not model.config
    x, chosen, shares = routed()
    both = mixtral()
    swap_experts(both, "float8-row")
    assert not torch.equal(first(x, chosen, shares), both.model.layers[0].mlp.experts(x, chosen, shares))
    assert torch.equal(second(x, chosen, shares), mixtral().model.layers[1].mlp.experts(x, chosen, shares))


def test_another_model_of_the_same_config_is_not_swapped() -> None:
    model = mixtral()
    swap_experts(model, "int8-row")
    assert MixtralForCausalLM(model.config).model.layers[0].mlp.experts.config._experts_implementation != IMPLEMENTATION


def test_the_handle_tells_the_step_and_changes_the_row() -> None:
    model, plain = mixtral(), mixtral()
    linears = swap_experts(model, "int8-row", seed=3)

    def gradient(each: nn.Module) -> Tensor:
        each.zero_grad()
        each(tokens(), labels=tokens()).loss.backward()
        grad = each.model.layers[0].mlp.experts.down_proj.grad
        return grad.clone()

    first = gradient(model)
    assert torch.equal(gradient(model), first)
    torch.optim.SGD(model.parameters(), lr=0.0).step()
    assert linears.step == 1 and not torch.equal(gradient(model), first)
    linears.step = 0
    assert torch.equal(gradient(model), first)
    linears.set_first_sequence(2)
    assert not torch.equal(gradient(model), first)
    linears.set_compute(lambda name: COMPUTES["bfloat16"])
    linears.set_first_sequence(0)
    assert torch.equal(model(tokens()).logits, plain(tokens()).logits)


def test_copies_and_pickles_compute_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    model = mixtral()
    swap_experts(model, "float8-row")
    expected, packed = model(tokens()).logits, pickle.dumps(model)
    assert torch.equal(copy.deepcopy(model)(tokens()).logits, expected)
    monkeypatch.delitem(type(ALL_EXPERTS_FUNCTIONS)._global_mapping, IMPLEMENTATION)  # as in another process
    assert torch.equal(pickle.loads(packed)(tokens()).logits, expected)


def test_compiled_without_a_break_it_gives_the_same_bits() -> None:
    model = mixtral()
    experts = model.model.layers[0].mlp.experts
    swap_experts(model, "int8-row")
    torch._dynamo.reset()
    compiled = torch.compile(experts, fullgraph=True, backend="aot_eager")
    for seed in (2, 3):
        x, chosen, shares = routed(seed)
        found = []
        for run in (experts, compiled):
            y = run(x.requires_grad_(), chosen, shares.requires_grad_())
            found.append((y, *torch.autograd.grad(y.float().square().sum(), (x, shares, *experts.parameters()))))
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_experts_that_cannot_be_swapped_are_refused() -> None:
    with pytest.raises(RecipeError, match="Sequential has no experts"):
        swap_experts(nn.Sequential(nn.Linear(4, 4)), "float8-row")
    with pytest.raises(RecipeError, match=r"keep = \[\"model.layers.0.feed_forward.experts.\*\"\]"):
        swap_experts(Llama4ForCausalLM(Llama4TextConfig(**SHAPE, intermediate_size_mlp=48)), "float8-row")
    spread = mixtral()
    spread.model.layers[0].mlp.experts._is_expert_parallel = True
    with pytest.raises(RecipeError, match="expert parallelism"):
        swap_experts(spread, "float8-row")
