"""Hooks that watch a loop for a few steps, change nothing, and remove themselves.

They are on the model's forward, on a few of its smallest parameters, and before and after the optimizer's step. None of them
draws a random number, writes to a tensor or returns a value, so watched steps have the bits of unwatched ones. A
:class:`GradientTracker` finds out how one parameter's gradient was summed, and what happened to it after the backward pass.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge import _torch
from narrowgauge._torch import current_backward
from narrowgauge.numerics.checksums import fingerprint
from narrowgauge.numerics.shards import is_sharded, local_of
from narrowgauge.optim.optimizer import Optimizer
from narrowgauge.recompute.capture import has_closure

# So many of the smallest vectors and matrices are looked at, none with more elements than this.
_FOLLOWED, _LARGEST = 3, 1 << 20


@dataclass
class Seen:
    """What was seen of a loop.

    Attributes:
        steps: optimizer steps.
        dtypes: format of each parameter when watching began, by its id.
        autocasts: the formats that autocast had in forward passes; ``None`` where it was off.
        losses: formats of the scalar loss and of the scalars that it was computed from.
        micro_batches: the most backward passes of one step.
        clips: of each step before which all gradients were multiplied by one number: that number, and their norm then.
        stale, zeroed: steps whose gradients were added to those of the step before, and to zeros.
        gradients: formats of gradients that differ from their parameter's, by the parameter's id.
        written, written_silently: ids of parameters that something other than the optimizer changed between steps; the latter
            through ``.data``.
        scalers: every ``GradScaler`` that called a step.
        is_unscaled: whether the scaler of a step had scaled no loss.
        is_compiled: whether the step was called through ``torch.compile``.
        moved_on_skip: skipped steps after which a schedule moved.
    """

    steps: int = 0
    dtypes: dict[int, torch.dtype] = field(default_factory=dict)
    autocasts: set[torch.dtype | None] = field(default_factory=set)
    losses: set[torch.dtype] = field(default_factory=set)
    micro_batches: int = 0
    clips: list[tuple[float, float]] = field(default_factory=list)
    stale: int = 0
    zeroed: int = 0
    gradients: dict[int, torch.dtype] = field(default_factory=dict)
    written: set[int] = field(default_factory=set)
    written_silently: set[int] = field(default_factory=set)
    scalers: list[Any] = field(default_factory=list)
    is_unscaled: bool = False
    is_compiled: bool = False
    moved_on_skip: int = 0


@dataclass
class _Before:
    """The state after a step, compared at the next one; ``num_skipped`` is from before it."""

    versions: dict[int, tuple[int, object]]
    prints: dict[int, int]
    rates: list[float]
    num_skipped: int
    request: object


class Watch:
    """The hooks of one watch, which fill in ``seen``.

    Args:
        is_scaled: whether a loss scaler may skip steps without a call of the optimizer.
        steps: steps of every optimizer after which ``finish`` is called; 0 for never.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        seen: Seen,
        is_scaled: Callable[[], bool],
        steps: int,
        finish: Callable[[], object],
    ) -> None:
        self.seen, self._steps, self._finish, self._is_scaled = seen, steps, finish, is_scaled
        self._optimizers, self._counts = list(optimizers), [0] * len(optimizers)
        self._before: list[_Before | None] = [None] * len(optimizers)
        self._num_skipped = [0] * len(optimizers)
        self._rates_of_pass: list[float] | None = None
        self._is_stepping = False
        parameters = [p for each in self._optimizers for group in each.param_groups for p in group["params"]]
        seen.dtypes = {id(p): p.dtype for p in parameters}
        trained = {id(p): p for p in parameters if p.requires_grad}.values()
        self._followed = [*smallest(p for p in trained if p.ndim > 1), *smallest(p for p in trained if p.ndim < 2)]
        self._trackers = [GradientTracker(p) for p in self._followed if not is_sharded(p)]
        self._handles = self._hook_forward(model)
        if self._trackers:
            self._handles.append(self._trackers[0].parameter.register_hook(self._in_backward))
        self._after: list[tuple[torch.optim.Optimizer, Any]] = []
        for place, optimizer in enumerate(self._optimizers):
            self._handles.append(optimizer.register_step_pre_hook(_plain(self._hook(place, self._before_step))))
            handle = optimizer.register_step_post_hook(_plain(self._hook(place, self._after_step)))
            self._after.append((optimizer, handle))
        self._model = model

    def remove(self) -> None:
        """Remove every hook; the next forward pass removes one that is running now and has others after it."""
        for handle in [*self._handles, *self._trackers]:
            handle.remove()
        self._handles, self._trackers = [], []
        self._optimizers = []  # a hook that is left does nothing
        later = []
        for optimizer, handle in self._after:
            if not self._is_stepping or _torch.is_last_hook(optimizer, handle):
                handle.remove()
            else:
                later.append(handle)
        self._after = []
        if later:

            def sweep(*_: Any) -> None:
                for handle in later:
                    handle.remove()

            later.append(self._model.register_forward_pre_hook(sweep))

    # ── forward and backward ────────────────────────────────────────────────────────────────────────────────────────

    def _hook_forward(self, model: nn.Module) -> list[Any]:
        """Hook the first linear layer, inside the wrappers of frameworks; of a compiled model, the whole."""
        is_compiled = _torch.is_compiled_model(model)
        inner = None if is_compiled else next((m for m in model.modules() if isinstance(m, nn.Linear)), None)
        return [(inner or model).register_forward_pre_hook(self._in_forward)]

    def _in_forward(self, module: nn.Module, _: Any) -> None:
        if torch.compiler.is_compiling():
            return
        weight = next(module.parameters(), None)
        kind = "cpu" if weight is None else weight.device.type
        if torch.is_autocast_enabled(kind):
            self.seen.autocasts.add(torch.get_autocast_dtype(kind))
        elif isinstance(module, nn.Linear):  # around a whole model, it may be switched on inside
            self.seen.autocasts.add(None)

    def _in_backward(self, _: Tensor) -> None:
        """Before the first followed gradient of a backward pass arrives."""
        root = _torch.root_of_backward()
        if root is not None and root.ndim == 0:
            self.seen.losses |= _torch.scalar_dtypes(root)
        rates = _rates(self._optimizers[0])
        is_new = self._trackers[0].num_passes == 1
        # Gradients were dropped without a step, as GradScaler does, and a schedule has moved.
        if is_new and self._rates_of_pass not in (None, rates) and self._is_scaled():
            self.seen.moved_on_skip += 1
        self._rates_of_pass = rates

    # ── the step ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _hook(self, place: int, function: Callable[[int, bool], None]) -> Callable[..., None]:
        def call(_: Any, args: Any, kwargs: Any) -> None:
            if self._optimizers:
                self._is_stepping = True
                function(place, has_closure(args, kwargs))
                self._is_stepping = False

        return call

    def _before_step(self, place: int, has_closure: bool) -> None:
        optimizer, seen = self._optimizers[place], self.seen
        if (scaler := _torch.scaler_of_step()) is not None and all(scaler is not each for each in seen.scalers):
            seen.scalers.append(scaler)
        seen.is_compiled |= _torch.is_compiled_step()
        if (before := self._before[place]) is not None:
            self._compare(optimizer, before)
        self._num_skipped[place] = getattr(optimizer, "num_skipped", 0)
        if not has_closure:
            self._look_at_gradients(place)

    def _after_step(self, place: int, has_closure: bool) -> None:
        optimizer = self._optimizers[place]
        if has_closure:  # it has computed the gradients within the step
            self._look_at_gradients(place)
        self._before[place] = self._left(optimizer, self._num_skipped[place])
        self._rates_of_pass = None
        for tracker in self._trackers_of(optimizer):
            tracker.stepped()
        self._counts[place] += 1
        self.seen.steps = max(self._counts)
        if self._steps and (min(self._counts) >= self._steps or max(self._counts) > self._steps):
            self._finish()

    def _look_at_gradients(self, place: int) -> None:
        optimizer, seen = self._optimizers[place], self.seen
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        seen.gradients |= {id(p): p.grad.dtype for p in parameters if p.grad is not None and p.grad.dtype != p.dtype}
        trackers = [tracker for tracker in self._trackers_of(optimizer) if tracker.num_passes]
        if trackers:
            seen.micro_batches = max(seen.micro_batches, min(tracker.num_passes for tracker in trackers))
            seen.stale += any(tracker.is_stale for tracker in trackers)
            seen.zeroed += any(tracker.was_zeroed for tracker in trackers)
        self._look_at_clipping(parameters, trackers)
        if isinstance(optimizer, Optimizer) and optimizer.loss_scaler is not None:
            before = self._before[place]
            last = None if before is None else before.request
            seen.is_unscaled |= optimizer.loss_scaler.request is last

    def _trackers_of(self, optimizer: torch.optim.Optimizer) -> list[GradientTracker]:
        own = {id(p) for group in optimizer.param_groups for p in group["params"]}
        return [tracker for tracker in self._trackers if id(tracker.parameter) in own]

    def _look_at_clipping(self, parameters: Sequence[Tensor], trackers: Sequence[GradientTracker]) -> None:
        factor = common_factor(trackers)
        if factor is None:
            return
        if (scaler := _torch.scaler_of_step()) is not None:
            factor *= float(scaler.get_scale())  # it has divided by its scale
        if 0 < factor < 1 - 2.0**-7:
            norms = [local_of(p.grad).norm(dtype=torch.float32) for p in parameters if p.grad is not None]
            self.seen.clips.append((factor, float(torch.stack(norms).norm())))

    # ── between two steps ───────────────────────────────────────────────────────────────────────────────────────────

    def _left(self, optimizer: torch.optim.Optimizer, num_skipped: int) -> _Before:
        if not isinstance(optimizer, Optimizer):  # others hold no part of a weight that a write could contradict
            return _Before({}, {}, _rates(optimizer), num_skipped, None)
        own = {id(p): p for group in optimizer.param_groups for p in group["params"]}
        return _Before(
            versions={number: _written(optimizer, p) for number, p in own.items()},
            prints={id(p): fingerprint(local_of(p)) for p in self._followed if id(p) in own},
            rates=_rates(optimizer),
            num_skipped=num_skipped,
            request=None if optimizer.loss_scaler is None else optimizer.loss_scaler.request,
        )

    def _compare(self, optimizer: torch.optim.Optimizer, before: _Before) -> None:
        seen = self.seen
        if not isinstance(optimizer, Optimizer):
            return
        optimizer.settle()
        if optimizer.num_skipped > before.num_skipped and _rates(optimizer) != before.rates:
            seen.moved_on_skip += 1
        for group in optimizer.param_groups:
            for p in group["params"]:
                (version, snapshot), now = before.versions.get(id(p), (None, None)), _written(optimizer, p)
                if version is None or now[1] is not snapshot:  # the user has called refresh()
                    continue
                if now[0] != version:
                    seen.written.add(id(p))
                elif id(p) in before.prints and fingerprint(local_of(p)) != before.prints[id(p)]:
                    seen.written_silently.add(id(p))


