"""Small steps whose shadow is known: what it follows, what it names, and what it leaves as it was."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import narrowgauge as ng
from narrowgauge.measuring.beside import Beside
from narrowgauge.measuring.passes import Passes
from narrowgauge.measuring.policies.wide import Wide


class Fake(nn.Linear):
    """Own float8 fake quantization with a straight-through estimator; ``factor`` puts the scale wrong."""

    factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        def cast(v: Tensor) -> Tensor:
            scale = self.factor * 448 / v.detach().abs().amax()
            clamped = (v * scale).clamp(-448, 448)
            return v + (clamped.to(torch.float8_e4m3fn).to(v.dtype) / scale - v).detach()

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
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0)
    return ng.check(model, optimizer, batch=batch, loss=loss, backward=backward)


def kinds(readings: Any) -> set[str]:
    """Return the kinds of readings of a step that are no notes."""
    return {r.what for r in readings if r.stage != "storage" and r.severity != "note"}


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
    passes = Passes(model, [], leaves, [tokens], tokens, next_token)
    shadows = passes.run(passes.step, Wide()).shadows
    next_token(exact, tokens).backward()
    for name, p in exact.named_parameters():
        assert torch.equal(p.grad, shadows[name]), name


def test_complex_numbers_are_followed() -> None:
    x = torch.randn(8, 4).requires_grad_()
    turns = torch.polar(torch.ones(2), torch.arange(2.0))

    def turned(x: Tensor, turns: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * turns).flatten(-2).square()

    weights = torch.arange(4.0)
    wide = Wide()
    with Beside(wide):
        (turned(x, turns) * weights).sum().backward()
    y = x.detach().double().requires_grad_()
    (turned(y, turns.to(torch.complex128)) * weights.double()).sum().backward()
    assert wide.follows(x.grad) and torch.equal(wide.of(x.grad), y.grad)


def test_a_cast_beyond_its_range_is_named_with_its_line() -> None:
    torch.manual_seed(0)

    class Small(Fake):
        factor = 1 / 3e5

    result = asked(Model(Small))
    assert "cast-range" in kinds(result) and "Fake.forward.cast" in str(result)


@pytest.mark.parametrize("factor", [1.0, 8.0])
def test_values_at_the_end_of_a_format_are_counted_where_a_clamp_hides_them(factor: float) -> None:
    torch.manual_seed(0)

    class Large(Fake):
        pass

    Large.factor = factor
    (reading,) = [r for r in asked(Model(Large)) if r.stage == "forward"] or [None]
    assert (reading is not None) == (factor > 1)
    if reading is not None:
        assert reading.what == "saturation" and reading.value > 1 / 8


def test_a_mask_of_the_least_value_is_no_saturation() -> None:
    torch.manual_seed(0)

    class Hidden(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            mask = torch.full_like(y, torch.finfo(torch.float32).min).triu(16).to(torch.bfloat16)
            return y + (y + mask).softmax(-1)

    assert not kinds(asked(Model(Hidden)))


def test_bytes_read_in_another_format_are_named() -> None:
    torch.manual_seed(0)

    class Misread(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            codes = self.weight.detach().to(torch.float8_e5m2).view(torch.float8_e4m3fn).float()
            return functional.linear(x, self.weight + (codes - self.weight).detach(), self.bias)

    readings = asked(Model(Misread))
    assert "misread-bytes" in kinds(readings) and "Misread.forward" in str(readings)


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
    assert any("not followed through twice" in words for words in readings.unseen.values())


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


class Rounded(nn.Linear):
    """Weights on a grid of integers: without a straight-through gradient the loss has no slope."""

    passes_through = False

    def forward(self, x: Tensor) -> Tensor:
        scale = self.weight.detach().abs().amax() / 7
        weight = (self.weight / scale).round() * scale
        if self.passes_through:
            weight = self.weight + (weight - self.weight).detach()
        return functional.linear(x, weight, self.bias)


class Straight(Rounded):
    passes_through = True


@pytest.mark.parametrize(("linear", "expected"), [(Rounded, {"slope"}), (Straight, set())])
def test_rounding_without_a_gradient_is_told_and_a_straight_through_one_is_not(
    linear: type[nn.Linear], expected: set[str]
) -> None:
    torch.manual_seed(0)
    assert kinds(asked(Model(linear))) == expected


@pytest.mark.parametrize("is_wide", [False, True])
def test_a_loss_in_16_bits_is_told(is_wide: bool) -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, 8).bfloat16()
    batch = torch.randn(4, 8).bfloat16()

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        y = model(x) + 3
        return (y.float() if is_wide else y).square().mean()

    readings = asked(model, batch, loss)
    assert ("loss-rounding" in kinds(readings)) == (not is_wide)
