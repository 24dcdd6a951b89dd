"""The twin of an optimizer's step: the same step of its class on copies in float64.

No update rule is written here. The optimizer's own class, repeated in float64, gives the intended
change, and so the share that the formats stored. The class of ``torch.optim`` from which it derives
says what the step had to be. Repeated with one input left out (the decay, a state), it gives the
columns of a least-squares fit: how much of the step and the decay was done, and what a state kept
of itself and took of the gradient. The same step in the stored formats gives the bounds.

Large tensors are copied as evenly spread elements. Nothing here changes a tensor of the run.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from narrowgauge.analysis.kinds import KINDS
from narrowgauge.analysis.reading import Reading
from narrowgauge.analysis.thresholds import REPEATED
from narrowgauge.checks.float32_copy import Widened
from narrowgauge.checks.set_up import storage_of
from narrowgauge.checks.step_samples import evenly_spread, plain, stored_by, weight_of
from narrowgauge.numerics.dtensor import gradient_of, is_sharded, local_of
from narrowgauge.optim.optimizer import Optimizer
from narrowgauge.spec.formats import dtype_name

WHOLE = 1 << 16
"""Largest number of elements of a tensor that is copied whole, for rules that need matrices."""
MARGIN = 4.0
"""Multiples of what the stored formats move the step by."""
LEAST = 2e-4
"""Of a step's length. Compiled steps round bias corrections to float32."""
UNEXPLAINED = 0.02
"""Of a change's length: what a fit of its columns may leave."""
ALIKE = 1e-6
"""Distance of a cosine from 1 at which two columns count as one."""
_ELEMENTWISE = (
    "AdamW", "Adam", "SGD", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD",
)  # fmt: skip
_PLAIN = (int, float, str, bool, bytes, tuple, type(None))
_NARROW = (torch.float8_e5m2, torch.float8_e4m3fn, torch.bfloat16, torch.float16)
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
        self._is_skipped = bool(getattr(optimizer, "found_inf", None) or 0.0)
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
        return Sample(name, p, group, gradient, self._values(p), bool(beside))

    def _part(self, x: Tensor, p: Tensor) -> Tensor:
        """Copy a tensor, or spread elements if it has the shape of a large parameter."""
        is_large = x.shape == p.shape and p.numel() > self._most
        return (evenly_spread(x) if is_large else local_of(x.detach())).clone()

    def _values(self, p: Tensor) -> Values:
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
            sample.after = self._values(sample.parameter)

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
        if self.reference is not None or weight.dtype not in _NARROW:
            return moved
        for name in sample.compared()[:-1]:
            rest = sample.after[name].double()
            for whole in (moved + rest, moved - rest):
                is_whole = (whole - intended).norm() <= UNEXPLAINED * intended.norm()
                moved = torch.where(is_whole, whole, moved)
        return moved

    def readings(self) -> Iterator[Reading]:
        """Compare the step with that of its class in ``torch.optim``."""
        if self.reference is None or self._is_skipped:
            return
        samples = [_stepped_in_master(s) for s in self.samples if s.gradient is not None]
        if not samples:
            return
        for sample in samples:
            yield from _count_readings(sample)
        exact = self._as_class(samples, torch.float64)
        stored = self._as_class(samples, torch.float32)
        plainly = self._as_class(samples, None)
        places = []
        rows = []
        for index, sample in enumerate(samples):
            for name in sample.compared():
                if name in exact[index]:
                    places.append((index, name))
                    change = Change.of(sample, name, exact[index])
                    narrow = stored[index][name].double() - exact[index][name]
                    plain_step = plainly[index][name].double() - exact[index][name]
                    sizes = (
                        change.done - change.expected, change.expected, change.done, narrow, exact[index][name],
                        plain_step,
                    )  # fmt: skip
                    rows.append(torch.stack([x.norm() for x in sizes]))
        self.num_compared = len(samples)
        wrong: set[int] = set()
        for (index, name), sizes in zip(places, on_host(rows), strict=True):
            slack = _slack(samples[index], name, sizes)
            if index not in wrong and all(map(math.isfinite, sizes)) and sizes[0] > slack:
                wrong.add(index)  # with a wrong state the step is wrong, too
                yield from self._fitted(samples[index], name, exact[index], slack)

    def _as_class(
        self, samples: list[Sample], dtype: torch.dtype | None, without: str = "", **options: Any
    ) -> list[Values]:
        plain_step = {"foreach": False, "fused": None, "capturable": False, **options}
        return repeated(
            self.optimizer, samples, dtype, self.reference, without, self._scale, plain_step
        )

    def _fitted(self, sample: Sample, name: str, exact: Values, slack: float) -> Iterator[Reading]:
        """Fit the columns of a change, and read those that are not done once."""
        change = Change.of(sample, name, exact)
        expected = change.expected
        if name == "weight":
            (bare,) = self._as_class([sample], torch.float64, weight_decay=0.0)
            step = bare[name] - change.start
            columns = {"step": step, "decay": expected - step}
        else:
            (fresh,) = self._as_class([sample], torch.float64, without=name)
            columns = {"taken": fresh[name], "kept": expected - fresh[name]}
        size = float(expected.norm()) or float(change.done.norm())
        columns = {key: x for key, x in columns.items() if float(x.norm()) > 1e-9 * size}
        if len(columns) == 2:
            first, second = columns.values()
            cosine = float(first @ second) / float(first.norm() * second.norm())
            if abs(cosine) > 1 - ALIKE:  # of equal elements: no fit tells them apart
                columns = {next(iter(columns)): expected}
        factors, rest = fit(change.done, columns)
        wrong = {}
        for key, factor in factors.items():
            bound = slack / float(columns[key].norm())
            # A wrong rate multiplies the decay too. Do not report it twice.
            scaled = factors.get("step", 1.0) if key == "decay" else 1.0
            if min(abs(factor - 1), abs(factor - scaled)) > bound:
                wrong[key] = bound
        if name != "weight" and wrong:  # the farther one of the two
            far = max(wrong, key=lambda key: abs(factors[key] - 1))
            wrong = {far: wrong[far]}
        more = rounded_to(sample.after[name], exact[name])
        if wrong and rest <= max(2 * slack, UNEXPLAINED * size):
            for key, bound in wrong.items():
                yield _factor_reading(sample, name, key, factors[key], bound, more)
            return
        distance = float((change.done - expected).norm()) / size
        far_off = (change.done - expected).abs() > slack / math.sqrt(len(expected))
        share = float(far_off.double().mean())
        words = f"differs from its class's by {distance:.2g} of its length"
        kind = KINDS["weight" if name == "weight" else "state"]
        yield kind.reading(
            sample.name,
            distance,
            0.0,
            slack / size,
            state=name,
            words=words,
            share=share,
            more=more,
        )

    # ── before the next step ──────────────────────────────────────────────────────────────────────

    def written(self) -> Iterator[tuple[Reading, bool]]:
        """Compare weights and states with those that the step left.

        Yield a reading of each tensor, and whether it is a weight with new values of no known kind,
        or a state of a rule of its own.
        """
        pairs = []
        flags = []
        for sample in self.samples:
            now = self._values(sample.parameter)
            for name in sample.compared():
                before = sample.after[name]
                value = now.get(name)
                if value is not None and value.shape != before.shape:
                    continue  # of other shards
                pairs.append((sample, name, value))
                is_same = before.new_zeros((), dtype=torch.bool)
                if value is not None:
                    is_same = ((value == before) | before.isnan()).all()
                flags.append(is_same)
            count, expected = now.get("step"), sample.after.get("step")
            if count is not None and expected is not None and count != expected:
                kind = KINDS["step-count"]
                more = ", and no step was taken"
                yield kind.reading(sample.name, float(count), float(expected), more=more), False
        for (sample, name, value), is_same in zip(pairs, on_host(flags), strict=True):
            if not is_same:
                is_own = self.reference is None and name != "weight"
                for reading, is_plain in _written(sample, name, value):
                    yield reading, is_plain or is_own


