"""The panel: gauges attached to a model and its optimizer.

What is watched by default exists anyway: the matrices that enter a linear layer's matmuls, forward and backward; the
weights and their gradients; queries and keys. So a run with gauges has the same bits as one without, compiled too. On
every ``every``-th step the tensors are marked (:mod:`narrowgauge.gauges.recorder`), read at the step's end
(:mod:`narrowgauge.gauges.collect`), and become one row of ``gauges.jsonl``. On the other steps nothing runs but the shadow of
a few second moments.

Outputs of other modules do not exist in a compiled model: what lies between two matmuls is one kernel. Asked for by name
(``outputs``) they are watched too; in a compiled model that changes what is fused, perhaps the last bits, and a note
says so.
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

from narrowgauge import _torch
from narrowgauge._torch import plain_name
from narrowgauge.errors import NarrowgaugeError
from narrowgauge.gauges import attention, hooks
from narrowgauge.gauges.aggregate import Shards
from narrowgauge.gauges.casts import Casts
from narrowgauge.gauges.collect import Packed, measure, rounded, row_of
from narrowgauge.gauges.moment_shadow import Shadow, States, Updates
from narrowgauge.gauges.recorder import SWITCH, Board, Watched
from narrowgauge.matmul.linear import Linear
from narrowgauge.monitor.alarms import Alarms
from narrowgauge.numerics.plain import matmul
from narrowgauge.optim.auditing import audit, unwrapped
from narrowgauge.optim.optimizer import Optimizer
from narrowgauge.optim.shards import is_sharded, local_of
from narrowgauge.runs.events import emit
from narrowgauge.runs.schema import Row


class GaugeNotice(UserWarning):
    """Gauges that see nothing, or that change what they look at."""


class Gauges:
    """Gauges in place; made by :func:`attach_gauges`.

    Args:
        model, optimizer, patterns, every, outputs, on_row, alarms: as of :func:`attach_gauges`.

    Attributes:
        every: steps from one sample to the next.
        step: optimizer steps done; a loop that resumes sets it.
        last: the newest row, ``None`` before the first sample.
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
        self.model, self.optimizer, self.every, self.on_row = model, optimizer, every, on_row
        self.last: Row | None = None
        self.alarms = Alarms({"recipe": _recipe_of(model, optimizer)}) if alarms else None
        self._step = 0
        self._handles: list[Any] = []
        self._placed: list[nn.Module] = []
        self._layers: dict[str, nn.Module] = {}
        self._watched: list[Watched] = []
        self._told = False
        named = {plain_name(name): parameter for name, parameter in model.named_parameters()}
        own = {p for group in optimizer.param_groups for p in group["params"]} if optimizer is not None else set()
        self.parameters = {n: p for n, p in named.items() if hooks.matches(n, patterns) and p in own}
        self._choose(patterns, outputs)
        if not self._watched and not self.parameters:
            raise NarrowgaugeError(
                f"gauges were asked for {', '.join(map(repr, patterns))}, and nothing of {type(model).__name__} has such a "
                "name.",
                f"Its names are like '{next(iter(named))}'." if named else "",
            )
        device = next(model.parameters()).device
        for kind in ("weight", "grad"):
            self._watched += [Watched(kind, name) for name in self.parameters]
        self.board = Board(self._watched, device)
        # Gauges that are dropped sample no more.
        weakref.finalize(self, _close, self.board.number)
        self.casts = Casts(self._layers)
        self.shards = Shards.of(self.parameters)
        self._attach(outputs)
        self.states: States | None = None
        self.updates: Updates | None = None
        self.shadow: Shadow | None = None
        if optimizer is not None:
            self.states = States(optimizer, self.parameters.values())
            self.updates = Updates(self.states, self.parameters)
            matrices = {name: p for name, p in self.parameters.items() if p.ndim >= 2}
            self.shadow = Shadow(self.states, matrices if every else {})
            self._handles.append(optimizer.register_load_state_dict_post_hook(self._forget))
            # An optimizer's step may be compiled; what reads it is not worth compiling.
            self._handles.append(optimizer.register_step_pre_hook(torch.compiler.disable(self._before_step)))
            self._handles.append(optimizer.register_step_post_hook(torch.compiler.disable(self._after_step)))
        self.step = 0

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self._step

    @step.setter
    def step(self, step: int) -> None:
        self._step = step
        self.sampling = self.optimizer is not None and self.every > 0 and (step + 1) % self.every == 0

    @property
    def sampling(self) -> bool:
        """Whether the step that runs is sampled."""
        return self.board.is_open

    @sampling.setter
    def sampling(self, value: bool) -> None:
        if value and not self.board.is_open:
            self.board.clear()
        self.board.is_open = value
        (_OPEN.add if value else _OPEN.discard)(self.board.number)
        SWITCH.is_on = bool(_OPEN)

    def restart(self, step: int) -> None:
        """Go on after ``step`` steps, from states that were loaded: what is followed begins anew."""
        self._forget()
        self.last = None
        self.board.clear()
        self.step = step

    def _forget(self, *_: Any) -> None:
        """The optimizer's states are others now."""
        for part in (self.states, self.updates, self.shadow):
            if part is not None:
                part.forget()

    def detach(self) -> None:
        """Take the gauges away."""
        self.sampling = False
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for module in self._placed:
            module.__dict__.pop("gauge_places", None)
        self._placed.clear()

    # ── what is watched ─────────────────────────────────────────────────────────────────────────────────────────────

    def _choose(self, patterns: Sequence[str], outputs: Sequence[str]) -> None:
        for name, module in hooks.named_modules(self.model).items():
            if hooks.multiplies(module) and hooks.matches(name, patterns):
                self._layers[name] = module
                kinds = ("output_grad",) if hooks.shares_input(name, self._layers) else ("input", "output_grad")
                self._watched += [Watched(kind, name) for kind in kinds]
            elif hooks.matches(name, patterns) and attention.way_of(module) is not None:
                self._watched.append(Watched("attention", name))
            if outputs and name and hooks.matches(name, outputs):
                self._watched.append(Watched("output", name))

    def _attach(self, outputs: Sequence[str]) -> None:
        _torch.heed_hooks()
        modules = hooks.named_modules(self.model)
        places: dict[str, dict[str, Tensor]] = {}
        for index, watched in enumerate(self._watched):
            if watched.kind not in ("weight", "grad"):
                places.setdefault(watched.name, {})[watched.kind] = self.board.place(index)
        taken = next((name for name in places if hooks.is_taken(modules[name])), None)
        if taken is not None:
            raise NarrowgaugeError(
                f"gauges were asked for '{taken}', which has some already.", "Call detach() of those first."
            )
        for name, own in places.items():
            module: Any = modules[name]
            # Attributes, not what a closure holds: layers that differ in nothing else share compiled code.
            module.gauge_places = (own.get("input"), own.get("output_grad"), own.get("attention"), own.get("output"))
            self._placed.append(module)
            if "output_grad" in own:
                self._handles.append(module.register_forward_hook(hooks.mark_linear))
            if "attention" in own:
                self._handles.append(attention.watch(module))
            if "output" in own:
                self._handles.append(module.register_forward_hook(hooks.mark_output))
        self._index = {watched: index for index, watched in enumerate(self._watched)}
        self._attach_to_body()

    def _attach_to_body(self) -> None:
        """A causal model's head gets its input marked where it leaves the body: a chunked loss does not call the head."""
        head, body = self._head, getattr(self.model, "base_model", None)
        is_causal = type(self.model).__name__.endswith(("ForCausalLM", "LMHeadModel"))
        if head is None or not is_causal or not isinstance(body, nn.Module) or body is self.model:
            return
        place, *others = head.gauge_places
        head.gauge_places = (None, *others)
        body.gauge_places = (place, None, None, None)  # type: ignore[assignment]
        self._placed.append(body)
        self._handles.append(body.register_forward_hook(hooks.mark_hidden))

    @property
    def _head(self) -> Any:
        """The model's output embedding, where it has one that is watched."""
        head = getattr(self.model, "get_output_embeddings", lambda: None)()
        return head if any(module is head for module in self._layers.values()) else None

    # ── the step ────────────────────────────────────────────────────────────────────────────────────────────────────

    @torch.no_grad()
    def _before_step(self, *_: Any) -> None:
        if not self.sampling:
            return
        if self.alarms is not None and getattr(self.optimizer, "grad_scale", None) is not None:
            # A fused optimizer of torch's under torch.amp.GradScaler, which lets gradients overflow to find its scale.
            self.alarms.facts = replace(self.alarms.facts, scales_loss=True)
        for name, parameter in self.parameters.items():
            if self.shards is not None and not self.shards.share[name]:
                continue
            self.board.mark(self._index[Watched("weight", name)], local_of(parameter))
            if parameter.grad is not None:
                self.board.mark(self._index[Watched("grad", name)], local_of(parameter.grad))
        if self.shards is not None:
            self.shards.join_largest(self.board)
        # Before the layers are told of the next step: a delayed scale is that of the steps before this one.
        self.casts.note(self.board)
        if self.updates is not None:
            self.updates.note()

    @torch.no_grad()
    def _after_step(self, *_: Any) -> None:
        if self.shadow is not None:
            self.shadow.step()
        if self.sampling:
            self._read(self._step + 1)
        self.step = self._step + 1

    def _read(self, step: int) -> None:
        """Make the row of a sampled step and hand it on."""
        began = time.perf_counter()
        packed = Packed(self.shards)
        if self.states is not None:
            self.states.forget()
        groups = measure(self.board, self.casts.of, packed)
        if self.updates is not None and self.shadow is not None:
            self.updates.measure(packed)
            self.shadow.measure(packed)
        head = self._head_logits()
        if head is not None:
            packed.add("logits", head)
        fetched = packed.fetch()
        row: Row = {"step": step, **row_of(self.board, groups, fetched)}
        if self.updates is not None:
            readings = audit(self.optimizer) if isinstance(self.optimizer, Optimizer) else {}
            row["updates"] = self.updates.rows(fetched, readings)
        if self.shadow is not None and (moments := self.shadow.rows(fetched)):
            row["moments"] = moments
        if "logits" in fetched:
            values = [rounded(value, keep_nan=True) for value in fetched["logits"].tolist()]
            row["logits"] = dict(zip(("max", "log_z"), values, strict=True))
        row["seconds"] = rounded(time.perf_counter() - began)
        self.board.clear()
        if self.states is not None:
            self.states.forget()
        self._tell_blind(row)
        self.last = row
        if self.on_row is not None:
            self.on_row(row)
        for event in self.alarms.on_gauges(row) if self.alarms is not None else ():
            emit(event)

    def _head_logits(self) -> Tensor | None:
        """Largest logit and mean log Z of sampled places, from what entered the head."""
        head = self._head
        name = next((n for n, m in self._layers.items() if m is head), None)
        sample = self.board.samples.get(self._index.get(Watched("input", name or ""), -1))
        if head is None or sample is None or is_sharded(head.weight) or type(head).__name__ == "Conv1D":
            return None
        weight, bias = head.weight.detach(), getattr(head, "bias", None)
        if sample.shape[1] != weight.shape[1]:
            return None
        logits = matmul(sample[:8].to(weight.dtype), weight.t()).float()
        logits = logits if bias is None else logits + bias.detach().float()
        return torch.stack([logits.abs().amax(), logits.logsumexp(-1).mean()])

    def _tell_blind(self, row: Row) -> None:
        """Code that was compiled before the gauges were attached does not know them."""
        seen = any(key.startswith(("input:", "output_grad:")) for key in row.get("tensors", ()))
        if not self._told and self._layers and not seen:
            self._told = True
            why = "the model was compiled before they were attached, or did not run"
            advice = "Attach them first, or call torch.compiler.reset()"
            if not self.model.training:
                why, advice = "the model is in eval mode, and only training is watched", "Call model.train()"
            warnings.warn(
                f"gauges on {len(self._layers)} linear layers saw nothing at step {row['step']}: {why}. {advice}.",
                GaugeNotice,
                stacklevel=2,
            )
        attentions = [watched.name for watched in self._watched if watched.kind == "attention"]
        if not self._told and attentions and "attention" not in row:
            self._told = True
            warnings.warn(attention.unseen(attentions, row["step"]), GaugeNotice, stacklevel=2)


