"""A model on a processor that multiplies float32 alone: the values of its format, by float32 products, and one note."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import narrowgauge as ng
from narrowgauge.matmul import gemm
from narrowgauge.matmul.gemm import EmulationNotice
from narrowgauge.matmul.linear import Linear
from narrowgauge.trainer.language_model import loss_sum
from processors import pretending

CPU = torch.device("cpu")
TOKENS = torch.arange(18).reshape(2, 9) % 32


@pytest.fixture
def laptop(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """AVX2 alone, in a process that has not warned yet."""
    monkeypatch.setattr(gemm, "_WARNED", set())
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
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    assert all(type(module) is Linear and module.compute.name == "bfloat16" for module in linears) and len(linears) == 8
