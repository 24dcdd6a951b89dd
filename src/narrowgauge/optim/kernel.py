"""Kernels: the step of many elements in 32-bit words, compiled from the definition itself.

:func:`make_step` writes ``unpack -> read -> rule -> write -> pack (-> audit)`` once, in tensor operations. An element-wise
rule runs between reading and writing, in float32 or, where ``Storage.arithmetic`` says so, in the published Collage's
expansions, which round every operation to the visible format. A matrix rule runs outside of the kernel, on whole matrices,
and only its result is written. Run eagerly this is the reference; compiled ahead of time it is one fused loop over 32-bit
words. There is no second implementation to keep equal, and a test holds the two modes equal bit for bit.
"""

from __future__ import annotations

import base64
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor

from narrowgauge._torch.aligned import is_aligned
from narrowgauge.numerics.edge_values import with_nan
from narrowgauge.numerics.expansions import Expansion, nearest_even_bits
from narrowgauge.numerics.rounding import quiet
from narrowgauge.numerics.summation import chunk_size
from narrowgauge.numerics.update_metrics import CHANGE_SUMS, DECAY_SUMS, decay_terms, update_terms
from narrowgauge.optim import codec
from narrowgauge.optim.codec import Lane, Written
from narrowgauge.optim.compilation import (
    Compiled,
    Definition,
    compile_elsewhere,
    compiled,
    edge_words,
    example_words,
    normal_words,
    run_each,
)
from narrowgauge.optim.rules.collage import expanded
from narrowgauge.optim.rules.elementwise import RULES, Rule, Scalars, rule_source
from narrowgauge.optim.rules.matrix import MatrixRule
from narrowgauge.spec.storages import Storage

Step = Callable[..., Tensor]
Summarize = Callable[[Sequence[Tensor]], Tensor]
Draw = Callable[[torch.dtype, Sequence[int], torch.device, int], Tensor]
CONTROL = ("gradient_scale", "skip")
"""The scalars that every step takes before the rule's own: what gradients are multiplied by, and 1 to change nothing."""


# ── the step of one lane ────────────────────────────────────────────────────────────────────────────────────────────

Advance = Callable[[Lane, Sequence[Tensor], Scalars, Tensor], Written]
"""A step of one lane: ``(lane, decided, scalars, seed) -> written``. ``decided`` are the float32 tensors that were computed
before the kernel: none for an element-wise rule, the change and the new states for a matrix rule."""


def in_floats(rule: Rule, storage: Storage, lane: Lane, scalars: Scalars, seed: Tensor) -> Written:
    """The rule in float32 or float64; only what is stored is cut. ``scalars`` are ``gradient_scale`` and the rule's."""
    gradient = codec.gradient_value(storage.visible, lane.gradient).to(codec.value_dtype(storage))
    gradient = gradient * scalars["gradient_scale"]
    old = codec.read(storage, lane, rule.states)
    change, *new = rule.update(old.weight, gradient, *old.states, scalars)
    return codec.write(storage, lane, old, change, dict(zip(rule.states, new, strict=True)), seed)


def in_expansions(rule: Rule, storage: Storage, lane: Lane, scalars: Scalars, seed: Tensor) -> Written:
    """The published arithmetic: every operation rounded to nearest even at the weight's precision."""
    rounding = nearest_even_bits(codec.dropped_bits(storage.weight), quiet=True)
    # NaNs of weights and gradients may have any payload, which a rounding to few bits would carry into the sign.
    weight = Expansion(tuple(map(quiet, codec.read_parts(storage, lane, "weight"))), rounding)
    states = [Expansion(codec.read_parts(storage, lane, name), rounding) for name in rule.states]
    gradient = quiet(codec.gradient_value(storage.visible, lane.gradient) * scalars["gradient_scale"])
    advance = rule.expanded or expanded(rule.update)
    change, *new = advance(weight, gradient, *states, scalars)
    parts = {name: value.parts for name, value in zip(("weight", *rule.states), new, strict=True)}
    return codec.write_parts(storage, lane, weight.parts, change, parts)


ARITHMETICS: dict[str, Callable[..., Written]] = {
    "float32": in_floats,
    "float64": in_floats,
    "expansion": in_expansions,
}
COMPILED = ("float32", "expansion")
"""The arithmetics that kernels are compiled for. Those in float64 are for reference and run eagerly, a chunk at a time."""


