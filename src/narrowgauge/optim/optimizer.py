"""The one optimizer: a rule joined with a storage, behind ``torch.optim.Optimizer``'s own interface.

Nothing here knows a format or a formula. A step asks every parameter's :class:`~narrowgauge.optim.stores.Store` for its
words, hands them to the kernel of its (rule, storage), and counts. Gradient clipping and the decision to skip a step with
a non-finite gradient are two scalars that the kernel reads; the host looks at the decision after the fact.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any, TypedDict, TypeVar

import torch
from torch import Tensor

from narrowgauge.errors import RecipeError
from narrowgauge.numerics.scaling import LossScaler
from narrowgauge.optim.auditing import Alarm, Auditor, warn_of
from narrowgauge.optim.clipping import GradientNorm, control_scalars
from narrowgauge.optim.entries import States
from narrowgauge.optim.keeping import Keeping
from narrowgauge.optim.kernels import StepKernel
from narrowgauge.optim.options import check_options, check_step
from narrowgauge.optim.outside import let_go
from narrowgauge.optim.rules.elementwise import Rule
from narrowgauge.optim.rules.matrix import MatrixRule
from narrowgauge.optim.shards import local_of
from narrowgauge.optim.stepping import Stepper
from narrowgauge.optim.stores import NO_GRADIENT, Bucket, Store
from narrowgauge.optim.validation import check_range, check_storage, gradient_of, known_row, tell_slow_matmuls
from narrowgauge.spec.storages import Storage

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
    """What every optimizer of ours takes beside its rule's own options; see :class:`Optimizer`."""

    storage: str | Storage
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


