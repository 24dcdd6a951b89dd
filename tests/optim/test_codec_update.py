"""One step of one lane: what is read, what is written, what the audit is told, and the random bits that cut."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

import expectations
from covering import exhaustive
from narrowgauge.numerics.rounding import bits_of, float_of, half
from narrowgauge.optim import codec
from narrowgauge.optim.codec import (
    Lane,
    Written,
    addends,
    read,
    read_parts,
    read_state,
    read_weight,
    write_state,
    write_weight,
)
from narrowgauge.optim.kernel import ARITHMETICS, write_decided
from narrowgauge.optim.rules.elementwise import ADAMW, Rule
from narrowgauge.spec.storages import STATE_NAMES, STORAGES, Storage, low_parts
from optim.scenarios import CUT, finest, row_of, storage_error
from oracles import codes as oracle
from tensors import gaussian, unsigned

ROWS = [*CUT.values(), *map(row_of, ("bfloat16-pair+bfloat16-pair+e5m3-row", "tail8+e4m3-row+bfloat16-pair"))]
every_row = exhaustive("storage", ROWS)
SEED = torch.tensor(-123456789, dtype=torch.int32)


def empty_lane(
    storage: Storage, count: int, bounds: Mapping[str, float], after: Mapping[str, float] | None = None
) -> Lane:
    """A lane of zeros, all of one row whose bounds are ``bounds`` before a step and ``after`` it."""
    nothing = torch.zeros(count, dtype=torch.int32)
    fields = {name: (nothing, place.shift) for name, place in codec.places(storage).items()}
    scales = {}
    for name in storage.scaled:
        new = torch.tensor((after or bounds)[name])
        scales[name] = (
            codec.multipliers(storage.code(name), new)[0],
            codec.multipliers(storage.code(name), torch.tensor(bounds[name]))[1],
        )
    return Lane(nothing, nothing, fields, scales)


def filled(lane: Lane, seen: Tensor, gradient: Tensor, fields: Mapping[str, Tensor]) -> Lane:
    """The lane with those bits; its words hold nothing else."""
    words = {name: (fields.get(name, word), shift) for name, (word, shift) in lane.fields.items()}
    return Lane(seen, gradient, words, lane.scales)


def bounds_of(storage: Storage, values: Mapping[str, Tensor]) -> dict[str, float]:
    return {name: float(values[name].abs().max()) for name in storage.scaled}


def started(storage: Storage, weight: Tensor, gradient: Tensor, states: Mapping[str, Tensor]) -> Lane:
    """A lane in which values are kept, cut to the nearest."""
    lane = empty_lane(storage, len(weight), bounds_of(storage, {"weight": 2 * weight, **states}))
    seen, fields = write_weight(storage, lane, weight, half(codec.dropped_bits(storage.weight)))
    for name, value in states.items():
        fields |= write_state(storage, lane, name, value, half(codec.dropped_bits(storage.code(name))))
    return filled(lane, seen, codec.visible_bits(storage.visible, gradient), fields)


# ── what is kept ────────────────────────────────────────────────────────────────────────────────────────────────────


@every_row
@exhaustive("name", STATE_NAMES)
def test_a_state_is_the_sum_of_its_parts(storage: Storage, name: str) -> None:
    code, value = storage.code(name), gaussian(3000)
    value = value.square() if name == "exp_avg_sq" else value
    bounds = {n: float(value.abs().max()) for n in storage.scaled}
    lane = empty_lane(storage, 3000, bounds)
    addend = half(codec.dropped_bits(code))
    # What is written does not depend on the scales of before the step.
    fields = write_state(
        storage, empty_lane(storage, 3000, {n: 20 * b for n, b in bounds.items()}, bounds), name, value, addend
    )
    assert fields.keys() == {name, *low_parts(name, code)}
    full = filled(lane, lane.visible, lane.gradient, fields)
    parts = read_parts(storage, full, name)
    assert len(parts) == code.parts
    assert torch.equal(read_state(storage, full, name), sum(parts[1:], parts[0]))
    # Every part is the nearest to what the ones before leave, so the next is at most half a step of it.
    for place, part in enumerate(parts):
        left = value.double() - sum((p.double() for p in parts[:place]), torch.zeros(()).double())
        step = 2.0**-(code.mantissa_bits) * 2.0 ** left.abs().clamp(min=2.0**-60).log2().floor()
        finest = 2.0 ** (np.ceil(np.log2(value.abs().max())) + code.lowest - code.mantissa_bits - 4 * place)
        floor = finest if code.scaled else 2.0 ** (code.lowest - code.mantissa_bits) if code.is_window else 0.0
        assert bool(((left - part).abs() <= 0.5 * step.clamp(min=floor)).all())
    # What is kept is kept again as it is, though a tie may be shared out to its parts the other way round.
    kept = read_state(storage, full, name)
    again = write_state(storage, lane, name, kept, addend)
    assert torch.equal(read_state(storage, filled(lane, lane.visible, lane.gradient, again), name), kept)
    assert code.parts > 1 or torch.equal(again[name], fields[name])


@every_row
def test_a_weight_is_what_is_seen_and_what_lies_beside(storage: Storage) -> None:
    value = torch.cat([gaussian(3000), torch.tensor([0.0, 1.0, -1.0, 1 + 2.0**-8, 1 - 2.0**-9, 3.0])])
    lane = empty_lane(storage, len(value), dict.fromkeys(storage.scaled, 2 * float(value.abs().max())))
    seen, fields = write_weight(storage, lane, value, half(codec.dropped_bits(storage.weight)))
    assert fields.keys() == set(storage.beside)
    full = filled(lane, seen, seen, fields)
    kept, shown = read_weight(storage, full), codec.visible_value(storage.visible, seen)
    near = storage_error(storage, "weight") if storage.arithmetic == "float32" else 2.0 ** -(4 * storage.weight.parts)
    scale = value.abs().max() if storage.weight.scaled else value.abs()
    floor = finest(storage, "weight") or 2.0**-38
    assert bool(((kept - value).abs() <= near * scale + floor).all())
    if storage.weight.parts == 1:
        # The model sees the nearest to what is kept, ties away from zero.
        if storage.visible == "bfloat16":
            assert np.array_equal(unsigned(seen), oracle.cut(unsigned(bits_of(kept)), 16))
        return
    parts = read_parts(storage, full, "weight")
    assert torch.equal(parts[0], shown) and torch.equal(kept, sum(parts[1:], parts[0]))
    if storage.weight.is_window:
        return
    high = oracle.cut(unsigned(bits_of(value)), 16)
    assert np.array_equal(unsigned(seen), high)
    rest = value.double() - shown.double()
    assert np.array_equal(unsigned(bits_of(parts[1])), oracle.cut(unsigned(bits_of(rest.float())), 16))
    assert bool(((kept.double() - value.double()).abs() <= 2.0**-17 * value.abs()).all())


@every_row
def test_other_bits_of_a_word_do_not_enter(storage: Storage) -> None:
    """Every field is read out of words that hold all the others, in any lane."""
    weight, states = gaussian(500), {"exp_avg": gaussian(500, seed=1), "exp_avg_sq": gaussian(500, seed=2).square()}
    lane = started(storage, weight, gaussian(500, seed=3), states)
    for plane in codec.planes(storage):
        for up in range(0, 32, plane.bits):
            words = torch.zeros(500, dtype=torch.int32)
            for name, shift, bits in plane.fields:
                mask = ((1 << bits) - 1) << shift if bits < 32 else -1
                words |= (lane.fields[name][0] & mask) << up
            others = torch.randint(-(2**31), 2**31, (500,), generator=torch.Generator().manual_seed(up)).to(torch.int32)
            used = sum(((1 << bits) - 1) << shift for _, shift, bits in plane.fields) << up
            words |= others & ~torch.tensor(used).to(torch.int32)
            moved = {name: (words, shift + up) for name, shift, _ in plane.fields}
            full = Lane(lane.visible, lane.gradient, {**lane.fields, **moved}, lane.scales)
            assert torch.equal(read_weight(storage, full), read_weight(storage, lane))
            for name in STATE_NAMES:
                assert torch.equal(read_state(storage, full, name), read_state(storage, lane, name))


# ── a step ──────────────────────────────────────────────────────────────────────────────────────────────────────────

SCALARS = {
    "gradient_scale": 0.5, "skip": 0.0, "one_minus_beta1": 0.1, "one_minus_beta2": 0.05, "negative_step_size": -1e-3,
    "inverse_root_correction2": 1.5, "eps": 1e-8, "negative_decay": -1e-4,
}  # fmt: skip


def scalars() -> dict[str, Tensor]:
    return {name: torch.tensor(value) for name, value in SCALARS.items()}


def adamw(w: np.ndarray, g: np.ndarray, m: np.ndarray, v: np.ndarray) -> Sequence[np.ndarray]:
    """One AdamW step in numpy's float32, operation by operation as the rule is written."""
    s = {name: np.float32(value) for name, value in SCALARS.items()}
    m = m + (g - m) * s["one_minus_beta1"]
    v = v + (g * g - v) * s["one_minus_beta2"]
    ratio = m / (np.sqrt(v) * s["inverse_root_correction2"] + s["eps"])
    return ratio * s["negative_step_size"] + s["negative_decay"] * w, m, v


