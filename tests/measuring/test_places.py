"""The ranked list of places: a loop with one place that must not be rounded, beside their right
twins.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from narrowgauge.matmul.swapping import swap_linears
from narrowgauge.measuring.places import ranked_places
from narrowgauge.measuring.reading import Readings
from narrowgauge.spec.computes import COMPUTES
from narrowgauge.transforms.scalify import scalify

B16 = torch.bfloat16


class Loop(NamedTuple):
    """A model, the loss of a micro-batch, the micro-batches, and the line that is to be named."""

    model: nn.Module
    loss: Callable[[nn.Module, Any], Tensor]
    parts: list[Any]
    line: str


def network(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def rows(number: int, width: int) -> list[Tensor]:
    return list(torch.randn(number, 8, width, generator=torch.Generator().manual_seed(3)) + 1)


def counted(right: bool) -> Loop:
    def loss(model: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", B16):
            y = model(x)
        total = torch.zeros((), dtype=torch.float32 if right else B16)
        for _ in range(len(x)):
            total = total + 7
        return y.float().square().sum() / total.float()

    return Loop(network(32, 64, 32), loss, [torch.cat(rows(16, 32))], "counted.loss")


def ranked(loop: Loop, *, cleared: bool = False) -> Readings:
    def step() -> None:
        for part in loop.parts:
            (loop.loss(loop.model, part) / len(loop.parts)).backward()
        if cleared:
            loop.model.zero_grad()

    return ranked_places(loop.model, step)


def test_the_place_that_must_not_be_rounded_comes_first() -> None:
    torch.manual_seed(0)
    loop = counted(False)
    result = ranked(loop)
    assert "rounding" in [reading.what for reading in result], result
    assert loop.line in result.lines[1], result
    assert float(result.lines[1].split()[0]) > 0.7


def test_a_right_twin_is_not_marked() -> None:
    torch.manual_seed(0)
    result = ranked(counted(True))
    assert not len(result), result


def test_a_step_that_ends_with_zero_grad_is_seen_as_one_that_does_not() -> None:
    results = []
    for cleared in (False, True):
        torch.manual_seed(0)
        results.append(str(ranked(counted(True), cleared=cleared)))
    assert results[0] == results[1] and "roundings of bfloat16" in results[0]


def test_a_step_without_a_gradient_says_so() -> None:
    model = network(4, 4)
    assert (
        "gradients: none is seen, or none is followed"
        in ranked_places(model, lambda: model(torch.ones(2, 4))).lines
    )


def test_a_scaled_model_has_its_own_lines_and_usual_roundings() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(8, 16), nn.LayerNorm(16), nn.Linear(16, 8)).bfloat16()
    scalify(model)
    tokens = torch.arange(8)[None]

    def step() -> None:
        logits = model(tokens).float().flatten(0, 1)
        F.cross_entropy(logits, tokens.flatten()).backward()

    assert not len(ranked_places(model, step))


def test_a_narrow_layer_that_overflows_is_named_by_its_compute() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32)).half()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        swap_linears(model, replace(COMPUTES["float8-row"], dtype="float16"), keep=())
    x = torch.ones(16, 32).half()
    step = lambda: model(x).float().sum().backward()  # noqa: E731
    assert not len(ranked_places(model, step))
    with torch.no_grad():
        model[1].weight.fill_(2.0**12)
        model[0].bias.fill_(100.0)
    told = str(ranked_places(model, step))
    assert "not finite first: the product in float8-row in " in told
    assert " in 512 of 512 values (float16)" in told
