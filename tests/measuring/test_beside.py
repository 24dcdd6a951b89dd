"""Small steps whose shadow is known: what it follows, what it names, and what it leaves as it was."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import narrowgauge as ng
from narrowgauge.measuring.beside import Beside
from narrowgauge.measuring.passes import Passes
from narrowgauge.measuring.policies.wide import Wide


class Model(nn.Module):
    def __init__(self, linear: type[nn.Linear]) -> None:
        super().__init__()
        self.first, self.second = linear(16, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x).float() - 1).square().mean()


def asked(model: nn.Module) -> Any:
    batch = torch.randn(64, 16).to(next(model.parameters()).dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, betas=(0.9, 0.95), weight_decay=0)
    return ng.check(model, optimizer, batch=batch, loss=loss_of)


def language_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(64, 32), nn.Linear(32, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 64)
    )


def next_token(model: nn.Module, tokens: Tensor) -> Tensor:
    logits = model(tokens[:, :-1]).flatten(0, 1)
    return functional.cross_entropy(logits, tokens[:, 1:].flatten())


def test_shadows_of_narrow_weights_have_the_bits_of_a_float64_model() -> None:
    model = language_model().bfloat16()
    exact = copy.deepcopy(model).double()
    tokens = torch.randint(0, 64, (8, 17), generator=torch.Generator().manual_seed(0))
    leaves = dict(model.named_parameters())
    passes = Passes(model, leaves, [tokens], next_token)
    shadows = passes.run(passes.step, Wide()).shadows
    next_token(exact, tokens).backward()
    for name, p in exact.named_parameters():
        assert torch.equal(p.grad, shadows[name]), name


def test_masks_changed_in_place_change_their_shadow() -> None:
    x = torch.randn(64).bfloat16().requires_grad_()
    wide = Wide()
    with Beside(wide):
        y = x * 3
        mask = y > -1
        mask &= y < 1
        mask.logical_or_(y > 2)
        (y * mask).sum().backward()
    exact = x.detach().double() * 3
    expected = 3.0 * ((exact > -1) & (exact < 1) | (exact > 2))
    assert torch.equal(wide.of(x.grad), expected)


class Cast(Tensor):
    """A tensor subclass that holds float8 codes and their scale, as libraries' do."""

    codes: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor) -> Any:
        x = Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)
        x.codes, x.scale = codes, scale
        return x

    def __tensor_flatten__(self) -> Any:
        return ["codes", "scale"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def plain(x: Any) -> Any:
            return x.codes.float() / x.scale if isinstance(x, Cast) else x

        return func(*map(plain, args), **(kwargs or {}))


class ToCast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        scale = 448 / x.detach().abs().amax()
        return Cast((x * scale).to(torch.float8_e4m3fn), scale)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g


def test_a_tensor_subclass_is_followed() -> None:
    class Wrapped(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return functional.linear(ToCast.apply(x), ToCast.apply(self.weight), self.bias)

    torch.manual_seed(0)
    readings = asked(Model(Wrapped))
    assert not len(readings), readings
    assert any("roundings of float8_e4m3fn" in line for line in readings.lines), readings
