"""Gauges: metrics of a model's tensors during training.

By default only tensors that are in memory anyway are watched: the operands of linear layers' matmuls, forward and backward; the
weights and their gradients; queries and keys. Hence a run with gauges has the same bits as one without, compiled or not. Every
``every`` steps the tensors are recorded (:mod:`narrowgauge.gauges.sampling`), measured at the end of the step
(:mod:`narrowgauge.gauges.tensor_metrics`), and written as one record of ``gauges.jsonl``. On the other steps only the shadow of
a few second moments is updated.

The outputs of other modules do not exist in a compiled model, where everything between two matmuls is one kernel. They can be
watched by name (``outputs``); in a compiled model this changes what is fused and possibly the last bits, and a warning says so.
"""

from __future__ import annotations

import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge import inductor
from narrowgauge.analysis.alarms import Alarms
from narrowgauge.errors import NarrowgaugeError, RecipeError
from narrowgauge.gauges import attention, hooks
from narrowgauge.gauges.moment_shadow import MomentShadow, StateReader, UpdateMetrics
from narrowgauge.gauges.sampling import SAMPLING, Recorder, WatchedTensor
from narrowgauge.gauges.tensor_metrics import Casts, Packed, Shards, measure, rounded, row_of
from narrowgauge.machine import require_float64
from narrowgauge.matmul.linear import Linear
from narrowgauge.numerics.dtensor import is_sharded, local_of
from narrowgauge.numerics.widening import matmul
from narrowgauge.optim.audit import audit, unwrapped
from narrowgauge.optim.optimizer import Optimizer
from narrowgauge.runs.events import emit
from narrowgauge.runs.schema import Row
from narrowgauge.spec import storages
from narrowgauge.spec.computes import COMPUTES
from narrowgauge.spec.recipes import Recipe
from narrowgauge.torch_hooks import follow_steps
from narrowgauge.torch_names import plain_name


class GaugeNotice(UserWarning):
    """Gauges that record nothing, or that may change what they measure."""


