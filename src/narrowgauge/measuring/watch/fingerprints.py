"""Fingerprints of a training step: the tensors that two runs computed, in 64 bits each.

A step can record a hash and the norm of each of its tensors, in the order of computation: the
tokens, the output of each module with parameters, the gradients from the last parameter to the
first, and after the update the stored weights and moments. ``narrowgauge diagnose RUN OTHER``
compares from the first different entry on.

A fingerprint is a sum over elements of a hash of their bits and their place in the whole tensor. So
it depends neither on sharding nor on which rank computed which micro-batch.
"""

from collections.abc import Mapping
from contextlib import ExitStack, suppress
from functools import partial
from itertools import chain
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from narrowgauge.measuring.check.training_setup import TrainingSetup
from narrowgauge.measuring.watch.hooks import LoopHooks, is_eager
from narrowgauge.numerics.dtensor import gradient_of, is_sharded, whole
from narrowgauge.numerics.hashing import combine, fingerprint
from narrowgauge.optim.optimizer import Optimizer
from narrowgauge.spec.formats import dtype_name
from narrowgauge.spec.tables import Row
from narrowgauge.torch_support.model_parts import weights_of
from narrowgauge.torch_support.torch_hooks import OwnHook
from narrowgauge.torch_support.torch_names import is_compiled_model, plain_name, runs_backward

KINDS = ("weight", "exp_avg", "exp_avg_sq")
"""Kinds of what a step stores. Every other state is of the kind ``state:NAME``."""
Entries = dict[str, list[Any]]
"""Fingerprint, sum of squares, number of elements and dtype of each tensor, by ``KIND:NAME``."""