def _written(optimizer: torch.optim.Optimizer, parameter: Tensor) -> tuple[int, object]:
    """The version of a parameter, and its optimizer's snapshot of it: a new object once a write was adopted."""
    weight = local_of(parameter)
    store = optimizer._registry.states.get(parameter) if isinstance(optimizer, Optimizer) else None
    return parameter._version + (0 if weight is parameter else weight._version), getattr(store, "snapshot", None)


def _rates(optimizer: torch.optim.Optimizer) -> list[float]:
    return [float(group.get("lr") or 0.0) for group in optimizer.param_groups]


def smallest(parameters: Iterable[Tensor]) -> list[Tensor]:
    """A few of the smallest of some parameters, the smallest first."""
    return sorted((p for p in parameters if 0 < p.numel() <= _LARGEST), key=Tensor.numel)[:_FOLLOWED]


def _plain(function: Callable[..., None]) -> Callable[..., None]:
    """A hook that the compiler, if it is loaded, does not trace."""
    result: Callable[..., None] = torch.compiler.disable(function) if "torch._dynamo" in sys.modules else function
    return result


# ── the gradient of one parameter ─────────────────────────────────────────────────────────────────────────────────────

# A gradient that was multiplied by one number and rounded to bfloat16 is within 2^-9 of it.
UNIFORM = 2.0**-6


