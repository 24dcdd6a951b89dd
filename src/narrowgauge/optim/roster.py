"""The roster: what a step has checked, kept for the next one.

A step begins with the parameters that have a gradient. It checks their states, gradients and
options, makes missing states, and says where all tensors lie (:class:`Roster`). That takes longer
than the step of a small tensor. So a second step with the same parameters keeps the checks, and no
tensor. The next one reads every dict, tensor, address and count of steps anew. It compares all of
them with what was checked: the names of the states, and by one call type, dtype, device, sizes and
strides. If anything looks otherwise, all is checked again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from narrowgauge.numerics.dtensor import by_group, gradient_of, is_sharded, local_of
from narrowgauge.numerics.exact_sums import total_over_ranks
from narrowgauge.optim import validation
from narrowgauge.optim.kernel import Kernel
from narrowgauge.optim.norm import SquaresTable, sums_on
from narrowgauge.optim.state import LocalState
from narrowgauge.optim.table import Batch, Memory
from narrowgauge.torch_support.torch_names import look_of

if TYPE_CHECKING:
    from narrowgauge.optim.optimizer import Optimizer

CHOOSING = ("storage", "rule", "momentum")
"""Options that choose a kernel."""
FIXED = (float, int, bool, str, tuple, type(None))
"""Types of options that nobody changes in place."""


def local_memory(tensor: Any) -> Tensor:
    """Return the tensor of this rank, without a sum over ranks."""
    return tensor._local_tensor if is_sharded(tensor) else tensor  # type: ignore[no-any-return]


def prepared(parameter: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Return a gradient in the parameter's format or float32, and the memory of its local part.

    The gradient is placed like the parameter. Refuse one that no kernel reads.
    """
    dtype = gradient.dtype
    if dtype is not parameter.dtype and dtype is not torch.float32:
        gradient = gradient.float()
    local = local_of(gradient)
    if local.layout is not torch.strided or local.shape != local_of(parameter).shape:
        validation.refuse_gradient(parameter, gradient)
    if local.is_neg():  # a kernel reads memory
        local = local.resolve_neg()
    return gradient, local.contiguous()


