"""Readings with known answers, and alarms that name every stall and nothing else."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import narrowgauge as ng
from narrowgauge.numerics.metrics import UPDATE_SUMS, update_metrics
from narrowgauge.optim import GaLore, sample
from narrowgauge.optim.audit import (
    FEWEST,
    WINDOW,
    Alarm,
    AuditedUpdates,
    Auditor,
    read,
    reading_of,
)
from narrowgauge.spec.significance import MIN_EDQ
from narrowgauge.spec.storages import STORAGES
from narrowgauge.torch_support.torch_names import HostCopy
from optim.pairs import parameters
from optim.scenarios import REPRESENTATIVES, arrived
from tensors import gaussian, take_steps, update_sums


def steps(edqs: list[float], weight: float = 1.0) -> Tensor:
    """Audited steps of one tensor whose every update is ``weight`` long and arrives to the given
    shares.
    """
    rows = []
    for q in edqs:
        row = torch.zeros(len(UPDATE_SUMS), dtype=torch.float64)
        lost = 10 * (1 - min(1.0, abs(q)))
        row[:5] = row.new_tensor([weight, weight * q, weight * q * q, 10, lost])
        rows.append(row)
    return torch.stack(rows)


def reading_of_steps(rows: Tensor) -> AuditedUpdates:
    """Return the reading of a window that is full, or not."""
    window = rows.new_zeros(1, WINDOW, len(UPDATE_SUMS) + 1)
    window[0, : len(rows), :-1] = rows
    window[0, : len(rows), -1] = 1
    return reading_of(read(window), 0)


def stalls(edqs: list[float]) -> bool:
    return reading_of_steps(steps(edqs)).stalls


def test_a_stall_is_named_at_the_fewest_audits_and_not_before() -> None:
    assert not stalls([0.1] * (FEWEST - 1)) and stalls([0.1] * FEWEST)
    assert not stalls([MIN_EDQ] * WINDOW)
    one_event = torch.cat([steps([0.1]), steps([0.1] * 7, weight=1e-3)])
    assert not reading_of_steps(one_event).stalls
    nothing = reading_of_steps(steps([math.nan] * 10, weight=0.0))
    assert math.isnan(nothing.edq) and math.isnan(nothing.edq_error) and not nothing.stalls


@pytest.mark.parametrize(("count", "deviation"), [(FEWEST, 50.0), (WINDOW, 0.5)])
def test_no_false_alarm_where_nothing_is_lost_however_noisy(count: int, deviation: float) -> None:
    """EDQ 1 with any noise: at most one alarm in 10,000 windows is expected, and 3 standard errors
    would raise 20.
    """
    torch.manual_seed(0)
    false = 0
    for _ in range(1000):
        noise = torch.randn(count, dtype=torch.float64)
        false += stalls((1.0 + deviation * noise).tolist())
    assert false <= 2  # the chance of three is below 2 in 10,000


def test_the_auditor_names_the_stalling_tensor_once_and_again_after_it_recovered() -> None:
    healthy = torch.zeros(1)
    stalled = torch.zeros(1)
    names = {healthy: "a", stalled: "b"}
    rows = {healthy: STORAGES["word"], stalled: STORAGES["naive"]}
    auditor = Auditor()
    raised = []
    shares = [1.0] * 10 + [0.0] * 60 + [1.0] * 40 + [0.0] * 60
    for step, share in enumerate(shares, 1):
        for owner, edq in ((healthy, 1.0), (stalled, share)):
            sample: Any = SimpleNamespace(owners=[owner], storage=rows[owner])
            auditor.fresh.append((sample, step, HostCopy(steps([edq]))))
        raised += auditor.collect(lambda: names)
        total = auditor.last
        assert total is not None and total[0] == 2.0 and total[1] == 1.0 + share
    assert [(a.tensor, a.storage, a.fallback) for a in raised] == [("b", "naive", "word")] * 2
    assert read(auditor.windows)["num_audits"].tolist() == [WINDOW] * 3
    assert raised[0].message.startswith("'b' stores 35% of its update")
    assert raised[0].message.endswith("'word' would keep it.")


@pytest.mark.parametrize("storage", REPRESENTATIVES)
def test_the_sums_are_of_the_exact_change_and_of_what_is_stored(storage: str) -> None:
    """The exact change is torch's AdamW at the stored weights, from moments that are not cut. Each
    element counts once.
    """
    shapes = [(4, 60), (3, 4, 5), (5,), (1,), (2, 2)]  # so small that a sample is the whole
    params = parameters(storage, shapes)
    options = {"lr": 1e-3, "eps": 1e-6, "weight_decay": 0.1}
    optimizer = ng.AdamW(params, **options, storage=storage, audit_every=1, low_bits="zero")
    exact = [torch.nn.Parameter(p.detach().double()) for p in params]
    reference = torch.optim.AdamW(exact, **options)
    for step in range(8):
        before = [optimizer.stored(p).double() for p in params]
        seen = [p.detach().double() for p in params]
        take_steps(optimizer, range(step, step + 1), 1e-2)
        for p, q, stored in zip(params, exact, before, strict=True):
            q.data = stored.clone()
            q.grad = p.grad.double()
        reference.step()
        expected = torch.zeros(len(UPDATE_SUMS), dtype=torch.float64)
        for p, q, stored, visible in zip(params, exact, before, seen, strict=True):
            change = optimizer.stored(p).double() - stored
            expected += update_sums(q.detach() - stored, change, p.detach().double() - visible)
        sums = dict(zip(UPDATE_SUMS, optimizer.auditor.last.tolist(), strict=True))
        for name in ("dd", "de", "ee", "nonzero", "lost", "unseen", "elements"):
            theirs = expected[UPDATE_SUMS.index(name)].item()
            assert sums[name] == pytest.approx(theirs, rel=1e-5, abs=1e-15), (name, step)


FOLLOWED: dict[str, Any] = {
    "float16/naive": ("float16/naive", 1e-4, 1e-3, True),
    "word below its window": ("word", 1e-13, 1e-3, True),
    "word above its window": ("word", 1e8, 1e-3, True),
    "compact in mixed rows": ("compact", None, 1e-3, True),
    "naive at a small rate": ("naive", 1.0, 1e-5, True),
    "float16/naive within its range": ("float16/naive", 1e-1, 1e-3, False),
    "word": ("word", 1e-8, 1e-3, False),
    "compact": ("compact", 1.0, 1e-3, False),
    "states8": ("states8", 1.0, 1e-3, False),
}
"""Storage, size of the gradients, rate, and whether that is a fault."""


def follow(storage: str, size: float | None, lr: float) -> tuple[float, float, list[int], str]:
    """Train 40 tensors, of which the 23rd has the gradients asked for.

    Return its EDQ, the fraction of float32's change of it that arrives late, the steps of alarms, and
    the table.
    """
    torch.manual_seed(0)
    dtype = getattr(torch, STORAGES[storage].visible)
    weights = [torch.nn.Parameter((torch.randn(64, 64) * 0.05).to(dtype)) for _ in range(40)]
    options: dict[str, Any] = {"lr": lr, "weight_decay": 0.0, "eps": 1e-30}
    weight = weights.pop(22)
    alone = {"params": [("tensor", weight)]}
    others = {"params": [(f"other {k}", p) for k, p in enumerate(weights)], "storage": "master"}
    if dtype is torch.float16:
        others["storage"] = "float16/split"
    optimizer = ng.AdamW([others, alone], **options, storage=storage)
    exact = torch.nn.Parameter(weight.detach().float())
    reference = torch.optim.AdamW([exact], **options)
    told = []
    optimizer.on_alarm = lambda alarms: told.extend((step, alarm.tensor) for alarm in alarms)
    scale = torch.full((64,), size or 1e-6)
    if size is None:
        scale[0] = 1.0
    drift = torch.randn(64, 64)
    for step in range(1, 101):
        if step == 51:
            starts = optimizer.stored(weight), exact.detach().double()
        for p in weights:
            p.grad = torch.full_like(p, 1e-2)
        weight.grad = ((drift + torch.randn(64, 64)) * scale).to(dtype)
        exact.grad = weight.grad.float()
        optimizer.step()
        reference.step()
    intended = exact.detach().double() - starts[1]
    slope = arrived(starts[0], optimizer.stored(weight), intended)
    assert all(name == "tensor" for _, name in told)
    readings = ng.audit(optimizer)
    return readings["tensor"].edq, slope, [step for step, _ in told], str(readings)


@pytest.mark.parametrize("name", FOLLOWED)
def test_a_fault_in_one_tensor_is_told_within_100_steps_and_nothing_else(name: str) -> None:
    """By moments that were lost, too: the reading is the fraction that arrives."""
    *case, is_fault = FOLLOWED[name]
    edq, slope, told, table = follow(*case)
    assert len(told) == is_fault and max(told, default=0) <= 60
    assert edq == pytest.approx(slope, abs=0.12 if is_fault else 0.03)
    assert slope < 0.9 if is_fault else slope > 0.95
    if is_fault:
        row = table.splitlines()[1].split()
        assert row[-2:] == ["100", "tensor"]  # when it was last seen


POWERS = 10.0 ** torch.arange(-10, 11).float()
MIXED: dict[str, list[Tensor]] = {
    "elements": [POWERS[torch.arange(64 * 64) % 21].view(64, 64)],
    "rows": [POWERS[torch.arange(64) % 21][:, None].expand(64, 64)],
    "tensors": [power.expand(64, 64) for power in POWERS],
}


@pytest.mark.parametrize("storage", ["word", "compact", "states8", "float32-states8", "exact"])
@pytest.mark.parametrize("mixed", MIXED)
def test_gradients_of_1e_minus_10_to_1e10_arrive_or_the_audit_says_so(
    storage: str, mixed: str
) -> None:
    """Within 20 steps, by a sample of a sixteenth of the elements."""
    sizes = MIXED[mixed]
    dtype = getattr(torch, STORAGES[storage].visible)
    params = [torch.nn.Parameter(torch.zeros(64, 64, dtype=dtype)) for _ in sizes]
    options: dict[str, Any] = {"eps": 0.0, "weight_decay": 0.0, "low_bits": "zero"}
    optimizer = ng.AdamW(params, lr=1e-2, storage=storage, audit_every=1, **options)
    optimizer.on_alarm = lambda alarms: None
    torch.manual_seed(0)
    for step in range(60):
        if step == 20:
            seen = [reading.edq for reading in ng.audit(optimizer).values()]
        if step == 40:
            starts = [optimizer.stored(p) for p in params]
        for p, size in zip(params, sizes, strict=True):
            p.grad = (size * (1 + 0.2 * torch.randn(64, 64))).to(dtype)
        optimizer.step()
    for p, start, size, edq in zip(params, starts, sizes, seen, strict=True):
        share = (start - optimizer.stored(p)) / (20 * 1e-2)
        worst = min(float(share[size == power].mean()) for power in size.unique())
        assert worst > 0.9 or edq < 0.97, (worst, edq)


@pytest.mark.parametrize("storage", ["word", "compact", "states8"])
def test_rows_that_are_hit_rarely_are_stored_and_not_told(storage: str) -> None:
    """Of 20 rows one each 25th step: a moment falls by 10²³ between two gradients of its row."""
    torch.manual_seed(1)
    weight = torch.nn.Parameter((torch.randn(20, 256) * 0.05).bfloat16())
    exact = torch.nn.Parameter(weight.detach().float())
    options: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.0}
    optimizer = ng.AdamW([weight], **options, storage=storage)
    reference = torch.optim.AdamW([exact], **options)
    for step in range(1100):
        if step == 500:
            starts = optimizer.stored(weight), exact.detach().double()
        row_is_hit = (torch.arange(20) == step // 25 % 20)[:, None] * (step % 25 == 0)
        weight.grad = ((torch.randn(20, 256) + 1) * row_is_hit).bfloat16()
        exact.grad = weight.grad.float()
        optimizer.step()  # an alarm is a warning, and an error here
        reference.step()
    intended = exact.detach().double() - starts[1]
    assert arrived(starts[0], optimizer.stored(weight), intended) == pytest.approx(1, abs=0.05)


RANGES = {"word": (1e8, 1e10, 1e12), "states8": (), "compact": (), "split": ()}
"""Gradients whose moments `word` cuts. Other storages have scales, or float32's range."""


