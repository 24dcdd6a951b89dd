"""One step of a param group: a kernel steps each of its parameters in place, in a bucket or in copies.

Large parameters are stepped in place, small ones in their bucket. A tensor that cannot be read as words where it lies,
oddly strided or placed, is copied into words a piece at a time; its weights are copied back. A matrix rule runs on whole
matrices, and a kernel writes its result.

Before a storage that is scaled by row is stepped, the rule itself is applied to the largest magnitudes of each row: it is
monotone in them, so the result bounds every new state of the row, and the scale is known before anything is written. A
row's scale is therefore a function of its own gradients alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from narrowgauge.numerics.rounding import step_seed
from narrowgauge.numerics.shards import gathered, own_part
from narrowgauge.optim import codec
from narrowgauge.optim.audit import Auditor, audited_parts
from narrowgauge.optim.kernel import CONTROL, MatrixKernel, StepKernel, Work
from narrowgauge.optim.state import Bucket, ParameterState, weight_bound


@dataclass(frozen=True, slots=True, eq=False)
class Numbers:
    """The numbers that a step of one (rule, step number) takes; stores that have taken equally many steps share them.

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
        auditor: collects the audit's sums.
        audit_every: audit every so many steps; 0 never.
    """

    def __init__(self, group: Mapping[str, Any], control: Tensor, auditor: Auditor, audit_every: int) -> None:
        self.group, self.control, self.auditor, self.audit_every = group, control, auditor, audit_every
        self._numbers: dict[tuple[str, int, int], Numbers] = {}

    def numbers(self, store: ParameterState) -> Numbers:
        """The scalars and the seed of a store's next step."""
        kernel, count = store.kernel, store.step + 1
        key = kernel.rule.name, count, store.begun
        if key not in self._numbers:
            device = self.control.device
            scalars = [1.0, 0.0, *kernel.scalars(self.group, count - store.begun)]
            values = torch.tensor(scalars, dtype=torch.float32, device=device)
            values[:2] = self.control
            if self.group.get("maximize"):
                values[0] = -values[0]
            seed = torch.tensor(step_seed(self.group["seed"], count), dtype=torch.int32, device=device)
            self._numbers[key] = Numbers(values, seed, self.audit_every > 0 and count % self.audit_every == 0)
        return self._numbers[key]

    def step(self, stores: Sequence[ParameterState], buckets: Sequence[Bucket]) -> None:
        """Step stores that have their gradients, each once.

        Args:
            stores: of this group.
            buckets: all buckets; those whose members are all among ``stores`` and in step are stepped as one.
        """
        waiting = dict.fromkeys(stores)
        for bucket in buckets:
            together = {self.numbers(member) if member in waiting else None for member in bucket.members}
            if len(together) == 1 and None not in together:
                self._step_bucket(bucket)
                for member in bucket.members:
                    del waiting[member]
        for store in waiting:  # stepped outside of any bucket, which therefore gets no copy of the visible weight
            store.last_visible = store.last_visible if store.owns_copy else None
        elementwise: list[tuple[ParameterState, StepKernel]] = []
        for store in waiting:
            if isinstance(store.kernel, MatrixKernel):
                self._step_matrix(store, store.kernel)
            else:
                elementwise.append((store, store.kernel))
        self._bound_rows(elementwise)
        plain: dict[tuple[StepKernel, Numbers], list[Work]] = {}
        for store, kernel in elementwise:
            work, numbers = store.direct(), self.numbers(store)
            if work is None:
                self._step_pieces(store, numbers)
            elif numbers.audited:
                self._step_audited(store, work, numbers)
            else:
                plain.setdefault((kernel, numbers), []).append(work)
        for (kernel, numbers), tensors in plain.items():
            kernel.run_each(tensors, numbers.values, numbers.seed)

    def _step_bucket(self, bucket: Bucket) -> None:
        kernel, numbers = bucket.kernel, self.numbers(bucket.members[0])
        bucket.gather()
        if numbers.audited:
            rows = kernel.run_bucket(bucket.work, numbers.values, numbers.seed, bucket.segments())
            for member, sums in zip(bucket.members, rows, strict=True):
                self.auditor.add(member.owner, sums, member.parameter.numel())
        else:
            kernel.run(bucket.work, numbers.values, numbers.seed)
        bucket.scatter()

    def _step_audited(self, store: ParameterState, work: Work, numbers: Numbers) -> None:
        turn = (store.step + 1) // self.audit_every
        first = work.words[0]
        row = first[0].numel() if first.numel() else 1
        for part, watched in audited_parts(first.shape[0], turn, row):
            sums = store.kernel.run(work.piece(part.start, part.stop), numbers.values, numbers.seed, audited=watched)
            if sums is not None:
                length = max(1, first.shape[0])
                self.auditor.add(store.owner, sums, store.parameter.numel() * (part.stop - part.start) // length)

    def _step_pieces(self, store: ParameterState, numbers: Numbers) -> None:
        total: list[Tensor] = []
        for work, copies in strided_copies(store):
            sums = store.kernel.run(work, numbers.values, numbers.seed, audited=numbers.audited)
            for words, piece in copies:
                write_back(words, piece)
            total += [] if sums is None else [sums]
        if total:
            self.auditor.add(store.owner, torch.stack(total).sum(0), store.parameter.numel())

    # ── scales by row ───────────────────────────────────────────────────────────────────────────────────────────────

    def _bound_rows(self, stores: Sequence[tuple[ParameterState, StepKernel]]) -> None:
        """Give every store of a storage with scales by row the scales of this step."""
        batches: dict[tuple[StepKernel, Numbers], list[ParameterState]] = {}
        for store, kernel in stores:
            if store.storage.scaled:
                batches.setdefault((kernel, self.numbers(store)), []).append(store)
        for (kernel, numbers), batch in batches.items():
            values = numbers.values
            # All rows of all matrices at once: thirty small operations, not thirty for each matrix.
            old = {name: torch.cat([store.bounds[name] for store in batch]) for name in kernel.storage.scaled}
            _rescale(batch, old, _new_bounds(kernel, batch, old, values), values[1] != 0)

    # ── matrix rules ────────────────────────────────────────────────────────────────────────────────────────────────

    def _step_matrix(self, store: ParameterState, kernel: MatrixKernel) -> None:
        """The rule decides on the whole matrix; the kernel of the storage writes what it decided."""
        numbers, owner = self.numbers(store), store.owner
        own = [state for state, _ in store.storage.states]
        states = {name: gathered(owner, store.stored(name)) for name in own} | store.extras
        gradient = gathered(owner, store.gradient).float() * numbers.values[0]
        weight = gathered(owner, store.stored("weight"))
        change, new = kernel.rule.update(weight, gradient, states, self.group, store.step + 1)
        new = {**states, **new}  # a state that the options no longer use stays as it is
        skip = numbers.values[1] != 0
        for name, extra in store.extras.items():
            extra.copy_(torch.where(skip, extra, new[name]))
        parts = [own_part(owner, value) for value in (change, *(new[name] for name in own))]
        peaks = {n: store.peaks_of(part) for n, part in zip(own, parts[1:], strict=True) if n in store.bounds}
        _rescale([store], store.bounds, peaks, skip)
        # For each lane the change, then the states, as the kernel takes them.
        decided = [value for lane in zip(*(_in_lanes(store, part) for part in parts), strict=True) for value in lane]
        done, total = 0, []
        for work, copies in _chunks(store):
            count = work.words[0].shape[0]
            given = replace(work, decided=[value[done : done + count] for value in decided])
            total.append(kernel.run(given, numbers.values, numbers.seed, audited=numbers.audited))
            for words, piece in copies:
                write_back(words, piece)
            done += count
        if numbers.audited and total:
            self.auditor.add(store.owner, torch.stack(total).sum(0), store.parameter.numel())


def _rescale(
    batch: Sequence[ParameterState], old: Mapping[str, Tensor], new: Mapping[str, Tensor], skip: Tensor
) -> None:
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
        into[name] = codec.multipliers(code, bound)[0].split(sizes)
        back[name] = codec.multipliers(code, old[name])[1].split(sizes)
        torch._foreach_copy_([store.bounds[name] for store in batch], list(bound.split(sizes)))
    for place, store in enumerate(batch):
        store.set_scales({n: into[n][place] for n in into}, {n: back[n][place] for n in back})


def _chunks(store: ParameterState) -> Iterator[tuple[Work, list[tuple[Tensor, Tensor]]]]:
    """A store's words in cache-sized pieces, in place or copied, in order."""
    if (work := store.direct()) is None:
        yield from strided_copies(store)
    else:
        yield from ((chunk, []) for chunk in work.chunks())


def _new_bounds(
    kernel: StepKernel, batch: Sequence[ParameterState], old: Mapping[str, Tensor], values: Tensor
) -> dict[str, Tensor]:
    """Bounds of each row's magnitudes after the step."""
    rule = kernel.rule
    slopes = torch.cat([store.peaks_of(store.gradient) for store in batch]) * values[0].abs()
    weights = torch.zeros_like(slopes)
    if rule.coupled or "weight" in old:
        weights = torch.cat([store.peaks_of(store.parameter.detach()) for store in batch])
    scalars = {name: values[place] for place, name in enumerate((*CONTROL, *rule.scalars))}
    # A state that is not scaled by row needs no bound.
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


def _in_lanes(store: ParameterState, values: Tensor) -> list[Tensor]:
    """A float32 tensor of the parameter's shape as the kernel's lanes."""
    plane = codec.Plane("lanes", 32, (("lanes", 0, 32),), torch.float32)
    words = codec.from_parameter_order(store.storage, plane, values.float().contiguous())
    return list(words.view(torch.float32).unbind(0))


# ── strided copies ──────────────────────────────────────────────────────────────────────────────────────────────────────

PIECE_WORDS = 1 << 16
"""The longest piece, in words."""


def strided_copies(store: ParameterState) -> Iterator[tuple[Work, list[tuple[Tensor, Tensor]]]]:
    """A store's weights and gradients in copies of at most ``PIECE_WORDS`` words.

    Yields:
        ``(work, copies)``: after the step the caller writes each copied weight's words back with :func:`write_back`.
    """
    if codec.by_rows(store.storage):
        yield from _row_pieces(store)
        return
    lanes = codec.num_lanes(store.storage)
    for start, weight, gradient in _even_pieces(store.parameter.detach(), store.gradient, PIECE_WORDS * lanes):
        first, count = start // lanes, -(-weight.numel() // lanes)
        planes = [words[first : first + count] for words in store.plane_words]
        copies = [_padded(values.reshape(1, -1), (1, count)).view(-1) for values in (weight, gradient)]
        yield Work([*copies, *planes]), [(copies[0], weight)]


def _row_pieces(store: ParameterState) -> Iterator[tuple[Work, list[tuple[Tensor, Tensor]]]]:
    storage, shape = store.storage, store.parameter.shape
    rows, columns = codec.matrix_of(storage, shape)
    parts = codec.num_parts(storage)
    group, width = codec.extent(storage, shape)
    weights = store.parameter.detach()
    # Oddly strided tensors of more than two dims are copied whole: their rows are no matrix in memory.
    whole = weights.reshape(rows, columns)
    gradients = store.gradient.reshape(rows, columns)
    step = max(1, PIECE_WORDS // max(1, width))
    for start in range(0, group, step):
        stop = min(start + step, group)
        ranges = [(min(p * group + start, rows), min(p * group + stop, rows)) for p in range(parts)]
        copies = [
            _padded(values[first:last], (stop - start, width))
            for values in (whole, gradients)
            for first, last in ranges
        ]
        words = [*copies, *(words[start:stop] for words in store.plane_words)]
        work = Work(words, [scale[start:stop] for scale in store.scales])
        yield work, [(copies[p], whole[first:last]) for p, (first, last) in enumerate(ranges)]
    if whole.data_ptr() != weights.data_ptr():
        weights.copy_(whole.view(shape))


def write_back(words: Tensor, piece: Tensor) -> None:
    """Copy stepped words back into the piece of the parameter they were copied from."""
    values = words.view(piece.dtype)
    if values.ndim == 2:
        piece.copy_(values[: piece.shape[0], : piece.shape[1]])
    else:
        piece.copy_(values[: piece.numel()].view(piece.shape))


def _even_pieces(weight: Tensor, gradient: Tensor, limit: int) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Pieces in row-major order that begin at even elements and hold about ``limit`` of them: ``(start, w, g)``."""
    if weight.is_contiguous() and gradient.is_contiguous():
        weight, gradient = weight.view(-1), gradient.view(-1)
    if weight.ndim == 1:
        for start in range(0, weight.numel(), limit):
            yield start, weight[start : start + limit], gradient[start : start + limit]
    elif weight.numel() <= limit:
        yield 0, weight, gradient
    elif (row := weight[0].numel()) > limit and row % 2 == 0:
        for index in range(weight.shape[0]):
            for start, w, g in _even_pieces(weight[index], gradient[index], limit):
                yield index * row + start, w, g
    else:
        rows = max(2, limit // row // 2 * 2)
        for first in range(0, weight.shape[0], rows):
            yield first * row, weight[first : first + rows], gradient[first : first + rows]


def _padded(values: Tensor, words: tuple[int, int]) -> Tensor:
    """A copy of a matrix as a matrix of words of that shape, filled up with zeros."""
    # Words first: rows of nothing have no stride that narrower values could be viewed as words by.
    buffer = torch.zeros(words, dtype=torch.int32, device=values.device)
    buffer.view(values.dtype)[: values.shape[0], : values.shape[1]].copy_(values)
    return buffer
