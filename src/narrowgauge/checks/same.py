"""``narrowgauge.same``: compare what trains with what serves: weights, then modules, then log
probabilities.

The first module that differs is compared with what rounding alone gives there
(:mod:`narrowgauge.checks.outputs`).
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge.analysis.kinds import KINDS
from narrowgauge.analysis.reading import Reading, Readings, of_all
from narrowgauge.checks.outputs import (
    MARGIN,
    Outputs,
    Place,
    RandomRounding,
    distance,
    names_of,
    paired,
    places,
    recorded,
    shapes_of,
)
from narrowgauge.checks.same_weights import compare_weights, loaded
from narrowgauge.checks.units import unit_of
from narrowgauge.errors import DataError, RecipeError
from narrowgauge.runs.finding import counted
from narrowgauge.torch_support.put_back import generators_put_back, put_back

Side = nn.Module | Callable[[Any], Any] | Mapping[str, Any] | str | Path
_PASSES = 2
"""Passes with random roundings, of each kind."""


def same(trainer: nn.Module | Callable[[Any], Any], server: Side, batch: Any = None) -> Readings:
    """Compare what trains with what serves it, and name the first place where they differ.

    Weights are compared first. With ``batch``, both run in evaluation mode. The trainer runs again
    with random roundings, and these give the bounds of modules' outputs and of log probabilities.
    Modules are paired by name. Both models are as before at the end.

    Args:
        trainer: a module, or a function of the batch that returns logits or log probabilities.
        server: the same; or weights for a copy of the trainer: a ``state_dict``, a ``.safetensors``
            file, a folder (with a ``config.json``, ``from_pretrained`` of the trainer's class loads
            it); or a ``.jsonl`` file of sequences with ``tokens`` and ``logprobs``, which needs no
            batch.
        batch: token ids ``[sequences, positions]``, or a dict with ``input_ids``, of arguments of
            both models.
    Returns:
        The readings beyond their bound; none if both are one. A difference that is of rounding is a
            note.
    Raises:
        DataError: log probabilities of other numbers of tokens, or a damaged line of a file.
        RecipeError: weights, and a trainer that is not a module; no weights and no batch.

    Cost: six passes of the trainer, four of them also in float64, two of the server, and memory
    for the outputs of four: pass few sequences.

    Example:
        >>> import torch, narrowgauge as ng
        >>> trainer = torch.nn.Sequential(torch.nn.Embedding(9, 8), torch.nn.Linear(8, 9))
        >>> print(ng.same(trainer, trainer.state_dict(), torch.arange(8).view(2, 4)).lines[-1])
        The bits are equal.
    """
    readings = list[Reading]()
    lines = list[str]()
    unseen = dict[str, str]()
    if isinstance(server, str | Path) and Path(server).suffix == ".jsonl":
        lines, readings = _served(trainer, Path(server))
        return Readings(readings, lines)
    if isinstance(server, str | Path | Mapping):
        readings, server = loaded(trainer, server)
    if isinstance(trainer, nn.Module) and isinstance(server, nn.Module):
        more, lines = compare_weights(trainer, server)
        readings += more
    elif batch is None:
        raise RecipeError("Cannot compare functions because there is no batch.", "Pass batch=.")
    if batch is not None:
        more, words = _outputs(trainer, server, batch, unseen)
        readings += more
        lines += words
    return Readings(readings, lines, unseen=unseen)


# ── outputs and log probabilities ─────────────────────────────────────────────────────────────────


def _run(
    side: Any,
    batch: Any,
    names: dict[nn.Module, str],
    mode: Any = None,
    forced: Outputs | None = None,
    *,
    draws_on: bool = False,
) -> tuple[Outputs, Any]:
    """Run a side once, a module in evaluation mode, and return the outputs of its modules and its
    result.

    Args:
        draws_on: begin with other random numbers than the other passes.
    """
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        if isinstance(side, nn.Module):
            stack.enter_context(put_back(side))
            side.eval()
        outputs = stack.enter_context(recorded(names, forced))
        stack.enter_context(generators_put_back())
        if draws_on:
            torch.rand(1)
            random.random()
        stack.enter_context(mode or nullcontext())
        is_named = isinstance(side, nn.Module) and isinstance(batch, Mapping)
        result = side(**batch) if is_named else side(batch)
    return outputs, result


def _outputs(
    trainer: Any, server: Any, batch: Any, unseen: dict[str, str]
) -> tuple[list[Reading], list[str]]:
    """Compare a pass of both sides: the first module that differs, and log probabilities."""
    names = dict[nn.Module, str]()
    for side in (trainer, server):
        if isinstance(side, nn.Module):
            names |= names_of(side)
    first, result = _run(trainer, batch, names)
    again, _ = _run(trainer, batch, names, draws_on=True)
    if any(distance(paired(first, again, name)).any() for name in first):
        unseen["outputs and log probabilities"] = "the trainer draws random numbers in evaluation"
        return [], ["outputs: no two passes of the trainer are alike"]
    second, served = _run(server, batch, names, draws_on=True)
    unit = _unit(first)
    other_unit = _unit(second)
    least = other_unit if other_unit > unit else 0.0
    forced = first if shapes_of(first) == shapes_of(second) else None
    noise, results = _noise(trainer, batch, names, least, None)
    if forced is not None:
        noise, _ = _noise(trainer, batch, names, least, forced)
        second, _ = _run(server, batch, names, None, forced, draws_on=True)
    num_heads = getattr(getattr(trainer, "config", None), "num_attention_heads", 0)
    differ = list(places(first, second, noise, least, num_heads))
    missing = [name for name in first if name not in second]
    if missing:
        unseen[f"outputs of {of_all(missing)}"] = "not in the server"
    lines = [f"outputs: {len(differ)} of {counted(len(first), 'place')} of modules differ"]
    readings = list[Reading]()
    is_equal = not differ
    ours = _log_probs(result, batch)
    if ours is None:
        unseen["log probabilities"] = "the results are not logits of tokens"
    else:
        theirs = _log_probs(served, batch)
        noisy = [_log_probs(x, batch) for x in results]
        words, readings = _compared(ours, theirs, noisy)
        is_equal = is_equal and theirs is not None and torch.equal(ours, theirs)
        lines += words
    lines.append(_verdict(differ, is_equal=is_equal, is_wrong=bool(readings)))
    return readings + _place_readings(differ), lines


def _noise(
    trainer: Any, batch: Any, names: dict[nn.Module, str], least: float, forced: Outputs | None
) -> tuple[list[Outputs], list[Any]]:
    """Run the trainer with random roundings, and return the outputs of its modules and its results."""
    outputs = []
    results = []
    for seed in range(_PASSES):
        noise, result = _run(trainer, batch, names, RandomRounding(seed, least), forced)
        outputs.append(noise)
        results.append(result)
    return outputs, results


def _place_readings(differ: list[Place]) -> list[Reading]:
    """Return a reading of the first place that rounding does not explain."""
    beyond = [place for place in differ if place.is_beyond]
    readings = []
    for place in beyond[:1]:
        tensor = of_all(place.name for place in beyond)
        kind = KINDS["other-outputs"]
        readings.append(kind.reading(tensor, place.value, 0.0, place.bound, where=place.words))
    return readings


def _verdict(differ: list[Place], *, is_equal: bool, is_wrong: bool) -> str:
    """Return the last line: equal, a place, or whether rounding explains the difference.

    Args:
        is_wrong: log probabilities differ by more than rounding gives.
    """
    if is_equal:
        return "The bits are equal."
    for place in differ:
        if place.is_beyond:
            return f"The difference has a place: {place.name}, {place.words}."
    if is_wrong:
        return "The difference is larger than rounding gives, and no module of both shows it."
    start = f", first in {differ[0].name}" if differ else ""
    return f"The difference is no larger than rounding gives{start}."


def _unit(outputs: Outputs) -> float:
    """Return the unit roundoff of the coarsest output."""
    largest = 0.0
    for calls in outputs.values():
        for call in calls:
            largest = max(largest, *(unit_of(x.dtype) for x in call))
    return largest


def _log_probs(result: Any, batch: Any) -> Tensor | None:
    """Return the log probability of each token but the first of a sequence, without padding, flat."""
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
    values = values[:, -(tokens.shape[1] - 1) :]
    flat: Tensor = values.flatten() if mask is None else values[mask[:, 1:].bool()]
    return flat


def _compared(
    ours: Tensor, theirs: Tensor | None, noisy: list[Any]
) -> tuple[list[str], list[Reading]]:
    """Compare log probabilities, beside what random roundings give."""
    if theirs is None or theirs.shape != ours.shape:
        raise DataError(
            f"Cannot compare {counted(len(ours), 'log probability')} because the server gives "
            "another number.",
            "Give both the same tokens.",
        )
    off = (theirs.double() - ours.double()).cpu()
    noise = (torch.stack(noisy).double() - ours.double()).cpu()
    mean, largest, spread = _sizes(off)
    mean_noise, largest_noise, noise_spread = _sizes(noise)
    lines = [
        f"log probabilities of {counted(len(off), 'token')}: mean difference {mean:.2g}, "
        f"largest {largest:.2g}, spread of the ratio {spread:.2g}",
        f"rounding alone: mean {mean_noise:.2g}, largest {largest_noise:.2g}, "
        f"spread {noise_spread:.2g}",
    ]
    kind = KINDS["other-outputs"].case("logprobs")
    if mean > MARGIN / 2 * mean_noise:
        return lines, [kind.reading("", mean, 0.0, MARGIN / 2 * mean_noise)]
    if largest > MARGIN * largest_noise:
        return lines, [kind.reading("", largest, 0.0, MARGIN * largest_noise)]
    return lines, []


def _sizes(off: Tensor) -> tuple[float, float, float]:
    """Return the mean and the largest difference of log probabilities, and the ratio's spread."""
    return float(off.abs().mean()), float(off.abs().max()), float(off.exp().std())


