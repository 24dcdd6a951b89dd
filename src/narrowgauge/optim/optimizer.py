"""The one optimizer: a rule joined with a storage, behind ``torch.optim.Optimizer``'s own interface.

Nothing here knows a format or a formula. A step asks every parameter's :class:`~narrowgauge.optim.stores.Store` for its
words, hands them to the kernel of its (rule, storage), and counts. Gradient clipping and the decision to skip a step with
a non-finite gradient are two scalars that the kernel reads; the host looks at the decision after the fact.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from narrowgauge.errors import RecipeError
from narrowgauge.numerics.rounding import step_seed
from narrowgauge.optim.auditing import Alarm, Auditor, audited_parts, warn_of
from narrowgauge.optim.checks import agree, check_range, check_visible, gradient_of, known_row
from narrowgauge.optim.clipping import GradientNorm, control_scalars
from narrowgauge.optim.elementwise import Rule
from narrowgauge.optim.kernels import StepKernel
from narrowgauge.optim.stores import NO_GRADIENT, Bucket, Store, make_stores, write_back
from narrowgauge.storages import Storage, for_vectors

WORTH_COMPILING = 1 << 18
"""Elements of one storage from which compiling its kernel pays within a short run."""
_OPTIONS = ("rule", "max_grad_norm", "audit_every", "compile", "rows")


class Optimizer(torch.optim.Optimizer):
    """An update rule whose weights and moments are kept in a storage.

    Law: for a given history of gradients every stored bit is a function of (seed, that history) alone: not of where its
    tensor was cut, of chunking, number of threads, or whether the kernel is compiled. Parameters of one dimension
    are kept as the row's ``vectors`` says (``master`` for ours), since they cost nothing and fail first: a model
    flattened into one long vector is therefore kept whole.

    Args:
        params: parameters, ``(name, parameter)`` pairs, or groups, as in ``torch.optim``; a group may set ``storage``.
            Parameters are already in the storage's visible format (``narrowgauge.prepare`` does that, without losing
            the bits that it cuts).
        rule: the update rule.
        defaults: the rule's options, per group.
        storage: a row of ``narrowgauge.STORAGES``, or its name.
        max_grad_norm: clip gradients to this L2 norm over all parameters; ``None`` does not. With it, a step whose norm
            is not finite changes nothing and is counted in ``num_skipped``.
        seed: seed of the stochastic rounding.
        audit_every: audit every so many steps; 0 never.
        compile: compile the kernels; ``None`` decides by size.

    Raises:
        RecipeError: an unknown storage, or parameters in another format than the storage's visible one.

    Cost: see ``docs/log.md``; ``word`` moves 14 bytes a parameter against 28 for a float32 AdamW.
    """

    # torch.amp.GradScaler then leaves unscaling and skipping to `step`, in `grad_scale` and `found_inf`.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: Iterable[Any],
        rule: Rule,
        defaults: dict[str, Any],
        *,
        storage: str | Storage = "word",
        max_grad_norm: float | None = None,
        seed: int = 0,
        audit_every: int = 10,
        compile: bool | None = None,
    ) -> None:
        check_range("audit_every", audit_every, 0)
        if max_grad_norm not in (None, math.inf):  # infinity clips nothing, but skips what is not finite
            check_range("max_grad_norm", max_grad_norm, 0, above=True)
        row = known_row(storage, {})
        self._start(
            rule=rule, max_grad_norm=max_grad_norm, audit_every=audit_every, compile=compile, rows={row.name: row}
        )
        super().__init__(params, {**defaults, "storage": row.name, "seed": seed})

    def _start(self, **options: Any) -> None:
        self.rule: Rule = options["rule"]
        self.rows: dict[str, Storage] = options["rows"]
        self.max_grad_norm: float | None = options["max_grad_norm"]
        self.audit_every: int = options["audit_every"]
        self.compile: bool | None = options["compile"]
        self.grad_norm: Tensor | None = None
        self.num_skipped = 0
        self.last_audit: Tensor | None = None
        self.auditor = Auditor()
        self.on_alarm: Callable[[list[Alarm]], None] = warn_of
        self._stores: dict[Tensor, Store] = {}
        self._buckets: list[Bucket] = []
        self._kernels: dict[Storage, StepKernel] = {}
        self._norm: GradientNorm | None = None
        self._stepped = False
        self._unsettled: tuple[Tensor, list[Store]] | None = None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, as in ``torch.optim``; the group may name its own ``storage``.

        Raises:
            RecipeError: an unknown storage, or a parameter in another format than its visible one.
        """
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            row = known_row(group["storage"], self.rows)
            self.rows[row.name], group["storage"] = row, row.name
            for parameter in group["params"]:
                check_visible(parameter, self._storage_of(group, parameter))
        except RecipeError:
            self.param_groups.pop()
            raise

    def _storage_of(self, group: dict[str, Any], parameter: Tensor) -> Storage:
        row = known_row(group["storage"], self.rows)
        return for_vectors(row) if parameter.ndim < 2 else row

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
            return
        if not self._stepped:
            self._stepped = True
            for kernel in self._kernels.values() if self.audit_every else ():
                kernel.compile_audit_elsewhere(stores[0].parameter.device)
        control = self._control([store.gradient for store in stores])
        for group, members in work:
            self._step_group(group, members, control)
        for store in stores:
            store.step += 1
            store.gradient = NO_GRADIENT
        self._unsettled = (control, stores)
        if control.device.type == "cpu":
            self.settle()  # nothing to wait for

    def _stores_with_gradient(self, group: dict[str, Any]) -> list[Store]:
        """The stores of a group's parameters that have a gradient, each with it; made where there are none yet."""
        parameters = [p for p in group["params"] if p.grad is not None]
        gradients = [gradient_of(p) for p in parameters]
        self._initialise(group, parameters)
        stores = [self._stores[p] for p in parameters]
        for store, gradient in zip(stores, gradients, strict=True):
            store.gradient = gradient
        return stores

    def _control(self, gradients: list[Tensor]) -> Tensor:
        device = gradients[0].device
        # torch.amp.GradScaler sets these two for the length of a step.
        outside = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if self.max_grad_norm is None:
            return control_scalars(None, None, device, *outside)
        if self._norm is None:
            self._norm = GradientNorm(compile=self._worth_compiling(sum(g.numel() for g in gradients)))
        self.grad_norm = self._norm(gradients)
        return control_scalars(self.grad_norm, self.max_grad_norm, device, *outside)

    def _worth_compiling(self, num_elements: int) -> bool:
        return self.compile if self.compile is not None else num_elements >= WORTH_COMPILING

    def _initialise(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        """Give states to parameters that have none."""
        by_row: dict[tuple[Storage, torch.device], list[Tensor]] = {}
        for parameter in parameters:
            if parameter not in self._stores:
                row = self._storage_of(group, parameter)
                by_row.setdefault((row, parameter.device), []).append(parameter)
        for (row, _), members in by_row.items():
            stores, buckets = make_stores(members, row, self._kernel(row))
            self._buckets += buckets
            for store in stores:
                if row.master:
                    store.adopt(store.parameter)
                self._stores[store.parameter] = store
                self.state[store.parameter] = dict(store.words)  # internal words; state_dict() says them in order

    def _kernel(self, storage: Storage) -> StepKernel:
        if storage not in self._kernels:
            rows: list[tuple[Storage, Tensor]] = [
                (self._storage_of(g, p), p) for g in self.param_groups for p in g["params"]
            ]
            total = sum(p.numel() for row, p in rows if row == storage)
            self._kernels[storage] = StepKernel(self.rule, storage, compile=self._worth_compiling(total))
        return self._kernels[storage]

    def _step_group(self, group: dict[str, Any], stores: list[Store], control: Tensor) -> None:
        scalars: dict[int, tuple[Tensor, Tensor, bool]] = {}
        for count in {store.step + 1 for store in stores}:
            values = torch.tensor([1.0, 0.0, *self.rule.prepare(group, count)], device=control.device)
            values[:2] = control
            seed = torch.tensor(step_seed(group["seed"], count), dtype=torch.int32, device=control.device)
            scalars[count] = values, seed, self.audit_every > 0 and count % self.audit_every == 0
        waiting = dict.fromkeys(stores)
        for bucket in self._buckets:
            steps = {member.step if member in waiting else None for member in bucket.members}
            if len(steps) == 1 and None not in steps:
                self._step_bucket(bucket, *scalars[bucket.members[0].step + 1])
                for member in bucket.members:
                    del waiting[member]
        plain: dict[tuple[StepKernel, int], list[list[Tensor]]] = {}
        for store in waiting:
            count, words = store.step + 1, store.direct_words()
            if words is None:
                self._step_pieces(store, *scalars[count])
            elif scalars[count][2]:
                self._step_audited(store, words, *scalars[count][:2])
            else:
                plain.setdefault((store.kernel, count), []).append(words)
        for (kernel, count), tensors in plain.items():
            kernel.run_each(tensors, *scalars[count][:2])

    def _step_bucket(self, bucket: Bucket, values: Tensor, seed: Tensor, audited: bool) -> None:
        bucket.gather()
        words, kernel = [bucket.weights, bucket.gradients, *bucket.plane_words], bucket.members[0].kernel
        if audited:
            rows = kernel.run_bucket(words, values, seed, bucket.segments())
            for member, sums in zip(bucket.members, rows, strict=True):
                self.auditor.add(member.parameter, sums)
        else:
            kernel.run(words, values, seed)
        bucket.scatter()

    def _step_audited(self, store: Store, words: list[Tensor], values: Tensor, seed: Tensor) -> None:
        for part, watched in audited_parts(words[0].numel(), (store.step + 1) // self.audit_every):
            sums = store.kernel.run([w[part] for w in words], values, seed, audited=watched)
            if sums is not None:
                self.auditor.add(store.parameter, sums)

    def _step_pieces(self, store: Store, values: Tensor, seed: Tensor, audited: bool) -> None:
        total: list[Tensor] = []
        for weight, slopes, planes, piece in store.pieces():
            sums = store.kernel.run([weight, slopes, *planes], values, seed, audited=audited)
            write_back(weight, piece)
            total += [] if sums is None else [sums]
        if total:
            self.auditor.add(store.parameter, torch.stack(total).sum(0))

    def settle(self) -> None:
        """Take note of what the last step decided: whether it was skipped, what its audit read, whether to warn."""
        if self._unsettled is None:
            return
        (control, stores), self._unsettled, self.last_audit = self._unsettled, None, None
        if float(control[1]) != 0.0:
            self.num_skipped += 1
            for store in stores:
                store.step -= 1
            self.auditor.drop()
            return
        if not self.auditor.fresh:
            return
        self.last_audit = self.auditor.settle()
        storages = {parameter: store.storage for parameter, store in self._stores.items()}
        if alarms := self.auditor.alarms(self.parameter_names(), storages):
            self.on_alarm(alarms)

    # ── what is kept ────────────────────────────────────────────────────────────────────────────────────────────────

    def adopt(self, values: dict[Tensor, Tensor]) -> None:
        """Take float32 weights into the storage before the first step: parameters become their visible part.

        Args:
            values: the float32 weight of each parameter.
        """
        for group in self.param_groups:
            mine = [p for p in group["params"] if p in values]
            self._initialise(group, mine)
            for parameter in mine:
                self._stores[parameter].adopt(values[parameter])

    def stored(self, parameter: Tensor, name: str = "weight") -> Tensor:
        """The value that is kept, as float32.

        Args:
            parameter: one of the optimizer's parameters.
            name: ``"weight"``, ``"exp_avg"`` or ``"exp_avg_sq"``.
        Returns:
            float32 tensor of the parameter's shape, a copy. Before the first step the weight is the parameter itself and
            moments are zero.
        Raises:
            KeyError: the parameter or the name is unknown.
        """
        if name != "weight" and name not in self.rule.states:
            raise KeyError(f"rule '{self.rule.name}' keeps {('weight', *self.rule.states)}, not '{name}'")
        if parameter not in self._stores:
            if not any(parameter is p for p in self._parameters()):
                raise KeyError("this tensor is not one of the optimizer's parameters")
            return parameter.detach().float().clone() if name == "weight" else torch.zeros_like(parameter).float()
        return self._stores[parameter].stored(name)

    def bytes_per_param(self) -> float:
        """Bytes of weights, gradients (in the parameters' format) and states per parameter, counted from live tensors."""
        parameters = self._parameters()
        states = [words for store in self._stores.values() for words in store.words.values()]
        total = sum(t.numel() * t.element_size() for t in [*parameters, *parameters, *states])
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
            As in ``torch.optim``; a state that is a plain tensor has torch's key (``exp_avg``), others are ``tail``
            (int16), ``master`` (float32) and ``packed`` (int32). ``step`` is a 0-d float32 tensor.
        """
        result: dict[str, Any] = super().state_dict()
        index = {p: k for k, p in enumerate(self._parameters())}
        result["state"] = {index[p]: entry for p, entry in self.states().items()}
        return result

    def states(self) -> dict[Tensor, dict[str, Tensor]]:
        """The part of :meth:`state_dict` that belongs to each parameter."""
        self.settle()
        return {
            p: {"step": torch.tensor(float(store.step)), **store.in_parameter_order()}
            for p, store in self._stores.items()
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` gave; nothing is cast, and a state that is refused changes nothing.

        Raises:
            RecipeError: the state was saved from another storage or shape.
            ValueError: the groups do not match, as in ``torch.optim``.
        """
        saved = copy.deepcopy(state_dict["param_groups"])
        agree(self.param_groups, saved)
        parameters = self._parameters()
        self.load_states({parameters[int(k)]: entry for k, entry in state_dict["state"].items()})
        state = self.state
        super().load_state_dict({"state": {}, "param_groups": saved})
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
                    self._stores[parameter].take(entries[parameter])
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
        return {**super().__getstate__(), "state": {}, "options": options, "saved": self.state_dict()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        options, saved = state.pop("options", None), state.pop("saved", None)
        if options is not None:
            self._start(**options)
        super().__setstate__(state)
        if saved is not None:
            self.load_state_dict(saved)
