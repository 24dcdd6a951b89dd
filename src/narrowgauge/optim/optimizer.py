"""The one optimizer: a rule joined with a storage, behind ``torch.optim.Optimizer``'s own interface.

Nothing here knows a format or a formula. A step asks every parameter's :class:`~narrowgauge.optim.stores.Store` for its
words, hands them to the kernel of its (rule, storage), and counts. Gradient clipping and the decision to skip a step with
a non-finite gradient are two scalars that the kernel reads; the host looks at the decision after the fact.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypedDict

import torch
from torch import Tensor

from narrowgauge.errors import RecipeError
from narrowgauge.numerics.rounding import step_seed
from narrowgauge.numerics.scaling import LossScaler
from narrowgauge.optim.auditing import Alarm, Auditor, warn_of
from narrowgauge.optim.checks import agree, check_range, check_rule, check_visible, gradient_of, known_row
from narrowgauge.optim.clipping import GradientNorm, control_scalars
from narrowgauge.optim.elementwise import ADAMW, Rule
from narrowgauge.optim.kernels import StepKernel
from narrowgauge.optim.matrix import MatrixRule
from narrowgauge.optim.shards import local_of, placed_like
from narrowgauge.optim.stepping import Stepper
from narrowgauge.optim.stores import NO_GRADIENT, Bucket, Store, make_stores
from narrowgauge.storages import Storage, for_vectors

WORTH_COMPILING = 1 << 18
"""Elements of one storage from which compiling its kernel pays within a short run."""
_OPTIONS = ("rule", "max_grad_norm", "audit_every", "compile", "loss_scaler", "rows")


class Options(TypedDict, total=False):
    """What every optimizer of ours takes beside its rule's own options; see :class:`Optimizer`."""

    storage: str | Storage
    max_grad_norm: float | None
    seed: int
    audit_every: int
    compile: bool | None
    maximize: bool
    loss_scaler: LossScaler | None


