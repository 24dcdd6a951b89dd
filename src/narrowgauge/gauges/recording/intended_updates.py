"""The updates that an optimizer intends, for any class: repeat its step on a copy in float64.

A copy of the optimizer holds the parameters, gradients and states in float64: whole tensors, or
evenly spread elements of large ones. Its step gives the intended change. A second copy in the
stored formats must take the step that the run takes. If it does not, the update of the tensor
depends on something else, and is unseen.
"""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from narrowgauge.analysis.thresholds import REPEATED
from narrowgauge.checks.float32_copy import Widened
from narrowgauge.checks.set_up import storage_of
from narrowgauge.checks.step_samples import evenly_spread, plain
from narrowgauge.numerics.dtensor import gradient_of, is_sharded, local_of

WHOLE = 1 << 16
"""Largest number of elements of a tensor that is copied whole.

Rules for matrices need whole matrices.
"""
_PLAIN = (int, float, str, bool, bytes, tuple, type(None))


class IntendedStep:
    """An optimizer's next step, repeated on copies. Make it before the step.

    Args:
        optimizer: any that is not Narrowgauge's; ours audit themselves.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.why_not = _why_not(optimizer)
        self._twins: list[dict[Tensor, Tensor]] = []
        self._before: dict[Tensor, Tensor] = {}
        self._is_stochastic = False
        if self.why_not:
            return
        reasons = dict[str, None]()
        for group in optimizer.param_groups:
            for p in group["params"]:
                reason = _not_repeated(optimizer, group, p)
                if reason:
                    reasons[reason] = None
                else:
                    self._before[p] = _part(p, p).double()
        members = list(self._before)
        if not members:
            self.why_not = f"each tensor has {' or '.join(reasons)}"
            return
        try:
            devices = {p.device for p in members if p.is_cuda}
            with torch.random.fork_rng(list(devices)):
                before = _random_states(devices)
                stored = _stepped(optimizer, members, None)
                self._is_stochastic = _random_states(devices) != before
                self._twins = [stored, _exactly_stepped(optimizer, members)]
        except Exception as error:  # a step that needs whole tensors, a closure, or another device
            self.why_not = f"its step cannot be repeated on a copy ({type(error).__name__})"

    def sums(self) -> tuple[dict[Tensor, list[float]], list[Tensor]]:
        """Return ⟨D,D⟩, ⟨D,E⟩ and the latter's variance for each tensor, and the tensors whose step
        the copy does not take.

        E is the stored change.

        Call it after the step.
        """
        if not self._twins:
            return {}, []
        stored, exact = self._twins
        rows = []
        for p, before in self._before.items():
            now = _part(p, p)
            intended = exact[p] - before
            change = now.double() - before
            noise = intended.new_zeros(())
            if self._is_stochastic:
                # The variance of ⟨D,E⟩: an element that is rounded up or down by chance has |d| ·
                # ulp.
                exponents = before.abs().clamp(min=1e-30).log2().floor()
                ulp = torch.finfo(p.dtype).eps * torch.exp2(exponents)
                noise = (intended.abs() ** 3 * ulp).sum()
            share = local_of(p).numel() / now.numel()
            energy = share * intended.square().sum()
            product = share * (intended * change).sum()
            error = share * (now.double() - stored[p]).square().sum()
            rows.append(torch.stack([energy, product, share**2 * noise, error]))
        sums: dict[Tensor, list[float]] = {}
        unrepeated = []
        for p, row in zip(self._before, on_host(rows), strict=True):
            if row[3] <= REPEATED**2 * row[0]:
                sums[p] = row[:3]
            else:
                unrepeated.append(p)
        return sums, unrepeated


def _random_states(devices: set[torch.device]) -> list[bytes]:
    states = [torch.get_rng_state(), *map(torch.cuda.get_rng_state, devices)]
    return [state.numpy().tobytes() for state in states]


def on_host(values: list[Tensor]) -> list[Any]:
    """Copy tensors of one shape to the host at once: every copy waits for the device."""
    if not values:
        return []
    return torch.stack([x.to(values[0].device) for x in values]).tolist()


def _why_not(optimizer: torch.optim.Optimizer) -> str:
    """Return why a step on a copy could change the run; empty if it cannot.

    Code of other libraries may reach other objects.
    """
    if _is_torchs(optimizer):
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
        if name not in plain_names and not isinstance(value, _PLAIN):
            return f"its attribute {name} may be shared with the run"
    return ""


def _not_repeated(optimizer: torch.optim.Optimizer, group: dict[str, Any], p: Tensor) -> str:
    """Return what keeps the step of a tensor from being repeated on a copy of its weight; empty if
    nothing does.
    """
    gradient = gradient_of(p)
    if gradient is None:
        return "no gradient"
    if gradient.layout is not torch.strided or p.is_complex():
        return "a sparse or complex gradient"
    if not p.numel():
        return "no elements"
    state = optimizer.state.get(p, {})
    for x in state.values():
        if isinstance(x, Tensor) and plain(x) is not x:
            return "states that hold codes"
    if is_sharded(p) and not (_is_elementwise(optimizer) and local_of(p).numel()):
        return "a shard on this rank"
    if not _is_torchs(optimizer) and storage_of(optimizer, group, p).beside:
        return "a master or a compensation beside it"
    return ""


def _is_torchs(optimizer: torch.optim.Optimizer) -> bool:
    return type(optimizer).__module__.startswith("torch.optim.")


def _is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a step of a shard is the shard of a step."""
    names = {kind.__name__ for kind in type(optimizer).__mro__}
    return _is_torchs(optimizer) and not names & {"Adafactor", "Muon", "LBFGS"}