class Roster:
    """Say what a step reads and writes.

    Attributes:
        batches: the states that one kernel steps.
        owners: the ids of the parameters that have a gradient, in the order of their groups.
        gradients: of a step that is taken: placed like the parameters.
        counts: the steps that each has taken.
        steps: the tensors of these counts, in a step that is taken.
    """

    def __init__(
        self, device: torch.device, work: Sequence[Sequence[LocalState]], gradients: Sequence[Tensor],
        batches: Sequence[Batch],
    ) -> None:  # fmt: skip
        self.device = device
        self.batches = batches
        self.gradients = gradients
        self.states = list(chain.from_iterable(work))
        self.owners = []
        self.names = []
        self.steps: list[Any] = []
        counts = []
        for state in self.states:
            self.owners.append(id(state.owner))
            self.names.append(tuple(state.entry))
            self.steps.append(state.entry["step"])
            counts.append(state.step)
        self.counts = np.array(counts, np.float32)
        self.ends = np.cumsum(list(map(len, work))).tolist()
        self.looks_alike: Any = None
        self.add: Any = None
        self.norm_table: SquaresTable | None = None

    # ── a step whose checks are kept ──────────────────────────────────────────────────────────────

    def may_be_kept(self, before: Roster | None) -> bool:
        """Return whether the next step may go by this one: as the step before, by kernels alone."""
        if before is None or before.owners != self.owners or before.names != self.names:
            return False
        for state, step in zip(self.states, self.steps, strict=True):
            if type(step) is not Tensor or step.dtype is not torch.float32:
                return False
            # A kernel reads this memory as it is.
            raw = local_memory(state.owner.grad)
            if raw.data_ptr() != state.gradient.data_ptr() or raw.dtype is not state.gradient.dtype:
                return False
            if not all(tensor.is_contiguous() for tensor in state.streams()):
                return False
        return all(batch.table is not None for batch in self.batches)

    def keep(self, optimizer: Optimizer) -> None:
        """Remember how all tensors look, where they are in the tables, and the options."""
        self.compile = optimizer.compile
        self.options = list(map(_options, optimizer.param_groups))
        num = len(self.states)
        tensors: list[Any] = [state.owner for state in self.states]
        tensors += [state.owner.grad for state in self.states]
        self.getters = []
        self.step_places = []
        starts = {}
        for state in self.states:
            getter = _getter_of(state.kernel)
            self.getters.append(getter)
            starts[id(state)] = len(self.getters) - 1, len(tensors)
            tensors += getter(state.entry)
            self.step_places.append(len(tensors) - 1)
        for batch in self.batches:
            index = []
            for state in batch.states:
                place, start = starts[id(state)]
                stop = self.step_places[place]
                index.append([place, num + place, *range(start, stop)])
            batch.index = np.array(index)
        self.is_sharded = any(map(is_sharded, tensors))
        self.placements = self._placements(tensors)
        local = self._local(tensors)
        if optimizer.max_grad_norm is not None and sums_on(self.gradients):
            self._keep_norm(num)
        self.looks_alike = look_of(local)

    def _keep_norm(self, first: int) -> None:
        """Lay out the table of the norm."""
        groups = by_group(self.gradients)
        places = {id(gradient): first + k for k, gradient in enumerate(self.gradients)}
        self.ranks = []
        self.norm_places: list[int] = []
        for ranks, members in groups:
            self.ranks.append(ranks)
            self.norm_places += [places[id(gradient)] for gradient in members]
        self.norm_table = SquaresTable(self.device)
        self.norm_table.lay_out(groups)

    def read(self, optimizer: Optimizer) -> bool:
        """Read the next step's tensors, and return whether all look as before."""
        if self.looks_alike is None or optimizer.compile is not self.compile:
            return False
        owners = self._owners(optimizer)
        if owners is None or list(map(id, owners)) != self.owners:
            return False
        gradients: list[Any] = [owner.grad for owner in owners]
        if self.is_sharded:
            gradients = list(map(gradient_of, owners))
        tensors = [*owners, *gradients]
        for owner, names, getter in zip(owners, self.names, self.getters, strict=True):
            entry = optimizer.state.get(owner, {})
            if tuple(entry) != names:
                return False
            tensors += getter(entry)
        if self._placements(tensors) != self.placements:
            return False
        local = self._local(tensors)
        if not self.looks_alike(local):
            return False
        memory = Memory(local)
        if not np.array_equal(self._read_counts(memory), self.counts):
            return False
        for batch in self.batches:
            batch.memory = memory
        self.gradients = gradients
        return True

    def _owners(self, optimizer: Optimizer) -> list[Any] | None:
        """Return the parameters that have a gradient, if groups have options of the same kernels."""
        groups = optimizer.param_groups
        if len(groups) != len(self.options):
            return None
        owners = []
        for group, options, end in zip(groups, self.options, self.ends, strict=True):
            for name, value in group.items():
                if value is not options.get(name, options):
                    if name in CHOOSING:
                        return None
                    validation.check_option(group, name, optimizer.rule)
                    if type(value) in FIXED:
                        options[name] = value
            owners += [parameter for parameter in group["params"] if parameter.grad is not None]
            if len(owners) != end:
                return None
        return owners

    def _placements(self, tensors: Sequence[Any]) -> list[Any]:
        placements: list[Any] = []
        if self.is_sharded:
            for tensor in tensors:
                if is_sharded(tensor):
                    placements.append((tensor._spec.placements, tensor._spec.shape))
                else:
                    placements.append(None)
        return placements

    def _local(self, tensors: list[Any]) -> list[Any]:
        return list(map(local_memory, tensors)) if self.is_sharded else tensors

    def squares(self) -> Tensor | None:
        """Return the exact sum of the squares of all gradients, unless the checks are new."""
        if self.norm_table is None:
            return None
        addresses = self.batches[0].memory.addresses[self.norm_places]
        return total_over_ranks(self.norm_table.sums_at(addresses), self.ranks)

    # ── counts of steps ───────────────────────────────────────────────────────────────────────────

    def _read_counts(self, memory: Memory) -> Any:
        """Return the counts of steps, and remember where they are."""
        self.steps = list(map(memory.tensors.__getitem__, self.step_places))
        table = self.batches[0].table
        if table is None or not table.is_cpp:
            return np.array(list(map(float, self.steps)), np.float32)
        self.add = table.kernels.add
        self.addresses = memory.addresses[self.step_places]
        return self._add(0.0)

    def _add(self, by: float) -> Any:
        """Return the counts of steps before a number is added to each."""
        counts = np.empty_like(self.counts)
        self.add(self.addresses.ctypes.data, len(counts), counts.ctypes.data, by)
        return counts

    def count(self) -> None:
        """Count a step."""
        self.counts += 1
        if self.add is not None:
            self._add(1.0)
        else:
            for step, count in zip(self.steps, self.counts.tolist(), strict=True):
                step.fill_(count)
        for batch in self.batches:
            for part in batch.parts:
                part.step += 1

    def forget(self) -> None:
        """Drop all tensors. The next forward pass needs their memory."""
        self.states = []
        self.gradients = self.steps = []
        for batch in self.batches:
            batch.forget()


def _getter_of(kernel: Kernel) -> Callable[[Mapping[str, Any]], Sequence[Any]]:
    """Return a function that returns the tensors of a state: its streams, and then the count."""
    names = [plane.name for plane in kernel.planes]
    names += [f"{name}_bound" for name in kernel.scaled]
    if not names:
        return lambda entry: (entry["step"],)
    return itemgetter(*names, "step")


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if type(value) in FIXED}