class Change(NamedTuple):
    """What a step did to one tensor, what its class does, and the value from which both count."""

    done: Tensor
    expected: Tensor
    start: Tensor

    @classmethod
    def of(cls, sample: Sample, name: str, exact: Values) -> Change:
        target = exact[name].flatten()
        start = torch.zeros_like(target)
        if name == "weight":
            start = sample.before[name].double().flatten()
        return cls(sample.after[name].double().flatten() - start, target - start, start)


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


def fit(values: Tensor, columns: Mapping[str, Tensor]) -> tuple[dict[str, float], float]:
    """Return the factor of each column by least squares, and the length that they leave."""
    if not columns:
        return {}, float(values.norm())
    matrix = torch.stack([x.flatten() for x in columns.values()], 1).cpu()
    values = values.cpu()
    solution = torch.linalg.lstsq(matrix, values[:, None], driver="gelsd").solution[:, 0]
    rest = float((values - matrix @ solution).norm())
    return dict(zip(columns, solution.tolist(), strict=True)), rest


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


def _stepped_in_master(sample: Sample) -> Sample:
    """Return a sample whose weight is the master that the step moved."""
    before, after = sample.before, sample.after
    if not isinstance(before.get("master"), Tensor):
        return sample
    before = {**before, "weight": before["master"]}
    after = {**after, "weight": after["master"]}
    for values in (before, after):
        del values["master"]
    return Sample(sample.name, sample.parameter, sample.group, sample.gradient, before, True, after)


