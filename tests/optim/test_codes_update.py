"""One step of one lane: what is read, what is written, what the audit is told, and the random bits
that cut.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

import expectations
from narrowgauge.numerics.hashing import step_seed
from narrowgauge.numerics.rounding import bits_of, float_of
from narrowgauge.optim import codes
from narrowgauge.optim.codes import (
    Lane,
    Written,
    addends,
    read_state,
    read_weight,
    write_state,
    write_weight,
)
from narrowgauge.optim.kernel import Inputs, advance
from narrowgauge.optim.rules.elementwise import ADAMW
from narrowgauge.spec.storages import STATE_NAMES, STORAGES, Storage
from optim.scenarios import shifts
from oracles import codes as oracle
from tables import exhaustive
from tensors import gaussian

ROWS = list(STORAGES.values())
SEED = torch.tensor(-123456789, dtype=torch.int32)


def empty_lane(
    storage: Storage,
    count: int,
    bounds: Mapping[str, float],
    after: Mapping[str, float] | None = None,
) -> Lane:
    """A lane of zeros, all of one row whose bounds are ``bounds`` before a step and ``after`` it."""
    nothing = torch.zeros(count, dtype=torch.int32)
    fields = {name: (nothing, shift) for name, shift in shifts(storage).items()}
    scales = {}
    for name in storage.scaled:
        new = torch.tensor((after or bounds)[name])
        scales[name] = (
            codes.multipliers(new)[0],
            codes.multipliers(torch.tensor(bounds[name]))[1],
        )
    return Lane(nothing, nothing.float(), fields, scales)


def filled(lane: Lane, seen: Tensor, gradient: Tensor, fields: Mapping[str, Tensor]) -> Lane:
    """The lane with those bits; its words hold nothing else."""
    words = {}
    for name, (word, shift) in lane.fields.items():
        words[name] = (fields.get(name, word), shift)
    return Lane(seen, gradient, words, lane.scales)


def started(
    storage: Storage, weight: Tensor, gradient: Tensor, states: Mapping[str, Tensor]
) -> Lane:
    """A lane in which values are kept, cut to the nearest."""
    values = {"weight": 2 * weight, **states}
    lane = empty_lane(
        storage, len(weight), {name: float(values[name].abs().max()) for name in storage.scaled}
    )
    seen, fields = write_weight(storage, lane, weight, None)
    for name, value in states.items():
        fields |= write_state(storage, lane, name, value, None)
    return filled(lane, seen, gradient, fields)


SCALARS = {
    "gradient_scale": 0.5, "skip": 0.0, "one_minus_beta1": 0.1, "one_minus_beta2": 0.05, "negative_step_size": -1e-3,
    "inverse_root_correction2": 1.5, "eps": 1e-8, "negative_decay": -1e-4,
}  # fmt: skip


def scalars(storage: Storage) -> dict[str, Tensor]:
    tensors = {}
    for name, value in SCALARS.items():
        tensors[name] = torch.tensor(value, dtype=codes.value_dtype(storage))
    return tensors


def adamw(w: np.ndarray, g: np.ndarray, m: np.ndarray, v: np.ndarray) -> Sequence[np.ndarray]:
    """One AdamW step in numpy's float32 or float64, operation by operation as the rule is written."""
    s = {name: w.dtype.type(value) for name, value in SCALARS.items()}
    m = m + (g - m) * s["one_minus_beta1"]
    v = v + (g * g - v) * s["one_minus_beta2"]
    ratio = m / (np.sqrt(v) * s["inverse_root_correction2"] + s["eps"])
    return ratio * s["negative_step_size"] + s["negative_decay"] * w, m, v


def one_step(storage: Storage, count: int = 3000) -> tuple[Lane, Lane, Written]:
    """The lane before and after a step, and what the step returned; moments are kept with bounds
    that hold after it too.
    """
    gradient = gaussian(count, seed=3, scale=0.01).to(getattr(torch, storage.visible)).float()
    lane = started(storage, gaussian(count), gradient, {
        "exp_avg": gaussian(count, seed=1, scale=0.01), "exp_avg_sq": gaussian(count, seed=2, scale=0.01).square()
    })  # fmt: skip
    done = advance(Inputs(ADAMW, storage, lane, None, scalars(storage), SEED))
    return lane, filled(lane, done.visible, lane.gradient, done.fields), done


