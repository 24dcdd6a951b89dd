"""Inference from codes: the training layer's own output, in a byte a parameter, saved and loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import expectations
from matmul.scenarios import with_threshold
from narrowgauge.errors import RecipeError
from narrowgauge.matmul import inference
from narrowgauge.matmul.inference import find_outlier_columns, inference_bytes, missed_outliers
from narrowgauge.matmul.swapping import swap_linears
from narrowgauge.spec.computes import COMPUTES, stored_bytes
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


@pytest.mark.parametrize("row", ["int8-row", "float8-block", KEEPING])
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
        assert inference_bytes(model) == stored_bytes(COMPUTES[row], OUT, IN, IN if row == KEEPING else 0) + 8 * (
            row == KEEPING
        ), row
    some = nn.ModuleDict({"fc": kept([1, 2, 3])})
    assert inference_bytes(some) == stored_bytes(COMPUTES[KEEPING], OUT, IN, 3) + 2 * OUT + 8


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
        find_outlier_columns(tiny_llama(), [tokens()], compute)
        for compute in ("int8-outlier", with_threshold("int8-outlier", 0.5))
    )
    assert not any(usual.values()) and sum(map(len, many.values())) > 100
