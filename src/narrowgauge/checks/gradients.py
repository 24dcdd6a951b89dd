"""Check the gradient of a set-up: compare one configured step with float32 in one process, on a deep copy.

The configured pass runs on the model itself, before training: with its mode, autocast, accumulation, loss scale, recomputation,
DDP, FSDP2 or compiled parts. Nothing of it stays. The reference is a deep copy in float32, without wrappers. It takes the
batches of all ranks at once. Both run in training mode, or in evaluation mode where training draws random numbers.

Monte Carlo arithmetic gives the bound: round every result of the reference at random, and measure the change of the gradient.
A difference within 4 times this change is rounding. A larger difference is fitted by one factor, or by a number for each
micro-batch and rank. Some differences have no fit.

Sources: D. S. Parker, Monte Carlo Arithmetic (UCLA CSD-970002, 1997). One bound per tensor: TTrace (2506.09280).
"""

from __future__ import annotations

import copy
import gc
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from narrowgauge.analysis.kinds import KINDS
from narrowgauge.analysis.reading import Reading, of_all
from narrowgauge.checks.set_up import NARROW, SetUp, inner_name
from narrowgauge.checks.slope import (
    Gradients,
    Loss,
    Widened,
    cast_to,
    float32_copy,
    gradients_of,
    scalar,
    slope_readings,
    whole,
)
from narrowgauge.distributed.ranks import Ranks, all_ranks
from narrowgauge.errors import NarrowgaugeError, RecipeError
from narrowgauge.numerics.dtensor import is_sharded
from narrowgauge.numerics.hashing import fingerprint
from narrowgauge.optim.optimizer import Optimizer
from narrowgauge.put_back import put_back
from narrowgauge.runs.finding import counted
from narrowgauge.spec.formats import FORMATS, dtype_name
from narrowgauge.torch_hooks import OwnHook
from narrowgauge.torch_names import graph_dtypes

MARGIN = 4.0
"""Bounds over the largest of some random roundings."""
FEW_ROUNDINGS, MANY_ROUNDINGS = 2, 20
"""Random roundings at first, and for a tensor near its bound: two are too few where a ReLU may flip."""
_NEAR_MISS = 4.0
"""Excess over a bound up to which more roundings are measured."""
LEAST = 2.0**-20
"""The least bound, eight ulps of float32: float32 sums in another order."""
_NEAR = 0.005
"""Relative distance within which a factor equals a number of the set-up."""
MOST_TERMS = 16
"""Fit the weight of each micro-batch in a gradient up to this number of micro-batches of all ranks."""
_NO_TERMS = "In a copy of the model the loss does not depend on it."
Backward = Callable[[nn.Module, Any], object]


class _Configured(NamedTuple):
    """A configured step: whole gradients without a loss scale, the formats of all results, the last loss, and the mode.

    Args:
        draws: whether a pass drew random numbers.
    """

    gradients: Gradients
    dtypes: set[torch.dtype]
    loss: Tensor | None
    is_training: bool
    draws: bool


