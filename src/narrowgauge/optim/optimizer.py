"""The one optimizer: a rule and a storage, with the interface of ``torch.optim.Optimizer``.

Nothing here depends on a format or a formula. A step reads the state of every parameter through a
:class:`~narrowgauge.optim.step.state.LocalState`, and passes its tensors to the kernel of its (rule,
storage). The kernel reads two scalars: one clips gradients, one skips a step
with a non-finite gradient. The host reads the decision after the step.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge.errors import RecipeError, warn_caller
from narrowgauge.numerics.dtensor import local_of, placed_like, sendable
from narrowgauge.numerics.hashing import step_seed
from narrowgauge.optim import validation
from narrowgauge.optim.audit.audit import Alarm, Auditor, warn_of
from narrowgauge.optim.clip import step_control
from narrowgauge.optim.kernel_choice import Group, KernelChoice
from narrowgauge.optim.loading import matched, saved_states, torch_states
from narrowgauge.optim.low_bits import fill_state, lacks_low_bits
from narrowgauge.optim.roster import Roster
from narrowgauge.optim.rules.matrix import AnyRule, MatrixRule
from narrowgauge.optim.step.bit_layout import roles
from narrowgauge.optim.step.parameter_formats import (
    KEPT,
    ROUNDED,
    batch_norms,
    is_shared_by_ranks,
    refuse_shared_memory,
    round_in_place,
)
from narrowgauge.optim.step.state import State, bytes_per_param
from narrowgauge.optim.step.state_values import store_state, store_weight, stored
from narrowgauge.optim.step.step import run
from narrowgauge.spec.require import require_choice, require_number
from narrowgauge.spec.storages import Storage, get_storage
from narrowgauge.torch_support.torch_hooks import members_of
from narrowgauge.torch_support.torch_names import HostCopy, never_compiled, plain_name

Params = nn.Module | Iterable[Any]
"""What an optimizer takes as its parameters."""


class Optimizer(torch.optim.Optimizer):
    """Step weights by an update rule, and store weights and states in the formats of a storage.

    Invariant: for a given history of gradients every stored bit depends only on (seed, that
    history). It does not depend on sharding, chunks, the number of threads, or compiled kernels.
    (Matrix rules multiply whole matrices: their bits are the same for any sharding, but may change
    with threads and devices.) Parameters with one dimension are few and freeze first: the storage's
    ``vectors`` names theirs (``master`` for ours). A model flattened into one long vector counts as
    one.

    You may write weights at any time. A tail moves a written weight by at most half an ulp. A
    written weight replaces its master.

    Args:
        params: parameters, ``(name, parameter)`` pairs, or groups, as in ``torch.optim``; or a
            module, whose batch norms then stay float32. A group
            may set ``storage``. If the optimizer has a matrix rule, a group may set
            ``rule="adamw"``. Float32 parameters with ``requires_grad`` are rounded in place to the
            storage's visible format, and the storage keeps the bits that this cuts: put those that
            stay float32 into a group with ``storage="float32"``. Parameters in another format are
            stored in its counterpart.
        rule: the update rule.
        defaults: the rule's options, which groups may override.
        storage: a name in ``narrowgauge.spec.STORAGES``.
        max_grad_norm: clip gradients to this L2 norm over all parameters; ``None`` does not clip.
            With it, a step whose norm is not finite changes nothing. ``num_skipped`` counts such
            steps.
        seed: seed of the stochastic rounding, the same on every rank.
        audit_every: steps between audits; 0 never audits.
        compile: build and compile the steps. ``None`` leaves out steps on a CPU that have no kernel,
            of fewer than 2¹⁸ elements. :meth:`ran_compiled` returns the outcome.
        low_bits: where a weight of 16 bits begins: at a ``"random"`` place in its rounding cell
            (:mod:`narrowgauge.optim.low_bits`), or at ``"zero"``, as a float32 copy begins. Low
            bits that are known stay.
        others: ``fused``, ``foreach``, ``capturable`` and ``differentiable``, which are ignored.
            They say how ``torch.optim`` steps.

    Raises:
        RecipeError: an option is out of range, the storage is unknown, parameters are not in its
            visible format, or the rule does not support its arithmetic.
    """

    grad_norm: Tensor | None = None
    last_control: Tensor | None = None
    loss_scale: Tensor | None = None  # that of the last step, if there was one
    num_skipped = 0
    # Sums the gradients over ranks before a step, if set. `narrowgauge.prepare` sets it.
    reduction: Any = None
    # The loss must be scaled by torch.amp.GradScaler. `prepare` sets it for float16.
    scales_loss = False
    _stepped = False
    _roster: Roster | None = None
    _is_complete = False
    # Whether the last step was skipped, while this is on a device, and its counts of steps.
    _pending: Any = None

    def __init__(
        self, params: Params, rule: AnyRule, defaults: dict[str, Any], *, storage: str = "word",
        max_grad_norm: float | None = None, seed: int = 0, audit_every: int = 10, compile: bool | None = None,
        low_bits: str = "random", **others: Any,
    ) -> None:  # fmt: skip
        names = signature(type(self)).parameters.keys() | signature(Optimizer).parameters.keys()
        unnamed = {"params", "rule", "defaults", "options", "others"}
        validation.check_arguments(type(self), sorted(names - unnamed), others)
        validation.check_options(defaults, rule)
        require_choice("compile", compile, (None, True, False))
        require_number("lr", defaults["lr"])
        require_number("audit_every", audit_every, is_whole=True)
        # Infinity never clips, but skips steps with a non-finite norm.
        if max_grad_norm not in (None, math.inf):
            require_number("max_grad_norm", max_grad_norm, is_open=True)
        self._begin()
        self._stays_float32: set[Tensor] = set()
        if isinstance(params, nn.Module):
            for norm in batch_norms(params):
                self._stays_float32.update(norm.parameters(recurse=False))
            params = [pair for pair in params.named_parameters() if pair[1].requires_grad]
        self.rule = rule
        self.kernels = KernelChoice(rule)
        self.compile = compile
        self.max_grad_norm = max_grad_norm
        self.audit_every = audit_every
        self._to_round: dict[Tensor, str] = {}  # their visible formats
        options = {"storage": storage, "seed": seed, "low_bits": low_bits}
        super().__init__(params, {**defaults, **options})
        self._is_complete = True
        self._round()

    def _begin(self) -> None:
        """Set what an optimizer or a copy of one begins with."""
        self.auditor = Auditor()
        self.on_alarm: Callable[[list[Alarm]], None] = warn_of
        self.ran: dict[str, str] = {}
        self._names: dict[Tensor, str] = {}

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Return whether torch.amp.GradScaler leaves unscaling and skipping to `step`, in
        `grad_scale` and `found_inf`.

        Frameworks do not clip then. So it is true only for float16 gradients, which GradScaler does
        not unscale, and for a compute in float16.
        """
        return self.scales_loss or any(p.dtype is torch.float16 for p in members_of(self))

    def add_param_group(self, param_group: Group) -> None:
        """Add parameters, as in ``torch.optim``.

        The group may set its own ``storage``. A refused group changes nothing.

        Raises:
            RecipeError: the rule cannot obey an option, the storage is unknown, or no storage like
                it holds a parameter's format.
        """
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            validation.check_options(group, self.rule)
            refuse_shared_memory(members_of(self))
            to_round = self._formats_of_rounding(group)
            if to_round and is_shared_by_ranks():
                asked = get_storage(group["storage"])
                # With moments in 8 bits, which a matrix rule does not take.
                is_wide = isinstance(self.rule, MatrixRule) or asked.exp_avg.bits == 32
                row = get_storage("float32" if is_wide else "float32-states8")
                group["storage"] = row.name
                warn_caller(KEPT.format(row, asked))
                to_round.clear()
            for parameter in group["params"]:
                if parameter.requires_grad:  # a frozen one is checked when it has a gradient
                    self.kernels.pair_of(group, parameter, to_round.get(parameter))
        except Exception:
            self.param_groups.pop()
            raise
        self._to_round |= to_round
        if self._is_complete:  # else all groups are checked first
            self._round()

    def _formats_of_rounding(self, group: Group) -> dict[Tensor, str]:
        """Return the visible format of each parameter of a group that is to be rounded to one."""
        formats = {}
        for parameter in group["params"]:
            visible = self.kernels.row_of(group, parameter).visible
            is_wide = parameter.requires_grad and parameter.dtype is torch.float32
            if is_wide and visible != "float32" and parameter not in self._stays_float32:
                formats[parameter] = visible
        return formats

    def _round(self) -> None:
        """Round float32 parameters in place, and store the values that they had."""
        values = round_in_place(self._to_round)
        self._to_round = {}
        if not values:
            return
        self.adopt(values)
        total = sum(value.numel() for value in values.values())
        storages = sorted({f"'{self.storage_of(parameter).name}'" for parameter in values})
        warn_caller(ROUNDED.format(total, ", ".join(storages)))

    # ── what belongs to a parameter ───────────────────────────────────────────────────────────────

    def has_state(self, parameter: Tensor) -> bool:
        """Return whether a parameter has a state. Other code may have left notes in its place."""
        return "step" in self.state.get(parameter, ())

    def group_of(self, parameter: Tensor) -> Group:
        """Return the param group of a parameter.

        Raise a ``KeyError`` for a tensor that the optimizer does not have.
        """
        for group in self.param_groups:
            if any(parameter is p for p in group["params"]):
                return group
        raise KeyError("this tensor is not one of the optimizer's parameters")

    def storage_of(self, parameter: Tensor) -> Storage:
        """Return the storage of one of the optimizer's parameters."""
        return self.kernels.storage_in(self.group_of(parameter), parameter)

    def parameter_names(self) -> dict[Tensor, str]:
        """Return the name of each parameter: the passed name, else the model's, else ``"param 0"``,
        ``"param 1"`` …
        """
        return self._names_by(self._names)

    def _names_by(self, of_model: Mapping[Tensor, str]) -> dict[Tensor, str]:
        names: dict[Tensor, str] = {}
        for group in self.param_groups:
            passed = group.get("param_names") or [""] * len(group["params"])
            for parameter, name in zip(group["params"], passed, strict=False):
                names[parameter] = name or of_model.get(parameter) or f"param {len(names)}"
        return names

    def name_parameters(self, model: nn.Module) -> None:
        """Use a model's names for unnamed parameters."""
        self._names |= {p: plain_name(name) for name, p in model.named_parameters()}

    # ── states ────────────────────────────────────────────────────────────────────────────────────

    def ran_compiled(self) -> dict[str, str]:
        """Return which code the last step ran, by rule and storage: ``"C++"``, ``"Triton"``, or why
        its definition.

        Nothing runs in a step that a CPU skips.

        Example:
            >>> import torch, narrowgauge as ng
            >>> weight = torch.nn.Parameter(torch.ones(8, 8, dtype=torch.bfloat16))
            >>> weight.grad, optimizer = torch.ones_like(weight), ng.AdamW([weight], lr=1e-3)
            >>> optimizer.step()
            >>> optimizer.ran_compiled()
            {'adamw/word': 'C++'}
        """
        return dict(self.ran)

    def adopt(
        self,
        values: Mapping[Tensor, Tensor],
        states: Mapping[Tensor, Mapping[str, Tensor | int]] | None = None,
    ) -> None:
        """Store weights, and perhaps states.

        Parameters become the visible part of the weights. Refused values change nothing.

        Args:
            values: the float32 weight of each parameter, of its shape, rounded to nearest.
            states: the float32 states of each parameter by name, and ``step``, the number of steps
                taken. A stochastic code rounds stochastically: to the nearest, many equal values
                would have the same error.
        Raises:
            KeyError: a tensor is not a parameter of the optimizer.
            RecipeError: a state has no weight or an unknown name, or a value has another shape.
        """
        states = states or {}
        if not states.keys() <= values.keys():
            raise RecipeError("Cannot adopt states without the weights of their parameters.")
        for p, weight in values.items():
            values_of_p = {"weight": weight, **states.get(p, {})}
            self.kernels.check_values(self.group_of(p), p, values_of_p)
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p in values]
            with torch.no_grad():
                self.make_missing(group, parameters, fills=False)
            for index, parameter in enumerate(parameters):
                state = self.kernels.local_state(group, parameter, self.state[parameter])
                store_weight(state, local_of(values[parameter]))
                seed = step_seed(group["seed"], -1 - index)  # no step uses it
                for name, value in states.get(parameter, {}).items():
                    if name == "step":
                        state.entry["step"].fill_(int(value))
                    else:
                        store_state(state, name, local_of(value), seed)
            self._fill(group, [p for p in parameters if lacks_low_bits(p, values[p])])

    def _fill(self, group: Group, parameters: Sequence[Tensor]) -> None:
        """Fill the low bits of weights whose low bits are unknown, if the group asks for it."""
        if group["low_bits"] == "random":
            names = self._names_by({})
            for p in parameters:
                state = self.kernels.local_state(group, p, self.state[p])
                fill_state(state, group["seed"], names[p])

    def make_missing(
        self, group: Group, parameters: Sequence[Tensor], *, fills: bool = True
    ) -> None:
        """Make the states of parameters without one. Fill their low bits, or leave them at zero."""
        missing = [p for p in parameters if not self.has_state(p)]
        for parameter in missing:
            state = self.kernels.local_state(group, parameter).entry
            state.update(self.state.get(parameter, {}))  # notes of other code
            self.state[parameter] = state
        if missing and fills:
            self._fill(group, missing)

    def stored(self, parameter: Tensor, name: str = "weight") -> Tensor:
        """Return the stored value as float32, or float64 if the storage computes in it.

        Args:
            parameter: one of the optimizer's parameters.
            name: ``"weight"``, or a state such as ``"exp_avg"`` or ``"exp_avg_sq"``.
        Returns:
            A copy in the parameter's shape, a DTensor if the parameter is one. States of a matrix
            rule may have other shapes, and are whole on every rank. Before the first step the
            weight is the parameter itself, without states.
        Raises:
            KeyError: the parameter or the name is unknown.
        """
        group = self.group_of(parameter)
        if name == "weight" and not self.has_state(parameter):
            return parameter.detach().to(torch.float32, copy=True)
        state = self.kernels.local_state(group, parameter, self.state.get(parameter, {}))
        names = *roles(state.storage), *state.extras
        if name not in names:
            raise KeyError(f"rule '{state.kernel.rule.name}' has {names}, not '{name}'")
        values = stored(state, name)
        return values if name in state.extras else placed_like(parameter, values)

    def bytes_per_param(self) -> float:
        """Return bytes per parameter of weights, gradients (in ``grad_dtype``) and the states that
        there are.
        """
        return bytes_per_param(self)

    # ── the step ──────────────────────────────────────────────────────────────────────────────────

    @never_compiled
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step.

        Args:
            closure: re-evaluates the model and returns the loss, as in ``torch.optim``.
        Returns:
            The closure's loss, if there is one.
        Raises:
            RecipeError: a gradient is sparse. A parameter's storage, shape or format has changed
                since its state was made. In a first step: parameters were replaced since then.

        Cost: transient memory. Elementwise rules take at most 64 MiB for any model. Matrix rules take float32 copies of the
            largest parameter: Muon and GaLore 4.
        """
        with torch.enable_grad():
            loss = None if closure is None else closure()
        with torch.no_grad():
            self._step()
        return loss

    def _step(self) -> None:
        self.finish_step()
        before, self._roster = self._roster, None  # an error ends what was checked
        roster = before
        if roster is None or not roster.fits(self):
            if not self._stepped:
                names = self.parameter_names()
                validation.check_seeds(self.param_groups, names)
                validation.check_members(names, self.state)
            roster = Roster(self)
        if not roster.owners:
            return
        if not self._stepped:
            self.kernels.warn_of_others(self.param_groups)
        self._stepped = True
        control = self._decide(roster)
        # Autocast would round the operands of matrix rules.
        with torch.autocast(control.device.type, enabled=False):
            run(self, roster.batches, control)
        # On a device the decision is not known yet. Then a skipped step counts, and is undone later.
        if control.is_cpu:
            self._pending = control[1], []
        else:
            self._pending = HostCopy(control[1]), roster.steps()
        if not control.is_cpu or not control[1]:
            roster.count()
        roster.end(self, before)
        self._roster = roster
        if control.is_cpu:  # which has nothing to wait for
            self.finish_step()

    def _decide(self, roster: Roster) -> Tensor:
        """Return the scalars of ``CONTROL``."""
        # torch.amp.GradScaler sets both during a step.
        self.loss_scale = getattr(self, "grad_scale", None)
        found_inf = getattr(self, "found_inf", None)
        is_unscaled = self.scales_loss and found_inf is None
        # Distributed checkpoints make a state by a step along zeros, which have any scale.
        if is_unscaled and any(bool(local_of(x).any()) for x in roster.gradients):
            raise RecipeError(
                "Cannot step because nobody scaled the loss, and small gradients are zero in "
                "float16.",
                "Call scaler.scale(loss).backward(), scaler.step(optimizer) and scaler.update() of "
                "a torch.amp.GradScaler. Or take a bfloat16 recipe.",
            )
        squares = None
        if self.max_grad_norm is not None:
            squares = roster.squares()
        control, norm = step_control(
            squares, roster.device, max_norm=self.max_grad_norm, grad_scale=self.loss_scale, found_inf=found_inf,
        )  # fmt: skip
        if norm is not None:
            self.grad_norm = norm
        self.last_control = control
        return control

    def finish_step(self) -> None:
        """Finish the last step: read the skip decision and the audit from the device, and raise
        alarms.
        """
        if self._pending is None:
            return
        skip, counts = self._pending
        self._pending = None
        if skip.item() != 0.0:
            self.num_skipped += 1
            self.auditor.fresh.clear()
            if counts:
                torch._foreach_add_(counts, -1)
                self._roster = None  # which counted the step
        alarms = self.auditor.collect(self.parameter_names)
        if alarms:
            self.on_alarm(alarms)

    # ── saving and loading ────────────────────────────────────────────────────────────────────────

    def state_dict(self) -> dict[str, Any]:
        """Return the state as in ``torch.optim``, lossless and packed: the live tensors, in the
        parameter's shape. Nothing is copied but 16-bit integers of DTensors, which no backend sends.

        A whole float has torch's key (``exp_avg``). Others are ``tail``, ``master`` (float32 or
        float64), ``weight_low``, ``packed``, and codes such as ``exp_avg_bits``. ``…_bound`` is the
        scale of each block. ``step`` is 0-d float32, and ``window`` where the codes of ``word``
        begin. Values are DTensors if the parameter is one.
        """
        self.finish_step()  # a step skipped on a device has not yet reverted its count
        result = super().state_dict()
        for key, state in result["state"].items():
            if isinstance(state, State):  # a plain dict, which any program can unpickle
                result["state"][key] = {name: sendable(x, x) for name, x in state.items()}
        return result

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state from :meth:`state_dict` without casts. A refused state changes nothing.

        The state of another library's Adam or AdamW is taken too, with its options. Hooks run as in
        ``torch.optim``: a pre hook sees the states, and may replace them.

        Raises:
            RecipeError: the state was saved from another storage or shape, or has an option that
                the rule cannot obey.
            DataError: another library's state has no counterpart here.
            ValueError: the groups do not match, as in ``torch.optim``.
        """
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            mended = hook(self, state_dict)
            if mended is not None:
                state_dict = mended
        groups, members = matched(self.rule, self.param_groups, state_dict)
        if any("storage" not in group for group in state_dict["param_groups"]):
            moments = torch_states(state_dict["state"], members)
            self.adopt({p: self.stored(p) for p in moments}, moments)
            states: Mapping[Any, Any] = self.state
        else:
            states = saved_states(self.kernels, state_dict["state"], members)
        self.__setstate__({"state": defaultdict(dict, states), "param_groups": groups})
        for loaded in self._optimizer_load_state_dict_post_hooks.values():
            loaded(self)

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy or a pickle has. Hooks, audits and compiled steps are left out."""
        if self.reduction is not None:
            raise RecipeError(
                "Cannot copy or pickle an optimizer that sums gradients over ranks.",
                "Build another one, and pass it this one's state_dict().",
            )
        self.finish_step()
        return {name: getattr(self, name) for name in _COPIED}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Replace states and groups, as ``load_state_dict`` does, or set those of a copy."""
        if "rule" in state:  # of a copy
            self._begin()
            self.kernels = KernelChoice(state["rule"])
        super().__setstate__(state)
        self._pending = None
        self._roster = None
        self.auditor = Auditor()


_COPIED = (
    "state", "rule", "defaults", "param_groups", "max_grad_norm", "audit_every", "compile", "scales_loss",
    "num_skipped", "_stays_float32", "_to_round", "_is_complete",
)  # fmt: skip
