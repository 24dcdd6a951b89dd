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
from narrowgauge.numerics.metrics import UPDATE_SUMS, update_metrics, update_sums
from narrowgauge.optim import GaLore, sample
from narrowgauge.optim.audit import FEWEST, WINDOW, Auditor, read
from narrowgauge.optim.clip import Decision
from narrowgauge.spec.significance import MIN_EDQ
from narrowgauge.spec.storages import STORAGES
from optim.pairs import parameters
from optim.scenarios import REPRESENTATIVES, arrived
from tensors import gaussian, take_steps


def row(**sums: float) -> Tensor:
    return torch.tensor([sums.get(name, 0.0) for name in UPDATE_SUMS], dtype=torch.float64)


def steps(edqs: list[float], weight: float = 1.0) -> list[Tensor]:
    """Audited steps of one tensor whose every update is ``weight`` long and arrives to the given
    shares.
    """
    rows = []
    for q in edqs:
        rows.append(
            row(
                dd=weight,
                de=weight * q,
                ee=weight * q * q,
                nonzero=10,
                lost=10 * (1 - min(1.0, abs(q))),
            )
        )
    return rows


def sums_of(edq: float) -> Tensor:
    return torch.stack(steps([edq]))


def test_everything_taken_reads_one_and_nothing_taken_reads_zero() -> None:
    d = torch.tensor([1.0, -2.0, 0.0, 0.5])
    nothing = torch.zeros(4)
    perfect = read([update_sums(d, d, nothing)] * 3)
    assert (perfect.edq, perfect.edq_error, perfect.noise, perfect.lost_fraction) == (
        1.0,
        0.0,
        0.0,
        0.0,
    )
    assert (perfect.unseen_fraction, perfect.num_audits) == (1.0, 3)
    stalled = read([update_sums(d, nothing, nothing)] * 3)
    assert (stalled.edq, stalled.noise, stalled.lost_fraction) == (0.0, 1.0, 1.0)


def stalls(rows: list[Tensor]) -> bool:
    return read(rows).stalls


def test_nothing_intended_judges_nothing() -> None:
    reading = read([row()] * 10)
    assert math.isnan(reading.edq) and math.isnan(reading.edq_error)
    assert not stalls([row()] * 10) and not stalls([row(dd=math.nan, de=math.nan)] * 10)


def test_a_stall_is_named_at_the_fewest_audits_and_not_before() -> None:
    assert not stalls(steps([0.1] * (FEWEST - 1)))
    assert stalls(steps([0.1] * FEWEST))
    assert not stalls(steps([MIN_EDQ] * WINDOW))
    still = steps([0.1], weight=1e-3)
    assert not stalls(steps([0.1]) + still * 7)  # one event


@pytest.mark.parametrize(("count", "deviation"), [(FEWEST, 50.0), (WINDOW, 0.5)])
def test_no_false_alarm_where_nothing_is_lost_however_noisy(count: int, deviation: float) -> None:
    """EDQ 1 with any noise: at most one alarm in 10,000 windows is expected, and 3 standard errors
    would raise 20.
    """
    false = 0
    for seed in range(1000):
        noise = torch.randn(
            count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
        )
        false += stalls(steps((1.0 + deviation * noise).tolist()))
    assert false <= 2  # the chance of three is below 2 in 10,000


def test_the_auditor_names_the_stalling_tensor_once_and_again_after_it_recovered() -> None:
    healthy = torch.zeros(1)
    stalled = torch.zeros(1)
    names = {healthy: "a", stalled: "b"}
    rows = {healthy: STORAGES["word"], stalled: STORAGES["naive"]}
    auditor = Auditor()
    raised = []
    for share in [1.0] * 10 + [0.0] * 60 + [1.0] * 40 + [0.0] * 60:
        auditor.fresh.append(([healthy, stalled], torch.cat([sums_of(1.0), sums_of(share)])))
        total = auditor.collect()
        assert total is not None and total[0] == 2.0 and total[1] == 1.0 + share
        raised += auditor.alarms(lambda: names, rows.__getitem__)
    assert [(a.tensor, a.storage, a.fallback) for a in raised] == [("b", "naive", "word")] * 2
    assert all(len(window) == WINDOW for window in auditor.windows.values())
    assert raised[0].message.startswith("'b' loses ")
    assert "'word' would keep it" in raised[0].message


def test_a_group_added_later_is_audited_with_the_others_of_all_ranks() -> None:
    first, late = parameters("word", [(8, 8), (4, 4)])
    optimizer = ng.AdamW([("first", first)], audit_every=1)
    optimizer.auditor.is_joined = True
    take_steps(optimizer, range(1))
    assert list(ng.audit(optimizer)) == ["first"]
    optimizer.add_param_group({"params": [("late", late)]})
    take_steps(optimizer, range(1, 2))
    assert list(ng.audit(optimizer)) == ["first", "late"]


