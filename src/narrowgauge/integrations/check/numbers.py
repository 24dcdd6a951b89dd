"""Checks of what rounding loses, from each optimizer's storage and the values of the weights."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from narrowgauge.integrations.check.set_up import NARROW, SetUp, SteppedParameter, Values, sample
from narrowgauge.numerics.rounding import round_to
from narrowgauge.numerics.update_metrics import lost_fraction, update_sums
from narrowgauge.optim.optimizer import Optimizer
from narrowgauge.runs.finding import told
from narrowgauge.spec.formats import dtype_name
from narrowgauge.spec.storages import STORAGES

LOSES, STANDS_STILL = 0.01, 0.9
"""Fractions of lost changes from which a set-up loses updates, and a tensor stands still."""
LATER = 0.1
"""The fraction of its peak at which a learning-rate schedule usually ends."""
DECOUPLED = ("adamw", "lion", "lamb", "muon", "adan")


def lost_share(held: SteppedParameter, part: float = 1.0) -> float | None:
    """The fraction of changes, 0 to 1, that rounding drops in one step at this learning rate, or at a part of it.

    Each weight is moved by the rule's largest step, or by its gradient if there is one and the rule does not normalize it, and
    rounded as the storage does. The sums are those of the audit. ``None`` where the change is not known yet.
    """
    weight = sample(held.parameter.detach())
    if not _is_normalized(held):
        if held.parameter.grad is None:
            return None
        change = -part * held.rate * sample(held.parameter.grad.detach()).float()
    else:
        change = torch.full_like(weight, part * held.rate, dtype=torch.float32)
    moved = round_to(weight.float() + change, held.storage.visible).float() - weight.float()
    share = float(lost_fraction(update_sums(change, moved, moved)))
    return None if share != share else share


def lost_updates(set_up: SetUp) -> Iterator[Values]:
    """16-bit weights without low bits, a master copy or a compensation."""
    short = [each for each in set_up.trained if each.is_short]
    if not short:
        return
    row, lost, later = short[0].storage, _lost_of(short), _lost_of(short, LATER)
    if lost is not None and later is not None and max(lost, later) < LOSES:
        return
    some = "every update below half a spacing is" if lost is None else f"{lost:.0%} of the updates of one step are"
    then = "" if later is None else f", and {later:.0%} at a tenth of it, where a schedule ends"
    yield {
        "where": told(each.name for each in short),
        "severity": "error" if lost is None or lost >= LOSES else "warning",
        "optimizer": _library(short[0].optimizer),
        "format": row.visible,
        "some": some,
        "then": then,
        "rate": max(each.rate for each in short),
        "fallback": row.fallback,
        "bytes": row.bytes_per_param,
        "fallback_bytes": STORAGES[row.fallback].bytes_per_param,
    }


def _lost_of(short: Sequence[SteppedParameter], part: float = 1.0) -> float | None:
    """:func:`lost_share` of all parameters together; ``None`` where none is known."""
    known = [(share, each.parameter.numel()) for each in short if (share := lost_share(each, part)) is not None]
    return sum(share * count for share, count in known) / sum(count for _, count in known) if known else None


def rate_below_spacing(set_up: SetUp) -> Iterator[Values]:
    """Tensors that no update of the learning rate's size can move."""
    found: dict[float, list[SteppedParameter]] = {}
    for each in set_up.trained:
        if each.rate > 0 and _is_normalized(each) and _keeps_nothing(each):
            share = lost_share(each)
            if share is not None and share > STANDS_STILL:
                found.setdefault(each.rate, []).append(each)
    for rate, still in found.items():
        typical = float(sample(still[0].parameter.detach()).float().abs().median())
        yield {
            "where": told(each.name for each in still),
            "rate": rate,
            "format": still[0].storage.visible,
            "spacing": _spacing(typical, still[0]),
            "typical": typical,
            "fallback": still[0].storage.fallback,
        }


def frozen_second_moment(set_up: SetUp) -> Iterator[Values]:
    """A second moment in so few bits that its decay is rounded away."""
    for each in set_up.trained:
        betas = each.group.get("betas")
        bits, where = _second_moment_bits(each), each.name
        in_blocks = bits is None
        bits = _bits_in_blocks(each) if in_blocks else bits
        if bits is None or not isinstance(betas, (tuple, list)) or len(betas) < 2:
            continue
        least = 2.0 ** -(bits + 1 + in_blocks)
        if 0 < 1 - float(betas[1]) < least:
            yield {
                "where": f"{where} and all of its group" if len(each.group["params"]) > 1 else where,
                "beta": float(betas[1]),
                "bits": bits,
                "then": "it ends up to twice too large" if in_blocks else "it never falls",
                "highest": 1 - least,
                "fallback": "float32-states8" if each.storage.visible == "float32" else each.storage.fallback,
            }
            return


def _second_moment_bits(each: SteppedParameter) -> int | None:
    """Mantissa bits of a second moment that is rounded to nearest; ``None`` if it is not, or if that is unknown."""
    code = each.storage.exp_avg_sq
    if isinstance(each.optimizer, Optimizer):
        is_kept = "exp_avg_sq" in dict(each.storage.states) and code.parts == 1 and code.rounding == "nearest"
        return code.mantissa_bits if is_kept else None
    state = dict(each.optimizer.state.get(each.parameter, {})).get("exp_avg_sq")
    dtype = state.dtype if isinstance(state, Tensor) else None
    if dtype is None and type(each.optimizer).__module__.startswith("torch.optim"):
        dtype = each.parameter.dtype
    return {torch.bfloat16: 7, torch.float16: 10}.get(dtype) if dtype is not None else None


