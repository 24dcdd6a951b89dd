"""The roster: what a step has checked, kept for the next one.

A step begins with the parameters that have a gradient. It checks their states, gradients and
options, makes missing states, and says where all tensors lie (:class:`Roster`). That takes longer
than the step of a small tensor. So a second step with the same parameters keeps the checks, and no
tensor. The next one reads every dict, tensor, address and count of steps anew. It compares all of
them with what was checked: the names of the states, and by one call type, dtype, device, sizes and
strides. If anything looks otherwise, all is checked again.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from narrowgauge.errors import RecipeError
from narrowgauge.numerics.dtensor import gradient_of, is_sharded, local_of
from narrowgauge.numerics.exact_sums import exact_squares, total_over_ranks
from narrowgauge.optim import validation
from narrowgauge.optim.step.launch import addresses_of, streams_of
from narrowgauge.optim.step.norm_kernel import SquaresTable, sums_on
from narrowgauge.optim.step.state import LocalState
from narrowgauge.optim.step.step import batches_of
from narrowgauge.torch_support.torch_names import is_captured, look_of

CHOOSING = ("storage", "rule", "momentum", "adjust_lr_fn")
"""Options that choose a kernel."""
FIXED = (float, int, bool, str, tuple, type(None))
"""Types of options that nobody changes in place."""


class Roster:
    """Say what a step of an optimizer reads and writes, after all checks. Make missing states.

    Attributes:
        batches: the states that one kernel steps.
        gradients: placed like the parameters, in their formats or float32.
        counts: the steps that each has taken.
        is_plain: whether kernels alone step, and read all memory as it is.
    """

    def __init__(self, optimizer: Any) -> None:
        self.compile = optimizer.compile
        self.gradients: list[Any] = []
        self.is_plain = True
        self.ends = []
        work = []
        for place, group in enumerate(optimizer.param_groups):
            if "storage" not in group:
                raise RecipeError(
                    f"Cannot step param group {place} because it has no 'storage'.",
                    "Add a group by optimizer.add_param_group, which fills in the defaults.",
                )
            validation.check_options(group, optimizer.rule)
            for state in self._checked(optimizer, group):
                work.append((place, state))
            self.ends.append(len(work))
        states = [state for _, state in work]
        self.owners = [id(state.owner) for state in states]
        self.names = [(tuple(state.entry), state.kernel.names) for state in states]
        self.counts = np.array([state.step for state in states], np.float32)
        self.looks_alike: Any = None
        self.options: list[dict[str, Any]] = []
        self.norm: Any = None
        if not states:
            return
        self.device = validation.device_of_step([state.parameter for state in states])
        self.is_sharded = any(is_sharded(state.owner) for state in states)
        tensors = streams_of(states)
        self.gradient_places = [state.place + 1 for state in states]
        self.batches = batches_of(work, self.compile)
        for batch in self.batches:
            self.is_plain &= batch.table is not None and batch.is_dense
        self._use(tensors + [state.entry["step"] for state in states])

    def _checked(self, optimizer: Any, group: dict[str, Any]) -> list[LocalState]:
        """Return the states of a group's parameters that have a gradient, with their gradients."""
        members = []
        for parameter in group["params"]:
            gradient = gradient_of(parameter)
            if gradient is not None:
                members.append((parameter, gradient))
        optimizer.make_missing(group, [parameter for parameter, _ in members])
        states = []
        for parameter, raw in members:
            state = optimizer.kernels.local_state(group, parameter, optimizer.state[parameter])
            gradient = raw
            if raw.dtype is not parameter.dtype and raw.dtype is not torch.float32:
                gradient = raw.float()
            local = local_of(gradient)
            if local.layout is not torch.strided or local.shape != state.parameter.shape:
                # Autograd keeps shapes equal until `.data` is another tensor.
                raise RecipeError(
                    f"Cannot step a {type(parameter).__name__} of shape {tuple(parameter.shape)} "
                    f"because its gradient is a {type(gradient).__name__} of {gradient.layout} and "
                    f"shape {tuple(gradient.shape)}.",
                    "Build embeddings with sparse=False, distribute both alike (parallelize_module), "
                    "and drop gradients when a parameter is resized.",
                )
            state.gradient = local.resolve_neg().contiguous()  # a kernel reads memory
            self.gradients.append(gradient)
            self.is_plain &= gradient is raw and state.gradient is local
            states.append(state)
        return states

    def _use(self, tensors: list[Tensor]) -> None:
        self.tensors = tensors
        self.addresses = addresses_of(tensors)
        for batch in self.batches:
            batch.read(tensors, self.addresses)

    # ── a step whose checks are kept ──────────────────────────────────────────────────────────────

    def end(self, optimizer: Any, before: Any) -> None:
        """Remember how all tensors look, if the step before was like this one, by kernels alone. Drop
        the tensors: the next forward pass needs their memory.
        """
        owners_and_names = self.owners, self.names
        is_second = before is not None and (before.owners, before.names) == owners_and_names
        if self.is_plain and is_second and self.looks_alike is None:
            for group in optimizer.param_groups:
                self.options.append({name: group.get(name) for name in CHOOSING})
            self.looks_alike = look_of(self._read(optimizer))
        self.gradients = []
        self.tensors = []
        for batch in self.batches:
            batch.tensors = []
            batch.states = []

    def fits(self, optimizer: Any) -> bool:
        """Read the next step's tensors, and return whether all look as before."""
        if self.looks_alike is None or optimizer.compile is not self.compile or is_captured():
            return False
        tensors = self._read(optimizer)
        if not tensors or not self.looks_alike(tensors):
            return False
        self._use(tensors)
        return np.array_equal(self._add(0), self.counts)

    def _read(self, optimizer: Any) -> list[Any]:
        """Return the local tensors of a step, or less if it has other parameters or names of states."""
        owners = self._owners(optimizer)
        if list(map(id, owners)) != self.owners:
            return []
        self.gradients = [owner.grad for owner in owners]
        if self.is_sharded:
            self.gradients = [gradient_of(owner) for owner in owners]
        tensors: list[Any] = []
        counts = []
        members = zip(owners, self.gradients, self.names, strict=True)
        for owner, gradient, (names, wanted) in members:
            entry = optimizer.state.get(owner, {})
            if tuple(entry) != names:
                return []
            tensors += owner, gradient
            tensors += map(entry.__getitem__, wanted)
            counts.append(entry["step"])
        tensors += counts
        if self.is_sharded:  # another placement has a local tensor of another shape
            tensors = [x.to_local() if is_sharded(x) else x for x in tensors]
        return tensors

    def _owners(self, optimizer: Any) -> list[Any]:
        """Return the parameters that have a gradient, if groups have options of the same kernels."""
        groups = optimizer.param_groups
        if len(groups) != len(self.options):
            return []
        owners = []
        for group, options, end in zip(groups, self.options, self.ends, strict=True):
            for name, value in group.items():
                if value is not options.get(name, options):
                    if name in CHOOSING:
                        return []
                    validation.check_option(group, name, optimizer.rule)
                    if type(value) in FIXED:
                        options[name] = value
            owners += [parameter for parameter in group["params"] if parameter.grad is not None]
            if len(owners) != end:
                return []
        return owners

    # ── what a step reads ─────────────────────────────────────────────────────────────────────────

    def squares(self) -> Tensor:
        """Return the exact sum of the squares of all gradients."""
        if self.compile is False or not sums_on(self.device):
            return exact_squares(self.gradients)
        if self.norm is None:
            self.norm = SquaresTable(self.gradients)
        words = self.norm.words_at(self.addresses[self.gradient_places])
        return total_over_ranks(words, self.norm.ranks)

    def _add(self, by: int) -> Any:
        """Return the counts of steps before a number is added to each."""
        counts = np.empty_like(self.counts)
        table = self.batches[0].table if self.batches else None
        if table is not None and table.is_cpp:
            addresses = self.addresses[-len(counts) :]
            table.kernels.add(addresses.ctypes.data, counts.ctypes.data, len(counts), by)
            return counts
        counts[:] = list(map(float, self.steps()))
        for step, count in zip(self.steps(), counts.tolist(), strict=True):
            step.fill_(count + by)
        return counts

    def steps(self) -> list[Tensor]:
        """Return the tensors of the counts of steps."""
        return self.tensors[-len(self.counts) :]

    def count(self) -> None:
        """Count a step."""
        self._add(1)
        self.counts += 1
        for batch in self.batches:
            batch.num_steps += 1