class Optimizer(torch.optim.Optimizer):
    """An update rule whose weights and states are kept in a storage.

    Law: for a given history of gradients every stored bit is a function of (seed, that history) alone: not of where its
    tensor was cut, of chunking, number of threads, or whether the kernel is compiled. Parameters of one dimension
    are kept as the row's ``vectors`` says (``master`` for ours), since they cost nothing and fail first: a model
    flattened into one long vector is therefore kept whole. Matrix rules look at whole matrices, and are excepted.

    Args:
        params: parameters, ``(name, parameter)`` pairs, or groups, as in ``torch.optim``; a group may set ``storage``, and
            ``rule="adamw"`` where the optimizer's is a matrix rule. Parameters are already in the storage's visible
            format (``narrowgauge.prepare`` does that, without losing the bits that it cuts).
        rule: the update rule.
        defaults: the rule's options, per group.
        storage: a row of ``narrowgauge.STORAGES``, or its name.
        max_grad_norm: clip gradients to this L2 norm over all parameters; ``None`` does not. With it, a step whose norm
            is not finite changes nothing and is counted in ``num_skipped``.
        seed: seed of the stochastic rounding.
        audit_every: audit every so many steps; 0 never.
        compile: compile the kernels; ``None`` decides by size.
        maximize: climb instead of descend.
        loss_scaler: whose scale the loss was multiplied by: gradients are divided by it, a step with one that is not
            finite is skipped, and the scaler told. ``torch.amp.GradScaler`` works too, and is not named here.

    Raises:
        RecipeError: an unknown storage, or parameters in another format than the storage's visible one, or a storage
            whose arithmetic the rule cannot be computed in.

    Cost: see ``docs/log.md``; ``word`` moves 14 bytes a parameter against 28 for a float32 AdamW.
    """

    # torch.amp.GradScaler then leaves unscaling and skipping to `step`, in `grad_scale` and `found_inf`.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: Iterable[Any],
        rule: Rule | MatrixRule,
        defaults: dict[str, Any],
        *,
        storage: str | Storage = "word",
        max_grad_norm: float | None = None,
        seed: int = 0,
        audit_every: int = 10,
        compile: bool | None = None,
        maximize: bool = False,
        loss_scaler: LossScaler | None = None,
    ) -> None:
        check_range("audit_every", audit_every, 0)
        if max_grad_norm not in (None, math.inf):  # infinity clips nothing, but skips what is not finite
            check_range("max_grad_norm", max_grad_norm, 0, above=True)
        row = known_row(storage, {})
        self._start(
            rule=rule,
            max_grad_norm=max_grad_norm,
            audit_every=audit_every,
            compile=compile,
            loss_scaler=loss_scaler,
            rows={row.name: row},
        )
        super().__init__(params, {**defaults, "storage": row.name, "seed": seed, "maximize": maximize})

    def _start(self, **options: Any) -> None:
        self.rule: Rule | MatrixRule = options["rule"]
        self.rows: dict[str, Storage] = options["rows"]
        self.max_grad_norm: float | None = options["max_grad_norm"]
        self.audit_every: int = options["audit_every"]
        self.compile: bool | None = options["compile"]
        self.loss_scaler: LossScaler | None = options["loss_scaler"]
        self.grad_norm: Tensor | None = None
        self.num_skipped = 0
        self.last_overflow: list[str] = []
        self.last_audit: Tensor | None = None
        self.auditor = Auditor()
        self.on_alarm: Callable[[list[Alarm]], None] = warn_of
        self._stores: dict[Tensor, Store] = {}
        self._buckets: list[Bucket] = []
        self._kernels: dict[tuple[str, Storage], StepKernel] = {}
        self._norm: GradientNorm | None = None
        self.released: set[Tensor] = set()
        self._stepped = False
        self._unsettled: tuple[Tensor, list[Store], list[Tensor]] | None = None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, as in ``torch.optim``; the group may name its own ``storage``.

        Raises:
            RecipeError: an unknown storage, or a parameter in another format than its visible one.
        """
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        _name_each_once(group)
        try:
            row = known_row(group["storage"], self.rows)
            self.rows[row.name], group["storage"] = row, row.name
            for parameter in group["params"]:
                check_visible(parameter, self._storage_of(group, parameter))
                check_rule(self._rule_of(group, parameter), self._storage_of(group, parameter))
        except RecipeError:
            self.param_groups.pop()
            raise

    def _storage_of(self, group: dict[str, Any], parameter: Tensor) -> Storage:
        row = known_row(group["storage"], self.rows)
        return for_vectors(row) if parameter.ndim < 2 else row

    def _rule_of(self, group: dict[str, Any], parameter: Tensor) -> Rule | MatrixRule:
        """AdamW for what is no matrix, and for groups that ask for it, where the optimizer's rule takes matrices."""
        plain = parameter.ndim < 2 or group.get("rule") == ADAMW.name
        return ADAMW if isinstance(self.rule, MatrixRule) and plain else self.rule

    # ── the step ────────────────────────────────────────────────────────────────────────────────────────────────────

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step.

        Args:
            closure: re-evaluates the model and returns the loss, as in ``torch.optim``.
        Returns:
            The closure's loss, if there is one.

        Cost: at most 64 MiB of transient memory, whatever the model.
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
        work = [(group, self._stores_with_gradient(group)) for group in self.param_groups]
        stores = [store for _, members in work for store in members]
        if not stores:
            self._take_audit()  # of parameters stepped alone
            return
        if not self._stepped:
            self._stepped = True
            for kernel in self._kernels.values() if self.audit_every else ():
                kernel.compile_audit_elsewhere(stores[0].parameter.device)
        gradients = [store.owner.grad for store in stores]
        control = self._control([g for g in gradients if g is not None], stores[0].parameter.device)
        for group, members in work:
            self._advance(group, members, control)
        on_cpu = control.device.type == "cpu"
        # What the host reads later must not hold on to gradients: one flag for each says enough.
        may_skip = self.max_grad_norm is not None or self.loss_scaler is not None
        flagged = may_skip and not on_cpu
        finite = torch._foreach_norm([store.gradient for store in stores], math.inf) if flagged else []
        self._unsettled = (control, stores, list(finite))
        if on_cpu:
            self.settle()  # nothing to wait for
        for store in stores:
            store.gradient = NO_GRADIENT

    def step_alone(self, group: dict[str, Any], parameter: Tensor) -> None:
        """Step one parameter now and drop its gradient; one that shares a bucket waits for :meth:`step`.

        Args:
            group: its param group.
            parameter: it has a gradient.
        """
        with torch.no_grad():
            stores = self._stores_with_gradient({**group, "params": [parameter]})
            if any(store in bucket.members for bucket in self._buckets for store in stores):
                return
            self._advance(group, stores, control_scalars(None, None, stores[0].parameter.device))
        stores[0].gradient, parameter.grad = NO_GRADIENT, None
        self.released.add(parameter)

    def _advance(self, group: dict[str, Any], stores: list[Store], control: Tensor) -> None:
        matrix_rule = self.rule if isinstance(self.rule, MatrixRule) else None
        Stepper(group, control, self.auditor, self.audit_every).step(stores, self._buckets, matrix_rule)
        for store in stores:
            store.step += 1

    def _stores_with_gradient(self, group: dict[str, Any]) -> list[Store]:
        """The stores of a group's parameters that have a gradient, each with it; made where there are none yet."""
        parameters = [p for p in group["params"] if p.grad is not None]
        gradients = [gradient_of(p) for p in parameters]
        self._initialise(group, parameters)
        stores = [self._stores[p] for p in parameters]
        for store, gradient in zip(stores, gradients, strict=True):
            store.gradient = local_of(gradient)
        return stores

    def _control(self, gradients: list[Tensor], device: torch.device) -> Tensor:
        # torch.amp.GradScaler sets these two for the length of a step.
        scale, found = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if self.loss_scaler is not None:
            scale = self.loss_scaler.scale_tensor.to(device)
        if self.max_grad_norm is None and self.loss_scaler is None:
            return control_scalars(None, None, device, scale, found)
        if self._norm is None:
            self._norm = GradientNorm(compile=self._worth_compiling(sum(g.numel() for g in gradients)))
        norm = self._norm(gradients)
        control = control_scalars(norm, self.max_grad_norm, device, scale, found)
        self.grad_norm = norm if scale is None else norm / scale.to(norm.device)
        if self.loss_scaler is not None:
            self.loss_scaler.update_(control[1] != 0)
        return control

    def _worth_compiling(self, num_elements: int) -> bool:
        return self.compile if self.compile is not None else num_elements >= WORTH_COMPILING

    def _initialise(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        """Give states to parameters that have none."""
        alike: dict[tuple[str, Storage, torch.device], list[Tensor]] = {}
        extras: dict[Tensor, dict[str, Tensor]] = {}
        for parameter in parameters:
            if parameter in self._stores:
                continue
            rule, row = self._rule_of(group, parameter), self._storage_of(group, parameter)
            if isinstance(rule, MatrixRule):
                kept = rule.states(tuple(parameter.shape), group)
                row = row.keeping(tuple((name, k.role) for name, k in kept.items() if k.role is not None))
                extras[parameter] = {
                    name: torch.zeros(k.shape, device=parameter.device) for name, k in kept.items() if k.role is None
                }
            else:
                row = row.keeping(rule.kept)
            alike.setdefault((rule.name, row, parameter.device), []).append(parameter)
        for (name, row, _), members in alike.items():
            matrix = isinstance(self.rule, MatrixRule) and name == self.rule.name
            stores, buckets = make_stores(members, row, self._kernel(name, row), joined=not matrix)
            self._buckets += buckets
            for store in stores:
                store.extras = extras.get(store.owner, {})
                if row.master:
                    store.adopt(store.parameter)
                self._stores[store.owner] = store
                # Internal words; state_dict() says them in order.
                bounds = {f"{name}_bound": bound for name, bound in store.bounds.items()}
                self.state[store.owner] = {**store.words, **bounds, **store.extras}

    def _kernel(self, rule: str, storage: Storage) -> StepKernel:
        if (rule, storage) not in self._kernels:
            own = ADAMW if rule == ADAMW.name and isinstance(self.rule, MatrixRule) else self.rule
            if isinstance(own, MatrixRule):
                # It decides on whole matrices; the kernel is only told what to write.
                names = tuple(state for state, _ in storage.states)
                self._kernels[rule, storage] = StepKernel(
                    Rule(rule, names, (), lambda group, step: (), own.update), storage, compile=False
                )
            else:
                rows = [(self._storage_of(g, p), p) for g in self.param_groups for p in g["params"]]
                total = sum(p.numel() for row, p in rows if row.keeping(own.kept) == storage)
                self._kernels[rule, storage] = StepKernel(own, storage, compile=self._worth_compiling(total))
        return self._kernels[rule, storage]

    def settle(self) -> None:
        """Take note of what the last step decided: whether it was skipped, what its audit read, whether to warn."""
        if self._unsettled is None:
            return
        (control, stores, norms), self._unsettled, self.last_audit = self._unsettled, None, None
        if float(control[1]) != 0.0:
            self.num_skipped += 1
            names = self.parameter_names()
            finite = [bool(n.isfinite()) for n in norms] or [bool(s.gradient.isfinite().all()) for s in stores]
            self.last_overflow = [names[s.owner] for s, fine in zip(stores, finite, strict=True) if not fine]
            for store in stores:
                store.step -= 1
            self.auditor.drop()
            return
        self._take_audit()

    def _take_audit(self) -> None:
        """Settle the audits of the last step, and raise alarms."""
        if not self.auditor.fresh:
            return
        self.last_audit = self.auditor.settle()
        storages = {parameter: store.storage for parameter, store in self._stores.items()}
        if alarms := self.auditor.alarms(self.parameter_names(), storages):
            self.on_alarm(alarms)

    # ── what is kept ────────────────────────────────────────────────────────────────────────────────────────────────

    def adopt(
        self, values: Mapping[Tensor, Tensor], states: Mapping[Tensor, Mapping[str, Tensor | int]] | None = None
    ) -> None:
        """Take float32 weights, and perhaps states, into the storage: parameters become their visible part.

        Args:
            values: the float32 weight of each parameter, of its shape; cut to the nearest.
            states: of each parameter its states as float32, by name, and under ``step`` the number of steps taken. A
                code that rounds stochastically does so here: the nearest of many equal values would all err alike.
        """
        for group in self.param_groups:
            mine = [p for p in group["params"] if p in values]
            self._initialise(group, mine)
            for place, parameter in enumerate(mine):
                store, given = self._stores[parameter], (states or {}).get(parameter, {})
                store.adopt(local_of(values[parameter]))
                store.step = int(given.get("step", store.step))
                seed = torch.tensor(
                    step_seed(group["seed"], -1 - place), dtype=torch.int32, device=store.parameter.device
                )
                for name, value in given.items():
                    if isinstance(value, Tensor) and name != "step":
                        store.put(name, local_of(value), seed)

    def stored(self, parameter: Tensor, name: str = "weight") -> Tensor:
        """The value that is kept, as float32.

        Args:
            parameter: one of the optimizer's parameters.
            name: ``"weight"``, or a state such as ``"exp_avg"`` or ``"exp_avg_sq"``.
        Returns:
            float32 tensor of the parameter's shape, a copy (a DTensor where the parameter is one). Before the first step
            the weight is the parameter itself and moments are zero.
        Raises:
            KeyError: the parameter or the name is unknown.
        """
        if parameter not in self._stores:
            group = next((g for g in self.param_groups if any(parameter is p for p in g["params"])), None)
            if group is None:
                raise KeyError("this tensor is not one of the optimizer's parameters")
            rule = self._rule_of(group, parameter)
            known = rule.states(tuple(parameter.shape), group) if isinstance(rule, MatrixRule) else rule.states
            if name != "weight" and name not in known:
                raise KeyError(f"rule '{rule.name}' keeps {('weight', *known)}, not '{name}'")
            return parameter.detach().float().clone() if name == "weight" else torch.zeros_like(parameter).float()
        return placed_like(parameter, self._stores[parameter].stored(name))

    def bytes_per_param(self) -> float:
        """Bytes of weights, gradients (in the parameters' format) and states per parameter, counted from live tensors.

        A gradient that is released as it arrives (:func:`narrowgauge.optim.release.release_gradients`) is not counted.
        """
        parameters = [local_of(p) for p in self._parameters()]
        held = [local_of(p) for p in self._parameters() if p not in self.released]
        states = [words for store in self._stores.values() for words in store.tensors()]
        total = sum(t.numel() * t.element_size() for t in [*parameters, *held, *states])
        return total / max(1, sum(p.numel() for p in parameters))

    def parameter_names(self) -> dict[Tensor, str]:
        """The name of each parameter: as given, else ``"param 0"``, ``"param 1"`` …"""
        names: dict[Tensor, str] = {}
        for group in self.param_groups:
            given = group.get("param_names") or [None] * len(group["params"])
            for parameter, name in zip(group["params"], given, strict=True):
                names[parameter] = name or f"param {len(names)}"
        return names

    # ── saving and loading ──────────────────────────────────────────────────────────────────────────────────────────

    def state_dict(self) -> dict[str, Any]:
        """The state, lossless: every plane as a tensor of the parameter's shape in its packed form.

        Returns:
            As in ``torch.optim``; a state that is a plain tensor has torch's key (``exp_avg``), others are ``tail``,
            ``master`` (float32), ``weight_low`` and ``packed``, and ``…_bound`` is the scale of each row. ``step`` is a 0-d
            float32 tensor. DTensors where the parameter is one.
        """
        handle = self.register_state_dict_post_hook(_show_states, prepend=True)  # before hooks of others see it
        try:
            result: dict[str, Any] = super().state_dict()
            return result
        finally:
            handle.remove()

    def _numbered_states(self) -> dict[int, dict[str, Tensor]]:
        index = {p: k for k, p in enumerate(self._parameters())}
        return {index[p]: entry for p, entry in self.states().items()}

    def states(self) -> dict[Tensor, dict[str, Tensor]]:
        """The part of :meth:`state_dict` that belongs to each parameter."""
        self.settle()
        result = {}
        for parameter, store in self._stores.items():
            values = {
                name: value if name in store.extras else placed_like(parameter, value)
                for name, value in store.in_parameter_order().items()
            }
            result[parameter] = {"step": torch.tensor(float(store.step)), **values}
        return result

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` gave; nothing is cast, and a state that is refused changes nothing.

        Raises:
            RecipeError: the state was saved from another storage or shape.
            ValueError: the groups do not match, as in ``torch.optim``.
        """
        state = self.state
        handle = self.register_load_state_dict_pre_hook(_take_states)  # after hooks of others have changed it
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
            self.state = state

    def load_states(self, entries: dict[Tensor, dict[str, Tensor]]) -> None:
        """Restore what :meth:`states` gave, in place of all states; one that is refused changes nothing.

        Raises:
            RecipeError: a state was saved from another storage or shape.
        """
        before = self._stores, self._buckets, dict(self.state)
        self._stores, self._buckets = {}, []
        self.state.clear()
        try:
            for group in self.param_groups:
                loaded = [p for p in group["params"] if p in entries]
                self._initialise(group, loaded)
                for parameter in loaded:
                    self._stores[parameter].take({n: local_of(v) for n, v in entries[parameter].items()})
                    self._stores[parameter].step = int(entries[parameter]["step"])
        except BaseException:
            self._stores, self._buckets = before[:2]
            self.state.clear()
            self.state.update(before[2])
            raise
        self._unsettled, self.auditor = None, Auditor()

    def _parameters(self) -> list[Tensor]:
        """All parameters, in the order of :meth:`state_dict`."""
        return [p for group in self.param_groups for p in group["params"]]

    def __getstate__(self) -> dict[str, Any]:
        options = {name: getattr(self, name) for name in _OPTIONS}
        return {**super().__getstate__(), "state": {}, "options": options, "saved": self._numbered_states()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        options, saved = state.pop("options", None), state.pop("saved", None)
        if options is not None:
            self._start(**options)
        super().__setstate__(state)
        if saved is not None:
            parameters = self._parameters()
            self.load_states({parameters[number]: entry for number, entry in saved.items()})


def _show_states(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """A hook: what is kept, as it is handed out, in place of the words it is kept in."""
    assert isinstance(optimizer, Optimizer)
    state_dict["state"] = optimizer._numbered_states()


def _take_states(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """A hook: load what belongs to parameters, uncast, and leave the groups to torch."""
    assert isinstance(optimizer, Optimizer)
    saved = copy.deepcopy(state_dict["param_groups"])
    agree(optimizer.param_groups, saved)
    # By numbers, or by names where a distributed checkpoint has put them.
    listed = [key for group in saved for key in group["params"]]
    members = dict(zip(listed, optimizer._parameters(), strict=True))
    if strange := [key for key in state_dict["state"] if key not in members]:
        raise RecipeError(f"the state to load has an entry {strange[0]!r}, which none of its param groups lists.")
    optimizer.load_states({members[key]: entry for key, entry in state_dict["state"].items()})
    return {"state": {}, "param_groups": saved}


def _name_each_once(group: dict[str, Any]) -> None:
    """A tied weight that is given twice is one parameter, under its first name; torch has warned of it."""
    first: dict[Tensor, int] = {}
    for place, parameter in enumerate(group["params"]):
        first.setdefault(parameter, place)
    for key in ("params", "param_names"):
        if key in group:
            group[key] = [group[key][place] for place in first.values()]
