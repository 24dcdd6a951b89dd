"""Check the gradient of a set-up: compare one configured step with float32 in one process, on a deep copy.

The configured pass runs on the model itself, before training: with its autocast, accumulation, DDP, FSDP2 or compiled parts.
Its gradients, buffers and random generators are restored. The reference is a deep copy in float32, without wrappers. It
takes the batches of all ranks at once. Both run in evaluation mode, without dropout.

Monte Carlo arithmetic gives the bound: round every result of the reference at random, and measure the change of the gradient.
A difference within 4 times this change is rounding. A larger difference is fitted by one factor, or by a number for each
micro-batch and rank. Some differences have no fit.

Sources: D. S. Parker, Monte Carlo Arithmetic (UCLA CSD-970002, 1997). One bound per tensor: TTrace (2506.09280).
"""

from __future__ import annotations

import copy
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields, is_dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from narrowgauge.analysis.kinds import KINDS
from narrowgauge.analysis.reading import Reading, of_all
from narrowgauge.checks.set_up import NARROW, SetUp, inner_name
from narrowgauge.checks.step_check import joined
from narrowgauge.distributed.ranks import Ranks, all_ranks
from narrowgauge.errors import RecipeError
from narrowgauge.matmul.linear import NarrowLayer
from narrowgauge.numerics.dtensor import is_sharded
from narrowgauge.numerics.hashing import fingerprint
from narrowgauge.optim.optimizer import Optimizer
from narrowgauge.put_back import generators_put_back, put_back
from narrowgauge.runs.finding import counted
from narrowgauge.spec.computes import COMPUTES
from narrowgauge.spec.formats import FORMATS, Format, dtype_name
from narrowgauge.torch_hooks import OwnHook
from narrowgauge.torch_names import graph_dtypes, unwrapped_model

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
_LEAST_FACTOR = 0.25
"""Narrow casts round more values down than up, and so shorten a gradient by a few percent."""
MOST_TERMS = 16
"""Fit the weight of each micro-batch in a gradient up to this number of micro-batches of all ranks."""
Loss = Callable[[nn.Module, Any], Tensor]
Backward = Callable[[nn.Module, Any], object]
Gradients = dict[str, Tensor]


def gradient_readings(
    set_up: SetUp, batch: Any, loss: Loss, backward: Backward | None, unseen: dict[str, str]
) -> tuple[list[Reading], list[str]]:
    """Compare the gradients of one configured step with float32's in one process. All ranks make the call.

    Args:
        unseen: filled with the names that could not be compared, and the reasons.

    Returns:
        Readings beyond rounding, the same on every rank; and a line about the equal gradients.
    """
    ranks, model = all_ranks(), set_up.model
    if any(p.is_complex() for p in model.parameters()):
        unseen["the gradient"] = "complex parameters"
        return [], []
    parts = list(batch) if isinstance(batch, list) else [batch]
    if not parts:
        raise RecipeError("Cannot compare gradients because batch= is an empty list.", "Pass a batch or micro-batches.")
    reference, before = float32_copy(model), _versions(model)
    with put_back(model):
        for module in model.modules():
            module.training = False  # not train(False), which some modules override
        ours = [optimizer for optimizer in set_up.optimizers if isinstance(optimizer, Optimizer)]
        gradients, dtypes, objective = _configured(model, batch, parts, loss, backward, ours)
    if stepped := [name for name, version in _versions(model).items() if before[name] != version]:
        _put_weights_back(model, reference, stepped)
        return [KINDS["step-in-backward"].reading(of_all(stepped), len(stepped), 0)], []
    differing = _apart(gradients, ranks)
    all_parts = [part for of_rank in ranks.gather(parts) for part in of_rank]
    unit = _unit_roundoff(model, dtypes)

    def compare() -> tuple[list[Reading], list[str], str]:
        try:
            return *_compared(_Reference(reference, all_parts, loss, unit), gradients, ranks, differing), ""
        except RuntimeError as error:  # a kernel that takes 16 bits alone
            return [], [], f"the float32 copy cannot compute: {type(error).__name__}: {error}"[:200]

    readings, lines, why_not = ranks.of_first(compare)
    if why_not:
        unseen["the gradient"] = why_not
    return readings, lines + coarse_loss(objective)


