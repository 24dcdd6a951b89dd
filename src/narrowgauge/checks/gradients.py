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
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import fields, is_dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.utils._pytree import tree_leaves

from narrowgauge.analysis.kinds import KINDS
from narrowgauge.analysis.reading import Reading, of_all
from narrowgauge.analysis.thresholds import LEAST
from narrowgauge.checks.float32_copy import (
    Gradients,
    Loss,
    Widened,
    cast,
    float32_copy,
    gradients_of,
    scalar,
)
from narrowgauge.checks.resume import generators
from narrowgauge.checks.set_up import NARROW, SetUp, inner_name
from narrowgauge.checks.slope import slope_readings
from narrowgauge.checks.step_check import joined
from narrowgauge.distributed.ranks import Ranks, all_ranks
from narrowgauge.errors import NarrowgaugeError, RecipeError
from narrowgauge.numerics.dtensor import is_sharded, whole
from narrowgauge.numerics.hashing import fingerprint
from narrowgauge.optim.optimizer import Optimizer
from narrowgauge.put_back import objects_of, put_back
from narrowgauge.runs.finding import counted
from narrowgauge.spec.formats import FORMATS, dtype_name
from narrowgauge.torch_hooks import OwnHook
from narrowgauge.torch_names import graph_dtypes

MARGIN = 4.0
"""Bounds over the largest of some random roundings."""
FEW_ROUNDINGS, MANY_ROUNDINGS = 2, 20
"""Random roundings at first, and where a tensor is within 4 bounds: two are too few where a ReLU may flip."""
_NEAR = 0.005
"""Relative distance within which a factor equals a number of the set-up."""
MOST_TERMS = 16
"""Fit the weight of each micro-batch in a gradient up to this number of micro-batches of all ranks."""
Backward = Callable[[nn.Module, Any], object]


class _Configured(NamedTuple):
    """A configured step: whole gradients without a loss scale, the formats of all results, the last loss, and the mode.

    Args:
        draws: whether a pass drew random numbers.
        scale: loss scale of the passes.
        unstepped: names of tensors with a gradient that are no parameters of a module and in no optimizer.
    """

    gradients: Gradients
    dtypes: set[torch.dtype]
    loss: Tensor | None
    is_training: bool
    draws: bool
    unstepped: list[str]
    scale: float


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
    outside: dict[str, Any] = {
        p.name: p.parameter for p in set_up.trained if id(p.parameter) not in inside
    }
    reference, versions = float32_copy(model), [p._version for p in model.parameters()]
    parts = micro_batches(reference, batch, loss)
    run = partial(configured_step, set_up, outside, batch, parts, loss, backward, unseen)
    configured = run(True)
    if ranks.largest(int(configured.draws)):
        configured = run(False)
    stepped = []
    for (name, p), values, version in zip(
        model.named_parameters(), reference.parameters(), versions, strict=True
    ):
        if not is_sharded(p) and p._version != version:  # FSDP2 writes its shards itself
            stepped.append(inner_name(name))
            p.data.copy_(values.data)
    if stepped:
        return [KINDS["step-in-backward"].reading(of_all(stepped), len(stepped), 0)], [], []
    differing = _apart(configured.gradients, ranks)
    of_ranks = ranks.gather(parts)
    all_parts = [part for of_rank in of_ranks for part in of_rank]
    formats = {dtype_name(dtype) for dtype in configured.dtypes} & FORMATS.keys()
    formats |= {"tfloat32"} if torch.get_float32_matmul_precision() != "highest" else set()
    unit = max((FORMATS[name].epsilon / 2 for name in formats), default=2.0**-24)

    def compare() -> tuple[list[Reading], list[str], list[str], dict[str, str]]:
        lines, done, reasons = list[str](), list[str](), dict[str, str]()
        readings = list(_equal_batches(model, of_ranks))
        whole_batch, leaves = concatenated(all_parts), _trainable(reference) | outside
        with reason_for_none("the slope of the loss", reasons):
            _set_training(reference, True)
            more, words, value = slope_readings(reference, leaves, whole_batch, loss)
            readings += more + _loss_readings(model, value, words)
            lines += words
            done.append("the slope of the loss")
        with reason_for_none("the gradient", reasons):
            _set_training(reference, configured.is_training)
            exact = _Reference(
                reference, leaves, outside, whole_batch, all_parts, loss, unit, ranks.size
            )
            more, line = _compared(exact, configured.gradients, differing, reasons)
            if configured.draws and any(
                reading.what in ("gradient", "gradient-factor") for reading in more
            ):
                raise ArithmeticError("the loss draws random numbers in evaluation mode too")
            readings += more
            lines.append(
                line
                + "; in evaluation mode, since training draws random numbers"
                * (not configured.is_training)
            )
            done.append(f"gradients of {counted(len(exact.exact), 'tensor')}")
        return readings, lines, done, reasons

    readings, lines, done, reasons = ranks.of_first(compare)
    unseen |= reasons
    if names := configured.unstepped:
        readings.append(KINDS["missing-parameters"].reading(of_all(names), len(names), 0))
    return readings, lines + coarse_loss(configured.loss), done


