"""The update of our own optimizers over storages that round: healthy steps agree, and a fault is named through the rounding."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import narrowgauge as ng
from narrowgauge.numerics.scaling import LossScaler
from narrowgauge.optim import codec
from narrowgauge.recompute.capture import ParameterSample, StepCapture
from narrowgauge.recompute.departures import unchecked
from narrowgauge.recompute.piece_results import DEPARTS, EQUAL, NOT_CHECKED, Alternative, PieceResult
from narrowgauge.recompute.rules.definitions import LION, inputs_of
from narrowgauge.recompute.rules.rounded_update import LOST, by_shared_cause
from narrowgauge.recompute.stored_values import Assumption, Rounding, StoredValues, judged, shared, told_apart
from narrowgauge.recompute.task import task
from narrowgauge.spec.storages import STORAGES, Code
from recompute import audited_loop
from recompute.audited_loop import Loop
from recompute.pieces.test_update import patched, setting

LOSING = {"naive", "no-master", "float16/naive", "float16-throughout/naive"}
"""Those that lose most of a step of this size."""
HEALTHY = (
    "master", "master64", "split", "split8", "word", "compact", "states8", "weight8", "float32-states8", "no-master",
    "stochastic", "kahan", "collage-light", "collage-plus", "naive", "float16/naive", "float16/collage-plus",
    "scalify-float16/scaled16",
)  # fmt: skip


def loop_of(storage: str, **options: Any) -> Loop:
    given = {"optimizer": ng.AdamW, "compile": False, "micro_batches": 1} | options
    return Loop(storage=storage, dtype=getattr(torch, STORAGES[storage].visible), **given)


def updates(loop: Loop, step: int) -> list[PieceResult]:
    return [each for each in loop.results[step] if each.piece == "update"]


@pytest.mark.parametrize("storage", HEALTHY)
def test_a_healthy_step_agrees_with_its_rule(storage: str) -> None:
    loop = loop_of(storage).run(4)
    for step in (2, 4):
        found = [each for each in updates(loop, step) if each.status == EQUAL]
        assert found or storage in LOSING, loop.results[step]
        assert all(each.difference <= each.envelope for each in found)
    assert loop.names() == ({"lost-in-format"} if storage in LOSING else set()), loop.findings()


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        (ng.Adam, {}),
        (ng.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}),
        (ng.SGD, {"lr": 0.1, "momentum": 0.0}),
        (ng.Lion, {"lr": 1e-4}),
    ],
)
def test_the_other_rules_agree_too(optimizer: Any, options: dict[str, Any]) -> None:
    loop = loop_of("word", optimizer=optimizer, every=1, **options).run(3)
    assert not loop.findings() and all(updates(loop, step)[0].status == EQUAL for step in (2, 3))


def sign_of_momentum(optimizer: Any) -> Any:
    weights = {p: p.detach().clone() for group in optimizer.param_groups for p in group["params"]}

    def undo() -> None:
        with torch.no_grad():
            for p, weight in weights.items():
                p.copy_(weight * (1 - 1e-5) - 1e-4 * optimizer.stored(p, "exp_avg").sign())

    return undo


LION_FAULTS: dict[str, tuple[Callable[[Any], Any], str, dict[str, Any]]] = {
    "rate": (setting(lr=2e-4), "rate", {"factor": 2.0}),
    "beta1": (setting(betas=(0.95, 0.99)), "sign-beta", {"value": 0.95, "wanted": 0.9}),
    "no momentum": (setting(betas=(0.0, 0.99)), "no-momentum", {}),
    "sign of the momentum": (sign_of_momentum, "sign-of-state", {"state": "exp_avg"}),
    "beta2": (setting(betas=(0.9, 0.95)), "beta", {"state": "exp_avg", "value": 0.95}),
    "decay": (setting(weight_decay=0.3), "decay", {"value": 0.3}),
}


@pytest.mark.parametrize(("fault", "storage"), [*((name, "float32") for name in LION_FAULTS), ("beta1", "compact")])
def test_a_fault_of_lion_is_named(fault: str, storage: str) -> None:
    """Of two steps that differ in the signs of few elements, the small parameters alone cannot tell which it was."""
    change, cause, values = LION_FAULTS[fault]
    loop = loop_of(storage, optimizer=ng.Lion, lr=1e-4, weight_decay=0.1, every=4).run(2)
    assert not loop.findings()
    patched(change)(loop)
    loop.run(2)
    found = max(updates(loop, 4), key=lambda each: len(each.where) or 1000)
    assert found.cause == cause, updates(loop, 4)
    for name, value in values.items():
        assert found.values[name] == (pytest.approx(value, rel=5e-3) if isinstance(value, float) else value)


def test_a_sign_that_hangs_on_a_rounding_is_left_out() -> None:
    momentum, gradient = torch.tensor([0.25, 0.25, 0.0, 0.25]), torch.tensor([-0.75, -0.75, 0.0, 0.5])
    gradient[0] += 2.0**-22
    settings = {"lr": 1e-4, "betas": (0.75, 0.99)}
    weight = torch.arange(4, dtype=torch.float32)
    sample = ParameterSample("w", weight.shape, weight.dtype, settings, weight, {"exp_avg": momentum}, gradient)
    step = StepCapture(1, "lion")
    told = LION.told(sample, inputs_of(step, sample))
    assert told is not None and told.tolist() == [False, False, True, True]
    fewer = sample.at(told)
    assert fewer.weight.tolist() == [2.0, 3.0] and fewer.states["exp_avg"].tolist() == [0.0, 0.25]
    assert LION.direction(fewer, inputs_of(step, fewer)).tolist() == [0.0, 1.0]


@pytest.mark.parametrize("storage", ["word", "compact"])
def test_the_audit_changes_no_bit(storage: str) -> None:
    watched, alone = loop_of(storage, every=1).run(3), loop_of(storage, every=0).run(3)
    assert torch.equal(watched.bits(), alone.bits())
    for p, q in zip(watched.model.parameters(), alone.model.parameters(), strict=True):
        for name in ("weight", "exp_avg", "exp_avg_sq"):
            assert torch.equal(watched.optimizer.stored(p, name), alone.optimizer.stored(q, name))


def test_what_a_storage_loses_is_told_as_its_own() -> None:
    (found,) = loop_of("naive").run(2).findings()
    assert found.severity == "note" and "'naive' rounds it away" in found.message and "'word' keeps it" in found.advice


def test_a_storage_whose_operations_are_coarser_is_not_checked() -> None:
    loop = loop_of("float8/collage-light").run(2)
    assert "every operation to 4 bits" in unchecked(loop.results[2])["update"] and not loop.findings()


# ── faults ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def counted(number: int) -> Callable[[Any], Any]:
    def change(optimizer: Any) -> Any:
        states = [optimizer.packed_state(p) for group in optimizer.param_groups for p in group["params"]]
        before = [state.step for state in states]
        for state in states:
            state.step = number

        def undo() -> None:
            for state, count in zip(states, before, strict=True):
                state.step = count + 1

        return undo

    return change


FAULTS: dict[str, tuple[Callable[[Any], Any], str, dict[str, Any]]] = {
    "rate": (setting(lr=1.1e-3), "rate", {"factor": 1.1}),
    "decay lost": (setting(weight_decay=0.0), "decay-lost", {}),
    "decay": (setting(weight_decay=0.3), "decay", {"value": 0.3}),
    "eps": (setting(eps=1e-3), "eps", {"value": 1e-3}),
    "beta1": (setting(betas=(0.8, 0.999)), "beta", {"value": 0.8, "state": "exp_avg"}),
    "beta2": (setting(betas=(0.9, 0.95)), "beta", {"value": 0.95, "state": "exp_avg_sq"}),
    "sign": (setting(maximize=True), "gradient-scaled", {"factor": -1.0}),
    "frozen": (setting(lr=0.0), "frozen", {}),
    "count": (counted(0), "step-count", {"count": 1}),
}
SEEN = {
    "word": tuple(FAULTS),
    "weight8": ("rate", "eps", "beta2", "frozen", "count"),
    "naive": ("rate", "decay lost", "eps", "frozen"),
    "stochastic": ("rate", "beta1", "frozen"),
    "kahan": ("rate", "decay", "frozen"),
    "collage-plus": ("eps", "beta1", "frozen"),
    "float16/naive": ("rate", "frozen"),
}
"""What is seen through the rounding of a storage, of one step of 1e-3."""


@pytest.mark.parametrize(("storage", "fault"), [(storage, fault) for storage, own in SEEN.items() for fault in own])
def test_a_fault_is_named_with_its_size(storage: str, fault: str) -> None:
    change, cause, values = FAULTS[fault]
    loop = loop_of(storage, every=6).run(3)
    assert loop.names() <= {LOST}
    patched(change)(loop)
    loop.run(3)
    found = [each for each in updates(loop, 6) if each.status == DEPARTS and each.cause != LOST]
    assert found and {each.cause for each in found} == {cause}, found
    for name, value in values.items():
        now = found[0].values[name]
        assert math.isclose(now, value, rel_tol=2e-2) if isinstance(value, float) else now == value, (name, now)


@pytest.mark.parametrize("storage", ["word", "states8", "kahan", "naive"])
def test_the_rate_of_one_layer_is_named_and_its_neighbours_are_silent(storage: str) -> None:
    loop = loop_of(storage, every=4).run(2)
    (group,) = loop.optimizer.param_groups
    one = group["params"].pop(dict(_placed(loop))["blocks.1.up.weight"])
    loop.optimizer.add_param_group({**group, "params": [one]})

    def twice(optimizer: Any) -> Any:
        optimizer.param_groups[1]["lr"] = 2e-3
        return lambda: optimizer.param_groups[1].update(lr=1e-3)

    patched(twice)(loop)
    loop.run(2)
    found = [each for each in updates(loop, 4) if each.status == DEPARTS and each.cause != LOST]
    assert [(each.cause, each.where) for each in found] == [("rate", ("blocks.1.up.weight",))], found
    assert math.isclose(found[0].values["factor"], 2.0, rel_tol=1e-2)


def _placed(loop: Loop) -> list[tuple[str, int]]:
    return [(name, place) for place, (name, _) in enumerate(loop.model.named_parameters())]


def test_a_parameter_in_no_group_and_decay_of_norms_are_named() -> None:
    loop = loop_of("word")
    loop.optimizer.param_groups[0]["params"].pop()
    loop.run(3)
    assert [(each.name, each.where) for each in loop.findings()] == [("no-group", "head.weight")]
    assert loop_of("word", task=task(decay_groups="matrices")).run(2).names() == {"decay-unwanted"}


# ── clipping and loss scaling of the optimizer itself ───────────────────────────────────────────────────────────────


@pytest.mark.parametrize("storage", ["float32", "word", "float16/naive"])
@pytest.mark.parametrize("limit", [0.25, 1e3])
def test_its_own_clipping_is_computed_again(storage: str, limit: float) -> None:
    loop = loop_of(storage, max_grad_norm=limit, task=task(max_grad_norm=limit)).run(4)
    assert loop.names() <= {LOST} and not any(
        each.status == NOT_CHECKED for each in loop.results[4] if each.piece == "clip"
    )
    other = loop_of(storage, max_grad_norm=limit, task=task(max_grad_norm=0.1)).run(2)
    assert "clip-limit" in other.names() if limit < 1 else "clip-missing" in other.names()


def test_a_fault_of_its_own_clipping_is_named() -> None:
    loop = loop_of("word", max_grad_norm=0.25, every=4).run(2)

    def wrong(optimizer: Any) -> Any:
        optimizer.max_grad_norm = 0.125
        return lambda: setattr(optimizer, "max_grad_norm", 0.25)

    patched(wrong)(loop)
    loop.run(2)
    assert loop.names() == {"gradient-scaled"}
    assert {round(each.values["factor"], 3) for each in updates(loop, 4) if each.status == DEPARTS} == {0.5}


@pytest.mark.parametrize("limit", [None, 0.25])
@pytest.mark.parametrize("by", ["ours", "torch"])
def test_a_scaled_loss_is_unscaled_again(by: str, limit: float | None) -> None:
    loop = loop_of("float16/master", max_grad_norm=limit)
    scaler: Any = LossScaler(1024.0) if by == "ours" else torch.amp.GradScaler("cpu", init_scale=1024.0)
    if by == "ours":
        loop.optimizer.loss_scaler = scaler
    plain = loop.loss
    loop.loss = lambda tokens: scaler.scale(plain(tokens))  # type: ignore[method-assign]
    step = loop.update
    loop.update = step if by == "ours" else lambda: (scaler.step(loop.optimizer), scaler.update())  # type: ignore[method-assign, assignment, return-value]
    loop.run(4)
    assert not loop.findings(), loop.findings()
    assert [each.status for each in updates(loop, 4)] == [EQUAL]


def test_gradients_that_are_released_as_they_arrive_are_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large matrices were stepped within the backward pass; vectors, which share a kernel, are stepped after it."""
    monkeypatch.setattr(audited_loop, "WIDTH", 128)
    loop = loop_of("float32", every=4)
    handle = ng.optim.release_gradients(loop.optimizer)
    loop.run(6)
    assert loop.optimizer.released and "released" in unchecked(loop.results[4])["gradient"]
    assert [each.status for each in updates(loop, 4)] == [EQUAL]
    handle.remove()
    loop.run(3)
    assert "gradient" not in unchecked(loop.results[8])
    assert not loop.findings()


