"""Readings with known answers, and alarms that name every stall and nothing else."""

import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import narrowgauge as ng
from narrowgauge.numerics.metrics import UPDATE_SUMS
from narrowgauge.optim.audit import audit_sample
from narrowgauge.optim.audit.audit import (
    FEWEST,
    WINDOW,
    AuditedUpdates,
    Auditor,
    read,
    reading_of,
)
from narrowgauge.optim.rules.elementwise import Rule
from narrowgauge.spec.significance import MIN_EDQ
from narrowgauge.spec.storages import STATE_NAMES, STORAGES
from narrowgauge.torch_support.torch_names import HostCopy
from optim.pairs import narrow, parameters, step_along
from optim.scenarios import REPRESENTATIVES, arrived
from tensors import gaussian, set_gradients, take_steps, update_sums


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


def test_a_stall_is_named_at_the_fewest_audits_and_not_before():
    assert not stalls([0.1] * (FEWEST - 1)) and stalls([0.1] * FEWEST)
    assert not stalls([MIN_EDQ] * WINDOW)
    one_event = torch.cat([steps([0.1]), steps([0.1] * 7, weight=1e-3)])
    assert not reading_of_steps(one_event).stalls
    nothing = reading_of_steps(steps([math.nan] * 10, weight=0.0))
    assert math.isnan(nothing.edq) and math.isnan(nothing.edq_error) and not nothing.stalls


@pytest.mark.parametrize(("count", "deviation"), [(FEWEST, 50.0), (WINDOW, 0.5)])
def test_no_false_alarm_where_nothing_is_lost_however_noisy(count, deviation):
    """EDQ 1 with any noise: at most one alarm in 10,000 windows is expected, and 3 standard errors
    would raise 20.
    """
    torch.manual_seed(0)
    false = 0
    for _ in range(1000):
        noise = torch.randn(count, dtype=torch.float64)
        false += stalls((1.0 + deviation * noise).tolist())
    assert false <= 2  # the chance of three is below 2 in 10,000


def test_the_auditor_names_the_stalling_tensor_once_and_again_after_it_recovered():
    healthy, stalled = (torch.zeros(1), "word"), (torch.zeros(1), "naive")
    names = {healthy[0]: "a", stalled[0]: "b"}
    auditor = Auditor()
    raised = []
    shares = [1.0] * 10 + [0.0] * 60 + [1.0] * 40 + [0.0] * 60
    for step, share in enumerate(shares, 1):
        for (owner, storage), edq in ((healthy, 1.0), (stalled, share)):
            sample = SimpleNamespace(owners=[owner], storage=STORAGES[storage])
            row = torch.nn.functional.pad(steps([edq]), (0, 1), value=step)
            auditor.fresh.append((sample, HostCopy(row)))
        raised += auditor.collect(lambda: names)
        assert auditor.last is not None and auditor.last[:2].tolist() == [2.0, 1.0 + share]
    assert [(a.tensor, a.storage, a.fallback) for a in raised] == [("b", "naive", "word")] * 2
    assert read(auditor.windows)["num_audits"].tolist() == [WINDOW] * 3
    assert raised[0].message.startswith("'b' stores 35% of its update")
    assert raised[0].message.endswith("'word' would keep it.")
    larger = replace(raised[0], reading=replace(raised[0].reading, edq=1.4))
    assert "stores 140% of its update" in larger.message and "other code" in larger.message


@pytest.mark.parametrize(("storage", "is_told"), [("naive", True), ("stochastic", False)])
def test_few_changes_of_a_random_rounding_are_chance(storage, is_told):
    auditor = Auditor()
    sample = SimpleNamespace(owners=[torch.zeros(1)], storage=STORAGES[storage])
    raised = []
    for step in range(1, WINDOW):
        row = torch.nn.functional.pad(steps([0.0]), (0, 1), value=step)
        auditor.fresh.append((sample, HostCopy(row)))
        raised += auditor.collect(dict)
    assert bool(raised) == is_told