# ── as configured ───────────────────────────────────────────────────────────────────────────────────────────────────────


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
    model: nn.Module, batch: Any, parts: Sequence[Any], loss: Loss, backward: Backward | None, ours: Sequence[Optimizer]
) -> tuple[Gradients, set[torch.dtype], Tensor | None]:
    """Run the configured passes. Return whole gradients without our loss scale, the formats of all results, and the last loss."""
    dtypes: set[torch.dtype] = set()
    value: Tensor | None = None
    reduction = next((optimizer.reduction for optimizer in ours), None)
    requests = [(scaler, scaler.request) for optimizer in ours if (scaler := optimizer.loss_scaler) is not None]

    def note(module: nn.Module, args: Any, output: Any) -> None:
        leaves = tree_leaves(_items(output) if is_dataclass(output) else output)
        dtypes.update(graph_dtypes(t for t in leaves if isinstance(t, Tensor) and t.grad_fn is not None))

    handle = model.register_forward_hook(OwnHook(note))
    try:
        if backward is not None:
            backward(model, batch)
        for place, part in enumerate(parts) if backward is None else ():
            last = place == len(parts) - 1
            waits: AbstractContextManager[Any] = nullcontext() if last else getattr(model, "no_sync", nullcontext)()
            with waits if reduction is None else reduction.micro_batch(is_last=last):
                value = _scalar(loss(model, part))
                dtypes |= graph_dtypes([value])
                (value / len(parts)).backward()
    finally:
        handle.remove()
    scale: Tensor | float = 1.0
    for scaler, request in requests:
        if scaler.request is not request:  # this pass scaled its loss; the optimizer would divide
            scale, scaler.request = scaler.scale_tensor, request
    gradients = {}
    for name, p in model.named_parameters():
        gradient = p.grad if p.grad is not None else getattr(p, "main_grad", None)
        if p.requires_grad and isinstance(gradient, Tensor):
            full = _whole(gradient.detach()).to_dense()
            gradients[inner_name(name)] = full.float() / scale if isinstance(scale, Tensor) else full.clone()
            dtypes.add(p.dtype)
    return gradients, dtypes, value


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


def _scalar(result: Any) -> Tensor:
    """Return what the user's ``loss`` returned, if a backward pass can begin there."""
    if not isinstance(result, Tensor) or result.numel() != 1 or not result.requires_grad:
        kind = f"shape {tuple(result.shape)}" if isinstance(result, Tensor) else f"a {type(result).__name__}"
        kind += ", without a graph" if isinstance(result, Tensor) and not result.requires_grad else ""
        raise RecipeError(
            f"Cannot compare gradients because loss(model, batch) returned {kind}.",
            "Return the mean loss over the batch, a tensor of one element.",
        )
    return result


def _whole(tensor: Any) -> Tensor:
    """Return a tensor with the parts of all ranks."""
    full: Tensor = tensor.full_tensor() if is_sharded(tensor) else tensor
    return full


def _unit_roundoff(model: nn.Module, dtypes: set[torch.dtype]) -> float:
    """Return the unit roundoff of the coarsest format in which the configured pass computes."""
    formats = {dtype_name(dtype) for dtype in dtypes} & FORMATS.keys()
    formats |= {"tfloat32"} if torch.get_float32_matmul_precision() != "highest" else set()
    for module in model.modules():
        if isinstance(module, NarrowLayer):
            formats |= {cast.format for cast in module.compute.casts.values() if cast.format in FORMATS}
    return max((_unit_of(FORMATS[name]) for name in formats), default=2.0**-24)


def _unit_of(row: Format) -> float:
    """Return the error of a value over the value, or for integers over a row's rms, about a quarter of its largest value."""
    return 2.0 / row.max if row.kind == "int" else row.epsilon / 2


def _apart(gradients: Gradients, ranks: Ranks) -> dict[str, int]:
    """Return the number of ranks whose gradient has other bits than rank 0's, by tensor, without equal tensors."""
    first, *hashes = ranks.gather({name: fingerprint(gradient) for name, gradient in gradients.items()})
    counts = {name: sum(prints.get(name) != bits for prints in hashes) for name, bits in first.items()}
    return {name: count for name, count in counts.items() if count}


# ── float32 in one process ──────────────────────────────────────────────────────────────────────────────────────────────