@pytest.mark.parametrize("storage", RANGES)
def test_moments_at_the_end_of_a_range_are_told_at_the_second_audit(storage: str) -> None:
    for size in (1e-6, 1.0, 5e7, 1e8, 1e10, 1e12):
        (weight,) = parameters(storage, [(32, 256)])
        optimizer = ng.AdamW([weight], lr=1e-4, weight_decay=0.0, storage=storage, audit_every=5)
        alarms: list[Alarm] = []
        optimizer.on_alarm = alarms.extend
        for step in range(20):
            weight.grad = gaussian(32, 256, seed=step, scale=size, dtype=weight.dtype)
            optimizer.step()
        told = [alarm.reading.last_step for alarm in alarms]
        assert told == ([10] if size in RANGES[storage] else []), size
        assert (ng.audit(optimizer)["param 0"].at_end > 0.01) == bool(told)


def test_states_that_are_moved_between_steps_have_the_audit_of_states_that_stay() -> None:
    """Offloading. bfloat16 holds a second moment up, when gradients become small."""
    shares = []
    for is_moved in (False, True):
        (weight,) = parameters("kahan", [(64, 64)])
        optimizer = ng.AdamW([weight], lr=1e-3, betas=(0.9, 0.998), storage="kahan", audit_every=5)
        optimizer.on_alarm = lambda alarms: None
        for step in range(300):
            draw = torch.Generator().manual_seed(step)
            size = 1.0 if step < 20 else 1e-2
            weight.grad = (size * torch.randn(64, 64, generator=draw)).bfloat16()
            optimizer.step()
            state = optimizer.state[weight]
            if is_moved:
                state.update((name, state[name].clone()) for name in [*state])
        shares.append(ng.audit(optimizer)["param 0"].edq)
    assert shares[0] < 0.9 and shares[1] == pytest.approx(shares[0], abs=0.05)


