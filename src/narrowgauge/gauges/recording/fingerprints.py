"""Fingerprints of a training step: the tensors that two runs computed, in 64 bits each.

A step can record a hash and the norm of each of its tensors, in the order of computation: weights
that changed since the last step, the tokens, the output of each module with parameters, the
gradients from the last parameter to the first, and after the update the stored weights and moments.
``narrowgauge diagnose RUN OTHER`` compares from the first different entry on.

A fingerprint is a sum over elements of a hash of their bits and their place in the whole tensor. So
it depends neither on sharding nor on which rank computed which micro-batch. To show the rank on
which two runs diverge, each rank also hashes its own tensors, in one number for each kind. Values
that ranks must share are compared at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn

from narrowgauge.analysis.reading import words_of
from narrowgauge.checks.step_samples import stored_by
from narrowgauge.distributed.ranks import Ranks
from narrowgauge.distributed.reduction import GradientReduction
from narrowgauge.distributed.replica_verification import replica_groups
from narrowgauge.distributed.sharding import fingerprints_whole_and_own
from narrowgauge.gauges import hooks
from narrowgauge.numerics.chunks import flat_chunks
from narrowgauge.numerics.dtensor import gradient_of, is_sharded
from narrowgauge.numerics.hashing import GOLDEN, combine, fingerprint, fingerprint_all
from narrowgauge.optim.optimizer import Optimizer
from narrowgauge.runs.fingerprint_rows import in_words
from narrowgauge.runs.schema import Row
from narrowgauge.torch_support import torch_names
from narrowgauge.torch_support.torch_hooks import members_of
from narrowgauge.torch_support.torch_names import plain_name

MOMENTS = ("exp_avg", "exp_avg_sq")
STATE = "state"
"""The kind of every other state of an optimizer, as ``state:NAME:PARAMETER``."""


@dataclass(eq=False)
class Fingerprints:
    """Record the fingerprints of a run's steps. All ranks make all calls.

    Args:
        optimizer: ours, or any other. Another optimizer's states are the plain tensors in
            ``optimizer.state``.
        every: steps between two records; 0 never.
        sees_outputs: the model runs eagerly, so that its modules' outputs exist. A compiled model
            is not hooked, since hooks would change the compiled code.
        first: another step to record; 0 for none.

    Attributes:
        is_on: whether the current step is recorded.
        last: the newest row, until it is taken.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    every: int
    here: Ranks
    sees_outputs: bool = True
    first: int = 0
    is_on: bool = False
    last: Row | None = None
    _entries: dict[str, list[float]] = field(default_factory=dict)
    _changed: dict[str, list[float]] = field(default_factory=dict)
    _recorded: Row = field(default_factory=dict)
    # Of this rank alone: a hash of its part of each kind, and hashes of tensors that other ranks
    # hold alike.
    _own: dict[str, int] = field(default_factory=dict)
    _alike: dict[tuple[str, tuple[int, ...]], int] = field(default_factory=dict)
    _num_sent: int = 0
    _clip: float | None = None

    def begin(self, step: int) -> None:
        """Begin the step that ends as number ``step``.

        If the last step was recorded, the first entries are weights and moments that changed since
        without an update.
        """
        self.is_on = self.every > 0 and (step % self.every == 0 or step == self.first)
        self._entries = {}
        self._changed = {}
        self._own = {}
        self._alike = {}
        self._num_sent = 0
        self._clip = None
        if not self.is_on or self._recorded.get("step") != step - 1:
            return
        stored = self._stored(is_stepped=step > 1)
        numbers, local = fingerprints_whole_and_own(stored)
        before = self._recorded["whole"]
        local_before = self._recorded["own"]
        for key in dict.fromkeys([*numbers, *before]):
            if key not in numbers:  # a state that was lost
                self._changed[_held_key(key)] = [0, 0.0, 0]
            elif numbers[key] != before.get(key):
                self._changed[_held_key(key)] = _entry(numbers[key], stored[key])
        changed = {key: number for key, number in local.items() if number != local_before.get(key)}
        self._own["held"] = _digest(changed) if changed else 0

    def sending(self, reduction: GradientReduction | None) -> AbstractContextManager[None]:
        """Return a context that records this rank's addend to the sum of the gradients."""
        return (
            reduction.shown_to(self.sent) if self.is_on and reduction is not None else nullcontext()
        )

    def sent(self, gradient: Tensor) -> None:
        """Record a gradient that this rank adds to the sum.

        Equal runs have them in the same order.
        """
        self._num_sent += 1
        number = fingerprint(gradient, offset=self._num_sent * GOLDEN % (1 << 62))
        self._own["sent"] = combine([self._own.get("sent", 0), number])

    @contextmanager
    def micro_batch(
        self, tokens: Tensor | None, first_sequence: int, *, is_absent: bool = False
    ) -> Iterator[None]:
        """Record the forward pass of one micro-batch in this context.

        Args:
            tokens: int64 ``[sequences, tokens]``; ``None`` if the model takes none.
            first_sequence: its place in the step.
            is_absent: another rank computes the same micro-batch, so this one does not count.
        """
        if is_absent or not self.is_on:
            yield
            return
        if tokens is not None:
            self._add("tokens:batch", tokens, first_sequence)
        with ExitStack() as undo:
            if self.sees_outputs:
                hooks.follow_outputs(
                    undo, self.model, lambda name, x: self._add(f"output:{name}", x, first_sequence)
                )
            yield

    def _add(self, key: str, x: Tensor, first_sequence: int) -> None:
        entry = self._entries.setdefault(key, [0, 0.0, 0])
        num_rows = max(1, x.shape[0] if x.ndim else 1)
        place = first_sequence * (x.numel() // num_rows)
        entry[0] = combine([int(entry[0]), fingerprint(x, offset=place)])
        entry[1] += _sum_of_squares(x)
        entry[2] += x.numel()

    def before_first(self, step: int) -> None:
        """Record the initial state of a process, fresh or from a checkpoint."""
        self.begin(0)
        self.states(step)

    def gradients(self) -> None:
        """Record the step's gradients, before they are clipped."""
        if not self.is_on:
            return
        self._join_outputs()
        grads = [(plain_name(name), gradient_of(p)) for name, p in self.model.named_parameters()]
        self._record({f"grad:{name}": grad for name, grad in reversed(grads) if is_plain(grad)})

    def states(self, step: int) -> None:
        """Record the stored weights and moments after a step, and close its row."""
        if not self.is_on:
            return
        control = (
            self.optimizer.last_control if step and isinstance(self.optimizer, Optimizer) else None
        )
        if control is not None:  # the factor by which the update multiplied the gradients
            numel = sum(
                int(entry[2]) for key, entry in self._entries.items() if key.startswith("grad:")
            )
            self._clip = float(control[0])
            self._entries["clip:factor"] = [fingerprint(control[:1]), self._clip, numel]
        numbers, local = self._record(self._stored(is_stepped=step > 0))
        self._recorded = {"step": step, "whole": numbers, "own": local}
        changed = {
            key: entry
            for entries in self.here.gather(self._changed)
            for key, entry in entries.items()
        }
        self.last = {"step": step, "tensors": {**changed, **self._entries}, **self._of_ranks()}
        self._entries = {}
        self.is_on = False

    def _of_ranks(self) -> Row:
        """Return the columns ``ranks`` and ``parted``; none for a single process.

        Cost: a gather of one number for each tensor of this rank.
        """
        if self.here.size == 1:
            return {}
        of_all = self.here.gather((self._own, self._alike, self._clip))
        kinds = dict.fromkeys(kind for digests, _, _ in of_all for kind in digests)
        row: Row = {
            "ranks": {kind: [digests.get(kind) for digests, _, _ in of_all] for kind in kinds}
        }
        if any(factor is not None for _, _, factor in of_all):
            row["ranks"]["clip"] = [factor for _, _, factor in of_all]
        parted = _parted([numbers for _, numbers, _ in of_all])
        return row | ({"parted": parted} if parted else {})

    def _stored(self, *, is_stepped: bool) -> dict[str, Tensor]:
        """Return the stored tensors by ``KIND:NAME``: every parameter's weight and, once stepped,
        its states, kind by kind.
        """
        by_kind: dict[str, dict[str, Tensor]] = {}
        stepped = {*members_of(self.optimizer)}
        for name, parameter in self.model.named_parameters():
            if parameter not in stepped:
                continue
            stored = {"weight": parameter.detach(), **stored_by(self.optimizer, parameter)}
            for state, tensor in stored.items():
                if is_plain(tensor) and (state == "weight" or (is_stepped and tensor.ndim)):
                    kind = state if state in ("weight", *MOMENTS) else f"{STATE}:{state}"
                    by_kind.setdefault(kind, {})[f"{kind}:{plain_name(name)}"] = tensor
        return {key: tensor for named in by_kind.values() for key, tensor in named.items()}

    def _record(self, named: Mapping[str, Tensor]) -> tuple[dict[str, int], dict[str, int]]:
        numbers, local = fingerprints_whole_and_own(named)
        for key, number in numbers.items():
            self._entries[key] = _entry(number, named[key])
        if self.here.size > 1:
            for key, tensor in named.items():
                for group in replica_groups(
                    tensor
                ):  # a DTensor knows which other ranks hold the same shard
                    self._alike[key, tuple(dist.get_process_group_ranks(group))] = local[key]
            self._digest_kinds({key: local[key] for key in named})
        return numbers, local

    def _digest_kinds(self, numbers: Mapping[str, int]) -> None:
        for kind in dict.fromkeys(key.partition(":")[0] for key in numbers):
            self._own[kind] = _digest(
                {key: n for key, n in numbers.items() if key.startswith(f"{kind}:")}
            )

    def _join_outputs(self) -> None:
        """Join the entries of all ranks' micro-batches."""
        if self.here.size > 1:
            self._digest_kinds({key: int(entry[0]) for key, entry in self._entries.items()})
            of_ranks = self.here.gather(self._entries)
            keys = list(dict.fromkeys(key for entries in of_ranks for key in entries))
            self._entries = {
                key: _joined([entries[key] for entries in of_ranks if key in entries])
                for key in keys
            }
        for entry in self._entries.values():
            entry[1] = entry[1] ** 0.5


def is_plain(x: object) -> TypeGuard[Tensor]:
    """Return whether a value is a plain tensor, possibly sharded, and not a subclass that decodes
    its elements.
    """
    if not isinstance(x, Tensor) or x.layout is not torch.strided or x.is_complex():
        return False
    return type(x) in (Tensor, nn.Parameter) or is_sharded(x)


def _held_key(key: str) -> str:
    """``held:NAME`` of a weight, ``held:exp_avg:NAME`` of a moment."""
    return key.replace("weight:", "held:", 1) if key.startswith("weight:") else f"held:{key}"


def _entry(number: int, x: Tensor) -> list[float]:
    """Return the entry of a tensor in a row: its fingerprint, norm and number of elements."""
    return [number, _sum_of_squares(x) ** 0.5, x.numel()]


def _joined(entries: list[list[float]]) -> list[float]:
    prints, squares, counts = zip(*entries, strict=True)
    return [combine(int(number) for number in prints), sum(squares), sum(counts)]


def _sum_of_squares(x: Tensor) -> float:
    """Sum squares in float64, in any order: norms have a tolerance, fingerprints not.

    Sum the whole of a DTensor.
    """
    if is_sharded(x):
        total: Any = x.detach().to(torch.float64).square().sum()
        return float(total.full_tensor())
    chunks = [chunk.to(torch.float64).square().sum() for (chunk,) in flat_chunks(x.detach())]
    return float(torch.stack(chunks).sum()) if chunks else 0.0


# ── by rank ───────────────────────────────────────────────────────────────────────────────────────

_SHOWN = 8
"""Tensors that are named where ranks differ; in the next step all do."""


def _parted(of_all: Sequence[Mapping[tuple[str, tuple[int, ...]], int]]) -> Row:
    """Return the first tensors with different replicas, with each rank's number.

    ``None`` for a rank without it.
    """
    parted: Row = {}
    for key, ranks in dict.fromkeys(place for numbers in of_all for place in numbers):
        if len({of_all[rank].get((key, ranks)) for rank in ranks}) > 1:
            # Shards have separate groups. Their numbers may differ between groups.
            name = f"{key} of {in_words(ranks)}" if key in parted else key
            parted[name] = [
                numbers.get((key, ranks)) if rank in ranks else None
                for rank, numbers in enumerate(of_all)
            ]
    return dict(list(parted.items())[:_SHOWN])


def _digest(numbers: Mapping[str, int]) -> int:
    return int(fingerprint_all(numbers), 16)


# ── a loop of the user's ──────────────────────────────────────────────────────────────────────────


class LoopFingerprints(Fingerprints):
    """Fingerprints of a user's loop, where the recorder's hooks make the calls that the trainer
    makes itself.

    A forward pass with gradients is a micro-batch. The optimizer's step has the gradients before it
    and the states after it. On several ranks, hooks on the parameters read this rank's gradients
    before ``DistributedDataParallel`` sums them.

    Args:
        model: its tensors are recorded.
        optimizer: the model's, without wrappers.
        every: steps between fingerprints. The start and the first step have fingerprints too. 0 for
            none.
        here: the ranks. All ranks make all calls.
        on_failure: called with a sentence if recording must end. On several ranks, which wait for
            each other, the error is raised instead.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        every: int,
        here: Ranks,
        on_failure: Callable[[str], object],
    ) -> None:
        super().__init__(model, optimizer, every, here, first=1)
        self._on_failure = on_failure
        self._has_begun = True
        self._is_past_backward = False
        self._num_sequences = self._step = 0
        self._pass = ExitStack()
        self._backward = ExitStack()

    def expect(self, step: int) -> None:
        """Expect the step that ends as number ``step``.

        Changes before its first pass count as between steps.
        """
        self.close()
        self._step = step
        self._num_sequences = 0
        self._is_past_backward = False
        self._has_begun = False

    def close(self) -> None:
        """Remove the hooks of a pass and of a backward pass."""
        self._pass.close()
        self._backward.close()

    def _add(self, key: str, x: Tensor, first_sequence: int) -> None:
        if self.is_on:
            self.guarded(super()._add, key, x, first_sequence)

    def _begin_once(self) -> None:
        if not self._has_begun:
            self._has_begun = True
            self.begin(self._step)
            if self.is_on and self.here.size > 1:
                hooks.follow_gradients(self._backward, self.model, self._see_gradient)

    def _see_gradient(self, gradient: Tensor) -> None:
        if is_plain(gradient.detach()):
            self.guarded(self.sent, gradient.detach())

    def before_pass(self, inputs: tuple[Any, ...]) -> None:
        """Begin a micro-batch.

        Later computations than the backward pass are not part of the step.
        """
        if self._is_past_backward:
            return
        self._begin_once()
        if not self.is_on:
            return
        self.after_pass()  # one that raised
        # The tokens are the first integer input with two dims: batch, sequence.
        tensors = (
            x for x in inputs if isinstance(x, Tensor) and x.ndim == 2 and not x.is_floating_point()
        )
        tokens = next(tensors, None)
        self.sees_outputs = not torch_names.is_compiled_model(self.model)
        self._pass.enter_context(self.micro_batch(tokens, self._num_sequences))
        self._num_sequences += 0 if tokens is None else len(tokens)

    def after_pass(self) -> None:
        """End the micro-batch."""
        self._pass.close()

    def before_step(self) -> None:
        """Record the gradients."""
        self._begin_once()
        self.close()
        self._is_past_backward = True
        self.gradients()

    def after_step(self) -> None:
        """Record the weights and the states."""
        self.states(self._step)

    def guarded(self, function: Callable[..., object], *args: Any) -> None:
        """Call a function. An error ends the fingerprints, and not the loop."""
        try:
            with torch.no_grad():
                function(*args)
        except Exception as error:
            if self.here.size > 1:
                raise
            self._pass.close()
            self.every = 0
            self.is_on = False
            self.last = None
            self._on_failure(f"no more fingerprints are recorded: {words_of(error)}")