def one_step(storage: Storage, count: int = 3000) -> tuple[Lane, Lane, Written]:
    """The lane before and after a step, and what the step returned; moments are kept with bounds that hold after it too."""
    gradient = gaussian(count, seed=3, scale=0.01).to(getattr(torch, storage.visible)).float()
    lane = started(storage, gaussian(count), gradient, {
        "exp_avg": gaussian(count, seed=1, scale=0.01), "exp_avg_sq": gaussian(count, seed=2, scale=0.01).square()
    })  # fmt: skip
    done = ARITHMETICS[storage.arithmetic](ADAMW, storage, lane, scalars(), SEED)
    return lane, filled(lane, done.visible, lane.gradient, done.fields), done


@exhaustive("storage", [row for row in ROWS if row.arithmetic == "float32"])
def test_what_was_decided_before_the_kernel_is_written_as_the_rule_inside_it_writes(storage: Storage) -> None:
    """A matrix rule's result and an element-wise rule's are the same bits, and the same changes for the audit."""
    lane, _, done = one_step(storage, 500)
    old = read(storage, lane, STATE_NAMES)
    gradient = codec.gradient_value(storage.visible, lane.gradient) * scalars()["gradient_scale"]
    decided = ADAMW.update(old.weight, gradient, *old.states, scalars())
    found = write_decided(storage, STATE_NAMES)(lane, decided, {}, SEED)
    assert torch.equal(found.visible, done.visible)
    assert found.fields.keys() == done.fields.keys()
    assert all(torch.equal(found.fields[name], word) for name, word in done.fields.items())
    assert all(map(torch.equal, found.changes, done.changes))