def _slack(sample: Sample, name: str, sizes: list[float]) -> float:
    """Return the largest distance that the stored formats explain."""
    _, expected, done, narrow, target, plain_step = sizes
    eps = torch.finfo(sample.after[name].dtype).eps
    slack = MARGIN * (narrow + eps * target) + LEAST * (expected or done)
    if eps > torch.finfo(torch.float32).eps and plain_step:
        # The stored format itself: its grid for a weight, its underflow for a state.
        bound = min if name == "weight" else max
        slack = bound(slack, 2 * plain_step)
    return slack


def _count_readings(sample: Sample) -> Iterator[Reading]:
    """Compare the count of steps with one step, and with moments that hold older gradients."""
    if "step" not in sample.after:
        return
    if torch.equal(sample.after["weight"], sample.before["weight"]):
        return
    kind = KINDS["step-count"]
    before = int(sample.before.get("step", 0))
    count = int(sample.after["step"])
    if count != before + 1:
        yield kind.reading(sample.name, count, before + 1, more=" and one more step")
    elif count == 1:
        more = " at least: its moments hold older gradients, and are corrected as if they had just begun"
        states = [sample.before[name] for name in sample.compared()[:-1] if name in sample.before]
        if any(bool(x.any()) for x in states):
            yield kind.reading(sample.name, 1, 2, more=more)


def _factor_reading(
    sample: Sample, name: str, key: str, factor: float, bound: float, more: str
) -> Reading:
    settings = sample.group[1]
    if key == "step":
        return KINDS["step-factor"].reading(
            sample.name, factor, 1.0, bound, rate=float(settings["lr"]), more=more
        )
    if key == "decay":
        decay = float(settings.get("weight_decay") or 0.0)
        return KINDS["weight-decay"].reading(sample.name, factor * decay, decay, bound * decay)
    word = "itself" if key == "kept" else "the gradient's term"
    words = (
        f"{key[:4] if key == 'kept' else 'took'} {factor:.6g} times as much of {word} as its class"
    )
    return KINDS["state"].reading(
        sample.name, factor, 1.0, bound, state=name, words=words, more=more
    )


def rounded_to(values: Tensor, expected: Tensor) -> str:
    """Name the smaller format that holds all values, if rounding the expected ones gives them;
    empty otherwise.
    """
    if values.dtype not in (torch.float32, torch.float64) or values.numel() < 8 or not values.any():
        return ""
    for dtype in _NARROW:
        rounded = expected.flatten().float().to(dtype).to(values.dtype)
        is_near = float((rounded == values.flatten()).double().mean()) >= 0.95  # few lie near a tie
        if is_near and torch.equal(values.to(dtype).to(values.dtype), values):
            return f"; it was rounded to {dtype_name(dtype)}"
    return ""


def _written(sample: Sample, name: str, value: Any) -> Iterator[tuple[Reading, bool]]:
    """Read a weight or state that the loop wrote after the step."""
    before = sample.after[name]
    kind = KINDS["weights-written" if name == "weight" else "states-written"]
    if value is None:
        yield (
            kind.reading(sample.name, 1.0, 0.0, 0.0, state=name, share=1.0, more=": it is lost"),
            False,
        )
        return
    now = value.double().flatten()
    old = before.double().flatten()
    length = float(old.norm())
    distance = float((now - old).norm()) / length if length else math.inf
    # Averages that are swapped in and back out leave a rounding error.
    slack = 4 * torch.finfo(before.dtype).eps
    if before.dtype in (torch.float32, torch.float64) and distance <= slack:
        return
    factor = float(now @ old) / length**2 if length else 0.0
    unstepped: Any = sample.before.get(name, before)
    more = rounded_to(value, before)
    if not now.any():
        more = ": it is lost"
    elif torch.equal(value, unstepped):
        more = ": it has the values from before the step again"
    elif not more and float((now - factor * old).norm()) <= slack * length:
        more = f": it was multiplied by {factor:.6g}"
    share = float((value != before).double().mean())
    reading = kind.reading(sample.name, distance, 0.0, 0.0, state=name, share=share, more=more)
    yield reading, name == "weight" and not more
