"""One step of an optimizer: a launch for each kernel of a param group, and the definition where no
kernel runs.

An elementwise rule steps the tensors of a param group that have taken as many steps by one launch
(:mod:`narrowgauge.optim.step.launch`). A matrix rule steps one parameter at a time, whole on every rank:

1. Every rank averages its shard of gradient and momentum (``MatrixRule.average``).
2. The average is gathered. Every rank computes ``MatrixRule.direction`` of the matrix, or of each
   one in a stack, with the same bits as one process.
3. Every rank writes its shard.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from narrowgauge.numerics.dtensor import gathered, own_part
from narrowgauge.optim.rules.matrix import matrix_shape
from narrowgauge.optim.step import kernel_proof, run_definition
from narrowgauge.optim.step.launch import Batch, addresses_of, streams_of
from narrowgauge.optim.step.state import LocalState
from narrowgauge.optim.step.step_cpp import has_kernel
from narrowgauge.torch_support.compile import COMPILE_ELEMENTS
from narrowgauge.torch_support.proof import TORCH, language_on
from narrowgauge.torch_support.torch_names import HostCopy


def batches_of(work: Iterable[tuple[int, LocalState]], compile: bool | None) -> list[Batch]:
    """Return states that step alike. Each comes with the place of its param group."""
    alike = defaultdict(list)
    for place, state in work:
        # Every rank steps a whole matrix.
        if (state.owner if state.kernel.is_matrix else state.parameter).numel():
            alike[state.kernel, place, state.step].append(state)
    batches = [Batch(place, states) for (_, place, _), states in alike.items()]
    for batch in batches:
        if not batch.kernel.is_matrix:
            _choose(batch, compile)
    return batches


def run(optimizer: Any, batches: Sequence[Batch], control: Tensor) -> None:
    """Step batches of an optimizer. ``control`` holds the scalars of ``CONTROL``, float32 ``[2]`` on
    the device.
    """
    optimizer.ran.clear()
    if control.is_cpu and control[1]:
        return  # skipped
    for batch in batches:
        batch.prepare(optimizer.param_groups[batch.place], control)
    for batch in batches:
        if not batch.kernel.is_matrix:
            _write(optimizer, batch)
            continue
        for state in batch.states:
            _step_matrix(optimizer, batch, state)


def _step_matrix(optimizer: Any, batch: Batch, state: LocalState) -> None:
    """Step one parameter by a matrix rule: replace its gradient by the step of each matrix, and
    store the rule's own states.
    """
    owner = state.owner
    rule: Any = state.kernel.rule
    options = optimizer.param_groups[batch.place]
    is_skipped = batch.numbers.control[1] != 0
    state.change = state.parameter.new_empty(state.parameter.shape, dtype=torch.float32)
    run_definition.average_gradient(state, batch.numbers)
    matrices = gathered(owner, state.change).reshape(matrix_shape(owner.shape))
    state.change = None
    for place in np.ndindex(matrices.shape[:-2]):  # of one matrix, the empty place
        states = {name: memory[place] for name, memory in state.extras.items()}
        change, new = rule.direction(matrices[place], states, options, state.step + 1)
        for name, values in new.items():
            states[name].copy_(torch.where(is_skipped, states[name], values))
        matrices[place].copy_(change)
    state.change = own_part(owner, matrices.view(owner.shape))
    del matrices
    tensors = streams_of([state])
    alone = Batch(batch.place, [state])
    alone.numbers = batch.numbers
    _choose(alone, optimizer.compile)
    alone.read(tensors, addresses_of(tensors))
    _write(optimizer, alone)
    state.change = None


def _write(optimizer: Any, batch: Batch) -> None:
    """Step an elementwise rule, or write the change of a matrix: by one launch, or by the
    definition.
    """
    optimizer.ran[f"{batch.kernel.rule.name}/{batch.kernel.storage.name}"] = batch.how
    sample = None
    if optimizer.audit_every and batch.owners:
        sample = optimizer.auditor.before(batch, optimizer.audit_every)
    if batch.table is not None:
        batch.run()
    else:
        for state in batch.states:
            run_definition.run(state, batch.numbers, is_compiled=batch.how == TORCH)
    if sample is not None:
        sums = sample.compare(batch)
        if sums is not None:
            optimizer.auditor.fresh.append((sample, HostCopy(sums)))


def _choose(batch: Batch, compile: bool | None) -> None:
    """Decide how a batch steps."""
    pair = batch.kernel.rule, batch.kernel.storage
    way = language_on(batch.device)
    is_written = has_kernel(*pair, way)
    count = sum(rows * columns for rows, columns in batch.forms)
    reason = ""
    if compile is False:
        reason = "compile=False"
    elif is_written:
        reason = kernel_proof.why_no_kernel(*pair, batch.device)
    elif batch.device.type == "cpu" and count < COMPILE_ELEMENTS and not compile:
        reason = f"{count:,} elements, and no kernel is written for the rule or storage"
    if reason:
        batch.how = f"definition: {reason}"
    elif is_written:
        batch.how = way
        batch.lay_out()
    else:
        batch.how = TORCH