@pytest.mark.parametrize("storage", REPRESENTATIVES)
def test_the_sums_are_of_the_exact_change_and_of_what_is_stored(storage):
    """The exact change is torch's AdamW at the stored weights, from moments that are not cut. Each
    element counts once.
    """
    shapes = [(4, 60), (3, 4, 5), (5,), (1,), (2, 2)]  # so small that a sample is the whole
    params = parameters(storage, shapes)
    options = {"lr": 1e-3, "eps": 1e-6, "weight_decay": 0.1}
    optimizer = ng.AdamW(params, **options, storage=storage, audit_every=1, low_bits="zero")
    exact = [nn.Parameter(p.detach().double()) for p in params]
    reference = torch.optim.AdamW(exact, **options)
    for step in range(8):
        before = [(optimizer.stored(p).double(), p.detach().double()) for p in params]
        take_steps(optimizer, range(step, step + 1), 1e-2)
        expected = torch.zeros(len(UPDATE_SUMS), dtype=torch.float64)
        for p, q, (stored, visible) in zip(params, exact, before, strict=True):
            q.data = stored.clone()
            q.grad = p.grad.double()
            reference.step()
            q.grad = None  # the next step is another tensor's
            change = optimizer.stored(p).double() - stored
            expected += update_sums(q.detach() - stored, change, p.detach().double() - visible)
        sums = dict(zip(UPDATE_SUMS, optimizer.auditor.last.tolist(), strict=True))
        for name in ("dd", "de", "ee", "nonzero", "lost", "unseen", "elements"):
            theirs = expected[UPDATE_SUMS.index(name)].item()
            assert sums[name] == pytest.approx(theirs, rel=1e-5, abs=1e-15), (name, step)


def arrives(
    optimizer: ng.Optimizer, weight: nn.Parameter, draw: Callable[[int], Tensor], steps: range
) -> float:
    """Step a weight along drawn gradients, beside torch's AdamW in float32.

    Return the fraction of float32's change that arrives, from the first of ``steps`` on.
    """
    exact = nn.Parameter(weight.detach().float())
    group = optimizer.param_groups[-1]
    reference = torch.optim.AdamW([exact], lr=group["lr"], eps=group["eps"], weight_decay=0.0)
    for step in range(steps.stop):
        if step == steps.start:
            starts = optimizer.stored(weight), exact.detach().double()
        weight.grad = draw(step).to(weight.dtype)
        exact.grad = weight.grad.float()
        optimizer.step()
        reference.step()
    return arrived(starts[0], optimizer.stored(weight), exact.detach().double() - starts[1])


def watched(params: Any, **options: Any):
    """Return an AdamW without decay, and the list of its alarms."""
    optimizer = ng.AdamW(params, weight_decay=0.0, **options)
    alarms = []
    optimizer.on_alarm = alarms.extend
    return optimizer, alarms


FOLLOWED = {
    "float16/naive": ("float16/naive", 1e-4, 1e-3, True, "float16/split", 40),
    "word below its window": ("word", 1e-13, 1e-3, True, "master", 40),
    "word above its window": ("word", 1e8, 1e-3, True, "master", 40),
    "one of 300 that step alike": ("word", 1e8, 1e-4, True, "word", 300),
    "compact in mixed rows": ("compact", None, 1e-3, True, "master", 40),
    "naive at a small rate": ("naive", 1.0, 1e-5, True, "master", 40),
    "float16/naive within its range": ("float16/naive", 1e-1, 1e-3, False, "float16/split", 40),
    "word": ("word", 1e-8, 1e-3, False, "master", 40),
    "compact": ("compact", 1.0, 1e-3, False, "master", 40),
    "states8": ("states8", 1.0, 1e-3, False, "master", 40),
}
"""Storage, size of the gradients, rate, and whether that is a fault; the storage of the other
tensors, and how many there are.
"""


