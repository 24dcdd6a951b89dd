"""Check the gradient of a set-up: one configured step beside its float32 shadow, and beside float32
in one process.

The configured pass runs on the model itself, before training: with its mode, autocast,
accumulation, loss scale, recomputation, DDP, FSDP2 or compiled parts. Nothing of it stays. Beside
it runs its shadow, the same pass without roundings (:mod:`narrowgauge.checks.shadow`). The gradient
minus its shadow is *rounding*: a number, divided among places (:mod:`narrowgauge.checks.ranked`).
The shadow minus the gradient of a float32 copy is *structure*: factors, micro-batches, reductions,
missing terms. It is fitted by one factor, or by a number for each micro-batch and rank.

Several ranks, and shards, have no shadow. There a copy in the model's formats runs in one process,
and its roundings give the bound. The copy takes the batches of all ranks at once. Both run in
training mode, or in evaluation mode where training draws random numbers.

Source of one bound per tensor: TTrace (2506.09280).
"""

from __future__ import annotations

import copy
import gc
import math
import random
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import fields, is_dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from narrowgauge.analysis.kinds import KINDS
from narrowgauge.analysis.reading import Reading, joined, of_all, words_of
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
from narrowgauge.checks.ranked import (
    Ranked,
    followed,
    not_finite,
    not_followed,
    not_measured,
    rank,
    ranked_places,
    scales,
)
from narrowgauge.checks.resume import generators
from narrowgauge.checks.set_up import NARROW, SetUp, inner_name
from narrowgauge.checks.shadow import Key, Shadow, eager, is_finite, tensors_in
from narrowgauge.checks.slope import slope_readings
from narrowgauge.checks.step_samples import evenly_spread
from narrowgauge.distributed.ranks import Ranks, all_ranks
from narrowgauge.distributed.replica_verification import possible_parts
from narrowgauge.errors import NarrowgaugeError, RecipeError
from narrowgauge.numerics.dtensor import is_sharded, named_gradients, whole
from narrowgauge.numerics.hashing import fingerprint
from narrowgauge.optim.optimizer import Optimizer
from narrowgauge.runs.finding import counted
from narrowgauge.spec.formats import dtype_name
from narrowgauge.torch_support.put_back import objects_of, put_back

MARGIN = 4.0
"""Bounds of what has no shadow, over the roundings of a copy in one process."""
_NEAR = 0.005
"""Relative distance within which a factor equals a number of the set-up."""
MOST_TERMS = 16
"""Fit the weight of each micro-batch in a gradient up to this number of micro-batches of all ranks.
"""
LEAST_VOCABULARY = 16
"""Rows of the smallest embedding that counts as one of tokens."""
_DRAWS = 8
"""Passes whose mean is compared, where evaluation mode draws random numbers too."""
Backward = Callable[[nn.Module, Any], object]


class _Configured(NamedTuple):
    """A configured step: whole gradients without a loss scale, the last loss, and the mode.

    Args:
        shadows: of the gradients that are followed.
        mode: the shadow execution; ``None`` without.
        causes: what made values of the loss and the gradients that are not finite, where it was
            traced.
        draws: whether a pass drew random numbers.
        loss_scale: of the passes, whether or not the gradients are unscaled.
        unstepped: names of tensors with a gradient that are no parameters of a module and in no
            optimizer.
    """

    gradients: Gradients
    shadows: Gradients
    mode: Shadow | None
    causes: list[Any]
    loss: Tensor | None
    is_training: bool
    draws: bool
    unstepped: list[str]
    loss_scale: float


