"""``narrowgauge.same``: compare two models: weights, then modules, then log probabilities.

The inputs and outputs of modules are recorded, and compared place by place. How much rounding
explains is measured: beside both passes run float64 shadows
(:mod:`narrowgauge.measuring.check.policies.float64_shadow`).
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules import module as global_hooks

from narrowgauge.errors import DataError
from narrowgauge.measuring.check.dispatch import Operation, PolicyMode, is_float, tensors_in
from narrowgauge.measuring.check.policies.float64_shadow import Float64Shadow
from narrowgauge.measuring.reading import measured, of_all
from narrowgauge.measuring.same.weights import Same, compare_weights, with_weights
from narrowgauge.measuring.unit_roundoff import FINEST, unit_of
from narrowgauge.runs.text import plural
from narrowgauge.spec.tables import Table
from narrowgauge.torch_support.preserve import generator_states, preserve_generators, preserve_model
from narrowgauge.torch_support.torch_names import bare_name, tree_map_only, unwrapped_model

MARGIN = 4.0
"""Bounds over the roundings of one pass."""
UNUSUAL = 1 / 16
"""Relative distance that roundings of one place give at most: 16 units of bfloat16, one of e4m3. A
place with more sets no bound.
"""
MOST_PLACES = 3
"""Printed places that differ."""
SHOWN = {"place": "tensor", "distance": "value", "roundings explain": "bound"}
"""Printed columns of a place."""
LOG_PROBS = "log probabilities"
HAS_WEIGHTS = nn.Module, str, Path, Mapping
INTEGERS = (torch.int8, torch.uint8, torch.int32)
"""Formats of codes and of their products."""
Outputs = dict[str, list[Tensor]]
"""The float tensors at each place, in the order of the calls."""


def same(first: Any, second: Any, batch: Any = None) -> Same:
    """Compare two models, such as what trains with what serves it, or a checkpoint with a later
    one, and name the first place where they differ.

    Weights are compared first, without calling the models: values that differ or are not
    finite, formats, codes at their scales, adapters. With ``batch``,
    both run in evaluation mode, once with the weights that codes stand for, and again beside float64
    shadows. The roundings of the one in fewer bits, or else the smaller ones, are the bounds of modules'
    outputs and of log probabilities. Modules are paired by name. Both are as before at the end.

    Args:
        first: a module; a ``state_dict`` (clone its tensors before training), a ``.safetensors``
            file, a folder of them, or a checkpoint of ``torch.distributed``. With ``batch`` also a
            function of the batch that returns logits or log probabilities; weights alone run in a
            copy of the other side.
        second: the same.
        batch: token ids ``[sequences, positions]``, or a dict with ``input_ids``, of arguments of
            both models.
    Returns:
        The readings beyond their bound; none if both are one. A difference that is of rounding is
            no reading.
    Raises:
        DataError: log probabilities of other numbers of tokens; a batch without a module.
        RecordError: a path holds no weights, damaged ones, or tensors in parts.

    Cost: 7 ns a value. With a batch up to eight passes, half of them with shadows in float64, and memory
    for the outputs of three: pass few sequences.

    Example:
        >>> import torch, narrowgauge as ng
        >>> trainer = torch.nn.Sequential(torch.nn.Embedding(9, 8), torch.nn.Linear(8, 9))
        >>> print(ng.same(trainer, trainer, torch.arange(8).view(2, 4)).lines[-1])
        In evaluation mode, the bits are equal.
    """
    result = Same()
    if batch is None or (isinstance(first, HAS_WEIGHTS) and isinstance(second, HAS_WEIGHTS)):
        result = compare_weights(first, second)
    if batch is None:
        return result
    ours = _called(first, second)
    theirs = _called(second, first)
    if {getattr(side, "training", None) for side in (ours, theirs)} == {True, False}:
        what = f"the {'first' if ours.training else 'second'} in training mode, as it was passed"
        result.unseen[what] = "both ran in evaluation mode"
    with preserve_generators():
        codes = {row["codes"] for row in result.rows} - {""}
        if codes:
            one = _run(ours, batch).outputs.get(LOG_PROBS)
            other = _run(theirs, batch).outputs.get(LOG_PROBS)
            if one and other and one[0].shape == other[0].shape:
                rms, _ = _sizes_of(one[0] - other[0])
                words = f"log probabilities of both as they are differ by {rms:.2g} nats (RMS)"
                result.lines += [words, "With the weights that the codes stand for on both sides:"]
            # Another server of the same codes computes the same.
            if codes == {"first"}:
                theirs = with_weights(theirs, first)
            else:
                ours = with_weights(ours, second)
        _compare_passes(ours, theirs, batch, result)
    return result


def _called(side: Any, other: Any) -> Any:
    """Return what is called of a side, without the wrapper of a compiler, whose output is another
    place. Weights alone run in a copy of the other side.
    """
    if isinstance(side, nn.Module):
        return unwrapped_model(side)
    return with_weights(other, side) if isinstance(side, HAS_WEIGHTS) else side


# ── a pass ────────────────────────────────────────────────────────────────────────────────────────


class ServedShadow(Float64Shadow):
    """Follow no values that are cast to integers, as those of a server's layers: the integers are the
    step's, with their roundings.
    """

    def after(self, op: Operation, arguments: Any) -> None:
        super().after(op, arguments)
        is_cast = any(map(is_float, op.operands)) or not all(map(self.follows, op.operands))
        for x in tensors_in(op.result):
            if is_cast and x.dtype in INTEGERS:
                self._lose([x], op.name)


class Recording:
    """Record the inputs and outputs of all modules that are called.

    Args:
        side: what runs.
        forced: of an earlier pass, by place. A module there takes and returns these tensors, after
            the pass's own were recorded. So each place shows what it does itself. ``None`` of a pass
            without shadows.

    Attributes:
        outputs: of each place; later calls of a module are places of their own. The last place are the
            log probabilities of the tokens, if the model returns logits.
        noises: distances from the shadows, of places whose shadows are known; of each of the log
            probabilities.
        roundoffs: the unit roundoff of the coarsest product, or cast to 8 bits, since the place before;
            of the log probabilities in the whole pass.
        unit: the unit roundoff of the coarsest output.
        draws: whether the pass drew random numbers.
    """

    def __init__(self, side: Any, forced: Outputs | None) -> None:
        self.side = side
        self.forced = forced or {}
        self.wide = None if forced is None else ServedShadow()
        self.outputs = Outputs()
        self.noises = dict[str, Any]()
        self.roundoffs = dict[str, float]()
        self.draws = False
        self._names = dict[nn.Module, str]()
        self._calls = Counter[str]()

    def before(self, module: nn.Module, args: Any) -> Any:
        if module not in self._names:
            for name, member in module.named_modules():
                self._names.setdefault(member, bare_name(name) or "the model")
        return self._record(f"{self._names[module]}, input", args)

    def after(self, module: nn.Module, args: Any, result: Any) -> Any:
        return self._record(self._names[module], result)

    def _record(self, place: str, values: Any) -> Any:
        # A merged layer is like an adapted one only as a whole.
        if ".base_layer" in place or ".lora_" in place:
            return values
        self._calls[place] += 1
        if self._calls[place] > 1:
            place = f"{place}, call {self._calls[place]}"
        tensors = []
        forced = iter(self.forced.get(place, ()))

        def taken(x: Tensor) -> Tensor:
            if not is_float(x):
                return x
            tensors.append(x.detach())
            other = next(forced, None)
            return x if other is None else other.to(x.dtype, copy=True)

        values = tree_map_only(Tensor, taken, values)
        if tensors:
            self.outputs[place] = [x.clone() for x in tensors]
            if self.wide is not None:
                self.roundoffs[place], _ = self.wide.coarsest
                self.wide.coarsest = (FINEST, "float32")
                if all(map(self.wide.follows, tensors)):
                    self.noises[place] = distance(tensors, map(self.wide.of, tensors))
        return values

    def end(self, result: Any, batch: Any) -> None:
        """Record what the model returns."""
        result = getattr(result, "logits", result)
        if isinstance(result, tuple):
            result = result[0]
        log_probs = _log_probs(result, batch)
        if log_probs is not None:
            self.outputs[LOG_PROBS] = [log_probs]
            self.roundoffs[LOG_PROBS] = max(self.roundoffs.values(), default=FINEST)
            if self.wide is not None and self.wide.follows(result):
                wide = _log_probs(self.wide.of(result), batch)
                self.noises[LOG_PROBS] = (wide - log_probs).abs()
        self.unit = max(map(unit_at, self.outputs.values()), default=FINEST)

    def roundoff_at(self, place: str) -> float:
        """Return the coarsest unit roundoff that acts on a place."""
        return max(self.unit, self.roundoffs[place])


def unit_at(tensors: list[Tensor]) -> float:
    """Return the unit roundoff of the coarsest of some tensors."""
    return max(unit_of(x.dtype) for x in tensors)


def distance(first: Iterable[Tensor], second: Iterable[Tensor]) -> float:
    """Return the largest distance between rows of two passes, relative to the row's length. For
    small rows, use a thousandth of the mean length.
    """
    largest = 0.0
    for x, y in zip(first, second, strict=True):
        if x.numel():
            row = x.double()
            off = torch.where(row == y, 0.0, y.double() - row)
            lengths = row.nan_to_num(posinf=0.0, neginf=0.0).norm(dim=-1)
            floor = 1e-3 * lengths.square().mean().sqrt() + 1e-300
            relative = off.nan_to_num(nan=math.inf).norm(dim=-1) / lengths.maximum(floor)
            largest = max(largest, float(relative.max()))
    return largest


def _run(side: Any, batch: Any, forced: Outputs | None = None) -> Recording:
    """Run a side once, a module in evaluation mode; beside shadows if ``forced`` are given."""
    recording = Recording(side, forced)
    is_module = isinstance(side, nn.Module)
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        if is_module:
            stack.enter_context(preserve_model(side))
            side.eval()
        for handle in (
            global_hooks.register_module_forward_pre_hook(recording.before),
            global_hooks.register_module_forward_hook(recording.after),
        ):
            stack.callback(handle.remove)
        policies = []
        if recording.wide is not None:
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))  # others have no float64
            policies.append(recording.wide)
        before = generator_states()
        with PolicyMode(*policies) as mode:
            is_named = is_module and isinstance(batch, Mapping)
            values = side(**batch) if is_named else side(batch)
        recording.draws = generator_states() != before or bool(mode.generators)
    recording.end(values, batch)
    return recording


# ── two passes ────────────────────────────────────────────────────────────────────────────────────


def _compare_passes(first: Any, second: Any, batch: Any, result: Same) -> None:
    """Compare outputs of modules and log probabilities; add readings, lines and ``unseen``."""
    ours = _run(first, batch)
    theirs = _run(second, batch)
    if ours.draws or theirs.draws:
        where = "outputs and log probabilities"
        result.unseen[where] = "a model draws random numbers in evaluation"
        return
    places = []
    missing = []
    is_equal = True
    for place in {**ours.outputs, **theirs.outputs}:
        one = ours.outputs.get(place, [])
        other = theirs.outputs.get(place, [])
        if [x.shape for x in one] == [x.shape for x in other]:
            places.append(place)
            is_equal = is_equal and all(map(torch.equal, one, other))
        else:
            missing.append(place)
    if LOG_PROBS in missing:
        raise DataError(
            "Cannot compare log probabilities because one model gives another number of them.",
            "Give both the same tokens.",
        )
    if places and not missing and is_equal:
        result.lines.append("In evaluation mode, the bits are equal.")
        return
    result.looked_at = "no difference is larger than rounding gives"
    forced = ours.outputs
    if missing:
        forced = Outputs()
        result.unseen[f"outputs of {of_all(missing)}"] = "not in both, or in another shape"
    shadowed = [_run(side, batch, forced) for side in (first, second)]
    _compare_places(places, shadowed, result)
    if LOG_PROBS in places:
        coarser = [_run(pass_.side, batch, {}) for pass_ in _coarser(shadowed, LOG_PROBS)]
        noises = [pass_.noises.get(LOG_PROBS) for pass_ in coarser]
        _compare_log_probs(ours, theirs, noises, result)
    else:
        result.unseen[LOG_PROBS] = "the results are not logits of tokens"


def _coarser(passes: list[Recording], place: str) -> list[Recording]:
    """Return the pass in fewer bits up to a place, or both if their bits are equal."""
    coarsest = max(pass_.roundoff_at(place) for pass_ in passes)
    return [pass_ for pass_ in passes if pass_.roundoff_at(place) == coarsest]


def _compare_places(places: list[str], shadowed: list[Recording], result: Same) -> None:
    """Compare outputs at places, and add the reading of the first one that differs by more than
    roundings explain.

    Args:
        shadowed: the passes of both sides with shadows. The roundings of the side in fewer bits count.
            In equal formats the smaller ones do: a fault sets no bound.
    """
    readings = []
    unfollowed = []
    for place in places:
        if place == LOG_PROBS:
            continue
        noises: list[Any] = [pass_.noises.get(place) for pass_ in _coarser(shadowed, place)]
        if None in noises:
            unfollowed.append(place)
            continue
        outputs = [pass_.outputs[place] for pass_ in shadowed]
        value = distance(*outputs)
        bound = MARGIN * min(*noises, UNUSUAL) + 3 * max(map(unit_at, outputs))
        readings.append(measured("other-outputs", place, value, 0.0, bound))
    differing = [reading for reading in readings if reading.value]
    number = plural(len(readings), "place")
    result.lines.append(f"outputs: {len(differing)} of {number} of modules differ")
    if unfollowed:
        result.unseen[f"outputs of {of_all(unfollowed)}"] = "their roundings are not followed"
    wrong = [reading for reading in differing if reading.excess > 1]
    if wrong:
        names = [reading.tensor for reading in wrong]
        result.readings.append(replace(wrong[0], tensor=of_all(names)))
    differing.sort(key=lambda reading: -reading.excess)
    if differing:
        result.lines += Table(differing[:MOST_PLACES], SHOWN).plain().splitlines()


def _compare_log_probs(ours: Recording, theirs: Recording, noises: list[Any], result: Same) -> None:
    """Compare log probabilities of both sides, beside what rounding changes."""
    difference = theirs.outputs[LOG_PROBS][0] - ours.outputs[LOG_PROBS][0]
    unit = max(ours.unit, theirs.unit)
    rms, largest = _sizes_of(difference)
    words = f"log probabilities of {plural(len(difference), 'token')}: "
    words += f"RMS difference {rms:.2g} nats, largest {largest:.2g}"
    if None in noises:
        result.lines.append(words)
        result.unseen[LOG_PROBS] = "their roundings are not followed"
        return
    rms_noise, largest_noise = _sizes_of(min(noises, key=torch.norm) + unit)
    result.lines.append(f"{words}; rounding alone: {rms_noise:.2g}, {largest_noise:.2g}")
    for value, bound in ((rms, MARGIN / 2 * rms_noise), (largest, MARGIN * largest_noise)):
        if value > bound:
            reading = measured("other-outputs", LOG_PROBS, value, 0.0, bound, stage="loss")
            result.readings.append(reading)
            return


def _sizes_of(x: Tensor) -> tuple[float, float]:
    """Return the root of the mean square, and the largest magnitude."""
    return float(x.square().mean().sqrt()), float(x.abs().max())


def _log_probs(values: Any, batch: Any) -> Any:
    """Return the log probability of each token but the first of a sequence, without padding, flat
    in float64; ``None`` if the values are not logits or log probabilities.
    """
    inputs = batch if isinstance(batch, Mapping) else {"input_ids": batch}
    tokens = inputs.get("input_ids")
    if not isinstance(tokens, Tensor) or tokens.is_floating_point() or tokens.ndim != 2:
        return None
    if values.ndim == 3 and values.shape[:2] == tokens.shape:
        values = values[:, :-1].double().log_softmax(-1)
        values = values.gather(-1, tokens[:, 1:, None])[..., 0]
    if values.ndim != 2:
        return None
    mask = inputs.get("attention_mask")
    if mask is None:
        mask = torch.ones_like(tokens)
    values = values[:, -(tokens.shape[1] - 1) :].double()
    return values[mask[-len(values) :, 1:].bool()]
