"""The first bad value of a step: known failures are put into models, and the right operation must be named."""

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

from narrowgauge.gauges.nan_origin.tracing import first_bad_value
from narrowgauge.matmul.gemm import EmulationNotice
from narrowgauge.matmul.swapping import swap_linears
from narrowgauge.spec.computes import COMPUTES
from tensors import bits

INF, NAN = math.inf, math.nan


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


def test_a_bad_weight_is_an_input() -> None:
    model = linears()
    with torch.no_grad():
        model.second.weight[3, 5] = NAN
    bad = first_bad_value(model, step_of(model, torch.ones(2, 8)))
    assert bad is not None
    assert (bad.phase, bad.parameter, bad.module, bad.operation) == (
        "input",
        "second.weight",
        "second",
        "aten.addmm",
    )
    assert (bad.what, bad.result.num_nonfinite, bad.result.shape, bad.result.place) == (
        "nan",
        1,
        (8, 8),
        (3, 5),
    )
    assert bad.reached == "the loss"
    assert (
        "second.weight held nan in 1 of 64 values" in bad.message
        and "update that wrote it" in bad.message
    )


def test_a_layer_that_overflows_is_named_with_its_operands() -> None:
    model = linears(dtype=torch.float16)
    with torch.no_grad():
        model.second.weight.fill_(2.0**12)
    bad = first_bad_value(model, step_of(model, torch.full((2, 8), 64.0).half()))
    assert bad is not None and (bad.result.dtype, bad.what) == ("float16", "inf")
    assert (bad.phase, bad.module, bad.operation) == ("forward", "second", "aten.addmm")
    weight = next(operand for operand in bad.operands if operand.name == "second.weight")
    assert (weight.dtype, weight.amin, weight.amax, weight.num_nonfinite) == (
        "float16",
        4096,
        4096,
        0,
    )
    assert (
        "largest finite float16 is 65504" in bad.message
        and "magnitudes 4.1e+03 to 4.1e+03" in bad.message
    )


WAYS: dict[str, tuple[Callable[[Tensor], Tensor], str, str]] = {
    "log": (lambda x: (x - x).log(), "aten.log", "inf"),
    "zero by zero": (lambda x: (x - x) / (x - x), "aten.div", "nan"),
    "out": (lambda x: torch.mul(x, 1e39, out=torch.full_like(x, NAN)), "aten.mul", "inf"),
    "over a NaN": (lambda x: torch.full_like(x, NAN).half().copy_(x * 1e6), "aten.copy_", "inf"),
    "view": (lambda x: torch.stack([x, x]).mul(1e39).unbind()[0], "aten.mul", "inf"),
    "list": (lambda x: torch._foreach_mul([x, x * 1e38], 1e3)[1], "aten._foreach_mul", "inf"),
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_whatever_way_an_operation_writes(way: str) -> None:
    make, operation, what = WAYS[way]

    def function(x: Tensor, weight: Tensor) -> Tensor:
        with torch.no_grad():
            made = make(x + 1.5)
        return made * weight

    model = chain(before=Layer(torch.mul), bad=Layer(function), after=Layer(torch.mul))
    bad = first_bad_value(model, step_of(model, torch.ones(3, 4)))
    assert bad is not None
    assert (bad.phase, bad.module, bad.operation, bad.what) == ("forward", "bad", operation, what)
    assert all(operand.num_nonfinite == 0 for operand in bad.operands)


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
    assert first_bad_value(healthy, step_of(healthy, x)) is None
    bad = first_bad_value(model, step_of(model, x))
    assert bad is not None
    assert (bad.phase, bad.module, bad.operation) == ("forward", "later", "aten.div")


def test_a_root_at_zero_is_bad_in_backward_only() -> None:
    model = chain(
        first=Layer(torch.mul), root=Layer(lambda x, w: ((x - x) * w).sqrt()), last=Layer(torch.mul)
    )
    bad = first_bad_value(model, step_of(model, torch.ones(2, 4)))
    assert bad is not None
    assert (bad.phase, bad.module, bad.operation, bad.what) == (
        "backward",
        "root",
        "aten.div",
        "inf",
    )
    assert bad.reached.startswith("the gradient of ")


def test_a_sum_of_micro_batches_that_overflows_names_its_parameter() -> None:
    model = chain(only=Layer(torch.mul)).half()

    def step() -> Tensor:
        for _ in range(3):
            loss = model(torch.full((4,), 3e4).half())
            loss.backward(torch.ones_like(loss))
        return loss.sum() / 1e4

    bad = first_bad_value(model, step)
    assert bad is not None
    assert (bad.phase, bad.module, bad.operation, bad.parameter) == (
        "backward",
        "only",
        "aten.add_",
        "only.weight",
    )
    assert [operand.amax for operand in bad.operands] == [60000, 30000]
    assert bad.reached == "the gradient of only.weight"


def test_a_narrow_layer_names_its_row_and_what_went_in() -> None:
    model = chain(first=nn.Linear(32, 32), narrow=nn.Linear(32, 32), last=nn.Linear(32, 32)).half()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EmulationNotice)
        swap_linears(model, replace(COMPUTES["float8-row"], dtype="float16"), keep=())
    step = step_of(model, torch.ones(16, 32).half())
    assert first_bad_value(model, step) is None
    with torch.no_grad():
        model.narrow.weight.fill_(2.0**12)
        model.first.bias.fill_(100.0)
    bad = first_bad_value(model, step)
    assert bad is not None
    assert (bad.phase, bad.module) == ("forward", "narrow")
    assert bad.compute == "float8-row" and "Its compute is float8-row" in bad.message


def test_everything_is_put_back() -> None:
    model = chain(
        first=nn.Linear(8, 8), norm=nn.BatchNorm1d(8), drop=nn.Dropout(0.5), last=nn.Linear(8, 8)
    )
    x = torch.randn(4, 8)
    step_of(model, x)()
    with torch.no_grad():
        model.last.bias.grad[0] = NAN  # of the step that failed
    model.first.bias.grad = None

    def state() -> list[Any]:
        tensors = [*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters())]
        return [t if t is None else (id(t), bits(t.reshape(-1)).tolist()) for t in tensors]

    before, seen, values = state(), torch.get_rng_state(), []

    def step() -> Tensor:
        loss = model(x).sum()
        loss.backward()
        values.append((loss.item(), torch.rand(()).item()))
        return loss

    assert first_bad_value(model, step) is None
    assert first_bad_value(model, step) is None
    assert len(values) == 2 and len(set(values)) == 1  # the same dropout each time
    assert torch.equal(torch.get_rng_state(), seen) and state() == before
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert (
        not nn.modules.module._global_forward_hooks
        and not nn.modules.module._global_forward_pre_hooks
    )
