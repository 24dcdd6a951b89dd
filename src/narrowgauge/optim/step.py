"""One step of a param group: a kernel steps each of its parameters in place, in a bucket or in copies.

Large parameters are stepped in place, small ones in their bucket. A tensor whose strides or address do not let it be read as
words in place is copied into words a piece at a time; its weights are copied back. A matrix rule runs on whole
matrices, and a kernel writes its result.

Before a storage that is scaled by row is stepped, its rows get new bounds (:mod:`narrowgauge.optim.row_bounds`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from narrowgauge._torch.transfers import to_device
from narrowgauge.numerics.rounding import step_seed
from narrowgauge.numerics.shards import gathered, own_part
from narrowgauge.optim import codec
from narrowgauge.optim.audit import Auditor, audited_parts
from narrowgauge.optim.kernel import MatrixKernel, StepKernel, Work, least_decay
from narrowgauge.optim.row_bounds import bound_rows, rescaled, set_scales
from narrowgauge.optim.state import PIECE_WORDS, Bucket, ParameterState, weight_bound


@dataclass(frozen=True, slots=True, eq=False)
class Numbers:
    """The scalars of a step of one (rule, step number); states that have taken the same number of steps share them.

    ``values`` are the scalars of ``CONTROL`` and of the rule, float32 or float64 as the storage's arithmetic; ``seed``, 0-d
    int32, is that of the random bits.
    """

    values: Tensor
    seed: Tensor
    audited: bool


def on_device(seed: Tensor, values: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """A seed, int32 0-d, and floats ``[n]`` of the host on a device: one copy for both, each at a multiple of 16 bytes."""
    if device.type == "cpu":
        return seed, values
    sent = to_device(torch.cat([seed.view(1), seed.new_zeros(3), values.view(torch.int32)]), device)
    return sent[0], sent[4:].view(values.dtype)


class Stepper:
    """One step of one param group. ``control`` holds the scalars of ``CONTROL``, ``[2]``."""

    def __init__(self, group: Mapping[str, Any], control: Tensor, auditor: Auditor, audit_every: int) -> None:
        self.group, self.control, self.auditor, self.audit_every = group, control, auditor, audit_every
        self._numbers: dict[tuple[str, int, int, torch.dtype], Numbers] = {}

    def numbers(self, state: ParameterState) -> Numbers:
        """The scalars and the seed of a state's next step."""
        kernel, count = state.kernel, state.step + 1
        dtype = codec.value_dtype(state.storage)
        key = kernel.rule.name, count, state.begun, dtype
        if key not in self._numbers:
            device = self.control.device
            scalars = [1.0, 0.0, *kernel.scalars(self.group, count - state.begun)]
            seed, values = on_device(
                torch.full((), step_seed(self.group["seed"], count), dtype=torch.int32, device="cpu"),
                torch.tensor(scalars, dtype=dtype, device="cpu"),
                device,
            )
            values[:2] = self.control
            if self.group.get("maximize"):
                values[0] = -values[0]
            self._numbers[key] = Numbers(values, seed, self.audit_every > 0 and count % self.audit_every == 0)
        return self._numbers[key]

    def step(self, states: Sequence[ParameterState], buckets: Sequence[Bucket]) -> None:
        """Step states of this group that have their gradients, each once.

        ``buckets`` are all of the optimizer's; those whose members are all among ``states``, and at one step, are stepped as one.
        """
        waiting, whole = dict.fromkeys(states), []
        for bucket in buckets:
            together = {self.numbers(member) if member in waiting else None for member in bucket.members}
            if len(together) == 1 and None not in together:
                whole.append(bucket)
                for member in bucket.members:
                    del waiting[member]
        for state in waiting:  # stepped outside of any bucket, which therefore gets no copy of the visible weight
            state.last_visible = state.last_visible if state.owns_copy else None
        elementwise: list[tuple[ParameterState, StepKernel]] = []
        for state in waiting:
            if isinstance(state.kernel, MatrixKernel):
                self._step_matrix(state, state.kernel)
            else:
                elementwise.append((state, state.kernel))
        self._bound_rows(elementwise)
        plain: dict[tuple[StepKernel, Numbers], list[Work]] = {}
        for bucket in whole:
            bucket.gather()
            numbers = self.numbers(bucket.members[0])
            if numbers.audited:
                self._step_audited_bucket(bucket, numbers)
            else:
                plain.setdefault((bucket.kernel, numbers), []).append(bucket.work)
        for state, kernel in elementwise:
            work, numbers = state.direct(), self.numbers(state)
            if work is None:
                self._step_pieces(state, numbers)
            elif numbers.audited:
                self._step_audited(state, work, numbers)
            else:
                plain.setdefault((kernel, numbers), []).append(work)
        for (kernel, numbers), tensors in plain.items():
            kernel.run_each(tensors, numbers.values, numbers.seed)
        for bucket in whole:
            bucket.scatter()

    def _step_audited_bucket(self, bucket: Bucket, numbers: Numbers) -> None:
        rows = bucket.kernel.run_bucket(bucket.work, numbers.values, numbers.seed, bucket.segments())
        for member, sums in zip(bucket.members, rows, strict=True):
            self._note(member, sums, member.parameter.numel())

    def _step_audited(self, state: ParameterState, work: Work, numbers: Numbers) -> None:
        turn = (state.step + 1) // self.audit_every
        first = work.words[0]
        row = first[0].numel() if first.numel() else 1
        for part, watched in audited_parts(first.shape[0], turn, row):
            sums = state.kernel.run(work.piece(part.start, part.stop), numbers.values, numbers.seed, audited=watched)
            if sums is not None:
                length = max(1, first.shape[0])
                self._note(state, sums, state.parameter.numel() * (part.stop - part.start) // length)

    def _step_pieces(self, state: ParameterState, numbers: Numbers) -> None:
        total: list[Tensor] = []
        for work, copies in strided_copies(state):
            sums = state.kernel.run(work, numbers.values, numbers.seed, audited=numbers.audited)
            for words, piece in copies:
                write_back(words, piece)
            total += [] if sums is None else [sums]
        if total:
            self._note(state, torch.stack(total).sum(0), state.parameter.numel())

    def _note(self, state: ParameterState, sums: Tensor, num_elements: int) -> None:
        """Give the auditor a kernel's sums over so many elements of a parameter, and what the host knows of them."""
        decay = state.kernel.decay(self.group, state.step + 1 - state.begun)
        audited = max(decay, least_decay(state.storage)) if decay > 0 else 0.0
        self.auditor.add(state.owner, sums, num_elements, num_elements * audited * state.storage.weight.spacings)

    # ── scales by row ───────────────────────────────────────────────────────────────────────────────────────────────

    def _bound_rows(self, states: Sequence[tuple[ParameterState, StepKernel]]) -> None:
        batches: dict[tuple[StepKernel, Numbers], list[ParameterState]] = {}
        for state, kernel in states:
            if state.storage.scaled:
                batches.setdefault((kernel, self.numbers(state)), []).append(state)
        for (kernel, numbers), batch in batches.items():
            bound_rows(kernel, batch, numbers.values)

    # ── matrix rules ────────────────────────────────────────────────────────────────────────────────────────────────

    def _step_matrix(self, state: ParameterState, kernel: MatrixKernel) -> None:
        """The rule decides on the whole matrix; the kernel of the storage writes what it decided."""
        numbers, owner = self.numbers(state), state.owner
        own = [name for name, _ in state.storage.states]
        moments = {name: gathered(owner, state.stored(name)) for name in own}
        moments |= {name: extra.value() for name, extra in state.extras.items()}
        gradient = gathered(owner, state.gradient).float() * numbers.values[0]
        weight = gathered(owner, state.stored("weight"))
        change, new = kernel.rule.update(weight, gradient, moments, self.group, state.step + 1)
        new = {**moments, **new}  # a state that the options no longer use stays as it is
        skip = numbers.values[1] != 0
        for name, extra in state.extras.items():
            if new[name] is not moments[name]:
                extra.put(new[name], numbers.seed, skip)
        parts = [own_part(owner, value) for value in (change, *(new[name] for name in own))]
        peaks = {n: state.peaks_of(part) for n, part in zip(own, parts[1:], strict=True) if n in state.bounds}
        if "weight" in state.bounds:
            peaks["weight"] = weight_bound(state.peaks_of(state.parameter.detach()))
        if peaks:
            scales = {n: rescaled(state.storage.code(n), state.bounds[n], peak, skip) for n, peak in peaks.items()}
            set_scales([state], scales)
        # For each lane the change, then the states, as the kernel takes them.
        decided = [value for lane in zip(*(_in_lanes(state, part) for part in parts), strict=True) for value in lane]
        direct = state.direct()
        done, total = 0, []
        for work, copies in strided_copies(state) if direct is None else [(direct, ())]:
            count = work.words[0].shape[0]
            given = replace(work, decided=[value[done : done + count] for value in decided])
            sums = kernel.run(given, numbers.values, numbers.seed, audited=numbers.audited)
            for words, piece in copies:
                write_back(words, piece)
            done += count
            total += [] if sums is None else [sums]
        if total and state.parameter.numel():
            self._note(state, torch.stack(total).sum(0), state.parameter.numel())


def _in_lanes(state: ParameterState, values: Tensor) -> list[Tensor]:
    """A float32 tensor of the parameter's shape as the kernel's lanes."""
    plane = codec.Plane("lanes", 32, (("lanes", 0, 32),), torch.float32)
    words = codec.from_parameter_order(state.storage, plane, values.float().contiguous())
    return list(words.view(torch.float32).unbind(0))


# ── strided copies ──────────────────────────────────────────────────────────────────────────────────────────────────────


def strided_copies(state: ParameterState) -> Iterator[tuple[Work, list[tuple[Tensor, Tensor]]]]:
    """A state's weights and gradients in copies of at most ``PIECE_WORDS`` words.

    After the step the caller writes each copied weight's words back with :func:`write_back`.
    """
    if codec.by_rows(state.storage):
        yield from _row_pieces(state)
        return
    lanes = codec.num_lanes(state.storage)
    for start, weight, gradient in _even_pieces(state.parameter.detach(), state.gradient, PIECE_WORDS * lanes):
        first, count = start // lanes, -(-weight.numel() // lanes)
        planes = [words[first : first + count] for words in state.plane_words]
        copies = [_padded(values.reshape(1, -1), (1, count)).view(-1) for values in (weight, gradient)]
        yield Work([*copies, *planes]), [(copies[0], weight)]


def _row_pieces(state: ParameterState) -> Iterator[tuple[Work, list[tuple[Tensor, Tensor]]]]:
    storage, shape = state.storage, state.parameter.shape
    rows, columns = codec.matrix_of(storage, shape)
    parts = codec.num_parts(storage)
    group, width = codec.extent(storage, shape)
    weights = state.parameter.detach()
    # Oddly strided tensors of more than two dims are copied whole: their rows are no matrix in memory.
    whole = weights.reshape(rows, columns)
    gradients = state.gradient.reshape(rows, columns)
    step = max(1, PIECE_WORDS // max(1, width))
    for start in range(0, group, step):
        stop = min(start + step, group)
        ranges = [(min(p * group + start, rows), min(p * group + stop, rows)) for p in range(parts)]
        copies = [
            _padded(values[first:last], (stop - start, width))
            for values in (whole, gradients)
            for first, last in ranges
        ]
        words = [*copies, *(words[start:stop] for words in state.plane_words)]
        work = Work(words, [scale[start:stop] for scale in state.scales])
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
    """A copy of a matrix as a matrix of words of that shape, padded with zeros."""
    # Words first: rows of nothing have no stride that narrower values could be viewed as words by.
    buffer = torch.zeros(words, dtype=codec.word_dtype(8 * values.element_size()), device=values.device)
    buffer.view(values.dtype)[: values.shape[0], : values.shape[1]].copy_(values)
    return buffer
