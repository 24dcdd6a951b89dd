"""A model on a processor that multiplies float32 alone: the values of its format, by float32 products, and one note."""

from __future__ import annotations

import copy
import os
import pickle
import platform
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import narrowgauge as ng
from covering import whole
from narrowgauge.machine import processor
from narrowgauge.machine.processor import pretending
from narrowgauge.matmul import gemm
from narrowgauge.matmul.gemm import EmulationNotice, describe_matmuls, multiply
from narrowgauge.matmul.linear import Linear
from narrowgauge.matmul.operand import Operand
from narrowgauge.matmul.swapping import swap_linears
from narrowgauge.numerics.widening import widen_attention
from narrowgauge.optim.validation import SlowMatmulNotice
from narrowgauge.spec.computes import COMPUTES
from narrowgauge.trainer.language_model import can_chunk, loss_sum

CPU = torch.device("cpu")
TOKENS = torch.arange(18).reshape(2, 9) % 32


@pytest.fixture
def laptop(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """AVX2 alone, in a process that has not warned yet."""
    monkeypatch.setattr(gemm, "_WARNED", set())
    monkeypatch.setattr(processor, "_cared_for", set())
    with pretending("avx2"):
        yield


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=16,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def of_type(found: list[warnings.WarningMessage], kind: type[Warning]) -> list[str]:
    return [str(each.message) for each in found if issubclass(each.category, kind)]


def test_a_prepared_model_trains_by_float32_products_and_says_so_once(laptop: None) -> None:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        model, optimizer = ng.prepare(llama(), "bfloat16/word", lr=0.01)
        ng.prepare(llama(), "bfloat16/word")
        losses = []
        for _ in range(8):
            loss = loss_sum(model, TOKENS, chunked=False) / 16
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.3
    assert of_type(found, EmulationNotice) == [
        "bfloat16 multiplies bfloat16, which this CPU cannot; it is emulated here by float32 products "
        "(same values, float32's speed)."
    ]
    assert not of_type(found, SlowMatmulNotice)
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    assert all(type(module) is Linear and module.compute.name == "bfloat16" for module in linears) and len(linears) == 8


def test_the_layers_keep_their_contract(laptop: None) -> None:
    layer = nn.Sequential(nn.Linear(8, 4)).bfloat16()
    names = list(layer.state_dict())
    swap_linears(layer, "bfloat16")
    assert isinstance(layer[0], nn.Linear) and list(layer.state_dict()) == names
    x = torch.randn(3, 8).bfloat16()
    wanted = (x.float() @ layer[0].weight.float().t() + layer[0].bias.float()).bfloat16()
    for other in (layer, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(other(x), wanted)


@pytest.mark.parametrize("compute", ["int8-row", "float8-row", lambda name: None if name == "1" else "mxfp8"])
def test_layers_that_are_left_alone_are_taken_too(laptop: None, compute: Any) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).bfloat16()
    linears = swap_linears(model, compute, keep=("1",))
    assert sorted(linears.layers) == ["0"]
    assert type(model[1]) is Linear and model[1].compute is COMPUTES["bfloat16"]
    with pretending("avx512_bf16", "avx512_vnni"):
        other = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).bfloat16()
        swap_linears(other, compute, keep=("1",))
    assert type(other[1]) is nn.Linear


def test_functions_may_return_names() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    linears = swap_linears(model, lambda name: {"0": "int8-row", "1": COMPUTES["float8-row"]}[name])
    assert [layer.compute.name for layer in linears.layers.values()] == ["int8-row", "float8-row"]
    with pytest.raises(ng.errors.RecipeError, match=r"int8-raw.*int8-row"):
        swap_linears(nn.Sequential(nn.Linear(8, 8)), lambda name: "int8-raw")


@pytest.mark.parametrize("shape", [(5, 40, 7), (30, 3000, 20), (1, 2048, 8)])
def test_int8_has_the_bits_of_the_integer_kernel(shape: tuple[int, int, int]) -> None:
    rows, terms, columns = shape
    made = torch.Generator().manual_seed(terms)
    a = Operand(torch.randint(-127, 128, (rows, terms), dtype=torch.int8, generator=made), torch.rand(rows, 1))
    b = Operand(torch.randint(-127, 128, (columns, terms), dtype=torch.int8, generator=made), torch.rand(columns, 1))
    product = COMPUTES["int8-row"].output
    with pretending("avx512_vnni"):
        wanted = multiply(a, b, (1, 1), product, torch.bfloat16)
    with pretending("avx2"):
        assert torch.equal(multiply(a, b, (1, 1), product, torch.bfloat16), wanted)


