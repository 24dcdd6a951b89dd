"""The definition of a step: of many elements in 32-bit words.

:func:`make_step` writes ``unpack -> read -> rule -> write -> pack (-> audit)`` once, in tensor
operations. Eager, this code is the reference. Traced and printed
(:mod:`narrowgauge.optim.multi_tensor`), it is one loop over 32-bit words. An elementwise rule runs
between reading and writing. Storages of Collage run AdamW in the published expansions. A matrix
rule runs outside, on whole matrices: :func:`make_average` averages the gradients before it, and the
step writes its change.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from narrowgauge.numerics.expansions import NearestEven
from narrowgauge.numerics.metrics import (
    CHANGE_SUMS,
    DECAY_SUMS,
    END_SUMS,
    decay_terms,
    update_terms,
)
from narrowgauge.numerics.rounding import quiet
from narrowgauge.optim import codes
from narrowgauge.optim.codes import Lane, Written
from narrowgauge.optim.layout import lanes_of_weight, layout_of, words_of_weight
from narrowgauge.optim.rules.collage import collage_adamw
from narrowgauge.optim.rules.elementwise import Rule, Scalars
from narrowgauge.optim.rules.matrix import AnyRule, MatrixRule
from narrowgauge.spec.storages import Storage

Step = Callable[..., Tensor]
Summarize = Callable[[Sequence[Tensor]], Tensor]
CONTROL = ("gradient_scale", "skip")
"""The scalars of every step, before the rule's own: the factor of the gradients, and 1 to change
nothing.
"""


@dataclass(frozen=True, slots=True, eq=False)
class Numbers:
    """Hold the scalars of a step for one (rule, step number). States with the same number of steps
    share them.

    ``values`` are those of ``CONTROL`` and of the rule, in the rule's dtype. ``seed`` is 0-d int32.
    """

    values: Tensor
    seed: Tensor
    audited: bool


# ── the step of one lane ──────────────────────────────────────────────────────────────────────────


def in_floats(rule: Rule, storage: Storage, lane: Lane, scalars: Scalars, seed: Tensor) -> Written:
    """Run the rule in its scalars' dtype and round the result.

    ``scalars`` are ``gradient_scale`` and the rule's.
    """
    scale = scalars["gradient_scale"]
    gradient = codes.gradient_value(storage.visible, lane.gradient).to(scale.dtype) * scale
    old = codes.read(storage, lane, rule.states)
    change, *new = rule.update(old.weight, gradient, *old.states, scalars)
    return codes.write(storage, lane, old, change, dict(zip(rule.states, new, strict=True)), seed)


def in_expansions(
    rule: Rule, storage: Storage, lane: Lane, scalars: Scalars, seed: Tensor
) -> Written:
    """Run Collage's AdamW: each operation rounds to nearest even at the weight's precision."""
    rounding = NearestEven(codes.dropped_bits(storage.weight))
    # NaNs of weights and gradients may have any payload. Rounding to few bits would carry it into
    # the sign.
    weight = tuple(map(quiet, codes.read_parts(storage, lane, "weight")))
    exp_avg = codes.read_parts(storage, lane, rule.states[0])
    exp_avg_sq = codes.read_parts(storage, lane, rule.states[1])
    gradient = codes.gradient_value(storage.visible, lane.gradient) * scalars["gradient_scale"]
    gradient = quiet(gradient)
    change, *new = collage_adamw(weight, gradient, exp_avg, exp_avg_sq, scalars, rounding)
    parts = dict(zip(("weight", *rule.states), new, strict=True))
    return codes.write_parts(storage, lane, weight, change, parts)


def average(
    rule: MatrixRule, storage: Storage, lane: Lane, scalars: Scalars
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return a lane's gradient for a matrix rule's direction, and the new states beside the weight."""
    gradient = codes.gradient_value(storage.visible, lane.gradient) * scalars["gradient_scale"]
    if rule.average is None:
        return gradient, {}
    states = {name: codes.read_state(storage, lane, name) for name in rule.beside}
    return rule.average(gradient, states, scalars)