@exhaustive("storage", [row for row in ROWS if row.arithmetic != "expansion"])
def test_a_step_is_the_papers_and_only_what_is_kept_is_cut(storage: Storage) -> None:
    before, after, done = one_step(storage)
    weight = read_weight(storage, before)
    if storage.weight.parts > 1:
        weight = codes.visible_value(
            storage.visible, before.visible
        )  # Kahan's rule steps what is seen
    gradient = before.gradient.to(weight.dtype).numpy() * SCALARS["gradient_scale"]
    states = [read_state(storage, before, name).numpy() for name in STATE_NAMES]
    change, *moments = adamw(weight.numpy(), gradient, *states)
    assert np.array_equal(change, done.intended.numpy())
    unrounded = {"exp_avg": moments[0], "exp_avg_sq": moments[1]}
    if storage.weight.parts == 1:
        unrounded["weight"] = weight.numpy() + change
    for name, exact in unrounded.items():
        code = storage.code(name)
        stored = (
            read_weight(storage, after) if name == "weight" else read_state(storage, after, name)
        )
        spacing = spacings(storage, after, name, exact)
        error = (stored.double().numpy() - exact) / spacing
        if code.parts == 1:
            assert not (stored.double().numpy() / spacing % 1).any(), name
        if code.rounding == "nearest":
            assert np.abs(error).max() <= 0.5, name
        else:
            assert np.abs(error).max() < 1.0, name
            # As many go up as the remainders ask for: |z| < 5.
            share = exact.astype(np.float64) / spacing % 1
            assert abs(error.sum()) < 5 * np.sqrt((share * (1 - share)).sum()), name


def spacings(storage: Storage, lane: Lane, name: str, x: np.ndarray) -> oracle.Floats:
    """How far apart the values of a code are around each x, as if its parts were one long mantissa."""
    code = storage.code(name)
    lowest = -126.0
    if code.is_window:
        lowest = float(code.lowest)
        if code.scaled:  # it ends at a power of two of its row
            lowest += np.log2(float(lane.scales[name][1]))
    elif code.bits == 64:
        lowest = -1022.0
    elif name == "weight" and storage.visible == "float16":
        lowest = -14.0
    exponent = np.maximum(
        np.floor(np.log2(np.maximum(np.abs(x.astype(np.float64)), 1e-300))), lowest
    )
    return np.asarray(2.0 ** (exponent - (code.parts * (code.mantissa_bits + 1) - 1)))


DEALT = {name: row.dealt for name, row in expectations.STORAGES.items() if row.dealt}


def seeds(count: int) -> Tensor:
    """The seeds of consecutive steps."""
    return torch.tensor([step_seed(0, step) for step in range(1, count + 1)], dtype=torch.int32)


def regime(name: str) -> tuple[Tensor, Tensor, Tensor]:
    """Weights, gradients and seeds, to be broadcast: about 2^18 draws, no (key, seed) twice."""
    unit_weight = torch.ones(1, 1)
    if name == "one weight, one gradient":
        return unit_weight, unit_weight * 0.3, seeds(1 << 18)
    if name == "zero weight":
        return unit_weight * 0, unit_weight, seeds(1 << 18)
    if name == "all weights 1, every gradient":
        every = torch.arange(128, dtype=torch.int32) << 16
        return unit_weight, float_of(every)[:, None], seeds(1 << 11)
    if name == "powers of two":
        return 2.0 ** torch.arange(-64, 64)[:, None].float(), unit_weight, seeds(1 << 11)
    generator = torch.Generator().manual_seed(11)
    normal = torch.randn(1 << 16, 1, generator=generator)
    weight = float_of(torch.unique(bits_of(normal) & -256))[:, None]
    gradient = torch.randn(weight.shape, generator=generator).bfloat16().float()
    return weight, gradient, seeds(4)


REGIMES = (
    "one weight, one gradient",
    "zero weight",
    "all weights 1, every gradient",
    "powers of two",
    "gaussian",
)


@exhaustive("row", ["word", "states8"])
@exhaustive("name", REGIMES)
def test_the_fields_random_bits_are_fair_and_independent(name: str, row: str) -> None:
    """Every |z| < 5.5 over some 600 readings a regime: one false failure in 20,000 such tests."""
    dealt = addends(STORAGES[row], *regime(name))
    fields = np.stack([torch.as_tensor(dealt[n]).numpy() for n in DEALT[row]]).astype(np.float64)
    # Addends 0 … 2^d - 1 have the mean (2^d - 1)/2, which is no bias: remainders are whole numbers
    # too.
    scale = np.array([2.0**count for _, count in DEALT[row].values()])
    centred = (fields - (scale - 1)[:, None, None] / 2) / scale[:, None, None]
    count = fields[0].size
    assert count >= 1 << 17  # elements that differ in weight or gradient draw bits of their own
    limit = 5.5
    means = centred.mean((1, 2))
    assert (np.abs(means) * np.sqrt(12 * count) < limit).all()
    flat = centred.reshape(3, -1)
    between = np.corrcoef(flat)[np.triu_indices(3, 1)]
    # Bits that two codes share are the lower one's least: 2^-10 of it.
    assert (np.abs(between) * np.sqrt(count) < limit + 2.0**-9 * np.sqrt(count)).all()
    # Consecutive steps of one element, every field against every field.
    before = centred[:, :, :-1].reshape(3, -1)
    after = centred[:, :, 1:].reshape(3, -1)
    across = np.corrcoef(before, after)[:3, 3:]
    assert (np.abs(across) * np.sqrt(before.shape[1]) < limit).all()
