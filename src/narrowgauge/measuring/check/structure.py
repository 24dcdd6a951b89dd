"""Compare the shadow of a step with the shadow of the plain loss in one process.

Both are without roundings, so they are equal or the step computes another gradient: a factor, or
another distance. With several ranks each process makes the plain pass over the batches of all.
Collectives are operations that have shadows, so sums over ranks are followed.
"""

import math
from dataclasses import replace

import torch
from torch import Tensor

from narrowgauge.distributed.ranks import all_ranks, unlike
from narrowgauge.measuring.check.dispatch import is_finite, storage_key
from narrowgauge.measuring.check.passes import IS_ZERO, Gradients, Pass, Passes, concatenated
from narrowgauge.measuring.check.policies.float64_shadow import Float64Shadow
from narrowgauge.measuring.kinds import KINDS
from narrowgauge.measuring.reading import Readings, of_all
from narrowgauge.measuring.unit_roundoff import UNITS
from narrowgauge.numerics.hashing import fingerprint
from narrowgauge.torch_support.torch_names import unwrapped_model

SAME = KINDS["gradient"].bound
UNREAD = "no operation reads them in this batch"
MOST_PARTS = 16
"""Micro-batches of all ranks whose gradients are read one by one."""


def compare_structure(passes: Passes, first: Pass, result: Readings) -> None:
    """Compare a step over ranks and with the plain loss, and print the loss and its distance from
    float64's.

    Args:
        first: the pass of the step in training mode.
    Raises:
        ArithmeticError: why they are not compared.
    """
    _compare_ranks(passes, first, result)
    plain = _compare_with_plain(passes, first, result)
    if not is_finite(plain.loss):
        return
    value = float(plain.loss.detach())
    if math.isnan(plain.value):
        raise ArithmeticError("the loss is not followed")
    off = abs(value - plain.value) / (abs(plain.value) or 1.0)
    result.lines.append(f"loss {value:.6g}, {off:.2g} of it from float64's")
    if plain.loss.dtype in UNITS and off > KINDS["loss-rounding"].bound:
        result.add("loss-rounding", "the loss", off)
    if plain.is_zero:
        raise ArithmeticError(IS_ZERO)


def _compare_ranks(passes: Passes, first: Pass, result: Readings) -> None:
    """Tell gradients that differ between ranks, where the loop's sums were made, and compare them no
    further.
    """
    differing = [*unlike({name: fingerprint(x) for name, x in first.gradients.items()})]
    for name in differing:
        first.shadows.pop(name, None)
    is_wrapped = unwrapped_model(passes.model) is not passes.model
    if differing and (is_wrapped or passes.backward is not None):
        result.add("ranks-apart", differing, len(differing))
    elif differing:
        result.unseen["sums over ranks"] = "the loop makes them; pass backward="


def _compare_with_plain(passes: Passes, first: Pass, result: Readings) -> Pass:
    """Compare a step with the plain loss, and return the pass of that."""
    if passes.backward is None and len(passes.all_parts) == 1:
        _add_missing(passes, first.gradients, first.shadows, result)
        return first
    batch = concatenated(passes.all_parts)
    if batch is None:
        raise ArithmeticError("micro-batches have unlike shapes")
    step = first
    if any(all_ranks().gather(first.draws)):
        passes = replace(passes, is_training=False)
        step = passes.run(passes.step, Float64Shadow())
    plain = passes.run(passes.plain(batch), Float64Shadow(), is_alone=True)
    if plain.draws or (step.draws and not passes.is_training):
        raise ArithmeticError("evaluation mode draws random numbers too")
    exact = _compare(passes, step.shadows, plain, result)
    _add_missing(passes, step.gradients, exact, result)
    return plain


def _compare(passes: Passes, step: Gradients, plain: Pass, result: Readings) -> Gradients:
    """Tell each answer: tensors that have one are one reading. Return the right gradients."""
    exact = plain.shadows
    size = all_ranks().size
    terms = _terms(passes) if size > 1 else []
    mean = sum(term.value for term in terms) / (len(terms) or 1)
    if terms and abs(plain.value - size * mean) < 0.1 * abs(plain.value):
        # The loss counts the labels of all ranks, and DistributedDataParallel divides by their number.
        exact = {name: x / size for name, x in exact.items()}
        result.lines.append(f"  the loss is {size} times a mean over the batches of all ranks")
    distances = {}
    for name, right in exact.items():
        if name not in step or not is_finite(step[name]) or not is_finite(right):
            continue
        if right.any() and step[name].any():
            distances[name] = float((step[name] - right).norm() / right.norm())
    differing = [name for name in distances if distances[name] > SAME]
    result.lines.append(
        f"  without roundings {len(distances) - len(differing)} of {len(distances)} gradients "
        "equal the plain loss's"
    )
    if differing and _is_of_parts(step, exact, terms or _terms(passes), differing):
        return exact
    differing.sort(key=lambda name: -round(distances[name], 6))
    _add_differing(step, exact, differing, result)
    return exact


