"""Small steps whose shadow is known: what it follows, what it names, and what it leaves as it was."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import narrowgauge as ng
from narrowgauge.checks.shadow import Shadow, eager


class Fake(nn.Linear):
    """Own float8 fake quantization with a straight-through estimator; ``factor`` puts the scale wrong."""

    factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        def cast(v: Tensor) -> Tensor:
            scale = self.factor * 448 / v.detach().abs().amax()
            return v + ((v * scale).to(torch.float8_e4m3fn).to(v.dtype) / scale - v).detach()

        return functional.linear(cast(x), cast(self.weight), self.bias)


class Model(nn.Module):
    def __init__(self, linear: type[nn.Linear] = nn.Linear) -> None:
        super().__init__()
        self.first, self.second = linear(16, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x).float() - 1).square().mean()


def asked(model: nn.Module, batch: Any = None, loss: Any = loss_of, backward: Any = None) -> Any:
    torch.manual_seed(0)
    if batch is None:
        batch = torch.randn(64, 16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return ng.check(model, optimizer, batch=batch, loss=loss, backward=backward)


def kinds(readings: Any) -> set[str]:
    """Return the kinds of readings of the gradient that are no notes."""
    return {r.what for r in readings if r.stage == "gradient" and r.severity != "note"}


def test_a_cast_beyond_its_range_is_named_with_its_line() -> None:
    torch.manual_seed(0)

    class Wrong(Fake):
        factor = 1 / 3e5

    (reading,) = [r for r in asked(Model(Wrong)) if r.what == "rounding"]
    assert "roundings of float8_e4m3fn" in reading.advice and "Fake.forward.cast" in reading.advice


def test_bytes_read_in_another_format_are_named() -> None:
    torch.manual_seed(0)

    class Misread(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            codes = self.weight.detach().to(torch.float8_e5m2).view(torch.float8_e4m3fn).float()
            return functional.linear(x, self.weight + (codes - self.weight).detach(), self.bias)

    readings = asked(Model(Misread))
    assert any("bytes of float8_e5m2 are read as float8_e4m3fn" in r.advice for r in readings)


def test_masks_changed_in_place_change_their_shadow() -> None:
    x = torch.randn(64).bfloat16().requires_grad_()
    with eager(), Shadow() as shadow:
        y = x * 3
        mask = y > -1
        mask &= y < 1
        mask.logical_or_(y > 2)
        (y * mask).sum().backward()
    wide = x.detach().float() * 3
    expected = 3.0 * ((wide > -1) & (wide < 1) | (wide > 2))
    assert torch.equal(shadow.of(x.grad), expected)


def test_the_plain_pass_does_not_call_the_hooks_of_the_loop() -> None:
    """Gradient buffers, as of Megatron, take each gradient away from its parameter."""
    torch.manual_seed(0)
    model = Model()
    buffers = {p: torch.zeros_like(p) for p in model.parameters()}

    def hook(p: Tensor) -> None:
        buffers[p] += p.grad
        p.grad = None

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(hook)

    def backward(model: nn.Module, x: Tensor) -> None:
        for buffer in buffers.values():
            buffer.zero_()
        for part in x.chunk(4):
            (loss_of(model, part) / 4).backward()
        for p in model.parameters():
            p.grad = buffers[p].clone()

    assert not kinds(asked(model, backward=backward))


def test_a_kernel_that_takes_no_wide_operand_is_named() -> None:
    @torch.library.custom_op("narrowgauge_test::twice", mutates_args=())
    def twice(x: Tensor) -> Tensor:
        assert x.dtype is torch.bfloat16
        return x * 2

    twice.register_autograd(lambda ctx, g: g * 2)

    class Own(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return twice(super().forward(x))

    readings = asked(Model(Own).bfloat16(), torch.randn(64, 16).bfloat16())
    assert not kinds(readings)
    assert "twice" in readings.unseen["the slope of the loss"]
    assert any("not followed through twice" in line for line in readings.lines)
    assert "products of a step: 5 in bfloat16" in readings.lines


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
    assert not kinds(readings), readings
    assert any("roundings of float8_e4m3fn" in line for line in readings.lines), readings


def test_nothing_of_the_passes_stays() -> None:
    torch.manual_seed(0)
    model = Model(Fake)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    before = copy.deepcopy(model.state_dict())

    def backward(model: nn.Module, x: Tensor) -> None:
        scaler.scale(loss_of(model, x)).backward()

    assert not kinds(asked(model, backward=backward))
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters()) and scaler.get_scale() == 8.0
