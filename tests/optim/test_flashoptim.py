"""FlashOptim's arithmetic, from its published formulas, against ours at no more bytes: better in every case it is weak in.

``benchmarks/flashoptim_formulas.py`` measures the same cases at full size.
"""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import Tensor

from narrowgauge.spec.storages import STORAGES
from oracles import flashoptim
from oracles.adamw import AdamW64, Deviation, deviation
from oracles.flashoptim import FlashAdamW
from stored_weight import StoredWeight

BETAS = (0.9, 0.999)
STORAGES_AGAINST_IT = [name for name in ("compact", "word") if name in STORAGES]
against_it = pytest.mark.parametrize("storage", STORAGES_AGAINST_IT)


def weights(shape: tuple[int, int], scale: float) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(1)) * scale).bfloat16()


def drifting(shape: tuple[int, int], rms: float, steps: int) -> list[Tensor]:
    """Gradients that push one way, with noise."""
    generator = torch.Generator().manual_seed(2)
    return [((0.5 + torch.randn(shape, generator=generator)) * rms / 1.25**0.5).bfloat16() for _ in range(steps)]


def unequal(shape: tuple[int, int], steps: int) -> list[Tensor]:
    """Gradients whose scale differs from element to element, log-normally with sigma 2."""
    generator = torch.Generator().manual_seed(3)
    scale = 1e-3 * (2 * torch.randn(shape, generator=generator)).exp()
    return [(torch.randn(shape, generator=generator) * scale).bfloat16() for _ in range(steps)]


def both(storage: str, gradients: list[Tensor], lr: float, scale: float) -> tuple[Deviation, Deviation]:
    """How far ours and theirs are from float64 after the same gradients."""
    start = weights((gradients[0].shape[0], gradients[0].shape[1]), scale)
    followers = StoredWeight(storage, start, lr), FlashAdamW(start, lr, BETAS)
    ours, theirs = (deviation(one, AdamW64(start, lr, BETAS), gradients) for one in followers)
    return ours, theirs


@against_it
def test_small_updates_stall_its_tail_and_not_ours(storage: str) -> None:
    cycle = drifting((32, 64), 0.11, 50)
    ours, theirs = both(storage, (cycle * 4)[:200], lr=1e-5, scale=1.0)
    assert theirs.movement > 0.5
    assert ours.movement < 0.3 * theirs.movement


@against_it
def test_tiny_gradients_wear_out_its_scales_and_not_ours(storage: str) -> None:
    ours, theirs = both(storage, drifting((16, 128), 1e-7, 100), lr=1e-4, scale=0.02)
    assert ours.movement < 0.1 * theirs.movement
    assert ours.direction < 0.2 * theirs.direction
    usual, _ = both(storage, drifting((16, 128), 1e-3, 100), lr=1e-4, scale=0.02)
    assert ours.direction < 1.2 * usual.direction


@against_it
def test_unequal_neighbours_become_zero_in_its_groups_and_not_in_ours(storage: str) -> None:
    ours, theirs = both(storage, unequal((16, 128), 100), lr=1e-4, scale=0.02)
    assert theirs.zeros > 0.1 and ours.zeros <= 0.001
    assert ours.direction < 0.1 * theirs.direction
    assert ours.movement < 0.1 * theirs.movement


def test_its_default_checkpoint_changes_what_is_kept() -> None:
    one = FlashAdamW(weights((16, 128), 0.02), 1e-4, BETAS)
    gradients = drifting((16, 128), 1e-3, 40)
    for g in gradients[:20]:
        one.step(g)
    other = one.resumed()
    assert torch.equal(one.seen, other.seen) and torch.equal(one.tail, other.tail)
    assert (one.kept()["first scales"] != other.kept()["first scales"]).double().mean() > 0.5
    for g in gradients[20:]:
        one.step(g)
        other.step(g)
    assert not torch.equal(one.weight, other.weight)


@against_it
def test_our_checkpoint_changes_nothing(storage: str) -> None:
    one = StoredWeight(storage, weights((16, 128), 0.02), 1e-4)
    gradients = drifting((16, 128), 1e-3, 40)
    for g in gradients[:20]:
        one.step(g)
    stream = io.BytesIO()
    torch.save(one.optimizer.state_dict(), stream)
    stream.seek(0)
    other = StoredWeight(storage, copy.deepcopy(one.parameter.detach()), 1e-4)
    other.optimizer.load_state_dict(torch.load(stream))
    for g in gradients[20:]:
        one.step(g)
        other.step(g)
    for name in ("weight", "exp_avg", "exp_avg_sq"):
        assert torch.equal(getattr(one, name), getattr(other, name)), name


@pytest.mark.parametrize("storage", [name for name in STORAGES_AGAINST_IT if name == "compact"])
def test_at_no_more_bytes(storage: str) -> None:
    shape = (64, 256)
    theirs, ours = FlashAdamW(weights(shape, 0.02), 1e-4), StoredWeight(storage, weights(shape, 0.02), 1e-4)
    ours.step(weights(shape, 1e-3))
    assert theirs.bytes_per_param() == 7.125
    assert ours.optimizer.bytes_per_param() <= 7.1


def test_the_oracle_has_the_published_accuracy() -> None:
    generator = torch.Generator().manual_seed(4)
    values = torch.randn(50_000, generator=generator) * torch.exp(5 * torch.randn(50_000, generator=generator))
    error = ((flashoptim.joined_weight(*flashoptim.split_weight(values)) - values) / values).abs()
    assert 0.9 * 2**-16 < float(error.max()) < 1.05 * 2**-16  # half of a 127th of half a bfloat16's spacing

    def lost(rms: float) -> float:
        m = torch.randn(64, 320, generator=generator) * 0.3 * rms
        return float((flashoptim.decode_first(*flashoptim.encode_first(m), m.shape) - m).norm() / m.norm())

    assert 0.003 < lost(1e-2) < 0.008
    assert 0.1 < lost(1e-7) < 0.3
    assert lost(1e-8) == 1  # the scales themselves are zero


def test_the_oracle_keeps_groups_across_rows_and_fills_the_last() -> None:
    m = torch.arange(35.0).view(5, 7) - 17
    codes, scales = flashoptim.encode_first(m)
    assert codes.shape == (2, 32) and scales[:, 0].tolist() == [17.0, 17.0]
    assert flashoptim.decode_first(codes, scales, m.shape).shape == m.shape
    v = m.square()
    kept = flashoptim.decode_second(*flashoptim.encode_second(v), v.shape)
    assert float((kept - v).abs().max()) < 17**2 * 2 / 255