class Gauges:
    """Gauges attached to a model; created by :func:`attach_gauges`.

    Args:
        model, optimizer, patterns, every, outputs, on_row, alarms: see :func:`attach_gauges`.

    Attributes:
        every: number of steps between samples.
        last: the newest record, ``None`` before the first sample.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        patterns: Sequence[str],
        every: int,
        outputs: Sequence[str],
        on_row: Callable[[Row], Any] | None,
        alarms: bool,
    ) -> None:
        require_float64(model.parameters())
        self.model, self.optimizer, self.every, self.on_row = model, optimizer, every, on_row
        self.last: Row | None = None
        self.alarms = Alarms(recipe_in_use(model, optimizer)) if alarms else None
        self._step = 0
        self._handles: list[Any] = []
        self._placed: list[nn.Module] = []
        self._layers: dict[str, nn.Module] = {}
        self._watched: list[WatchedTensor] = []
        self._warned = False
        named = {plain_name(name): parameter for name, parameter in model.named_parameters()}
        own = {p for group in optimizer.param_groups for p in group["params"]} if optimizer is not None else set()
        self.parameters = {n: p for n, p in named.items() if hooks.matches(n, patterns) and p in own}
        self._choose(patterns, outputs)
        if not self._watched and not self.parameters:
            raise NarrowgaugeError(
                f"gauges were requested for {', '.join(map(repr, patterns))}, which matches no module or parameter of "
                f"{type(model).__name__}.",
                f"Its names look like '{next(iter(named))}'." if named else "",
            )
        device = next(model.parameters()).device
        for kind in ("weight", "grad"):
            self._watched += [WatchedTensor(kind, name) for name in self.parameters]
        self.recorder = Recorder(self._watched, device)
        # Gauges that are garbage collected stop sampling.
        weakref.finalize(self, _close, self.recorder.number)
        self.casts = Casts(self._layers)
        self.shards = Shards.of(self.parameters)
        self._attach(outputs)
        self.states: StateReader | None = None
        self.updates: UpdateMetrics | None = None
        self.shadow: MomentShadow | None = None
        if optimizer is not None:
            self.states = StateReader(optimizer, self.parameters.values())
            self.updates = UpdateMetrics(self.states, self.parameters)
            matrices = {name: p for name, p in self.parameters.items() if p.ndim >= 2}
            self.shadow = MomentShadow(self.states, matrices if every else {})
            self._handles.append(optimizer.register_load_state_dict_post_hook(self._forget))
            self._handles.append(follow_steps(optimizer, self._before_step, self._after_step))
        self.step = 0

    @property
    def step(self) -> int:
        """Number of optimizer steps done; set it when a loop resumes."""
        return self._step

    @step.setter
    def step(self, step: int) -> None:
        self._step = step
        self.sampling = self.optimizer is not None and self.every > 0 and (step + 1) % self.every == 0

    @property
    def sampling(self) -> bool:
        """Return whether the current step is sampled."""
        return self.recorder.is_recording

    @sampling.setter
    def sampling(self, value: bool) -> None:
        if value and not self.recorder.is_recording:
            self.recorder.clear()
        self.recorder.is_recording = value
        (_OPEN.add if value else _OPEN.discard)(self.recorder.number)
        SAMPLING.is_on = bool(_OPEN)

    def restart(self, step: int) -> None:
        """Continue after ``step`` steps from a loaded state; the shadow of second moments restarts."""
        self._forget()
        self.last = None
        self.recorder.clear()
        self.step = step

    def _forget(self, *_: Any) -> None:
        """Invalidate what was read from the optimizer's states."""
        for part in (self.states, self.updates, self.shadow):
            if part is not None:
                part.forget()

    def detach(self) -> None:
        """Remove the gauges from the model and the optimizer."""
        self.sampling = False
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for module in self._placed:
            module.__dict__.pop("gauge_entries", None)
        self._placed.clear()

    # ── what is watched ─────────────────────────────────────────────────────────────────────────────────────────────

    def _choose(self, patterns: Sequence[str], outputs: Sequence[str]) -> None:
        for name, module in hooks.named_modules(self.model).items():
            if hooks.multiplies(module) and hooks.matches(name, patterns):
                self._layers[name] = module
                kinds = ("output_grad",) if hooks.shares_input(name, self._layers) else ("input", "output_grad")
                self._watched += [WatchedTensor(kind, name) for kind in kinds]
            elif hooks.matches(name, patterns) and attention.attention_hook_for(module) is not None:
                self._watched.append(WatchedTensor("attention", name))
            if outputs and name and hooks.matches(name, outputs):
                self._watched.append(WatchedTensor("output", name))

    def _attach(self, outputs: Sequence[str]) -> None:
        inductor.heed_hooks()
        modules = hooks.named_modules(self.model)
        entries: dict[str, dict[str, Tensor]] = {}
        for index, watched in enumerate(self._watched):
            if watched.kind not in ("weight", "grad"):
                entries.setdefault(watched.name, {})[watched.kind] = self.recorder.entry(index)
        taken = next((name for name in entries if hooks.has_gauges(modules[name])), None)
        if taken is not None:
            raise NarrowgaugeError(
                f"gauges were requested for '{taken}', which already has gauges.", "Call detach() of those first."
            )
        for name, own in entries.items():
            module: Any = modules[name]
            # An attribute instead of a closure: layers that differ in nothing else share compiled code.
            module.gauge_entries = (own.get("input"), own.get("output_grad"), own.get("attention"), own.get("output"))
            self._placed.append(module)
            if "output_grad" in own:
                self._handles.append(module.register_forward_hook(hooks.record_linear))
            if "attention" in own:
                self._handles.append(attention.hook_attention(module))
            if "output" in own:
                self._handles.append(module.register_forward_hook(hooks.record_output))
        self._index = {watched: index for index, watched in enumerate(self._watched)}
        self._attach_to_body()

    def _attach_to_body(self) -> None:
        """Record the input of a causal model's head as the output of its body: a chunked loss does not call the head."""
        head, body = self._head, getattr(self.model, "base_model", None)
        is_causal = type(self.model).__name__.endswith(("ForCausalLM", "LMHeadModel"))
        if head is None or not is_causal or not isinstance(body, nn.Module) or body is self.model:
            return
        entry, *others = head.gauge_entries
        head.gauge_entries = (None, *others)
        body.gauge_entries = (entry, None, None, None)  # type: ignore[assignment]
        self._placed.append(body)
        self._handles.append(body.register_forward_hook(hooks.record_hidden_states))

    @property
    def _head(self) -> Any:
        """Return the model's output embedding if it is watched."""
        head = getattr(self.model, "get_output_embeddings", lambda: None)()
        return head if any(module is head for module in self._layers.values()) else None

    # ── the step ────────────────────────────────────────────────────────────────────────────────────────────────────

    @torch.no_grad()
    def _before_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self.shadow is not None:
            self.shadow.before_step()
        if not self.sampling:
            return
        if self.alarms is not None and getattr(self.optimizer, "grad_scale", None) is not None:
            # A fused torch optimizer under torch.amp.GradScaler, which lets gradients overflow to find its scale.
            self.alarms.facts = replace(self.alarms.facts, scales_loss=True)
        for name, parameter in self.parameters.items():
            if self.shards is not None and not self.shards.share[name]:
                continue
            self.recorder.record(self._index[WatchedTensor("weight", name)], local_of(parameter))
            if parameter.grad is not None:
                self.recorder.record(self._index[WatchedTensor("grad", name)], local_of(parameter.grad))
        if self.shards is not None:
            self.shards.join_amax(self.recorder)
        # Before the layers advance to the next step: the delayed scale belongs to the steps before this one.
        self.casts.note(self.recorder)
        if self.updates is not None:
            self.updates.before_step()

    @torch.no_grad()
    def _after_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self.shadow is not None:
            self.shadow.step()
        if self.sampling:
            self._read(self._step + 1)
        self.step = self._step + 1

    def _read(self, step: int) -> None:
        """Build the record of a sampled step and pass it on."""
        began = time.perf_counter()
        packed = Packed(self.shards)
        if self.states is not None:
            self.states.forget()
        groups = measure(self.recorder, self.casts.of, packed)
        if self.updates is not None and self.shadow is not None:
            self.updates.measure(packed)
            self.shadow.measure(packed)
        head = self._head_logits()
        if head is not None:
            packed.add("logits", head)
        fetched = packed.fetch()
        row: Row = {"step": step, **row_of(self.recorder, groups, fetched)}
        if self.updates is not None:
            readings = audit(self.optimizer) if isinstance(self.optimizer, Optimizer) else {}
            row["updates"] = self.updates.rows(fetched, readings)
        if self.shadow is not None and (moments := self.shadow.rows(fetched)):
            row["moments"] = moments
        if "logits" in fetched:
            values = [rounded(value, keep_nan=True) for value in fetched["logits"].tolist()]
            row["logits"] = dict(zip(("max", "log_z"), values, strict=True))
        row["seconds"] = rounded(time.perf_counter() - began)
        self.recorder.clear()
        if self.states is not None:
            self.states.forget()
        self._warn_if_nothing_recorded(row)
        self.last = row
        if self.on_row is not None:
            self.on_row(row)
        for event in self.alarms.on_gauges(row) if self.alarms is not None else ():
            emit(event)

    def _head_logits(self) -> Tensor | None:
        """Largest logit and mean log Z of sampled positions, from the input of the head."""
        head = self._head
        name = next((n for n, m in self._layers.items() if m is head), None)
        sample = self.recorder.samples.get(self._index.get(WatchedTensor("input", name or ""), -1))
        if head is None or sample is None or is_sharded(head.weight) or type(head).__name__ == "Conv1D":
            return None
        weight, bias = head.weight.detach(), getattr(head, "bias", None)
        if sample.shape[1] != weight.shape[1]:
            return None
        logits = matmul(sample[:8].to(weight.dtype), weight.t()).float()
        logits = logits if bias is None else logits + bias.detach().float()
        return torch.stack([logits.abs().amax(), logits.logsumexp(-1).mean()])

    def _warn_if_nothing_recorded(self, row: Row) -> None:
        """Warn once if nothing was recorded, e.g. because the code was compiled before the gauges were attached."""
        seen = any(key.startswith(("input:", "output_grad:")) for key in row.get("tensors", ()))
        if not self._warned and self._layers and not seen:
            self._warned = True
            why = "the model was compiled before they were attached, or did not run"
            advice = "Attach them first, or call torch.compiler.reset()"
            if not self.model.training:
                why, advice = "the model is in eval mode, and only training is watched", "Call model.train()"
            warnings.warn(
                f"gauges on {len(self._layers)} linear layers recorded nothing at step {row['step']}: {why}. {advice}.",
                GaugeNotice,
                stacklevel=2,
            )
        attentions = [watched.name for watched in self._watched if watched.kind == "attention"]
        if not self._warned and attentions and "attention" not in row:
            self._warned = True
            warnings.warn(attention.nothing_recorded(attentions, row["step"]), GaugeNotice, stacklevel=2)


