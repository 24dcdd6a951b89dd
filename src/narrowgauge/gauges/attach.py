"""Gauges: metrics of a model's tensors during training.

Gauges watch only tensors that are in memory anyway: the operands of linear layers' matmuls, forward
and backward; weights and gradients; queries and keys. Hence a run with gauges has the same bits as
one without, compiled or not. Every ``every`` steps the tensors are recorded
(:mod:`narrowgauge.gauges.sampling`). At the end of the step they are measured
(:mod:`narrowgauge.gauges.tensor_metrics`) and written as one record of ``gauges.jsonl``.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge.errors import NarrowgaugeError
from narrowgauge.gauges import hooks
from narrowgauge.gauges.attention import heads_of
from narrowgauge.gauges.sampling import RECORDERS, SAMPLING, Recorder, recorder_of
from narrowgauge.gauges.tensor_metrics import (
    SHARED,
    exponents,
    fetch,
    join_shards,
    measure,
    rounded,
    row_of,
)
from narrowgauge.numerics.dtensor import gradient_of, is_split_over_ranks, local_of
from narrowgauge.numerics.widening import matmul
from narrowgauge.optim.audit import AuditedUpdates, audit, joined_over_ranks, unwrapped
from narrowgauge.optim.optimizer import Optimizer
from narrowgauge.optim.values import stored
from narrowgauge.runs.schema import METRICS, Row
from narrowgauge.spec.computes import first_of_input
from narrowgauge.torch_support import inductor
from narrowgauge.torch_support.machine import require_float64
from narrowgauge.torch_support.torch_hooks import Follower, members_of
from narrowgauge.torch_support.torch_names import plain_name

_NUM_VALUES = 64
"""Values of each state that a histogram counts."""


class GaugeNotice(UserWarning):
    """Warn that gauges record nothing."""


class Gauges:
    """Gauges attached to a model; created by :func:`attach_gauges`.

    Args:
        model, optimizer, every, on_row: see :func:`attach_gauges`.

    Attributes:
        last: the newest record, ``None`` before the first sample.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        every: int,
        on_row: Callable[[Row], Any] | None,
    ) -> None:
        require_float64(model.parameters())
        self.model = model
        self.optimizer = optimizer
        self.every = every
        self.on_row = on_row
        self.last: Row | None = None
        self._warned = False
        stepped = {*members_of(optimizer)}
        self.parameters = {
            plain_name(name): p for name, p in model.named_parameters() if p in stepped
        }
        if not self.parameters:
            raise NarrowgaugeError(
                "Cannot attach gauges because the optimizer steps no parameter of this "
                f"{type(model).__name__}.",
                "Pass the model with its optimizer.",
            )
        self.recorder = Recorder()
        self._undo = ExitStack()
        self._layers = dict[str, nn.Module]()
        self._attach()
        for kind in SHARED:
            for name in self.parameters:
                self.recorder.watch(kind, name)
        if isinstance(optimizer, Optimizer) and any(
            map(is_split_over_ranks, self.parameters.values())
        ):
            optimizer.auditor.join = joined_over_ranks(list(optimizer.parameter_names()))
        self._undo.callback(Follower(optimizer, self._before_step, self._after_step).remove)
        self.step = 0

    @property
    def step(self) -> int:
        """Number of optimizer steps done; set it when a loop resumes."""
        return self._step

    @step.setter
    def step(self, step: int) -> None:
        self._step = step
        self._record(self.every > 0 and (step + 1) % self.every == 0)

    def _record(self, is_sampled: bool) -> None:
        self.recorder.clear()
        self.recorder.is_recording = is_sampled
        recorders = [reference() for reference in RECORDERS]
        SAMPLING.is_on = any(r is not None and r.is_recording for r in recorders)

    def restart(self, step: int) -> None:
        """Continue after ``step`` steps from a loaded state."""
        self.last = None
        self.step = step

    def detach(self) -> None:
        """Remove the gauges from the model and the optimizer."""
        self._record(False)
        self._undo.close()

    # ── watched tensors ───────────────────────────────────────────────────────────────────────────

    def _attach(self) -> None:
        inductor.heed_hooks()
        modules = hooks.named_modules(self.model)
        for name, module in modules.items():
            for entry in getattr(module, "gauge_entries", ()):
                # Entries of a copied module have no gauges.
                if entry is not None and recorder_of(entry) is not None:
                    raise NarrowgaugeError(
                        f"gauges were requested for '{name}', which already has gauges.",
                        "Call detach() of those first.",
                    )
        entries: dict[Any, list[Tensor | None]] = {}
        for name, module in modules.items():
            if hooks.multiplies(module):
                self._layers[name] = module
                # Layers with the same input are measured once.
                first = first_of_input(name)
                is_first = first == name or first not in self._layers
                places = entries.setdefault(module, [None, None])
                if is_first:
                    places[0] = self.recorder.watch("input", name)
                places[1] = self.recorder.watch("output_grad", name)
                continue
            heads = heads_of(module)
            if heads is not None:
                for kind, child in (("query", heads.query), ("key", heads.key)):
                    entries.setdefault(child, [None, None]).append(self.recorder.watch(kind, name))
                    self.recorder.heads[kind, name] = heads
        for module, places in entries.items():
            # An attribute, not a closure, so that equal layers share code.
            module.gauge_entries = tuple(places)
            self._undo.callback(module.__dict__.pop, "gauge_entries", None)
            hook = module.register_forward_hook(hooks.record_module, with_kwargs=True)
            self._undo.callback(hook.remove)
        head = getattr(self.model, "get_output_embeddings", lambda: None)()
        self._head: str | None = None
        for name, layer in self._layers.items():
            if layer is head and self._head is None:
                self._head = name

    # ── the step ──────────────────────────────────────────────────────────────────────────────────

    @torch.no_grad()
    def _before_step(self, optimizer: torch.optim.Optimizer) -> None:
        if not self.recorder.is_recording:
            return
        for name, parameter in self.parameters.items():
            self.recorder.record(("weight", name), local_of(parameter))
            gradient = gradient_of(parameter)
            if gradient is not None:
                self.recorder.record(("grad", name), local_of(gradient))
        join_shards(self.recorder, self.parameters)

    @torch.no_grad()
    def _after_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self.recorder.is_recording:
            self._read(self._step + 1)
        self.step = self._step + 1

    def _read(self, step: int) -> None:
        """Build the record of a sampled step and pass it on."""
        began = time.perf_counter()
        parts = measure(self.recorder, self._layers)
        for kind in ("exp_avg", "exp_avg_sq"):
            states = []
            for p in self.parameters.values():
                values = _leading(self.optimizer, p, kind)
                if values is not None:
                    states.append(values)
            if states:
                parts[f"histogram {kind}"] = exponents(torch.cat(states))
        logits = self._head_logits()
        if logits is not None:
            parts["logits"] = logits
        fetched = fetch(parts)
        row: Row = {"step": step, **row_of(self.recorder, fetched)}
        updates = {}
        if isinstance(self.optimizer, Optimizer):
            for name, reading in audit(self.optimizer).items():
                updates[name] = _update_metrics(reading)
        if updates:
            row["updates"] = updates
        if logits is not None and self._head is not None:
            numbers = fetched["logits"].tolist()
            row["logits"] = {self._head: [rounded(x, keep_nan=True) for x in numbers]}
        row["seconds"] = rounded(time.perf_counter() - began)
        self._warn_if_nothing_recorded(row)
        self.last = row
        if self.on_row is not None:
            self.on_row(row)

    def _head_logits(self) -> Tensor | None:
        """Return the largest logit and the magnitude of the mean log Z: the step's sampled inputs
        times the new weights.

        ``None`` if the model does not name its head, as models of transformers do, or its weight is
        shared out over ranks.
        """
        if self._head is None:
            return None
        head: Any = self._layers[self._head]
        sample = self.recorder.samples.get(("input", self._head))
        if (
            sample is None
            or is_split_over_ranks(head.weight)
            or sample.shape[1] != head.weight.shape[1]
        ):
            return None
        logits = matmul(sample[:8].to(head.weight.dtype), head.weight.detach().t()).float()
        if head.bias is not None:
            logits += head.bias.detach()
        return torch.stack([logits.abs().amax(), logits.logsumexp(-1).mean().abs()])

    def _warn_if_nothing_recorded(self, row: Row) -> None:
        """Warn once if no linear layer was recorded, e.g. because the code was compiled before
        attaching the gauges.
        """
        is_recorded = any(
            key.startswith(("input:", "output_grad:")) for key in row.get("tensors", ())
        )
        if self._warned or is_recorded or not self._layers:
            return
        self._warned = True
        reason = "The model is in eval mode, and only training is watched; call model.train()."
        if self.model.training:
            reason = "The model was compiled before, or did not run; call torch.compiler.reset()."
        warnings.warn(
            f"gauges recorded no linear layer at step {row['step']}. {reason}",
            GaugeNotice,
            stacklevel=2,
        )