def gradient_readings(
    set_up: SetUp, batch: Any, loss: Loss, backward: Backward | None, unseen: dict[str, str]
) -> tuple[list[Reading], list[str], list[str], float]:
    """Compare the gradients of one configured step with the slope of the loss, and with float32's.

    All ranks make the call.

    Args:
        unseen: filled with the names that could not be compared, and the reasons.

    Returns:
        Readings, the same on every rank; lines; what was looked at; and the loss, NaN if it was not
            read.
    """
    ranks = all_ranks()
    model = set_up.model
    for p in model.parameters():
        if p.is_complex():
            unseen["the gradient"] = "complex parameters"
            return [], [], [], math.nan
        if isinstance(getattr(p, "main_grad", None), Tensor):
            unseen["the gradient"] = "a kernel adds to main_grad, where a copy has none"
            return [], [], [], math.nan
    outside = set_up.outside
    reference = float32_copy(model)
    versions = [p._version for p in model.parameters()]
    parts = micro_batches(reference, batch, loss)
    follows = ranks.size == 1 and not any(map(is_sharded, model.parameters()))
    run = partial(configured_step, set_up, outside, batch, parts, loss, backward, unseen, follows)
    first = configured = run(True, measures=True)
    stepped = []
    for (name, p), values, version in zip(
        model.named_parameters(), reference.parameters(), versions, strict=True
    ):
        if not is_sharded(p) and p._version != version:  # FSDP2 writes its shards itself
            stepped.append(inner_name(name))
            p.data.copy_(values.data)
    if stepped:
        return [*KINDS["step-in-backward"].of(stepped)], [], [], math.nan
    ranked = _ranked(run, first) if follows else None
    draws = bool(ranks.largest(int(configured.draws)))
    samples = []
    if draws:
        configured = run(False)
        if ranks.largest(int(configured.draws)):
            samples = [run(False, seed=seed) for seed in range(_DRAWS)]
    differing = _differing_ranks(configured.gradients, ranks)
    in_parts: set[str] = set()
    if differing:
        in_parts = possible_parts(weights_of_ranks(model, ranks)).intersection(differing)
    if in_parts:
        # One process would wait for the others in the model's own collectives.
        words = f"ranks hold parts of {of_all(sorted(in_parts))}: no process has the whole model"
        unseen["the gradient"] = words
        return [], [], [], math.nan
    of_ranks = ranks.gather(parts)
    all_parts = list(chain.from_iterable(of_ranks))
    twin = None if follows else float32_copy(model, widens=False)

    def compare() -> tuple[list[Reading], list[str], list[str], dict[str, str], float]:
        lines = []
        value = math.nan
        done = []
        reasons = dict[str, str]()
        readings = list(_equal_batches(model, of_ranks))
        whole_batch = concatenated(all_parts)
        leaves = _trainable(reference) | outside
        with reason_for_none("the slope of the loss", reasons), _of_the_copy(model):
            set_training(reference, True)
            more, words, value = slope_readings(reference, leaves, whole_batch, loss)
            readings += more
            lines += words
            done.append("the slope of the loss")
        with reason_for_none("the gradient", reasons):
            set_training(reference, configured.is_training)
            rounding = ranked
            if twin is not None:
                set_training(twin, configured.is_training)
                rounding = _ranked_copy(twin, all_parts, loss)
            assert rounding is not None
            with _of_the_copy(model):
                exact = _Reference(
                    reference, leaves, outside, whole_batch, all_parts, loss, ranks.size
                )
            exact.set_bounds(configured, rounding, samples)
            more, words = _compared(exact, configured, differing, rounding, reasons)
            readings += more
            bad = first_not_finite(first.gradients)
            if bad and configured is not first:
                wide = "in evaluation mode they were compared"
                readings.append(_not_finite(bad, first, rounding, wide))
            if not bad:
                readings += rounding.readings()
            lines += words
            if not configured.is_training:
                mode = "structure compared in evaluation mode, since training draws random numbers"
                if samples:
                    mode += f"; evaluation mode draws too: means of {_DRAWS} passes"
                lines.append(f"  {mode}")
            done.append(f"gradients of {counted(len(exact.exact), 'tensor')}")
        return readings, lines, done, reasons, value

    readings, lines, done, reasons, value = ranks.of_first(compare)
    unseen |= reasons
    readings += KINDS["missing-parameters"].of(configured.unstepped)
    return readings, lines + coarse_loss(configured.loss), done, value


@contextmanager
def reason_for_none(area: str, reasons: dict[str, str]) -> Iterator[None]:
    """Note why an area is not compared: a kernel that takes other formats, too little memory, no
    slope.
    """
    try:
        yield
    except NarrowgaugeError:
        raise
    except Exception as error:
        reasons[area] = words_of(error)


@contextmanager
def _of_the_copy(model: nn.Module) -> Iterator[None]:
    """Refuse a pass of the copy that runs the model itself, as a patch by a closure does.

    Nothing stays in the model.
    """
    with put_back(model, model.parameters()):
        yield
        reached = [inner_name(n) for n, p in model.named_parameters() if p.grad is not None]
        if reached:
            raise ArithmeticError(
                f"a forward pass of the copy runs {of_all(reached)} of the model itself, as a "
                "patch by a closure does"
            )


