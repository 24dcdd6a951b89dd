"""Smooth-SwiGLU: what a runaway channel costs with and without, in every row; gradients; recipes, runs and inference."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP

import narrowgauge as ng
from narrowgauge.errors import RecipeError
from narrowgauge.matmul.swapping import NarrowLayers, swap_linears
from narrowgauge.numerics.quantization import quantize, smoothing
from narrowgauge.spec import computes
from narrowgauge.spec.computes import COMPUTES
from narrowgauge.transforms.smooth_swiglu import smooth
from narrowgauge.transforms.unit_scaling import unit_scale

pytestmark = pytest.mark.filterwarnings("ignore::narrowgauge.matmul.gemm.EmulationNotice")

CHANNEL = 3
OTHERS = torch.arange(128) != CHANNEL
NARROW = [name for name, row in COMPUTES.items() if not row.is_wide and not row.transform]


def mlp() -> LlamaMLP:
    made = LlamaMLP(LlamaConfig(hidden_size=64, intermediate_size=128)).bfloat16()
    generator = torch.Generator().manual_seed(0)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.1, generator=generator)
    return made


def tokens(seed: int = 0) -> Tensor:
    return torch.randn(128, 64, generator=torch.Generator().manual_seed(seed)).bfloat16()


def run_away(module: LlamaMLP, by: float = 32.0) -> None:
    """One channel of gate and up grows, and so its product a thousand times."""
    with torch.no_grad():
        module.gate_proj.weight[CHANNEL] *= by
        module.up_proj.weight[CHANNEL] *= by


def after_the_jump(compute: str, narrow: str = "*", *, is_smooth: bool = False) -> tuple[float, NarrowLayers]:
    """The output's error relative to the plain formula, in the step in which a channel jumps, after three ordinary ones."""
    module, plain = mlp(), mlp().double()
    if is_smooth:
        smooth(module)
    keep = () if narrow == "*" else ("gate_proj", "up_proj")
    linears = swap_linears(module, compute, keep=keep)
    for step in range(3):
        module(tokens(step))
        linears.step = step + 1
    run_away(module)
    run_away(plain)
    found, wanted = module(tokens(3)).double(), plain(tokens(3).double())
    return ((found - wanted).norm() / wanted.norm()).item(), linears


@pytest.mark.parametrize("narrow", ["down_proj", "*"])
@pytest.mark.parametrize("base", ["float8-delayed", "float8-delayed-e5m2"])
def test_a_channel_that_runs_away_is_lost_to_a_stale_scale_and_kept_smooth(base: str, narrow: str) -> None:
    without, lost = after_the_jump(base, narrow)
    assert without > 0.95
    assert sum(map(sum, lost.overflows(3).values())) > 20
    for with_it, kept in (after_the_jump(f"{base}+smooth", narrow), after_the_jump(base, narrow, is_smooth=True)):
        assert with_it < 0.1
        # The input's and the weight's: neither takes what the other had.
        assert kept.overflows(3)["down_proj"][:2] == [0, 0]


@pytest.mark.parametrize("name", NARROW)
def test_no_other_row_loses_by_it(name: str) -> None:
    without, with_it = after_the_jump(name)[0], after_the_jump(name, is_smooth=True)[0]
    if computes.find(f"{name}+smooth") is None:
        assert with_it == without
    else:
        assert with_it < without * 1.01


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_plain_model_computes_the_same_bits(dtype: torch.dtype) -> None:
    plain = mlp().to(dtype)
    smoothed = copy.deepcopy(plain)
    smooth(smoothed)
    assert list(smoothed.state_dict()) == list(plain.state_dict())
    assert torch.equal(smoothed(tokens().to(dtype)), plain(tokens().to(dtype)))


def test_a_fresh_scale_loses_the_other_channels_and_a_smooth_one_none_of_them() -> None:
    """e4m3 spans 2^-9 … 448: at a ratio of a million, all but the channel that stands out is zero."""
    x, weight = (
        torch.randn(size, 128, generator=torch.Generator().manual_seed(seed)) for size, seed in ((256, 0), (64, 1))
    )
    x[:, CHANNEL] *= 1e6
    wanted = x[:, OTHERS] @ weight[:, OTHERS].t()
    errors = {}
    for name in ("float8-tensor", "float8-tensor+smooth"):
        product = computes.named(name).output
        left, right = quantize(x, product.left).values(), quantize(weight, product.right).values()
        errors[name] = ((left[:, OTHERS] @ right[:, OTHERS].t() - wanted).norm() / wanted.norm()).item()
    assert errors["float8-tensor"] > 0.9
    assert errors["float8-tensor+smooth"] < 0.05


def test_factors_of_every_kind_of_channel() -> None:
    cast = computes.named("float8-tensor+smooth").output.left
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


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_still_shows(bad: float) -> None:
    cast = computes.named("float8-tensor+smooth").output.left
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
    assert quantize(torch.zeros(4, 16), cast).values().eq(0).all()
    x[2, 3] = bad
    assert quantize(x, cast).values().isnan().all()


@pytest.mark.parametrize("by", [1.0, 32.0])
def test_gradients_are_those_of_the_plain_formula(by: float) -> None:
    module, plain = mlp(), mlp().double()
    run_away(module, by)
    run_away(plain, by)
    swap_linears(module, "float8-delayed+smooth")
    results = []
    for each in (module, plain):
        x = tokens().to(each.down_proj.weight.dtype).requires_grad_()
        each(x).backward(tokens(7).to(x.dtype))
        results.append({"x": x.grad, **{name: parameter.grad for name, parameter in each.named_parameters()}})
    for name, wanted in results[1].items():
        assert wanted is not None
        off = ((results[0][name].double() - wanted).norm() / wanted.norm()).item()
        assert off < 0.15, name
    # Of the down projection's weight, every column has its own channel's size: none is lost beside the one that ran away.
    found, wanted = (each["down_proj.weight"].double() for each in results)
    assert ((found - wanted).norm(dim=0) / wanted.norm(dim=0)).max() < 0.25