def float32_copy(model: nn.Module) -> nn.Module:
    """Return a deep copy in float32 and evaluation mode, unsharded, without wrappers, compiled code or FSDP2 hooks.

    All ranks of a sharded model make the call. Our low-precision layers multiply in float32.
    """
    model, memo, classes = unwrapped_model(model), dict[int, Any](), dict[nn.Module, type]()
    for p in model.parameters():
        memo[id(p)] = nn.Parameter(_whole(p.detach()).float().clone(), requires_grad=p.requires_grad)
    for module in model.modules():
        if type(module).__name__.startswith("FSDP") and len(type(module).__mro__) > 2:
            classes[module] = type(module)
            names = [name for name in module.__dict__ if "_hooks" in name or name.startswith("__composable_api_state")]
            memo |= {id(module.__dict__[name]): OrderedDict() for name in names}
        # Such as auxiliary losses and attention maps of an earlier forward pass: only leaves can be copied.
        results = [
            t for t in tree_leaves(list(vars(module).values())) if isinstance(t, Tensor) and t.grad_fn is not None
        ]
        memo |= {id(tensor): tensor.detach().clone() for tensor in results}
    try:
        for module, kind in classes.items():
            module.__class__ = kind.__mro__[2]
        twin = copy.deepcopy(model, memo)
    finally:
        for module, kind in classes.items():
            module.__class__ = kind
    for module in twin.modules():
        module.training = False
        if getattr(module, "_compiled_call_impl", None) is not None:
            module._compiled_call_impl = None
        if isinstance(module, NarrowLayer):
            module.set_compute(COMPUTES["float32"])
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.dtype in NARROW:
                module._buffers[name] = buffer.float()
    return twin


