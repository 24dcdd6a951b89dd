"""Kernels: the step of many elements in 32-bit words, compiled from the definition itself.

:func:`make_step` writes ``unpack -> read -> rule -> write -> pack (-> audit)`` once, in tensor operations. An elementwise rule
runs between reading and writing. It computes in float32. In a storage of Collage, AdamW runs in the published expansions, which
round every operation to the visible format. A matrix rule runs outside the kernel, on whole matrices. The kernel only
writes its result. Eager, this code is the reference. Compiled, it is one fused loop over 32-bit words.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from narrowgauge.compile import Compiled, compiled
from narrowgauge.numerics.chunks import chunk_size
from narrowgauge.numerics.expansions import NearestEven
from narrowgauge.numerics.metrics import CHANGE_SUMS, DECAY_SUMS, decay_terms, update_terms
from narrowgauge.numerics.rounding import quiet
from narrowgauge.optim import codes, layout
from narrowgauge.optim.codes import Lane, Written
from narrowgauge.optim.rules.collage import collage_adamw
from narrowgauge.optim.rules.elementwise import Rule, Scalars
from narrowgauge.optim.rules.matrix import NEGATIVE_DECAY, MatrixRule
from narrowgauge.spec.storages import Storage

Step = Callable[..., Tensor]
Summarize = Callable[[Sequence[Tensor]], Tensor]
CONTROL = ("gradient_scale", "skip")
"""The scalars of every step, before the rule's own: the factor of the gradients, and 1 to change nothing."""


# ── the step of one lane ────────────────────────────────────────────────────────────────────────────────────────────

Advance = Callable[[Lane, Sequence[Tensor], Scalars, Tensor], Written]
"""A step of one lane: ``(lane, decided, scalars, seed) -> written``. ``decided`` are float32 tensors computed before the
kernel. An elementwise rule has none. A matrix rule has the change and the new states."""


def in_floats(rule: Rule, storage: Storage, lane: Lane, scalars: Scalars, seed: Tensor) -> Written:
    """Run the rule in float32 and round the result. ``scalars`` are ``gradient_scale`` and the rule's."""
    gradient = codes.gradient_value(storage.visible, lane.gradient) * scalars["gradient_scale"]
    old = codes.read(storage, lane, rule.states)
    change, *new = rule.update(old.weight, gradient, *old.states, scalars)
    return codes.write(storage, lane, old, change, dict(zip(rule.states, new, strict=True)), seed)


def in_expansions(rule: Rule, storage: Storage, lane: Lane, scalars: Scalars, seed: Tensor) -> Written:
    """Run Collage's AdamW: each operation rounds to nearest even at the weight's precision."""
    rounding = NearestEven(codes.dropped_bits(storage.weight))
    # NaNs of weights and gradients may have any payload. Rounding to few bits would carry it into the sign.
    weight = tuple(map(quiet, codes.read_parts(storage, lane, "weight")))
    exp_avg, exp_avg_sq = (codes.read_parts(storage, lane, name) for name in rule.states)
    gradient = quiet(codes.gradient_value(storage.visible, lane.gradient) * scalars["gradient_scale"])
    change, *new = collage_adamw(weight, gradient, exp_avg, exp_avg_sq, scalars, rounding)
    parts = dict(zip(("weight", *rule.states), new, strict=True))
    return codes.write_parts(storage, lane, weight, change, parts)


ARITHMETICS: dict[str, Callable[..., Written]] = {
    "float32": in_floats,
    "expansion": in_expansions,
}


def write_decided(storage: Storage, states: Sequence[str]) -> Advance:
    """Return the step of a rule that has already run. It writes the rule's change and new ``states``."""

    def advance(lane: Lane, decided: Sequence[Tensor], scalars: Scalars, seed: Tensor) -> Written:
        change, *new = decided
        old = codes.read(storage, lane, ())
        return codes.write(storage, lane, old, change, dict(zip(states, new, strict=True)), seed)

    return advance


Decay = Callable[[Lane, Sequence[Tensor], Scalars, Tensor, Written], tuple[Tensor, Tensor]]
"""The weight decay in one lane's step: ``(lane, decided, scalars, seed, written) -> (intended, stored)``. See
:func:`narrowgauge.numerics.metrics.decay_terms`."""


