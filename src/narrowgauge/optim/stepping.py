"""Stepping: how the stores of one param group take a step.

Large parameters are stepped where they lie, small ones by the bucket, odd ones in copies; a matrix rule sees a whole
matrix and hands the kernel what it decided. Before a storage with scales by row is stepped, the rule itself is applied
to the largest magnitudes of each row: it is monotone in them, so the result bounds every new state of the row, and the
scale is known before anything is written. A row's scale is therefore a function of its own gradients alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from narrowgauge.numerics.rounding import step_seed
from narrowgauge.optim import encoding, packing
from narrowgauge.optim.auditing import Auditor, audited_parts
from narrowgauge.optim.kernels import CONTROL, StepKernel, Work, make_step, total_sums
from narrowgauge.optim.rules.elementwise import Rule
from narrowgauge.optim.rules.matrix import MatrixRule
from narrowgauge.optim.shards import gathered, own_part
from narrowgauge.optim.stores import Bucket, Store, weight_bound, write_back


@dataclass(frozen=True, slots=True, eq=False)
class Numbers:
    """What a step of one (rule, count of steps) takes beside words; stores that are in step have the same.

    Args:
        values: float32, the scalars of ``CONTROL`` and of the rule.
        seed: 0-d int32, of the random bits.
        audited: whether this step is audited.
    """

    values: Tensor
    seed: Tensor
    audited: bool


class Stepper:
    """One step of one param group.

    Args:
        group: the param group.
        control: float32 ``[2]``, the scalars of ``CONTROL``.
        auditor: who takes the audit's sums.
        audit_every: audit every so many steps; 0 never.
    """

    def __init__(self, group: Mapping[str, Any], control: Tensor, auditor: Auditor, audit_every: int) -> None:
        self.group, self.control, self.auditor, self.audit_every = group, control, auditor, audit_every
        self._numbers: dict[tuple[str, int, int], Numbers] = {}

    def numbers(self, store: Store) -> Numbers:
        """The scalars and the seed of a store's next step."""
        rule, count = store.kernel.rule, store.step + 1
        key = rule.name, count, store.begun
        if key not in self._numbers:
            device = self.control.device
            scalars = [1.0, 0.0, *rule.prepare(self.group, count - store.begun)]
            values = torch.tensor(scalars, dtype=torch.float32, device=device)
            values[:2] = self.control
            if self.group.get("maximize"):
                values[0] = -values[0]
            seed = torch.tensor(step_seed(self.group["seed"], count), dtype=torch.int32, device=device)
            self._numbers[key] = Numbers(values, seed, self.audit_every > 0 and count % self.audit_every == 0)
        return self._numbers[key]

    def step(self, stores: Sequence[Store], buckets: Sequence[Bucket], matrix_rule: MatrixRule | None) -> None:
        """Step stores that have their gradients, each once.

        Args:
            stores: of this group.
            buckets: all buckets; those whose members are all among ``stores`` and in step are stepped as one.
            matrix_rule: steps those stores whose kernel carries no rule of its own.
        """
        waiting = dict.fromkeys(stores)
        for bucket in buckets:
            together = {self.numbers(member) if member in waiting else None for member in bucket.members}
            if len(together) == 1 and None not in together:
                self._step_bucket(bucket)
                for member in bucket.members:
                    del waiting[member]
        for store in waiting:  # whose bucket, if any, will not see what they are left as
            store.left = store.left if store.copied else None
        whole = [store for store in waiting if matrix_rule is not None and store.kernel.rule.name == matrix_rule.name]
        for store in whole:
            assert matrix_rule is not None
            self._step_matrix(store, matrix_rule)
            del waiting[store]
        self._bound_rows(list(waiting))
        plain: dict[tuple[StepKernel, Numbers], list[Work]] = {}
        for store in waiting:
            work, numbers = store.direct(), self.numbers(store)
            if work is None:
                self._step_pieces(store, numbers)
            elif numbers.audited:
                self._step_audited(store, work, numbers)
            else:
                plain.setdefault((store.kernel, numbers), []).append(work)
        for (kernel, numbers), tensors in plain.items():
            kernel.run_each(tensors, numbers.values, numbers.seed)

    def _step_bucket(self, bucket: Bucket) -> None:
        first = bucket.members[0]
        numbers = self.numbers(first)
        bucket.gather()
        if numbers.audited:
            rows = first.kernel.run_bucket(bucket.work, numbers.values, numbers.seed, bucket.segments())
            for member, sums in zip(bucket.members, rows, strict=True):
                self.auditor.add(member.owner, sums, member.parameter.numel())
        else:
            first.kernel.run(bucket.work, numbers.values, numbers.seed)
        bucket.scatter()

    def _step_audited(self, store: Store, work: Work, numbers: Numbers) -> None:
        turn = (store.step + 1) // self.audit_every
        first = work.words[0]
        row = first[0].numel() if first.numel() else 1
        for part, watched in audited_parts(first.shape[0], turn, row):
            sums = store.kernel.run(work.piece(part.start, part.stop), numbers.values, numbers.seed, audited=watched)
            if sums is not None:
                length = max(1, first.shape[0])
                self.auditor.add(store.owner, sums, store.parameter.numel() * (part.stop - part.start) // length)

    def _step_pieces(self, store: Store, numbers: Numbers) -> None:
        total: list[Tensor] = []
        for work, copies in store.pieces():
            sums = store.kernel.run(work, numbers.values, numbers.seed, audited=numbers.audited)
            for words, piece in copies:
                write_back(words, piece)
            total += [] if sums is None else [sums]
        if total:
            self.auditor.add(store.owner, torch.stack(total).sum(0), store.parameter.numel())

    # ── scales by row ───────────────────────────────────────────────────────────────────────────────────────────────

    def _bound_rows(self, stores: Sequence[Store]) -> None:
        """Give every store of a storage with scales by row the scales of this step."""
        batches: dict[tuple[StepKernel, Numbers], list[Store]] = {}
        for store in stores:
            if store.storage.scaled:
                batches.setdefault((store.kernel, self.numbers(store)), []).append(store)
        for (kernel, numbers), batch in batches.items():
            values = numbers.values
            # All rows of all matrices at once: thirty small operations, not thirty for each matrix.
            old = {name: torch.cat([store.bounds[name] for store in batch]) for name in kernel.storage.scaled}
            _rescale(batch, old, _new_bounds(kernel, batch, old, values), values[1] != 0)

    # ── matrix rules ────────────────────────────────────────────────────────────────────────────────────────────────

    def _step_matrix(self, store: Store, rule: MatrixRule) -> None:
        """The rule decides on the whole matrix; the kernel of the storage writes what it decided."""
        numbers, owner = self.numbers(store), store.owner
        own = [state for state, _ in store.storage.states]
        states = {name: gathered(owner, store.stored(name)) for name in own} | store.extras
        gradient = gathered(owner, store.gradient).float() * numbers.values[0]
        change, new = rule.update(gathered(owner, store.stored("weight")), gradient, states, self.group, store.step + 1)
        new = {**states, **new}  # what the options no longer ask for stays as it is
        skip = numbers.values[1] != 0
        for name, extra in store.extras.items():
            extra.copy_(torch.where(skip, extra, new[name]))
        parts = [own_part(owner, value) for value in (change, *(new[name] for name in own))]
        peaks = {n: store.peaks_of(part) for n, part in zip(own, parts[1:], strict=True) if n in store.bounds}
        _rescale([store], store.bounds, peaks, skip)
        decided, done = [_in_lanes(store, part) for part in parts], 0
        total = []
        for work, copies in _chunks(store):
            count = work.words[0].shape[0]
            given = _given(store.kernel.rule, [[lane[done : done + count] for lane in lanes] for lanes in decided])
            step = make_step(given, store.storage, total_sums if numbers.audited else None)
            total.append(step(*work.arguments(store.kernel.parts, numbers.values, numbers.seed)))
            for words, piece in copies:
                write_back(words, piece)
            done += count
        if numbers.audited and total:
            self.auditor.add(store.owner, torch.stack(total).sum(0), store.parameter.numel())


def _rescale(batch: Sequence[Store], old: Mapping[str, Tensor], new: Mapping[str, Tensor], skip: Tensor) -> None:
    """Give stores of one storage their rows' new bounds, where the step is not skipped, and the scales of this step.

    Args:
        batch: the stores.
        old, new: of each scaled code the bounds of all their rows, one store's after the other's.
        skip: 0-d bool.
    """
    sizes = [store.num_rows for store in batch]
    into, back = {}, {}
    for name in old:
        code, bound = batch[0].storage.code(name), torch.where(skip, old[name], new[name])
        into[name] = encoding.multipliers(code, bound)[0].split(sizes)
        back[name] = encoding.multipliers(code, old[name])[1].split(sizes)
        torch._foreach_copy_([store.bounds[name] for store in batch], list(bound.split(sizes)))
    for place, store in enumerate(batch):
        store.set_scales({n: into[n][place] for n in into}, {n: back[n][place] for n in back})


def _chunks(store: Store) -> Iterator[tuple[Work, list[tuple[Tensor, Tensor]]]]:
    """A store's words in cache-sized pieces, where they lie or in copies, in their order."""
    if (work := store.direct()) is None:
        yield from store.pieces()
        return
    first = work.words[0]
    size = max(1, StepKernel.CHUNK // max(1, first.numel() // max(1, len(first))))
    for start in range(0, len(first), size):
        yield work.piece(start, start + size), []


def _new_bounds(
    kernel: StepKernel, batch: Sequence[Store], old: Mapping[str, Tensor], values: Tensor
) -> dict[str, Tensor]:
    """What no magnitude of a row will exceed after the step."""
    rule = kernel.rule
    slopes = torch.cat([store.peaks_of(store.gradient) for store in batch]) * values[0].abs()
    weights = torch.zeros_like(slopes)
    if rule.coupled or "weight" in old:
        weights = torch.cat([store.peaks_of(store.parameter.detach()) for store in batch])
    scalars = {name: values[place] for place, name in enumerate((*CONTROL, *rule.scalars))}
    # A state that is not kept relative to its row has no bound, and none is needed: its largest value is not asked for.
    states = [old.get(name, torch.zeros_like(slopes)) for name in rule.states]
    either = [rule.update(weights, sign * slopes, *states, scalars)[1:] for sign in (1.0, -1.0)]
    new = {
        # A gradient that is not finite must not stay in a bound: inf - inf would be NaN for good.
        name: torch.maximum(plus.abs(), minus.abs()).nan_to_num(nan=3e38, posinf=3e38)
        for name, plus, minus in zip(rule.states, *either, strict=True)
        if name in old
    }
    if "weight" in old:
        new["weight"] = weight_bound(weights)
    return new


def _in_lanes(store: Store, values: Tensor) -> list[Tensor]:
    """A float32 tensor of the parameter's shape as the kernel's lanes."""
    plane = packing.Plane("lanes", 32, (("lanes", 0, 32),), torch.float32)
    words = packing.from_parameter_order(store.storage, plane, values.float().contiguous())
    return list(words.view(torch.float32).unbind(0))


def _given(rule: Rule, decided: Sequence[Sequence[Tensor]]) -> Rule:
    """A rule that returns what was decided before, lane after lane."""
    lanes: Iterator[tuple[Tensor, ...]] = zip(*decided, strict=True)
    return Rule(rule.name, rule.states, rule.scalars, rule.prepare, lambda *_: next(lanes), rule.squares)