def _add_differing(step: Gradients, exact: Gradients, names: list[str], result: Readings) -> None:
    """Tell gradients that are not the plain loss's: those with one factor are one reading."""
    answers: dict[str, tuple[float, float, list[str]]] = {}
    for name in names:
        length = exact[name].norm()
        factor = float((step[name] * exact[name]).sum() / exact[name].square().sum())
        rest = float((step[name] - factor * exact[name]).norm() / length)
        words = "not a multiple of the plain loss's"
        value = float((step[name] - exact[name]).norm() / length)
        expected = 0.0
        if rest <= SAME * abs(factor):
            words = f"{factor:.6g} times the plain loss's"
            value = round(factor, 9)
            expected = 1.0
        answers.setdefault(words, (value, expected, []))[2].append(name)
    for words, (value, expected, tensors) in answers.items():
        result.lines.append(f"  {of_all(tensors)}: {words}")
        if expected and value >= 256 and math.log2(value) % 1 == 0:
            result.unseen["a factor of the gradient"] = (
                f"{value:g}: a loss scale? Unscale in backward=, as the step does"
            )
        else:
            result.add("gradient", tensors, value, expected)


def _terms(passes: Passes) -> list[Pass]:
    """Return a pass of the plain loss of each micro-batch; none if there are too many, or one."""
    parts = passes.all_parts
    if not 1 < len(parts) <= MOST_PARTS:
        return []
    return [passes.run(passes.plain(part), Float64Shadow(), is_alone=True) for part in parts]


def _is_of_parts(step: Gradients, exact: Gradients, terms: list[Pass], names: list[str]) -> bool:
    """Return whether a step is the mean over its micro-batches, and the gradient of the whole batch is
    not a sum of theirs, as for a contrastive loss.
    """
    if not terms or not all(term.shadows.keys() >= {*names} for term in terms):
        return False
    parts = torch.stack([_joined(term.shadows, names) for term in terms], 1)
    stepped = _joined(step, names)
    if float((parts.mean(1) - stepped).norm()) > SAME * float(stepped.norm()):
        return False
    exact_values = _joined(exact, names)
    weights = torch.linalg.lstsq(parts, exact_values[:, None], driver="gelsd").solution[:, 0]
    return float((exact_values - parts @ weights).norm()) > 1e-3 * float(exact_values.norm())


def _joined(gradients: Gradients, names: list[str]) -> Tensor:
    return torch.cat([gradients[name].flatten() for name in names])


def _add_missing(passes: Passes, step: Gradients, exact: Gradients, result: Readings) -> None:
    """Tell tensors that get no gradient of the step, though the plain loss has one, or reads them.

    An expert may be idle in a batch: what no operation reads is not looked at.
    """
    answers: dict[str, list[str]] = {}
    made = "; ".join(passes.nonfinite.made.values())
    for name in reversed(passes.leaves if step or exact else {}):
        gradient = step.get(name)
        right = exact.get(name)
        if gradient is not None and gradient.any():
            continue
        if right is not None and right.any():
            words = "exactly zero, and not so without roundings"
            if gradient is None:
                words = "none, where the plain loss has one"
        elif right is None and gradient is None:
            words = UNREAD
            if storage_key(passes.leaves[name]) in passes.nonfinite.read:
                words = "none: operations read them, and no graph of the loss leads there"
        else:
            if made:
                result.unseen["gradients of exactly zero"] = made
            continue
        answers.setdefault(words, []).append(name)
    idle = answers.pop(UNREAD, None)
    if idle:
        result.unseen[f"gradients of {of_all(idle)}"] = UNREAD
    missing = []
    for words, names in answers.items():
        result.lines.append(f"  gradient of {of_all(names)}: {words}")
        missing += names
    if missing:
        result.add("no-gradient", missing, len(missing))
