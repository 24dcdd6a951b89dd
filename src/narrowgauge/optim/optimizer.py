"""The one optimizer: a rule joined with a storage, behind the interface of ``torch.optim.Optimizer``.

Nothing here knows a format or a formula. A step asks the registry for the :class:`~narrowgauge.optim.state.ParameterState`
of every parameter, hands its words to the kernel of its (rule, storage), and counts. Gradient clipping and the decision to
skip a step with a non-finite gradient are two scalars that the kernel reads; the host reads the decision after the fact.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypedDict, TypeVar

import torch
from torch import Tensor, nn

from narrowgauge._torch import plain_name
from narrowgauge._torch.transfers import Reading
from narrowgauge.errors import ChipError, RecipeError
from narrowgauge.numerics.devices import require_float64
from narrowgauge.numerics.scaling import LossScaler
from narrowgauge.numerics.shards import local_of, placed_like
from narrowgauge.optim.audit import Alarm, Auditor, warn_of
from narrowgauge.optim.clip import Finite, StepControl, control_scalars
from narrowgauge.optim.codec import value_dtype
from narrowgauge.optim.kernel import StepKernel
from narrowgauge.optim.reconcile import Registry, check_in_use, snapshot_adopted, snapshot_after_step
from narrowgauge.optim.rules.elementwise import Rule
from narrowgauge.optim.rules.matrix import MatrixRule, shapes_of_states
from narrowgauge.optim.state import NO_GRADIENT, ParameterState, read_leading
from narrowgauge.optim.state_dict import (
    StateView,
    load_states,
    numbered,
    save_states,
    seed_of,
    show_states,
    take_states,
)
from narrowgauge.optim.step import Stepper
from narrowgauge.optim.validation import (
    USUAL_STORAGE,
    check_one_device,
    check_options,
    check_real,
    check_rule,
    check_step,
    check_visible,
    expected_row,
    known_row,
    refuse_capture,
    warn_of_slow_matmuls,
)
from narrowgauge.spec.storages import Storage
from narrowgauge.spec.update_rules import Range

Returned = TypeVar("Returned")


def not_compiled(function: Callable[..., Returned]) -> Callable[..., Returned]:
    """``torch.compiler.disable`` at the first call: its import takes a second, and a step's kernels are compiled already."""

    whole: list[Callable[..., Returned]] = []

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Returned:
        if not whole:
            whole.append(torch.compiler.disable(function))
        return whole[0](*args, **kwargs)

    return call


_OPTIONS = ("rule", "max_grad_norm", "audit_every", "compile", "loss_scaler", "rows")


class Options(TypedDict, total=False):
    """The options that every optimizer here takes besides those of its rule; see :class:`Optimizer`."""

    storage: str | Storage | None
    max_grad_norm: float | None
    seed: int
    audit_every: int
    compile: bool | None
    maximize: bool
    loss_scaler: LossScaler | None
    amsgrad: bool | None
    fused: bool | None
    foreach: bool | None
    capturable: bool | None
    differentiable: bool | None