@every_row
def test_a_step_tells_the_audit_what_it_did(storage: Storage) -> None:
    """The second change is that of what is read before and after, the third that of what the model sees."""
    before, after, done = one_step(storage)
    assert after.fields.keys() == done.fields.keys() == codec.places(storage).keys()
    for name, word in done.fields.items():
        bits = dict(storage.fields)[name]
        mask = ((1 << bits) - 1) << codec.places(storage)[name].shift
        assert not (unsigned(word) & ~mask).any(), name
    _, taken, shown = done.changes
    exact = [
        sum(p.double() for p in read_parts(storage, lane, "weight"))
        if storage.weight.parts > 1
        else read_weight(storage, lane).double()
        for lane in (before, after)
    ]
    moved = exact[1] - exact[0]
    assert bool(((taken.double() - moved).abs() <= 2.0**-23 * moved.abs()).all())
    seen = [codec.visible_value(storage.visible, lane.visible) for lane in (before, after)]
    assert torch.equal(shown, seen[1] - seen[0])
    assert taken.any() or storage.weight.bits * storage.weight.parts <= 16


@exhaustive("storage", [row for row in ROWS if row.arithmetic == "float32"])
def test_a_step_in_float32_is_the_papers_and_only_what_is_kept_is_cut(storage: Storage) -> None:
    before, after, done = one_step(storage)
    weight = read_weight(storage, before)
    if storage.weight.parts > 1:
        weight = codec.visible_value(storage.visible, before.visible)  # Kahan's rule steps what is seen
    gradient = codec.visible_value(storage.visible, before.gradient).numpy() * np.float32(SCALARS["gradient_scale"])
    states = [read_state(storage, before, name).numpy() for name in STATE_NAMES]
    change, *moments = adamw(weight.numpy(), gradient, *states)
    assert np.array_equal(change, done.changes[0].numpy())
    wanted = {"exp_avg": moments[0], "exp_avg_sq": moments[1]}
    if storage.weight.parts == 1:
        wanted["weight"] = weight.numpy() + change
    for name, exact in wanted.items():
        code, kept = (
            storage.code(name),
            read_weight(storage, after) if name == "weight" else read_state(storage, after, name),
        )
        spacing = spacings(storage, after, name, exact)
        error = (kept.double().numpy() - exact) / spacing
        if code.parts == 1:
            assert not (kept.double().numpy() / spacing % 1).any(), name
        if code.rounding == "nearest":
            assert np.abs(error).max() <= 0.5, name
        else:
            assert np.abs(error).max() < 1.0, name
            # As many go up as the remainders ask for: |z| < 5.
            share = exact.astype(np.float64) / spacing % 1
            assert abs(error.sum()) < 5 * np.sqrt((share * (1 - share)).sum()), name


