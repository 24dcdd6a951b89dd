"""Check parameters: not in the optimizer, listed twice, not finite, untied, or without a gradient. Check buffers: rounded."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge.analysis.kinds import KINDS
from narrowgauge.analysis.reading import Reading, of_all
from narrowgauge.checks.set_up import NAIVE, NARROW, SetUp, inner_name
from narrowgauge.checks.step_samples import spread
from narrowgauge.numerics.dtensor import is_sharded, local_of
from narrowgauge.numerics.exact_sums import largest_magnitude


def parameter_readings(set_up: SetUp) -> Iterator[Reading]:
    """Yield parameters in no optimizer, listed twice, not finite, untied, or without a gradient; and rounded buffers."""
    yield from _missing(set_up)
    yield from _untied(set_up)
    if buffers := rounded_buffers(set_up.model):
        turns = next((f" {name} is {turns} then." for name, turns in buffers.items() if turns), "")
        yield KINDS["rounded-buffers"].reading(of_all(buffers), len(buffers), 0, turns=turns)
    # A frozen mask may hold infinities.
    values = {name: p for name, p in set_up.parameters.items() if p.dtype in NAIVE and not p.is_meta}
    largest = {name: largest_magnitude(local_of(p)) for name, p in values.items()}
    if names := [name for name, x in largest.items() if x.isnan() or (values[name].requires_grad and x.isinf())]:
        yield KINDS["nonfinite-weights"].reading(of_all(names), len(names), 0)
    counts = Counter(id(p.parameter) for p in set_up.stepped)
    if names := [p.name for p in set_up.stepped if counts[id(p.parameter)] > 1]:
        yield KINDS["parameters-twice"].reading(of_all(names), len(set(names)), 0)
    trained = {p.name: p.parameter for p in set_up.trained}
    # TransformerEngine and Megatron store gradients elsewhere.
    places = ("grad", "main_grad", "decoupled_grad")
    lost = [name for name, p in trained.items() if all(getattr(p, place, None) is None for place in places)]
    if lost and len(lost) < len(trained):
        yield KINDS["no-gradient"].reading(of_all(lost), len(lost), 0, count=len(trained))


def _missing(set_up: SetUp) -> Iterator[Reading]:
    """Yield trainable parameters without an optimizer. If the optimizer has others of that shape, they were replaced."""
    stepped, in_model = set_up.stepped, {id(p) for p in set_up.model.parameters()}
    stepped_ids = {id(p.parameter) for p in stepped}
    if not in_model & stepped_ids and all(p.parameter.ndim == 1 for p in stepped):
        return  # flat partitions of the weights, as of DeepSpeed and Megatron
    lost = {name: p for name, p in set_up.parameters.items() if p.requires_grad and id(p) not in stepped_ids}
    shapes = {p.parameter.shape for p in stepped if id(p.parameter) not in in_model}
    if replaced := [name for name, p in lost.items() if p.shape in shapes]:
        yield KINDS["replaced-parameters"].reading(of_all(replaced), len(replaced), 0)
    elif lost:
        yield KINDS["missing-parameters"].reading(of_all(lost), len(lost), 0)


def _untied(set_up: SetUp) -> Iterator[Reading]:
    """Yield pairs of an embedding and another trained matrix with equal bits in two tensors."""
    for a, b in equal_pairs(set_up.model):
        modules = [set_up.model.get_submodule(name.rpartition(".")[0]) for name in (a, b)]
        both_train = all(set_up.model.get_parameter(name).requires_grad for name in (a, b))
        if both_train and sum(isinstance(module, nn.Embedding) for module in modules) == 1:
            yield KINDS["untied"].reading(inner_name(b), 1, 0, a=inner_name(a), b=inner_name(b))


def equal_pairs(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield the names of matrices that hold equal bits in two tensors. Constants, such as zeros, do not count."""
    first: dict[Any, str] = {}
    for name, p in model.named_parameters():
        if p.ndim < 2 or p.is_meta or is_sharded(p) or not p.numel():
            continue
        sample = spread(p).view(torch.uint8).view(-1, p.element_size())
        other = first.setdefault((p.shape, p.dtype, sample.numpy().tobytes()), name)
        if other != name and bool((sample != sample[0]).any()):
            a, b = (x.detach().contiguous().view(torch.uint8) for x in (p, model.get_parameter(other)))
            if torch.equal(a, b):
                yield other, name


def rounded_buffers(model: nn.Module) -> dict[str, str]:
    """Return the buffers of 16 bits that were probably rounded, with the angle by which rotary positions may turn."""
    names = dict[str, str]()
    for owner, module in model.named_modules():
        buffers = dict(module.named_buffers(recurse=False))
        if any(not b.is_floating_point() and b.dtype is not torch.bool for b in buffers.values()):
            continue  # statistics of a batch norm beside their count; scales beside their codes
        for name, buffer in buffers.items():
            if buffer.dtype not in NARROW or buffer.is_meta or not _is_rounded(values := spread(buffer)):
                continue
            turns = ""
            if name == "inv_freq":
                position = getattr(getattr(module, "config", None), "max_position_embeddings", 4096)
                # The first frequency, 1, is exact. Half an ulp of the next is the largest error.
                exponent = math.frexp(float(values[values != 1].abs().max()))[1]
                angle = position * math.ldexp(torch.finfo(buffer.dtype).eps / 4, exponent)
                turns = f"off by up to {angle:.2g} rad at position {position:,}"
            names[inner_name(f"{owner}.{name}".lstrip("."))] = turns
    return names


def _is_rounded(x: Tensor) -> bool:
    """Return whether a value needs the last bit of its 16-bit format. Masks and small integers do not: they are exact."""
    is_exact = (x.view(torch.int16) % 2 == 0) | (x == x.round()) & (x.abs() <= 256)
    return bool((~is_exact & x.isfinite() & (x.abs() < torch.finfo(x.dtype).max)).any())