def least_decay(storage: Storage) -> float:
    """Return the smallest decay that is audited, 1/32 to 1/16 of a weight's ulp.

    A smaller one is audited as if it were this large: it would take a million elements to see one ulp of it.
    """
    return 1 / (32 * storage.weight.spacings)


def _audited_decay(factor: Tensor, storage: Storage) -> Tensor:
    """Return the audited factor, -lr · weight_decay. It is 0 without decay."""
    return torch.where(factor != 0, factor.clamp(max=-least_decay(storage)), factor)


def decay_by(rule: Rule, storage: Storage) -> Decay | None:
    """Return the decay of an elementwise rule: repeat the step without it. A compiler computes only the difference."""
    if not rule.decay:
        return None
    step = ARITHMETICS[storage.arithmetic]

    def decay(
        lane: Lane, decided: Sequence[Tensor], scalars: Scalars, seed: Tensor, written: Written
    ) -> tuple[Tensor, Tensor]:
        factor = scalars[rule.decay]
        audited = _audited_decay(factor, storage)
        without = step(rule, storage, lane, {**scalars, rule.decay: factor - audited}, seed)
        return codes.read(storage, lane, ()).weight * audited, written.changes[1] - without.changes[1]

    return decay


def decay_decided(storage: Storage) -> Decay:
    """Return the decay of a rule that has already run: write the change again without decay."""

    def decay(
        lane: Lane, decided: Sequence[Tensor], scalars: Scalars, seed: Tensor, written: Written
    ) -> tuple[Tensor, Tensor]:
        old = codes.read(storage, lane, ())
        intended = codes.read_weight(storage, lane) * _audited_decay(scalars[NEGATIVE_DECAY], storage)
        without = codes.write(storage, lane, old, decided[0] - intended, {}, seed)
        return intended, written.changes[1] - without.changes[1]

    return decay


# ── the step of a whole tensor ──────────────────────────────────────────────────────────────────────────────────────


def total_sums(terms: Sequence[Tensor]) -> Tensor:
    """Sum each term of the audit in float32, over pieces of at most ``Kernel.AUDIT`` words. Return float64 ``[terms]``."""
    return torch.stack([term.sum() for term in terms]).double()


def term_table(terms: Sequence[Tensor]) -> Tensor:
    """Return the audit's terms of each word, float64 ``[terms, words]``, for callers that sum over segments."""
    return torch.stack(list(terms)).double()


def lanes_of(storage: Storage, words: Sequence[Tensor], multipliers: Sequence[Tensor]) -> list[Lane]:
    """Return the lanes of words: the parts of the weight, then of the gradient, then the tensors of each plane.

    ``multipliers`` hold, for each scaled code and part, the one into the code's window and the one back.
    """
    parts = layout.num_parts(storage)
    weights = layout.lanes_of_weight(storage.visible, words[:parts])
    gradients = layout.lanes_of_weight(storage.visible, words[parts : 2 * parts])
    fields = layout.by_lane(storage, words[2 * parts :])
    pairs = list(zip(multipliers[::2], multipliers[1::2], strict=True))
    lanes = []
    for number, of_lane in enumerate(zip(weights, gradients, fields, strict=True)):
        part = number // layout.per_word(storage)
        scales = {name: pairs[index * parts + part] for index, name in enumerate(storage.scaled)}
        lanes.append(Lane(*of_lane, scales))
    return lanes