def _leading(optimizer: torch.optim.Optimizer, p: Tensor, name: str) -> Tensor | None:
    """Return at most 64 float32 values of a parameter's state, of this rank's shard."""
    if isinstance(optimizer, Optimizer):
        state = optimizer.state_of(p)
        values = None
        if state is not None and name in dict(state.storage.states):
            values = stored(state, name, _NUM_VALUES)
    else:
        values = optimizer.state.get(p, {}).get(name)
    if not isinstance(values, Tensor):
        return None
    if type(values).dequantize is not Tensor.dequantize:  # codes, as of torchao
        values = values.dequantize()
    return local_of(values).reshape(-1)[:_NUM_VALUES].float()


def _update_metrics(reading: AuditedUpdates) -> list[float | int | None]:
    """Return the metrics of an audited parameter, in the order of the record.

    EDQ is NaN if no update was intended.
    """
    rest = (getattr(reading, name) for name in list(METRICS["updates"])[1:])
    return [rounded(reading.edq, keep_nan=True), *map(rounded, rest)]


def attach_gauges(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    every: int = 20,
    on_row: Callable[[Row], Any] | None = None,
) -> Gauges:
    """Measure a model during training: operands of its matmuls, gradients, weights, updates and
    attention.

    Invariant: a run with gauges has the same bits as one without, eager or compiled. The host
    synchronizes with the device once on a sampled step, and never on other steps.

    On several ranks, call it on every rank with the same arguments. For sharded parameters (FSDP2),
    amax, rms, counts and the audit cover all shards. A sampled step takes two reductions over the
    ranks for them, and an audited step another. All other metrics are of each rank's own shard and
    batch.

    Attaching sets two options of ``torch.compile`` for the whole process, so that previously
    compiled code sees the hooks. Guards on module hooks are kept, and a function may be compiled 64
    times.

    Args:
        model: any module or part of one, prepared or not, compiled after this call or not at all.
            Its linear layers, low-precision experts, and queries and keys of modules whose class
            name contains "Attention" are watched.
        optimizer: the optimizer of the model, from Narrowgauge or torch, or a framework's wrapper
            of one. Its steps are counted. A Narrowgauge optimizer created without parameter names
            takes the model's names.
        every: number of steps between samples; 0 disables sampling.
        on_row: called with each record (a row of ``gauges.jsonl``).
            ``ng.analysis.Alarms(recipe).on_gauges(row)`` returns its alarms. ``ng.RunRecorder(…,
            gauges_every=20)`` writes records and raises alarms.
    Returns:
        The gauges; ``last`` is their newest record, ``detach()`` removes them.
    Raises:
        NarrowgaugeError: nothing can be watched, or a module already has gauges.

    Cost: 32 KiB of memory per watched tensor on sampled steps.

    Example:
        >>> import torch, narrowgauge as ng
        >>> model, optimizer = ng.prepare(torch.nn.Linear(16, 4), "bfloat16/word", lr=1e-3)
        >>> gauges = attach_gauges(model, optimizer, every=2)
        >>> for _ in range(2):
        ...     model(torch.ones(8, 16, dtype=torch.bfloat16)).float().sum().backward()
        ...     optimizer.step()
        >>> gauges.last["tensors"]["input:"][0]  # amax of the input of the layer
        1.0
    """
    if type(every) is not int or every < 0:
        raise NarrowgaugeError(
            f"gauges every {every!r} steps were requested; every must be an integer of at least 0."
        )
    inner = unwrapped(optimizer)
    if isinstance(inner, Optimizer):
        inner.name_parameters(model)
    return Gauges(model, inner, every, on_row)