def gradient_readings(
    set_up: SetUp, batch: Any, loss: Loss, backward: Backward | None, unseen: dict[str, str]
) -> tuple[list[Reading], list[str], list[str]]:
    """Compare the gradients of one configured step with the slope of the loss, and with float32's. All ranks make the call.

    Args:
        unseen: filled with the names that could not be compared, and the reasons.

    Returns:
        Readings beyond rounding, the same on every rank; lines; and what was looked at.
    """
    ranks, model = all_ranks(), set_up.model
    if any(p.is_complex() for p in model.parameters()):
        unseen["the gradient"] = "complex parameters"
        return [], [], []
    inside = set(map(id, model.parameters()))
    outside = {p.name: p.parameter for p in set_up.trained if id(p.parameter) not in inside}
    reference, before = float32_copy(model), _versions(model)
    parts = _micro_batches(reference, batch, loss)
    configured = _configured(set_up, outside, batch, parts, loss, backward, True, unseen)
    if ranks.largest(int(configured.draws)):
        configured = _configured(set_up, outside, batch, parts, loss, backward, False, unseen)
    if stepped := [name for name, version in _versions(model).items() if before[name] != version]:
        _put_weights_back(model, reference, stepped)
        return [KINDS["step-in-backward"].reading(of_all(stepped), len(stepped), 0)], [], []
    differing = _apart(configured.gradients, ranks)
    all_parts = [part for of_rank in ranks.gather(parts) for part in of_rank]
    formats = {dtype_name(dtype) for dtype in configured.dtypes} & FORMATS.keys()
    formats |= {"tfloat32"} if torch.get_float32_matmul_precision() != "highest" else set()
    unit = max((FORMATS[name].epsilon / 2 for name in formats), default=2.0**-24)

    def slope(whole_batch: Any, reasons: dict[str, str]) -> tuple[list[Reading], list[str], str]:
        _set_training(reference, True)
        readings, lines, value = slope_readings(reference, outside, whole_batch, loss)
        return readings + _loss_readings(model, value, lines), lines, "the slope of the loss"

    def one_process(whole_batch: Any, reasons: dict[str, str]) -> tuple[list[Reading], list[str], str]:
        _set_training(reference, configured.is_training)
        exact = _Reference(reference, outside, whole_batch, all_parts, loss, unit)
        readings, lines = _compared(exact, configured.gradients, ranks, differing, reasons)
        if configured.draws and any(reading.what in ("gradient", "gradient-factor") for reading in readings):
            raise ArithmeticError("the loss draws random numbers in evaluation mode too")
        if not configured.is_training:
            lines[-1] += "; in evaluation mode, since training draws random numbers"
        return readings, lines, f"gradients of {counted(len(exact.exact), 'tensor')}"

    def compare() -> tuple[list[Reading], list[str], list[str], dict[str, str]]:
        readings, lines, done, reasons = list[Reading](), list[str](), list[str](), dict[str, str]()
        whole_batch = concatenated(all_parts)
        for area, part in {"the slope of the loss": slope, "the gradient": one_process}.items():
            try:
                more, words, what = part(whole_batch, reasons)
            except NarrowgaugeError:
                raise
            except Exception as error:  # a kernel that takes other formats, too little memory, no slope
                reasons[area] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            else:
                readings, lines, done = readings + more, lines + words, [*done, what]
        return readings, lines, done, reasons

    readings, lines, done, reasons = ranks.of_first(compare)
    unseen |= reasons
    return readings, lines + coarse_loss(configured.loss), done


# ── as configured ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _set_training(model: nn.Module, is_training: bool) -> None:
    """Set the mode of a model. A model that trains already keeps the mode of each part."""
    if not is_training:
        for module in model.modules():
            module.training = False  # not train(False), which some modules override
    elif not model.training:
        model.train()


def _micro_batches(reference: nn.Module, batch: Any, loss: Loss) -> list[Any]:
    """Return the micro-batches in a list. A list of tensors that ``loss`` takes is one batch, as a DataLoader makes it."""
    if not isinstance(batch, list):
        return [batch]
    if not batch:
        raise RecipeError("Cannot compare gradients because batch= is an empty list.", "Pass a batch or micro-batches.")
    if any(isinstance(item, Tensor) for item in batch):
        try:
            with put_back(reference), torch.no_grad(), Widened():
                loss(reference, cast_to(batch, torch.float32, NARROW))
            return [batch]
        except Exception:  # whatever the user's code raises for what it cannot read
            pass
    return batch


def _versions(model: nn.Module) -> dict[str, int]:
    """Return how often each parameter was changed in place. FSDP2 writes its shards itself, so they are left out."""
    return {inner_name(name): p._version for name, p in model.named_parameters() if not is_sharded(p)}


def _put_weights_back(model: nn.Module, reference: nn.Module, names: Sequence[str]) -> None:
    values = {inner_name(name): p for name, p in reference.named_parameters()}
    with torch.no_grad():
        for name, p in model.named_parameters():
            if inner_name(name) in names:
                p.copy_(values[inner_name(name)])