def test_a_parameter_without_states_may_become_shorter() -> None:
    """As by transformers' ``resize_token_embeddings``: nothing is read beyond it."""
    weight = torch.nn.Parameter(torch.ones(50_000, 8))
    optimizer = ng.SGD([weight], lr=1e-2, storage="float32")
    for step in range(30):
        if step == 3:
            weight.data = weight.data[:10].clone()
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    assert ng.audit(optimizer)["param 0"].edq == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("rule", [ng.AdamW, ng.Adam])
def test_the_exact_moments_are_those_of_every_step(rule: Callable[..., Any]) -> None:
    """However few steps are audited, and whichever code steps."""
    last = []
    for audit_every, compiled in ((1, None), (40, None), (1, False), (20, False)):
        params = parameters("word", [(33, 20), (5,), (40, 7)])
        options = {"weight_decay": 0.1, "storage": "word", "compile": compiled}
        optimizer = rule(params, lr=1e-3, audit_every=audit_every, **options)
        take_steps(optimizer, range(40))
        last.append(optimizer.auditor.last)
    assert all(sums.equal(last[0]) for sums in last)


def test_a_fault_in_one_of_many_tensors_that_step_alike_is_told() -> None:
    """Each of 300 has a sample of 32 elements."""
    torch.manual_seed(0)
    weights = [torch.nn.Parameter((torch.randn(32, 32) * 0.05).bfloat16()) for _ in range(300)]
    optimizer = ng.AdamW(weights, lr=1e-4, weight_decay=0.0)
    told = []
    optimizer.on_alarm = lambda alarms: told.extend(alarm.tensor for alarm in alarms)
    for _ in range(60):
        for place, p in enumerate(weights):
            p.grad = (1 + torch.randn(32, 32)).bfloat16()
            if place == 22:
                p.grad *= 1e8
        optimizer.step()
    assert told == ["param 22"]
    assert ng.audit(optimizer)["param 21"].edq == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize("numel", [1, 255, 256, 257, 64 * 256, 20 * 300, 50_257 * 768])