# ── as configured ─────────────────────────────────────────────────────────────────────────────────


def _ranked(run: Callable[..., _Configured], first: _Configured) -> Ranked:
    """Rank the roundings of a configured step, or name the first value that is not finite."""
    if first_not_finite(first.gradients):
        return not_finite(run(True, traces=True).causes)
    assert first.mode is not None

    def repeat(chosen: Collection[Key]) -> Gradients:
        return run(True, chosen=chosen).shadows

    gradients = {name: g.double() for name, g in first.gradients.items()}
    return rank(gradients, first.shadows, first.mode, repeat)


def _ranked_copy(twin: nn.Module, parts: Sequence[Any], loss: Loss) -> Ranked:
    """Rank the roundings of a copy in the model's formats, over the micro-batches of all ranks."""

    def step() -> None:
        for part in parts:
            (scalar(loss(twin, part)) / len(parts)).backward()

    try:
        ranked = ranked_places(twin, step)
    except RuntimeError as error:  # such as inputs that FSDP2 would have cast
        return not_measured(words_of(error)[:200])
    if ranked.not_finite:
        return not_measured("the gradient of a copy is not finite")
    return ranked


def _trainable(model: nn.Module) -> dict[str, Any]:
    return {inner_name(name): p for name, p in model.named_parameters() if p.requires_grad}


def set_training(model: nn.Module, is_training: bool) -> None:
    """Set the mode of a model. A model that trains already keeps the mode of each part."""
    if not is_training:
        for module in model.modules():
            module.training = False  # not train(False), which some modules override
    elif not model.training:
        model.train()


def micro_batches(reference: nn.Module, batch: Any, loss: Loss) -> list[Any]:
    """Return the micro-batches in a list.

    A list of tensors that ``loss`` takes is one batch, as a DataLoader makes it.
    """
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
    unseen: dict[str, str], follows: bool, is_training: bool, *, seed: int | None = None, **asks: Any,
) -> _Configured:  # fmt: skip
    """Run the configured passes, and put everything back.

    Args:
        follows: run the shadow beside them. ``asks`` are its arguments.
        seed: of the random numbers; ``None`` draws on.
    """
    model = set_up.model
    mode = Shadow(**asks, model=model) if follows else None
    ours = [optimizer for optimizer in set_up.optimizers if isinstance(optimizer, Optimizer)]
    requests = [(x.loss_scaler, x.loss_scaler.request) for x in ours if x.loss_scaler is not None]
    parameters = _trainable(model) | dict(outside)
    with ExitStack() as undo:
        unrestored = undo.enter_context(put_back(model, parameters.values(), set_up.optimizers))
        scales = undo.enter_context(_scalers_put_back())
        set_training(model, is_training)
        if not is_training:
            for module in model.modules():  # many a loop's backward= begins with model.train()
                vars(module)["train"] = lambda mode=True, module=module: module
        if seed is not None:
            torch.manual_seed(seed)
            random.seed(seed)
        states = generators()
        with eager() if mode is not None else nullcontext(), mode or nullcontext():
            value = _passes(model, batch, parts, loss, backward, ours)
        draws = generators() != states
        scale: Any = scales.left
        loss_scale = scales.applied
        for scaler, request in requests:
            if scaler.request is not request:
                # This pass scaled its loss; the optimizer would divide.
                scale = scaler.scale_tensor
                loss_scale = float(scale)
                scaler.request = request
        raw = named_gradients(parameters)
        gradients = Gradients()
        for name, x in raw.items():
            gradients[name] = _unscaled(whole(x.detach()).to_dense().clone(), scale)
        shadows = Gradients()
        causes = []
        if mode is not None:
            for name, x in followed(mode, raw).items():
                shadows[name] = _unscaled(x, scale)
            causes = [mode.first_bad(x) for x in (value, *raw.values()) if x is not None]
        unstepped = []
        named_ids = set(map(id, (*model.parameters(), *outside.values())))
        for name, x in objects_of(model):
            if (
                isinstance(x, Tensor)
                and x.is_leaf
                and x.grad is not None
                and id(x) not in named_ids
            ):
                unstepped.append(inner_name(name))
    unseen |= unrestored
    return _Configured(
        gradients, shadows, mode, causes, value, is_training, draws, unstepped, loss_scale
    )