def advance(
    rule: AnyRule,
    storage: Storage,
    lane: Lane,
    change: Tensor | None,
    scalars: Scalars,
    seed: Tensor,
) -> Written:
    """Step one lane: run an elementwise rule, or write the ``change`` of a matrix rule, with its
    average and decay.
    """
    if isinstance(rule, Rule):
        run = in_expansions if storage.arithmetic == "expansion" else in_floats
        return run(rule, storage, lane, scalars, seed)
    assert change is not None
    if rule.decay:
        change = change + codes.read_weight(storage, lane) * scalars[rule.decay]
    states = average(rule, storage, lane, scalars)[1]
    return codes.write(storage, lane, codes.read(storage, lane, ()), change, states, seed)


def least_decay(storage: Storage) -> float:
    """Return the smallest decay that is audited, 1/32 to 1/16 of a weight's ulp.

    An ulp of less takes a million elements.
    """
    return 1 / (32 * storage.weight.spacings)


def weight_decay(
    rule: AnyRule,
    storage: Storage,
    lane: Lane,
    change: Tensor | None,
    scalars: Scalars,
    seed: Tensor,
    written: Written,
) -> tuple[Tensor, Tensor]:
    """Return the intended and the stored decay of a lane's step: repeat it without decay.

    Compiled, that costs the difference.
    """
    factor = scalars[rule.decay]
    audited = torch.where(factor != 0, factor.clamp(max=-least_decay(storage)), factor)
    if isinstance(rule, Rule):
        weight = codes.read(storage, lane, ()).weight
    else:
        weight = codes.read_weight(storage, lane)
    intended = weight * audited
    without = advance(rule, storage, lane, change, {**scalars, rule.decay: factor - audited}, seed)
    return intended, written.changes[1] - without.changes[1]


# ── the step of a whole tensor ────────────────────────────────────────────────────────────────────


def row_sums(terms: Sequence[Tensor]) -> Tensor:
    """Sum each term of the audit over the last dimension, in float32.

    Return ``[terms, rows]``, of flat words ``[terms]``.
    """
    return torch.stack([term.sum(-1) for term in terms])


def lanes_of(
    storage: Storage, words: Sequence[Tensor], multipliers: Sequence[Tensor]
) -> list[Lane]:
    """Return the lanes of words: the parts of the weight, then of the gradient, then the tensors of
    each plane.

    ``multipliers`` hold, for each scaled code and part, the one into the code's window and the one
    back.
    """
    layout = layout_of(storage)
    parts = layout.num_parts
    weights = lanes_of_weight(storage.visible, words[:parts])
    gradients = lanes_of_weight(storage.visible, words[parts : 2 * parts])
    fields = layout.by_lane(words[2 * parts :])
    pairs = list(zip(multipliers[::2], multipliers[1::2], strict=True))
    lanes = []
    for number, of_lane in enumerate(zip(weights, gradients, fields, strict=True)):
        part = number // layout.per_word
        scales = {name: pairs[index * parts + part] for index, name in enumerate(storage.scaled)}
        lanes.append(Lane(*of_lane, scales))
    return lanes