class Optimizer(torch.optim.Optimizer):
    """An update rule whose weights and states are stored in the formats of a storage.

    Invariant: for a given history of gradients every stored bit is a function of (seed, that history) alone: not of how its
    tensor was sharded or chunked, of the number of threads, or of whether the kernel is compiled. Matrix rules, which read
    whole matrices, are excepted. Parameters of one dimension are stored as the storage's ``vectors`` says (``master`` for
    ours), since they cost nothing and fail first; this includes a model flattened into one long vector.

    Args:
        params: parameters, ``(name, parameter)`` pairs, or groups, as in ``torch.optim``; a group may set ``storage``, and
            ``rule="adamw"`` where the optimizer's is a matrix rule. Parameters are already in the storage's visible
            format (``narrowgauge.prepare`` does that, without losing the bits that it cuts).
        rule: the update rule.
        defaults: the options of the rule, which groups may override.
        storage: a storage of ``narrowgauge.spec.STORAGES``, or its name. Left out it is that of the recipe for which a
            framework's plugin has converted the parameters, else ``word``.
        max_grad_norm: clip gradients to this L2 norm over all parameters; ``None`` does not. With it, a step whose norm
            is not finite changes nothing and is counted in ``num_skipped``.
        seed: seed of the stochastic rounding.
        audit_every: audit every so many steps; 0 never.
        compile: compile the kernels; ``None`` decides by size.
        maximize: maximize instead of minimize.
        loss_scaler: the scaler of the loss: gradients are divided by its scale, a step with a gradient that is not finite
            is skipped, and the scaler is updated. A step is refused if the scaler has scaled no loss since the last one.
            ``torch.amp.GradScaler`` works too, without being passed here.
        amsgrad, fused, foreach, capturable, differentiable: for callers of ``torch.optim``; false or ``None``.

    Raises:
        RecipeError: an option out of range, an unknown storage, or parameters in another format than the storage's visible
            one, or a storage whose arithmetic the rule cannot be computed in.

    Cost: see ``docs/log/storages.md``; ``word`` moves 14 bytes a parameter against 28 for a float32 AdamW.
    """

    def __init__(
        self,
        params: Iterable[Any],
        rule: Rule | MatrixRule,
        defaults: dict[str, Any],
        *,
        storage: str | Storage | None = None,
        max_grad_norm: float | None = None,
        seed: int = 0,
        audit_every: int = 10,
        compile: bool | None = None,
        maximize: bool = False,
        loss_scaler: LossScaler | None = None,
        amsgrad: bool | None = None,
        fused: bool | None = None,
        foreach: bool | None = None,
        capturable: bool | None = None,
        differentiable: bool | None = None,
    ) -> None:
        flags = {"fused": fused, "foreach": foreach, "capturable": capturable, "differentiable": differentiable}
        check_options({**defaults, **flags, "amsgrad": amsgrad}, rule)
        Range().check("audit_every", audit_every)
        if max_grad_norm not in (None, math.inf):  # infinity never clips, but skips steps whose norm is not finite
            Range(above=True).check("max_grad_norm", max_grad_norm)
        row = known_row(USUAL_STORAGE if storage is None else storage, {})
        self._start(
            rule=rule,
            max_grad_norm=max_grad_norm,
            audit_every=audit_every,
            compile=compile,
            loss_scaler=loss_scaler,
            rows={row.name: row},
        )
        self._names_storage = storage is not None
        super().__init__(params, {**defaults, "storage": row.name, "seed": seed, "maximize": maximize})

    def _start(
        self,
        *,
        rule: Rule | MatrixRule,
        max_grad_norm: float | None,
        audit_every: int,
        compile: bool | None,
        loss_scaler: LossScaler | None,
        rows: dict[str, Storage],
    ) -> None:
        self.rule, self.rows, self.compile = rule, rows, compile
        self.max_grad_norm, self.audit_every = max_grad_norm, audit_every
        self.grad_norm: Tensor | None = None
        # A parameter whose own gradient norm a loop wants beside that of all, and the norm in the last step.
        self.watched: Tensor | None = None
        self.watched_grad_norm: Tensor | None = None
        self.last_control: Tensor | None = None
        # A gradient norm above which a step is skipped; a loop that judges spikes sets it before each step.
        self.skip_above = math.inf
        self.num_skipped = 0
        self.last_overflow: list[str] = []
        self.last_audit: Tensor | None = None
        self.auditor = Auditor()
        self.on_alarm: Callable[[list[Alarm]], None] = warn_of
        # What sums the gradients over ranks before a step, if anything does; `narrowgauge.prepare` sets it.
        self.reduction: Any = None
        # The handle of gradient release, while there is one, and the parameters it has stepped.
        self.release: Any = None
        self.released: set[Tensor] = set()
        self._names_storage = True
        # Parameters in groups for which no storage was named: a recipe decides.
        self._left_to_recipe: set[Tensor] = set()
        self._names: dict[Tensor, str] = {}
        self._model: Callable[[], nn.Module | None] = lambda: None
        self._registry = Registry(
            self.rule, self.rows, self.compile, lambda: self.param_groups, self._names, self._look_up_names
        )
        self._states = StateView(self._registry, self.settle)
        self._control = StepControl(self._registry.worth_compiling)
        self.loss_scaler = loss_scaler
        self._stepped = False
        # Of the last step: whether it was skipped; its states; and what tells whose gradients were finite.
        self._pending: tuple[Reading | None, list[ParameterState], Finite | None] | None = None

    @property
    def loss_scaler(self) -> LossScaler | None:
        """What scales the loss, if anything does; frameworks that make the scaler later set it before the first step."""
        return self._control.loss_scaler

    @loss_scaler.setter
    def loss_scaler(self, scaler: LossScaler | None) -> None:
        self._control.use(scaler)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether torch.amp.GradScaler leaves unscaling and skipping to `step`, in `grad_scale` and `found_inf`.

        Only where a loss is scaled for this optimizer, or must be: frameworks do not clip the gradients of an optimizer that
        has this property. Float16 gradients are such a case, since GradScaler refuses to unscale those itself.

        Raises:
            RecipeError: gradients are released as they arrive.
        """
        if self.release is not None:
            raise RecipeError(
                "gradients are released as they arrive, and a torch.amp.GradScaler, or a framework that clips, needs all of "
                "them first.",
                "Train in bfloat16 without one, or keep the gradients: call remove() on the handle of release_gradients.",
            )
        return self.loss_scaler is not None or any(p.dtype is torch.float16 for p in self._registry.parameters())

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, as in ``torch.optim``; the group may name its own ``storage``.

        Raises:
            RecipeError: an option that the rule cannot obey, an unknown storage, or a parameter in another format than its
                visible one.
            ChipError: a parameter on a device without float64.
        """
        named = "storage" in param_group or self._names_storage
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        _name_each_once(group)
        try:
            require_float64(group["params"])
            check_options(group, self.rule)
            row = expected_row(group["params"], group["storage"] if named else None, self.rows)
            self.rows[row.name], group["storage"] = row, row.name
            for parameter in group["params"]:
                storage = self._registry.storage_of(group, parameter)
                check_real(parameter)
                check_visible(parameter, storage)
                check_rule(self._registry.rule_of(group, parameter), storage)
        except (ChipError, RecipeError):
            self.param_groups.pop()
            raise
        if not named:
            self._left_to_recipe.update(group["params"])
        self._look_up_names()
        self._registry.align_names()

    def names_storage(self, group: Mapping[str, Any]) -> bool:
        """Whether the maker of a param group named its storage, so that no recipe may replace it."""
        return not self._left_to_recipe.issuperset(group["params"])

    # ── the step ────────────────────────────────────────────────────────────────────────────────────────────────────

    @not_compiled
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step.

        Args:
            closure: re-evaluates the model and returns the loss, as in ``torch.optim``.
        Returns:
            The closure's loss, if there is one.
        Raises:
            RecipeError: in a first step, or in one without any gradient: a parameter was replaced by another in its model.

        Cost: at most 64 MiB of transient memory, for any model.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            self._step()
        return loss

    def _step(self) -> None:
        self.settle()
        self._discard_orphans()
        for group in self.param_groups:
            check_step(group, self.rule)
        if self.release is not None:
            self.release.before_step()
        work = [(group, self._with_gradient(group)) for group in self.param_groups]
        states = [state for _, members in work for state in members]
        if not (states and self._stepped):
            check_in_use(self.parameter_names(), self._model())
        if not states:
            if self.reduction is not None:
                self.reduction.require_stepped()
            self._take_audit([])  # of parameters that were stepped alone
            return
        device = check_one_device([state.parameter for state in states])
        refuse_capture(device)
        if not self._stepped:
            self._begin(device)
        gradients = [state.owner.grad for state in states]
        found_inf = getattr(self, "found_inf", None)
        decision = self._control(
            [g for g in gradients if g is not None],
            device,
            max_norm=self.max_grad_norm,
            skip_above=self.skip_above,
            # torch.amp.GradScaler sets these two for the length of a step.
            grad_scale=getattr(self, "grad_scale", None),
            found_inf=found_inf,
            own=next((g for s, g in zip(states, gradients, strict=True) if s.owner is self.watched), None),
        )
        control, norm = decision.control, decision.norm
        self.last_control, self.watched_grad_norm = control, decision.own_norm
        self.grad_norm = self.grad_norm if norm is None else norm
        for group, members in work:
            self._advance(group, members, control)
        on_cpu = control.device.type == "cpu"
        may_skip = norm is not None or found_inf is not None
        self._pending = (Reading(control[1]) if may_skip else None, states, decision.finite)
        if on_cpu:
            self.settle()  # nothing to wait for
        for state in states:
            state.gradient = NO_GRADIENT

    def _begin(self, device: torch.device) -> None:
        self._stepped = True
        self._left_to_recipe.clear()  # too late for one, and others may replace these parameters
        warn_of_slow_matmuls(self.param_groups)
        for kernel in self._registry.kernels.values() if self.audit_every else ():
            if isinstance(kernel, StepKernel):
                kernel.compile_audit_elsewhere(device)

    def _discard_orphans(self) -> None:
        if orphans := self._registry.orphans():
            self._states.discard(orphans)
            self.auditor.forget(orphans)

    def step_alone(self, group: dict[str, Any], parameter: Tensor) -> None:
        """Step one parameter that has a gradient now, and release that; one that shares a bucket waits for :meth:`step`."""
        with torch.no_grad():
            states = self._with_gradient({**group, "params": [parameter]})
            if any(state in bucket.members for bucket in self._registry.buckets for state in states):
                return
            refuse_capture(states[0].parameter.device)
            self._advance(group, states, control_scalars(None, None, states[0].parameter.device))
        states[0].gradient, parameter.grad = NO_GRADIENT, None
        self.released.add(parameter)

    def _advance(self, group: dict[str, Any], states: list[ParameterState], control: Tensor) -> None:
        Stepper(group, control, self.auditor, self.audit_every).step(states, self._registry.buckets)
        for state in states:
            state.step += 1
        snapshot_after_step(states, self.audit_every)

    def _with_gradient(self, group: dict[str, Any]) -> list[ParameterState]:
        """The states of a group's parameters that have a gradient, fit for a step and with their gradients set."""
        if self._states.handed:
            self._states.flush()
        parameters = [p for p in group["params"] if p.grad is not None]
        states = self._registry.for_step(group, parameters, self.audit_every)
        for state, parameter in zip(states, parameters, strict=True):
            assert parameter.grad is not None
            state.gradient = local_of(parameter.grad)
        return states

    def settle(self) -> None:
        """Finish the last step: read from the device whether it was skipped and what its audit found, and raise alarms."""
        if self._pending is None:
            return
        (skip, states, told), self._pending, self.last_audit = self._pending, None, None
        if skip is not None and skip.item() != 0.0:
            self.num_skipped += 1
            names = self.parameter_names()
            finite = told() if told is not None else [bool(s.gradient.isfinite().all()) for s in states]
            over = [s.owner for s, fine in zip(states, finite, strict=True) if not fine]
            self.last_overflow = [names[parameter] for parameter in over if parameter in names]
            for state in states:
                state.step -= 1
            self.auditor.discard()
            return
        self._take_audit(states)

    def _take_audit(self, states: list[ParameterState]) -> None:
        auditor = self.auditor
        # Ranks that hold nothing of what was audited take part too.
        if auditor.join is not None and any(self.audit_every and s.step % self.audit_every == 0 for s in states):
            auditor.fresh = auditor.join(auditor.fresh)
        if not auditor.fresh:
            return
        self.last_audit = self.auditor.collect()
        storages = {parameter: state.storage for parameter, state in self._registry.states.items()}
        if alarms := self.auditor.alarms(self.parameter_names(), storages):
            self.on_alarm(alarms)

    # ── the state, as torch.optim's users know it ───────────────────────────────────────────────────────────────────

    @property  # type: ignore[override]
    def state(self) -> StateView:
        """The state of each parameter, as in ``torch.optim``; see :mod:`narrowgauge.optim.state_dict`."""
        return self._states

    @state.setter
    def state(self, given: Mapping[Any, Any]) -> None:
        if given is not self._states:
            entries = {key: dict(value) if isinstance(value, Mapping) else value for key, value in given.items()}
            self._states.clear()
            self._states.update(entries)

    def refresh(self) -> None:
        """Adopt weights that were modified unnoticed: through ``.data``, or in memory that they share.

        Other writes to a parameter (``load_state_dict``, ``copy_``, ``clamp_`` under ``no_grad``) are noticed before the
        next step and need no call. The stored weight of an element whose visible bits are not those that the last step
        left becomes the visible one, exactly; others stay as they are. Where a large matrix has tails and no copy of the
        visible weight, those elements are unknown, and all of its tails are discarded.

        Raises:
            RecipeError: a parameter has another shape, dtype or device than its states were made for.

        Example:
            >>> import torch, narrowgauge as ng
            >>> weight = torch.nn.Parameter(torch.ones(8, 8, dtype=torch.bfloat16))
            >>> optimizer = ng.AdamW([weight], lr=1e-3, storage="word")
            >>> weight.grad = torch.ones_like(weight)
            >>> optimizer.step()
            >>> weight.data.fill_(3.0)[0, 0].item(), optimizer.refresh()
            (3.0, None)
            >>> optimizer.stored(weight)[0, 0].item()
            3.0
        """
        with torch.no_grad():
            self._registry.adopt(list(self._registry.states.values()))

    def adopt(
        self, values: Mapping[Tensor, Tensor], states: Mapping[Tensor, Mapping[str, Tensor | int]] | None = None
    ) -> None:
        """Store float32 weights, and perhaps states: parameters become the visible part of the weights.

        Args:
            values: the float32 or float64 weight of each parameter, of its shape; cut to the nearest.
            states: the states, float32 or float64, of each parameter by name, and under ``step`` the number of steps taken. A
                code that rounds stochastically does so here: rounded to the nearest, many equal values would have the same
                error.
        """
        self._registry.follow()
        for group in self.param_groups:
            mine = [p for p in group["params"] if p in values]
            self._registry.make(group, mine)
            for index, parameter in enumerate(mine):
                state, given = self._registry.states[parameter], (states or {}).get(parameter, {})
                state.adopt(local_of(values[parameter]))
                snapshot_adopted(state)
                state.step = int(given.get("step", state.step))
                seed = seed_of(group, state, index)
                for name, value in given.items():
                    if isinstance(value, Tensor) and name != "step":
                        state.put(name, local_of(value), seed)

    def stored(self, parameter: Tensor, name: str = "weight") -> Tensor:
        """The stored value, as float32; as float64 where the storage keeps that.

        Args:
            parameter: one of the optimizer's parameters.
            name: ``"weight"``, or a state such as ``"exp_avg"`` or ``"exp_avg_sq"``.
        Returns:
            tensor of the parameter's shape, a copy (a DTensor where the parameter is one). Before the first step
            the weight is the parameter itself and moments are zero.
        Raises:
            KeyError: the parameter or the name is unknown.
        """
        self._states.take_writes()
        state = self._registry.get(parameter)
        if state is not None and (name == "weight" or name in state.shapes_of_states):
            return state.stored(name) if name in state.extras else placed_like(parameter, state.stored(name))
        group = self._registry.group_of(parameter)
        if group is None:
            raise KeyError("this tensor is not one of the optimizer's parameters")
        rule = self._registry.rule_of(group, parameter, (name,))
        known = shapes_of_states(rule, parameter.shape, group)
        if name != "weight" and name not in known:
            raise KeyError(f"rule '{rule.name}' has {('weight', *known)}, not '{name}'")
        dtype = value_dtype(self._registry.storage_of(group, parameter))
        return parameter.detach().to(dtype, copy=True) if name == "weight" else torch.zeros_like(parameter, dtype=dtype)

    def leading(self, parameters: Iterable[Tensor], count: int, name: str = "weight") -> list[Tensor | None]:
        """The first ``count`` values of :meth:`stored` of some parameters, or of their shards here, without reading the others.

        Returns:
            float32 ``[count]`` for each, fewer where there are fewer, or ``None`` where nothing is stored under that name yet.
        """
        states = [self._registry.states.get(parameter) for parameter in parameters]
        known = [s for s in states if s is not None and (name == "weight" or name in dict(s.storage.states))]
        values = dict(zip(map(id, known), read_leading(known, count, name), strict=True))
        return [values.get(id(state)) for state in states]

    def packed_state(self, parameter: Tensor) -> ParameterState | None:
        """The codes and words in which a parameter is stored, to be read only; ``None`` before its first step."""
        return self._registry.get(parameter)

    def rule_of(self, parameter: Tensor) -> str:
        """The name of the rule that steps a parameter: AdamW's where the optimizer's own needs a matrix and this is none.

        Args:
            parameter: one of the optimizer's parameters.
        Raises:
            KeyError: it is none of them.
        """
        group = self._registry.group_of(parameter)
        if group is None:
            raise KeyError("this tensor is not one of the optimizer's parameters")
        return self._registry.rule_of(group, parameter).name

    def num_steps(self, parameter: Tensor) -> int:
        """Steps that a parameter has taken; 0 before the first."""
        state = self._registry.states.get(parameter)
        return 0 if state is None else state.step

    def bytes_per_param(self) -> float:
        """Bytes of weights, gradients (in the parameters' format) and states per parameter, counted from live tensors.

        Gradients that :func:`narrowgauge.optim.release_gradients` releases as they arrive are not counted.
        """
        everyone = self._registry.parameters()
        parameters = [local_of(p) for p in everyone]
        gradients = [local_of(p) for p in everyone if p not in self.released]
        kept = [tensor for state in self._registry.states.values() for tensor in state.tensors()]
        total = sum(t.numel() * t.element_size() for t in [*parameters, *gradients, *kept])
        return total / max(1, sum(p.numel() for p in parameters))

    def parameter_names(self) -> dict[Tensor, str]:
        """The name of each parameter: as given, else as its model has it, else ``"param 0"``, ``"param 1"`` …"""
        return self._registry.parameter_names()

    def name_parameters(self, model: nn.Module) -> None:
        """Use a model's names, in alarms and metrics, for parameters that were given without; and remember the model.

        Names of other parameters are not kept: what holds a name holds its parameter, and the model may replace it.
        """
        self._model = weakref.ref(model)
        own = set(self._registry.parameters())
        self._names.update({p: plain_name(name) for name, p in model.named_parameters() if p in own})

    def _look_up_names(self) -> None:
        if (model := self._model()) is not None:
            self.name_parameters(model)

    # ── saving and loading ──────────────────────────────────────────────────────────────────────────────────────────

    def state_dict(self) -> dict[str, Any]:
        """The state, lossless and packed: each plane as a tensor of the parameter's shape.

        Returns:
            As in ``torch.optim``; a state that is a plain tensor has torch's key (``exp_avg``), others are ``tail``,
            ``master`` (float32), ``weight_low`` and ``packed``, and ``…_bound`` is the scale of each row. ``step`` is a 0-d
            float32 tensor. DTensors where the parameter is one.
        """
        self._discard_orphans()
        handle = self.register_state_dict_post_hook(show_states, prepend=True)  # before hooks of others see it
        try:
            result: dict[str, Any] = super().state_dict()
            return result
        finally:
            handle.remove()

    def states(self) -> dict[Tensor, dict[str, Tensor]]:
        """The part of :meth:`state_dict` that belongs to each parameter."""
        self._discard_orphans()
        return save_states(self._registry)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state from :meth:`state_dict`; nothing is cast, and a state that is refused changes nothing.

        Raises:
            RecipeError: the state was saved from another storage or shape.
            ValueError: the groups do not match, as in ``torch.optim``.
        """
        handle = self.register_load_state_dict_pre_hook(take_states)  # after hooks of others have changed it
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()

    def load_states(
        self, entries: Mapping[Tensor, Mapping[str, Any]], groups: list[dict[str, Any]] | None = None
    ) -> None:
        """Replace all states by those from :meth:`states`; a state that is refused changes nothing.

        Args:
            entries: the state of each parameter.
            groups: options that the states were saved under; ``None`` for the optimizer's own. A group without
                ``storage`` is of a plain ``torch.optim``, whose moments are cut.
        Raises:
            RecipeError: a state was saved from another storage, rule or shape.
        """
        load_states(self._registry, self.param_groups, entries, groups or self.param_groups)
        self._states.handed.clear()
        self._pending, self.auditor = None, Auditor(join=self.auditor.join)

    def __getstate__(self) -> dict[str, Any]:
        options = {name: getattr(self, name) for name in _OPTIONS}
        kept = {"options": options, "saved": numbered(self.states(), self._registry), "state": dict(self._states.free)}
        return {**super().__getstate__(), **kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        options, saved, free = (state.pop(name, None) for name in ("options", "saved", "state"))
        if options is not None:
            self._start(**options)
        super().__setstate__(state)
        self._states.free = dict(free or {})
        if saved is not None:
            parameters = self._registry.parameters()
            self.load_states({parameters[number]: entry for number, entry in saved.items()})


def _name_each_once(group: dict[str, Any]) -> None:
    """A tied weight that is given twice is one parameter, under its first name; torch has warned of it."""
    first: dict[Tensor, int] = {}
    for place, parameter in enumerate(group["params"]):
        first.setdefault(parameter, place)
    for key in ("params", "param_names"):
        if key in group:
            group[key] = [group[key][place] for place in first.values()]