@pytest.mark.parametrize("name", FOLLOWED)
def test_a_fault_in_one_tensor_is_told_within_100_steps_and_nothing_else(name):
    """By moments that were lost, too: the reading is the fraction that arrives."""
    storage, size, lr, is_fault, storage_of_others, count = FOLLOWED[name]
    torch.manual_seed(1)
    weights = parameters(storage, [(64, 64)] * count, scale=0.05)
    for p in weights:
        p.grad = torch.full_like(p, 1e-2)
    groups = [{"params": weights}]
    if storage_of_others != storage:
        groups = [{"params": part} for part in (weights[:22], weights[22:23], weights[23:])]
        groups[0]["storage"] = groups[2]["storage"] = storage_of_others
    optimizer, alarms = watched(groups, lr=lr, eps=1e-30, storage=storage)
    scale = torch.full((64,), size or 1e-6)
    if size is None:
        scale[0] = 1.0
    drift = torch.randn(64, 64)
    share = arrives(
        optimizer, weights[22], lambda step: (drift + torch.randn(64, 64)) * scale, range(50, 100)
    )
    assert [alarm.tensor for alarm in alarms] == ["param 22"] * is_fault
    readings = ng.audit(optimizer)
    assert readings["param 22"].edq == pytest.approx(share, abs=0.12 if is_fault else 0.03)
    if is_fault:
        assert share < 0.9 and alarms[0].reading.last_step <= 60
        assert str(readings).splitlines()[1].split()[-3:] == ["100", "param", "22"]  # last seen
    else:
        assert share > 0.95


POWERS = 10.0 ** torch.arange(-10, 11).float()
MIXED = {
    "elements": [POWERS[torch.arange(64 * 64) % 21].view(64, 64)],
    "rows": [POWERS[torch.arange(64) % 21][:, None].expand(64, 64)],
    "tensors": [power.expand(64, 64) for power in POWERS],
}


@pytest.mark.parametrize("storage", ["word", "compact", "states8", "float32-states8", "exact"])
@pytest.mark.parametrize("mixed", MIXED)
def test_gradients_of_1e_minus_10_to_1e10_arrive_or_the_audit_says_so(storage, mixed):
    """Within 20 steps, by a sample of a sixteenth of the elements."""
    sizes = MIXED[mixed]
    params = parameters(storage, [(64, 64)] * len(sizes), scale=0.0)
    options = {"eps": 0.0, "low_bits": "zero", "audit_every": 1}
    optimizer, _ = watched(params, lr=1e-2, storage=storage, **options)
    torch.manual_seed(0)
    for step in range(60):
        if step == 20:
            seen = [reading.edq for reading in ng.audit(optimizer).values()]
        if step == 40:
            starts = [optimizer.stored(p) for p in params]
        for p, size in zip(params, sizes, strict=True):
            p.grad = (size * (1 + 0.2 * torch.randn(64, 64))).to(p.dtype)
        optimizer.step()
    for p, start, size, edq in zip(params, starts, sizes, seen, strict=True):
        share = (start - optimizer.stored(p)) / (20 * 1e-2)
        worst = min(float(share[size == power].mean()) for power in size.unique())
        assert worst > 0.9 or edq < 0.97, (worst, edq)