class Widened(TorchDispatchMode):
    """Compute in float32 instead of 16 bits, for casts by autocast or by the model. Round each result at random.

    Args:
        unit: the largest relative rounding of a result; 0 rounds nothing.
    """

    def __init__(self, unit: float = 0.0, seed: int = 0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.unit, self.generators, self.seed = unit, dict[torch.device, torch.Generator](), seed

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("dtype") in NARROW:
            kwargs["dtype"] = torch.float32
        result = func(*args, **kwargs)
        is_fresh = all(value.alias_info is None for value in func._schema.returns)
        return tree_map(self._rounded, result) if self.unit and is_fresh else result

    def _rounded(self, x: Any) -> Any:
        if not isinstance(x, Tensor) or not x.is_floating_point() or not x.numel():
            return x
        if x.device not in self.generators:
            self.generators[x.device] = torch.Generator(x.device).manual_seed(self.seed)
        noise = torch.rand(x.shape, generator=self.generators[x.device], device=x.device, dtype=torch.float32)
        # Coarser formats are those of casts, which take matrices: the loss stays in 16 bits or more.
        unit = self.unit if x.numel() > 1 else min(self.unit, 2.0**-8)
        return x * (1 + unit * (2 * noise - 1)).to(x.dtype)


def gradients_of(model: nn.Module, part: Any, loss: Loss, unit: float = 0.0, seed: int = 0) -> Gradients:
    """Return the gradients of a float32 model, float64 on its device."""
    named = {inner_name(name): p for name, p in model.named_parameters() if p.requires_grad}
    with generators_put_back(), Widened(unit, seed):
        gradients: Any = torch.autograd.grad(_scalar(loss(model, part)), list(named.values()), allow_unused=True)
    return {
        name: torch.zeros_like(p, dtype=torch.float64) if g is None else g.detach().to_dense().double()
        for (name, p), g in zip(named.items(), gradients, strict=True)
    }


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
    """The exact gradients of a step by tensor, and how far random roundings of every result move them.

    Args:
        parts: the micro-batches of all ranks. Their gradients are those of the mean over all of them.
        unit: the largest relative rounding of a result.
    """

    def __init__(self, model: nn.Module, parts: Sequence[Any], loss: Loss, unit: float) -> None:
        self.model, self.loss, self.unit = model, loss, unit
        self.parts = tree_map(lambda x: x.float() if isinstance(x, Tensor) and x.dtype in NARROW else x, list(parts))
        self.batch = concatenated(self.parts)
        self.exact = gradients_of(model, self.batch, loss)
        self.lengths = {name: float(r.norm()) for name, r in self.exact.items()}
        self.distances = dict.fromkeys(self.exact, 0.0)
        self.factor_errors = dict.fromkeys(self.exact, 0.0)
        self.num_roundings = 0
        self.round_until(FEW_ROUNDINGS)

    def round_until(self, number: int) -> None:
        """Measure by this number of roundings in all. Keep the largest distances, and not the gradients."""
        for seed in range(self.num_roundings, number):
            for name, g in gradients_of(self.model, self.batch, self.loss, self.unit, seed).items():
                distance = float((g - self.exact[name]).norm())
                self.distances[name] = max(self.distances[name], distance)
                self.factor_errors[name] = max(self.factor_errors[name], abs(self.factor(name, g) - 1))
        self.num_roundings = number

    def bound(self, name: str) -> float:
        """Return the largest relative distance that is rounding."""
        length = self.lengths[name]
        return max(LEAST, MARGIN * self.distances[name] / length) if length else LEAST

    def factor(self, name: str, gradient: Tensor) -> float:
        """Return the component of a gradient along the exact one, over the exact one."""
        length = self.lengths[name]
        return float((gradient * self.exact[name]).sum()) / length**2 if length else 1.0

    @cached_property
    def terms(self) -> list[Gradients]:
        """Return the gradients of each micro-batch, if there are several, but not too many."""
        is_worth = 1 < len(self.parts) <= MOST_TERMS
        return [gradients_of(self.model, part, self.loss) for part in self.parts] if is_worth else []


def _compared(
    reference: _Reference, gradients: Gradients, ranks: Ranks, differing: Mapping[str, int]
) -> tuple[list[Reading], list[str]]:
    """Return the readings and a line. Before a tensor near its bound is accused, measure by more random roundings."""
    readings, distances = list[Reading](), list[float]()
    for name in reversed(reference.exact):  # in the order of backward
        if name in differing:
            readings.append(KINDS["not-reduced"].reading(name, differing[name], 0))
            continue
        r, length, bound = reference.exact[name], reference.lengths[name], reference.bound(name)
        g = gradients[name].to(r.device).double() if name in gradients else torch.zeros_like(r)
        distance = float((g - r).norm()) / (length or 1e-300)
        factor = reference.factor(name, g)
        # Rounding may change a gradient by more than its length, but its component along the exact one by far less.
        is_along = abs(factor - 1) <= max(_LEAST_FACTOR, MARGIN * reference.factor_errors[name])
        if bad := int((~g.isfinite()).sum()):
            if all(reading.what != "nonfinite-gradient" for reading in readings):  # the first in backward
                wide = (
                    "float32's are"
                    if bool(r.isfinite().all())
                    else "nor are float32's, so look at weights, data and loss"
                )
                readings.append(KINDS["nonfinite-gradient"].reading(name, bad, 0, wide=wide))
        elif not bool(g.any()) and (length or name not in gradients):
            readings.append(KINDS["no-gradient"].reading(name, 1, 0, count=len(reference.exact)))
        elif distance <= bound and is_along:
            distances.append(distance)
        elif bound < distance <= _NEAR_MISS * bound and reference.num_roundings == FEW_ROUNDINGS:
            reference.round_until(MANY_ROUNDINGS)
            return _compared(reference, gradients, ranks, differing)
        elif factor and float((g - factor * r).norm()) <= bound * abs(factor) * length:
            equals = equal_to(factor, len(reference.parts) // ranks.size, ranks.size)
            readings.append(KINDS["gradient-factor"].reading(name, factor, 1.0, bound, equals=equals))
        else:
            terms = [term[name] for term in reference.terms]
            words = _counts_of(g, r, terms, bound) if terms else ""
            readings.append(KINDS["gradient"].reading(name, distance, 0.0, bound, terms=words))
    line = f"gradients: {len(distances)} of {counted(len(reference.exact), 'tensor')} equal to float32's in one process"
    if distances:
        line += f", within rounding (largest difference {max(distances):.1e}, unit roundoff {reference.unit:.1e})"
    return joined(readings, len(reference.exact)), [line]


def _counts_of(g: Tensor, r: Tensor, terms: Sequence[Tensor], bound: float) -> str:
    """Say how often each micro-batch counts, if a weighted sum of their gradients explains the difference."""
    columns = torch.stack([term.flatten().cpu() for term in terms], 1)
    pairs = torch.stack([g.flatten().cpu(), r.flatten().cpu()], 1)
    weights = torch.linalg.lstsq(columns, pairs, driver="gelsd").solution
    residual = float((pairs - columns @ weights)[:, 0].norm())
    if residual > 2 * bound * float(g.norm()) or bool((weights[:, 1].abs() < 1e-6).any()):
        return ""
    times = ", ".join(f"{round(ratio, 4) + 0.0:.3g}" for ratio in (weights[:, 0] / weights[:, 1]).tolist())
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
