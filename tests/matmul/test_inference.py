"""Inference from codes: the training layer's own output, within bounds of float64, in a byte a parameter, saved and loaded."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM
from transformers.pytorch_utils import Conv1D

import expectations
from narrowgauge.errors import FormatError, RecipeError
from narrowgauge.matmul import inference, layer_matmuls
from narrowgauge.matmul.inference import (
    QuantizedLinear,
    cast_quantized,
    count_missed_outliers,
    inference_bytes,
    multiply_quantized,
)
from narrowgauge.matmul.outlier_search import find_outlier_columns, missed_outliers
from narrowgauge.matmul.swapping import swap_linears
from narrowgauge.numerics.quantization import padded, quantize
from narrowgauge.spec.computes import COMPUTES, stored_bytes
from oracles.linear import ROUNDING, product
from tensors import same_bits

pytestmark = pytest.mark.filterwarnings("ignore")

SERVED = [name for name, row in expectations.COMPUTES.items() if "served" in row.has and not name.endswith("-e5m2")]
"""The forward of a row with gradients in e5m2 is that of the row without."""
IN, OUT = 168, 40  # whole blocks of neither 32 nor 128
KEEPING = "int8-outlier"


def quantize_for_inference(model: nn.Module, row: Any = "int8-outlier-codes", **options: Any) -> Any:
    """The function, with all columns in 16 bits where the row must know which."""
    if row == KEEPING:
        options.setdefault("outlier_columns", "all")
    return inference.quantize_for_inference(model, row, **options)


def holder(dtype: torch.dtype = torch.bfloat16, bias: bool = True) -> nn.ModuleDict:
    torch.manual_seed(0)
    return nn.ModuleDict({"fc": nn.Linear(IN, OUT, bias=bias, dtype=dtype)})


def inputs(*shape: int, outliers: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(*shape, IN, generator=draw)
    x[..., 5 : 5 + outliers] *= 60
    return x.to(dtype)


def tiny_llama(seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    shape = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 88, "num_hidden_layers": 2}
    config = LlamaConfig(**shape, num_attention_heads=2, num_key_value_heads=1, initializer_range=0.15)
    return LlamaForCausalLM(config).bfloat16().eval()


def tokens() -> Tensor:
    return torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("row", SERVED)
def test_the_output_is_that_of_the_layer_in_training(row: str, dtype: torch.dtype) -> None:
    trained, model = holder(dtype), holder(dtype)
    swap_linears(trained, row)
    quantize_for_inference(model, row)
    x = inputs(3, 7, dtype=dtype, outliers=6 if dtype == torch.bfloat16 or row != KEEPING else 0)
    y = model["fc"](x)
    assert y.dtype == dtype and torch.equal(y, trained["fc"](x))
    quantize_for_inference(trained, row)  # a narrow layer is taken as a plain one is
    assert torch.equal(trained["fc"](x), y)


@pytest.mark.parametrize("row", SERVED)
@pytest.mark.parametrize("outliers", [0, 6])
def test_the_output_is_the_product_of_what_the_codes_stand_for(row: str, outliers: int) -> None:
    model = quantize_for_inference(holder(bias=False), row)["fc"]
    x, matmul = inputs(33, outliers=outliers), COMPUTES[row].output
    scales = model.weight_scales.double()
    if matmul.right.block is not None:
        sides = matmul.right.block
        scales = scales.repeat_interleave(sides[0], 0).repeat_interleave(sides[1], 1)[:OUT, :IN]
    weight = model.weight_codes.double() * scales
    columns = torch.zeros(IN, dtype=torch.bool)
    if matmul.left.outliers:
        columns = (x.abs() >= matmul.left.outliers).any(0)
        assert columns.sum() == outliers
    left = quantize(padded(torch.where(columns, 0, x), matmul.left, 1), matmul.left)
    values = left.operand().double() if left.outer is None else left.operand().double() * left.outer.double()
    main = product(values[:, :IN], weight)
    # Scaled and rounded; emulated, the sum was rounded before the scales.
    steps = [2.0**-24] * 3 + [ROUNDING[torch.bfloat16]]
    allowed = main.off(matmul.bound(IN), steps if "int8" in row else [ROUNDING[torch.bfloat16], *steps])
    met = holder(bias=False)["fc"].weight.detach() if row == KEEPING else weight
    thin = product(x[:, columns], met[:, columns].bfloat16())
    exact = main.value + thin.value
    if columns.any():
        allowed += thin.off(IN * 2.0**-23, []) + ROUNDING[torch.bfloat16] * (exact.abs() + allowed)
    assert ((model(x).double() - exact).abs() <= allowed).all()


def test_outlier_features_cost_int8_its_precision_and_the_outlier_row_nothing() -> None:
    x = inputs(64, outliers=6, dtype=torch.float32)
    usual = (x.abs() < 6).all(0)
    assert (~usual).sum() == 6

    def error(row: str) -> float:
        """What is off, as a share of what all other features add up to."""
        model = quantize_for_inference(holder(torch.float32, bias=False), row)["fc"]
        weight = model.dequantize().double()
        off = model(x).double() - x.double() @ weight.t()
        return (off.norm() / (x[:, usual].double() @ weight[:, usual].t()).norm()).item()

    assert error("int8-outlier") < 0.01 and error("int8-row") > 0.2


def test_a_parameter_takes_a_byte_and_a_row_four() -> None:
    model = tiny_llama()
    linears = [each for name, each in model.named_modules() if type(each) is nn.Linear and name != "lm_head"]
    num_weights = sum(each.weight.numel() for each in linears)
    num_rows = sum(each.out_features for each in linears)
    others = sum(own.nbytes for own in model.parameters()) - 2 * num_weights
    others += sum(own.nbytes for own in model.buffers())
    old = [StorageWeakRef(each.weight.untyped_storage()) for each in linears]
    assert inference_bytes(model) == (others + 2 * num_weights,) * 2
    assert quantize_for_inference(model) is model and not model.training
    assert all(storage.expired() for storage in old)
    after = {own.data_ptr(): own.untyped_storage().nbytes() for own in (*model.parameters(), *model.buffers())}
    assert sum(after.values()) == others + num_weights + 4 * num_rows
    assert inference_bytes(model) == (others + 2 * num_weights, others + num_weights + 4 * num_rows)
    assert [type(each) for each in linears] == [QuantizedLinear] * 14 and type(model.lm_head) is nn.Linear


@pytest.mark.parametrize(("row", "allowed"), [("int8-outlier", 0.05), ("float8-row", 0.2), ("mxfp8", 0.2)])
def test_logits_of_a_llama_stay_close_and_it_generates(row: str, allowed: float) -> None:
    plain, model = tiny_llama(), quantize_for_inference(tiny_llama(), row)
    with torch.no_grad():
        exact, found = plain(tokens()).logits, model(tokens()).logits
    assert 0 < (found - exact).norm() / exact.norm() < allowed
    text = model.generate(tokens(), max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert text.shape == (2, 16)


@pytest.mark.parametrize("row", SERVED)
def test_saved_and_loaded_it_gives_the_same_bits(row: str, tmp_path: Path) -> None:
    model = quantize_for_inference(tiny_llama(), row)
    state = model.state_dict()
    own = {name.rpartition(".")[2] for name in state if "q_proj" in name}
    kept = {"outlier_columns", "outlier_weights"} if row == KEEPING else set()
    assert own == {"weight_codes", "weight_scales"} | kept and not any(name[-12:] == "_proj.weight" for name in state)
    save_file(state, tmp_path / "model.safetensors")
    other = quantize_for_inference(tiny_llama(seed=1), row)
    with torch.no_grad():
        assert not torch.equal(other(tokens()).logits, model(tokens()).logits)
        other.load_state_dict(load_file(tmp_path / "model.safetensors"))
        assert torch.equal(other(tokens()).logits, model(tokens()).logits)


def test_a_model_without_memory_takes_saved_codes() -> None:
    source = quantize_for_inference(holder())
    with torch.device("meta"):
        empty = nn.ModuleDict({"fc": nn.Linear(IN, OUT, dtype=torch.bfloat16)})
    quantize_for_inference(empty)
    empty.load_state_dict(source.state_dict(), assign=True)
    x = inputs(4)
    assert torch.equal(empty["fc"](x), source["fc"](x))


def test_codes_of_another_row_are_not_taken_for_numbers() -> None:
    saved = quantize_for_inference(holder(), "float8-row").state_dict()
    with pytest.raises(
        FormatError, match=r"saved in torch.float8_e4m3fn, and a layer quantized as 'int8-row' stores torch.int8"
    ):
        quantize_for_inference(holder(), "int8-row").load_state_dict(saved)


@pytest.mark.parametrize("row", ["int8-outlier", "float8-row", "mxfp8"])
def test_a_change_of_dtype_leaves_codes_and_scales_alone(row: str) -> None:
    model = quantize_for_inference(holder(), row)["fc"]
    before, bias = (model.weight_codes.clone(), model.weight_scales.clone()), model.bias.clone()
    model.half().float()
    after = (model.weight_codes, model.weight_scales)
    for one, other in zip(before, after, strict=True):
        assert same_bits(one, other)
    assert model.bias.dtype == torch.float32 and torch.equal(model.bias, bias.float())


@pytest.mark.parametrize("compiled", [False, True])
def test_backward_is_refused_where_it_comes_to_the_layer_and_not_before(compiled: bool) -> None:
    model = nn.Sequential(nn.Linear(8, IN, dtype=torch.bfloat16), holder(bias=False)["fc"])
    quantize_for_inference(model, keep=("0",))
    torch._dynamo.reset()
    run = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
    y = run(torch.ones(2, 8, dtype=torch.bfloat16))
    assert y.requires_grad
    with pytest.raises(RecipeError, match=r"no gradients.*torch.no_grad"):
        y.sum().backward()


def test_a_bias_learns_nothing_either() -> None:
    y = quantize_for_inference(holder())["fc"](inputs(3))
    with pytest.raises(RecipeError, match="no gradients"):
        y.sum().backward()


@pytest.mark.parametrize("shape", [(), (0,), (1,), (2, 3, 4)])
@pytest.mark.parametrize("row", ["int8-outlier", "float8-block"])
def test_any_leading_shape(row: str, shape: tuple[int, ...]) -> None:
    model, x = quantize_for_inference(holder(), row)["fc"], inputs(*shape, outliers=3)
    y = model(x)
    assert y.shape == (*shape, OUT)
    assert torch.equal(y.reshape(-1, OUT), model(x.reshape(-1, IN)))
    with torch.inference_mode():
        assert torch.equal(model(x * 1), y)


def test_a_token_is_on_its_own_but_for_outliers() -> None:
    x = inputs(8)
    alone = quantize_for_inference(holder(), "int8-row")["fc"]
    assert torch.equal(alone(x)[:3], alone(x[:3]))
    together = quantize_for_inference(holder(), "int8-outlier")["fc"]
    x[7, :50] = 7.0
    assert not torch.equal(together(x)[:3], together(x[:3]))


def test_conv1d_and_gpt2() -> None:
    linear, turned = holder()["fc"], Conv1D(OUT, IN).bfloat16()
    with torch.no_grad():
        turned.weight.copy_(linear.weight.t())
        turned.bias.copy_(linear.bias)
    x = inputs(5, outliers=2)
    expected = quantize_for_inference(nn.ModuleDict({"fc": linear}))["fc"](x)
    assert torch.equal(quantize_for_inference(turned)(x), expected)
    torch.manual_seed(0)
    plain = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2)).bfloat16().eval()
    model = quantize_for_inference(copy.deepcopy(plain))
    with torch.no_grad():
        exact = plain(tokens()).logits
        assert 0 < (model(tokens()).logits - exact).norm() < 0.02 * exact.norm()
    assert model.generate(tokens(), max_new_tokens=2, do_sample=False, pad_token_id=0).shape == (2, 14)


def test_compiled_without_a_break_whatever_the_number_of_outliers() -> None:
    model = quantize_for_inference(nn.Sequential(holder()["fc"], nn.Linear(OUT, 8, dtype=torch.bfloat16)))
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        compiled(inputs(6))
        for outliers in (0, 1, 6):
            x = inputs(6, outliers=outliers)
            with torch._dynamo.config.patch(error_on_recompile=True):
                assert torch.equal(compiled(x), model(x))


@pytest.mark.parametrize("row", SERVED)
def test_the_operators_say_their_shapes_truly(row: str) -> None:
    layer, x = quantize_for_inference(holder(), row)["fc"], inputs(3, outliers=2)
    # PyTorch compares no float8 tensors before and after.
    checks = {"test_utils": ("test_schema", "test_faketensor") if "int8" in row else ("test_faketensor",)}
    torch.library.opcheck(cast_quantized, (x, row), **checks)
    weight = (layer.weight_codes, layer.weight_scales, layer.bias.detach())
    kept = layer.kept[:2] if row == KEEPING else ()
    torch.library.opcheck(multiply_quantized, (*cast_quantized(x, row), x, *weight, row, *kept), **checks)
    if kept:
        torch.library.opcheck(count_missed_outliers, (layer.missed.clone(), x, kept[0], row))


def test_tied_weights_are_quantized_once_and_an_embedding_keeps_its_own() -> None:
    model = nn.ModuleDict({"a": nn.Linear(16, 16, bias=False), "b": nn.Linear(16, 16, bias=False)})
    model["b"].weight = model["a"].weight
    quantize_for_inference(model)
    assert model["a"].weight_codes is model["b"].weight_codes
    assert inference_bytes(model) == (1024, 256 + 64)
    tied = nn.ModuleDict({"embed": nn.Embedding(16, 16), "head": nn.Linear(16, 16, bias=False)})
    tied["head"].weight = tied["embed"].weight
    quantize_for_inference(tied)
    assert inference_bytes(tied) == (1024, 1024 + 256 + 64)


def test_copies_pickles_and_hooks_hold() -> None:
    plain, seen = holder(), []
    plain["fc"].register_forward_hook(lambda *_: seen.append(1))
    model, x = quantize_for_inference(plain), inputs(4, outliers=1)
    y = model["fc"](x)
    assert seen and torch.equal(copy.deepcopy(model)["fc"](x), y)
    unhooked = quantize_for_inference(holder())
    assert torch.equal(pickle.loads(pickle.dumps(unhooked))["fc"](x), y)


@pytest.mark.parametrize("row", ["int8-row", "float8-row", "mxfp8"])
def test_what_is_not_a_number_stays_visible(row: str) -> None:
    plain = holder()
    with torch.no_grad():
        plain["fc"].weight[3, 4] = torch.nan
    x = inputs(4)
    y = quantize_for_inference(plain, row)["fc"](x)
    assert y[:, 3].isnan().all() and not y[:, :3].isnan().any()
    x[1, 0] = torch.inf
    assert quantize_for_inference(holder(), row)["fc"](x)[1].isnan().all()


def test_what_cannot_be_served_is_refused() -> None:
    for row in (name for name, wanted in expectations.COMPUTES.items() if "served" not in wanted.has):
        with pytest.raises(RecipeError, match=rf"'{row}' was requested for inference.*Use one of .*int8-outlier"):
            quantize_for_inference(holder(), COMPUTES[row])
    with pytest.raises(RecipeError, match="no compute is named 'int7'"):
        quantize_for_inference(holder(), "int7")
    with pytest.raises(RecipeError, match="no linear layer"):
        quantize_for_inference(holder(), keep=("fc",))
    shape = {
        "vocab_size": 16,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_local_experts": 2,
    }
    mixture = MixtralForCausalLM(MixtralConfig(**shape, num_attention_heads=2, num_key_value_heads=2))
    mixture.model.layers[0].mlp.experts._is_expert_parallel = True
    with pytest.raises(RecipeError, match=r"experts.* are sharded by expert parallelism"):
        quantize_for_inference(mixture)
    assert type(mixture.model.layers[0].self_attn.q_proj) is nn.Linear
    quantize_for_inference(mixture, keep=("lm_head", "*.experts"))
    assert type(mixture.model.layers[0].self_attn.q_proj) is QuantizedLinear


def test_a_row_of_ones_own_is_served_by_its_name() -> None:
    own = replace(COMPUTES["int8-outlier-codes"], name="mine")
    own = replace(own, output=replace(own.output, left=replace(own.output.left, outliers=3.0)))
    x = inputs(6)
    model = quantize_for_inference(holder(), own)["fc"]
    assert layer_matmuls.REGISTERED["mine"] is own
    assert not torch.equal(model(x), quantize_for_inference(holder())["fc"](x))


# ── weights of outlier columns in 16 bits ───────────────────────────────────────────────────────────────────────────────


def kept(columns: list[int], dtype: torch.dtype = torch.bfloat16, row: str = KEEPING) -> Any:
    """The layer with some columns in 16 bits."""
    return quantize_for_inference(holder(dtype), row, outlier_columns={"fc": columns})["fc"]


def test_columns_that_were_kept_are_in_16_bits_others_come_from_codes_and_are_counted() -> None:
    x, weight = inputs(9, outliers=6), holder()["fc"].weight.detach()
    by_codes = quantize_for_inference(holder())["fc"]
    rounded = by_codes.dequantize()
    model = kept([10, 5, 6, 100, 5])  # of 5 … 10, which hold the outliers; 100 does not
    assert model.outlier_columns.tolist() == [5, 6, 10, 100]
    assert same_bits(model.outlier_weights, weight[:, [5, 6, 10, 100]])
    met = rounded.bfloat16()
    met[:, [5, 6, 10]] = weight[:, [5, 6, 10]]
    rest = by_codes(torch.where((x.abs() >= 6).any(0), 0, x))
    expected = rest + x[:, 5:11] @ met[:, 5:11].t()
    y = model(x)
    assert (y - expected).abs().max() <= 2**-6 * expected.abs().max()
    exact = rest.double() + x[:, 5:11].double() @ met[:, 5:11].double().t()
    assert ((y.double() - exact).abs() <= 2.0**-8 * exact.abs() + 2.0**-20 * expected.abs().max()).all()
    assert missed_outliers(nn.ModuleDict({"fc": model})) == {"fc": 3}
    model(x[:, :])
    assert int(model.missed) == 6
    assert torch.equal(kept([])(x), by_codes(x)) and torch.equal(kept(list(range(5, 11)))(x), kept(list(range(IN)))(x))


def test_what_is_stored_is_what_the_table_says_to_the_byte() -> None:
    for row in SERVED:
        model = quantize_for_inference(holder(bias=False), row)
        assert inference_bytes(model).after == stored_bytes(COMPUTES[row], OUT, IN, IN if row == KEEPING else 0) + 8 * (
            row == KEEPING
        ), row
    some = nn.ModuleDict({"fc": kept([1, 2, 3])})
    assert inference_bytes(some) == (
        2 * IN * OUT + 2 * OUT,
        stored_bytes(COMPUTES[KEEPING], OUT, IN, 3) + 2 * OUT + 8,
    )


def test_calibration_finds_the_columns_that_the_layers_will_call_outliers() -> None:
    model = tiny_llama()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.input_layernorm.weight[[3, 9]] *= 100
    found = find_outlier_columns(model, [tokens(), {"input_ids": tokens()[:, :5]}], keep=("lm_head", "*.mlp.*"))
    assert len(found) == 8 and not any("mlp" in name or "lm_head" in name for name in found)
    assert found["model.layers.0.self_attn.q_proj"] == found["model.layers.1.self_attn.k_proj"] == [3, 9]
    quantize_for_inference(model, KEEPING, keep=("lm_head", "*.mlp.*"), outlier_columns=found)
    with torch.no_grad():
        model(tokens())
        assert set(missed_outliers(model).values()) == {0} and len(missed_outliers(model)) == 8
    usual, many = (
        find_outlier_columns(tiny_llama(), [tokens()], f"int8-outlier{word}") for word in ("", "+threshold=0.5")
    )
    assert not any(usual.values()) and sum(map(len, many.values())) > 100


def test_a_model_that_keeps_other_columns_takes_the_saved_ones() -> None:
    source, x = kept([5, 7, 9]), inputs(4, outliers=6)
    with torch.device("meta"):
        empty = nn.ModuleDict({"fc": nn.Linear(IN, OUT, dtype=torch.bfloat16)})
    inference.quantize_for_inference(empty, KEEPING)
    empty["fc"].load_state_dict(source.state_dict(), assign=True)
    other = kept([1])
    other.load_state_dict(source.state_dict())
    y = source(x)
    for loaded in (empty["fc"], other):
        assert torch.equal(loaded(x), y) and int(loaded.missed) == 3
        assert loaded.outlier_columns.tolist() == [5, 7, 9]
    assert torch.equal(pickle.loads(pickle.dumps(source))(x), y) and torch.equal(copy.deepcopy(source)(x), y)


def test_compiled_it_counts_what_is_missed_too() -> None:
    model, x = kept([5]), inputs(6, outliers=3)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        y = compiled(x)
        assert int(model.missed) == 2 and torch.equal(y, model(x)) and int(model.missed) == 4
    assert compiled(x).requires_grad and int(model.missed) == 6


def test_a_change_of_dtype_leaves_the_kept_weights_alone() -> None:
    model = kept([5, 6], torch.float32)
    before = model.outlier_weights.clone()
    assert before.dtype == torch.bfloat16
    model.half().float()
    assert same_bits(model.outlier_weights, before) and model.outlier_columns.dtype == torch.int32
    model.load_state_dict(kept([5, 6]).state_dict(), strict=False)
    assert same_bits(model.outlier_weights, before)


@pytest.mark.parametrize(
    ("row", "columns", "message"),
    [
        (KEEPING, None, r"keeps the weights of outlier columns in 16 bits.*find_outlier_columns"),
        (KEEPING, "most", r"outlier_columns = 'most'.*It is 'all'"),
        (KEEPING, {"fd": [1]}, r"'fd', which is not quantized.*'fc'"),
        (KEEPING, {"fc": [IN]}, rf"'fc' has {IN} columns, and outlier column {IN} was given"),
        (KEEPING, {"fc": [-1]}, r"outlier column -1"),
        ("int8-outlier-codes", {"fc": [1]}, r"stores no weights in 16 bits"),
        ("int8-row", "all", r"stores no weights in 16 bits"),
    ],
)
def test_outlier_columns_that_make_no_sense_are_refused(row: str, columns: Any, message: str) -> None:
    plain = holder()
    with pytest.raises(RecipeError, match=message):
        inference.quantize_for_inference(plain, row, outlier_columns=columns)
    assert type(plain["fc"]) is nn.Linear


def test_calibration_without_outliers_or_batches_is_refused() -> None:
    with pytest.raises(RecipeError, match="'float8-row' separates no outliers"):
        find_outlier_columns(holder(), [inputs(2)], "float8-row")
    with pytest.raises(RecipeError, match="no batch"):
        find_outlier_columns(holder(), [])