@pytest.mark.parametrize("storage", ["word", "compact", "states8"])
def test_rows_that_are_hit_rarely_are_stored_and_not_told(storage):
    """Of 20 rows one each 25th step: a moment falls by 10²³ between two gradients of its row."""
    torch.manual_seed(1)
    (weight,) = parameters(storage, [(20, 256)], scale=0.05)
    optimizer, alarms = watched([weight], lr=1e-3, storage=storage)

    def draw(step):
        row_is_hit = (torch.arange(20) == step // 25 % 20)[:, None] * (step % 25 == 0)
        return (torch.randn(20, 256) + 1) * row_is_hit

    assert arrives(optimizer, weight, draw, range(500, 1100)) == pytest.approx(1, abs=0.05)
    assert not alarms


RANGES = {"word": (1e8, 1e10, 1e12), "states8": (), "compact": (), "split": ()}
"""Gradients whose moments `word` cuts. Other storages have scales, or float32's range."""


@pytest.mark.parametrize("storage", RANGES)
def test_moments_at_the_end_of_a_range_are_told_at_the_second_audit(storage):
    for size in (1e-6, 1.0, 5e7, 1e8, 1e10, 1e12):
        (weight,) = parameters(storage, [(32, 256)])
        optimizer, alarms = watched([weight], lr=1e-4, storage=storage, audit_every=5)
        for step in range(20):
            weight.grad = gaussian(32, 256, seed=step, scale=size, dtype=weight.dtype)
            optimizer.step()
        told = [alarm.reading.last_step for alarm in alarms]
        assert told == ([10] if size in RANGES[storage] else []), size
        assert (ng.audit(optimizer)["param 0"].at_end > 0.01) == bool(told)


def test_states_that_are_moved_between_steps_have_the_audit_of_states_that_stay():
    """Offloading. bfloat16 holds a second moment up, when gradients become small."""
    shares = []
    for is_moved in (False, True):
        (weight,) = parameters("kahan", [(64, 64)])
        options = {"betas": (0.9, 0.998), "storage": "kahan", "audit_every": 5}
        optimizer, _ = watched([weight], lr=1e-3, **options)
        for step in range(300):
            take_steps(optimizer, range(step, step + 1), 1.0 if step < 20 else 1e-2)
            state = optimizer.state[weight]
            if is_moved:
                state.update((name, state[name].clone()) for name in [*state])
        shares.append(ng.audit(optimizer)["param 0"].edq)
    assert shares[0] < 0.9 and shares[1] == pytest.approx(shares[0], abs=0.05)


PRUNED = {
    "not": "",
    "in place": "s[n].mul_(kept)",
    "replaced": "s[n] = s[n] * kept",
    "freed first": "s[n] = s.pop(n).float().mul_(kept).to(kept.dtype)",
    "by data": "s[n].data = s[n] * kept",
}
"""Statements of a script, of a state and the name of a moment."""


@pytest.mark.parametrize("storage", STORAGES)
def test_moments_that_a_script_prunes_are_no_loss_of_the_storage(storage):
    """In place, by another tensor, or by ``adopt`` where they are packed: as ReLoRA's restarts."""
    readings = {}
    for way in PRUNED:
        (weight,) = parameters(storage, [(64, 64)])
        optimizer, _ = watched([weight], lr=1e-3, storage=storage, audit_every=3, compile=False)
        for step in range(30):
            weight.grad = (1 + gaussian(64, 64, seed=step)).to(weight.dtype)
            optimizer.step()
            if step in (7, 14, 21):
                is_packed = prune(optimizer, weight, way)
        readings[way] = ng.audit(optimizer)["param 0"].edq
        if is_packed and way != "not":
            break  # only by one way
    assert list(readings.values()) == pytest.approx([readings["not"]] * len(readings), abs=0.03)


def prune(optimizer: ng.Optimizer, weight: nn.Parameter, way: str) -> bool:
    """Drop three of four moments, and return whether they are packed."""
    state = optimizer.state[weight]
    is_kept = torch.arange(64) % 4 == 0
    pruned = {name: optimizer.stored(weight, name) * is_kept for name in STATE_NAMES}
    is_packed = not state.keys() >= pruned.keys()
    if is_packed and way != "not":
        optimizer.adopt({weight: optimizer.stored(weight)}, {weight: pruned})
    elif not is_packed:
        for name in STATE_NAMES:
            exec(PRUNED[way], {"s": state, "n": name, "kept": is_kept.to(state[name].dtype)})
    return is_packed


def test_a_parameter_without_states_may_become_shorter():
    """As by transformers' ``resize_token_embeddings``: nothing is read beyond it."""
    weight = nn.Parameter(torch.ones(50_000, 8))
    optimizer = ng.SGD([weight], lr=1e-2, storage="float32")
    for step in range(30):
        if step == 3:
            weight.data = weight.data[:10].clone()
        step_along(optimizer, 1.0)
    assert ng.audit(optimizer)["param 0"].edq == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("storage", ["word", "kahan", "float16/split", "exact", "float32"])
@pytest.mark.parametrize("rule", [ng.AdamW, ng.Adam, ng.Lion])
def test_the_exact_moments_are_those_of_every_step(rule, storage):
    """However few steps are audited, and whichever code steps, of gradients in two formats."""
    last = []
    for audit_every, compiled in ((1, None), (40, None), (1, False), (20, False)):
        params = parameters(storage, [(33, 20), (5,), (40, 7)])
        options = {"weight_decay": 0.1, "storage": storage, "compile": compiled}
        optimizer = rule(params, lr=1e-3, max_grad_norm=1.0, audit_every=audit_every, **options)
        params[1].grad_dtype = None
        for step in range(40):
            set_gradients(params, step)
            params[1].grad = params[1].grad.float() / 3
            optimizer.step()
        last.append(optimizer.auditor.last)
    assert all(sums.equal(last[0]) for sums in last)


def test_a_penalty_in_the_moments_of_a_users_rule_is_no_loss():
    def update(weight, gradient, moment, scalars):
        moment = moment * 0.9 + gradient + weight
        return -scalars["lr"] * moment, moment

    rule = Rule("penalized", ("exp_avg",), ("lr",), lambda group, _: (group["lr"],), update)
    (weight,) = parameters("word", [(64, 64)])
    optimizer = ng.Optimizer([weight], rule, {"lr": 1e-3}, storage="word", compile=False)
    take_steps(optimizer, range(40), 0.1)
    assert ng.audit(optimizer)["param 0"].edq == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize("numel", [1, 255, 256, 257, 64 * 256, 20 * 300, 50_257 * 768])
def test_a_sample_is_of_different_places_in_all_columns_and_of_others_in_each_turn(
    numel,
):
    turns = [audit_sample.sample_of(numel, 256, turn) for turn in range(3)]
    for places in turns:
        assert len(places) == min(256, numel) and places.step % 2
        assert places[0] >= 0 and places[-1] < numel
    if numel > 10_000:
        assert len({place % 256 for place in turns[0]}) == 256
        assert len({places[0] for places in turns}) == 3


def test_a_skipped_step_is_not_audited():
    optimizer = ng.AdamW([narrow(4, 4)], audit_every=1, max_grad_norm=1.0, compile=False)
    for value in (1.0, math.inf, 1.0):
        step_along(optimizer, value)
    reading = ng.audit(optimizer)["param 0"]
    assert (optimizer.num_skipped, reading.num_audits) == (1, 2)
    assert reading.edq == pytest.approx(1.0, abs=1e-3)


def test_a_wrapped_optimizer_is_unwrapped_and_the_model_names_its_tensors():
    """As Accelerate's and Lightning's: the optimizer is their attribute. A group that is added later
    is audited, too.
    """
    first, late = parameters("naive", [(8, 8), (4, 4)])
    model = nn.Module()
    model.first, model.late = first, late
    optimizer = ng.AdamW([first], lr=1e-5, storage="naive", audit_every=1)
    outer = SimpleNamespace(optimizer=SimpleNamespace(optimizer=optimizer))
    assert ng.audit(outer, model) == {}
    take_steps(optimizer, range(1))
    assert list(ng.audit(outer)) == ["first"]
    optimizer.add_param_group({"params": [late]})
    take_steps(optimizer, range(1, 2))
    readings = ng.audit(outer)
    assert list(readings) == ["first", "late"]
    assert readings.total.num_audits == 2 and readings.total.last_step == 2