def _served(trainer: Any, path: Path) -> tuple[list[str], list[Reading]]:
    """Compare the trainer with the tokens and log probabilities that a server wrote."""
    theirs = []
    passes: list[list[Tensor]] = [[] for _ in range(1 + _PASSES)]
    for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
        try:
            row = json.loads(line)
            tokens = torch.tensor([row["tokens"]])
            served = torch.tensor([x for x in row["logprobs"] if x is not None])
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"Cannot read line {number} of {path}: {error}.",
                "Each line needs a list of tokens and of logprobs, for the last ones.",
            ) from error
        theirs.append(served)
        for seed, values in enumerate(passes, -1):
            mode = RandomRounding(seed, 0.0) if seed >= 0 else None
            result = _log_probs(_run(trainer, tokens, {}, mode)[1], tokens)
            if result is None or len(served) > len(result):
                raise DataError(
                    f"Cannot compare line {number} of {path}: the trainer gives other numbers.",
                    "Give a model that returns logits, and at most one log probability a token.",
                )
            values.append(result[len(result) - len(served) :])
    ours, *noisy = map(torch.cat, passes)
    lines, readings = _compared(ours, torch.cat(theirs), noisy)
    words = "larger" if readings else "no larger"
    return [*lines, f"The difference is {words} than rounding gives."], readings