def make_step(
    storage: Storage,
    advance: Advance,
    scalars: Sequence[str] = (),
    *,
    num_decided: int = 0,
    summarize: Summarize | None = None,
    decay: Decay | None = None,
) -> Step:
    """Return the step of a whole tensor in words. It writes them in place.

    Args:
        num_decided: number of float32 tensors that ``advance`` takes per lane.
        summarize: sums the audit's terms (:data:`narrowgauge.numerics.metrics.KERNEL_SUMS`) over the words. ``None`` makes a
            step without an audit.
        decay: the weight decay for the audit; ``None`` leaves those terms out.
    Returns:
        ``step(*words, *scales, *decided, values, seed) -> Tensor``. The words are int32, all of one shape
        (:func:`narrowgauge.optim.layout.extent`): the parts of the weight, then of the gradient, then the tensors of each
        plane. Weight and planes are written in place. The scales are float32 ``[rows, 1]``: for each scaled code and part, into
        the code's window and back. ``decided`` holds the float32 tensors of the first lane, then of the next. On a CPU the step
        does not skip: the caller does. The result is the audit, empty without one.
    """
    parts, visible = layout.num_parts(storage), storage.visible
    names, num_lanes = (*CONTROL, *scalars), layout.num_lanes(storage)
    num_words = 2 * parts + sum(layout.num_tensors(storage, plane.bits) for plane in layout.planes(storage))
    num_scales = 2 * len(storage.scaled) * parts
    ends = num_words + num_scales, num_words + num_scales + num_decided * num_lanes

    def step(*arguments: Tensor) -> Tensor:
        words, decided = arguments[:num_words], arguments[ends[0] : ends[1]]
        values, seed = arguments[ends[1] :]
        numbers = {name: values[index] for index, name in enumerate(names)}
        done, decayed = [], []
        for k, lane in enumerate(lanes_of(storage, words, arguments[num_words : ends[0]])):
            values_decided = decided[k * num_decided : (k + 1) * num_decided]
            done.append(advance(lane, values_decided, numbers, seed))
            if summarize is not None and decay is not None:
                decayed.append(decay_terms(*decay(lane, values_decided, numbers, seed, done[k])))
        new = layout.words_of_weight(visible, [d.visible for d in done])
        new += layout.join_lanes(storage, [d.fields for d in done])
        skip = numbers["skip"] != 0
        for old, value in zip((*words[:parts], *words[2 * parts :]), new, strict=True):
            old.copy_(value if values.is_cpu else torch.where(skip, old, value))
        if summarize is None:
            return values.new_zeros(0)
        terms: list[tuple[Tensor, ...]] = [update_terms(*d.changes) for d in done]
        if decay is not None:
            terms = [(*change, *shrinking) for change, shrinking in zip(terms, decayed, strict=True)]
        return summarize([sum(term[1:], term[0]) for term in zip(*terms, strict=True)])

    return step


Steps = tuple[Step, Step, Step]
"""Three steps: plain, audited, and audited with a table over the words."""


def _all_steps(definition: Callable[..., Step]) -> Steps:
    return definition(), definition(summarize=total_sums), definition(summarize=term_table)


@lru_cache(None)
def elementwise_steps(rule: Rule, storage: Storage) -> Steps:
    """Return the steps of a rule. Return the same function objects each time, so that they are compiled once."""
    step, decay = ARITHMETICS[storage.arithmetic], decay_by(rule, storage)

    def advance(lane: Lane, decided: Sequence[Tensor], scalars: Scalars, seed: Tensor) -> Written:
        return step(rule, storage, lane, scalars, seed)

    return _all_steps(partial(make_step, storage, advance, rule.scalars, decay=decay))


@lru_cache(None)
def decided_steps(rule: MatrixRule, storage: Storage) -> Steps:
    """Return the steps that write a matrix rule's results: its change and the storage's states."""
    names, decay = [name for name, _ in storage.states], decay_decided(storage) if rule.decay else None
    advance = write_decided(storage, names)
    return _all_steps(partial(make_step, storage, advance, rule.scalars, num_decided=1 + len(names), decay=decay))


