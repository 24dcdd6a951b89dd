"""``narrowgauge.same``: compare what trains with what serves: weights, then modules, then log
probabilities.

The first module that differs is compared with what rounding alone gives there
(:mod:`narrowgauge.checks.outputs`).
"""

from __future__ import annotations

import json
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
    RandomRounding,
    names_of,
    places,
    recorded,
    shapes,
    unit_of,
)
from narrowgauge.checks.same_weights import compare_weights, loaded
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

    Cost: seven passes of the trainer, six of them also in float64, two of the server, and memory
    for the outputs of six: pass few sequences.

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
        return Readings(readings, lines, "", unseen)
    if isinstance(server, str | Path | Mapping):
        readings, server = loaded(trainer, server)
    if isinstance(trainer, nn.Module) and isinstance(server, nn.Module):
        weight_readings, lines = compare_weights(trainer, server)
        readings += weight_readings
    elif batch is None:
        raise RecipeError("Cannot compare functions because there is no batch.", "Pass batch=.")
    if batch is not None:
        output_readings, output_lines = _outputs(trainer, server, batch, unseen)
        readings += output_readings
        lines += output_lines
    return Readings(readings, lines, "", unseen)


# ── outputs and log probabilities ─────────────────────────────────────────────────────────────────


def _run(
    side: Any,
    batch: Any,
    names: dict[nn.Module, str],
    mode: Any = None,
    forced: Outputs | None = None,
) -> tuple[Outputs, Any]:
    """Run a side once, a module in evaluation mode, and return the outputs of its modules and its
    result.
    """
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        if isinstance(side, nn.Module):
            stack.enter_context(put_back(side))
            side.eval()
        outputs = stack.enter_context(recorded(names, forced))
        stack.enter_context(generators_put_back())
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
    second, served = _run(server, batch, names)
    units = _unit(first), _unit(second)
    least = units[1] if units[1] > units[0] else 0.0

    def rounded(is_coarse: bool, forced: Outputs | None) -> list[tuple[Outputs, Any]]:
        modes = [RandomRounding(seed, is_coarse, least) for seed in range(_PASSES)]
        return [_run(trainer, batch, names, mode, forced) for mode in modes]

    random = rounded(True, None)
    results = [noisy for _, noisy in random]
    forced = first if shapes(first) == shapes(second) else None
    if forced:
        random = rounded(True, forced)
    coarse = [outputs for outputs, _ in random]
    fine = coarse
    if units[0] == units[1]:
        fine = [outputs for outputs, _ in rounded(False, forced)]
    if forced:
        second = _run(server, batch, names, None, forced)[0]
    num_heads = getattr(getattr(trainer, "config", None), "num_attention_heads", 0)
    differ = list(places(first, second, fine, coarse, least, num_heads))
    if missing := [name for name in first if name not in second]:
        unseen[f"outputs of {of_all(missing)}"] = "not in the server"
    lines = [f"outputs: {len(differ)} of {counted(len(first), 'place')} of modules differ"]
    readings = list[Reading]()
    is_equal = not differ
    ours = _log_probs(result, batch)
    if ours is None:
        unseen["log probabilities"] = "the results are not logits of tokens"
    else:
        theirs = _log_probs(served, batch)
        words, readings = _compared(ours, theirs, [_log_probs(noisy, batch) for noisy in results])
        is_equal = is_equal and theirs is not None and torch.equal(ours, theirs)
        lines += words
    wrong = [place for place in differ if place.value > place.coarse]
    elsewhere = [place for place in differ if place.fine < place.value <= place.coarse]
    for kind, beyond in (("other-output", wrong), ("other-rounding", elsewhere)):
        if beyond:
            value = beyond[0].value
            bound = beyond[0].coarse if beyond is wrong else beyond[0].fine
            tensor = of_all(place.name for place in beyond)
            where = beyond[0].words
            readings.append(KINDS[kind].reading(tensor, value, 0.0, bound, where=where))
    if is_equal:
        lines.append("The bits are equal.")
    elif wrong:
        lines.append(f"The difference has a place: {wrong[0].name}, {wrong[0].words}.")
    elif readings and readings[0].what == "other-logprobs":
        lines.append(
            "The difference is larger than rounding gives, and no module of both shows it."
        )
    else:
        start = f", first in {differ[0].name}" if differ else ""
        lines.append(f"The difference is no larger than rounding gives{start}.")
    return readings, lines


def _unit(outputs: Outputs) -> float:
    return max(
        (unit_of(x.dtype) for calls in outputs.values() for c in calls for x in c), default=0.0
    )


def _log_probs(result: Any, batch: Any) -> Tensor | None:
    """Return the log probability of each token but the first of a sequence, without padding, flat."""
    if isinstance(batch, Mapping):
        tokens = batch.get("input_ids")
        mask = batch.get("attention_mask")
    else:
        tokens = batch
        mask = None
    values = getattr(result, "logits", result)
    values = values[0] if isinstance(values, tuple) else values
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
    ours: Tensor, theirs: Tensor | None, random: list[Any]
) -> tuple[list[str], list[Reading]]:
    """Compare log probabilities, beside what random roundings give."""
    if theirs is None or theirs.shape != ours.shape:
        raise DataError(
            f"Cannot compare {counted(len(ours), 'log probability')} because the server gives "
            "another number.",
            "Give both the same tokens.",
        )
    off = (theirs.double() - ours.double()).cpu()
    noise = torch.stack([(other.double() - ours.double()).cpu() for other in random])
    largest = float(off.abs().max())
    mean = float(off.abs().mean())
    lines = [
        f"log probabilities of {counted(len(off), 'token')}: mean difference {mean:.2g}, largest "
        f"{largest:.2g}, "
        f"spread of the ratio {float(off.exp().std()):.2g}",
        f"rounding alone: mean {float(noise.abs().mean()):.2g}, largest "
        f"{float(noise.abs().max()):.2g}, "
        f"spread {float(noise.exp().std()):.2g}",
    ]
    bound = MARGIN / 2 * float(noise.abs().mean())
    peak = MARGIN * float(noise.abs().max())
    if mean <= bound and largest <= peak:
        return lines, []
    value, limit = (mean, bound) if mean > bound else (largest, peak)
    return lines, [KINDS["other-logprobs"].reading("", value, 0.0, limit)]


def _served(trainer: Any, path: Path) -> tuple[list[str], list[Reading]]:
    """Compare the trainer with the tokens and log probabilities that a server wrote."""
    ours = list[Tensor]()
    theirs = list[Tensor]()
    random: list[list[Tensor]] = [[] for _ in range(_PASSES)]
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
        modes = [None, *(RandomRounding(seed, True, 0.0) for seed in range(_PASSES))]
        for mode, values in zip(modes, [ours, *random], strict=True):
            result = _log_probs(_run(trainer, tokens, {}, mode)[1], tokens)
            if result is None or len(served) > len(result):
                raise DataError(
                    f"Cannot compare line {number} of {path}: the trainer gives other numbers.",
                    "Give a model that returns logits, and at most one log probability a token.",
                )
            values.append(result[len(result) - len(served) :])
    lines, readings = _compared(torch.cat(ours), torch.cat(theirs), [torch.cat(v) for v in random])
    words = "larger" if readings else "no larger"
    return [*lines, f"The difference is {words} than rounding gives."], readings