def advance_by(rule: Rule, storage: Storage) -> Advance:
    """The step of an element-wise rule, in the arithmetic of the storage."""
    step = ARITHMETICS[storage.arithmetic]
    return lambda lane, decided, scalars, seed: step(rule, storage, lane, scalars, seed)


def write_decided(storage: Storage, states: Sequence[str]) -> Advance:
    """The step of a rule that has run already: it writes the change and then the new ``states`` that are ``decided``."""

    def advance(lane: Lane, decided: Sequence[Tensor], scalars: Scalars, seed: Tensor) -> Written:
        change, *new = decided
        old = codec.read(storage, lane, ())
        return codec.write(storage, lane, old, change, dict(zip(states, new, strict=True)), seed)

    return advance


Decay = Callable[[Lane, Sequence[Tensor], Scalars, Tensor, Written], tuple[Tensor, Tensor]]
"""The weight decay of one lane's step: ``(lane, decided, scalars, seed, written) -> (intended, stored)``, see
:func:`narrowgauge.numerics.update_metrics.decay_terms`."""


def least_decay(storage: Storage) -> float:
    """The share of a weight that is a 32nd to a 16th of its stored spacing; weaker decay is audited as if it were this.

    A spacing arrives whole or not at all, so a decay of a thousandth of one would have to be watched over a million elements. By
    itself a 16th is still rounded away; what arrives of it does by the gradient's part of the update, as of weaker decay.
    """
    return 1 / (32 * storage.weight.spacings)


def _audited_decay(factor: Tensor, storage: Storage) -> Tensor:
    """Of a step's factor, -lr · weight_decay, what is audited: 0 where there is no decay."""
    return torch.where(factor != 0, factor.clamp(max=-least_decay(storage)), factor)


def decay_by(rule: Rule, storage: Storage) -> Decay | None:
    """The decay of an element-wise rule: the step is taken again without it, of which a compiler computes only what differs."""
    if not rule.decay:
        return None
    step = ARITHMETICS[storage.arithmetic]

    def decay(
        lane: Lane, decided: Sequence[Tensor], scalars: Scalars, seed: Tensor, written: Written
    ) -> tuple[Tensor, Tensor]:
        factor = scalars[rule.decay]
        audited = _audited_decay(factor, storage)
        without = step(rule, storage, lane, {**scalars, rule.decay: factor - audited}, seed)
        return codec.read(storage, lane, ()).weight * audited, written.changes[1] - without.changes[1]

    return decay


NEGATIVE_DECAY = "negative_decay"
"""The scalar of a matrix rule's write, by which its audit knows the decay: −lr · wd."""


def decay_decided(storage: Storage) -> Decay:
    """The decay of a rule that has run already: the change is written again without it."""

    def decay(
        lane: Lane, decided: Sequence[Tensor], scalars: Scalars, seed: Tensor, written: Written
    ) -> tuple[Tensor, Tensor]:
        old = codec.read(storage, lane, ())
        intended = codec.read_weight(storage, lane) * _audited_decay(scalars[NEGATIVE_DECAY], storage)
        without = codec.write(storage, lane, old, decided[0] - intended, {}, seed)
        return intended, written.changes[1] - without.changes[1]

    return decay


# ── the step of a whole tensor ──────────────────────────────────────────────────────────────────────────────────────


def total_sums(terms: Sequence[Tensor]) -> Tensor:
    """The audit of one tensor: each term summed in float32 (short pieces, see ``StepKernel.AUDIT``), float64 ``[terms]``."""
    return torch.stack([term.sum() for term in terms]).double()


def term_table(terms: Sequence[Tensor]) -> Tensor:
    """The audit's terms of each word, float64 ``[terms, words]``, for callers that sum over segments of them."""
    return torch.stack(list(terms)).double()


def num_scales(storage: Storage) -> int:
    """How many tensors of multipliers a step takes after its words: two for each scaled code and part of the rows."""
    return 2 * len(storage.scaled) * codec.num_parts(storage)


def always_new(skip: Tensor, old: Tensor, new: Tensor) -> Tensor:
    """Choose the new words: for steps that the caller knows are not skipped."""
    return new