def test_a_skipped_step_is_not_checked() -> None:
    loop = loop_of("word", max_grad_norm=1.0)
    loop.after_backward = lambda: loop.model.head.weight.grad.fill_(math.inf)  # type: ignore[method-assign, union-attr, operator, return-value, assignment]
    loop.run(2)
    assert "skipped" in unchecked(loop.results[2])["update"] and "frozen" not in loop.names()


# ── the likelihood ──────────────────────────────────────────────────────────────────────────────────────────────────

CODES = {
    code: storage for storage in STORAGES.values() for code in (storage.weight, storage.exp_avg, storage.exp_avg_sq)
}


@pytest.mark.parametrize("code", [c for c in CODES if c.mantissa_bits < 23 and c.parts == 1], ids=lambda c: c.name)
def test_a_spacing_is_that_of_the_codec(code: Code) -> None:
    """The two neighbours of a value, by the codec itself: cut towards zero, and away from it."""
    ends = torch.zeros(4096, dtype=torch.float64)
    drawn = torch.rand(4096, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 0.5
    values = (drawn * 2.0 ** torch.arange(0, -32, -1).repeat(128)).float()
    scale = codec.multipliers(code, torch.ones(1, dtype=torch.float32)) if code.scaled else (None, None)
    dropped = codec.dropped_bits(code)

    def cut(addend: int) -> torch.Tensor:
        return codec.decode(code, codec.encode(code, values, addend, 0, scale[0]), 0, scale[1]).double()

    low, high = cut(0), cut((1 << dropped) - 1)
    rounding = Rounding(code, CODES[code], ends if code.scaled else None)
    free = ~rounding.is_bounded(values.double()) & (low != high)
    assert bool(free.any())
    assert torch.equal((high - low)[free], rounding.spacing(low)[free])
    assert torch.equal((high - low)[free], rounding.spacing_below(high)[free])


def drawn(factor: float, storage: str, seed: int = 0) -> tuple[StoredValues, torch.Tensor, torch.Tensor]:
    """Weights that were stored after a step of `factor` times the rule's."""
    generator = torch.Generator().manual_seed(seed)
    row = STORAGES[storage]
    weight = torch.randn(2048, dtype=torch.float64, generator=generator).bfloat16().double()
    step = torch.randn(2048, dtype=torch.float64, generator=generator) * 1e-2
    rounding = Rounding(row.weight, row)
    meant = weight + factor * step
    spacing = rounding.spacing(meant)
    chance = torch.rand(2048, dtype=torch.float64, generator=generator) if row.is_stochastic else 0.5
    stored = (meant / spacing + chance).floor() * spacing
    return StoredValues(stored, weight, weight + step, rounding, 0 * weight), weight, step


@pytest.mark.parametrize("storage", ["naive", "stochastic"])
def test_a_factor_is_found_through_rounding_and_told_from_a_coincidence(storage: str) -> None:
    healthy = [judged(*_assumed(*drawn(1.0, storage, seed))).is_equal for seed in range(20)]
    assert all(healthy)
    verdict = judged(*_assumed(*drawn(1.5, storage)))
    found = told_apart(verdict.alternatives)
    assert not verdict.is_equal and found is not None and found.cause == "rate"
    assert abs(found.values["factor"] - 1.5) <= found.error < 0.05
    both = shared([verdict.alternatives, judged(*_assumed(*drawn(1.5, storage, 1))).alternatives])
    assert both is not None and both[0].values == both[1].values


def _assumed(stored: StoredValues, weight: torch.Tensor, step: torch.Tensor) -> tuple[StoredValues, list[Assumption]]:
    return stored, [Assumption("frozen", weight), Assumption("rate", weight, step, name="factor")]


@pytest.mark.parametrize(
    ("exact", "named"),
    [
        (("decay",), ["decay", "decay"]),
        (("rate",), ["rate", ""]),  # which the second does not have
        (("step-scaled",), ["weights-scaled", "weights-scaled"]),
        (("decay of another size",), ["weights-scaled", "weights-scaled"]),
        (("decay", "frozen"), ["weights-scaled", "weights-scaled"]),
        ((), ["weights-scaled", "weights-scaled"]),
    ],
)
def test_what_is_not_rounded_decides_between_causes_that_rounding_leaves(
    exact: tuple[str, ...], named: list[str]
) -> None:
    likelier = Alternative("weights-scaled", {"factor": 0.9998}, "factor", 1e-6, -50.0)
    decay = Alternative("decay", {"wanted": 0.1, "value": 0.3}, "value", 2e-3, -60.0)
    rate = Alternative("rate", {"rate": 1e-3, "factor": 2.0}, "factor", 2e-3, -60.0)
    rounded = [
        PieceResult("update", DEPARTS, ("a",), alternatives=(likelier, decay, rate)),
        PieceResult("update", DEPARTS, ("b",), alternatives=(likelier, decay)),
    ]
    values = {"decay": {"value": 0.3001, "wanted": 0.1}, "rate": {"factor": 2.0, "rate": 1e-3}}
    values["decay of another size"] = {"value": 0.5, "wanted": 0.1}
    others = [PieceResult("update", DEPARTS, (c,), cause=c.partition(" ")[0], values=values.get(c, {})) for c in exact]
    assert [each.cause for each in by_shared_cause([*others, *rounded])][len(exact) :] == named
