"""Metrics of updates and second moments, on the first values of each parameter.

Two effects show only beside an exact computation. A float32 reference (*shadow*) of the second moments of a few hundred values
is updated on every step. Second moments rounded to nearest in too few bits stop following the reference. The
ratio of their sums shows this long before the loss does. Likewise, the ratio of an update to the ulp of the weight
predicts the loss by rounding: below 0.5 ulp, all of it.

The reference starts from the stored moments when it is attached, so it restarts after a resume.

For sharded parameters each rank measures the first values of its own shard. The record holds the mean over the ranks. The
sums of the optimizer's audit are added over the ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from narrowgauge.gauges.tensor_metrics import Packed, Shards, rounded
from narrowgauge.numerics import metrics
from narrowgauge.numerics.dtensor import local_of
from narrowgauge.numerics.metrics import UPDATE_SUMS
from narrowgauge.optim import audit
from narrowgauge.optim.optimizer import Optimizer
from narrowgauge.runs.schema import Row
from narrowgauge.spec.formats import dtype_name, get_format

NUM_VALUES = 64
"""Number of values measured per parameter: the first values, or evenly spaced ones for the size of a step."""

MAX_SHADOWED = 24
"""Maximum number of parameters with a reference, evenly spaced. A reference costs time on every step."""


class StateReader:
    """Read the first values of each parameter's states, decoded once per sample. Reads ``torch.optim``'s states too."""

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: Iterable[Tensor]) -> None:
        self.optimizer, self.parameters = optimizer, list(parameters)
        self._leading: dict[str, dict[Tensor, Tensor | None]] = {}

    def leading(self, name: str) -> dict[Tensor, Tensor | None]:
        """Return at most ``NUM_VALUES`` float32 values of a state by parameter; ``None`` before the state exists."""
        if name not in self._leading:
            if isinstance(self.optimizer, Optimizer):
                values = self.optimizer.leading(self.parameters, NUM_VALUES, name)
            else:
                states = [self.optimizer.state.get(p, {}).get(name) for p in self.parameters]
                values = [leading_of(x) if isinstance(x, Tensor) else None for x in states]
            floats = [None if x is None else x.float() for x in values]
            self._leading[name] = dict(zip(self.parameters, floats, strict=True))
        return self._leading[name]

    def forget(self) -> None:
        self._leading.clear()

    def groups(self) -> dict[Tensor, dict[str, Any]]:
        """Return the current param group of each parameter; loading a state replaces them."""
        return {p: group for group in self.optimizer.param_groups for p in group["params"]}

    def steps(self, parameter: Tensor) -> float | Tensor:
        """Return the number of steps of a parameter. torch's fused optimizers count them on the device."""
        if isinstance(self.optimizer, Optimizer):
            return self.optimizer.num_steps(parameter)
        steps: float | Tensor = self.optimizer.state.get(parameter, {}).get("step", 0)
        return steps


