"""Readings with known answers, and alarms that name every stall and nothing else."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import narrowgauge as ng
from narrowgauge.numerics.update_metrics import KERNEL_SUMS, UPDATE_SUMS, lost_decay, update_sums
from narrowgauge.optim.audit import FEWEST, WINDOW, Auditor, Reading, read
from narrowgauge.optim.kernel import least_decay
from narrowgauge.optim.optimizer import Optimizer
from narrowgauge.optim.rules.elementwise import Rule
from narrowgauge.spec.significance import MIN_EDQ
from narrowgauge.spec.storages import STORAGES
from optim.scenarios import REPRESENTATIVES, parameters
from tensors import step_gradients


def row(**sums: float) -> Tensor:
    return torch.tensor([sums.get(name, 0.0) for name in UPDATE_SUMS], dtype=torch.float64)


def steps(edqs: list[float], weight: float = 1.0) -> list[Tensor]:
    """Audited steps of one tensor whose every update is ``weight`` long and arrives to the given shares."""
    return [
        row(dd=weight, de=weight * q, ee=weight * q * q, nonzero=10, lost=10 * (1 - min(1.0, abs(q)))) for q in edqs
    ]


def kernel_sums(edq: float) -> Tensor:
    return steps([edq])[0][: len(KERNEL_SUMS)]


def noisy(count: int, mean: float, deviation: float, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return steps((mean + deviation * torch.randn(count, generator=generator, dtype=torch.float64)).tolist())


# ── readings ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_everything_taken_reads_one_and_nothing_taken_reads_zero() -> None:
    d, nothing = torch.tensor([1.0, -2.0, 0.0, 0.5]), torch.zeros(4)
    perfect = read([update_sums(d, d, nothing)] * 3)
    assert (perfect.edq, perfect.edq_error, perfect.noise, perfect.lost_fraction) == (1.0, 0.0, 0.0, 0.0)
    assert (perfect.unseen_fraction, perfect.visible_edq, perfect.num_audits) == (1.0, 0.0, 3)
    stalled = read([update_sums(d, nothing, nothing)] * 3)
    assert (stalled.edq, stalled.noise, stalled.lost_fraction, stalled.visible_edq) == (0.0, 1.0, 1.0, 0.0)


def test_sums_come_first_and_ratios_after() -> None:
    reading = read([row(dd=1.0, de=1.0, nonzero=1), row(dd=3.0, de=0.0, nonzero=3, lost=3, unseen=2)])
    assert reading.edq == 0.25  # the mean of the two ratios would be 0.5
    assert (reading.lost_fraction, reading.unseen_fraction) == (0.75, 0.5)
    # The delta method by hand: residuals 1 - 1/4 and 0 - 3/4.
    assert reading.edq_error == pytest.approx(math.sqrt(2 * (0.75**2 + 0.75**2)) / 4)


def test_equal_weights_give_the_textbook_standard_error() -> None:
    shares = [0.2, 0.9, 1.4, 0.7, 1.1, 0.3]
    reading = read(steps(shares))
    deviation = torch.tensor(shares, dtype=torch.float64).std()
    assert reading.edq == pytest.approx(sum(shares) / 6)
    assert reading.edq_error == pytest.approx(float(deviation) / math.sqrt(6))


def test_the_error_covers_the_truth_as_often_as_it_should() -> None:
    """Two standard errors over 20 steps hold the true EDQ in 94 % of 1,000 windows (Student's t); |z| < 5."""
    hits = 0
    for seed in range(1000):
        reading = read(noisy(20, 0.8, 0.5, seed))
        hits += abs(reading.edq - 0.8) < 2 * reading.edq_error
    assert abs(hits - 940) < 5 * math.sqrt(1000 * 0.94 * 0.06)


def test_nothing_intended_judges_nothing() -> None:
    reading = read([row()] * 10)
    assert math.isnan(reading.edq) and math.isnan(reading.edq_error) and not reading.stalls
    assert math.isnan(read(steps([0.0])).edq_error)
    broken = read([row(dd=math.nan, de=math.nan)] * 10)
    assert not broken.stalls


# ── alarms ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_stall_is_named_at_the_fewest_audits_and_not_before() -> None:
    assert not read(steps([0.1] * (FEWEST - 1))).stalls
    assert read(steps([0.1] * FEWEST)).stalls
    assert not read(steps([MIN_EDQ] * WINDOW)).stalls


def test_every_noisy_stall_is_named_within_a_window() -> None:
    for seed in range(300):
        assert read(noisy(WINDOW, 0.1, 0.3, seed)).stalls
        assert read(noisy(FEWEST, 0.05, 0.02, seed)).stalls


@pytest.mark.parametrize("deviation", [0.05, 0.5, 5.0, 50.0])
@pytest.mark.parametrize("count", [FEWEST, 10, WINDOW])
def test_no_false_alarm_where_nothing_is_lost_however_noisy(count: int, deviation: float) -> None:
    """EDQ 1 with any noise: at most one alarm in 10,000 windows is expected, and 3 standard errors would raise 20."""
    false = sum(read(noisy(count, 1.0, deviation, seed)).stalls for seed in range(1000))
    assert false <= 2  # the chance of three is below 2 in 10,000


def tensors(count: int) -> list[Tensor]:
    return [torch.zeros(1) for _ in range(count)]


def test_the_auditor_names_the_stalling_tensor_once_and_again_after_it_recovered() -> None:
    healthy, stalling = tensors(2)
    names, rows = {healthy: "a", stalling: "b"}, {healthy: STORAGES["word"], stalling: STORAGES["naive"]}
    auditor, raised = Auditor(), []
    for share in [1.0] * 10 + [0.0] * 60 + [1.0] * 40 + [0.0] * 60:
        auditor.add(healthy, kernel_sums(1.0), 64)
        auditor.add(stalling, kernel_sums(share), 64)
        total = auditor.collect()
        assert total[0] == 2.0 and total[1] == 1.0 + share
        raised += auditor.alarms(names, rows)
    assert [(a.tensor, a.storage, a.fallback) for a in raised] == [("b", "naive", "word")] * 2
    assert all(len(window) == WINDOW for window in auditor.windows.values())
    assert raised[0].message.startswith("'b' loses ") and "'word' would keep it" in raised[0].message


@pytest.mark.parametrize(("storage", "stalls"), [("stochastic", False), ("naive", True)])
def test_a_rare_arrival_that_has_not_come_yet_is_no_stall(storage: str, stalls: bool) -> None:
    """A gain of 1 moves by 2^-7 with probability 1e-3 where it is rounded stochastically: five audits may see nothing."""
    auditor, gain, names = Auditor(), torch.zeros(1), {}
    rows = {gain: STORAGES[storage]}
    names[gain] = "norm.weight"
    raised = []
    for _ in range(FEWEST):
        auditor.add(gain, torch.tensor([1e-10, 0, 0, 0, 0, 128, 128, 128], dtype=torch.float64), 64)
        auditor.collect()
        raised += auditor.alarms(names, rows)
    assert bool(raised) is stalls


def test_dropped_sums_never_count() -> None:
    (tensor,) = tensors(1)
    auditor = Auditor()
    auditor.add(tensor, kernel_sums(0.0), 64)
    auditor.discard()
    assert not auditor.collect().any() and not auditor.windows
    assert auditor.alarms({}, {}) == []


def test_a_restored_window_goes_on_and_does_not_repeat_its_alarm() -> None:
    (tensor,) = tensors(1)
    names, rows = {tensor: "b"}, {tensor: STORAGES["naive"]}
    stalled, fresh = torch.stack(steps([0.0] * 8)), torch.stack(steps([0.0] * (FEWEST - 1)))
    auditor = Auditor()
    auditor.restore(tensor, stalled)
    assert torch.equal(torch.stack(list(auditor.windows[tensor])), stalled)
    auditor.add(tensor, kernel_sums(0.0), 64)
    auditor.collect()
    assert auditor.alarms(names, rows) == []
    young = Auditor()
    young.restore(tensor, fresh)
    young.add(tensor, kernel_sums(0.0), 64)
    young.collect()
    assert [a.tensor for a in young.alarms(names, rows)] == ["b"]


def test_many_healthy_tensors_over_a_long_run_raise_nothing() -> None:
    """100 tensors that lose nothing and read it with noise 0.5: 60 audits each, 5,600 looks at overlapping windows."""
    generator = torch.Generator().manual_seed(3)
    watched, auditor = tensors(100), Auditor()
    names = {t: str(k) for k, t in enumerate(watched)}
    rows = dict.fromkeys(watched, STORAGES["word"])
    raised = []
    for _ in range(60):
        for tensor in watched:
            auditor.add(tensor, kernel_sums(1.0 + 0.5 * float(torch.randn((), generator=generator))), 64)
        auditor.collect()
        raised += auditor.alarms(names, rows)
    assert raised == []


def test_audit_reads_each_tensor_and_all_of_them() -> None:
    big = torch.nn.Parameter(torch.ones(8, 8, dtype=torch.bfloat16))
    small = torch.nn.Parameter(torch.full((8, 8), 2.0**-20, dtype=torch.bfloat16))
    optimizer = ng.AdamW(
        [("big", big), ("small", small)], lr=2.0**-20, weight_decay=0.0, eps=0.0, storage="naive", audit_every=1
    )
    assert ng.audit(optimizer) == {}
    for _ in range(3):
        for weight in (big, small):
            weight.grad = torch.ones_like(weight)
        optimizer.step()
    readings = ng.audit(optimizer)
    assert list(readings) == ["", "big", "small"]
    assert readings["big"].edq == 0.0 and readings["big"].lost_fraction == 1.0
    assert readings["small"].edq == pytest.approx(1.0, abs=0.01) and readings["small"].lost_fraction == 0.0
    assert readings[""].lost_fraction == 0.5 and readings[""].edq == pytest.approx(0.5, abs=0.01)
    assert {r.num_audits for r in readings.values()} == {3}


@pytest.mark.parametrize("storage", REPRESENTATIVES)
@pytest.mark.parametrize("shapes", [[(7, 5)], [(64, 66), (3, 4, 5)], [(5,), (1,), (2, 2)], [(301, 30)]], ids=str)
def test_the_sums_are_those_of_what_is_kept(storage: str, shapes: list[tuple[int, ...]]) -> None:
    """Words that were filled up count nothing; every element counts once, whatever lane, part, piece or bucket it is in."""
    params = parameters(storage, shapes)
    optimizer = ng.AdamW(params, lr=1e-3, storage=storage, audit_every=1, compile=False)
    optimizer.adopt({p: p.detach().float() for p in params})
    for step in range(3):
        before = [(optimizer.stored(p).double(), p.detach().double()) for p in params]
        for p, gradient in zip(params, step_gradients(params, step, 1e-2), strict=True):
            p.grad = gradient
        optimizer.step()
        stored = [optimizer.stored(p).double() - old for p, (old, _) in zip(params, before, strict=True)]
        seen = [p.detach().double() - old for p, (_, old) in zip(params, before, strict=True)]
        assert optimizer.last_audit is not None
        sums = dict(zip(UPDATE_SUMS, optimizer.last_audit.tolist(), strict=True))
        assert sums["nonzero"] == sum(p.numel() for p in params)
        assert sums["lost"] == sum(int((change == 0).sum()) for change in stored)
        assert sums["unseen"] == sum(int((change == 0).sum()) for change in seen)
        for name, changes in (("ee", stored), ("vv", seen)):
            assert sums[name] == pytest.approx(sum(float(c.square().sum()) for c in changes), rel=1e-4)
        # Cauchy and Schwarz: the intended change lies along what was taken, and is as long as AdamW's.
        assert 0 < sums["de"] ** 2 <= 1.0001 * sums["dd"] * sums["ee"] or sums["lost"] == sums["nonzero"]
        assert 0.01e-3 < math.sqrt(sums["dd"] / sums["nonzero"]) < 1.01e-3 * 1.2


# ── the source's figures ────────────────────────────────────────────────────────────────────────────────────────────


def test_the_imprecision_share_is_the_sources() -> None:
    """Counted with ordinary bfloat16 tensors: additions that gave back the old word, rows without an update among them."""
    weight = torch.nn.Parameter((torch.randn(300, 64, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16())
    optimizer = ng.AdamW([weight], lr=1e-5, weight_decay=0.0, storage="naive", audit_every=1, compile=False)
    unchanged = []
    for step in range(3):
        weight.grad = step_gradients([weight], step, 1e-2)[0]
        weight.grad[:100] = 0.0  # rows of an embedding that no batch has met
        before = weight.detach().clone()
        optimizer.step()
        unchanged.append((weight == before).double().mean().item())
    reading = ng.audit(optimizer)["param 0"]
    assert reading.imprecision_share == pytest.approx(sum(unchanged) / 3, abs=1e-9)
    assert reading.imprecision_share > reading.lost_fraction + 0.01  # which leaves out what nobody meant to move
    assert ng.audit(optimizer)[""].imprecision_share == reading.imprecision_share


def test_the_imprecision_share_of_a_part_is_of_that_part() -> None:
    """Of a large tensor a thirty-second part is audited, and pairs are counted by their high word."""
    params = parameters("collage-plus", [(520, 256), (7, 3), (5,)])
    optimizer = ng.AdamW(params, lr=1e-4, storage="collage-plus", audit_every=1, compile=False)
    before = [p.detach().clone() for p in params]
    for p, gradient in zip(params, step_gradients(params, 0, 1e-2), strict=True):
        p.grad = gradient
    optimizer.step()
    readings = ng.audit(optimizer)
    for place, (p, old) in enumerate(zip(params, before, strict=True)):
        share = (p == old).double().mean().item()
        assert readings[f"param {place}"].imprecision_share == pytest.approx(share, abs=0.02 if place == 0 else 1e-9)


def test_a_window_of_an_earlier_version_says_no_imprecision_share() -> None:
    tensor, auditor = torch.zeros(1), Auditor()
    auditor.restore(tensor, torch.stack(steps([1.0, 1.0]))[:, :8])
    reading = read(auditor.windows[tensor])
    assert math.isnan(reading.imprecision_share) and reading.edq == 1.0
    auditor.add(tensor, kernel_sums(1.0), 64)
    auditor.collect()
    assert math.isnan(read(auditor.windows[tensor]).imprecision_share) and read(auditor.windows[tensor]).edq == 1.0


def test_a_saved_window_keeps_its_imprecision_share() -> None:
    tensor, auditor, resumed = torch.zeros(1), Auditor(), Auditor()
    auditor.add(tensor, kernel_sums(1.0), 64)
    auditor.collect()
    resumed.restore(tensor, torch.stack(list(auditor.windows[tensor])))
    share = 1 - 10 / 64
    assert read(auditor.windows[tensor]).imprecision_share == read(resumed.windows[tensor]).imprecision_share == share


def test_a_second_moment_that_is_wrong_is_nothing_the_audit_sees() -> None:
    """As the documentation says: every update arrives, and every one was too small."""
    weight, exact = parameters("collage-light", [(32, 32)])[0], torch.zeros(32, 32, dtype=torch.float64)
    optimizer = ng.AdamW([weight], lr=1e-4, betas=(0.9, 0.999), storage="collage-light", audit_every=1, compile=False)
    for step in range(400):
        weight.grad = step_gradients([weight], step, 1e-2)[0]
        exact = 0.999 * exact + 0.001 * weight.grad.double() ** 2
        optimizer.step()
    assert (optimizer.stored(weight, "exp_avg_sq").double() / exact).median() > 1.1
    assert ng.audit(optimizer)["param 0"].edq == pytest.approx(1.0, abs=1e-3)


# ── weight decay ────────────────────────────────────────────────────────────────────────────────────────────────────


def lost_decay_of_two(
    storage: str, rule: Callable[..., Any], lr: float, decay: float, less: float
) -> tuple[float, float]:
    """A step's lost decay as audited, and in fractions from two optimizers, the second with ``less`` decay than the first.

    Both begin with the same weights, states and random bits, so what they store differs by what the difference in decay did.
    """
    shape = (96, 80)
    start = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 0.02
    start = start.to(getattr(torch, STORAGES[storage].visible))
    pair = []
    for weight_decay in (decay, decay - less):
        weight = torch.nn.Parameter(start.clone())
        optimizer = rule([weight], lr=lr, weight_decay=0.0, storage=storage, audit_every=1, compile=False)
        for step in range(3):
            optimizer.param_groups[0]["weight_decay"] = weight_decay if step == 2 else 0.0
            weight.grad = step_gradients([weight], step, 1e-2)[0]
            before = optimizer.stored(weight).flatten().tolist() if step else []
            visible = weight.detach().float().flatten().tolist()
            optimizer.step()
        pair.append((before, visible, optimizer.stored(weight).flatten().tolist(), optimizer))
    (before, visible, after, optimizer), (_, _, without, _) = pair
    # An element-wise rule reads the leading part of a pair, as the sources' do; a matrix rule gets the whole weight.
    is_leading = rule in (ng.AdamW, ng.Lion) and STORAGES[storage].weight.parts > 1
    intended = [-Fraction(lr) * Fraction(less) * Fraction(w) for w in (visible if is_leading else before)]
    stored = [Fraction(a) - Fraction(b) for a, b in zip(after, without, strict=True)]
    along = sum((c * t for c, t in zip(intended, stored, strict=True)), Fraction(0))
    exact = 1 - along / sum((c * c for c in intended), Fraction(0))
    audited = lost_decay(optimizer.auditor.windows[next(iter(optimizer.auditor.windows))][-1])
    return audited.item(), float(exact)


OTHERS = [(rule, name) for rule in (ng.Lion, ng.Muon, ng.Adafactor, ng.optim.GaLore) for name in ("naive", "kahan")]


@pytest.mark.parametrize(
    ("rule", "storage"),
    [*((ng.AdamW, name) for name in REPRESENTATIVES), *OTHERS],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_lost_decay_is_what_an_optimizer_without_it_stores_otherwise(storage: str, rule: Callable[..., Any]) -> None:
    """In fractions, where a step's decay is a 16th of the weight's spacing or more; powers of two, so that C is exact."""
    lr = 2.0**-10 if STORAGES[storage].weight.mantissa_bits >= 7 else 2.0**-6
    audited, exact = lost_decay_of_two(storage, rule, lr, 2.0**-1, 2.0**-1)
    assert audited == pytest.approx(exact, abs=2e-3)


def to_bfloat16(x: Fraction) -> Fraction:
    """The nearest bfloat16 of a value in its normal range, ties away from zero."""
    if x == 0:
        return x
    exponent = math.frexp(float(abs(x)))[1] - 1
    spacing = Fraction(2) ** (exponent - 7)
    steps = math.floor(abs(x) / spacing + Fraction(1, 2))
    return (steps if x > 0 else -steps) * spacing


def test_weak_decay_is_audited_as_a_32nd_of_a_spacing() -> None:
    """Steps along the gradient, by hand: a decay of 2^-16 of bfloat16 weights is audited as one of 2^-12."""
    lr, decay, least = 2.0**-10, 2.0**-6, 2.0**-12
    assert least_decay(STORAGES["naive"]) == least
    rule = Rule(
        "along the gradient",
        (),
        ("negative_lr", "negative_decay"),
        lambda group, step: (-group["lr"], -group["lr"] * group["weight_decay"]),
        lambda w, g, s: (g * s["negative_lr"] + w * s["negative_decay"],),
        decay="negative_decay",
    )
    weight = torch.nn.Parameter((torch.randn(160, 96, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16())
    gradient = (torch.randn(160, 96, generator=torch.Generator().manual_seed(1)) * 0.04).bfloat16()
    options = {"lr": lr, "weight_decay": decay}
    optimizer = Optimizer([weight], rule, options, storage="naive", audit_every=1, compile=False)
    before, weight.grad = weight.detach().clone(), gradient
    optimizer.step()
    intended, stored = [], []
    for w, g in zip(before.flatten().tolist(), gradient.flatten().tolist(), strict=True):
        kept = [
            to_bfloat16(Fraction(float(np.float32(w) + (np.float32(-lr * g) + np.float32(factor * w)))))
            for factor in (-lr * decay, least - lr * decay)
        ]
        intended.append(-Fraction(least) * Fraction(w))
        stored.append(kept[0] - kept[1])
    along = sum((c * t for c, t in zip(intended, stored, strict=True)), Fraction(0))
    exact = 1 - along / sum((c * c for c in intended), Fraction(0))
    assert 0.1 < exact < 0.9
    assert ng.audit(optimizer)["param 0"].lost_decay == pytest.approx(float(exact), abs=1e-5)


def test_the_decay_of_a_rule_is_the_scalar_that_it_names() -> None:
    """Its options may be called anything, and the decay need not contain the rate."""

    def learned(options: dict[str, float], shrinks: Callable[[dict[str, float]], float]) -> Reading:
        rule = Rule(
            "another",
            (),
            ("rate", "shrinking"),
            lambda group, step: (-group["rate"], -shrinks(group)),
            lambda w, g, s: (g * s["rate"] + w * s["shrinking"],),
            decay="shrinking",
        )
        weight = parameters("naive", [(192, 128)])[0]
        optimizer = Optimizer([weight], rule, options, storage="naive", audit_every=1, compile=False)
        optimizer.on_alarm = lambda alarms: None
        for step in range(12):
            weight.grad = step_gradients([weight], step, 1e-2)[0]
            optimizer.step()
        return ng.audit(optimizer)["param 0"]

    apart = learned({"lr": 1.0, "rate": 1e-3, "share": 2.0**-12}, lambda group: group["share"])
    joined = learned({"lr": 1.0, "rate": 1e-3, "wd": 2.0**-12 / 1e-3}, lambda group: group["rate"] * group["wd"])
    assert 0.0 < apart.lost_decay < 1.0 and apart.lost_decay == pytest.approx(joined.lost_decay, abs=1e-3)


def readings_of_decay(storage: str, lr: float, rule: Callable[..., Any] = ng.AdamW, **options: Any) -> Reading:
    weight = parameters(storage, [(192, 128)])[0]
    optimizer = rule([weight], lr=lr, storage=storage, audit_every=1, compile=False, **options)
    optimizer.on_alarm = lambda alarms: None
    for step in range(12):
        weight.grad = step_gradients([weight], step, 1e-2)[0]
        optimizer.step()
    return ng.audit(optimizer)["param 0"]


def test_decay_is_lost_before_updates_are() -> None:
    """Heavy tails: a tenth of the gradients is a hundred times as large, so these move, and the decay of all others is lost."""
    weight = torch.nn.Parameter((torch.randn(192, 128, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16())
    lost = {}
    for storage in ("naive", "word", "master"):
        own = torch.nn.Parameter(weight.detach().clone())
        optimizer = ng.AdamW([own], lr=3e-4, eps=1e-2, weight_decay=0.1, storage=storage, audit_every=1, compile=False)
        for step in range(12):
            own.grad = step_gradients([own], step, 1e-3)[0]
            own.grad[::10] *= 100
            optimizer.step()
        lost[storage] = ng.audit(optimizer)["param 0"]
    assert lost["naive"].edq > MIN_EDQ and lost["naive"].lost_decay > 0.7
    assert all(lost[kept].edq > 0.99 and abs(lost[kept].lost_decay) < 0.05 for kept in ("word", "master"))


def test_stochastic_rounding_loses_no_decay_on_average() -> None:
    reading = readings_of_decay("stochastic", 1e-5, weight_decay=0.1)
    assert abs(reading.lost_decay) < 0.15 and readings_of_decay("naive", 1e-5, weight_decay=0.1).lost_decay > 0.95


@pytest.mark.parametrize(
    ("rule", "options"),
    [
        (ng.AdamW, {"weight_decay": 0.0}),
        (ng.Adam, {"weight_decay": 0.1}),
        (ng.SGD, {"weight_decay": 0.1}),
        (ng.optim.GradNormLoRP, {}),
    ],
    ids=["no decay", "Adam", "SGD", "GradNormLoRP"],
)
def test_decay_that_is_none_or_part_of_the_gradient_is_not_read(
    rule: Callable[..., Any], options: dict[str, Any]
) -> None:
    assert math.isnan(readings_of_decay("naive", 1e-4, rule, **options).lost_decay)


def test_a_compiled_kernel_reads_the_decay_of_its_definition() -> None:
    found = []
    for compile in (False, True):
        weight = parameters("naive", [(192, 128)])[0]
        optimizer = ng.AdamW([weight], lr=1e-5, weight_decay=0.1, storage="naive", audit_every=1, compile=compile)
        optimizer.on_alarm = lambda alarms: None
        for step in range(3):
            weight.grad = step_gradients([weight], step, 1e-2)[0]
            optimizer.step()
        found.append(ng.audit(optimizer)["param 0"].lost_decay)
    assert found[0] == pytest.approx(found[1], abs=1e-4) and found[0] > 0.9


# ── whose optimizer it is ───────────────────────────────────────────────────────────────────────────────────────────


class Wrapper:
    """As Accelerate's and Lightning's: the optimizer is their attribute, and others go through them."""

    def __init__(self, optimizer: object) -> None:
        self.optimizer = optimizer


def stalling(storage: str = "naive") -> tuple[torch.nn.Module, ng.AdamW]:
    model = torch.nn.Sequential(torch.nn.Linear(64, 64, bias=False), torch.nn.Linear(64, 64, bias=False)).bfloat16()
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(1.0)
    return model, ng.AdamW(model.parameters(), lr=1e-5, storage=storage, audit_every=1, compile=False)


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_wrapped_optimizer_is_unwrapped_and_the_model_names_its_tensors(depth: int) -> None:
    model, optimizer = stalling()
    outer: object = optimizer
    for _ in range(depth):
        outer = Wrapper(outer)
    assert ng.audit(outer, model) == {}  # type: ignore[arg-type]
    named: list[str] = []
    optimizer.on_alarm = lambda alarms: named.extend(alarm.tensor for alarm in alarms)
    for _ in range(FEWEST):
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
    assert named == ["0.weight", "1.weight"]
    assert list(ng.audit(outer)) == ["", "0.weight", "1.weight"]  # type: ignore[arg-type]


def test_gauges_of_a_wrapped_optimizer_are_those_of_the_one_inside() -> None:
    model, optimizer = stalling()
    gauges = ng.attach_gauges(model, Wrapper(optimizer), every=1)  # type: ignore[arg-type]
    for _ in range(2):
        model(torch.ones(2, 64).bfloat16()).float().sum().backward()
        optimizer.step()
    assert gauges.last is not None and gauges.last["step"] == 2
    assert set(gauges.last["updates"]) == {"0.weight", "1.weight"} == set(ng.audit(optimizer)) - {""}
    gauges.detach()


def test_an_optimizer_that_does_not_audit_is_refused() -> None:
    with pytest.raises(ng.errors.RecipeError, match="an audit of a SGD was requested"):
        ng.audit(torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))]))  # type: ignore[arg-type]
