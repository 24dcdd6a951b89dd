"""Fingerprints of what the arithmetic stores and returns, for ``tests/golden/steps.toml``.

All inputs are made by integer hashing. Steps of elementwise rules use no matmul, and linear layers
multiply values whose sums are exact in float32, so these bits do not depend on the processor. One
section is kept for each kind of processor: matrix rules, which multiply real numbers.
"""

import hashlib
import json
import warnings
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

import narrowgauge as ng
from narrowgauge.optim import optimizers
from narrowgauge.spec import show
from narrowgauge.spec.computes import COMPUTES, Compute
from narrowgauge.spec.storages import STORAGES
from narrowgauge.spec.toml import load_toml
from narrowgauge.spec.update_rules import UPDATE_RULES
from processors import machine_key

STEPS = 12
SHAPES = {"matrix": (33, 17), "tall": (129, 3), "vector": (5,), "scalar": (1,), "still": (7, 9)}
"""Odd sizes; ``still`` has a zero gradient in every step."""
WIDE = {"matrix": (5, 700), "tall": (129, 3), "still": (3, 520)}
"""Rows of several blocks of 256, the last one shorter."""
WITHOUT_GRADIENT = 4
INFINITE = 7
"""In the one step ``tall`` has no gradient, in the other an element of ``matrix`` is infinite and
the step is skipped.
"""
ELEMENTWISE = ("exp_avg", "exp_avg_sq", "momentum_buffer")
MATRIX_OPTIONS = {"galore": {"rank": 4, "update_proj_gap": 5}}


def hashed(shape: tuple[int, ...], key: int) -> Tensor:
    """Integers from 0 to 2^32 - 1, a hash of the index and the key: int64."""
    count = torch.Size(shape).numel()
    word = (
        torch.arange(count, dtype=torch.int64) * 0x9E3779B1 + key * 0x85EBCA6B + 0x27220A95
        & 0xFFFFFFFF
    )
    for multiplier in (0x7FEB352D, 0x46447395):
        word = (word ^ word >> 16) * multiplier & 0xFFFFFFFF
    return (word ^ word >> 15).reshape(shape)


def values(shape: tuple[int, ...], key: int, binades: int = 12, top: int = -2) -> Tensor:
    """Seven-bit integers of either sign over several binades, exact in bfloat16 and, with these
    defaults, float16.
    """
    word = hashed(shape, key)
    magnitude = (word & 127).float() * torch.exp2(-((word >> 8) % binades).float() + top - 7)
    return torch.where(word >> 20 & 1 > 0, -magnitude, magnitude)


def fingerprint(tensors: Iterable[Tensor]) -> str:
    """64 bits of a hash of the dtypes, shapes and bytes."""
    state = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        flat = tensor.detach().flatten().clone(memory_format=torch.contiguous_format)
        state.update(f"{tensor.dtype} {tuple(tensor.shape)} ".encode())
        state.update(flat.view(torch.uint8).numpy().tobytes())
    return state.hexdigest()


# ── steps ─────────────────────────────────────────────────────────────────────────────────────────


def pairs():
    """Each update rule with each storage that it can be computed in, and AdamW from random low bits
    in one of each kind, and on wide rows where blocks have scales.
    """
    filled = ("word", "exact", "compact", "kahan", "collage-plus", "float16/split")
    scaled = ("compact", "states8", "float32-states8")
    of_adamw = [("adamw", f"{storage} random") for storage in filled]
    of_adamw += [("adamw", f"{storage} wide") for storage in scaled]
    return of_adamw + [
        (rule.name, storage.name)
        for rule in UPDATE_RULES.values()
        for storage in STORAGES.values()
        if rule.name == "adamw"
        or (
            storage.arithmetic == "float32" and not storage.with_states(rule.moments.items()).scaled
            if rule.is_matrix
            else storage.arithmetic != "expansion"
        )
    ]