def _configured(
    set_up: SetUp, outside: Mapping[str, Any], batch: Any, parts: Sequence[Any], loss: Loss, backward: Backward | None,
    is_training: bool, unseen: dict[str, str],
) -> _Configured:  # fmt: skip
    """Run the configured passes, and put everything back."""
    model, dtypes = set_up.model, set[torch.dtype]()
    value: Tensor | None = None
    ours = [optimizer for optimizer in set_up.optimizers if isinstance(optimizer, Optimizer)]
    reduction = next((optimizer.reduction for optimizer in ours), None)
    requests = [(scaler, scaler.request) for optimizer in ours if (scaler := optimizer.loss_scaler) is not None]

    def note(module: nn.Module, args: Any, output: Any) -> None:
        leaves = tree_leaves(_items(output) if is_dataclass(output) else output)
        dtypes.update(graph_dtypes(t for t in leaves if isinstance(t, Tensor) and t.grad_fn is not None))

    handle, generators = model.register_forward_hook(OwnHook(note)), _generators(model)
    parameters = {inner_name(name): p for name, p in model.named_parameters() if p.requires_grad} | dict(outside)
    with put_back(model, parameters.values(), set_up.optimizers) as unrestored, _Scales() as scales:
        _set_training(model, is_training)
        if not is_training:
            for module in model.modules():  # many a loop's backward= begins with model.train()
                vars(module)["train"] = partial(_unchanged, module)
        try:
            if backward is not None:
                backward(model, batch)
            for place, part in enumerate(parts) if backward is None else ():
                last = place == len(parts) - 1
                waits: AbstractContextManager[Any] = nullcontext() if last else getattr(model, "no_sync", nullcontext)()
                with waits if reduction is None else reduction.micro_batch(is_last=last):
                    value = scalar(loss(model, part))
                    dtypes |= graph_dtypes([value])
                    (value / len(parts)).backward()
        finally:
            handle.remove()
        scale: Tensor | float = scales.left
        for scaler, request in requests:
            if scaler.request is not request:  # this pass scaled its loss; the optimizer would divide
                scale, scaler.request = scaler.scale_tensor, request
        gradients = {}
        for name, p in parameters.items():
            gradient = p.grad if p.grad is not None else getattr(p, "main_grad", None)
            if isinstance(gradient, Tensor):
                gradients[name] = whole(gradient.detach()).to_dense().clone()
                if isinstance(scale, Tensor) or scale != 1:
                    gradients[name] = gradients[name].float() / scale
                dtypes.add(p.dtype)
        draws = any(not torch.equal(a, b) for a, b in zip(generators, _generators(model), strict=True))
    unseen |= unrestored
    return _Configured(gradients, dtypes, value, is_training, draws)


def _unchanged(module: nn.Module, mode: bool = True) -> nn.Module:
    return module


def _generators(model: nn.Module) -> list[Tensor]:
    """Return the states of PyTorch's generators that a pass may draw from."""
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in devices)]


class _Scales:
    """The loss scale that torch's scalers apply in a pass. Scalers are as before at the end."""

    def __enter__(self) -> _Scales:
        self.scaled, self.unscaled = list[torch.amp.GradScaler](), list[torch.amp.GradScaler]()
        scalers = [x for x in gc.get_objects() if issubclass(type(x), torch.amp.GradScaler)]
        self.before = [(scaler, copy.deepcopy(vars(scaler))) for scaler in scalers]
        for scaler in scalers:  # attributes of the object, which go with the rest
            for name, calls in (("scale", self.scaled), ("unscale_", self.unscaled)):
                vars(scaler)[name] = partial(self._noted, calls, scaler, getattr(scaler, name))
        return self

    @staticmethod
    def _noted(calls: list[Any], scaler: torch.amp.GradScaler, call: Callable[[Any], Any], value: Any) -> Any:
        calls.append(scaler)
        return call(value)

    @property
    def left(self) -> float:
        """Return the scale by which the scaler's step would still divide."""
        return self.scaled[-1].get_scale() if self.scaled and not self.unscaled else 1.0

    def __exit__(self, *_: object) -> None:
        for scaler, attributes in self.before:
            vars(scaler).clear()
            vars(scaler).update(attributes)


def _apart(gradients: Gradients, ranks: Ranks) -> dict[str, int]:
    """Return the number of ranks whose gradient has other bits than rank 0's, by tensor, without equal tensors."""
    first, *hashes = ranks.gather({name: fingerprint(gradient) for name, gradient in gradients.items()})
    counts = {name: sum(prints.get(name) != bits for prints in hashes) for name, bits in first.items()}
    return {name: count for name, count in counts.items() if count}