class GradientTracker:
    """Follows the gradient of one small parameter that is trained, a leaf.

    Attributes:
        num_passes: backward passes that the gradient has summed.
        is_stale: whether gradients were added to those of the step before.
        was_zeroed: whether they were added to zeros, where ``None`` would do.
    """

    def __init__(self, parameter: Tensor) -> None:
        self.parameter = parameter
        self.num_passes, self.is_stale, self.was_zeroed = 0, False, False
        self._pass, self._follows_step = -1, False
        self._computed: Tensor | None = None
        self._handles = [
            parameter.register_hook(self._before),
            parameter.register_post_accumulate_grad_hook(self._after),
        ]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def stepped(self) -> None:
        self._follows_step, self._computed = True, None

    def factor(self) -> float | None:
        """The number by which the gradient was multiplied since the backward pass; ``None`` if there is no such number."""
        gradient, computed = self.parameter.grad, self._computed
        if gradient is None or computed is None or gradient.shape != computed.shape:
            return None
        now, then = gradient.detach().double().flatten(), computed.double().flatten()
        length = torch.dot(then, then)
        if not length > 0 or not length.isfinite():
            return None
        factor = torch.dot(now, then) / length
        off = (now - factor * then).norm() / (factor.abs() * then.norm())
        return float(factor) if off < UNIFORM else None

    def _before(self, _: Tensor) -> None:
        if (number := current_backward()) == self._pass:
            return
        self._pass, gradient = number, self.parameter.grad
        if gradient is not None and gradient.layout is not torch.strided:
            return
        if gradient is None or not gradient.any():
            self.was_zeroed |= gradient is not None and self._follows_step
            self.num_passes, self.is_stale = 0, False
        elif self._follows_step:
            self.is_stale = True
        self.num_passes, self._follows_step = self.num_passes + 1, False

    def _after(self, parameter: Tensor) -> None:
        if parameter.grad is not None and parameter.grad.layout is torch.strided:
            self._computed = parameter.grad.detach().clone()


def common_factor(trackers: Sequence[GradientTracker]) -> float | None:
    """The number by which all gradients were multiplied since the backward pass; ``None`` if there is no such number."""
    factors = [factor for tracker in trackers if (factor := tracker.factor()) is not None]
    if not factors or max(factors) - min(factors) > UNIFORM * abs(factors[0]):
        return None
    return factors[0]