def test_a_sample_is_of_different_places_in_all_columns_and_of_others_in_each_turn(
    numel: int,
) -> None:
    turns = [sample.sample_of(numel, 256, turn) for turn in range(3)]
    for places in turns:
        assert len(places) == min(256, numel) and places.step % 2
        assert places[0] >= 0 and places[-1] < numel
    if numel > 10_000:
        assert len({place % 256 for place in turns[0]}) == 256
        assert len({places[0] for places in turns}) == 3


def test_a_skipped_step_is_not_audited() -> None:
    weight = torch.nn.Parameter(torch.ones(4, 4))
    optimizer = ng.AdamW(
        [weight], storage="float32", audit_every=1, max_grad_norm=1.0, compile=False
    )
    for value in (1.0, math.inf, 1.0):
        weight.grad = torch.full_like(weight, value)
        optimizer.step()
    reading = ng.audit(optimizer)["param 0"]
    assert (optimizer.num_skipped, reading.num_audits) == (1, 2)
    assert reading.edq == pytest.approx(1.0, abs=1e-3)


def lost_decay_of_two(
    storage: str, rule: Callable[..., Any], lr: float, decay: float
) -> tuple[float, float]:
    """A step's lost decay as audited, and in float64 from two optimizers, the second without decay.

    Both begin with the same weights, states and random bits, so what they store differs by what the
    difference in decay did.
    """
    start = gaussian(96, 80, scale=0.02, dtype=getattr(torch, STORAGES[storage].visible))
    stored = []
    for weight_decay in (0.0, decay):
        weight = torch.nn.Parameter(start.clone())
        options = {"storage": storage, "audit_every": 1, "compile": False}
        optimizer = rule([weight], lr=lr, weight_decay=0.0, **options)
        take_steps(optimizer, range(2), 1e-2)
        before = optimizer.stored(weight).double()
        visible = weight.detach().double()
        optimizer.param_groups[0]["weight_decay"] = weight_decay
        take_steps(optimizer, range(2, 3), 1e-2)
        stored.append(optimizer.stored(weight).double())
    # An element-wise rule reads the leading part of a pair, as the sources' do; a matrix rule gets
    # the whole weight.
    is_leading = rule in (ng.AdamW, ng.Lion) and STORAGES[storage].weight.parts > 1
    intended = -lr * decay * (visible if is_leading else before)
    without, after = stored
    exact = 1 - (intended * (after - without)).sum() / intended.square().sum()
    last = optimizer.auditor.last
    return update_metrics(last)["lost_decay"].item(), exact.item()