def steps(rule: str, storage: str) -> str:
    """The visible weights, the stored values, and what a checkpoint holds, after twelve steps: a
    fingerprint of each.
    """
    storage, _, kind = storage.partition(" ")
    row = UPDATE_RULES[rule]
    dtype = getattr(torch, STORAGES[storage].visible)
    weights = {}
    for name, shape in (WIDE if kind == "wide" else SHAPES).items():
        weights[name] = nn.Parameter(values(shape, 1).to(dtype))
    options = {"sgd": {"momentum": 0.9, "nesterov": True}}.get(rule, MATRIX_OPTIONS.get(rule, {}))
    groups = []
    for name, weight in weights.items():
        groups.append({"params": [(name, weight)]})
        if rule == "muon" and weight.ndim < 2:  # whose own rate is refused for vectors
            groups[-1]["rule"] = "adamw"
    optimizer = getattr(optimizers, row.optimizer)(
        groups, lr=0.003, weight_decay=0.1, max_grad_norm=0.5, seed=7, audit_every=5,
        storage=storage, compile=False, low_bits="random" if kind == "random" else "zero", **options,
    )  # fmt: skip
    for step in range(STEPS):
        for place, (name, weight) in enumerate(weights.items()):
            slope = values(weight.shape, 100 + 10 * step + place)
            if kind == "wide":  # blocks of different sizes
                slope *= torch.exp2(-(torch.arange(weight.shape[1]) // 256).float() * 5)
            weight.grad = slope.to(dtype)
            if name == "still":
                weight.grad.zero_()
            if name == "tall" and step == WITHOUT_GRADIENT:
                weight.grad = None
            if name == "matrix" and step == INFINITE:
                weight.grad[3, 2] = torch.inf
        optimizer.step()
    optimizer.finish_step()
    saved = optimizer.state_dict()["state"]
    stored = []
    for weight in weights.values():
        states = []
        for name in ELEMENTWISE:
            group = optimizer.group_of(weight)
            state = optimizer.kernels.local_state(group, weight, optimizer.state[weight])
            if name in {**dict(state.storage.states), **state.extras}:
                states.append(name)
        stored += [optimizer.stored(weight, name) for name in ("weight", *states)]
    planes = [
        value
        for key in sorted(saved)
        for _, value in sorted(saved[key].items())
        if isinstance(value, Tensor)
    ]
    return " ".join(map(fingerprint, (weights.values(), stored, planes)))


# ── linear layers ─────────────────────────────────────────────────────────────────────────────────


def operand(shape: tuple[int, ...], key: int, amax: float = 1.75) -> Tensor:
    """Values of few bits, whose scales are powers of two, so that sums of products are exact in
    float32.

    Args:
        amax: a power of two times the largest number of the format: 1.75 for float8, 1.3125 for
            NVFP4, which scales its scales.
    """
    word = hashed(shape, key)
    magnitude = (8 + word % (6 if amax > 1.5 else 3)).float() * torch.exp2(
        -((word >> 8) & 1).float() - 3
    )
    x = torch.where(word >> 20 & 1 > 0, -magnitude, magnitude)
    if len(shape) == 2:
        x[:, ::16] = amax  # of every row and block
        x[::16, :] = amax
        x *= torch.exp2(-(torch.arange(shape[0]) % 3).float())[
            :, None
        ]  # and rows with scales of their own
    return x


def computes() -> dict[str, Compute]:
    """Every compute that ``narrowgauge show computes`` lists."""
    names = [str(row["name"]) for row in show.table("computes").rows]
    return {name: COMPUTES[name] for name in names}


def linear(compute: Compute) -> str:
    """Output and gradients of one layer in three steps."""
    dtype = getattr(torch, compute.dtype)
    amax = 1.3125 if "nvfp4" in compute.name else 1.75
    layer = nn.Linear(64, 32).to(dtype)
    with torch.no_grad():
        layer.weight.copy_(operand((32, 64), 1, amax) / 4)
        layer.bias.copy_(operand((32,), 2))
    model = nn.Sequential(OrderedDict(down_proj=layer))  # the one name that all variants take
    ng.swap_linears(model, lambda name: compute, keep=(), seed=3)
    results = []
    for step in range(3):
        x = (operand((48, 64), 10 + step, amax) * 2.0**step).to(dtype).requires_grad_()
        model.zero_grad()
        y = model(x)
        y.backward((operand((48, 32), 20 + step, amax) / 16).to(dtype))
        results += [y, x.grad, layer.weight.grad, layer.bias.grad]
    return fingerprint(results)


# ── the file ──────────────────────────────────────────────────────────────────────────────────────


def sections():
    """Every fingerprint by section and name; those of matrix rules in a section of this kind of
    processor.
    """
    threads = torch.get_num_threads()
    here = machine_key()
    bits = {
        "steps": {},
        f"steps on {here}": {},
        "linear layers": {},
    }
    torch.set_num_threads(1)
    try:
        with warnings.catch_warnings():
            # Naive storages warn of lost updates, computes of emulation.
            warnings.simplefilter("ignore")
            for rule, storage in pairs():
                section = f"steps on {here}" if UPDATE_RULES[rule].is_matrix else "steps"
                bits[section][f"{rule} {storage}"] = steps(rule, storage)
            for name, compute in computes().items():
                bits["linear layers"][name] = linear(compute)
    finally:
        torch.set_num_threads(threads)
    return bits


def write(path: Path, sections: Mapping[str, Mapping[str, str]]) -> None:
    """Write sections as TOML; those of other processors stay."""
    lines = []
    for section, rows in (read(path) | dict(sections)).items():
        lines += [
            f"[{json.dumps(section)}]",
            *(f"{json.dumps(name)} = {json.dumps(row)}" for name, row in rows.items()),
            "",
        ]
    path.write_text("\n".join(lines), encoding="utf-8")


def read(path: Path):
    """Read the sections; none where the file is missing."""
    return load_toml(path.read_text(encoding="utf-8")) if path.exists() else {}