# The scale of a block moves with its largest element, and random gradients reach the next code where 1 - beta2 is half a spacing:
# torchao's 8-bit floats and 4-bit codes are unbiased at 0.95, and 1.2 to 2 times too large from 0.99 on. Its other 8-bit codes,
# and bitsandbytes', have spacings of 1 to 3 %: within 7 % at 0.999, which is not judged.
_MANTISSA_OF_CODES = {torch.float8_e4m3fn: 3, torch.float8_e5m2: 2}
_LEVELS_OF_4_BITS = 16


def _bits_in_blocks(each: SteppedParameter) -> int | None:
    """Mantissa bits of a second moment that torchao stores as codes with a scale per block; ``None`` for any other."""
    if isinstance(each.optimizer, Optimizer):
        return None
    state = dict(each.optimizer.state.get(each.parameter, {})).get("exp_avg_sq")
    codes, levels = getattr(state, "codes", None), getattr(state, "qmap", None)
    if not isinstance(codes, Tensor):
        return None
    if isinstance(levels, Tensor) and levels.numel() == _LEVELS_OF_4_BITS:
        return 3  # linear: half of the levels are in the topmost binade
    return _MANTISSA_OF_CODES.get(codes.dtype)


def eps_underflow(set_up: SetUp) -> Iterator[Values]:
    """An epsilon that the format of the denominator rounds to zero."""
    for each in set_up.trained:
        eps, dtype = each.group.get("eps"), each.parameter.dtype
        if isinstance(each.optimizer, Optimizer) or dtype not in NARROW or not isinstance(eps, float) or eps <= 0:
            continue
        smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
        if each.is_short and eps <= smallest / 2:
            yield {"where": each.name, "eps": eps, "dtype": dtype_name(dtype), "smallest": smallest}
            return


def swallowed_decay(set_up: SetUp) -> Iterator[Values]:
    """Weight decay whose every step is below half a spacing."""
    found = [each for each in set_up.trained if _keeps_nothing(each) and _is_swallowed(each)]
    if found:
        group = found[0].group
        yield {
            "where": told(each.name for each in found),
            "step": found[0].rate * float(group["weight_decay"]),
            "decay": float(group["weight_decay"]),
            "rate": found[0].rate,
            "format": found[0].storage.visible,
            "bits": found[0].storage.weight.mantissa_bits + 2,
            "fallback": found[0].storage.fallback,
        }


def _is_swallowed(each: SteppedParameter) -> bool:
    kind = type(each.optimizer).__name__.lower()
    is_decoupled = any(name in kind for name in DECOUPLED) or bool(each.group.get("decoupled_weight_decay"))
    step = each.rate * float(each.group.get("weight_decay") or 0.0)
    return is_decoupled and 0 < step < 2.0 ** -(each.storage.weight.mantissa_bits + 2)


KINDS = {
    "norm": "gains near 1, whose spacing of 2^-7 is above most learning rates",
    "router": "scores whose order decides which expert learns",
    "embedding": "rows that few tokens of a batch reach, by small updates",
}
"""Modules that fail first in 16 bits, and why."""


def sensitive_modules(set_up: SetUp) -> Iterator[Values]:
    """Norms, routers and embeddings of which only 16-bit weights are kept."""
    short = {id(each.parameter) for each in set_up.trained if each.is_short}
    found: dict[str, list[str]] = {}
    for name, module in set_up.model.named_modules():
        kind = _kind(name, module)
        if kind and any(id(p) in short for p in module.parameters(recurse=False)):
            found.setdefault(kind, []).append(name or type(module).__name__)
    for kind, names in found.items():
        dtype = next(each.storage.visible for each in set_up.trained if each.is_short)
        yield {"where": told(names), "kind": kind, "why": KINDS[kind], "format": dtype, "first": names[0]}


def _kind(name: str, module: nn.Module) -> str:
    own, kind = name.rpartition(".")[2].lower(), type(module).__name__.lower()
    if "norm" in kind:
        return "norm"
    if isinstance(module, nn.Embedding):
        return "embedding"
    return "router" if own in ("router", "gate", "wg") and ("router" in kind or isinstance(module, nn.Linear)) else ""


def _keeps_nothing(each: SteppedParameter) -> bool:
    """Whether the visible weight is all that is kept; float32 is too."""
    row = each.storage
    return not row.beside and row.weight.rounding == "nearest" and each.parameter.dtype is not torch.float64


def _is_normalized(each: SteppedParameter) -> bool:
    """Whether a rule bounds its changes by about the learning rate, rather than following the gradient's size."""
    kind = type(each.optimizer).__name__.lower()
    return "sign" in kind or not ("sgd" in kind or "lbfgs" in kind)


def _spacing(value: float, each: SteppedParameter) -> float:
    return 2.0 ** (math.frexp(value)[1] - 1 - each.storage.weight.mantissa_bits)


def _library(optimizer: torch.optim.Optimizer) -> str:
    package = type(optimizer).__module__.split(".")[0]
    return f"{package}'s {type(optimizer).__name__}"