@contextmanager
def reason_for_none(area: str, reasons: dict[str, str]) -> Iterator[None]:
    """Note why an area is not compared: a kernel that takes other formats, too little memory, no slope."""
    try:
        yield
    except NarrowgaugeError:
        raise
    except Exception as error:
        reasons[area] = f"{type(error).__name__}: {error}".splitlines()[0][:200]


# ── as configured ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _trainable(model: nn.Module) -> dict[str, Any]:
    return {inner_name(name): p for name, p in model.named_parameters() if p.requires_grad}


def _set_training(model: nn.Module, is_training: bool) -> None:
    """Set the mode of a model. A model that trains already keeps the mode of each part."""
    if not is_training:
        for module in model.modules():
            module.training = False  # not train(False), which some modules override
    elif not model.training:
        model.train()


def micro_batches(reference: nn.Module, batch: Any, loss: Loss) -> list[Any]:
    """Return the micro-batches in a list. A list of tensors that ``loss`` takes is one batch, as a DataLoader makes it."""
    if not isinstance(batch, list):
        return [batch]
    if not batch:
        raise RecipeError(
            "Cannot compare gradients because batch= is an empty list.",
            "Pass a batch or micro-batches.",
        )
    if any(isinstance(item, Tensor) for item in batch):
        try:
            with put_back(reference), torch.no_grad(), Widened():
                loss(reference, cast(batch, torch.float32))
            return [batch]
        except Exception:  # whatever the user's code raises for what it cannot read
            pass
    return batch


def configured_step(
    set_up: SetUp, outside: Mapping[str, Any], batch: Any, parts: Sequence[Any], loss: Loss, backward: Backward | None,
    unseen: dict[str, str], is_training: bool,
) -> _Configured:  # fmt: skip
    """Run the configured passes, and put everything back."""
    model, dtypes = set_up.model, set[torch.dtype]()
    value: Tensor | None = None
    ours = [optimizer for optimizer in set_up.optimizers if isinstance(optimizer, Optimizer)]
    reduction = next((optimizer.reduction for optimizer in ours), None)
    requests = [
        (scaler, scaler.request)
        for optimizer in ours
        if (scaler := optimizer.loss_scaler) is not None
    ]

    def note(module: nn.Module, args: Any, output: Any) -> None:
        dtypes.update(graph_dtypes(_items(output) if is_dataclass(output) else output))

    states, parameters = generators(), _trainable(model) | dict(outside)
    handle = model.register_forward_hook(OwnHook(note))
    with (
        put_back(model, parameters.values(), set_up.optimizers) as unrestored,
        _scalers_put_back() as calls,
    ):
        _set_training(model, is_training)
        if not is_training:
            for module in model.modules():  # many a loop's backward= begins with model.train()
                vars(module)["train"] = lambda mode=True, module=module: module
        try:
            if backward is not None:
                backward(model, batch)
            for place, part in enumerate(parts) if backward is None else ():
                last = place == len(parts) - 1
                waits: AbstractContextManager[Any] = (
                    nullcontext() if last else getattr(model, "no_sync", nullcontext)()
                )
                with waits if reduction is None else reduction.micro_batch(is_last=last):
                    value = scalar(loss(model, part))
                    dtypes |= graph_dtypes([value])
                    (value / len(parts)).backward()
        finally:
            handle.remove()
        draws = generators() != states
        # A scaler's step would still divide gradients that were scaled last.
        scale: Any = calls[-1][1].get_scale() if calls and calls[-1][0] == "scale" else 1.0
        for scaler, request in requests:
            if (
                scaler.request is not request
            ):  # this pass scaled its loss; the optimizer would divide
                scale, scaler.request = scaler.scale_tensor, request
        gradients = {}
        for name, p in parameters.items():
            gradient = p.grad if p.grad is not None else getattr(p, "main_grad", None)
            if isinstance(gradient, Tensor):
                gradients[name] = whole(gradient.detach()).to_dense().clone()
                if isinstance(scale, Tensor) or scale != 1:
                    gradients[name] = gradients[name].float() / scale
                dtypes.add(p.dtype)
        known = {id(p) for p in (*model.parameters(), *outside.values())}
        leaves = [(name, x) for name, x in objects_of(model) if isinstance(x, Tensor) and x.is_leaf]
        unstepped = [
            inner_name(name) for name, x in leaves if x.grad is not None and id(x) not in known
        ]
    unseen |= unrestored
    return _Configured(gradients, dtypes, value, is_training, draws, unstepped, float(scale))


