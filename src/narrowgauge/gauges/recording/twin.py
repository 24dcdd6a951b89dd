"""The twin of an optimizer's step: the same step of its class on copies in float64.

No update rule is written here. The optimizer's own class, repeated in float64, gives the intended
change, and so the share that the formats stored. The class of ``torch.optim`` from which it derives
says what the step had to be (:mod:`narrowgauge.gauges.recording.step_fit`).

Large tensors are copied as evenly spread elements. Nothing here changes a tensor of the run.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from narrowgauge.analysis.thresholds import REPEATED
from narrowgauge.checks.float32_copy import Widened
from narrowgauge.checks.set_up import storage_of
from narrowgauge.checks.step_samples import evenly_spread, plain, stored_by, weight_of
from narrowgauge.numerics.dtensor import gradient_of, is_sharded, local_of
from narrowgauge.optim.optimizer import Optimizer

WHOLE = 1 << 16
"""Largest number of elements of a tensor that is copied whole, for rules that need matrices."""
UNEXPLAINED = 0.02
"""Of a change's length: what a fit of its columns may leave."""
_ELEMENTWISE = (
    "AdamW", "Adam", "SGD", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD",
)  # fmt: skip
_PLAIN = (int, float, str, bool, bytes, tuple, type(None))
NARROW = (torch.float8_e5m2, torch.float8_e4m3fn, torch.bfloat16, torch.float16)
Values = dict[str, Any]


@dataclass
class Sample:
    """Elements of one parameter around a step.

    Args:
        group: its index and its settings.
        before: the weight, and each state by name.
        beside: a master or a compensation lies beside the weight.
    """

    name: str
    parameter: Tensor
    group: tuple[int, dict[str, Any]]
    gradient: Tensor | None
    before: Values
    beside: bool = False
    after: Values = field(default_factory=dict)

    def compared(self) -> list[str]:
        """Return the names of the values of the weight's shape, the states before the weight."""
        names = []
        for name, x in self.after.items():
            is_alike = isinstance(x, Tensor) and x.shape == self.after["weight"].shape
            if is_alike and x.is_floating_point() and name not in ("step", "weight"):
                names.append(name)
        return [*names, "weight"]


