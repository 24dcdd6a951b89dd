"""Random low bits: uniform in the cell of each visible weight, which does not change; and what they are for."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import narrowgauge as ng
from narrowgauge.numerics.rounding import float_of
from narrowgauge.optim import codes
from narrowgauge.optim.low_bits import has_low_bits, random_in_cell
from narrowgauge.spec.storages import STORAGES
from optim.pairs import build, everything, parameters
from tensors import assert_same_bits, parameters_of, take_steps

FILLED = [name for name, row in STORAGES.items() if has_low_bits(row)]


@pytest.mark.parametrize("visible", ["bfloat16", "float16"])
def test_every_value_of_the_cell_rounds_to_the_visible_weight(visible: str) -> None:
    """All 16-bit values beside the ends of the random bits, and all random bits beside some values."""
    dtype = getattr(torch, visible)
    values = (
        torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype).float()
    )
    bits = codes.visible_bits(visible, values)
    for random in (0, 1 << 16, 1 << 19, 0x3FFFFFFF, 0x40000000, 0x7FFFFFFF, -(1 << 31), -1):
        new = codes.visible_value(
            visible, random_in_cell(visible, bits, torch.full_like(bits, random))
        )
        rounded = torch.where(values.isfinite(), new.to(torch.float64), values).to(dtype).float()
        # PyTorch rounds ties to even, we away from zero: a value half an ulp away is a tie.
        is_tie = (rounded - new).abs() == (new - values).abs()
        assert bool(((rounded == values) | is_tie | ~values.isfinite()).all())
        assert torch.equal(new[values == 0], values[values == 0])


@pytest.mark.parametrize("value", [1.0, 1.5, -2.0, 0.0172119140625, 2.0**-126])
def test_the_value_is_uniform_in_its_cell(value: float) -> None:
    random = torch.arange(1 << 16, dtype=torch.int32) << 16
    bits = codes.visible_bits("bfloat16", torch.full((1 << 16,), value))
    new = float_of(random_in_cell("bfloat16", bits, random)).double().abs()
    above = torch.finfo(torch.bfloat16).eps * 2.0 ** torch.tensor(abs(value)).log2().floor().item()
    below = (
        above / 2 if torch.tensor(abs(value)).log2() % 1 == 0 and abs(value) > 2.0**-126 else above
    )
    ranks = (new - (abs(value) - below / 2)) / ((above + below) / 2)
    expected = torch.arange(1 << 16, dtype=torch.float64) / (1 << 16)
    assert bool(((ranks.sort().values - expected).abs() < 4 / (1 << 16)).all())


@pytest.mark.parametrize("storage", FILLED)
def test_a_first_step_begins_in_the_cell_and_the_rest_is_as_ever(storage: str) -> None:
    """With a rate of 0 no visible weight changes, and equal weights get different low bits."""
    shapes = [(80, 64), (6, 10), (300,)]
    optimizer = build("adamw", [nn.Parameter(torch.ones_like(p) * 0.3) for p in parameters(storage, shapes)], storage,
                      lr=0.0, low_bits="random")  # fmt: skip
    before = [p.detach().clone() for p in parameters_of(optimizer)]
    take_steps(optimizer, range(1))
    for p, visible in zip(parameters_of(optimizer), before, strict=True):
        assert torch.equal(p, visible)
        stored = optimizer.stored(p)
        assert stored.unique().numel() > min(p.numel() // 3, 60)
        assert bool(
            ((stored - p.float()).abs() <= torch.finfo(p.dtype).eps * p.float().abs()).all()
        )


def test_exact_and_master_begin_alike_and_word_with_their_upper_bits() -> None:
    stored = {}
    for storage in ("exact", "master", "word", "split"):
        optimizer = build("adamw", parameters(storage), storage, lr=0.0, low_bits="random")
        take_steps(optimizer, range(1))
        stored[storage] = optimizer.stored(parameters_of(optimizer)[0])
    assert torch.equal(stored["exact"], stored["master"]) and torch.equal(
        stored["exact"], stored["split"]
    )
    difference = (stored["word"] - stored["exact"]).abs()
    assert bool((difference <= 2.0**-15 * stored["exact"].abs()).all())


@pytest.mark.parametrize("storage", ["word", "compact", "kahan"])
def test_chunks_resumes_and_skipped_steps_change_no_bit(
    storage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"lr": 1e-3, "low_bits": "random", "max_grad_norm": 1e9}
    plain = build("adamw", parameters(storage), storage, **options)
    take_steps(plain, range(3))
    other = build("adamw", parameters(storage), storage, **options)
    for p in parameters_of(other):
        p.grad = torch.full_like(p, torch.nan)
    other.step()
    assert other.num_skipped == 1
    assert all(torch.equal(other.stored(p), p.float()) for p in parameters_of(other))
    monkeypatch.setattr("narrowgauge.numerics.chunks.CHUNK", 24)
    take_steps(other, range(1))
    loaded = build(
        "adamw", [nn.Parameter(p.detach()) for p in parameters_of(other)], storage, lr=1e-3
    )
    loaded.load_state_dict(other.state_dict())
    take_steps(loaded, range(1, 3))
    assert_same_bits(everything(plain), everything(loaded))


def test_own_low_bits_are_kept() -> None:
    stored = []
    for low_bits in ("zero", "random"):
        optimizer = build("adamw", parameters("word"), "word", lr=0.0, low_bits=low_bits)
        optimizer.adopt({p: p.float() * (1 + 2.0**-11) for p in parameters_of(optimizer)})
        take_steps(optimizer, range(1))
        stored.append(
            {name: optimizer.stored(p) for p, name in optimizer.parameter_names().items()}
        )
    assert_same_bits(*stored)


def test_float32_copies_of_a_checkpoint_are_filled_once() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 40), nn.LayerNorm(40)).bfloat16().float()
    model.append(nn.Linear(40, 8))  # with low bits of its own
    own = model[2].weight.detach().clone()
    visible = [p.bfloat16() for p in model.parameters()]
    assert ng.fill_low_bits(model) == 40 * 40 + 40 + 80
    assert all(
        torch.equal(p.bfloat16(), v) for p, v in zip(model.parameters(), visible, strict=True)
    )
    assert torch.equal(model[2].weight, own) and model[1].weight.unique().numel() == 40
    assert ng.fill_low_bits(model) == 40  # zeros lie on the grid for ever