def _passes(
    model: nn.Module, batch: Any, parts: Sequence[Any], loss: Loss, backward: Backward | None, ours: Sequence[Optimizer]
) -> Tensor | None:  # fmt: skip
    """Run the loop's ``backward``, or each micro-batch's loss divided by their number.

    Return the last loss.
    """
    if backward is not None:
        backward(model, batch)
        return None
    value: Tensor | None = None
    reduction = next((optimizer.reduction for optimizer in ours), None)
    for place, part in enumerate(parts, 1):
        is_last = place == len(parts)
        waits: AbstractContextManager[Any] = nullcontext()
        if reduction is not None:
            waits = reduction.micro_batch(is_last=is_last)
        elif not is_last:
            waits = getattr(model, "no_sync", nullcontext)()
        with waits:
            value = scalar(loss(model, part))
            (value / len(parts)).backward()
    return value


def _unscaled(gradient: Tensor, scale: Any) -> Tensor:
    if isinstance(scale, Tensor) or scale != 1:
        wide: Tensor = gradient.to(torch.promote_types(gradient.dtype, torch.float32)) / scale
        return wide
    return gradient


class _Scales:
    """The loss scale of the last losses, and what is left of it in the gradients.

    A scaler's step would still divide gradients that were scaled last.
    """

    applied = 1.0
    left = 1.0

    def note(self, scaler: GradScaler, name: str, method: Callable[[Any], Any], value: Any) -> Any:
        result = method(value)
        self.left = 1.0
        if name == "scale":
            self.applied = self.left = scaler.get_scale()
        return result


@contextmanager
def _scalers_put_back() -> Iterator[_Scales]:
    """Note the calls of torch's loss scalers, and restore them at the end."""
    scales = _Scales()
    scalers = [x for x in gc.get_objects() if issubclass(type(x), GradScaler)]
    before = copy.deepcopy(list(map(vars, scalers)))
    for scaler in scalers:
        for name in ("scale", "unscale_"):  # attributes of the object, which go with the rest
            vars(scaler)[name] = partial(scales.note, scaler, name, getattr(scaler, name))
    try:
        yield scales
    finally:
        for scaler, attributes in zip(scalers, before, strict=True):
            vars(scaler).clear()
            vars(scaler).update(attributes)


def _differing_ranks(gradients: Gradients, ranks: Ranks) -> dict[str, int]:
    """Return the number of ranks whose gradient has other bits than rank 0's, by tensor, without
    equal tensors.
    """
    fingerprints = {name: fingerprint(gradient) for name, gradient in gradients.items()}
    first, *other_ranks = ranks.gather(fingerprints)
    counts = Counter[str]()
    for prints in other_ranks:
        counts.update(name for name, bits in first.items() if prints.get(name) != bits)
    return counts


def weights_of_ranks(model: nn.Module, ranks: Ranks) -> list[dict[str, int]]:
    """Return a hash of a sample of each weight by name, of each rank; none where parameters are
    sharded as DTensors. All ranks make the call.
    """
    weights = {}
    if ranks.size > 1 and not any(map(is_sharded, model.parameters())):
        for name, p in model.named_parameters():
            weights[inner_name(name)] = fingerprint(evenly_spread(p))
    return ranks.gather(weights)


def vocabulary_of(model: nn.Module) -> int:
    """Return the outputs of the last linear layer with as many as an embedding has rows, the
    logits; 0 without one.

    Example:
        >>> vocabulary_of(nn.Sequential(nn.Embedding(65, 8), nn.Embedding(256, 8), nn.Linear(8, 65)))  # 256 positions
        65
    """
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if isinstance(head, nn.Linear):
        return head.out_features
    modules = list(model.modules())
    sizes = {m.num_embeddings for m in modules if isinstance(m, nn.Embedding)}
    for m in reversed(modules):
        size = m.out_features if isinstance(m, nn.Linear) else 0
        if size in sizes and size >= LEAST_VOCABULARY:  # two token types are no vocabulary
            return size
    return 0


def has_own_batches(model: nn.Module) -> bool:
    """Return whether each rank trains on its own batch.

    Ranks that share a layer by tensor parallelism may share one.
    """
    is_fsdp = any(type(m).__name__.startswith("FSDP") for m in model.modules())
    return is_fsdp or not any(map(is_sharded, model.parameters()))