class Fingerprints:
    """Record the fingerprints of a loop's steps: of the start, of the first step, and of every
    ``every``-th.

    A forward pass with gradients is a micro-batch. The optimizer's step has the gradients before it
    and the states after it. A compiled model's outputs are not hooked, since hooks would change the
    compiled code. All ranks make all calls.

    Args:
        hooks: of the loop. Its last optimizer is ours, or any other. Another optimizer's states are
            the plain tensors in ``optimizer.state``.
        every: steps between two records; 0 never.
    """

    title = "the record of fingerprints"
    compares_ranks = True

    def __init__(self, hooks: LoopHooks, every: int) -> None:
        self.hooks = hooks
        self.optimizer = hooks.optimizers[-1]
        self.every = every
        self._start: int | None = None
        self._rows: list[Row] = []
        stepped = TrainingSetup(hooks.model, [self.optimizer]).stepped
        self._names = {p.parameter: p.name for p in stepped}
        self._pass = ExitStack()
        self._begin(0)
        hooks.listeners.append(self)

    def _begin(self, step: int) -> None:
        """Begin the step that ends as number ``step``."""
        self._step = step
        self._is_on = self.every > 0 and (step % self.every == 0 or step == 1)
        self._num_sequences = 0
        self._first_sequence = 0
        self._entries = Entries()

    # ── the recorder calls these ──────────────────────────────────────────────────────────────────

    def start(self, step: int) -> None:
        """Record the state after ``step`` steps, of a fresh process or from a checkpoint, when the next
        step begins: a loop may load it later.
        """
        self._start = step
        self._begin(step + 1)

    def take(self, step: int) -> list[Row]:
        """Return the new rows, and expect the step after ``step``."""
        rows = self._rows
        self._rows = []
        self._begin(step + 1)
        return rows

    # ── the hooks calls these ───────────────────────────────────────────────────────────────────────

    def before_pass(self, inputs: tuple[Any, ...]) -> None:
        """Begin a micro-batch."""
        self._pass.close()  # of a pass that raised
        if not self._is_on:
            return
        self._first_sequence = self._num_sequences
        for x in inputs:
            # The tokens are the first integer input with two dims: batch, sequence.
            if isinstance(x, Tensor) and x.ndim == 2 and not x.is_floating_point():
                self._add("tokens", "batch", x)
                self._num_sequences += len(x)
                break
        if is_compiled_model(self.hooks.model):
            return
        for name, part in self.hooks.model.named_modules():
            if weights_of(part):
                see = OwnHook(partial(self._see_output, plain_name(name)))
                self._pass.callback(part.register_forward_hook(see).remove)

    def _see_output(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        """Add the first output of a module that has weights of its own."""
        if isinstance(output, (tuple, list)) and output:
            output = output[0]
        # A backward pass may run a module again, and an evaluation is no part of the step.
        is_first = is_eager() and torch.is_grad_enabled() and not runs_backward()
        if type(output) is Tensor and output.is_floating_point() and is_first:
            self.hooks.guard(self, self._add, "output", name, output.detach())

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Record the gradients of the step, before our optimizer clips them."""
        self._pass.close()
        if self._start is not None and self.every:
            self._add_row(self._start, self._stored(self._start))
        self._start = None
        if optimizer is self.optimizer and self._is_on:
            gradients = {}
            for name, p in reversed([*self.hooks.model.named_parameters()]):
                gradient = gradient_of(p)
                if _is_plain(gradient):
                    gradients[f"grad:{plain_name(name)}"] = gradient
            self._entries |= _entries_of(gradients)

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Record the weights and their states, and make the row of the step."""
        if optimizer is self.optimizer and self._is_on:
            self._is_on = False
            self._add_row(self._step, self._entries | self._stored(self._step))

    def _add_row(self, step: int, entries: Entries) -> None:
        self._rows.append({"step": step, "tensors": _joined(self.hooks.ranks.gather(entries))})

    def _stored(self, step: int) -> Entries:
        """Return the entries of weights and states."""
        tensors = {}
        for p, name in self._names.items():
            values = {"weight": p.detach()}
            if step > 0:
                values |= _states_of(self.optimizer, p)
            for kind, x in values.items():
                if _is_plain(x) and (kind == "weight" or x.ndim):
                    key = kind if kind in KINDS else f"state:{kind}"
                    tensors[f"{key}:{name}"] = x
        return _entries_of(tensors)

    def end(self) -> None:
        """Remove the hooks of a pass."""
        self._pass.close()

    # ── one step ──────────────────────────────────────────────────────────────────────────────────

    def _add(self, kind: str, name: str, x: Tensor) -> None:
        """Add a micro-batch's part of a tensor."""
        entry = self._entries.setdefault(f"{kind}:{name}", [0, 0.0, 0, dtype_name(x.dtype)])
        num_rows = max(1, x.shape[0] if x.ndim else 1)
        place = self._first_sequence * (x.numel() // num_rows)
        entry[0] = combine([entry[0], fingerprint(x, offset=place)])
        entry[1] += _sum_of_squares(x)
        entry[2] += x.numel()


def _entries_of(named: Mapping[str, Tensor]) -> Entries:
    """Return the entries of whole tensors; a rank may hold a part of one."""
    entries = Entries()
    for key, x in named.items():
        entries[key] = [fingerprint(whole(x)), _sum_of_squares(x), x.numel(), dtype_name(x.dtype)]
    return entries


def fingerprints_whole(named: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the fingerprints of whole tensors, some of which may be DTensors. All ranks pass the same
    names in order.

    Cost: one gather of each DTensor, one after the other.
    """
    return {name: fingerprint(whole(tensor)) for name, tensor in named.items()}


def _states_of(optimizer: torch.optim.Optimizer, p: Tensor) -> Any:
    """Return the states of a parameter by name; of ours with the weight, as they are stored."""
    if not isinstance(optimizer, Optimizer):
        return optimizer.state.get(p, {})
    states = {}
    for name in (*KINDS, "momentum_buffer"):
        with suppress(KeyError):  # another rule has other states, and a frozen parameter none
            states[name] = optimizer.stored(p, name)
    return states


def _joined(of_ranks: list[Entries]) -> Entries:
    """Return the entries of a step, with norms. Batches of all ranks are one. Other tensors are alike
    on all, or parts, or replicas that differ. Where ranks differ, the last field is the hash of each.
    """
    joined = Entries()
    for key in dict.fromkeys(chain.from_iterable(of_ranks)):
        parts = [entries[key] for entries in of_ranks if key in entries]
        number, square, numel, dtype = parts[0]
        hashes, squares, sizes, _ = zip(*parts, strict=True)
        is_unlike = len(set(hashes)) > 1
        if is_unlike or key.startswith(("tokens:", "output:")):
            number = combine(hashes)
            square = sum(squares)
            numel = sum(sizes)
        joined[key] = [number, square**0.5, numel, dtype]
        if is_unlike:
            joined[key].append([*hashes])
    return joined


def _is_plain(x: object) -> TypeGuard[Tensor]:
    """Return whether a value is a plain tensor, possibly sharded, and not a subclass that decodes
    its elements.
    """
    if not isinstance(x, Tensor) or x.layout is not torch.strided or x.is_complex():
        return False
    return type(x) in (Tensor, nn.Parameter) or is_sharded(x)


def _sum_of_squares(x: Tensor) -> float:
    """Sum squares in float64, in any order, of the whole of a DTensor: norms have a tolerance,
    fingerprints not.
    """
    if not x.is_floating_point() or x.element_size() == 1:
        x = x.double()
    return float(whole(torch.linalg.vector_norm(x.detach(), dtype=torch.float64))) ** 2
