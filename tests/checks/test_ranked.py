"""The ranked list of places: loops with one place that must not be rounded, beside their right
twins.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import narrowgauge as ng
from narrowgauge.checks.shadow import Shadow, eager
from narrowgauge.transforms.scalify import scalify

B16 = torch.bfloat16


class Loop(NamedTuple):
    """A model, the loss of a micro-batch, the micro-batches, and the line that is to be named."""

    model: nn.Module
    loss: Callable[[nn.Module, Any], Tensor]
    parts: list[Any]
    line: str


class Turned(nn.Module):
    def __init__(self, angles: Callable[[int], Tensor]) -> None:
        super().__init__()
        self.angles = angles
        self.emb, self.qk, self.v = nn.Embedding(64, 32), nn.Linear(32, 64), nn.Linear(32, 32)
        self.head = nn.Linear(32, 64)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.emb(tokens)
        angles = self.angles(x.shape[1])
        turned = []
        for y in self.qk(x).float().chunk(2, -1):
            a, b = y.chunk(2, -1)
            parts = a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()
            turned.append(torch.cat(parts, -1).to(B16) * 4)
        y = F.scaled_dot_product_attention(turned[0], turned[1], self.v(x).to(B16), is_causal=True)
        return self.head(x + y)


def network(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def next_token(model: nn.Module, tokens: Tensor) -> Tensor:
    with torch.autocast("cpu", B16):
        logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


TOKENS = [torch.randint(0, 64, (2, 512), generator=torch.Generator().manual_seed(1))]


def rows(number: int, width: int) -> list[Tensor]:
    return list(torch.randn(number, 8, width, generator=torch.Generator().manual_seed(3)) + 1)


def rotary(right: bool) -> Loop:
    def angles(length: int) -> Tensor:
        places = torch.arange(length).float()[:, None]
        frequencies = 0.7 ** torch.arange(16)[None]
        return places * frequencies if right else places @ frequencies  # autocast: in bfloat16

    return Loop(Turned(angles), next_token, TOKENS, "rotary.angles")


def positions(right: bool) -> Loop:
    def angles(length: int) -> Tensor:
        places = torch.arange(length, dtype=torch.float32 if right else B16).float()
        return places[:, None] * 0.7 ** torch.arange(16)[None]

    return Loop(Turned(angles), next_token, TOKENS, "positions.angles")


def counted(right: bool) -> Loop:
    def loss(model: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", B16):
            y = model(x)
        total = torch.zeros((), dtype=torch.float32 if right else B16)
        for _ in range(len(x)):
            total = total + 7
        return y.float().square().sum() / total.float()

    return Loop(network(32, 64, 32), loss, [torch.cat(rows(16, 32))], "counted.loss")


LOOPS = [rotary, positions, counted]  # the corpus has narrow sums and gradients of logits


def step_of(loop: Loop) -> Callable[[], None]:
    def step() -> None:
        for part in loop.parts:
            (loop.loss(loop.model, part) / len(loop.parts)).backward()

    return step


@pytest.mark.parametrize("make", LOOPS)
def test_the_place_that_must_not_be_rounded_comes_first(make: Callable[[bool], Loop]) -> None:
    torch.manual_seed(0)
    loop = make(False)
    ranked = ng.ranked_places(loop.model, step_of(loop))
    (reading,) = ranked.readings()
    assert reading.what == "rounding" and ranked.places[0].is_unusual
    assert loop.line in str(ranked.places[0].site), ranked
    assert ranked.places[0].left < ranked.places[0].alone / 2
    assert loop.line in reading.advice


@pytest.mark.parametrize("make", LOOPS)
def test_a_right_twin_is_not_marked(make: Callable[[bool], Loop]) -> None:
    torch.manual_seed(0)
    loop = make(True)
    ranked = ng.ranked_places(loop.model, step_of(loop))
    assert not ranked.readings(), ranked
    assert not any(place.is_unusual for place in ranked.places), ranked


def test_the_shadow_of_a_narrow_model_is_the_gradient_of_its_float32_copy() -> None:
    torch.manual_seed(0)
    model = network(32, 64, 32).to(B16)
    x = torch.randn(8, 32).to(B16)
    twin = network(32, 64, 32)
    twin.load_state_dict(model.state_dict())
    with eager(), Shadow() as mode:
        (model(x).float() - 1).square().mean().backward()
    (twin(x.float()) - 1).square().mean().backward()
    for p, exact in zip(model.parameters(), twin.parameters(), strict=True):
        length = exact.grad.norm()
        assert (mode.of(p.grad) - exact.grad).norm() <= 1e-6 * length
        assert (p.grad.float() - exact.grad).norm() >= 1e-4 * length


def test_a_gradient_behind_codes_is_not_followed() -> None:
    torch.manual_seed(0)
    model = network(16, 32, 4).to(B16)

    class Coded(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return (x.float() * 16).round().to(torch.int8).to(B16) / 16

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad

    def loss(model: Any, x: Tensor) -> Tensor:
        return model[2](Coded.apply(model[1](model[0](x)))).float().square().mean()

    x = torch.randn(64, 16).to(B16)
    result = ng.check(model, torch.optim.SGD(model.parameters(), lr=0.1), batch=x, loss=loss)
    assert any(line.startswith("  not followed through _to_copy: ") for line in result.lines), (
        result
    )
    assert not [r for r in result if r.what == "gradient"], result


def test_a_scaled_model_has_its_own_lines_and_usual_roundings() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(8, 16), nn.LayerNorm(16), nn.Linear(16, 8)).bfloat16()
    scalify(model)
    tokens = torch.arange(8)[None]

    def step() -> None:
        logits = model(tokens).float().flatten(0, 1)
        F.cross_entropy(logits, tokens.flatten()).backward()

    with Shadow(measures=True) as mode:
        step()
    lines = {site.line for site, _ in mode.errs}
    assert lines and not any("scal" in line.partition("(")[2] for line in lines), lines
    ranked = ng.ranked_places(model, step)
    assert 0 < ranked.roundings < 3 and not ranked.readings(), ranked