def make_step(
    rule: AnyRule, storage: Storage, summarize: Summarize | None = None, *, writes: bool = True
) -> Step:
    """Return the step of a whole tensor in words: ``step(*words, *scales, *changes, values, seed)
    -> Tensor``.

    Args: summarize: sums the audit's terms (:data:`narrowgauge.numerics.metrics.KERNEL_SUMS`) over
        the words. ``None`` makes a
            step without an audit. Terms of the decay are left out if the rule has none.
        writes: ``False`` makes an audit alone: it writes nothing.
    Returns: The step. Its words are int32 (of a float64 int64), all of one shape
        (:meth:`narrowgauge.optim.layout.Layout.extent`): the parts of the weight, then of the
        gradient, then the tensors of each plane. Weight and planes are written in place. The scales
        are float32 ``[rows, 1]``: for each scaled code and part, into the code's window and back.
        The changes are a matrix rule's for each lane, float32. On a CPU the step does not skip: the
        caller does. It returns the audit, empty without one.
    """
    layout = layout_of(storage)
    parts = layout.num_parts
    names = (*CONTROL, *rule.scalars)
    num_words = 2 * parts + sum(map(layout.num_tensors, layout.planes))
    end = num_words + 2 * len(storage.scaled) * parts

    def step(*arguments: Tensor) -> Tensor:
        words = arguments[:num_words]
        *changes, values, seed = arguments[end:]
        numbers = {name: values[index] for index, name in enumerate(names)}
        done = []
        decayed = []
        lanes = lanes_of(storage, words, arguments[num_words:end])
        for k, lane in enumerate(lanes):
            change = changes[k] if changes else None
            done.append(advance(rule, storage, lane, change, numbers, seed))
            if summarize is not None and rule.decay:
                decay = weight_decay(rule, storage, lane, change, numbers, seed, done[k])
                decayed.append(decay_terms(*decay))
        if writes:
            new = words_of_weight(storage.visible, [d.visible for d in done])
            new += layout.join_lanes([d.fields for d in done])
            skip = numbers["skip"] != 0
            for old, value in zip((*words[:parts], *words[2 * parts :]), new, strict=True):
                if not values.is_cpu:
                    value = torch.where(skip, old, value)
                old.copy_(value)
        if summarize is None:
            return values.new_zeros(0)
        terms: list[tuple[Tensor, ...]] = []
        for lane, written in zip(lanes, done, strict=True):
            at_end = codes.num_at_end(storage, written, lane)
            terms.append((*update_terms(*written.changes), at_end))
        for k, shrinking in enumerate(decayed):
            terms[k] += shrinking
        return summarize([sum(term[1:], term[0]) for term in zip(*terms, strict=True)])

    return step


def make_average(rule: MatrixRule, storage: Storage) -> Step:
    """Return the part before a direction.

    It takes the arguments of :func:`make_step`, and writes ``changes`` alone.
    """
    num_lanes = layout_of(storage).num_lanes
    names = (*CONTROL, *rule.scalars)

    def step(*arguments: Tensor) -> Tensor:
        *words, values, _ = arguments
        numbers = {name: values[index] for index, name in enumerate(names)}
        lanes = lanes_of(storage, words[:-num_lanes], ())
        for lane, into in zip(lanes, words[-num_lanes:], strict=True):
            into.copy_(average(rule, storage, lane, numbers)[0])
        return values.new_zeros(0)

    return step


@lru_cache(None)
def steps_of(rule: AnyRule, storage: Storage) -> tuple[Step, Step]:
    """Return the step and its audit.

    Return the same function objects each time, so that they are compiled once.
    """
    return make_step(rule, storage), make_step(rule, storage, row_sums, writes=False)


class Kernel:
    """Name the step of one (rule, storage), and say how it ran.

    For a matrix rule it only averages, and writes the change that the rule computed on a whole
    matrix.

    Attributes: not_printed: why the next step runs by the definition, or an empty string: the
        optimizer decides at each step. how_it_ran: in the last step: a language, or why the
        definition ran. ``None`` if nothing was stepped.
    """

    def __init__(self, rule: AnyRule, storage: Storage) -> None:
        self.rule = rule
        self.storage = storage
        self.not_printed = ""
        self.how_it_ran: str | None = None
        self.is_matrix = isinstance(rule, MatrixRule)
        num_decay = len(DECAY_SUMS) if rule.decay else 0
        self.num_sums = len(CHANGE_SUMS) + len(END_SUMS) + num_decay

    def decay(self, options: Mapping[str, Any], step: int) -> float:
        """Return the fraction that a step's decay takes from each weight.

        It is 0 if decay is part of the gradient.
        """
        if not self.rule.decay:
            return 0.0
        scalars = dict(zip(self.rule.scalars, self.rule.prepare(options, step), strict=True))
        return -float(scalars[self.rule.decay])