@contextmanager
def _scalers_put_back() -> Iterator[list[tuple[str, GradScaler]]]:
    """Restore torch's loss scalers at the end. Return the calls of ``scale`` and ``unscale_`` meanwhile."""
    calls = list[tuple[str, GradScaler]]()
    scalers = [x for x in gc.get_objects() if issubclass(type(x), GradScaler)]
    before = [copy.deepcopy(vars(scaler)) for scaler in scalers]

    def noted(name: str, scaler: GradScaler, method: Callable[[Any], Any], value: Any) -> Any:
        calls.append((name, scaler))
        return method(value)

    for scaler in scalers:
        for name in ("scale", "unscale_"):  # attributes of the object, which go with the rest
            vars(scaler)[name] = partial(noted, name, scaler, getattr(scaler, name))
    try:
        yield calls
    finally:
        for scaler, attributes in zip(scalers, before, strict=True):
            vars(scaler).clear()
            vars(scaler).update(attributes)


def _apart(gradients: Gradients, ranks: Ranks) -> dict[str, int]:
    """Return the number of ranks whose gradient has other bits than rank 0's, by tensor, without equal tensors."""
    first, *hashes = ranks.gather(
        {name: fingerprint(gradient) for name, gradient in gradients.items()}
    )
    counts = {
        name: sum(prints.get(name) != bits for prints in hashes) for name, bits in first.items()
    }
    return {name: count for name, count in counts.items() if count}


def vocabulary_of(model: nn.Module) -> int:
    """Return the outputs of the last linear layer with as many as an embedding has rows, the logits; 0 without one.

    Example:
        >>> vocabulary_of(nn.Sequential(nn.Embedding(65, 8), nn.Embedding(256, 8), nn.Linear(8, 65)))  # 256 positions
        65
    """
    sizes = {m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)}
    outputs = [
        m.out_features
        for m in model.modules()
        if isinstance(m, nn.Linear) and m.out_features in sizes
    ]
    return outputs[-1] if outputs else 0


def has_own_batches(model: nn.Module) -> bool:
    """Return whether each rank trains on its own batch. Ranks that share a layer by tensor parallelism may share one."""
    is_fsdp = any(type(m).__name__.startswith("FSDP") for m in model.modules())
    return is_fsdp or not any(map(is_sharded, model.parameters()))


def _equal_batches(model: nn.Module, of_ranks: Sequence[Any]) -> Iterator[Reading]:
    hashes = [
        [fingerprint(x) for x in tree_leaves(parts) if isinstance(x, Tensor)] for parts in of_ranks
    ]
    is_equal = len(hashes) > 1 and all(of_rank == hashes[0] != [] for of_rank in hashes)
    if is_equal and has_own_batches(model):
        words = "hold the same batch: give each rank its share of the data (DistributedSampler)"
        yield KINDS["equal-ranks"].reading("", len(hashes), 1, words=words)


def _loss_readings(model: nn.Module, value: float, lines: list[str]) -> list[Reading]:
    """Compare a language model's loss at the start with the loss of equal probabilities, ln V."""
    size = vocabulary_of(model)
    if size < 2 or not math.isfinite(value):
        return []
    uniform, kind = math.log(size), KINDS["loss-at-start"]
    off, low, high = abs(value / uniform - 1), 1e-3 * uniform, kind.bound * uniform
    words = f" beside ln {size:,} = {uniform:.4g}" if off > 0.01 else f" = ln {size:,}"
    lines.append(f"loss {value:.4g}{words}{', so the logits are equal' if off < 1e-5 else ''}")
    too_low = "nearly zero: do the inputs hold the labels, or are all labels ignored?"
    too_high = "more than equal probabilities give: look at the initial weights, or is it a sum?"
    ends = [(low, too_low)] * (value < low) + [(high, too_high)] * (value > high)
    return [kind.reading("", value, None, bound, words=words) for bound, words in ends]