def _part(x: Tensor, parameter: Tensor) -> Tensor:
    """Copy a tensor, or spread elements if it has the shape of a large parameter."""
    is_large = x.shape == parameter.shape and parameter.numel() > WHOLE
    return (evenly_spread(x) if is_large else local_of(x.detach())).clone()


def _exactly_stepped(
    optimizer: torch.optim.Optimizer, members: list[Tensor]
) -> dict[Tensor, Tensor]:
    """Return each parameter's values after the step of a copy in float64."""
    try:
        return _stepped(optimizer, members, torch.float64)
    except RuntimeError:  # a step that casts to float32 itself, and then mixes formats
        with Widened(torch.float64):
            return _stepped(optimizer, members, torch.float64)


def _stepped(
    optimizer: torch.optim.Optimizer, members: list[Tensor], dtype: torch.dtype | None
) -> dict[Tensor, Tensor]:
    """Return each parameter's values after the step of a copy, whose tensors have a dtype, or their
    own for ``None``.
    """

    def cast(x: Tensor) -> Tensor:
        is_plain = type(x) in (Tensor, torch.nn.Parameter) and x.is_floating_point()
        return x.to(dtype) if is_plain and dtype is not None else x

    def state_part(value: Any, p: Tensor) -> Any:
        if not isinstance(value, Tensor):
            return copy.deepcopy(value)
        # A count of steps keeps its format. A state of a scalar parameter is cast as any other.
        is_state = value.ndim > 0 or (value.shape == p.shape and value.dtype == p.dtype)
        return cast(_part(value, p)) if is_state else value.clone()

    twin = object.__new__(type(optimizer))
    vars(twin).update(vars(optimizer))
    vars(twin).pop("step", None)  # a schedule wraps it
    twin.state = copy.copy(optimizer.state)
    twin.state.clear()
    parts: dict[Tensor, Tensor] = {}
    for p in members:
        part = torch.nn.Parameter(cast(_part(p, p)))
        gradient = gradient_of(p)
        assert gradient is not None
        part.grad = cast(_part(gradient, p))
        if p in optimizer.state:
            twin.state[part] = {}
            for name, value in optimizer.state[p].items():
                twin.state[part][name] = state_part(value, p)
        parts[p] = part
    twin.param_groups = []
    for group in optimizer.param_groups:
        settings = dict(group)
        for name, value in group.items():
            if isinstance(value, Tensor):
                settings[name] = value.clone()
        settings["params"] = [parts[p] for p in group["params"] if p in parts]
        twin.param_groups.append(settings)
    with torch.no_grad():
        inspect.unwrap(type(optimizer).step)(twin)
    return {p: part.detach() for p, part in parts.items()}