def test_an_audit_of_all_ranks_is_joined_within_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on an accelerator, where other steps are settled later: one rank alone may ask for it
    then, and would hang.
    """
    optimizer = ng.AdamW(parameters("word", [(8, 8)]), audit_every=2)
    joined: list[int] = []
    there = Decision(SimpleNamespace(is_cpu=False), None)  # type: ignore[arg-type]
    monkeypatch.setattr(optimizer, "_control", lambda *_, **__: there)
    monkeypatch.setattr(
        "narrowgauge.optim.optimizer.Step", lambda *_: SimpleNamespace(run=lambda work: None)
    )

    optimizer.auditor.is_joined = True
    monkeypatch.setattr(optimizer.auditor, "join", lambda parameters: joined.append(step))
    for step in range(1, 6):
        take_steps(optimizer, range(1))
        assert joined == [2, 4][: step // 2]


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
        sums = dict(zip(UPDATE_SUMS, optimizer.last_audit.tolist(), strict=True))
        names = ["dd", "de", "ee", "nonzero", "lost", "unseen", "elements"]
        for name in names:
            theirs = expected[UPDATE_SUMS.index(name)].item()
            assert sums[name] == pytest.approx(theirs, rel=1e-5, abs=1e-15), (name, step)


FOLLOWED: dict[str, Any] = {
    "float16/naive": ("float16/naive", 1e-4, 1e-3, True),
    "word below its window": ("word", 1e-13, 1e-3, True),
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
    assert told == ([50] if is_fault else [])
    assert edq == pytest.approx(slope, abs=0.12 if is_fault else 0.03)
    assert slope < 0.5 if is_fault else slope > 0.95
    if is_fault:
        row = table.splitlines()[1].split()
        assert row[0] == "tensor" and row[-1] == "100"  # when it was last seen


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


def test_a_state_that_a_script_has_changed_is_no_fault() -> None:
    """ReLoRA's, which prunes the moments: the exact ones begin again with those that are stored."""
    (weight,) = parameters("exact", [(64, 64)])
    optimizer = ng.AdamW([weight], storage="exact", audit_every=1)
    take_steps(optimizer, range(20))
    for name in ("exp_avg", "exp_avg_sq"):
        optimizer.state[weight][name].mul_(0.01)
    take_steps(optimizer, range(20, 20 + WINDOW))
    assert ng.audit(optimizer)["param 0"].edq == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("numel", [1, 255, 256, 257, 64 * 256, 20 * 300, 50_257 * 768])
def test_a_sample_is_of_different_places_in_all_columns(numel: int) -> None:
    places = sample.sample_of(numel, 256)
    assert len(places) == min(256, numel)
    assert places[0] >= 0 and places[-1] < numel and places.step % 2
    if numel == 64 * 256:
        assert len({place % 256 for place in places}) == 256


def test_after_the_first_steps_each_tensor_is_sampled_in_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sample, "FIRST_STEPS", 4)
    weights = parameters("naive", [(8, 8)] * 40)
    optimizer = ng.AdamW(weights, lr=1e-9, storage="naive", audit_every=2)
    optimizer.on_alarm = lambda alarms: None
    seen = []
    for step in range(4 + 4 * 16):
        take_steps(optimizer, range(step, step + 1))
        readings = ng.audit(optimizer)
        seen.append(sum(r.last_step == step + 1 for r in readings.values()))
    assert seen[:4] == [0, 40, 0, 40] and set(seen[5::2]) == {2, 3}
    first = {r.last_step for r in readings.values()}
    assert min(first) > 4 and len(first) >= 16  # each was seen in its turn


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
    (window,) = optimizer.auditor.windows.values()
    return update_metrics(window[-1])["lost_decay"].item(), exact.item()


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
    monkeypatch.setattr(sample, "FIRST_ELEMENTS", 1 << 20)
    lr = 2.0**-10 if STORAGES[storage].weight.mantissa_bits >= 7 else 2.0**-6
    audited, exact = lost_decay_of_two(storage, rule, lr, 2.0**-1)
    assert audited == pytest.approx(exact, abs=2e-3)


def test_a_wrapped_optimizer_is_unwrapped_and_the_model_names_its_tensors() -> None:
    """As Accelerate's and Lightning's: the optimizer is their attribute, and others go through
    them.
    """
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 64, bias=False), torch.nn.Linear(64, 64, bias=False)
    ).bfloat16()
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(1.0)
    optimizer = ng.AdamW(model.parameters(), lr=1e-5, storage="naive", audit_every=1, compile=False)
    outer: Any = SimpleNamespace(optimizer=SimpleNamespace(optimizer=optimizer))
    assert ng.audit(outer, model) == {}
    named: list[str] = []
    optimizer.on_alarm = lambda alarms: named.extend(alarm.tensor for alarm in alarms)
    for _ in range(FEWEST):
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
    assert named == list(ng.audit(outer)) == ["0.weight", "1.weight"]


def test_steps_of_all_tensors_are_added_from_the_latest() -> None:
    old, late = parameters("word", [(8, 8), (4, 4)])
    optimizer = ng.AdamW([old, late])
    rows = steps([1.0, 0.9, 0.0])
    for place, row in enumerate(rows):
        members = [old, late] if place == 2 else [old]
        optimizer.auditor.fresh.append((members, torch.stack([row] * len(members))))
        optimizer.auditor.collect()
    total = ng.audit(optimizer).total
    assert total is not None
    assert total.edq_error == read([rows[0], rows[1], 2 * rows[2]]).edq_error