def spacings(storage: Storage, lane: Lane, name: str, x: np.ndarray) -> oracle.Floats:
    """How far apart the values of a code are around each x, as if its parts were one long mantissa."""
    code, lowest = storage.code(name), -126.0
    if code.scaled:
        lowest += np.log2(float(lane.scales[name][1]))  # a window begins where float32's exponents do, and is moved
    elif code.is_window:
        lowest = float(code.lowest)
    elif name == "weight" and storage.visible == "float16":
        lowest = -14.0
    exponent = np.maximum(np.floor(np.log2(np.maximum(np.abs(x.astype(np.float64)), 1e-300))), lowest)
    return np.asarray(2.0 ** (exponent - (code.parts * (code.mantissa_bits + 1) - 1)))


@exhaustive("storage", [row for row in ROWS if row.arithmetic == "expansion"])
def test_what_a_step_in_expansions_keeps_are_numbers_of_the_format_that_do_not_overlap(storage: Storage) -> None:
    _, after, done = one_step(storage)
    dropped, digits = codec.dropped_bits(storage.weight), storage.weight.mantissa_bits + 1
    for name in ("weight", *STATE_NAMES):
        parts = read_parts(storage, after, name)
        for part, below in zip(parts, (*parts[1:], None), strict=True):
            assert not (unsigned(bits_of(part)) % 2**dropped).any()
            if below is not None:
                scale = 2.0 ** (part.abs().clamp(min=1e-30).log2().floor() - digits)
                code = storage.code(name)
                if (
                    code.is_window and not code.scaled
                ):  # a step of the smallest numbers is as much as one may be rounded to
                    scale = scale.clamp(min=2.0 ** (code.lowest - code.mantissa_bits))
                assert bool((below.abs() <= scale).all()), name
    assert not (unsigned(bits_of(done.changes[0])) % 2**dropped).any()
    assert torch.equal(codec.visible_value(storage.visible, done.visible), read_parts(storage, after, "weight")[0])


