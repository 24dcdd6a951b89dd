"""A model on a processor that multiplies float32 alone: the values of its format, by float32
products, and one note.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import narrowgauge as ng
from equivalence.ways import llama
from narrowgauge.matmul import gemm
from narrowgauge.matmul.gemm import EmulationNotice
from narrowgauge.matmul.linear import Linear
from narrowgauge.trainer.language_model import loss_sum
from processors import pretending

TOKENS = torch.arange(18).reshape(2, 9) % 32


@pytest.fixture
def laptop() -> Iterator[None]:
    """AVX2 alone, in a process that has not warned yet."""
    gemm.warn_if_emulated.cache_clear()
    with pretending("avx2"):
        yield


def test_a_long_product_of_integers_is_rounded_once(laptop: None) -> None:
    codes = torch.randint(64, 128, (16, 5000), dtype=torch.int8)
    exact = codes.long() @ codes.long().t()
    assert torch.equal(gemm._multiply_integers(codes, codes.t()), exact.float())


def test_a_prepared_model_trains_by_float32_products_and_says_so_once(laptop: None) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model, optimizer = ng.prepare(llama(), "bfloat16/word", lr=0.01)
        ng.prepare(llama(), "bfloat16/word")
        losses = []
        for _ in range(2):
            losses.append(loss_sum(model, TOKENS))
            losses[-1].backward()
            optimizer.step()
    assert losses[1] < losses[0]
    assert [str(warning.message) for warning in caught if warning.category is EmulationNotice] == [
        "bfloat16 multiplies bfloat16, for which there is no kernel on this cpu; it is emulated here with the same "
        "values, and no faster than a plain layer."
    ]
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    assert {type(module) for module in linears} == {Linear} and len(linears) == 15