def test_a_smooth_layer_compiles_to_the_same_bits() -> None:
    torch._dynamo.reset()
    eager = mlp()
    run_away(eager)
    compiled = copy.deepcopy(eager)
    for module in (eager, compiled):
        swap_linears(module, "float8-delayed+smooth")
    compiled.down_proj.compile(fullgraph=True, backend="aot_eager")
    results = []
    for module in (eager, compiled):
        x = torch.randn(96, 128, generator=torch.Generator().manual_seed(5)).bfloat16().requires_grad_()
        y = module.down_proj(x)
        y.square().sum().backward()
        results.append([y, x.grad, module.down_proj.weight.grad])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


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
def test_a_recipe_smooths_down_projections_and_refreshes_every_weight() -> None:
    model, _ = ng.prepare(llama(), "float8-delayed+smooth/word")
    rows = {name: module.compute for name, module in model.named_modules() if hasattr(module, "compute")}
    assert len(rows) == 14
    for name, row in rows.items():
        is_down = name.endswith("down_proj")
        assert row.output.left.smooth == is_down
        assert row.output.left.scaling == ("current" if is_down else "delayed")
        assert row.output.right.scaling == "current" and row.grad_input.left.scaling == "delayed"


@pytest.mark.parametrize("compute", ["int8-outlier-codes", "int8-row", "float8-row"])
def test_a_smooth_model_is_quantized_for_inference_and_generates(compute: str) -> None:
    plain, model = llama(), llama()
    smooth(model)
    swap_linears(model, "float8-delayed")
    wanted, found = (ng.quantize_for_inference(each.bfloat16(), compute) for each in (plain, model))
    prompt = torch.tensor([[1, 5, 9]])
    with torch.no_grad():
        results = [each.generate(prompt, max_new_tokens=4, do_sample=False) for each in (wanted, found)]
    assert torch.equal(*results) and results[0].shape == (1, 7)


def test_a_smooth_model_is_copied_and_pickled() -> None:
    model = llama().bfloat16()
    smooth(model)
    smooth(model)
    swap_linears(model, "float8-delayed")
    smooth(model)
    ids = torch.arange(12).view(1, 12)
    wanted = model(input_ids=ids, use_cache=False).logits
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert other.model.layers[0].mlp.down_proj.compute.output.left.smooth
        assert torch.equal(other(input_ids=ids, use_cache=False).logits, wanted)


def test_experts_are_smoothed_each_by_their_own_tokens() -> None:
    from narrowgauge.matmul.experts import grouped_linear

    x = torch.randn(40, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    weights = torch.randn(2, 16, 32, generator=torch.Generator().manual_seed(1)).bfloat16().requires_grad_()
    x[:, 5] *= 1e5
    y = grouped_linear(x, weights, torch.tensor([15, 40], dtype=torch.int32), "float8-tensor+smooth")
    y.square().sum().backward()
    for expert, part in enumerate((slice(0, 15), slice(15, 40))):
        layer = nn.Sequential(nn.Linear(32, 16, bias=False, dtype=torch.bfloat16))
        with torch.no_grad():
            layer[0].weight.copy_(weights[expert])
        swap_linears(layer, lambda _: computes.named("float8-tensor+smooth"))
        alone = layer(x[part])
        assert torch.equal(y[part], alone)
        alone.square().sum().backward()
        assert torch.equal(weights.grad[expert], layer[0].weight.grad)


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_what_cannot_be_smoothed_says_so(tmp_path: Path) -> None:
    gpt2 = GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=8, bos_token_id=0, eos_token_id=0))
    with pytest.raises(RecipeError, match="there is no LlamaMLP in this GPT2LMHeadModel"):
        smooth(gpt2)
    for refused in (
        lambda: swap_linears(gpt2, "float8-tensor+smooth"),
        lambda: ng.prepare(gpt2, "float8-tensor+smooth"),
    ):
        with pytest.raises(
            RecipeError, match=r"GPT2LMHeadModel has no layer named 'down_proj' among transformer\.h\.0"
        ):
            refused()
    assert type(gpt2.transformer.h[0].mlp.c_proj).__name__ == "Conv1D"
    other = llama()
    unit_scale(other)
    with pytest.raises(RecipeError, match="there is a UnitLlamaMLP"):
        smooth(other)
    with pytest.raises(RecipeError, match=r"'float8-tensor\+smooth' was requested for inference") as error:
        ng.quantize_for_inference(llama(), "float8-tensor+smooth")
    assert "'float8-tensor'" in error.value.advice


def test_a_loss_falls_as_without() -> None:
    """Ten steps of a small model on one batch: smooth and plain float8 learn alike."""
    ids = torch.randint(0, 64, (4, 17), generator=torch.Generator().manual_seed(1))
    losses = {}
    for recipe in ("float8-delayed/word", "float8-delayed+smooth/word"):
        model, optimizer = ng.prepare(llama(), recipe, lr=3e-3)
        for _ in range(10):
            logits = model(input_ids=ids[:, :-1], use_cache=False).logits
            loss = F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses[recipe] = loss.item()
    without, with_it = losses.values()
    assert without < 4.1 and abs(with_it - without) < 0.05
