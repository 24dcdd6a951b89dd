"""A user's set-up: a model and its optimizers, and what is surely wrong before a step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from narrowgauge.errors import RecipeError
from narrowgauge.measuring.passes import inner_name
from narrowgauge.measuring.reading import Reading, measured
from narrowgauge.numerics.dtensor import is_sharded, local_of
from narrowgauge.numerics.exact_sums import largest_magnitude
from narrowgauge.torch_support.machine import require_float64

NARROW = (torch.bfloat16, torch.float16)
TRAINED = (*NARROW, torch.float32, torch.float64)
"""Formats of weights that optimizers step."""
SAMPLE = 1 << 12
"""Elements of a tensor that stand for it."""


class Stepped(NamedTuple):
    """A parameter of an optimizer, with the name that the model has for it, or for what it is the
    master of.
    """

    name: str
    parameter: Tensor
    group: dict[str, Any]
    optimizer: torch.optim.Optimizer


@dataclass
class SetUp:
    """A model, possibly wrapped, and its optimizers without wrappers."""

    model: nn.Module
    optimizers: list[torch.optim.Optimizer]

    @cached_property
    def parameters(self) -> dict[str, Tensor]:
        """Return the model's parameters by their names without wrappers."""
        return {inner_name(name): p for name, p in self.model.named_parameters()}

    @cached_property
    def stepped(self) -> list[Stepped]:
        """Return every parameter of every optimizer, as often as a group names it."""
        names = {id(p): name for name, p in self.parameters.items()}
        stepped = []
        for optimizer in self.optimizers:
            for index, group in enumerate(optimizer.param_groups):
                for place, p in enumerate(group["params"]):
                    name = names.get(id(p)) or self.name_of_master(p)
                    name = name or f"group {index}, parameter {place}"
                    stepped.append(Stepped(name, p, group, optimizer))
        return stepped

    @property
    def trained(self) -> list[Stepped]:
        """Return the stepped parameters that have values of a known format and are not frozen."""
        trained = []
        for stepped in self.stepped:
            p = stepped.parameter
            if p.requires_grad and not p.is_meta and p.dtype in TRAINED:
                trained.append(stepped)
        return trained

    @property
    def outside(self) -> dict[str, Any]:
        """Return the trained parameters that are none of the model's, by name."""
        inside = set(map(id, self.parameters.values()))
        return {p.name: p.parameter for p in self.trained if id(p.parameter) not in inside}

    def name_of_master(self, master: Tensor) -> str:
        """Return the name of the parameter whose values a wider tensor holds; empty if of none."""
        for name, p in self.parameters.items():
            is_wider = master.element_size() > p.element_size() and not p.is_meta
            if not is_wider or master.shape != p.shape or master.is_meta:
                continue
            if torch.equal(spread(master).to(p.dtype), spread(p)):
                return name
        return ""


def set_up_of(model: Any, optimizer: Any) -> SetUp:
    """Return the set-up. Refuse anything but a model and optimizers."""
    if not isinstance(model, nn.Module):
        raise RecipeError(
            f"Cannot check {type(model).__name__} as a model.", "Pass the torch.nn.Module."
        )
    require_float64(model.parameters())
    optimizers: list[torch.optim.Optimizer] = []
    for outer in optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]:
        inner = outer
        deeper = getattr(outer, "optimizer", None)
        while isinstance(deeper, torch.optim.Optimizer) and deeper is not inner:
            inner = deeper  # of Accelerate and Lightning
            deeper = getattr(inner, "optimizer", None)
        if not isinstance(inner, torch.optim.Optimizer):
            raise RecipeError(
                f"Cannot check {type(outer).__name__} as an optimizer.",
                "Pass the torch.optim.Optimizer that steps the model, or a list of several.",
            )
        members: Any = getattr(inner, "optimizers", None)  # of a container such as torchtitan's
        is_container = isinstance(members, (list, tuple)) and bool(members)
        optimizers += members if is_container else [inner]
    return SetUp(model, optimizers)


