"""``narrowgauge.same``: compare two models: weights, then modules, then log probabilities.

The outputs of modules are compared with what rounding alone gives there
(:mod:`narrowgauge.measuring.outputs`).
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge.errors import DataError, RecipeError
from narrowgauge.measuring.outputs import (
    Outputs,
    RandomRounding,
    distance,
    last_bit,
    names_of,
    recorded,
    shapes_of,
)
from narrowgauge.measuring.reading import Reading, Readings, measured
from narrowgauge.measuring.units import unit_of
from narrowgauge.measuring.weights import (
    MOST_ROWS,
    Weights,
    compare_weights,
    tensor_name,
    tensors_of,
)
from narrowgauge.runs.finding import counted, told
from narrowgauge.spec.tables import Row, Table, name_columns, number_columns
from narrowgauge.torch_support.put_back import generators_put_back, put_back

_PASSES = 2
"""Passes with random roundings, of each kind."""
MARGIN = 4.0
"""Bounds over what random rounding gives."""
UNUSUAL = 1 / 16
"""Relative distance that roundings of one place give at most: 16 units of bfloat16. A place with
more sets no bound.
"""


class Same(Readings):
    """Hold the differences of two models; ``print`` shows them.

    Attributes:
        rows: a dict for each tensor of both, the farthest first
            (:func:`narrowgauge.measuring.weights.compare_weights`).
        places: a dict for each place of modules whose outputs differ, in the order of the pass:
            ``place``, ``difference``, ``bound``.
    """

    rows: list[Row]
    places: list[Row]

    def to_dict(self) -> dict[str, Any]:
        """Return the readings, rows and places as values for JSON."""
        return super().to_dict() | {"rows": self.rows, "places": self.places}


def same(
    first: Weights | Callable[[Any], Any],
    second: Weights | Callable[[Any], Any],
    batch: Any = None,
) -> Same:
    """Compare two models, such as what trains with what serves it, or a checkpoint with a later
    one, and name the first place where they differ.

    Weights are compared first, without calling the models: values that differ, vectors that are
    exactly 1, values that are not finite, formats, ties, adapters. With ``batch``, both run in
    evaluation mode. The first runs again with random roundings, which give the bounds of modules'
    outputs and of log probabilities. Modules are paired by name. Both are as before at the end.

    Args:
        first: a module; a ``state_dict`` (clone its tensors before training), a ``.safetensors``
            file, or a folder of them. With ``batch``: a module, or a function of the batch that
            returns logits or log probabilities.
        second: the same. With ``batch``, weights are loaded into a copy of the first (a folder with
            a ``config.json`` by ``from_pretrained`` of its class).
        batch: token ids ``[sequences, positions]``, or a dict with ``input_ids``, of arguments of
            both models.
    Returns:
        The readings beyond their bound; none if both are one. A difference that is of rounding is
            no reading.
    Raises:
        DataError: log probabilities of other numbers of tokens.
        RecipeError: functions and no batch, or weights beside a function.
        RecordError: a path holds no safetensors file, a damaged one, or tensors in parts.

    Cost: 7 ns a value. With a batch six passes of the first, four of them also in float64, two of
    the second, and memory for the outputs of four: pass few sequences.

    Example:
        >>> import torch, narrowgauge as ng
        >>> trainer = torch.nn.Sequential(torch.nn.Embedding(9, 8), torch.nn.Linear(8, 9))
        >>> print(ng.same(trainer, trainer.state_dict(), torch.arange(8).view(2, 4)).lines[-1])
        The bits are equal.
    """
    served: Any = second
    if isinstance(first, nn.Module) and isinstance(second, str | Path | Mapping):
        is_folder = not isinstance(second, Mapping) and (Path(second) / "config.json").is_file()
        if is_folder and hasattr(type(first), "from_pretrained"):
            second = served = _from_pretrained(first, second)
        elif batch is not None:
            served = _with_weights(first, second)
    kinds = nn.Module, str, Path, Mapping
    rows = list[Row]()
    readings = list[Reading]()
    lines = list[str]()
    if isinstance(first, kinds) and isinstance(second, kinds):
        rows, readings, lines = compare_weights(first, second)
    elif batch is None:
        raise RecipeError("Cannot compare functions because there is no batch.", "Pass batch=.")
    unseen = dict[str, str]()
    places = list[Row]()
    if batch is not None:
        if not callable(first) or not callable(served):
            raise RecipeError("Cannot call weights with a batch.", "Pass the module first.")
        passes = _Passes(first, served, batch, lines, unseen)
        places = passes.compare()
        readings += passes.readings
    result = Same(readings, lines, unseen=unseen)
    result.rows = rows
    result.places = places
    return result


def _from_pretrained(model: Any, folder: Any) -> nn.Module:
    attention = model.config._attn_implementation
    kind: Any = type(model)
    loaded: nn.Module = kind.from_pretrained(folder, dtype="auto", attn_implementation=attention)
    return loaded


def _with_weights(model: nn.Module, weights: Any) -> nn.Module:
    """Return a copy of a model with the tensors of a state_dict or of files."""
    twin = copy.deepcopy(model)
    tensors = tensors_of(weights)
    for name, x in [*twin.named_parameters(remove_duplicate=False), *twin.named_buffers()]:
        read = tensors.read.get(tensor_name(name))
        if read is not None and read().shape == x.shape:
            x.data = read().clone()
    return twin


# ── outputs and log probabilities ─────────────────────────────────────────────────────────────────


class _Passes:
    """Compare passes of two models over one batch.

    Args:
        lines: filled with what is printed.
        unseen: filled with what is not compared.
    """

    def __init__(
        self, first: Any, second: Any, batch: Any, lines: list[str], unseen: dict[str, str]
    ) -> None:
        self.first = first
        self.second = second
        self.batch = batch
        self.lines = lines
        self.unseen = unseen
        self.readings = list[Reading]()
        self._names = dict[nn.Module, str]()
        for side in (first, second):
            if isinstance(side, nn.Module):
                self._names |= names_of(side)

    def _run(
        self, side: Any, forced: Outputs, mode: Any = None, *, draws_on: bool = False
    ) -> tuple[Outputs, Any]:
        """Run a side once, a module in evaluation mode, and return the outputs of its modules and
        its log probabilities.

        Args:
            forced: outputs that modules take and return.
            draws_on: begin with other random numbers than the other passes.
        """
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            if isinstance(side, nn.Module):
                stack.enter_context(put_back(side))
                side.eval()
            outputs = stack.enter_context(recorded(self._names, forced))
            stack.enter_context(generators_put_back())
            if draws_on:
                torch.rand(1)
                random.random()
            stack.enter_context(mode or nullcontext())
            is_named = isinstance(side, nn.Module) and isinstance(self.batch, Mapping)
            if is_named:
                result = side(**self.batch)
            else:
                result = side(self.batch)
        return outputs, _log_probs(result, self.batch)

    def _noise(self, least: float, forced: Outputs) -> list[tuple[Outputs, Any]]:
        """Run the first model with random roundings."""
        passes = []
        for seed in range(_PASSES):
            passes.append(self._run(self.first, forced, RandomRounding(seed, least)))
        return passes

    def compare(self) -> list[Row]:
        """Compare outputs of modules and log probabilities; return the places that differ."""
        ours, log_probs = self._run(self.first, {})
        again, _ = self._run(self.first, {}, draws_on=True)
        if any(distance(ours, again, name) for name in ours):
            reason = "the first model draws random numbers in evaluation"
            self.unseen["outputs and log probabilities"] = reason
            return []
        theirs, served = self._run(self.second, {}, draws_on=True)
        units = _unit(ours), _unit(theirs)
        least = 0.0
        if units[1] > units[0]:
            least = units[1]

        noise = self._noise(least, ours)
        limit = max(UNUSUAL, 16 * least)
        unusual = {}
        for name, size in _largest(ours, noise).items():
            if size > limit:
                unusual[name] = ours[name]
                self.lines.append(f"{name}: roundings there move it by {size:.2g}, more than usual")
        whole_passes = self._noise(least, unusual)
        if shapes_of(ours) == shapes_of(theirs):
            theirs, _ = self._run(self.second, ours, draws_on=True)
        else:
            noise = whole_passes
        bounds = {}
        for name, size in _largest(ours, noise).items():
            bounds[name] = MARGIN * min(size, limit) + last_bit(ours, name) + least
        places = self._compare_places(ours, theirs, bounds)
        is_equal = self._add_log_probs(log_probs, served, [x for _, x in whole_passes])
        self.lines.append(_verdict(self.readings, is_equal=is_equal and not places))
        return places

    def _compare_places(
        self, ours: Outputs, theirs: Outputs, bounds: Mapping[str, float]
    ) -> list[Row]:
        """Compare the outputs of modules; return the places that differ."""
        places = list[Row]()
        missing = []
        shapes = shapes_of(ours)
        their_shapes = shapes_of(theirs)
        for name in ours:
            if shapes[name] != their_shapes.get(name):
                missing.append(name)
                continue
            value = distance(ours, theirs, name)
            if value:
                places.append({"place": name, "difference": value, "bound": bounds[name]})
        count = counted(len(ours) - len(missing), "place")
        self.lines.append(f"outputs: {len(places)} of {count} of modules differ")
        if missing:
            self.unseen[f"outputs of {told(missing, 1)}"] = "not in both, or in another shape"
        if places:
            columns = number_columns(difference="difference", rounding_explains="bound")
            table = Table((*name_columns(place="place"), *columns), places[:MOST_ROWS])
            self.lines += table.plain().splitlines()
        wrong = dict[str, tuple[float, float, float]]()
        for place in places:
            if place["difference"] > place["bound"]:
                wrong[place["place"]] = place["difference"], 0.0, place["bound"]
        for numbers in [*wrong.values()][:1]:
            self.readings.append(measured("other-outputs", wrong, *numbers))
        return places

    def _add_log_probs(self, ours: Any, theirs: Any, noisy: list[Any]) -> bool:
        """Compare log probabilities, beside what random roundings give; return whether they are
        equal.
        """
        if ours is None:
            self.unseen["log probabilities"] = "the results are not logits of tokens"
            return True
        if theirs is None or theirs.shape != ours.shape:
            raise DataError(
                f"Cannot compare log probabilities of {counted(len(ours), 'token')} because the "
                "second model gives another number.",
                "Give both the same tokens.",
            )
        off = (theirs - ours).abs()
        noise = torch.stack([(x - ours).abs() for x in noisy])
        mean, largest = float(off.mean()), float(off.max())
        mean_noise, largest_noise = float(noise.mean()), float(noise.max())
        self.lines.append(
            f"log probabilities of {counted(len(off), 'token')}: mean difference {mean:.2g}, "
            f"largest {largest:.2g}; rounding alone: {mean_noise:.2g}, {largest_noise:.2g}"
        )
        bound = MARGIN / 2 * mean_noise
        if mean <= bound:
            mean, bound = largest, MARGIN * largest_noise
        if mean > bound:
            self.readings.append(measured("other-log-probabilities", "", mean, 0.0, bound))
        return torch.equal(ours, theirs)


def _largest(first: Outputs, passes: list[tuple[Outputs, Any]]) -> dict[str, float]:
    """Return the largest distance of some passes from the first one, by place."""
    sizes = {}
    for name in first:
        sizes[name] = 0.0
        for outputs, _ in passes:
            sizes[name] = max(sizes[name], distance(first, outputs, name))
    return sizes


def _verdict(readings: list[Reading], *, is_equal: bool) -> str:
    """Return the last line: equal, a place, or whether rounding explains the difference."""
    if is_equal:
        return "The bits are equal."
    for reading in readings:
        if reading.stage == "forward":
            return f"The difference has a place: {reading.tensor}."
    if readings:
        return "The difference is larger than rounding gives, and no module of both shows it."
    return "The difference is no larger than rounding gives."


def _unit(outputs: Outputs) -> float:
    """Return the unit roundoff of the coarsest output."""
    largest = 0.0
    for calls in outputs.values():
        for call in calls:
            for x in call:
                largest = max(largest, unit_of(x.dtype))
    return largest


def _log_probs(result: Any, batch: Any) -> Any:
    """Return the log probability of each token but the first of a sequence, without padding, flat
    in float64; ``None`` if the result has none.
    """
    tokens = batch
    mask = None
    if isinstance(batch, Mapping):
        tokens = batch.get("input_ids")
        mask = batch.get("attention_mask")
    values = getattr(result, "logits", result)
    if isinstance(values, tuple):
        values = values[0]
    if not isinstance(tokens, Tensor) or tokens.is_floating_point() or tokens.ndim != 2:
        return None
    if values.ndim == 3 and values.shape[:2] == tokens.shape:
        values = values[:, :-1].double().log_softmax(-1)
        values = values.gather(-1, tokens[:, 1:, None])[..., 0]
    if values.ndim != 2:
        return None
    values = values[:, -(tokens.shape[1] - 1) :].double()
    if mask is None:
        return values.flatten()
    return values[mask[:, 1:].bool()]