class MomentShadow:
    """Exact second moments of the first values of some parameters, float32 ``[parameters, NUM_VALUES]``.

    The parameters are chosen after the first step, among those with ``exp_avg_sq`` in their state. Without any,
    later steps do nothing.
    """

    def __init__(self, states: StateReader, parameters: Mapping[str, Tensor]) -> None:
        self.states, self.optimizer, self.candidates = states, states.optimizer, dict(parameters)
        self.forget()

    def forget(self) -> None:
        """Restart from the stored moments after the next step."""
        self.parameters: dict[str, Tensor] | None = None
        self.exact: Tensor | None = None
        self._last: tuple[Tensor, Tensor] | None = None
        self._weight: Tensor | None = None
        self._decay: Tensor | None = None
        self._weights_before: Tensor | None = None

    def before_step(self) -> None:
        """Save the weights that a decay in the gradient reads, because the step changes them."""
        if self._decay is not None and self.parameters is not None:
            self._weights_before = _joined([leading_of(p.detach()) for p in self.parameters.values()])

    def step(self) -> None:
        """Apply the optimizer's last step, from the gradients, which still exist."""
        if self.parameters is None:
            self._begin()
            return
        weight = self._weight
        if self.exact is None or weight is None:
            return
        gradients = [
            p.grad if p.grad is not None and p.grad.layout is torch.strided else None for p in self.parameters.values()
        ]
        if None in gradients:  # a parameter without a gradient takes no step
            weight = weight * torch.tensor([[float(g is not None)] for g in gradients], device=weight.device)
        gradient = _joined([weight.new_zeros(0) if g is None else leading_of(g) for g in gradients])
        scale, skip = self._control()
        if scale is not None:
            gradient.mul_(scale)
        if self._decay is not None and self._weights_before is not None:
            gradient.addcmul_(self._decay, self._weights_before)
        if skip is not None:
            weight = torch.where(skip != 0, 0.0, weight)
        # A non-finite gradient times a weight of 0 would be NaN.
        gradient = torch.where(weight == 0, 0.0, gradient)
        self.exact = torch.lerp(self.exact, gradient.square_(), weight)

    def _begin(self) -> None:
        """Choose the parameters and start from the stored moments."""
        self.states.forget()
        groups, moments = self.states.groups(), self.states.leading("exp_avg_sq")
        shadowed = {
            name: p
            for name, p in self.candidates.items()
            # Some optimizers have one second moment for the whole tensor.
            if "betas" in groups.get(p, {}) and (m := moments[p]) is not None and len(m) == len(leading_of(p.detach()))
        }
        self.parameters = dict(list(shadowed.items())[:: max(1, -(-len(shadowed) // MAX_SHADOWED))])
        self.exact = self.stored()
        if self.exact is not None:
            used = [groups[p] for p in self.parameters.values()]
            device = self.exact.device
            self._weight = _column([1 - float(group["betas"][1]) for group in used], device).float()
            # Adam's decay goes through its moments.
            decays = [0.0 if g.get("decoupled_weight_decay") else float(g.get("weight_decay") or 0.0) for g in used]
            if type(self.optimizer).__name__ == "Adam" and any(decays):
                self._decay = _column(decays, device).float()
        self.states.forget()

    def _control(self) -> tuple[Tensor | None, Tensor | None]:
        """Return the factor the optimizer applied to the gradients, and whether it skipped the step."""
        control = getattr(self.optimizer, "last_control", None)
        if control is not None:
            return control[0], control[1]
        # torch.amp.GradScaler sets this on a fused torch optimizer, which writes the gradients back unscaled.
        return None, getattr(self.optimizer, "found_inf", None)

    def stored(self) -> Tensor | None:
        """Return the stored second moments; ``None`` without a shadow."""
        moments = self.states.leading("exp_avg_sq")
        parts = [m for p in (self.parameters or {}).values() if (m := moments[p]) is not None]
        return _joined(parts) if parts and len(parts) == len(self.parameters or {}) else None

    def measure(self, packed: Packed) -> None:
        """Add bias and frozen fraction of each candidate to the metrics to fetch, NaN without a shadow."""
        if not self.candidates:
            return
        device = next(iter(self.candidates.values())).device
        none = torch.full((2,), math.nan, dtype=torch.float64, device=device)
        table = self._compared()
        rows = {} if table is None else dict(zip(self.parameters or {}, table, strict=True))
        packed.add_mean("moments", torch.stack([rows.get(name, none) for name in self.candidates]), self.candidates)

    def _compared(self) -> Tensor | None:
        """Return bias and frozen fraction of each parameter with a shadow, float64 ``[parameters, 2]``."""
        stored, exact = self.stored(), self.exact
        if stored is None or exact is None:
            return None
        (last_stored, last_exact), self._last = self._last or (stored, exact), (stored, exact)
        # A change of one ulp of bfloat16, which bfloat16 could represent.
        moved = (exact - last_exact).abs() > last_exact * 2.0**-7
        frozen = (moved & (stored == last_stored)).sum(1) / moved.sum(1)  # NaN in the first sample
        return torch.stack([metrics.moment_bias(stored, exact), frozen.double()], 1)

    def rows(self, fetched: Mapping[str, Tensor]) -> Row:
        """Return the table ``moments`` of a record."""
        pairs = fetched["moments"].tolist() if "moments" in fetched else []
        rows = {name: [rounded(v) for v in pair] for name, pair in zip(self.candidates, pairs, strict=False)}
        return {name: row for name, row in rows.items() if row != [None, None]}


class UpdateMetrics:
    """Metrics of the change of the visible weights on sampled steps."""

    def __init__(self, states: StateReader, parameters: Mapping[str, Tensor]) -> None:
        self.states, self.parameters = states, dict(parameters)
        self.before: Tensor | None = None
        self.spread: Tensor | None = None

    def before_step(self) -> None:
        self.before = _joined([leading_of(p) for p in self.parameters.values()])
        self.spread = _joined([_spread(p) for p in self.parameters.values()])

    def forget(self) -> None:
        self.before = self.spread = None

    def measure(self, packed: Packed) -> None:
        """Add the changes and the histograms of the moments to the metrics to fetch. Call it after a step."""
        if self.before is None or self.spread is None:
            return
        after = _joined([_spread(p) for p in self.parameters.values()])
        packed.add_mean("update to weight", metrics.update_to_weight(self.spread, after), self.parameters)
        moments = {name: list(self.states.leading(name).values()) for name in ("exp_avg", "exp_avg_sq")}
        for name, parts in moments.items():
            here = [part for p, part in zip(self.parameters, parts, strict=True) if packed.shards.share[p]]
            packed.add_histogram(name, [part for part in here if part is not None], after.device)
        ulps = self._in_spacings(moments["exp_avg"], moments["exp_avg_sq"])
        packed.add_mean("update to ulp", ulps, self.parameters)
        if packed.shards.mesh is not None and isinstance(self.states.optimizer, Optimizer):
            packed.add_sum("audit", self._audited(self.states.optimizer, packed.shards).to(after.device))
        self.forget()

    def _audited(self, optimizer: Optimizer, shards: Shards) -> Tensor:
        """Return this rank's sums of each parameter's audits, and their number."""
        optimizer.settle()
        table = torch.zeros(len(self.parameters), len(UPDATE_SUMS) + 1, dtype=torch.float64)
        for row, (name, parameter) in zip(table, self.parameters.items(), strict=True):
            window = optimizer.auditor.windows.get(parameter)
            if window and shards.share[name]:
                row[:-1], row[-1] = torch.stack(tuple(window)).sum(0), len(window)
        return table

    def _in_spacings(self, first: list[Tensor | None], second: list[Tensor | None]) -> Tensor:
        """Return the intended change over the ulp of the visible weight, for parameters with Adam's moments."""
        assert self.before is not None
        groups, names = self.states.groups(), list(self.parameters.values())
        adam = [
            group if _has_adam_moments(group := groups.get(p, {}), m, v) else None
            for p, m, v in zip(names, first, second, strict=True)
        ]
        device = self.before.device
        beta1, beta2 = (_column([g["betas"][k] if g else math.nan for g in adam], device) for k in (0, 1))
        rates = _column([g["lr"] if g else math.nan for g in adam], device)
        epsilons = _column([g.get("adam_eps", g["eps"]) if g else math.nan for g in adam], device)
        steps = _column([self.states.steps(p) for p in names], device)
        bits = _column([get_format(dtype_name(p.dtype)).mantissa_bits for p in names], device)
        none = self.before.new_zeros(1)
        m, v = (
            _joined([part if g and part is not None else none for part, g in zip(parts, adam, strict=True)])
            for parts in (first, second)
        )
        unbias = torch.sqrt(1 - beta2**steps)
        root = v.sqrt() + epsilons * unbias
        intended = rates * unbias / (1 - beta1**steps) * m / torch.where(root > 0, root, 1.0)
        return metrics.update_to_ulp(intended, self.before, bits)

    def rows(self, fetched: Mapping[str, Tensor], readings: Mapping[str, Any]) -> Row:
        """Return the table ``updates`` of a record. With sharded parameters, use all ranks' audits instead of ``readings``."""
        if "update to weight" not in fetched:
            return {}
        if "audit" in fetched:
            sums = zip(self.parameters, fetched["audit"], strict=True)
            readings = {name: audit.read([row[:-1]]) for name, row in sums if row[-1]}
        sizes = zip(fetched["update to weight"].tolist(), fetched["update to ulp"].tolist(), strict=True)
        table = {}
        for name, sizes_of_step in zip(self.parameters, sizes, strict=True):
            reading = readings.get(name)
            audited, shares = (None,) * 4, (None,) * 2
            if reading is not None:
                audited = reading.edq, reading.noise, reading.lost_fraction, reading.unseen_fraction
                shares = reading.imprecision_share, reading.lost_decay
            table[name] = [rounded(value) for value in (*audited, *sizes_of_step, *shares)]
            if reading is not None:
                table[name][0] = rounded(reading.edq, keep_nan=True)  # NaN: no update was intended; None: not audited
        return table


def _has_adam_moments(group: Mapping[str, Any], *moments: Tensor | None) -> bool:
    """Return whether a param group is of an Adam variant. Its moments then determine the intended change."""
    betas, eps = group.get("betas", ()), group.get("adam_eps", group.get("eps"))
    return len(betas) == 2 and isinstance(eps, (int, float)) and all(moment is not None for moment in moments)


def _column(values: Sequence[float | Tensor], device: torch.device) -> Tensor:
    """Return one number per parameter, float64 ``[parameters, 1]``, without a sync."""
    if not any(isinstance(value, Tensor) and value.device == device for value in values):
        numbers = torch.tensor([float(value) for value in values], dtype=torch.float64)
        return numbers.to(device, non_blocking=True)[:, None]
    parts = [torch.as_tensor(value, dtype=torch.float64).to(device, non_blocking=True) for value in values]
    return torch.stack([part.reshape(()) for part in parts])[:, None]


def leading_of(x: Tensor) -> Tensor:
    """Return the first values of a tensor, or of its local shard."""
    if type(x) is not Tensor and type(x) is not torch.nn.Parameter:
        x = local_of(x)
    if type(x).dequantize is not Tensor.dequantize:  # quantized states, e.g. torchao's
        x = x.dequantize()
    if x.is_contiguous():  # one call: there are hundreds of tensors on every step
        return x.as_strided((min(NUM_VALUES, x.numel()),), (1,))
    return x.reshape(-1)[:NUM_VALUES]


def _spread(x: Tensor) -> Tensor:
    """Return evenly spaced values of a tensor. The first rows of an embedding may never be used."""
    flat = local_of(x).detach().reshape(-1)
    return flat[:: max(1, flat.numel() // NUM_VALUES)][:NUM_VALUES]


def _joined(parts: list[Tensor]) -> Tensor:
    """Values of many tensors as float32 ``[tensors, NUM_VALUES]``, zero-padded; the metrics ignore zeros."""
    return torch.stack([torch.nn.functional.pad(part.float(), (0, NUM_VALUES - len(part))) for part in parts])
