"""Layers that several threads call share no result: each call returns the product of its own input."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import narrowgauge as ng
from tensors import gaussian

LAYERS = {"trained": ng.swap_linears, "quantized": ng.quantize_for_inference}


@pytest.fixture
def frequent_switches() -> Iterator[None]:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.parametrize("kind", LAYERS)
def test_two_threads_get_the_products_of_their_own_inputs(
    kind: str, frequent_switches: None, one_thread: None
) -> None:
    model = nn.Sequential(nn.Linear(64, 64, bias=False)).bfloat16()
    LAYERS[kind](model, "int8-row")
    inputs = [gaussian(4, 64, seed=1).bfloat16(), 10 * gaussian(4, 64, seed=2).bfloat16()]
    wrong = [0, 0]

    @torch.no_grad()
    def call_often(thread: int, expected: Tensor) -> None:
        for _ in range(1500):
            wrong[thread] += not torch.equal(model(inputs[thread].clone()), expected)

    with torch.no_grad():
        outputs = [model(x) for x in inputs]
    threads = []
    for k in (0, 1):
        threads.append(threading.Thread(target=call_often, args=(k, outputs[k])))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == [0, 0]