def spread(tensor: Tensor) -> Tensor:
    """Copy evenly spread elements of this rank's part of a tensor to the CPU, 1-D.

    The stride is coprime to the last dim, so the elements cover every column.
    """
    flat = local_of(tensor.detach()).reshape(-1)
    stride = max(1, -(-flat.numel() // SAMPLE))
    columns = tensor.shape[-1] if tensor.ndim else 1
    if stride > 1 and columns % 2 == 0:
        stride += 1 - stride % 2
    while stride > 1 and columns % stride == 0:
        stride += 2
    return flat[::stride].clone().cpu()


# ── readings ──────────────────────────────────────────────────────────────────────────────────────


def set_up_readings(set_up: SetUp, lines: list[str]) -> Iterator[Reading]:
    """Yield parameters in no optimizer, listed twice, not finite, untied or without a gradient, and
    rounded buffers.
    """
    missing = missing_parameters(set_up)
    if missing:
        yield measured("missing-parameters", missing, len(missing), 0)
    once = set[int]()
    twice = []
    for stepped in set_up.stepped:
        if id(stepped.parameter) in once:
            twice.append(stepped.name)
        once.add(id(stepped.parameter))
    if twice:
        yield measured("parameters-twice", twice, len(twice), 0)
    bad = _not_finite(set_up)
    if bad:
        yield measured("nonfinite", bad, len(bad), 0, stage="start")
    rounded = rounded_buffers(set_up.model)
    if rounded:
        yield measured("rounded-buffers", rounded, len(rounded), 0)
    ties = untied_pairs(set_up.model)
    if ties:
        yield measured("untied", [name for _, name in ties], len(ties), 0)
        lines += [f"  {name} and {other} are two tensors" for other, name in ties]
    gone = _without_gradient(set_up)
    if gone:
        yield measured("no-gradient", gone, len(gone), 0)


def missing_parameters(set_up: SetUp) -> list[str]:
    """Return trainable parameters that no optimizer has, and no master stands for."""
    stepped = {id(p.parameter) for p in set_up.stepped}
    named = {p.name for p in set_up.stepped}
    if named.isdisjoint(set_up.parameters) and all(p.parameter.ndim == 1 for p in set_up.stepped):
        return []  # flat partitions of the weights, as of DeepSpeed and Megatron
    lost = []
    for name, p in set_up.parameters.items():
        if p.requires_grad and id(p) not in stepped and name not in named:
            lost.append(name)
    return lost


def _not_finite(set_up: SetUp) -> list[str]:
    """Return the parameters that hold NaN, or infinity that is no frozen mask."""
    bad = []
    for name, p in set_up.parameters.items():
        if p.dtype in TRAINED and not p.is_meta:
            largest = largest_magnitude(local_of(p))
            if largest.isnan() or (p.requires_grad and largest.isinf()):
                bad.append(name)
    return bad


def _without_gradient(set_up: SetUp) -> list[str]:
    """Return trained parameters without a gradient, where others have one."""
    lost: dict[str, None] = {}
    for stepped in set_up.trained:
        p = stepped.parameter
        kept = getattr(p, "main_grad", None), getattr(p, "decoupled_grad", None)  # of Megatron
        if p.grad is None and kept == (None, None):
            lost[stepped.name] = None
    return list(lost) if len(lost) < len({p.name for p in set_up.trained}) else []


def rounded_buffers(model: nn.Module) -> list[str]:
    """Return the buffers of 16 bits that need the last bit of their format: they were rounded.

    Masks and small integers do not. Statistics beside their count, and scales beside codes, are
    meant.
    """
    names = []
    for owner, module in model.named_modules():
        buffers = dict(module.named_buffers(recurse=False))
        dtypes = {b.dtype for b in buffers.values()} - {torch.bool}
        if not all(dtype.is_floating_point for dtype in dtypes):
            continue
        for name, buffer in buffers.items():
            if buffer.dtype in NARROW and not buffer.is_meta and _needs_last_bit(spread(buffer)):
                names.append(inner_name(f"{owner}.{name}".lstrip(".")))
    return names


def _needs_last_bit(x: Tensor) -> bool:
    is_exact = (x.view(torch.int16) % 2 == 0) | (x == x.round()) & (x.abs() <= 256)
    is_inner = x.isfinite() & (x.abs() < torch.finfo(x.dtype).max)
    return bool((~is_exact & is_inner).any())


def untied_pairs(model: nn.Module) -> list[tuple[str, str]]:
    """Return pairs of an embedding and another trained matrix that are two tensors and should be one:
    of equal bits, or declared as tied.
    """
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    pairs = []
    for a, b in dict.fromkeys([*_equal_pairs(model), *_declared_ties(model)]):
        first, second = model.get_parameter(a), model.get_parameter(b)
        train = first.requires_grad and second.requires_grad
        is_mixed = (id(first) in embeddings) != (id(second) in embeddings)
        if first is not second and train and is_mixed:
            pairs.append((inner_name(a), inner_name(b)))
    return pairs


def _declared_ties(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield the names of an embedding's and a head's weight that a model of transformers ties."""
    names = {id(module): name for name, module in model.named_modules()}
    for module in model.modules():
        if not getattr(getattr(module, "config", None), "tie_word_embeddings", False):
            continue
        embedding = getattr(module, "get_input_embeddings", lambda: None)()
        head = getattr(module, "get_output_embeddings", lambda: None)()
        if not (isinstance(embedding, nn.Embedding) and isinstance(head, nn.Linear)):
            continue
        if embedding.weight.shape == head.weight.shape and id(head) in names:
            yield f"{names[id(embedding)]}.weight", f"{names[id(head)]}.weight"


def _equal_pairs(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield the names of matrices that hold equal bits in two tensors, and are not constant."""
    first: dict[Any, tuple[str, Tensor]] = {}
    for name, p in model.named_parameters():
        if p.ndim < 2 or p.is_meta or is_sharded(p) or not p.numel():
            continue
        bits = spread(p).view(torch.uint8).view(-1, p.element_size())
        key = p.shape, p.dtype, bits.numpy().tobytes()
        first_name, q = first.setdefault(key, (name, p))
        if first_name != name and bool((bits != bits[0]).any()) and torch.equal(p, q):
            yield first_name, name