# Boards whose step is sampled.
_OPEN: set[int] = set()


def _close(number: int) -> None:
    _OPEN.discard(number)
    SWITCH.is_on = bool(_OPEN)


def _recipe_of(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> str:
    """What alarms may know of a user's own loop: in which compute and storage it trains."""
    narrow = next((module for module in model.modules() if isinstance(module, Linear)), None)
    compute = narrow.compute.name if narrow is not None else "bfloat16"
    storage = optimizer.param_groups[0].get("storage", "") if isinstance(optimizer, Optimizer) else ""
    return f"{compute}/{storage}" if storage else ""


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
    """Watch a model in training: its matmuls' operands, gradients, weights, updates, moments and attention.

    Law: a run with gauges has the same bits as one without, eager or compiled, except with ``outputs``. The host waits for
    the device once on a sampled step, and never on the others.

    On several ranks call it on each of them, with the same arguments. Where they share parameters out (FSDP2, over a mesh
    of any number of axes) a sampled step makes two reductions over these ranks, and every rank's row says the same of weights,
    gradients, updates and moments. Largest magnitudes, rms, counts, casts, histograms and the audit's figures are of all
    shards. What is taken of a sample (outlier, kurtosis, top feature, update to weight and to ulp, moments) is the mean of
    what the shards show, by their sizes. Operands, attention, block scales and logits are each rank's own; logits are left
    out where the head is shared out. Where parameters lie on several meshes everything is each rank's own.

    Attaching sets two options of ``torch.compile`` for the whole process, without which code that was compiled before would not
    see the hooks: guards on modules' hooks are kept, and a function may be compiled 64 times. Where a module calls PyTorch's
    ``scaled_dot_product_attention`` itself, that name stands for PyTorch's function behind a mark until the gauges are detached.

    Args:
        model: any module, prepared or not, compiled after this call or not at all; linear layers, narrow experts and
            attention in it are watched.
        optimizer: the one that steps it, ours or torch's, or a framework's that wraps one; its steps are counted, and ours
            takes the model's names for parameters that it was given without. Without one nothing is sampled.
        patterns: names of modules and parameters to watch, shell wildcards.
        every: steps from one sample to the next; 0 never.
        outputs: names of further modules whose outputs are watched, as ``output:NAME``. In a compiled model this keeps the
            compiler from fusing across them, which may change last bits; a warning says so.
        on_row: called with each row, see :data:`narrowgauge.runs.schema.GAUGE`; ``RunWriter.gauge`` writes it to a run folder.
        alarms: let the detectors read each row, and emit their events to those who asked with ``ng.on_event``.
    Returns:
        The gauges; ``last`` is their newest row, ``detach()`` takes them away.
    Raises:
        NarrowgaugeError: nothing has such a name, or has gauges already.

    Cost: see docs/log.md, ``benchmarks/gauges.py``; memory of 32 KiB for each watched tensor on sampled steps.

    Example:
        >>> import torch, narrowgauge as ng
        >>> model, optimizer = ng.prepare(torch.nn.Linear(16, 4), "bfloat16/word", lr=1e-3)
        >>> gauges = attach_gauges(model, optimizer, every=2)
        >>> for _ in range(2):
        ...     model(torch.ones(8, 16, dtype=torch.bfloat16)).float().sum().backward()
        ...     optimizer.step()
        >>> gauges.last["tensors"]["input:"][0]  # the largest magnitude of what entered the layer
        1.0
    """
    wanted = [patterns] if isinstance(patterns, str) else list(patterns)
    others = [outputs] if isinstance(outputs, str) else list(outputs)
    if type(every) is not int or every < 0:
        raise NarrowgaugeError(f"gauges every {every!r} steps were asked for; it must be a whole number, at least 0.")
    if others:
        warnings.warn(
            f"outputs of {', '.join(map(repr, others))} are watched: in a compiled model they are then written to memory, "
            "and last bits may differ from those of a run without.",
            GaugeNotice,
            stacklevel=2,
        )
    inner = unwrapped(optimizer)
    if isinstance(inner, Optimizer):
        inner.name_parameters(model)
    return Gauges(model, inner, wanted, every, others, on_row, alarms)
