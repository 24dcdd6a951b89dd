"""Kernels: one function per (rule, storage), compiled from the definition itself.

``decode -> rule -> encode (-> audit)`` is written once, below, in tensor operations. Run as it stands it is the reference;
given to torch's ahead-of-time compiler it becomes one fused loop over 32-bit words. There is no second implementation
to keep equal, and a test holds the two equal bit for bit.
"""

from __future__ import annotations

import base64
import pickle
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from narrowgauge.numerics.measures import update_terms
from narrowgauge.numerics.rounding import bits_of, dither, float_of, half, random_bits
from narrowgauge.optim import codes, layouts
from narrowgauge.optim.compilation import Compiled, compile_elsewhere, compiled, kernel_key
from narrowgauge.optim.elementwise import RULES, Rule, Scalars, rule_source
from narrowgauge.storages import STATE_NAMES, Storage

Step = Callable[..., Tensor]
CONTROL = ("gradient_scale", "skip")
"""The scalars that every step takes before the rule's own: what gradients are multiplied by, and 1 to change nothing."""


def addends(storage: Storage, weight: Tensor, gradient_bits: Tensor, seed: Tensor) -> dict[str, Tensor | int]:
    """What each code of the storage adds before it cuts, from one hashed word per element.

    The key is the element's own bits: its stored weight and its gradient's *mantissa* (with the exponent in it, scaling
    all gradients by a power of two would change the rounding). The 32 bits are dealt to the stochastic codes, the weight
    first. A code that drops more bits than it was dealt borrows its lower ones from its neighbours' upper ones: with
    12 bits for 18 a chance below 2^-12 would be none, and at beta2 = 0.9999 a second moment would stop short by 2 %.

    Args:
        storage: the row.
        weight: float32, the stored weights before the step.
        gradient_bits: int32, the gradients' float32 bits before any scaling.
        seed: 0-d int32 tensor of this step.
    Returns:
        One addend per name of ``weight, exp_avg, exp_avg_sq``.
    """
    table = {"weight": storage.weight, **{name: getattr(storage, name) for name in STATE_NAMES}}
    result: dict[str, Tensor | int] = {n: half(codes.dropped_bits(c)) for n, c in table.items()}
    stochastic = [(n, codes.dropped_bits(c)) for n, c in table.items() if c.rounding == "stochastic"]
    if not stochastic:
        return result
    mantissa = (gradient_bits >> 16) & 0x7F if storage.visible == "bfloat16" else gradient_bits & 0x7FFFFF
    random, start = random_bits(bits_of(weight) ^ mantissa, seed), 0
    for place, (name, dropped) in enumerate(stochastic):
        start += min(dropped, (32 - start) // (len(stochastic) - place))
        reach = min(start, dropped)
        result[name] = dither(random, start - reach, reach, dropped)
    return result


def step_lane(
    rule: Rule,
    storage: Storage,
    seen: Tensor,
    gradient_bits: Tensor,
    words: Sequence[Tensor],
    scalars: Scalars,
    seed: Tensor,
) -> tuple[Tensor, dict[str, Tensor], tuple[Tensor, Tensor, Tensor]]:
    """One optimizer step of one lane: the whole definition.

    Args:
        rule, storage: what to do and how to keep it.
        seen: int32 bits of the visible weight as a float32.
        gradient_bits: int32 bits of the gradient as a float32.
        words: this lane's words of every plane.
        scalars: 0-d float32 tensors, ``CONTROL`` and the rule's.
        seed: 0-d int32 tensor.
    Returns:
        ``(seen, fields, (intended, taken, visible))``: the new bits, and for the audit the intended change, the change
        of the stored weight and that of the visible one, float32.
    """
    of_plane = dict(zip(layouts.planes(storage), words, strict=True))
    place = {name: (of_plane[place.plane], place.shift) for name, place in layouts.places(storage).items()}
    word, shift = place[storage.beside] if storage.beside else (None, 0)
    weight = codes.decode_weight(storage, seen, word, shift)
    states = [codes.decode(getattr(storage, name), *place[name]) for name in rule.states]
    gradient = float_of(gradient_bits) * scalars["gradient_scale"]
    change, *new_states = rule.update(weight, gradient, *states, scalars)
    addend = addends(storage, weight, gradient_bits, seed)
    new_seen, field, kept = codes.encode_weight(storage, weight + change, addend["weight"], shift)
    fields = {storage.beside: field} if storage.beside and field is not None else {}
    for name, value in zip(rule.states, new_states, strict=True):
        fields[name] = codes.encode(getattr(storage, name), value, addend[name], place[name][1])
    return new_seen, fields, (change, kept - weight, float_of(new_seen) - float_of(seen))


def total_sums(terms: Sequence[Tensor]) -> Tensor:
    """The audit of one tensor: each term summed in float32 (short pieces, see ``StepKernel.AUDIT``), float64 ``[8]``."""
    return torch.stack([term.sum() for term in terms]).double()


def segment_sums(segments: Sequence[slice]) -> Callable[[Sequence[Tensor]], Tensor]:
    """The audit of many tensors stepped as one: float64 ``[segments, 8]``."""

    def sums(terms: Sequence[Tensor]) -> Tensor:
        table = torch.stack(list(terms)).double()
        return torch.stack([table[:, segment].sum(1) for segment in segments])

    return sums


def make_step(rule: Rule, storage: Storage, summarize: Callable[[Sequence[Tensor]], Tensor] | None = None) -> Step:
    """The step of a whole tensor, in words: reads and writes the planes in place.

    Args:
        rule, storage: what to do and how to keep it.
        summarize: how to sum the terms of the audit (:data:`narrowgauge.numerics.measures.UPDATE_SUMS`) over the words;
            ``None`` makes a step that is not audited.
    Returns:
        ``step(weight, gradient, *planes, scalars, seed, *outputs) -> Tensor``; weight and gradient are int32 words, each
        32-bit plane of a two-lane storage is two tensors (even, odd). ``outputs`` are where to write, weight first, then
        the planes: the same tensors again (a compiler that is told so makes no temporaries). The result is the
        audit, empty where there is none.
    """
    lanes = layouts.num_lanes(storage)
    planes = layouts.planes(storage)
    names = (*CONTROL, *rule.scalars)

    def step(weight: Tensor, gradient: Tensor, *rest: Tensor) -> Tensor:
        num_words = (len(rest) - 3) // 2
        words, (values, seed), outputs = rest[:num_words], rest[num_words : num_words + 2], rest[num_words + 2 :]
        scalars = {name: values[place] for place, name in enumerate(names)}
        seen, gradients = (layouts.lanes_of_pairs(t) if lanes == 2 else (t,) for t in (weight, gradient))
        lane_words = layouts.by_lane(planes, lanes, words)
        done = [
            step_lane(rule, storage, seen[lane], gradients[lane], lane_words[lane], scalars, seed)
            for lane in range(lanes)
        ]
        new = layouts.join_lanes(planes, [d[0] for d in done], [d[1] for d in done])
        skip = scalars["skip"] != 0
        for output, old, value in zip(outputs, (weight, *words), new, strict=True):
            output.copy_(torch.where(skip, old, value))
        if summarize is None:
            return values.new_zeros(0)
        terms = [update_terms(*changes) for _, _, changes in done]
        return summarize([sum(parts[1:], parts[0]) for parts in zip(*terms, strict=True)])

    return step


class StepKernel:
    """The step of one (rule, storage): compiled where that pays, in cache-sized chunks of the definition where not.

    Args:
        rule, storage: what to do and how to keep it.
        compile: whether to compile; without it, or without a compiler, the definition runs eagerly, with the same bits.
    """

    CHUNK = 1 << 15
    """Words per eager call: its forty temporaries then fit the second-level cache."""

    AUDIT = 1 << 18
    """Words per audited call: a compiled float32 sum over so many is within 1e-5, and a float64 one costs a third more."""

    def __init__(self, rule: Rule, storage: Storage, *, compile: bool) -> None:
        self.rule, self.storage, self.compile = rule, storage, compile
        self._plain = make_step(rule, storage)
        self._audited = make_step(rule, storage, total_sums)
        self._compiled: dict[tuple[bool, int, torch.device], Compiled | None] = {}

    def run(self, words: Sequence[Tensor], values: Tensor, seed: Tensor, *, audited: bool = False) -> Tensor | None:
        """Step tensors of equal length in place; to be called without gradients.

        Args:
            words: int32, 1-D: weight, gradient, and the planes.
            values: float32, the scalars of ``CONTROL`` and of the rule.
            seed: 0-d int32.
            audited: whether to return the audit's sums.
        Returns:
            float64 ``[8]``, or ``None`` where not audited.
        """
        length = words[0].numel()
        compiled = self.variant(words[0].device, audited) if self.compile and length > 1 else None
        if compiled is not None and not audited:
            compiled([*words, values, seed, words[0], *words[2:]])
            return None
        step = self._audited if audited else self._plain
        size, total = self.AUDIT if compiled is not None else self.CHUNK, None
        for start in range(0, length, size):
            part = [w[start : start + size] for w in words] if length > size else words
            arguments = [*part, values, seed, part[0], *part[2:]]
            sums = compiled(arguments)[0] if compiled is not None else step(*arguments)
            total = sums if total is None else total + sums
        return total if audited else None

    def run_each(self, tensors: Sequence[list[Tensor]], values: Tensor, seed: Tensor) -> None:
        """:meth:`run` for many tensors, none audited; ``tensors`` holds the words of each."""
        compiled = self.variant(values.device, False) if self.compile else None
        for words in tensors:
            if compiled is None or words[0].numel() < 2:
                self.run(words, values, seed)
            else:
                compiled([*words, values, seed, words[0], *words[2:]])

    def run_bucket(self, words: Sequence[Tensor], values: Tensor, seed: Tensor, segments: Sequence[slice]) -> Tensor:
        """An audited step of a bucket: float64 ``[segments, 8]``."""
        if self.compile:
            rows = [self.run([w[s] for w in words], values, seed, audited=True) for s in segments]
            return torch.stack([words[0].new_zeros(8, dtype=torch.float64) if row is None else row for row in rows])
        step = make_step(self.rule, self.storage, segment_sums(segments))
        return step(*words, values, seed, words[0], *words[2:])

    def variant(self, device: torch.device, audited: bool) -> Compiled | None:
        """The compiled plain or audited step for this device and number of threads, ``None`` without a compiler."""
        key = (audited, torch.get_num_threads(), device)
        if key not in self._compiled:
            step = self._audited if audited else self._plain
            lanes, length = layouts.num_lanes(self.storage), 1 << 10
            planes = layouts.planes(self.storage)
            count = 2 + sum(1 if plane.bits == 16 else lanes for plane in planes)
            words = [torch.zeros(length, dtype=torch.int32, device=device) for _ in range(2 * count - 1)]
            values = torch.ones(len(CONTROL) + len(self.rule.scalars), device=device)
            seed = torch.zeros((), dtype=torch.int32, device=device)
            example = [*words[:count], values, seed, *words[count:]]
            lengths = [*[0] * count, None, None, *[0] * (count - 1)]
            self._compiled[key] = compiled(self._name(audited), step, example, lengths)
        return self._compiled[key]

    def _name(self, audited: bool) -> str:
        return f"{self.rule.name} {self.storage!r} audited={audited} {rule_source(self.rule)}"

    def compile_audit_elsewhere(self, device: torch.device) -> None:
        """Have the audited variant compiled by another process: it is needed only some steps from now."""
        if not self.compile or RULES.get(self.rule.name) is not self.rule:
            return  # another process could not find a rule that is not in the table
        blob = base64.b64encode(pickle.dumps(self.storage)).decode()
        statement = (
            f"from narrowgauge.optim.kernels import compile_audit as c; c({self.rule.name!r}, {blob!r}, '{device}')"
        )
        compile_elsewhere(kernel_key(self._name(True), device), statement)


def compile_audit(rule: str, storage: str, device: str) -> None:
    """Compile an audited kernel into the cache: what :meth:`StepKernel.compile_audit_elsewhere` starts."""
    kernel = StepKernel(RULES[rule], pickle.loads(base64.b64decode(storage)), compile=True)
    kernel.variant(torch.device(device), True)