def _equal_batches(model: nn.Module, of_ranks: Sequence[Any]) -> Iterator[Reading]:
    hashes = []
    for parts in of_ranks:
        hashes.append(list(map(fingerprint, tensors_in(parts))))
    is_equal = bool(hashes[0]) and hashes.count(hashes[0]) == len(hashes) > 1
    if is_equal and has_own_batches(model):
        words = "hold the same batch: give each rank its share of the data (DistributedSampler)"
        yield KINDS["equal-ranks"].reading("", len(hashes), 1, words=words)


def coarse_loss(loss: Any) -> list[str]:
    """Return a line about a loss computed in 16 bits: it is read off by up to half an ulp.

    Example:
        >>> coarse_loss(torch.tensor(3.0, dtype=torch.bfloat16))
        ['loss in bfloat16: near 3 its values lie 0.0156 apart; take the loss of logits.float()']
    """
    if not isinstance(loss, Tensor) or loss.dtype not in NARROW or not loss.isfinite():
        return []
    exponent = math.floor(math.log2(max(abs(float(loss)), 2.0**-14)))
    spacing = torch.finfo(loss.dtype).eps * 2.0**exponent
    return [
        f"loss in {dtype_name(loss.dtype)}: near {float(loss):.3g} its values lie {spacing:.3g} "
        "apart; take the loss of logits.float()"
    ]


