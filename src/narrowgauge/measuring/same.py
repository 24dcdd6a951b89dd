"""``narrowgauge.same``: compare two models: weights, then modules, then log probabilities.

The outputs of modules are compared with what rounding alone gives there
(:mod:`narrowgauge.measuring.outputs`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules import module as global_hooks

from narrowgauge.errors import DataError
from narrowgauge.measuring.beside import Beside
from narrowgauge.measuring.outputs import Outputs, Recording, are_alike, distance
from narrowgauge.measuring.policies.wide import Wide
from narrowgauge.measuring.reading import Reading, Readings, measured, of_all
from narrowgauge.measuring.resume import generators
from narrowgauge.measuring.units import FINEST, unit_of
from narrowgauge.measuring.weights import compare_weights
from narrowgauge.runs.finding import counted
from narrowgauge.spec.tables import Row
from narrowgauge.torch_support.put_back import generators_put_back, put_back

MARGIN = 4.0
"""Bounds over the roundings of one pass."""
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

    def __init__(self, readings: Iterable[Reading] = (), lines: Iterable[str] = ()) -> None:
        super().__init__(readings, lines)
        self.rows: list[Row] = []
        self.places: list[Row] = []

    def to_dict(self) -> dict[str, Any]:
        """Return the readings, rows and places as values for JSON."""
        return super().to_dict() | {"rows": self.rows, "places": self.places}


def same(
    first: Any,
    second: Any,
    batch: Any = None,
) -> Same:
    """Compare two models, such as what trains with what serves it, or a checkpoint with a later
    one, and name the first place where they differ.

    Weights are compared first, without calling the models: values that differ, vectors that are
    exactly 1, values that are not finite, formats, ties, adapters. With ``batch``, both run in
    evaluation mode. The narrower one runs again beside float64 shadows: its roundings are the bounds
    of modules' outputs and of log probabilities. Modules are paired by name. Both are as before at
    the end.

    Args:
        first: a module; a ``state_dict`` (clone its tensors before training), a ``.safetensors``
            file, or a folder of them. With ``batch``: a module, or a function of the batch that
            returns logits or log probabilities.
        second: the same.
        batch: token ids ``[sequences, positions]``, or a dict with ``input_ids``, of arguments of
            both models.
    Returns:
        The readings beyond their bound; none if both are one. A difference that is of rounding is
            no reading.
    Raises:
        DataError: log probabilities of other numbers of tokens.
        RecordError: a path holds no safetensors file, a damaged one, or tensors in parts.

    Cost: 7 ns a value. With a batch three passes, two more with shadows in float64, and memory for the
    outputs of three: pass few sequences.

    Example:
        >>> import torch, narrowgauge as ng
        >>> trainer = torch.nn.Sequential(torch.nn.Embedding(9, 8), torch.nn.Linear(8, 9))
        >>> print(ng.same(trainer, trainer, torch.arange(8).view(2, 4)).lines[-1])
        The bits are equal.
    """
    result = Same()
    kinds = nn.Module, str, Path, Mapping
    if batch is None or (isinstance(first, kinds) and isinstance(second, kinds)):
        rows, readings, lines = compare_weights(first, second)
        result = Same(readings, lines)
        result.rows = rows
    if batch is not None:
        result.readings += _compare_passes(first, second, batch, result)
    return result


# ── outputs and log probabilities ─────────────────────────────────────────────────────────────────


def _run(side: Any, batch: Any, forced: Outputs, wide: Wide | None = None) -> tuple[Recording, Any]:
    """Run a side once, a module in evaluation mode; return the outputs of its modules and its logits
    or log probabilities.

    Args:
        forced: outputs that modules take and return.
        wide: keeps the shadows of the pass.
    """
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        if isinstance(side, nn.Module):
            stack.enter_context(put_back(side))
            side.eval()
        recording = Recording(forced, wide)
        for handle in (
            global_hooks.register_module_forward_pre_hook(recording.before),
            global_hooks.register_module_forward_hook(recording.after),
        ):
            stack.callback(handle.remove)
        stack.enter_context(generators_put_back())
        before = generators()
        if wide is not None:
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))  # others have no float64
            stack.enter_context(Beside(wide))
        is_named = isinstance(side, nn.Module) and isinstance(batch, Mapping)
        values = side(**batch) if is_named else side(batch)
        recording.draws = generators() != before
    values = getattr(values, "logits", values)
    return recording, values[0] if isinstance(values, tuple) else values


def _compare_passes(first: Any, second: Any, batch: Any, result: Same) -> list[Reading]:
    """Compare outputs of modules and log probabilities, and fill in places, lines and ``unseen``."""
    recording, values = _run(first, batch, {})
    if recording.draws:
        reason = "the first model draws random numbers in evaluation"
        result.unseen["outputs and log probabilities"] = reason
        return []
    served, served_values = _run(second, batch, {})
    ours = recording.outputs
    theirs = served.outputs
    log_probs = _log_probs(values, batch), _log_probs(served_values, batch)
    forced = {}
    if ours.keys() == theirs.keys() and all(are_alike(ours, theirs, place) for place in ours):
        forced = ours
    if _are_equal(ours, theirs, forced, log_probs):
        result.lines.append("The bits are equal.")
        return []
    result.looked_at = "no difference is larger than rounding gives"
    units = _unit(ours), _unit(theirs)
    narrow = second if units[1] > units[0] else first
    beside, _ = _run(narrow, batch, forced, Wide())
    if forced:
        theirs = _run(second, batch, forced)[0].outputs
    bounds, unusual = _bounds(beside, max(UNUSUAL, 16 * max(units)), result.lines)
    readings = _compare_places(ours, theirs, bounds, result)
    if log_probs[0] is None:
        result.unseen["log probabilities"] = "the results are not logits of tokens"
        return readings
    wide = Wide()
    exact = {place: forced[place] for place in unusual if place in forced}
    _, values = _run(narrow, batch, exact, wide)
    noise = (_log_probs(wide.of(values), batch) - _log_probs(values, batch)).abs() + max(units)
    return readings + _compare_log_probs(*log_probs, noise, result.lines)


def _are_equal(ours: Outputs, theirs: Outputs, paired: Outputs, log_probs: tuple[Any, Any]) -> bool:
    """Return whether all outputs and log probabilities of two passes have the same bits."""
    if paired.keys() != ours.keys() or any(distance(ours, theirs, place) for place in paired):
        return False
    if log_probs[0] is None or log_probs[1] is None:
        return bool(paired)
    return torch.equal(*log_probs)


def _unit(outputs: Outputs) -> float:
    """Return the unit roundoff of the coarsest output of some places."""
    return max((unit_of(x.dtype) for tensors in outputs.values() for x in tensors), default=FINEST)


def _bounds(
    beside: Recording, limit: float, lines: list[str]
) -> tuple[dict[str, float], list[str]]:
    """Return what roundings explain at each place that is followed, and the unusual places."""
    bounds = {}
    unusual = []
    for name, tensors in beside.outputs.items():
        if name not in beside.unfollowed:
            size = distance(beside.outputs, beside.shadows, name)
            bounds[name] = MARGIN * min(size, limit) + 3 * _unit({name: tensors})
            if size > limit:
                unusual.append(name)
                lines.append(f"{name}: roundings there move it by {size:.2g}, more than usual")
    return bounds, unusual


def _compare_places(
    ours: Outputs, theirs: Outputs, bounds: Mapping[str, float], result: Same
) -> list[Reading]:
    """Compare the outputs of modules; return the reading of the first place that differs."""
    missing = [name for name in ours if not are_alike(ours, theirs, name)]
    unfollowed = [name for name in ours if name not in bounds and name not in missing]
    wrong: list[Row] = []
    for name in ours:
        if name not in (*missing, *unfollowed):
            value = distance(ours, theirs, name)
            row: Row = {"place": name, "difference": value, "bound": bounds[name]}
            if value:
                result.places.append(row)
            if value > bounds[name]:
                wrong.append(row)
    count = counted(len(ours) - len(missing) - len(unfollowed), "place")
    result.lines.append(f"outputs: {len(result.places)} of {count} of modules differ")
    if missing:
        result.unseen[f"outputs of {of_all(missing)}"] = "not in both, or in another shape"
    if unfollowed:
        result.unseen[f"outputs of {of_all(unfollowed)}"] = "their roundings are not followed"
    if not wrong:
        return []
    names = [row["place"] for row in wrong]
    return [measured("other-outputs", names, wrong[0]["difference"], 0.0, wrong[0]["bound"])]


def _compare_log_probs(ours: Any, theirs: Any, noise: Tensor, lines: list[str]) -> list[Reading]:
    """Compare log probabilities of both sides, beside what rounding changes."""
    if theirs is None or theirs.shape != ours.shape:
        raise DataError(
            f"Cannot compare log probabilities of {counted(len(ours), 'token')} because the "
            "second model gives another number.",
            "Give both the same tokens.",
        )
    off = (theirs - ours).abs()
    mean, largest = float(off.mean()), float(off.max())
    mean_noise, largest_noise = float(noise.mean()), float(noise.max())
    lines.append(
        f"log probabilities of {counted(len(off), 'token')}: mean difference {mean:.2g}, "
        f"largest {largest:.2g}; rounding alone: {mean_noise:.2g}, {largest_noise:.2g}"
    )
    for value, bound in ((mean, MARGIN / 2 * mean_noise), (largest, MARGIN * largest_noise)):
        if value > bound:
            return [measured("other-log-probabilities", "", value, 0.0, bound)]
    return []


def _log_probs(values: Any, batch: Any) -> Any:
    """Return the log probability of each token but the first of a sequence, without padding, flat
    in float64; ``None`` if the values are not logits or log probabilities.
    """
    tokens = batch
    mask = None
    if isinstance(batch, Mapping):
        tokens = batch.get("input_ids")
        mask = batch.get("attention_mask")
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