def make_step(
    storage: Storage,
    advance: Advance,
    scalars: Sequence[str] = (),
    *,
    num_decided: int = 0,
    summarize: Summarize | None = None,
    decay: Decay | None = None,
    choose: Callable[[Tensor, Tensor, Tensor], Tensor] = torch.where,
) -> Step:
    """The step of a whole tensor, in words: reads and writes the planes in place.

    Args:
        num_decided: how many float32 tensors ``advance`` takes for each lane.
        summarize: how to sum the terms of the audit (:data:`narrowgauge.numerics.update_metrics.KERNEL_SUMS`) over the words;
            ``None`` makes a step that is not audited.
        decay: what the audit reads of weight decay; ``None`` leaves those terms out.
        choose: from whether to skip, the old words and the new ones to what is written.
    Returns:
        ``step(*words, *scales, *decided, values, seed, *outputs) -> Tensor``. The words are int32: the parts of the weight,
        those of the gradient, then the tensors of each plane, all of one shape (:func:`narrowgauge.optim.codec.extent`).
        The scales are float32 ``[rows, 1]``: for each scaled code and each part, into the code's window and back.
        ``decided`` holds the float32 tensors of the first lane, then those of the next. ``outputs`` are where to write,
        weight first, then the planes: the same tensors again (a compiler that knows this makes no temporaries). The
        result is the audit, empty where there is none.
    """
    parts, visible, scaled = codec.num_parts(storage), storage.visible, storage.scaled
    names, lanes = (*CONTROL, *scalars), range(codec.num_lanes(storage))
    ends = num_scales(storage), num_scales(storage) + num_decided * len(lanes)

    def step(*arguments: Tensor) -> Tensor:
        num_words = (len(arguments) - ends[1] - 2 + parts) // 2
        words, rest = arguments[:num_words], arguments[num_words:]
        multipliers, decided, (values, seed, *outputs) = rest[: ends[0]], rest[ends[0] : ends[1]], rest[ends[1] :]
        numbers = {name: values[index] for index, name in enumerate(names)}
        pairs = [(multipliers[k], multipliers[k + 1]) for k in range(0, len(multipliers), 2)]
        weights = codec.lanes_of_weight(visible, words[:parts])
        gradients = codec.lanes_of_weight(visible, words[parts : 2 * parts])
        fields = codec.by_lane(storage, words[2 * parts :])
        done, decayed = [], []
        for k in lanes:
            part = k // codec.per_word(storage)
            scales = {name: pairs[index * parts + part] for index, name in enumerate(scaled)}
            given = decided[k * num_decided : (k + 1) * num_decided]
            lane = Lane(weights[k], gradients[k], fields[k], scales)
            done.append(advance(lane, given, numbers, seed))
            if summarize is not None and decay is not None:
                decayed.append(decay_terms(*decay(lane, given, numbers, seed, done[k])))
        new = codec.words_of_weight(visible, [d.visible for d in done])
        new += codec.join_lanes(storage, [d.fields for d in done])
        skip = numbers["skip"] != 0
        for output, old, value in zip(outputs, (*words[:parts], *words[2 * parts :]), new, strict=True):
            output.copy_(choose(skip, old, value))
        if summarize is None:
            return values.new_zeros(0)
        terms: list[tuple[Tensor, ...]] = [update_terms(*d.changes) for d in done]
        if decay is not None:
            terms = [(*some, *more) for some, more in zip(terms, decayed, strict=True)]
        return summarize([sum(some[1:], some[0]) for some in zip(*terms, strict=True)])

    return step


def _into(step: Step, outputs: Sequence[int]) -> Step:
    """A step that writes into the arguments of these numbers, not into the outputs that stand for them.

    A compiler that cuts a step into loops would else fill the outputs in the first one, and read the same memory anew in the
    next for the sums of the audit. Of arguments that are written it knows which loop is the last to read them.
    """

    def into(*arguments: Tensor) -> Tensor:
        return step(*arguments[: -len(outputs)], *(arguments[number] for number in outputs))

    return into


def row_peaks(*words: Tensor) -> Tensor:
    """The largest magnitude in each row of a bfloat16 matrix read as words, float32 ``[rows]``."""
    lanes = [codec.visible_value("bfloat16", lane).abs() for lane in codec.lanes_of_weight("bfloat16", words)]
    return reduce(torch.maximum, [lane.amax(1) for lane in lanes])