def _loss_readings(model: nn.Module, value: float, lines: list[str]) -> list[Reading]:
    """Compare a language model's loss at the start with that of equal probabilities, ln V."""
    size = max((m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)), default=0)
    has_head = any(isinstance(m, nn.Linear) and m.out_features == size for m in model.modules())
    if size < 2 or not has_head or not math.isfinite(value):
        return []
    uniform, kind = math.log(size), KINDS["loss-at-start"]
    off, low, high = abs(value / uniform - 1), 1e-3 * uniform, kind.bound * uniform
    words = f" beside ln {size:,} = {uniform:.4g}" if off > 0.01 else f" = ln {size:,}"
    lines.append(f"loss {value:.4g}{words}{', so the logits are equal' if off < 1e-5 else ''}")
    if low <= value <= high:
        return []
    words = "nearly zero: do the inputs hold the labels, or are all labels ignored?"
    if value > high:
        words = "more than equal probabilities give: look at the initial weights, or is it a sum?"
    return [kind.reading("", value, None, high if value > high else low, words=words)]


def coarse_loss(loss: Any) -> list[str]:
    """Return a line about a loss computed in 16 bits: it is read off by up to half an ulp.

    Example:
        >>> coarse_loss(torch.tensor(3.0, dtype=torch.bfloat16))
        ['loss in bfloat16: near 3 its values lie 0.0156 apart; take the loss of logits.float()']
    """
    if not isinstance(loss, Tensor) or loss.dtype not in NARROW or not loss.isfinite():
        return []
    spacing = torch.finfo(loss.dtype).eps * 2.0 ** math.floor(math.log2(max(abs(float(loss)), 2.0**-14)))
    return [
        f"loss in {dtype_name(loss.dtype)}: near {float(loss):.3g} its values lie {spacing:.3g} apart; take the loss of "
        "logits.float()"
    ]


def concatenated(parts: Sequence[Any]) -> Any:
    """Return micro-batches as one. Concatenate tensors along their first dim; dicts, tuples, lists, dataclasses item by item.

    Raises:
        RecipeError: the micro-batches cannot be concatenated.

    Example:
        >>> concatenated([(torch.zeros(2, 3), 1), (torch.ones(1, 3), 1)])[0].shape
        torch.Size([3, 3])
    """
    first = parts[0]
    if len(parts) == 1:
        return first
    if isinstance(first, Tensor):
        try:
            return torch.cat([part.to(first.device) for part in parts]) if first.ndim else first
        except RuntimeError as error:
            raise RecipeError(
                f"Cannot join the micro-batches because their shapes differ: {', '.join(str(tuple(p.shape)) for p in parts)}.",
                "Pad them to one length.",
            ) from error
    if isinstance(first, Mapping):
        return {key: concatenated([part[key] for part in parts]) for key in first}
    if isinstance(first, (tuple, list)):
        items = [concatenated(items) for items in zip(*parts, strict=True)]
        return type(first)(*items) if hasattr(first, "_fields") else type(first)(items)
    if is_dataclass(first) and not isinstance(first, type):
        return replace(first, **{name: concatenated([getattr(part, name) for part in parts]) for name in _items(first)})
    if first is not None and not isinstance(first, (int, float, str)):
        raise RecipeError(
            f"Cannot join micro-batches of type {type(first).__name__}.",
            "Pass tensors, in tuples, dicts or dataclasses.",
        )
    return first


