"""The public checks of the optimizer: what each storage loses, and what it must not."""

from __future__ import annotations

import math
import warnings

import pytest
import torch

import narrowgauge as ng
from narrowgauge.storages import STORAGES
from optim.scenarios import assert_same_bits, kept, parameters, stall, train

LIMITS = {"word": 0.10, "split": 0.01, "exact": 0.002, "master": 0.002, "float32": 0.002}


@pytest.mark.parametrize("storage", LIMITS)
def test_stall_case_is_survived(storage: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = stall(storage)
    assert result.error <= LIMITS[storage]
    assert abs(result.reading.edq - 1) < 0.05


def test_naive_stalls_and_warns() -> None:
    with pytest.warns(ng.UpdateLossWarning, match=r"'weight' loses 100% .* 'word' would keep it"):
        result = stall("naive")
    assert result.error > 0.9
    assert result.reading.lost_fraction > 0.99


@pytest.mark.parametrize("beta2", [0.9, 0.99, 0.999, 0.9999])
@pytest.mark.parametrize(("storage", "bound"), [("split", 1e-3), ("exact", 1e-3), ("word", 1e-2)])
def test_second_moment_of_a_constant_gradient(storage: str, bound: float, beta2: float) -> None:
    """From 5 % below its limit on for four times 1/(1 - beta2) steps or 3,000: where short dithers stop short."""
    side = 32 if beta2 > 0.999 else 64
    gradient = torch.full((side, side), 0.013).bfloat16()
    limit = float(gradient[0, 0]) ** 2
    # Elements with equal weight and gradient round alike, so the weights differ: the mean is over their hashes.
    (weight,) = parameters(storage, [(side, side)])
    optimizer = ng.AdamW([weight], lr=1e-4, betas=(0.9, beta2), storage=storage, compile=False, audit_every=0)
    # A first step with beta2 = 0 and a gradient of the right size puts the moment near where it will end.
    optimizer.param_groups[0]["betas"] = (0.9, 0.0)
    weight.grad = (gradient.float() * 0.975).to(weight.dtype)
    optimizer.step()
    start = float(optimizer.stored(weight, "exp_avg_sq").double().mean())
    optimizer.param_groups[0]["betas"] = (0.9, beta2)
    steps = min(4 * round(1 / (1 - beta2)), 3000)
    for _ in range(steps):
        weight.grad = gradient.clone()
        optimizer.step()
    exact = limit + (start - limit) * beta2**steps
    mean = float(optimizer.stored(weight, "exp_avg_sq").double().mean())
    assert abs(start / limit - 0.95) < 0.02
    assert abs(mean / exact - 1) < bound


@pytest.mark.parametrize(("shape", "lr"), [((32, 32), 1e-3), ((7, 13), 1e-2), ((1, 301), 1e-5)])
def test_exact_is_master_to_the_bit(shape: tuple[int, int], lr: float) -> None:
    results = []
    for storage in ("exact", "master"):
        optimizer = ng.AdamW(parameters(storage, [shape]), lr=lr, storage=storage, compile=False, max_grad_norm=1.0)
        train(optimizer, [shape], range(1000))
        results.append(kept(optimizer))
    assert_same_bits(*results)


@pytest.mark.parametrize("storage", ["word", "master", "exact", "float32"])
def test_power_of_two_scaled_gradients_give_the_same_weights(storage: str) -> None:
    shape = (64, 64)
    results = []
    for scale in (1.0, 2.0**-20):
        optimizer = ng.AdamW(parameters(storage, [shape]), lr=1e-3, eps=0.0, storage=storage, compile=False)
        (weight,) = optimizer.param_groups[0]["params"]
        for step in range(50):
            generator = torch.Generator().manual_seed(step)
            gradient = (torch.randn(shape, generator=generator) * 1e-2).bfloat16()
            gradient[:4] = 0  # never sees anything: its moments stay zero, and it takes no step but decay
            weight.grad = (gradient * scale).to(weight.dtype)
            optimizer.step()
            second = optimizer.stored(weight, "exp_avg_sq")
            assert not second[:4].any() and not optimizer.stored(weight, "exp_avg")[:4].any()
            assert (second[weight.grad != 0] > 0).all()
        results.append({"seen": weight.detach().clone(), "stored": optimizer.stored(weight)})
    assert torch.isfinite(results[0]["stored"]).all()
    assert_same_bits(*results)


@pytest.mark.parametrize("storage", STORAGES)
def test_a_tensor_cut_by_rows_has_the_same_bits(storage: str) -> None:
    rows, columns, cuts = 48, 33, (1, 17, 30)  # odd pieces: their words do not fall on the whole's
    whole = ng.AdamW(parameters(storage, [(rows, columns)]), lr=1e-3, storage=storage, compile=False)
    (weight,) = whole.param_groups[0]["params"]
    pieces = [torch.nn.Parameter(p.clone()) for p in weight.detach().split(cuts)]
    parts = ng.AdamW(pieces, lr=1e-3, storage=storage, compile=False)
    for step in range(30):
        generator = torch.Generator().manual_seed(step)
        weight.grad = (torch.randn(rows, columns, generator=generator) * 1e-2).bfloat16().to(weight.dtype)
        for piece, gradient in zip(pieces, weight.grad.split(cuts), strict=True):
            piece.grad = gradient.clone()
        whole.step()
        parts.step()
    for name in ("weight", "exp_avg", "exp_avg_sq"):
        joined = torch.cat([parts.stored(p, name) for p in pieces])
        assert_same_bits({name: whole.stored(weight, name)}, {name: joined})


def against_torch(lr: float, weight_decay: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Where 100 steps of ours, of torch's and of a float64 AdamW lead from one start: ``(start, ours, theirs, exact)``."""
    shape = (64, 64)
    start = torch.randn(shape, generator=torch.Generator().manual_seed(3)) * 0.02
    options = {"lr": lr, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": weight_decay}
    weights = [
        torch.nn.Parameter(start.to(dtype, copy=True)) for dtype in (torch.float32, torch.float32, torch.float64)
    ]
    optimizers = [
        ng.AdamW(weights[:1], **options, storage="float32", compile=False),
        torch.optim.AdamW(weights[1:2], **options),
        torch.optim.AdamW(weights[2:], **options),
    ]
    for step in range(100):
        gradient = torch.randn(shape, generator=torch.Generator().manual_seed(step)) * 1e-2
        for weight, optimizer in zip(weights, optimizers, strict=True):
            weight.grad = gradient.to(weight.dtype, copy=True)
            optimizer.step()
    ours, theirs, exact = (weight.detach().double() for weight in weights)
    return start.double(), ours, theirs, exact


def test_float32_agrees_with_torch() -> None:
    _, ours, theirs, _ = against_torch(1e-3, 0.0)
    ulp = 2.0 ** (math.frexp(float(ours.abs().max()))[1] - 24)  # of the tensor's largest weight
    assert float((ours - theirs).abs().max()) <= 4 * ulp


def test_float32_is_nearer_to_the_truth_where_torch_rounds_its_decay() -> None:
    # torch multiplies by 1 - lr * weight_decay, which is 1.7e-8 off in float32, at every step again.
    _, ours, theirs, exact = against_torch(1e-3, 0.1)
    assert float((ours - exact).norm()) < 0.5 * float((theirs - exact).norm())


def test_alarm_names_stalls_and_only_stalls() -> None:
    """Twenty healthy runs and twenty stalling ones, each with a tensor beside that loses nothing."""

    def alarms(storage: str, seed: int) -> set[str]:
        found: list[str] = []
        shapes = [(16, 24), (8, 8)]
        big, small = parameters(storage, shapes, seed, scale=1.0)
        with torch.no_grad():
            small.mul_(2.0**-14)  # small weights have fine spacings: nothing is lost of them
        optimizer = ng.AdamW(
            [("big", big), ("small", small)],
            lr=1e-4,
            weight_decay=0.0,
            storage=storage,
            compile=False,
            audit_every=4,
            seed=seed,
        )
        optimizer.on_alarm = lambda new: found.extend(alarm.tensor for alarm in new)
        train(optimizer, shapes, range(100 * seed, 100 * seed + 60))  # no two runs share a gradient
        return set(found)

    healthy = [alarms("word", seed) for seed in range(20)]
    stalling = [alarms("naive", seed) for seed in range(20)]
    assert sum(bool(found) for found in healthy) <= 1
    assert stalling == [{"big"}] * 20


@pytest.mark.parametrize("storage", STORAGES)
def test_an_audited_step_is_the_same_step(storage: str) -> None:
    shapes = [(300, 300), (5,), (9, 9)]
    results = []
    for audit_every in (0, 1):
        optimizer = ng.AdamW(parameters(storage, shapes), storage=storage, compile=False, audit_every=audit_every)
        train(optimizer, shapes, range(10))
        results.append(kept(optimizer))
    assert_same_bits(*results)