class Twin:
    """The next step of an optimizer, repeated on copies. Make it before the step.

    Args:
        names: of the parameters.

    Attributes:
        is_torchs: the class is one of ``torch.optim``.
        is_skipped: the step is left out.
        why_not: why the stored share is not measured; empty if it is.
        num_compared: tensors whose step was compared with its class.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str]) -> None:
        self.optimizer = optimizer
        self.reference = reference_of(optimizer)
        self.is_torchs = type(optimizer).__module__.startswith("torch.optim.")
        self.why_not = _why_not(optimizer)
        self.num_compared = 0
        self._most = 0 if self.reference or isinstance(optimizer, Optimizer) else WHOLE
        self._is_stochastic = False
        self._stored: list[Values] = []
        self._exact: list[Values] = []
        self.samples: list[Sample] = []
        self.is_skipped = bool(getattr(optimizer, "found_inf", None) or 0.0)
        scale = getattr(optimizer, "grad_scale", None)
        self._scale: float | Tensor = 1.0 if scale is None else scale
        reasons: dict[str, None] = {}
        self._shared: list[Sample] = []
        for index, group in enumerate(optimizer.param_groups):
            settings = {name: value for name, value in group.items() if name != "params"}
            for place, p in enumerate(group["params"]):
                name = names.get(p, f"group {index}, parameter {place}")
                sample = self._sample(name, p, (index, settings), group)
                self.samples.append(sample)
                reason = self._not_repeated(sample)
                if reason:
                    reasons[reason] = None
                else:
                    self._shared.append(sample)
        if not self.why_not and not self._shared:
            self.why_not = f"each tensor has {' or '.join(reasons)}"
        if not self.why_not:
            self._repeat_own_class()

    @property
    def has_own_step(self) -> bool:
        """Return whether the class is neither of ``torch.optim`` nor ours."""
        return not (self.is_torchs or isinstance(self.optimizer, Optimizer))

    def _sample(
        self, name: str, p: Tensor, group: tuple[int, dict[str, Any]], row: dict[str, Any]
    ) -> Sample:
        gradient = gradient_of(p)
        is_dense = gradient is not None and gradient.layout is torch.strided
        if not is_dense or p.is_complex() or not p.numel():
            gradient = None
        if gradient is not None:
            gradient = self._part(gradient, p)
        beside = not self.is_torchs and storage_of(self.optimizer, row, p).beside
        return Sample(name, p, group, gradient, self.values_of(p), bool(beside))

    def _part(self, x: Tensor, p: Tensor) -> Tensor:
        """Copy a tensor, or spread elements if it has the shape of a large parameter."""
        is_large = x.shape == p.shape and p.numel() > self._most
        return (evenly_spread(x) if is_large else local_of(x.detach())).clone()

    def values_of(self, p: Tensor) -> Values:
        """Copy the weight and the states of a parameter, or spread elements of them."""
        values: Values = {"weight": self._part(weight_of(self.optimizer, p), p)}
        for name, x in stored_by(self.optimizer, p).items():
            if not isinstance(x, Tensor):
                values.setdefault(name, copy.deepcopy(x))
            elif name != "step" and (x.ndim > 0 or x.shape == p.shape):
                values[name] = self._part(x, p)
            else:
                values[name] = x.clone()
        return values

    def _not_repeated(self, sample: Sample) -> str:
        """Return what keeps a step from being repeated on a copy; empty if nothing does."""
        if sample.gradient is None:
            return "no gradient, a sparse or complex one, or no elements"
        p = sample.parameter
        for x in self.optimizer.state.get(p, {}).values():
            if isinstance(x, Tensor) and plain(x) is not x:
                return "states that hold codes"
        if is_sharded(p) and not (self.reference and local_of(p).numel()):
            return "a shard on this rank"
        return "a master or a compensation beside it" if sample.beside else ""

    def _repeat_own_class(self) -> None:
        devices = {s.parameter.device for s in self._shared if s.parameter.is_cuda}
        try:
            with torch.random.fork_rng(list(devices)):
                before = _random_states(devices)
                self._stored = repeated(self.optimizer, self._shared)
                self._is_stochastic = _random_states(devices) != before
                try:
                    self._exact = repeated(self.optimizer, self._shared, torch.float64)
                except RuntimeError:  # a step that casts to float32 itself, and mixes formats
                    with Widened(torch.float64):
                        self._exact = repeated(self.optimizer, self._shared, torch.float64)
        except Exception as error:  # a step that needs whole tensors, a closure, or a device
            self.why_not = f"its step cannot be repeated on a copy ({type(error).__name__})"

    # ── after the step ────────────────────────────────────────────────────────────────────────────

    def complete(self) -> None:
        """Add the values after the step."""
        for sample in self.samples:
            sample.after = self.values_of(sample.parameter)

    def sums(self) -> tuple[dict[Tensor, list[float]], list[Tensor]]:
        """Return ⟨D,D⟩, ⟨D,E⟩ and the latter's variance for each tensor, and the tensors whose step
        a copy in the stored formats does not take.

        D is the intended change, E the stored one.
        """
        if self.why_not:
            return {}, []
        rows = []
        for sample, stored, exact in zip(self._shared, self._stored, self._exact, strict=True):
            before = sample.before["weight"].double()
            now = sample.after["weight"].double()
            intended = exact["weight"] - before
            noise = intended.new_zeros(())
            if self._is_stochastic:
                # An element that is rounded up or down by chance has a variance of |d| · ulp.
                exponents = before.abs().clamp(min=1e-30).log2().floor()
                ulp = torch.finfo(sample.parameter.dtype).eps * torch.exp2(exponents)
                noise = (intended.abs() ** 3 * ulp).sum()
            share = local_of(sample.parameter).numel() / now.numel()
            energy = share * intended.square().sum()
            moved = self._with_rest(sample, intended, now - before)
            product = share * (intended * moved).sum()
            error = share * (now - stored["weight"]).square().sum()
            rows.append(torch.stack([energy, product, share**2 * noise, error]))
        sums: dict[Tensor, list[float]] = {}
        unrepeated = []
        for sample, row in zip(self._shared, on_host(rows), strict=True):
            if row[3] <= REPEATED**2 * row[0]:
                sums[sample.parameter] = row[:3]
            else:
                unrepeated.append(sample.parameter)
        return sums, unrepeated

    def _with_rest(self, sample: Sample, intended: Tensor, moved: Tensor) -> Tensor:
        """Return the change of a weight with what a state of an own rule keeps of it for later
        steps, where both make the intended change.
        """
        weight = sample.after["weight"]
        if self.reference is not None or weight.dtype not in NARROW:
            return moved
        for name in sample.compared()[:-1]:
            rest = sample.after[name].double()
            for whole in (moved + rest, moved - rest):
                is_whole = (whole - intended).norm() <= UNEXPLAINED * intended.norm()
                moved = torch.where(is_whole, whole, moved)
        return moved

    def as_class(
        self, samples: list[Sample], dtype: torch.dtype | None, without: str = "", **options: Any
    ) -> list[Values]:
        """Return the weight and states after the step of the class in ``torch.optim``.

        Args:
            dtype: of the copies; ``None`` for the stored formats.
            without: the name of a state that begins at zero.
            options: settings of all groups.
        """
        plain_step = {"foreach": False, "fused": None, "capturable": False, **options}
        return repeated(
            self.optimizer, samples, dtype, self.reference, without, self._scale, plain_step
        )


def reference_of(optimizer: torch.optim.Optimizer) -> type[torch.optim.Optimizer] | None:
    """Return the elementwise class of ``torch.optim`` whose step an optimizer must take, or
    ``None``.

    A derived class with another name has a rule of its own if its step does not call its parent's.
    """
    kinds = type(optimizer).__mro__
    for place, kind in enumerate(kinds):
        if kind.__name__ in _ELEMENTWISE and kind.__module__.startswith("torch.optim"):
            is_renamed = kind.__name__ != kinds[0].__name__
            if is_renamed and any(map(_replaces_step, kinds[:place])):
                return None
            return kind
    return None


def _replaces_step(kind: type) -> bool:
    step = vars(kind).get("step")
    code = getattr(inspect.unwrap(step), "__code__", None) if step is not None else None
    return code is not None and "super" not in code.co_names


def repeated(
    optimizer: torch.optim.Optimizer,
    samples: list[Sample],
    dtype: torch.dtype | None = None,
    kind: type[torch.optim.Optimizer] | None = None,
    without: str = "",
    scale: float | Tensor = 1.0,
    options: Mapping[str, Any] | None = None,
) -> list[Values]:
    """Return the weight and states of each sample after the step of a copy of an optimizer.

    Args:
        dtype: of the copies; ``None`` for the stored formats.
        kind: whose step is taken, if not the optimizer's own.
        without: the name of a state that begins at zero.
        scale: by which the gradients are divided.
        options: settings of all groups.
    """

    def cast(x: Any) -> Any:
        if isinstance(x, Tensor) and x.is_floating_point() and x.ndim > 0 and dtype is not None:
            return x.to(dtype, copy=True)
        return copy.deepcopy(x)

    kind = kind or type(optimizer)
    twin = object.__new__(kind)
    vars(twin).update(vars(optimizer))
    vars(twin).pop("step", None)  # a schedule wraps it
    for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        setattr(twin, hooks, {})
    if options:
        vars(twin).update(grad_scale=None, found_inf=None)
    twin.state = copy.copy(optimizer.state)
    twin.state.clear()
    groups: dict[int, dict[str, Any]] = {}
    parts = []
    for sample in samples:
        assert sample.gradient is not None
        index, settings = sample.group
        if index not in groups:
            own = {name: cast(value) for name, value in settings.items()}
            groups[index] = {**own, **(options or {}), "params": []}
        values = {name: cast(value) for name, value in sample.before.items()}
        if without in values:
            values[without].zero_()
        part = torch.nn.Parameter(values.pop("weight"))
        gradient = (
            sample.gradient if isinstance(scale, float) and scale == 1 else sample.gradient / scale
        )
        part.grad = gradient.to(part.dtype, copy=True)
        if values:
            twin.state[part] = values
        groups[index]["params"].append(part)
        parts.append(part)
    twin.param_groups = list(groups.values())
    with torch.no_grad():
        inspect.unwrap(kind.step)(twin)
    return [{"weight": part.detach(), **twin.state.get(part, {})} for part in parts]


def on_host(values: list[Tensor]) -> list[Any]:
    """Copy tensors of one shape to the host at once: every copy waits for the device."""
    if not values:
        return []
    return torch.stack([x.to(values[0].device) for x in values]).tolist()


def _random_states(devices: set[torch.device]) -> list[bytes]:
    states = [torch.get_rng_state(), *map(torch.cuda.get_rng_state, devices)]
    return [state.numpy().tobytes() for state in states]


def _why_not(optimizer: torch.optim.Optimizer) -> str:
    """Return why a step of the own class on a copy could change the run; empty if it cannot.

    Code of other libraries may reach other objects.
    """
    if isinstance(optimizer, Optimizer):
        return "its audit measures the share"
    if type(optimizer).__module__.startswith("torch.optim."):
        return ""
    if dist.is_initialized() and dist.get_world_size() > 1:
        return "its step may talk to other ranks"
    plain_names = {
        "step",
        "found_inf",
        "grad_scale",
        *vars(torch.optim.Optimizer([torch.zeros(1)], {})),
    }
    for name, value in vars(optimizer).items():
        if name not in plain_names and not isinstance(value, (*_PLAIN, torch.dtype, torch.device)):
            return f"its attribute {name} may be shared with the run"
    return ""