class Optimizer(Keeping):
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
            finite is skipped, and the scaler told. A step is refused if the scaler was not asked for a scale since the last
            one. ``torch.amp.GradScaler`` works too, and is not named here.
        amsgrad, fused, foreach, capturable, differentiable: for callers of ``torch.optim``; false or ``None``.

    Raises:
        RecipeError: an option out of range, an unknown storage, or parameters in another format than the storage's visible
            one, or a storage whose arithmetic the rule cannot be computed in.

    Cost: see ``docs/log.md``; ``word`` moves 14 bytes a parameter against 28 for a float32 AdamW.
    """

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
        amsgrad: bool | None = None,
        fused: bool | None = None,
        foreach: bool | None = None,
        capturable: bool | None = None,
        differentiable: bool | None = None,
    ) -> None:
        flags = {"fused": fused, "foreach": foreach, "capturable": capturable, "differentiable": differentiable}
        check_options({**defaults, **flags, "amsgrad": amsgrad}, rule)
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
        self._request: object = None if self.loss_scaler is None else self.loss_scaler.request
        self.grad_norm: Tensor | None = None
        self.last_control: Tensor | None = None
        # A gradient norm above which a step is skipped; a loop that judges spikes sets it before each step.
        self.skip_above = math.inf
        self.num_skipped = 0
        self.last_overflow: list[str] = []
        self.last_audit: Tensor | None = None
        self.auditor = Auditor()
        self.on_alarm: Callable[[list[Alarm]], None] = warn_of
        self._names: dict[Tensor, str] = {}
        self._states = States(self)
        self._stores: dict[Tensor, Store] = {}
        self._buckets: list[Bucket] = []
        self._kernels: dict[tuple[str, Storage], StepKernel] = {}
        self._norm: GradientNorm | None = None
        self.released: set[Tensor] = set()
        self._stepped = self._told_of_writes = False
        self._unsettled: tuple[Tensor, list[Store], list[Tensor]] | None = None

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether torch.amp.GradScaler leaves unscaling and skipping to `step`, in `grad_scale` and `found_inf`.

        Only where a loss is scaled for this optimizer, or must be: others take an optimizer that says yes for one whose
        gradients they cannot clip. Float16 gradients are among them, since GradScaler refuses to unscale those itself.
        """
        return self.loss_scaler is not None or any(p.dtype is torch.float16 for p in self._parameters())

    # ── the step ────────────────────────────────────────────────────────────────────────────────────────────────────

    @not_compiled
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
        if len(self._stores) > sum(len(group["params"]) for group in self.param_groups):
            self._forget_strangers()
        for group in self.param_groups:
            check_step(group, self.rule)
        work = [(group, self._stores_with_gradient(group)) for group in self.param_groups]
        stores = [store for _, members in work for store in members]
        if not stores:
            self._take_audit()  # of parameters stepped alone
            return
        if not self._stepped:
            self._stepped = True
            tell_slow_matmuls(self.param_groups)
            for kernel in self._kernels.values() if self.audit_every else ():
                kernel.compile_audit_elsewhere(stores[0].parameter.device)
        gradients = [store.owner.grad for store in stores]
        control = self._control([g for g in gradients if g is not None], stores[0].parameter.device)
        self.last_control = control
        for group, members in work:
            self._advance(group, members, control)
        on_cpu = control.device.type == "cpu"
        # What the host reads later must not hold on to gradients: one flag for each says enough.
        may_skip = self.max_grad_norm is not None or self.loss_scaler is not None or self.skip_above < math.inf
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
        let_go(stores, self.audit_every)

    def _stores_with_gradient(self, group: dict[str, Any]) -> list[Store]:
        """The stores of a group's parameters that have a gradient, each with it; made where there are none yet."""
        self._states.take_writes()
        self._states.forget()
        parameters = [p for p in group["params"] if p.grad is not None]
        gradients = [gradient_of(p) for p in parameters]
        self._restate(group, parameters)
        self._initialise(group, parameters)
        stores = [self._stores[p] for p in parameters]
        for made in {store.asked for store in stores}:
            check_storage(group["storage"], made)
        self._look_at(stores, self.audit_every)
        for store, gradient in zip(stores, gradients, strict=True):
            store.gradient = local_of(gradient)
        return stores

    def _scale_of_loss(self, gradients: list[Tensor]) -> tuple[Tensor | None, bool]:
        """What gradients are to be divided by, and whether our own scaler is to be told of this step.

        Raises:
            RecipeError: nobody scaled the loss.
        """
        # torch.amp.GradScaler sets these two for the length of a step.
        theirs, found, scaler = getattr(self, "grad_scale", None), getattr(self, "found_inf", None), self.loss_scaler
        if scaler is None:
            return theirs, False
        if scaler.request is self._request:
            # Gradients of zero, by which distributed checkpoints make a state, have any scale.
            if found is None and any(bool(local_of(g).any()) for g in gradients):
                raise RecipeError(
                    "a step was to be taken whose loss was not scaled: the optimizer's loss_scaler was not asked for a "
                    "scale since its last step, and would divide the gradients by it.",
                    "Call optimizer.loss_scaler.scale(loss).backward(). Where a framework calls backward() itself, let its "
                    "own torch.amp.GradScaler scale the loss (fp16=True, '16-mixed'), or take a bfloat16 recipe.",
                )
            return theirs, False
        self._request = scaler.request
        ours = scaler.scale_tensor
        return ours if theirs is None else theirs.to(ours.device) * ours, True

    def _control(self, gradients: list[Tensor], device: torch.device) -> Tensor:
        scale, is_ours = self._scale_of_loss(gradients)
        found = getattr(self, "found_inf", None)
        if self.max_grad_norm is None and self.loss_scaler is None and self.skip_above == math.inf:
            return control_scalars(None, None, device, scale, found)
        if self._norm is None:
            self._norm = GradientNorm(compile=self._worth_compiling(sum(g.numel() for g in gradients)))
        norm = self._norm(gradients)
        control = control_scalars(norm, self.max_grad_norm, device, scale, found)
        self.grad_norm = norm if scale is None else norm / scale.to(norm.device)
        if is_ours and self.loss_scaler is not None:
            self.loss_scaler.update_(control[1] != 0)
        if self.skip_above < math.inf:
            control[1] = torch.maximum(control[1], (self.grad_norm > self.skip_above).to(control))
        return control

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

    def _forget_last_step(self) -> None:
        self._unsettled, self.auditor = None, Auditor()

    def _take_audit(self) -> None:
        """Settle the audits of the last step, and raise alarms."""
        if not self.auditor.fresh:
            return
        self.last_audit = self.auditor.settle()
        storages = {parameter: store.storage for parameter, store in self._stores.items()}
        if alarms := self.auditor.alarms(self.parameter_names(), storages):
            self.on_alarm(alarms)

    def __getstate__(self) -> dict[str, Any]:
        options = {name: getattr(self, name) for name in _OPTIONS}
        kept = {"options": options, "saved": self._numbered_states(), "state": dict(self._states.free)}
        return {**super().__getstate__(), **kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        options, saved, free = (state.pop(name, None) for name in ("options", "saved", "state"))
        if options is not None:
            self._start(**options)
        super().__setstate__(state)
        self._states.free = dict(free or {})
        if saved is not None:
            parameters = self._parameters()
            self.load_states({parameters[number]: entry for number, entry in saved.items()})