def test_every_arithmetic_that_a_row_names_is_there() -> None:
    assert ARITHMETICS.keys() == {row.arithmetic for row in STORAGES.values()}


# ── what small updates become ───────────────────────────────────────────────────────────────────────────────────────


def constant(change: float) -> Rule:
    """A rule that always wants the same."""
    return Rule("constant", (), (), lambda group, step: (), lambda w, g, s: (w * 0.0 + change,))


def walked(name: str, change: float, steps: int, start: float = 1.0, count: int = 1) -> tuple[Tensor, Tensor]:
    """Where a weight stands after so many equal changes: what is seen, and what is kept."""
    storage = STORAGES[name].keeping(())
    weight = torch.full((count,), start)
    lane = empty_lane(storage, count, dict.fromkeys(storage.scaled, 2 * start))
    seen, fields = write_weight(storage, lane, weight, half(codec.dropped_bits(storage.weight)))
    lane = filled(lane, seen, seen, fields)
    rule, values = constant(change), {"gradient_scale": torch.tensor(1.0)}
    for step in range(steps):
        seed = torch.tensor(oracle.hashed(step, 5) - 2**31, dtype=torch.int32)
        # A gradient of its own for every element: equal ones would round alike.
        slopes = torch.arange(count, dtype=torch.int32) * (65536 if storage.visible == "bfloat16" else 1)
        lane = Lane(lane.visible, slopes, lane.fields, lane.scales)
        done = ARITHMETICS[storage.arithmetic](rule, storage, lane, values, seed)
        lane = filled(lane, done.visible, slopes, done.fields)
    return codec.visible_value(storage.visible, lane.visible), read_weight(storage, lane)


@exhaustive(
    ("name", "smallest", "lost"),
    [
        # What arrives whole, and what never does: the second is half a spacing or less, of 1 or of what lies below it.
        ("naive", 2.0**-7, 2.0**-9),
        ("no-master", 2.0**-7, 2.0**-9),
        ("kahan", 2.0**-15, 2.0**-26),
        ("collage-light", 2.0**-15, 2.0**-26),
        ("collage-plus", 2.0**-15, 2.0**-26),
        ("split", 2.0**-23, 2.0**-25),
        ("master", 2.0**-23, 2.0**-25),
        ("float16/split", 2.0**-23, 2.0**-25),
        ("float16/naive", 2.0**-10, 2.0**-12),
        ("float16/kahan", 2.0**-21, 2.0**-26),
        ("float16/collage-light", 2.0**-21, 2.0**-26),
        ("float16/collage-plus", 2.0**-21, 2.0**-26),
        ("float8/collage-light", 2.0**-11, 2.0**-25),
    ],
)
def test_updates_arrive_whole_down_to_what_the_row_says(name: str, smallest: float, lost: float) -> None:
    for steps in (1, 2, 7, 60):
        _, kept = walked(name, smallest, steps)
        assert float(kept) == 1.0 + steps * smallest
        if STORAGES[name].weight.parts == 1:
            assert float(walked(name, lost, steps)[1]) == 1.0


@exhaustive("name", ["kahan", "collage-light", "collage-plus"])
def test_pairs_hand_what_they_saved_to_the_seen_weight(name: str) -> None:
    """2^-14 is a hundredth of a spacing of 1: 64 of them are half of one, 128 a whole one."""
    seen, kept = walked(name, 2.0**-14, 63)
    assert (float(seen), float(kept)) == (1.0, 1.0 + 63 * 2.0**-14)
    seen, kept = walked(name, 2.0**-14, 65)
    assert (float(seen), float(kept)) == (1.0 + 2.0**-7, 1.0 + 65 * 2.0**-14)
    seen, kept = walked(name, -(2.0**-14), 100)
    assert (float(seen), float(kept)) == (1.0 - 2.0**-7, 1.0 - 100 * 2.0**-14)