class Kernel:
    """Step the words of one (rule, storage): compiled, or eagerly in cache-sized chunks.

    Both store the same bits. They add the audit's sums in different orders, so its last digits differ. Of a matrix rule it only
    writes the change and the states that the rule computed on a whole matrix.
    """

    AUDIT, AUDIT_ON_GPU = 1 << 18, 1 << 24
    """Words per audited call. A compiled float32 sum of so many is within 1e-5. A float64 sum costs a third more."""

    def __init__(self, rule: Rule | MatrixRule, storage: Storage, *, compile: bool) -> None:
        self.rule, self.storage, self.compile = rule, storage, compile
        self.is_matrix = isinstance(rule, MatrixRule)
        self.num_sums = len(CHANGE_SUMS) + (len(DECAY_SUMS) if rule.decay else 0)
        # Expansions reuse too much for one loop. Their many loops run a chunk at a time.
        self.one_loop = storage.arithmetic == "float32"
        steps = decided_steps(rule, storage) if isinstance(rule, MatrixRule) else elementwise_steps(rule, storage)
        self._plain, self._audited, self._by_word = steps
        self._compiled: dict[tuple[torch.device, bool, int], Compiled | None] = {}

    def decay(self, options: Mapping[str, Any], step: int) -> float:
        """Return the fraction that a step's decay takes from each weight. It is 0 if decay is part of the gradient."""
        if not self.rule.decay:
            return 0.0
        return -float(dict(zip(self.rule.scalars, self.rule.prepare(options, step), strict=True))[self.rule.decay])

    def run(self, tensors: Sequence[Tensor], values: Tensor, seed: Tensor, *, audited: bool = False) -> Tensor | None:
        """Step tensors of one parameter in place, without gradients. Return the audit, float64 ``[num_sums]``, if ``audited``.

        Args:
            tensors: tensors of equal length: the words, the multipliers of rows, and the results of a matrix rule.
            values: the scalars of ``CONTROL`` and of the rule, float32.
            seed: 0-d int32.
        """
        first = tensors[0]
        if not first.numel() or (values.is_cpu and values[CONTROL.index("skip")]):
            return values.new_zeros(self.num_sums, dtype=torch.float64) if audited else None
        run = self._version(tensors, values, seed, audited)
        on_cpu, step = values.is_cpu, self._audited if audited else self._plain
        if run is None:
            size = chunk_size(first.device)
        elif audited or not self.one_loop:
            size = (self.AUDIT if self.one_loop else chunk_size(first.device)) if on_cpu else self.AUDIT_ON_GPU
        else:
            run(*tensors, values, seed)
            return None
        rows, total = max(1, size // first[0].numel()), None
        for start in range(0, len(first), rows):
            chunk = [tensor[start : start + rows] for tensor in tensors]
            # A trace for many rows is wrong for one row.
            sums = (step if run is None or not run.accepts([*chunk, values, seed]) else run)(*chunk, values, seed)
            total = sums if total is None else total + sums
        return total if audited else None

    def compiles_for(self, device: torch.device) -> bool:
        """Return whether to use compiled code on a device.

        On a CPU a matrix rule's own products take longer than its write. On a GPU that would be some eighty small operations for
        each matrix.
        """
        return self.compile and not (self.is_matrix and device.type == "cpu")

    def _version(self, tensors: Sequence[Tensor], values: Tensor, seed: Tensor, audited: bool) -> Compiled | None:
        """Return the compiled step, or ``None`` if there is none for such tensors."""
        if not self.compiles_for(values.device) or min(tensors[0].shape) <= 1:
            return None
        key, arguments = (values.device, audited, torch.get_num_threads()), [*tensors, values, seed]
        if key not in self._compiled or not ((run := self._compiled[key]) is None or run.accepts(arguments)):
            step = self._audited if audited else self._plain
            # Prove it at scalars that all count: in its first step a run may skip, or have a rate or a decay of 0.
            proof = torch.linspace(0.1, 0.9, len(values), dtype=values.dtype)
            proof[: len(CONTROL)] = torch.tensor([1.0, 0.0])
            self._compiled[key] = compiled(
                step,
                [*tensors, proof.to(values.device), seed],
                exact=not audited,
                one_loop=self.one_loop and not audited,
            )
        return self._compiled[key]

    def run_bucket(self, tensors: Sequence[Tensor], values: Tensor, seed: Tensor, segments: Sequence[slice]) -> Tensor:
        """Take an audited step of a bucket. Return the audits, float64 ``[segments, num_sums]``."""
        if self.compile:
            rows = [self.run([t[s] for t in tensors], values, seed, audited=True) for s in segments]
            return torch.stack([row for row in rows if row is not None])
        if values[CONTROL.index("skip")] and values.is_cpu:
            return values.new_zeros(len(segments), self.num_sums, dtype=torch.float64)
        table = self._by_word(*tensors, values, seed)
        return torch.stack([table[:, segment].sum(1) for segment in segments])