# The numbers of the recorders whose step is sampled.
_OPEN: set[int] = set()


def _close(number: int) -> None:
    _OPEN.discard(number)
    SAMPLING.is_on = bool(_OPEN)


def recipe_in_use(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Recipe | None:
    """The compute and storage of a model in a user's training loop, for the alarms; ``None`` where they are not known."""
    narrow = next((module for module in model.modules() if isinstance(module, Linear)), None)
    storage = storages.find(optimizer.param_groups[0]["storage"]) if isinstance(optimizer, Optimizer) else None
    if storage is None:
        return None
    try:
        return Recipe(narrow.compute if narrow is not None else COMPUTES["bfloat16"], storage)
    except RecipeError:
        return None


def attach_gauges(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    patterns: Sequence[str] | str = "*",
    *,
    every: int = 20,
    outputs: Sequence[str] | str = (),
    on_row: Callable[[Row], Any] | None = None,
    alarms: bool = True,
) -> Gauges:
    """Measure a model during training: operands of its matmuls, gradients, weights, updates, moments and attention.

    Invariant: a run with gauges has the same bits as one without, eager or compiled, except with ``outputs``. The host
    synchronizes with the device once on a sampled step, and never on the others.

    On several ranks, call it on each of them with the same arguments. If parameters are sharded (FSDP2, over a mesh of any
    number of axes), a sampled step makes two reductions over the ranks, and every rank's record holds the same metrics of
    weights, gradients, updates and moments. Amax, rms, counts, casts, histograms and the audit cover all shards. Metrics of
    samples (outlier, kurtosis, top feature, update to weight and to ulp, moments) are the mean over the shards, weighted by
    their sizes. Operands, attention, block scales and logits are local to each rank; logits are omitted if the head is
    sharded. If the parameters lie on several meshes, all metrics are local.

    Attaching sets two options of ``torch.compile`` for the whole process, so that previously compiled code sees the hooks:
    guards on module hooks are kept, and a function may be compiled 64 times. If a module calls PyTorch's
    ``scaled_dot_product_attention`` itself, that name refers to a recording wrapper until the gauges are detached.

    Args:
        model: any module, prepared or not, compiled after this call or not at all; its linear layers, narrow experts and
            attention modules are watched.
        optimizer: the optimizer of the model, from Narrowgauge or torch, or a framework's wrapper of one; its steps are
            counted. A Narrowgauge optimizer created without parameter names takes those of the model. Without an optimizer
            nothing is sampled.
        patterns: names of modules and parameters to watch, with shell wildcards.
        every: number of steps between samples; 0 disables sampling.
        outputs: names of further modules whose outputs are watched, as ``output:NAME``. In a compiled model this prevents
            fusion across them, which may change last bits; a warning says so.
        on_row: called with each record, see :data:`narrowgauge.runs.schema.GAUGE`; ``RunWriter.gauge`` writes it to a run folder.
        alarms: run the detectors on each record; ``ng.on_event`` receives their events.
    Returns:
        The gauges; ``last`` is their newest record, ``detach()`` removes them.
    Raises:
        NarrowgaugeError: no name matches, or a module already has gauges.

    Cost: 32 KiB of memory per watched tensor on sampled steps; for the time see RESULTS.md and ``benchmarks/gauges.py``.

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
    wanted = [patterns] if isinstance(patterns, str) else list(patterns)
    others = [outputs] if isinstance(outputs, str) else list(outputs)
    if type(every) is not int or every < 0:
        raise NarrowgaugeError(f"gauges every {every!r} steps were requested; every must be an integer of at least 0.")
    if others:
        warnings.warn(
            f"outputs of {', '.join(map(repr, others))} are watched: a compiled model then writes them to memory, and its last "
            "bits may differ from those of a run without gauges.",
            GaugeNotice,
            stacklevel=2,
        )
    inner = unwrapped(optimizer)
    if isinstance(inner, Optimizer):
        inner.name_parameters(model)
    return Gauges(model, inner, wanted, every, others, on_row, alarms)