@exhaustive(
    ("name", "change"),
    [
        ("word", 2.0**-20),
        ("compact", 2.0**-20),
        ("split8", 2.0**-21),
        ("states8", 2.0**-12),
        ("states8", 2.0**-18),
        ("states8", 2.0**-21),
        ("stochastic", 2.0**-18),
        ("weight8", 2.0**-12),
        ("weight8", 2.0**-15),
    ],
)
def test_random_cuts_take_updates_of_any_size_on_average(name: str, change: float) -> None:
    """Each step is a coin of its own for each of 100 gradients and many steps: |z| < 5."""
    spacing = 2.0 ** -STORAGES[name].weight.mantissa_bits
    steps, count = 1500, 100
    _, kept = walked(name, change, steps, count=count)
    share = change / spacing
    moved = float((kept.double() - 1).sum()) / spacing
    assert abs(moved - steps * count * share) < 5 * np.sqrt(steps * count * share * (1 - share)) + 1
    assert share * steps * count > 10 * bool(change > 2.0**-21)


# ── scales ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@exhaustive("name", ["compact", "states8", "float8/collage-plus"])
@exhaustive("after", [0.25, 1.0, 8.0])
def test_states_are_read_with_the_old_scales_and_written_with_the_new(name: str, after: float) -> None:
    """A rule that leaves its states alone leaves them at their values, whatever becomes of the row's bounds."""
    storage = STORAGES[name]
    keep = Rule("keep", STATE_NAMES, (), lambda group, step: (), lambda w, g, m, v, s: (w * 0, m, v))
    values = torch.tensor([0.125, 0.25, 0.0, 0.1875, 0.21875])
    before = empty_lane(storage, 5, dict.fromkeys(storage.scaled, 1.0))
    seen, fields = write_weight(storage, before, values, half(codec.dropped_bits(storage.weight)))
    for state in STATE_NAMES:
        fields |= write_state(storage, before, state, values, half(codec.dropped_bits(storage.code(state))))
    changing = empty_lane(storage, 5, dict.fromkeys(storage.scaled, 1.0), dict.fromkeys(storage.scaled, after))
    gradient = torch.zeros(5, dtype=torch.int32)
    done = ARITHMETICS[storage.arithmetic](
        keep, storage, filled(changing, seen, gradient, fields), {"gradient_scale": torch.tensor(1.0)}, SEED
    )
    later = filled(empty_lane(storage, 5, dict.fromkeys(storage.scaled, after)), done.visible, gradient, done.fields)
    assert torch.equal(read_weight(storage, later), values)
    for state in STATE_NAMES:
        assert torch.equal(read_state(storage, later, state), values)


# ── random bits ─────────────────────────────────────────────────────────────────────────────────────────────────────

DEALT = {name: row.dealt for name, row in expectations.STORAGES.items() if row.dealt}


def test_every_stochastic_row_is_listed() -> None:
    assert DEALT.keys() == {row.name for row in STORAGES.values() if row.is_stochastic}
    for name, dealt in DEALT.items():
        assert {n: count for n, (_, count) in dealt.items()} == {
            n: codec.dropped_bits(c)
            for n in ("weight", *STATE_NAMES)
            if (c := STORAGES[name].code(n)).rounding == "stochastic"
        }


