"""Sums of micro-batch gradients: each row's bits, its bound, its bytes, and what no sum may do."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from narrowgauge.numerics.hashing import step_seed
from narrowgauge.numerics.scaling import LossScaler
from narrowgauge.optim import accumulation
from narrowgauge.optim.accumulation import (
    ACCUMULATIONS,
    AccumulationWarning,
    GradientAccumulator,
    add_stochastic,
    backward_in_parts,
)
from oracles import accumulation as oracle
from tensors import bits

ROWS = tuple(ACCUMULATIONS)
OURS = tuple(name for name, row in ACCUMULATIONS.items() if row.buffer)
SHAPES = [(), (0,), (7,), (3, 4, 6)]


def gradients(shape: tuple[int, ...], k: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    """``k`` gradients whose magnitudes spread over twelve binades."""
    generator = torch.Generator().manual_seed(seed)
    spread = torch.randint(-6, 6, (k, *shape), generator=generator)
    return list((torch.randn((k, *shape), generator=generator) * 2.0**spread).to(dtype).unbind(0))


def summed(row: str, parts: Sequence[Tensor], **options: object) -> Tensor:
    """The finished gradient of one parameter whose micro-batch gradients are ``parts``."""
    parameter = torch.nn.Parameter(torch.zeros_like(parts[0]))
    accumulator = GradientAccumulator([parameter], row, **options)  # type: ignore[arg-type]
    for part in parts:
        if row == "bfloat16" and parameter.grad is not None:
            parameter.grad += part  # as autograd does
        else:
            parameter.grad = part.clone(memory_format=torch.preserve_format)
        accumulator.accumulate()
    accumulator.finish()
    assert parameter.grad is not None
    return parameter.grad


def singles(parts: Sequence[Tensor]) -> list[oracle.Singles]:
    return [part.float().reshape(-1).numpy() for part in parts]


# ── what each row sums to ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("total", "gradient"), [(256.0, 1.0), (256.0, -0.125), (1.0, 2.0**-12), (-3.0, 2**-7 + 2**-13)]
)
def test_one_stochastic_addition_is_unbiased_over_seeds(total: float, gradient: float) -> None:
    """|z| < 5 over 2^16 seeds: one false failure in 1.7 million."""
    seeds = torch.arange(1 << 16, dtype=torch.int32) * 0x9E3779B
    result = add_stochastic(torch.tensor([gradient]), torch.tensor([total]), seeds)
    values = result.view(torch.float32).double()
    assert len(values.unique()) == 2
    deviation = float(values.std()) / math.sqrt(len(seeds))
    assert abs(float(values.mean()) - (total + gradient)) < 5 * deviation


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("k", [1, 2, 9])
def test_sums_are_those_written_down(shape: tuple[int, ...], k: int) -> None:
    parts = gradients(shape, k)
    exact = singles(parts)
    seeds = [step_seed(step_seed(11, 0) % 2**32, j) for j in range(k)]
    expected = {
        "float32": oracle.nearest(oracle.float32_sum(exact)),
        "bfloat16-stochastic": oracle.stochastic_sum(exact, seeds),
    }
    for row, values in expected.items():
        assert torch.equal(summed(row, parts, seed=11).float(), torch.from_numpy(values).reshape(shape)), row


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize(("k", "signs"), [(3, "both"), (100, "one")])
def test_sums_stay_within_their_bounds(row: str, k: int, signs: str) -> None:
    parts = [part.abs() if signs == "one" else part for part in gradients((600,), k, seed=k)]
    exact = torch.stack(parts).double().sum(0)  # 20 binades and 100 addends: a float64 holds that
    magnitudes = torch.stack(parts).double().abs().sum(0)
    last = 2.0**-8 * exact.abs() if ACCUMULATIONS[row].addition < 2.0**-9 else 0.0
    allowed = ACCUMULATIONS[row].bound(k) * magnitudes * (1 + 2.0**-8) + last
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AccumulationWarning)
        error = (summed(row, parts).double() - exact).abs()
    assert (error <= allowed).all()


def test_float16_sums_are_rounded_once_ties_away_from_zero() -> None:
    every = torch.arange(1 << 15, dtype=torch.int32).to(torch.int16).view(torch.float16)
    finite = every[torch.isfinite(every)]
    assert torch.equal(bits(summed("float32", [finite])), bits(finite))  # subnormals and -0 included
    assert torch.equal(bits(summed("float32", [-finite])), bits(-finite))
    parts = gradients((3000,), 7, dtype=torch.float16)
    total = oracle.float32_sum(singles(parts))
    expected = torch.from_numpy(oracle.nearest(total, dropped=13).astype(np.float16))
    assert torch.equal(bits(summed("float32", parts)), bits(expected))
    # What autograd's float16 sum loses on the way, the float32 sum keeps.
    back = [torch.tensor([v], dtype=torch.float16) for v in (60000.0, 60000.0, -60000.0)]
    assert summed("float32", back).tolist() == [60000.0]


# ── laws ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize(("place", "value"), [(0, math.nan), (6, -math.inf)])
def test_what_is_not_finite_stays_so_in_its_element_alone(row: str, place: int, value: float) -> None:
    parts = gradients((11,), 7)
    parts[place][5] = value
    result = summed(row, parts)
    assert not result[5].isfinite() and result.isfinite().sum() == 10
    assert bool(result[5].isnan()) == math.isnan(value)
    opposite = [torch.tensor([v]).bfloat16() for v in (math.inf, 1.0, -math.inf, 1.0)]
    assert summed(row, opposite).isnan().all()
    largest = torch.tensor([3.38e38]).bfloat16()
    assert summed(row, [largest] * 3).tolist() == [math.inf]


def test_the_random_bits_belong_to_seed_step_and_micro_batch() -> None:
    """And to nothing else: a run that is resumed sets ``step`` and goes on with the same bits."""
    parts = gradients((4000,), 6)
    parameter = torch.nn.Parameter(torch.zeros(4000, dtype=torch.bfloat16))

    def step(accumulator: GradientAccumulator) -> Tensor:
        for part in parts:
            parameter.grad = part.clone()
            accumulator.accumulate()
        accumulator.finish()
        assert parameter.grad is not None
        result, parameter.grad = parameter.grad, None
        return result

    through = GradientAccumulator([parameter], "bfloat16-stochastic", seed=4)
    sums = [step(through) for _ in range(3)]
    assert not torch.equal(sums[0], sums[1]) and not torch.equal(sums[1], sums[2])
    resumed = GradientAccumulator([parameter], "bfloat16-stochastic", seed=4)
    resumed.step = 2
    assert torch.equal(step(resumed), sums[2])
    assert not torch.equal(step(GradientAccumulator([parameter], "bfloat16-stochastic", seed=5)), sums[0])


# ── parameters of all kinds ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("row", ROWS)
def test_missing_frozen_and_tied(row: str) -> None:
    sometimes, always, never, frozen = (torch.nn.Parameter(torch.ones(3).bfloat16()) for _ in range(4))
    frozen.requires_grad_(False)
    accumulator = GradientAccumulator([sometimes, always, never, frozen, always], row)
    for j in range(4):
        loss = (always + always * frozen).sum() + (sometimes.sum() if j % 2 else 0.0)
        loss.backward()
        accumulator.accumulate()
    accumulator.finish()
    found = [None if p.grad is None else p.grad.tolist() for p in (sometimes, always, never, frozen)]
    assert found == [[2.0] * 3, [8.0] * 3, None, None]
    accumulator.discard()
    accumulator.finish()
    assert all(p.grad is None for p in (sometimes, always, never, frozen))


@pytest.mark.parametrize("row", ROWS)
def test_bytes_are_counted_and_as_the_table_says(row: str) -> None:
    parameters = [torch.nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16)) for shape in ((64, 3), (5,), ())]
    accumulator = GradientAccumulator(parameters, row)
    assert accumulator.bytes_per_param() == 0
    for _ in range(2):
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        accumulator.accumulate()
    assert accumulator.bytes_per_param() == pytest.approx(ACCUMULATIONS[row].bytes_per_param, rel=1e-12)
    accumulator.finish()  # the buffers are kept for the next step
    assert accumulator.bytes_per_param() == pytest.approx(ACCUMULATIONS[row].bytes_per_param, rel=1e-12)


def test_shards_are_summed_where_they_lie() -> None:
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        mesh = dist.init_device_mesh("cpu", (1,))
        parts = gradients((6, 5), 4)
        weight = torch.nn.Parameter(distribute_tensor(torch.zeros(6, 5).bfloat16(), mesh, [Shard(0)]))
        for row in OURS:
            accumulator = GradientAccumulator([weight], row)
            for part in parts:
                weight.grad = distribute_tensor(part, mesh, [Shard(0)])
                accumulator.accumulate()
            accumulator.finish()
            assert isinstance(weight.grad, DTensor)
            assert weight.grad.placements == weight.placements
            assert torch.equal(bits(weight.grad.to_local()), bits(summed(row, parts)))
            weight.grad = None
    finally:
        dist.destroy_process_group()


# ── in a loop ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("row", [None, *ROWS])
def test_losses_are_made_one_at_a_time_and_scaled(row: str | None) -> None:
    weight = torch.nn.Parameter(torch.ones(2).bfloat16())
    accumulator = GradientAccumulator([weight], row) if row else None
    seen: list[bool] = []

    def losses() -> Iterator[Tensor]:
        for factor in (1.0, 2.0, 4.0):
            seen.append(weight.grad is None)
            yield weight.float().sum() * factor

    total = backward_in_parts(losses(), accumulator, LossScaler(8.0))
    assert float(total) == 14.0 and not total.requires_grad
    assert weight.grad is not None and weight.grad.tolist() == [56.0, 56.0]
    assert seen == [True, row in OURS, row in OURS]


# ── what is said and refused ────────────────────────────────────────────────────────────────────────────────────────


def test_sums_warn_once_from_where_they_lose_more_than_the_storage() -> None:
    """From the row of ``word`` itself: a spacing of its first moment against half a spacing of bfloat16 per addition."""
    first_that_loses = next(k for k in range(2, 12) if (k - 1) * 2.0**-8 > 2.0**-5)
    assert first_that_loses == (ACCUMULATIONS["bfloat16"].most_micro_batches or 0) + 1 == 10
    weight = torch.nn.Parameter(torch.ones(1).bfloat16())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        GradientAccumulator([weight], "bfloat16", num_micro_batches=9)
        for row in OURS:
            most = ACCUMULATIONS[row].most_micro_batches
            GradientAccumulator([weight], row, num_micro_batches=10_000 if most is None else most)
    with pytest.warns(AccumulationWarning, match=r"^10 micro-batches .* 4% .*'float32'"):
        warned = GradientAccumulator([weight], "bfloat16", num_micro_batches=10)
    with pytest.warns(AccumulationWarning, match="^10 micro-batches") as caught:
        for accumulator in (warned, GradientAccumulator([weight], "bfloat16")):
            for _ in range(2):
                backward_in_parts((weight.sum() for _ in range(20)), accumulator)
    assert len(caught) == 1


def test_compiled_additions_have_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accumulation, "COMPILE_ELEMENTS", 1 << 12)
    row, parts = "bfloat16-stochastic", gradients((100, 100), 3)
    assert torch.equal(bits(summed(row, parts, seed=3)), bits(summed(row, parts, seed=3, compile=False)))