def _items(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass by name, those that its constructor takes."""
    return {field.name: getattr(value, field.name) for field in fields(value) if field.init}


# ── the comparison ──────────────────────────────────────────────────────────────────────────────────────────────────────


class _Reference:
    """The gradients of a step in one process by tensor, and how far random roundings of every result move them.

    Args:
        model: a float32 copy. Our low-precision layers have their casts.
        outside: leaves beside the model, such as a head, that the loss uses.
        parts: the micro-batches of all ranks; ``batch`` joins them.
        unit: the largest relative rounding of a result.
    """

    def __init__(
        self, model: nn.Module, outside: Mapping[str, Any], batch: Any, parts: Sequence[Any], loss: Loss, unit: float
    ) -> None:
        self.model, self.loss, self.unit, self.num_roundings = model, loss, unit, 0
        self.leaves = {inner_name(name): p for name, p in model.named_parameters() if p.requires_grad} | dict(outside)
        self.batch, self.parts = (cast_to(x, torch.float32, NARROW) for x in (batch, list(parts)))
        self.exact = self.gradients(self.batch)
        for name in [name for name in outside if not self.exact[name].any()]:
            del self.exact[name], self.leaves[name]
        self.lengths = {name: float(r.norm()) for name, r in self.exact.items()}
        self.distances, self.factor_errors = dict.fromkeys(self.exact, 0.0), dict.fromkeys(self.exact, 0.0)
        self.round_until(FEW_ROUNDINGS)

    def gradients(self, batch: Any, unit: float = 0.0, seed: int = 0) -> Gradients:
        return gradients_of(self.model, self.leaves, batch, self.loss, Widened(torch.float32, unit, seed))[0]

    def round_until(self, number: int) -> None:
        """Measure by this number of roundings in all. Keep the largest distances, and not the gradients."""
        for seed in range(self.num_roundings, number):
            for name, g in self.gradients(self.batch, self.unit, seed).items():
                length = self.lengths[name] or 1.0
                self.distances[name] = max(self.distances[name], float((g - self.exact[name]).norm()) / length)
                self.factor_errors[name] = max(self.factor_errors[name], abs(self.factor(name, g) - 1))
        self.num_roundings = number

    def bound(self, name: str) -> float:
        """Return the largest relative distance that is rounding."""
        return max(LEAST, MARGIN * self.distances[name])

    def factor(self, name: str, gradient: Tensor) -> float:
        """Return the component of a gradient along the exact one, over the exact one."""
        length = self.lengths[name]
        return float((gradient * self.exact[name]).sum()) / length**2 if length else 1.0

    def weights(self, terms: Sequence[Gradients], name: str, gradient: Tensor) -> tuple[list[float], float]:
        """Return the weight of each micro-batch's gradient in a gradient, and the relative length that they do not explain."""
        columns = torch.stack([term[name].flatten().cpu() for term in terms], 1)
        target = gradient.flatten().cpu()
        weights = torch.linalg.lstsq(columns, target[:, None], driver="gelsd").solution[:, 0]
        return weights.tolist(), float((target - columns @ weights).norm()) / (float(target.norm()) or 1.0)


def _compared(
    reference: _Reference, gradients: Gradients, ranks: Ranks, differing: Mapping[str, int], reasons: dict[str, str]
) -> tuple[list[Reading], list[str]]:
    """Return the readings and a line. Before a tensor near its bound is accused, measure by more random roundings."""
    readings, equal = _differences(reference, gradients, ranks, differing, [])
    if any(reading.what.startswith("gradient") and reading.excess <= _NEAR_MISS for reading in readings):
        reference.round_until(MANY_ROUNDINGS)
        readings, equal = _differences(reference, gradients, ranks, differing, [])
    unexplained = [reading.tensor for reading in readings if reading.what == "gradient"]
    if unexplained and 1 < len(reference.parts) <= MOST_TERMS:
        terms = [reference.gradients(part) for part in reference.parts]
        if any(reference.weights(terms, name, reference.exact[name])[1] > 16 * LEAST for name in unexplained):
            # Such as a balance loss, or pairs within a batch: the sum of the parts is another function than the whole.
            reasons["the weights of micro-batches"] = "the loss over all of them is no weighted sum of their losses"
            reference.exact = {n: torch.stack([t[n] for t in terms]).mean(0) for n in reference.exact}
            reference.lengths = {name: float(r.norm()) for name, r in reference.exact.items()}
        readings, equal = _differences(reference, gradients, ranks, differing, terms)
    line = f"gradients: {len(equal)} of {counted(len(reference.exact), 'tensor')} equal to float32's in one process"
    if equal:
        line += f", within rounding (largest difference {max(equal):.1e}, unit roundoff {reference.unit:.1e})"
    return _grouped(readings, len(reference.exact)), [line]


def _differences(
    reference: _Reference, gradients: Gradients, ranks: Ranks, differing: Mapping[str, int], terms: Sequence[Gradients]
) -> tuple[list[Reading], list[float]]:
    """Return a reading for each tensor beyond its bound, and the distances of the others."""
    readings, distances, zero = list[Reading](), list[float](), list[str]()
    for name in reversed(reference.exact):  # in the order of backward
        if name in differing:
            readings.append(KINDS["not-reduced"].reading(name, differing[name], 0))
            continue
        r, length, bound = reference.exact[name], reference.lengths[name], reference.bound(name)
        g = gradients[name].to(r.device).double() if name in gradients else torch.zeros_like(r)
        distance, factor = float((g - r).norm()) / (length or 1.0), reference.factor(name, g)
        if bad := int((~g.isfinite()).sum()):
            if all(reading.what != "nonfinite-gradient" for reading in readings):  # the first in backward
                is_wide = bool(r.isfinite().all())
                wide = "float32's are" if is_wide else "nor are float32's, so look at weights, data and loss"
                readings.append(KINDS["nonfinite-gradient"].reading(name, bad, 0, wide=wide))
        elif not bool(g.any()) and (length or name not in gradients):
            zero.append(name)
        elif not length and distance > bound:
            readings.append(KINDS["gradient"].reading(name, distance, 0.0, bound, terms=_NO_TERMS))
        # Rounding may change a gradient by more than its length, but its component along the exact one by far less.
        elif distance <= bound and abs(factor - 1) <= max(_NEAR, MARGIN * reference.factor_errors[name]):
            distances.append(distance)
        elif factor and float((g - factor * r).norm()) <= bound * abs(factor) * length:
            equals = equal_to(factor, len(reference.parts) // ranks.size, ranks.size)
            readings.append(KINDS["gradient-factor"].reading(name, factor, 1.0, bound, equals=equals))
        else:
            words = _counts_of(reference, terms, name, g, bound) if terms else ""
            readings.append(KINDS["gradient"].reading(name, distance, 0.0, bound, terms=words))
    if zero:
        count = len(reference.exact)
        readings.append(KINDS["no-gradient"].reading(of_all(zero), len(zero), 0, count=count))
    return readings, distances


def _grouped(readings: Sequence[Reading], number: int) -> list[Reading]:
    """Join readings of one kind, and of one factor within their bounds. The tensor is empty if all tensors have the reading."""
    groups = list[list[Reading]]()
    for reading in readings:
        like = next((members for members in groups if _is_like(members[0], reading)), None)
        if like is None:
            groups.append([reading])
        else:
            like.append(reading)
    results = []
    for members in groups:
        worst, names = max(members, key=lambda r: r.excess), [r.tensor for r in members]
        results.append(replace(worst, tensor="" if len(names) == number > 1 else of_all(names)))
    return results


def _is_like(a: Reading, b: Reading) -> bool:
    near = max(_NEAR, a.bound or 0.0, b.bound or 0.0) * abs(a.value or 0.0)
    return a.what == b.what and (a.what != "gradient-factor" or abs((a.value or 0.0) - (b.value or 0.0)) <= near)


def _counts_of(reference: _Reference, terms: Sequence[Gradients], name: str, g: Tensor, bound: float) -> str:
    """Say how often each micro-batch counts, if a weighted sum of their gradients explains the difference."""
    weights, rest = reference.weights(terms, name, g)
    right, _ = reference.weights(terms, name, reference.exact[name])
    if rest > 2 * bound or min(map(abs, right)) < 1e-6:
        return ""
    times = ", ".join(f"{round(a / b, 4) + 0.0:.3g}" for a, b in zip(weights, right, strict=True))
    return f"Micro-batches count {times} times, rank after rank."


def equal_to(factor: float, num_parts: int, num_ranks: int) -> str:
    """Return ``, which is NAME`` for a factor that equals a number of the set-up or a power of two.

    Example:
        >>> equal_to(4.001, 1, 4), equal_to(3.3, 1, 4), equal_to(65536, 1, 4)
        (', which is the number of ranks', '', ', which is 2^16, the loss scale that torch begins with')
    """
    counts = {"the number of ranks": num_ranks, "the number of micro-batches": num_parts}
    if min(num_parts, num_ranks) > 1:
        counts["micro-batches times ranks"] = num_parts * num_ranks
    numbers = [(float(n), name) for name, n in counts.items()] + [(1 / n, f"1 / {name}") for name, n in counts.items()]
    names = [name for number, name in numbers if number != 1 and abs(factor / number - 1) < _NEAR]
    power = round(math.log2(abs(factor)))
    if not names and power and abs(factor / 2.0**power - 1) < _NEAR:
        names = [f"2^{power}" + (", the loss scale that torch begins with" if power == 16 else "")]
    return f", which is {' and '.join(names)}" if names else ""