OTHERS = [(ng.Lion, "kahan"), (ng.Muon, "naive"), (GaLore, "kahan")]


@pytest.mark.parametrize(
    ("rule", "storage"),
    [*((ng.AdamW, name) for name in ("word", "naive", "compact", "collage-plus")), *OTHERS],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_lost_decay_is_that_of_two_optimizers(
    monkeypatch: pytest.MonkeyPatch, storage: str, rule: Callable[..., Any]
) -> None:
    """Where a step's decay is a 16th of the weight's spacing or more."""
    monkeypatch.setattr(sample, "ELEMENTS", 1 << 20)
    lr = 2.0**-10 if STORAGES[storage].weight.mantissa_bits >= 7 else 2.0**-6
    audited, exact = lost_decay_of_two(storage, rule, lr, 2.0**-1)
    assert audited == pytest.approx(exact, abs=2e-3)


def test_a_wrapped_optimizer_is_unwrapped_and_the_model_names_its_tensors() -> None:
    """As Accelerate's and Lightning's: the optimizer is their attribute. A group that is added later
    is audited, too.
    """
    first, late = parameters("naive", [(8, 8), (4, 4)])
    model = torch.nn.Module()
    model.first, model.late = first, late
    optimizer = ng.AdamW([first], lr=1e-5, storage="naive", audit_every=1)
    outer: Any = SimpleNamespace(optimizer=SimpleNamespace(optimizer=optimizer))
    assert ng.audit(outer, model) == {}
    take_steps(optimizer, range(1))
    assert list(ng.audit(outer)) == ["first"]
    optimizer.add_param_group({"params": [late]})
    take_steps(optimizer, range(1, 2))
    readings = ng.audit(outer)
    assert list(readings) == ["first", "late"]
    assert readings.total.num_audits == 2 and readings.total.last_step == 2
