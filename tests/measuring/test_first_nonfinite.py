"""The first value of a step that is not finite: known failures are put into models, and the right
operation must be named.
"""

from __future__ import annotations

import math
import warnings
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from narrowgauge.matmul.gemm import EmulationNotice
from narrowgauge.matmul.swapping import swap_linears
from narrowgauge.measuring.places import ranked_places
from narrowgauge.spec.computes import COMPUTES

INF = math.inf
NAN = math.nan


class Layer(nn.Module):
    """A named layer that is any function of its input and one parameter."""

    def __init__(
        self, function: Callable[[Tensor, Tensor], Tensor], weight: Tensor | None = None
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4) if weight is None else weight)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.weight)


def chain(**layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(OrderedDict(layers))


def step_of(model: nn.Module, x: Tensor) -> Callable[[], Tensor]:
    def step() -> Tensor:
        loss = model(x).float().sum()
        loss.backward()
        return loss.detach()

    return step


def linears(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return chain(**{name: nn.Linear(8, 8) for name in ("first", "second", "third")}).to(dtype)


def first_of(model: nn.Module, step: Callable[[], Any]) -> str:
    """Return the cause that is printed; empty where every value is finite."""
    readings = ranked_places(model, step)
    begin = "not finite first: "
    causes = [line.removeprefix(begin) for line in readings.lines if line.startswith(begin)]
    assert bool(causes) == ("nonfinite" in [reading.what for reading in readings]), readings
    return "".join(causes)


def test_a_layer_that_overflows_is_named_with_its_operands() -> None:
    model = linears(dtype=torch.float16)
    with torch.no_grad():
        model.second.weight.fill_(2.0**12)
    words = first_of(model, step_of(model, torch.full((2, 8), 64.0).half()))
    assert words.startswith("addmm in Linear")
    assert "made infinity in 16 of 16 values (float16)" in words
    assert "float16 [8, 8]" in words


WAYS: dict[str, tuple[Callable[[Tensor], Tensor], str, str]] = {
    "log": (lambda x: (x - x).log(), "log", "infinity"),
    "zero by zero": (lambda x: (x - x) / (x - x), "div", "NaN"),
    "out": (lambda x: torch.mul(x, 1e39, out=torch.full_like(x, NAN)), "mul", "infinity"),
    "over a NaN": (lambda x: torch.full_like(x, NAN).half().copy_(x * 1e6), "copy_", "infinity"),
    "view": (lambda x: torch.stack([x, x]).mul(1e39).unbind()[0], "mul", "infinity"),
    "list": (lambda x: torch._foreach_mul([x, x * 1e38], 1e3)[1], "_foreach_mul", "infinity"),
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_whatever_way_an_operation_writes(way: str) -> None:
    make, operation, bad_value = WAYS[way]

    def function(x: Tensor, weight: Tensor) -> Tensor:
        with torch.no_grad():
            operand = make(x + 1.5)
        return operand * weight

    model = chain(before=Layer(torch.mul), bad=Layer(function), after=Layer(torch.mul))
    words = first_of(model, step_of(model, torch.ones(3, 4)))
    assert words.startswith(f"{operation} in ") and f"made {bad_value} in" in words


def attention(how: str) -> Callable[[Tensor, Tensor], Tensor]:
    def attend(x: Tensor, weight: Tensor) -> Tensor:
        scores = x * weight @ (x * weight).transpose(-1, -2)
        above = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        if how == "fill":
            scores = scores.masked_fill(above, -INF)
        else:  # transformers' own: in float16 the sum may be -inf
            scores = scores + above.to(scores.dtype) * torch.finfo(scores.dtype).min
        return scores.softmax(-1) @ x

    return attend


@pytest.mark.parametrize("how", ["fill", "minimum"])
def test_a_mask_is_not_blamed(how: str) -> None:
    dtype = torch.float16 if how == "minimum" else torch.float32
    model = chain(attention=Layer(attention(how)), later=Layer(lambda x, w: x / (w - 1))).to(dtype)
    x = -torch.arange(12.0).view(1, 3, 4).to(dtype)
    healthy = chain(attention=model.attention)
    assert first_of(healthy, step_of(healthy, x)) == ""
    assert first_of(model, step_of(model, x)).startswith("div in ")


def test_a_sum_of_micro_batches_that_overflows_is_named() -> None:
    model = chain(only=Layer(torch.mul)).half()

    def step() -> Tensor:
        for _ in range(3):
            loss = model(torch.full((4,), 3e4).half())
            loss.backward(torch.ones_like(loss))
        return loss.sum() / 1e4

    assert first_of(model, step).startswith("add_ in the sum of micro-batches")


def test_a_narrow_layer_names_its_compute_and_what_went_in() -> None:
    model = chain(first=nn.Linear(32, 32), narrow=nn.Linear(32, 32), last=nn.Linear(32, 32)).half()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EmulationNotice)
        swap_linears(model, replace(COMPUTES["float8-row"], dtype="float16"), keep=())
    step = step_of(model, torch.ones(16, 32).half())
    assert first_of(model, step) == ""
    with torch.no_grad():
        model.narrow.weight.fill_(2.0**12)
        model.first.bias.fill_(100.0)
    words = first_of(model, step)
    assert words.startswith("the product in float8-row in ")
    assert " in 512 of 512 values (float16)" in words