@pytest.mark.parametrize(
    "recipe", ["int8-row/word", "float8-row/word", "bfloat16/float32", "float32/word", "mxfp8/word"]
)
def test_gradients_are_near_those_of_a_processor_that_multiplies_the_format(laptop: None, recipe: str) -> None:
    def gradients() -> list[Tensor]:
        model, _ = ng.prepare(llama(), recipe, seed=1)
        (loss_sum(model, TOKENS, chunked=False) / 16).backward()
        return [p.grad.float() for p in model.parameters()]

    found = gradients()
    with pretending("avx512_bf16", "avx512_vnni"):
        wanted = gradients()
    for one, other in zip(found, wanted, strict=True):
        assert (one - other).norm() <= 0.1 * other.norm()


def test_attention_is_float32s_rounded_once(laptop: None) -> None:
    widen_attention()
    torch.manual_seed(0)
    narrow = [torch.randn(1, 2, 24, 8).bfloat16().requires_grad_() for _ in range(3)]
    wide = [x.detach().float().requires_grad_() for x in narrow]
    found, wanted = (F.scaled_dot_product_attention(*each, is_causal=True) for each in (narrow, wide))
    assert torch.equal(found, wanted.bfloat16())
    found.backward(torch.ones_like(found)), wanted.backward(torch.ones_like(wanted))
    for one, other in zip(narrow, wide, strict=True):
        assert one.grad is not None and other.grad is not None and one.grad.dtype is torch.bfloat16
        assert (one.grad.float() - other.grad).norm() <= 0.01 * other.grad.norm()


def test_the_head_is_chunked(laptop: None) -> None:
    whole, chunked = (ng.prepare(llama(), "bfloat16/word")[0] for _ in range(2))
    assert can_chunk(chunked)
    one, two = loss_sum(whole, TOKENS, chunked=False), loss_sum(chunked, TOKENS, chunked=True)
    assert abs(one.item() - two.item()) < 1e-3 * one.item()
    one.backward(), two.backward()
    a, b = whole.lm_head.weight.grad.float(), chunked.lm_head.weight.grad.float()
    assert (a - b).norm() < 0.02 * a.norm()


def test_an_optimizer_alone_says_once_where_the_time_goes(laptop: None) -> None:
    def step() -> list[str]:
        weight = nn.Parameter(torch.zeros(4, 4, dtype=torch.bfloat16))
        weight.grad = torch.ones_like(weight)
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            ng.AdamW([weight], lr=0.1, compile=False).step()
        return of_type(found, SlowMatmulNotice)

    with pretending("avx512_bf16"):
        assert step() == []
    (text,) = step()
    assert "narrowgauge.prepare" in text and "swap_linears" in text
    assert step() == []


def test_emulation_by_float32_is_described() -> None:
    with pretending("avx2"):
        assert describe_matmuls(COMPUTES["int8-row"], CPU).endswith(
            "emulated here by float32 products (same values, float32's speed)."
        )
        assert describe_matmuls(COMPUTES["float8-row"], CPU).endswith("emulated here (exact values, no speed-up).")
    with pretending("avx512_bf16", "avx512_vnni"):
        assert describe_matmuls(COMPUTES["bfloat16"], CPU) == "bfloat16 multiplies on this CPU natively."


LAPTOP = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}
SCRIPT = """
import torch, narrowgauge as ng
from torch import nn
from narrowgauge.machine.processor import multiplies
assert torch.backends.cpu.get_cpu_capability() == "AVX2" and not multiplies("bfloat16") and not multiplies("int8")
x, y = torch.randn(64, 32), torch.randint(0, 8, (64,))
for recipe in ("bfloat16/word", "int8-row/word", "float32/exact"):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))
    model, optimizer = ng.prepare(net, recipe, lr=0.01, compile=False)
    losses = []
    for _ in range(20):
        loss = nn.functional.cross_entropy(model(x.bfloat16()).float(), y)
        loss.backward(); optimizer.step(); optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.3, (recipe, losses)
"""


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="oneDNN's limit is one of x86")
def test_under_the_variables_that_make_an_avx2_laptop() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=os.environ | LAPTOP, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]


COMPILED = """
import torch
from narrowgauge._torch.inductor import compile_any_shape
def doubled(x):
    return x * 2 + 1
x = torch.arange(4099.0)
assert torch.equal(compile_any_shape(doubled, "doubled")(x), doubled(x))
"""


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="the variable's values are x86's")
@whole
def test_code_that_was_compiled_for_longer_vectors_is_not_taken_from_the_cache(tmp_path: Path) -> None:
    """Inductor's key does not know ``ATEN_CPU_CAPABILITY``: the second process found the first one's code, and gave NaN."""
    cache = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    own = {name: value for name, value in os.environ.items() if name not in LAPTOP}
    for env in (own | cache, own | LAPTOP | cache):
        done = subprocess.run([sys.executable, "-c", COMPILED], env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