def coarse_loss(loss: Any) -> list[str]:
    """Return a line about a loss computed in 16 bits: it is read off by up to half an ulp.

    Example:
        >>> coarse_loss(torch.tensor(3.0, dtype=torch.bfloat16))
        ['loss in bfloat16: near 3 its values lie 0.0156 apart; take the loss of logits.float()']
    """
    if not isinstance(loss, Tensor) or loss.dtype not in NARROW or not loss.isfinite():
        return []
    spacing = torch.finfo(loss.dtype).eps * 2.0 ** math.floor(
        math.log2(max(abs(float(loss)), 2.0**-14))
    )
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
    if len(parts) == 1 or first is None or isinstance(first, (int, float, str)):
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
        return replace(
            first,
            **{
                name: concatenated([getattr(part, name) for part in parts])
                for name in _items(first)
            },
        )
    raise RecipeError(
        f"Cannot join micro-batches of type {type(first).__name__}.",
        "Pass tensors, in tuples, dicts or dataclasses.",
    )


def _items(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass by name, those that its constructor takes."""
    return {field.name: getattr(value, field.name) for field in fields(value) if field.init}


# ── the comparison ──────────────────────────────────────────────────────────────────────────────────────────────────────


class _Reference:
    """The gradients of a step in one process by tensor, and how far random roundings of every result move them.

    Args:
        model: a float32 copy. Our low-precision layers have their casts.
        leaves: the copy's parameters that train, and those ``outside``, such as a head, that the loss may use.
        parts: the micro-batches of all ranks; ``batch`` joins them.
        unit: the largest relative rounding of a result.
    """

    def __init__(
        self, model: nn.Module, leaves: Mapping[str, Any], outside: Collection[str], batch: Any, parts: Sequence[Any],
        loss: Loss, unit: float, num_ranks: int,
    ) -> None:  # fmt: skip
        self.model, self.leaves, self.loss, self.unit, self.num_ranks = (
            model,
            leaves,
            loss,
            unit,
            num_ranks,
        )
        self.batch, *self.parts = cast([batch, *parts], torch.float32)
        exact = self.gradients(self.batch)
        self.exact = {name: r for name, r in exact.items() if name not in outside or r.any()}
        self.distances, self.factor_errors = (
            dict.fromkeys(self.exact, 0.0),
            dict.fromkeys(self.exact, 0.0),
        )
        self.num_roundings, self.is_sum = 0, True
        self.round_until(FEW_ROUNDINGS)

    def gradients(self, batch: Any, unit: float = 0.0, seed: int = 0) -> Gradients:
        return gradients_of(
            self.model, self.leaves, batch, self.loss, Widened(torch.float32, unit, seed)
        )[0]

    @cached_property
    def terms(self) -> list[Gradients]:
        """Return the gradients of each micro-batch, if there are several and not too many."""
        return (
            [self.gradients(part) for part in self.parts]
            if 1 < len(self.parts) <= MOST_TERMS
            else []
        )

    def round_until(self, number: int) -> None:
        """Measure by this number of roundings in all. Keep the largest distances, and not the gradients."""
        for seed in range(self.num_roundings, number):
            rounded = self.gradients(self.batch, self.unit, seed)
            for name, r in self.exact.items():
                distance, factor = _distance_and_factor(rounded[name], r)
                self.distances[name] = max(self.distances[name], distance)
                self.factor_errors[name] = max(self.factor_errors[name], abs(factor - 1))
        self.num_roundings = number

    def judge(self, name: str, g: Tensor, r: Tensor) -> Reading | float:
        """Return a reading of a gradient, or its relative distance from the exact one if rounding explains that."""
        bound, length = max(LEAST, MARGIN * self.distances[name]), float(r.norm())
        distance, factor = _distance_and_factor(g, r)
        # Rounding may change a gradient by more than its length, but its component along the exact one by far less.
        if distance <= bound and abs(factor - 1) <= max(_NEAR, MARGIN * self.factor_errors[name]):
            return distance
        if factor and length and float((g - factor * r).norm()) <= bound * abs(factor) * length:
            equals = equal_to(factor, len(self.parts) // self.num_ranks, self.num_ranks)
            return KINDS["gradient-factor"].reading(name, factor, 1.0, bound, equals=equals)
        words = "" if length else "In a copy of the model the loss does not depend on it."
        if length and self.terms:
            columns = torch.stack([term[name].flatten() for term in self.terms], 1)
            (right, left), (weights, rest) = _fit(columns, r), _fit(columns, g)
            if left > 16 * LEAST:
                # Such as a balance loss, or pairs within a batch: the sum of the parts is another function than the whole.
                self.is_sum = False
                return self.judge(name, g, columns.mean(1).view_as(r))
            if rest <= 2 * bound and min(map(abs, right)) >= 1e-6:
                times = ", ".join(
                    f"{round(a / b, 4) + 0.0:.3g}" for a, b in zip(weights, right, strict=True)
                )
                words = f"Micro-batches count {times} times, rank after rank."
        return KINDS["gradient"].reading(name, distance, 0.0, bound, terms=words)


def _distance_and_factor(g: Tensor, r: Tensor) -> tuple[float, float]:
    """Return the relative distance of a gradient from the exact one, and its component along that one."""
    length = float(r.norm())
    return float((g - r).norm()) / (length or 1.0), float(
        (g * r).sum()
    ) / length**2 if length else 1.0


def _fit(columns: Tensor, target: Tensor) -> tuple[list[float], float]:
    """Return the weights of columns by least squares, and the relative length that they do not explain."""
    columns, target = columns.cpu(), target.flatten().cpu()
    weights = torch.linalg.lstsq(columns, target[:, None], driver="gelsd").solution[:, 0]
    return weights.tolist(), float((target - columns @ weights).norm()) / (
        float(target.norm()) or 1.0
    )


def _compared(
    reference: _Reference,
    gradients: Gradients,
    differing: Mapping[str, int],
    reasons: dict[str, str],
) -> tuple[list[Reading], str]:
    """Return the readings and a line. Before a tensor near its bound is accused, measure by more random roundings."""
    readings, zero, results = dict[str, Reading](), list[str](), dict[str, Reading | float]()

    def gradient(name: str) -> Tensor:
        r = reference.exact[name]
        return gradients[name].to(r.device).double() if name in gradients else torch.zeros_like(r)

    for name in reversed(reference.exact):  # in the order of backward
        r, g = reference.exact[name], gradient(name)
        if name in differing:
            readings[name] = KINDS["not-reduced"].reading(name, differing[name], 0)
        elif bad := int((~g.isfinite()).sum()):
            wide = (
                "float32's are"
                if bool(r.isfinite().all())
                else "nor are float32's, so look at weights, data and loss"
            )
            readings.setdefault(
                "nonfinite", KINDS["nonfinite-gradient"].reading(name, bad, 0, wide=wide)
            )
        elif not bool(g.any()) and (bool(r.any()) or name not in gradients):
            zero.append(name)
        else:
            results[name] = reference.judge(name, g, r)
    if any(isinstance(result, Reading) and result.excess <= MARGIN for result in results.values()):
        reference.round_until(MANY_ROUNDINGS)
        results = {
            name: reference.judge(name, gradient(name), reference.exact[name]) for name in results
        }
    readings |= {name: result for name, result in results.items() if isinstance(result, Reading)}
    if zero:
        readings["zero"] = KINDS["no-gradient"].reading(
            of_all(zero), len(zero), 0, count=len(reference.exact)
        )
    if not reference.is_sum:
        reasons["the weights of micro-batches"] = (
            "the loss over all of them is no weighted sum of their losses"
        )
    equal = [result for result in results.values() if not isinstance(result, Reading)]
    line = f"gradients: {len(equal)} of {counted(len(reference.exact), 'tensor')} equal to float32's in one process"
    if equal:
        line += f", within rounding (largest difference {max(equal):.1e}, unit roundoff {reference.unit:.1e})"
    return joined(readings.values(), len(reference.exact)), line


def equal_to(factor: float, num_parts: int, num_ranks: int) -> str:
    """Return ``, which is NAME`` for a factor that equals a number of the set-up or a power of two.

    Example:
        >>> equal_to(4.001, 1, 4), equal_to(3.3, 1, 4), equal_to(65536, 1, 4)
        (', which is the number of ranks', '', ', which is 2^16, the loss scale that torch begins with')
    """
    counts = {"the number of ranks": num_ranks, "the number of micro-batches": num_parts}
    if min(num_parts, num_ranks) > 1:
        counts["micro-batches times ranks"] = num_parts * num_ranks
    numbers = [(n, name) for name, n in counts.items()] + [
        (1 / n, f"1 / {name}") for name, n in counts.items()
    ]
    names = [name for number, name in numbers if number != 1 and abs(factor / number - 1) < _NEAR]
    power = round(math.log2(abs(factor)))
    if not names and power and abs(factor / 2.0**power - 1) < _NEAR:
        names = [f"2^{power}" + ", the loss scale that torch begins with" * (power == 16)]
    return f", which is {' and '.join(names)}" if names else ""