def write_row_peaks(words: Tensor, _: Tensor, peaks: Tensor) -> Tensor:
    """:func:`row_peaks` of one tensor of words, into ``peaks``; returns nothing, ``[0]``."""
    peaks.copy_(row_peaks(words))
    return peaks.new_zeros(0)


def define_row_peaks(device: torch.device) -> Definition:
    shape = example_shape(device, by_rows=True)

    def arguments(draw: Draw) -> list[Tensor]:
        peaks = [torch.zeros(shape[0], dtype=torch.float32, device=device) for _ in range(2)]
        return [draw(torch.bfloat16, shape, device, 0), *peaks]

    edges = partial(arguments, edge_words)
    return Definition(write_row_peaks, arguments(normal_words), [(0, 1), (0,), (0,)], edges=edges, outputs=(1,))


def peaks_of_matrices(matrices: Sequence[Tensor], *, compile: bool) -> Tensor:
    """The largest magnitude in each row of bfloat16 matrices read as words, float32 ``[rows]``: all rows in order."""
    device, sizes = matrices[0].device, [len(words) for words in matrices]
    peaks = torch.empty(sum(sizes), dtype=torch.float32, device=device)
    run = compiled("row peaks", device, lambda: define_row_peaks(device)) if compile else None
    together = []
    for words, part in zip(matrices, peaks.split(sizes), strict=True):
        if run is not None and min(words.shape) > 1:  # one row is no dynamic length
            together.append([words, part, part])
            continue
        rows = max(1, chunk_size(device) // max(1, words.shape[1]))
        for some, into in zip(words.split(rows), part.split(rows), strict=True):
            into.copy_(row_peaks(some))
    if run is not None:
        run_each(run, together)
    return peaks


WIDE = 16
"""A GPU's kernel takes 16 bytes at a time where it knows that rows of words are multiples of so many."""
INDEXABLE = 1 << 30
"""Words that one launch may have: the indices of Triton's kernels are int32."""


def example_shape(device: torch.device, *, by_rows: bool) -> tuple[int, ...]:
    """The words of an example to compile with."""
    size, columns = example_words(device), 1 << 8 if device.type == "cpu" else 1 << 10
    return (size // columns, columns) if by_rows else (size,)


@dataclass(frozen=True, slots=True)
class Work:
    """The tensors of one parameter, or of a piece of one, as a kernel takes them.

    Args:
        words: int32: the parts of the weight, of the gradient, and the planes.
        scales: float32 multipliers of its rows.
        decided: float32: what a matrix rule decided, for each lane.
    """

    words: list[Tensor]
    scales: list[Tensor] = field(default_factory=list)
    decided: list[Tensor] = field(default_factory=list)

    def arguments(self, parts: int, values: Tensor, seed: Tensor) -> list[Tensor]:
        outputs = (*self.words[:parts], *self.words[2 * parts :])
        return [*self.words, *self.scales, *self.decided, values, seed, *outputs]

    @property
    def is_aligned(self) -> bool:
        """Whether a compiled kernel takes its words in place; if not, it gets a piece at a time, so that copies are small."""
        return all(map(is_aligned, self.words))

    def widened(self) -> Work:
        """The same memory with ``WIDE`` words in each row, where its rows are multiples of so many; else itself.

        A kernel's lengths are dynamic. Of one that is a multiple of 16 the compiler has to be told.
        """
        first = self.words[0]
        if first.shape[-1] % WIDE or first.shape[-1] < 2 * WIDE:
            return self

        def wide(tensor: Tensor) -> Tensor:
            return tensor.view(*tensor.shape[:-1], -1, WIDE)

        scales = [scale.unsqueeze(-1) for scale in self.scales]
        return Work(list(map(wide, self.words)), scales, list(map(wide, self.decided)))

    def piece(self, start: int, stop: int) -> Work:
        """Some of its words (rows, where it has them)."""
        return Work(*([t[start:stop] for t in tensors] for tensors in (self.words, self.scales, self.decided)))


class WordKernel:
    """What steps the words of one storage: run eagerly in cache-sized chunks unless it is compiled.

    Without ``compile``, or without a compiler, the definition runs, with the same bits in all that is stored. Only the audit's
    sums are then added in another order, and differ in their last digits.
    """

    AUDIT, AUDIT_ON_GPU = 1 << 18, 1 << 24
    """Words per audited call: a compiled float32 sum over so many is within 1e-5, and a float64 one costs a third more. Each
    of a GPU's threads adds up some hundred of them."""

    def __init__(
        self,
        name: str,
        storage: Storage,
        advance: Advance,
        scalars: Sequence[str] = (),
        *,
        num_decided: int = 0,
        decay: Decay | None = None,
        compile: bool,
    ) -> None:
        self.storage, self.compile = storage, compile and storage.arithmetic in COMPILED
        self.num_sums = len(CHANGE_SUMS) + (len(DECAY_SUMS) if decay is not None else 0)
        self.parts, self.num_decided, self.num_scalars = codec.num_parts(storage), num_decided, len(scalars)
        # In the arithmetic of expansions too much is reused for one loop; its many then run a chunk at a time.
        self.one_loop = storage.arithmetic == "float32"
        self._definition = partial(make_step, storage, advance, scalars, num_decided=num_decided, decay=decay)
        self._plain = self._definition()
        self._audited = self._definition(summarize=total_sums)
        self._titles = {audited: f"{name} audited={audited}" for audited in (False, True)}

    def run(self, work: Work, values: Tensor, seed: Tensor, *, audited: bool = False) -> Tensor | None:
        """Step tensors of equal shape in place, without gradients; returns the audit's ``KERNEL_SUMS``, float64, if ``audited``.

        ``values`` are the scalars of ``CONTROL`` and of the rule, in the storage's arithmetic; ``seed`` is 0-d int32.
        """
        return self._run(work, values, seed, audited, self._is_compiled(values))

    def run_each(self, tensors: Sequence[Work], values: Tensor, seed: Tensor) -> None:
        """:meth:`run` for many tensors, none audited; a GPU is launched once for all that its kernel takes in place."""
        is_compiled = self._is_compiled(values)
        together: dict[Compiled, list[list[Tensor]]] = {}
        for work in tensors:
            taken, run = self._with_kernel(work, values.device, False) if is_compiled else (work, None)
            if run is not None and self._takes_whole(taken):
                together.setdefault(run, []).append(taken.arguments(self.parts, values, seed))
            else:
                self._run(work, values, seed, False, is_compiled)
        for run, batch in together.items():
            run_each(run, batch)

    def _run(self, work: Work, values: Tensor, seed: Tensor, audited: bool, is_compiled: bool) -> Tensor | None:
        if not work.words[0].numel():
            return values.new_zeros(self.num_sums, dtype=torch.float64) if audited else None
        run = None
        if is_compiled:
            work, run = self._with_kernel(work, values.device, audited)
        if run is not None and not audited and self._takes_whole(work):
            run(work.arguments(self.parts, values, seed))
            return None
        first, step = work.words[0], self._audited if audited else self._plain
        length, row = first.shape[0], first[0].numel()
        size, total = max(1, self._piece_size(first.device, run is not None) // row), None
        for start in range(0, length, size):
            part = work.piece(start, start + size) if length > size else work
            arguments = part.arguments(self.parts, values, seed)
            if run is not None and part.words[0].shape[0] > 1:
                sums = run(arguments)[0]
            else:
                sums = step(*arguments)
            total = sums if total is None else total + sums
        return total if audited else None

    def compiles_for(self, device: torch.device) -> bool:
        """Whether compiled code is wanted on a device."""
        return self.compile

    def _is_compiled(self, values: Tensor) -> bool:
        """Whether compiled code is to run; on a CPU the definition skips a step."""
        return self.compiles_for(values.device) and not (values.is_cpu and bool(values[CONTROL.index("skip")]))

    def _with_kernel(self, work: Work, device: torch.device, audited: bool) -> tuple[Work, Compiled | None]:
        """The work as a kernel takes it, and the kernel, ``None`` where there is none for it."""
        if min(work.words[0].shape) <= 1:
            return work, None  # one row is no dynamic length, and nothing needs no kernel
        wide = work if device.type == "cpu" else work.widened()
        return wide, self.variant(device, audited, wide=wide is not work)

    def _takes_whole(self, work: Work) -> bool:
        """Whether the kernel gets all words in one call."""
        first = work.words[0]
        return (self.one_loop if first.is_cpu else first.numel() <= INDEXABLE) and work.is_aligned

    def _piece_size(self, device: torch.device, is_compiled: bool) -> int:
        """How many words a call gets where it does not get all."""
        if device.type != "cpu":
            return self.AUDIT_ON_GPU if is_compiled else chunk_size(device)
        return self.AUDIT if is_compiled and self.one_loop else chunk_size(device)

    def variant(self, device: torch.device, audited: bool, *, wide: bool = False) -> Compiled | None:
        """The compiled plain or audited step for this device and number of threads, ``None`` without a compiler.

        ``wide`` is for work that is :meth:`Work.widened`.
        """
        return compiled(self._name(audited, wide), device, lambda: self.define(device, audited, wide=wide))

    def _name(self, audited: bool, wide: bool) -> str:
        return f"{self._titles[audited]}{' wide' * wide}"

    def define(self, device: torch.device, audited: bool, *, wide: bool = False) -> Definition:
        """What :meth:`variant` compiles."""
        storage, scales = self.storage, num_scales(self.storage)
        example = self._example(device, wide=wide)
        words: tuple[int | None, ...] = (0, 1) if codec.by_rows(storage) else (0,)
        rows: tuple[int | None, ...] = (0, None)
        if wide:
            words, rows = (*words, None), (*rows, None)
        decided = self.num_decided * codec.num_lanes(storage)
        count = (len(example) - scales - decided - 2 + self.parts) // 2
        lengths = [words] * count + [rows] * scales + [words] * decided + [(), ()] + [words] * (count - self.parts)
        # On a CPU the host knows whether a step is skipped: choosing in each word would be an eighth of the instructions.
        choose = always_new if device.type == "cpu" else torch.where
        step = self._definition(summarize=total_sums if audited else None, choose=choose)
        outputs = (*range(self.parts), *range(2 * self.parts, count))
        if audited and not self.one_loop:
            step = _into(step, outputs)
        return Definition(step, example, lengths, self.one_loop, lambda: self._edges(device, wide=wide), outputs)

    def _edges(self, device: torch.device, *, wide: bool) -> list[Tensor]:
        """Edge values of weights and gradients, and the states that a step of such gradients leaves."""
        arguments, dtype = self._example(device, edge_words, 0.5, 0.5, wide=wide), getattr(torch, self.storage.visible)
        # That step has left its own NaN in weights; others may be written into them.
        for k in range(self.parts):
            arguments[k] = with_nan(arguments[k].view(dtype), seed=-1 - k).view(torch.int32)
        return arguments

    def _example(
        self,
        device: torch.device,
        draw: Draw = normal_words,
        lowest: float = 0.1,
        highest: float = 0.9,
        *,
        wide: bool = False,
    ) -> list[Tensor]:
        """Arguments of a step as they occur: random weights and gradients, and the states that one step leaves.

        The rule's scalars lie between ``lowest`` and ``highest``; where all are a half, results are exact and tie.
        """
        storage, visible = self.storage, getattr(torch, self.storage.visible)
        shape = example_shape(device, by_rows=codec.by_rows(storage))
        count = sum(codec.num_tensors(storage, plane.bits) for plane in codec.planes(storage))
        drawn = [draw(visible, shape, device, seed) for seed in range(3 * self.parts)]
        weight, first, then = (drawn[k * self.parts : (k + 1) * self.parts] for k in range(3))
        states = [torch.zeros(shape, dtype=torch.int32, device=device) for _ in range(count)]
        scales = [torch.ones(shape[0], 1, dtype=torch.float32, device=device) for _ in range(num_scales(storage))]
        rates = torch.linspace(lowest, highest, self.num_scalars, dtype=torch.float32, device=device)
        ends = torch.linspace(1.0, 0.0, len(CONTROL), dtype=torch.float32, device=device)
        values = torch.cat([ends, rates])
        seed = torch.full((), 0x2545F491, dtype=torch.int32, device=device)
        decided = [
            draw(torch.float32, shape, device, 7 + k).view(torch.float32)
            for k in range(self.num_decided * codec.num_lanes(storage))
        ]
        self._plain(*Work([*weight, *first, *states], scales, decided).arguments(self.parts, values, seed))
        # Each argument its own memory: a compiler that sees one tensor twice asks for the same again.
        work = Work([*weight, *then, *states], scales, decided)
        return [x.clone() for x in (work.widened() if wide else work).arguments(self.parts, values, seed)]


class StepKernel(WordKernel):
    """The step of one (element-wise rule, storage)."""

    def __init__(self, rule: Rule, storage: Storage, *, compile: bool) -> None:
        name = f"{rule.name} {storage!r} {rule_source(rule)}"
        decay = decay_by(rule, storage)
        super().__init__(name, storage, advance_by(rule, storage), rule.scalars, decay=decay, compile=compile)
        self.rule = rule
        self._by_word = self._definition(summarize=term_table)

    def scalars(self, options: Mapping[str, Any], step: int) -> Sequence[float]:
        """The rule's scalars for the step of this number, under a param group's options."""
        return self.rule.prepare(options, step)

    def decay(self, options: Mapping[str, Any], step: int) -> float:
        """The share of each weight by which a step's decay shrinks it, 0 where it cannot be told from the gradient."""
        if not self.rule.decay:
            return 0.0
        return -float(dict(zip(self.rule.scalars, self.scalars(options, step), strict=True))[self.rule.decay])

    def run_bucket(self, work: Work, values: Tensor, seed: Tensor, segments: Sequence[slice]) -> Tensor:
        """An audited step of a bucket: float64 ``[segments, terms]``."""
        if self.compile:
            rows = [self.run(work.piece(s.start, s.stop), values, seed, audited=True) for s in segments]
            return torch.stack([row for row in rows if row is not None])
        table = self._by_word(*work.arguments(self.parts, values, seed))
        return torch.stack([table[:, segment].sum(1) for segment in segments])

    def compile_audit_elsewhere(self, device: torch.device) -> None:
        """Have the audited variant compiled by another process: it is needed only some steps from now."""
        if not self.compile or RULES.get(self.rule.name) is not self.rule:
            return  # another process could not find a rule that is not in the table
        blob = base64.b64encode(pickle.dumps(self.storage)).decode()
        statement = (
            f"from narrowgauge.optim.kernel import compile_audit as c; c({self.rule.name!r}, {blob!r}, '{device}')"
        )
        wide = device.type != "cpu"
        compile_elsewhere(self._name(True, wide), device, lambda: self.define(device, True, wide=wide), statement)


def compile_audit(rule: str, storage: str, device: str) -> None:
    """Compile an audited kernel into the cache: what :meth:`StepKernel.compile_audit_elsewhere` starts."""
    kernel = StepKernel(RULES[rule], pickle.loads(base64.b64decode(storage)), compile=True)
    kernel.variant(torch.device(device), True, wide=not device.startswith("cpu"))


class MatrixKernel(WordKernel):
    """The write of one (matrix rule, storage): it stores the change and the states that the rule computed on a whole matrix.

    The storage's states are those of the rule that have the weight's shape. On a CPU it runs eagerly: a matrix rule's own
    products take longer. A GPU would be given some eighty small operations for each matrix.
    """

    def __init__(self, rule: MatrixRule, storage: Storage, *, compile: bool) -> None:
        names = tuple(state for state, _ in storage.states)
        advance, scalars = write_decided(storage, names), (NEGATIVE_DECAY,) if rule.decays else ()
        decay = decay_decided(storage) if rule.decays else None
        title = f"write {names} {scalars} {storage!r}"
        super().__init__(title, storage, advance, scalars, num_decided=1 + len(names), decay=decay, compile=compile)
        self.rule = rule

    def scalars(self, options: Mapping[str, Any], step: int) -> Sequence[float]:
        """What the audit reads: the rule reads its options itself."""
        return (-self.decay(options, step),) if self.rule.decays else ()

    def decay(self, options: Mapping[str, Any], step: int) -> float:
        """As of :meth:`StepKernel.decay`."""
        return float(options["lr"]) * float(options["weight_decay"]) if self.rule.decays else 0.0

    def compiles_for(self, device: torch.device) -> bool:
        return self.compile and device.type != "cpu"


Kernel = StepKernel | MatrixKernel
"""What steps a parameter."""