@exhaustive("name", DEALT)
def test_addends_are_dealt_from_the_hash_of_weight_and_mantissa(name: str) -> None:
    weight, gradient = gaussian(300), bits_of(gaussian(300, seed=1)) & -65536
    seed = torch.tensor(-987654321, dtype=torch.int32)
    result = addends(STORAGES[name], weight, gradient, seed)
    cut = 2**16 if STORAGES[name].visible == "bfloat16" else 1
    keys = [w ^ (g % 2**23 // cut) for w, g in zip(unsigned(bits_of(weight)), unsigned(gradient), strict=True)]
    words = [oracle.hashed(int(key), -987654321) for key in keys]
    expected = {
        what: [oracle.field(word + 2**32 * word, start, count) for word in words]
        for what, (start, count) in DEALT[name].items()
    }
    assert {what: value.tolist() for what, value in result.items() if isinstance(value, Tensor)} == expected
    doubled = addends(STORAGES[name], weight, gradient + (1 << 23), seed)
    assert all(torch.equal(torch.as_tensor(doubled[n]), torch.as_tensor(result[n])) for n in result)


def test_float16_gradients_give_their_own_mantissas() -> None:
    row = row_of("float16/split")
    stochastic = Storage("mine", "float16", STORAGES["word"].weight, row.exp_avg, row.exp_avg_sq, loses="", source="")
    weight, seed = gaussian(50), torch.tensor(3, dtype=torch.int32)
    gradient = codec.visible_bits("float16", gaussian(50, seed=1).half().float())
    result = torch.as_tensor(addends(stochastic, weight, gradient, seed)["weight"]).tolist()
    keys = zip(unsigned(bits_of(weight)), unsigned(gradient), strict=True)
    assert result == [oracle.field(oracle.hashed(int(w ^ (g % 2**23)), 3), 0, 8) for w, g in keys]
    scaled = addends(stochastic, weight, gradient - (4 << 23), seed)["weight"]
    assert torch.as_tensor(scaled).tolist() == result


def test_rows_that_round_to_the_nearest_add_half() -> None:
    weight, seed = torch.ones(3), torch.tensor(1, dtype=torch.int32)
    for name, row in STORAGES.items():
        if not row.is_stochastic:
            wanted = {n: half(codec.dropped_bits(row.code(n))) for n in ("weight", *STATE_NAMES)}
            assert addends(row, weight, bits_of(weight), seed) == wanted, name


def test_a_rule_of_many_states_is_dealt_fewer_bits_each_and_none_is_without() -> None:
    states = tuple((f"state{k}", "exp_avg") for k in range(6))
    result = addends(STORAGES["word"].keeping(states), gaussian(4000), bits_of(gaussian(4000, seed=1)) & -65536, SEED)
    assert result.keys() == {"weight", *dict(states)}
    for name, addend in result.items():
        dropped = codec.dropped_bits(STORAGES["word"].code("weight" if name == "weight" else "exp_avg"))
        values = torch.as_tensor(addend).double()
        assert float(values.min()) >= 0 and float(values.max()) < 2**dropped
        assert abs(float(values.mean()) / 2**dropped - 0.5) < 5 / np.sqrt(12 * 4000)
    tops = {name: torch.as_tensor(addend) >> 16 & 3 for name, addend in result.items() if name != "weight"}
    assert len({tuple(top.tolist()) for top in tops.values()}) == 6


def seeds(count: int) -> Tensor:
    """Well mixed seeds of consecutive steps, as the optimizer makes them: splitmix64's stream."""
    step = np.arange(1, count + 1, dtype=np.uint64)
    with np.errstate(over="ignore"):
        z = step * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = z ^ (z >> np.uint64(31))
    low = (z & np.uint64(0xFFFFFFFF)).astype(np.uint32)
    return torch.from_numpy(low.view(np.int32))


def regime(name: str) -> tuple[Tensor, Tensor, Tensor]:
    """Weights, gradients' bits and seeds, to be broadcast: about 2^18 draws, no (key, seed) twice."""
    one = torch.ones(1, 1)
    if name == "one weight, one gradient":
        return one, bits_of(one * 0.3), seeds(1 << 18)
    if name == "zero weight":
        return one * 0, bits_of(one), seeds(1 << 18)
    if name == "all weights 1, every gradient":
        return one, (torch.arange(128, dtype=torch.int32) << 16)[:, None], seeds(1 << 11)
    if name == "powers of two":
        return 2.0 ** torch.arange(-64, 64)[:, None].float(), bits_of(one), seeds(1 << 11)
    if name == "every bfloat16 near one":
        return (
            float_of((torch.arange(256, dtype=torch.int32) << 16) + 0x3F800000)[:, None],
            bits_of(one),
            seeds(1 << 10),
        )
    generator = torch.Generator().manual_seed(11)
    normal = torch.randn(1 << 16, 1, generator=generator)
    weight = float_of(torch.unique(bits_of(normal) & -256))[:, None]
    return weight, bits_of(torch.randn(weight.shape, generator=generator)) & -65536, seeds(4)


REGIMES = (
    "one weight, one gradient",
    "zero weight",
    "all weights 1, every gradient",
    "powers of two",
    "every bfloat16 near one",
    "gaussian",
)


@exhaustive("row", ["word", "states8"])
@exhaustive("name", REGIMES)
def test_the_fields_random_bits_are_fair_and_independent(name: str, row: str) -> None:
    """Every |z| < 5.5 over some 600 readings a regime: one false failure in 20,000 such tests."""
    dealt = addends(STORAGES[row], *regime(name))
    fields = np.stack([torch.as_tensor(dealt[n]).numpy() for n in DEALT[row]]).astype(np.float64)
    # Addends 0 … 2^d - 1 have the mean (2^d - 1)/2, which is no bias: remainders are whole numbers too.
    scale = np.array([2.0**count for _, count in DEALT[row].values()])
    centred = (fields - (scale - 1)[:, None, None] / 2) / scale[:, None, None]
    count, limit = fields[0].size, 5.5
    means = centred.mean((1, 2))
    assert (np.abs(means) * np.sqrt(12 * count) < limit).all()
    flat = centred.reshape(3, -1)
    between = np.corrcoef(flat)[np.triu_indices(3, 1)]
    # Bits that two codes share are the lower one's least: 2^-10 of it.
    assert (np.abs(between) * np.sqrt(count) < limit + 2.0**-9 * np.sqrt(count)).all()
    # Consecutive steps of one element, every field against every field.
    before, after = centred[:, :, :-1].reshape(3, -1), centred[:, :, 1:].reshape(3, -1)
    across = np.corrcoef(before, after)[:3, 3:]
    assert (np.abs(across) * np.sqrt(before.shape[1]) < limit).all()


@exhaustive("name", REGIMES)
def test_no_two_random_bits_agree_more_than_chance(name: str) -> None:
    """All 32 bits and all 496 pairs of them, |z| < 5.5: one false failure in 50,000 such tests."""
    dealt = {n: torch.as_tensor(a).long() for n, a in addends(STORAGES["word"], *regime(name)).items()}
    words = dealt["weight"] | (dealt["exp_avg"] >> 6 << 8) | (dealt["exp_avg_sq"] >> 6 << 20)
    num_keys, num_seeds = words.shape
    # Keys that differ in few bits share some parities of a step's bits: over keys those are one reading, not many.
    clusters = num_seeds if 1 < num_keys <= 256 else words.numel()
    table = words.t().reshape(clusters, -1)
    signs = torch.stack([1.0 - 2.0 * ((table >> place) & 1).float() for place in range(32)], 1)
    means = signs.mean(2)
    assert float(standard_scores(means).max()) < 5.5
    if clusters == num_seeds and num_keys > 1:
        pairs = (signs @ signs.mT / signs.shape[2]).reshape(clusters, -1)[
            :, ~torch.eye(32, dtype=torch.bool).reshape(-1)
        ]
        assert float(standard_scores(pairs).max()) < 5.5
        assert float(pairs.mean(0).abs().max()) < 0.1
    else:
        flat = signs[:, :, 0]
        agreement = (flat.t() @ flat / clusters).fill_diagonal_(0)
        assert float(agreement.abs().max()) * clusters**0.5 < 5.5


def standard_scores(rows: Tensor) -> Tensor:
    """How many standard errors the mean over rows lies from zero, per column."""
    return rows.mean(0).abs() / (rows.std(0) / len(rows) ** 0.5).clamp(min=1e-9)