def concatenated(parts: Sequence[Any]) -> Any:
    """Return micro-batches as one.

    Concatenate tensors along their first dim; dicts, tuples, lists, dataclasses item by item.

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
            if first.ndim:
                return torch.cat([part.to(first.device) for part in parts])
            return first
        except RuntimeError as error:
            raise RecipeError(
                "Cannot join the micro-batches because their shapes differ: "
                f"{', '.join(str(tuple(part.shape)) for part in parts)}.",
                "Pad them to one length.",
            ) from error
    if isinstance(first, Mapping):
        return {key: concatenated([part[key] for part in parts]) for key in first}
    if isinstance(first, (tuple, list)):
        items = [concatenated(items) for items in zip(*parts, strict=True)]
        if hasattr(first, "_fields"):
            return type(first)(*items)
        return type(first)(items)
    if is_dataclass(first) and not isinstance(first, type):
        joined = {}
        for field in fields(first):
            if field.init:
                joined[field.name] = concatenated([getattr(part, field.name) for part in parts])
        return replace(first, **joined)
    raise RecipeError(
        f"Cannot join micro-batches of type {type(first).__name__}.",
        "Pass tensors, in tuples, dicts or dataclasses.",
    )


# ── the comparison ────────────────────────────────────────────────────────────────────────────────


class _Reference:
    """The gradients of a step in one process by tensor, in float32, and how far the configured ones
    may be from them.

    Args:
        model: a float32 copy, without any narrow cast.
        leaves: the copy's parameters that train, and those ``outside``, such as a head, that the
            loss may use.
        parts: the micro-batches of all ranks; ``batch`` joins them.

    Attributes:
        bounds: by tensor, relative to ``scales``.
        scales: length of each exact gradient, or the least length of a tensor of its size.
    """

    def __init__(
        self, model: nn.Module, leaves: Mapping[str, Any], outside: Collection[str], batch: Any, parts: Sequence[Any],
        loss: Loss, num_ranks: int,
    ) -> None:  # fmt: skip
        self.model = model
        self.leaves = leaves
        self.loss = loss
        self.num_ranks = num_ranks
        self.batch, *self.parts = cast([batch, *parts], torch.float32)
        exact = self.gradients(self.batch)
        self.exact = {name: r for name, r in exact.items() if name not in outside or r.any()}
        self.scales = scales(self.exact)
        self.bounds = dict.fromkeys(self.exact, KINDS["gradient"].bound)
        self.is_sum = True
        self._terms: list[Gradients] | None = None

    def gradients(self, batch: Any, seed: int | None = None) -> Gradients:
        with torch.random.fork_rng(devices=[]):
            if seed is not None:
                torch.manual_seed(seed)
            mode = Widened(torch.float32)
            return gradients_of(self.model, self.leaves, batch, self.loss, mode)[0]

    def terms(self) -> list[Gradients]:
        """Return the gradients of each micro-batch, if there are several and not too many."""
        if self._terms is None:
            is_fitted = 1 < len(self.parts) <= MOST_TERMS
            self._terms = []
            if is_fitted:
                self._terms += map(self.gradients, self.parts)
        return self._terms

    def set_bounds(
        self, configured: _Configured, rounding: Ranked, samples: Sequence[_Configured]
    ) -> None:
        """Allow for roundings where a gradient has no shadow, and for random numbers where each
        pass draws them.
        """
        chooses = configured.mode is not None and configured.mode.indices.total() > 0
        unit = rounding.unit or 2.0**-24
        for name in self.exact:
            if chooses or name not in configured.shadows:
                total = rounding.total
                allowed = MARGIN * (total.by_tensor.get(name, total.largest) + unit)
                self.bounds[name] = max(self.bounds[name], min(allowed, 1.0))
        if not samples:
            return
        passes = [self.gradients(self.batch, seed) for seed in range(len(samples))]
        for name, r in self.exact.items():
            mean, error = _mean_and_error([_compared_values(x, name, r) for x in samples])
            self.exact[name], own_error = _mean_and_error([x[name] for x in passes])
            compared = configured.gradients
            if name in configured.shadows:
                compared = configured.shadows
            compared[name] = mean
            allowed = MARGIN * (error + own_error) / self.scales[name]
            self.bounds[name] = max(self.bounds[name], allowed)

    def judge(self, name: str, g: Tensor, r: Tensor) -> Reading | float:
        """Return a reading of a gradient, or its relative distance from the exact one if that is
        within the bound.
        """
        bound = self.bounds[name]
        scale = self.scales[name]
        length = float(r.norm())
        distance = float((g - r).norm()) / scale
        if distance <= bound:
            return distance
        factor = 0.0
        words = "In a copy of the model the loss does not depend on it."
        if length:
            factor = float((g * r).sum()) / length**2
            words = ""
        rest = float((g - factor * r).norm())
        if factor and rest <= bound * abs(factor) * scale:
            equals = equal_to(factor, len(self.parts) // self.num_ranks, self.num_ranks)
            return KINDS["gradient-factor"].reading(name, factor, 1.0, bound, equals=equals)
        if length and self.terms():
            columns = torch.stack([term[name].flatten() for term in self.terms()], 1)
            right, misfit = _fit(columns, r)
            weights, rest = _fit(columns, g)
            if misfit > 16 * LEAST:
                # Such as a balance loss, or pairs within a batch: the sum of the parts is another
                # function than the whole.
                self.is_sum = False
                return self.judge(name, g, columns.mean(1).view_as(r))
            if rest <= 2 * bound and min(map(abs, right)) >= 1e-6:
                ratios = torch.tensor(weights) / torch.tensor(right)
                times = ", ".join(f"{round(ratio, 4) + 0.0:.3g}" for ratio in ratios.tolist())
                words = f"Micro-batches count {times} times, rank after rank."
        return KINDS["gradient"].reading(name, distance, 0.0, bound, terms=words)


def _mean_and_error(columns: Sequence[Tensor]) -> tuple[Tensor, float]:
    """Return the mean of some tensors, and the length of its standard error."""
    values = torch.stack(list(columns))
    return values.mean(0), float(values.var(0).sum().sqrt()) / math.sqrt(len(columns))


def _compared_values(configured: _Configured, name: str, r: Tensor) -> Tensor:
    """Return the shadow of a gradient, or the gradient where it is not followed; zeros without one."""
    x = configured.shadows.get(name, configured.gradients.get(name))
    if x is None:
        return torch.zeros_like(r)
    return x.to(r.device).double()


def _fit(columns: Tensor, target: Tensor) -> tuple[list[float], float]:
    """Return the weights of columns by least squares, and the relative length that they do not
    explain.
    """
    columns = columns.cpu()
    target = target.flatten().cpu()
    weights = torch.linalg.lstsq(columns, target[:, None], driver="gelsd").solution[:, 0]
    residual = float((target - columns @ weights).norm())
    return weights.tolist(), residual / (float(target.norm()) or 1.0)


def first_not_finite(gradients: Mapping[str, Tensor]) -> str:
    """Return the first gradient in backward that is not finite; empty without one."""
    for name in reversed(list(gradients)):
        if not is_finite(gradients[name]):
            return name
    return ""


def _not_finite(name: str, configured: _Configured, rounding: Ranked, wide: str) -> Reading:
    """Return a reading of a gradient that is not finite."""
    number = int((~configured.gradients[name].isfinite()).sum())
    place = f" First in the step: {rounding.not_finite}." if rounding.not_finite else ""
    return KINDS["nonfinite-gradient"].reading(name, number, 0, wide=wide, place=place)


def _compared(
    reference: _Reference,
    configured: _Configured,
    differing: Mapping[str, int],
    rounding: Ranked,
    reasons: dict[str, str],
) -> tuple[list[Reading], list[str]]:
    """Return the readings and lines. What is not finite comes first."""
    readings = []
    judged = []
    near = []
    gone = []
    zero = []
    bad = ""
    has_slope = False
    for name in reversed(reference.exact):  # in the order of backward
        r = reference.exact[name]
        g = configured.gradients.get(name)
        is_zero = not bool(r.any())
        has_slope = has_slope or not is_zero
        if name in differing:
            readings.append(KINDS["not-reduced"].reading(name, differing[name], 0))
        elif g is None or not bool(g.any()):
            if not is_zero:
                gone.append(name)
            elif g is None:
                zero.append(name)
        elif not is_finite(g):
            bad = bad or name
        else:
            judged.append(name)
            result = reference.judge(name, _compared_values(configured, name, r), r)
            if isinstance(result, Reading):
                readings.append(result)
            else:
                near.append(result)
    count = len(reference.exact)
    if bad:
        wide = "float32's are"
        if not is_finite(reference.exact[bad]):
            wide = "nor are float32's, so look at weights, data and loss"
        readings.append(_not_finite(bad, configured, rounding, wide))
    if not (bad or has_slope or judged):
        readings.append(KINDS["zero-gradients"].reading("", 1, 0, 0))
        zero = []
    words = "; float32's are not zero"
    readings += KINDS["no-gradient"].of(gone, count=count, words=words)
    words = ", nor in a float32 copy: no graph leads from the loss to them"
    readings += KINDS["no-gradient"].of(zero, count=count, words=words)
    if not reference.is_sum:
        why_not = "the loss over all of them is no weighted sum of their losses"
        reasons["the weights of micro-batches"] = why_not
    mode = configured.mode
    first, *more = rounding.lines()
    of_copy = "" if mode is not None else "in a copy in one process, "
    lines = [f"gradients of {counted(count, 'tensor')}: {of_copy}{first}", *more]
    lost = [name for name in judged if name not in configured.shadows]
    if mode is not None and lost:
        lines.append(not_followed(mode, lost))
    if mode is not None and mode.indices.total():
        ((site, name), number) = mode.indices.most_common(1)[0]
        lines.append(
            f"  {number} indices of {name} in {site} are others in float32, so bounds are wider"
        )
    if near:
        without = "with" if lost else "without"
        lines.append(
            f"  {without} their roundings {counted(len(near), 'tensor')} within {max(near):.1g} of "
            "float32's in one process"
        )
    return joined(readings, count), lines


def equal_to(factor: float, num_parts: int, num_ranks: int) -> str:
    """Return ``, which is NAME`` for a factor that equals a number of the set-up or a power of two.

    Example:
        >>> equal_to(4.001, 1, 4), equal_to(3.3, 1, 4), equal_to(65536, 1, 4)
        (', which is the number of ranks', '', ', which is 2^16, the loss scale that torch begins with')
    """
    counts = {"the number of ranks": num_ranks, "the number of micro-batches": num_parts}
    if min(num_parts, num_ranks) > 1:
        counts["micro-batches times ranks"] = num_parts * num_ranks
    names = []
    for name, number in counts.items():
        if number != 1 and abs(factor / number - 1) < _NEAR:
            names.append(name)
        if number != 1 and abs(factor * number - 1) < _NEAR:
            names.append(f"1 / {name}")
    power = round(math.log2(abs(factor)))
    if not names and power and abs(factor / 2.0**power - 1) < _NEAR:
        torchs = ", the loss scale that torch begins with" if power == 16 else ""
        names.append(f"2^{power}{torchs}")
    if names:
        return f", which is {' and '.join(names)}"
    return ""
