"""Which parameters an optimizer has, in which format, and what the process and its ranks change."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from narrowgauge.analysis.kinds import KINDS
from narrowgauge.analysis.reading import Reading, of_all
from narrowgauge.assembly.trainable import depends_on_order
from narrowgauge.checks.set_up import NARROW, SetUp, SteppedParameter
from narrowgauge.distributed.ranks import Ranks, all_ranks
from narrowgauge.matmul.swapping import Layer
from narrowgauge.numerics.dtensor import is_sharded
from narrowgauge.numerics.hashing import fingerprint, fingerprint_all
from narrowgauge.optim.optimizer import Optimizer
from narrowgauge.spec.formats import dtype_name
from narrowgauge.spec.storages import WIDE
from narrowgauge.torch_names import default_store, fsdp_policies

# ── parameters ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def parameter_readings(set_up: SetUp) -> Iterator[Reading]:
    """Yield parameters that no optimizer has, that it has twice or in another format, and those without a gradient."""
    yield from _missing(set_up)
    counts = Counter(id(p.parameter) for p in set_up.stepped)
    if names := [p.name for p in set_up.stepped if counts[id(p.parameter)] > 1]:
        yield KINDS["parameters-twice"].reading(of_all(names), len(set(names)), 0)
    yield from _cast_later(set_up)
    yield from without_gradient(set_up)


def _missing(set_up: SetUp) -> Iterator[Reading]:
    """Trainable parameters that no optimizer has; where it has others of the same shape, they were replaced."""
    stepped, own = set_up.stepped, {id(p) for p in set_up.model.parameters()}
    known = {id(p.parameter) for p in stepped}
    if not own & known and all(p.parameter.ndim == 1 for p in stepped):
        return  # flat partitions of the weights, as of DeepSpeed and Megatron
    lost = {name: p for name, p in set_up.parameters.items() if p.requires_grad and id(p) not in known}
    strangers = [p.parameter for p in stepped if id(p.parameter) not in own]
    replaced = {name: p for name, p in lost.items() if any(other.shape == p.shape for other in strangers)}
    if replaced:
        then = {
            dtype_name(other.dtype) for other in strangers if any(other.shape == p.shape for p in replaced.values())
        }
        now = {dtype_name(p.dtype) for p in replaced.values()}
        yield KINDS["replaced-parameters"].reading(
            of_all(replaced), len(replaced), 0, then=", ".join(sorted(then)), now=", ".join(sorted(now))
        )
    elif lost:
        yield KINDS["missing-parameters"].reading(of_all(lost), len(lost), 0)


def _cast_later(set_up: SetUp) -> Iterator[Reading]:
    """Weights in another format than when their optimizer was made."""
    changes: dict[tuple[str, str], list[str]] = {}
    for p in set_up.stepped:
        before = _dtype_before(p)
        if before is not None and before != p.parameter.dtype:
            changes.setdefault((dtype_name(before), dtype_name(p.parameter.dtype)), []).append(p.name)
    for (then, now), names in changes.items():
        yield KINDS["cast-weights"].reading(of_all(names), len(names), 0, then=then, now=now)


def _dtype_before(stepped: SteppedParameter) -> torch.dtype | None:
    if isinstance(stepped.optimizer, Optimizer):
        dtype: torch.dtype = getattr(torch, stepped.storage.visible)
        return dtype
    if not type(stepped.optimizer).__module__.startswith("torch.optim"):
        return None
    # torch makes its states in the format of the weight that it meets first.
    states = [stepped.state.get(name) for name in ("exp_avg", "momentum_buffer")]
    return next((state.dtype for state in states if isinstance(state, Tensor)), None)


def without_gradient(set_up: SetUp) -> Iterator[Reading]:
    """Trainable parameters without a gradient where others have one; TransformerEngine and Megatron keep theirs elsewhere."""
    trained = {p.name: p.parameter for p in set_up.trained}
    lost = [
        name
        for name, p in trained.items()
        if p.grad is None and all(getattr(p, other, None) is None for other in ("main_grad", "decoupled_grad"))
    ]
    if lost and len(lost) < len(trained):
        yield KINDS["no-gradient"].reading(of_all(lost), len(lost), 0, count=len(trained))


# ── the process ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def process_readings(set_up: SetUp) -> Iterator[Reading]:
    """Yield PyTorch's flags, policies of data parallelism, and modules that break a promised order."""
    if (dtype := torch.get_default_dtype()) is not torch.float32:
        message = f"The default dtype is {dtype_name(dtype)}: buffers, losses and scalars that name no format are rounded to it."
        yield KINDS["process-setting"].reading("torch.get_default_dtype()", 1, 0, message=message)
    for setting, message in _notes(set_up):
        yield KINDS["process-setting"].reading(setting, 1, 0, message=message)
    yield from _cut_by_policy(set_up)
    yield from _narrow_sums(set_up)
    yield from _replicas_apart(set_up)
    yield from _order_bound(set_up)


def _notes(set_up: SetUp) -> Iterator[tuple[str, str]]:
    precision = torch.get_float32_matmul_precision()
    plain = [m for m in set_up.model.modules() if isinstance(m, nn.Linear) and not isinstance(m, Layer)]
    is_replaced = "forward" in set_up.model.__dict__  # as Accelerate does, with one under autocast
    if precision != "highest" and plain and not is_replaced and all(m.weight.dtype is torch.float32 for m in plain):
        yield "torch.get_float32_matmul_precision()", f"Float32 matmuls may be computed in fewer bits ('{precision}')."
    used = {p.parameter.dtype for p in set_up.stepped if p.parameter.is_cuda}
    for flag, dtype in (
        ("allow_fp16_accumulation", torch.float16),
        ("allow_fp16_reduced_precision_reduction", torch.float16),
        ("allow_bf16_reduced_precision_reduction", torch.bfloat16),
    ):
        if dtype in used and getattr(torch.backends.cuda.matmul, flag, False):
            name = dtype_name(dtype)
            yield f"torch.backends.cuda.matmul.{flag}", f"CUDA matmuls of {name} may add partial sums in {name}."
    if (torch.full((8,), 1e-40, dtype=torch.float32) * 1.0).count_nonzero() == 0:
        yield (
            "torch.set_flush_denormal",
            "This thread flushes subnormal numbers, also of moments and float16 gradients, to zero.",
        )
    has_convolution = any(isinstance(module, nn.modules.conv._ConvNd) for module in set_up.model.modules())
    if torch.backends.cudnn.benchmark and has_convolution and _order_invariant(set_up):
        yield "torch.backends.cudnn.benchmark", "cuDNN chooses kernels by their time, so that bits differ between runs."


def _cut_by_policy(set_up: SetUp) -> Iterator[Reading]:
    visible = {p.storage.visible for p in set_up.stepped}
    narrow = {name for name in visible if name not in WIDE}
    for place, policy in _policies(set_up.model):
        dtype = getattr(policy, "param_dtype", None)
        if dtype is not None and narrow and dtype_name(dtype) not in visible:
            yield KINDS["cut-by-policy"].reading(place, 1, 0, dtype=dtype_name(dtype), format=", ".join(sorted(narrow)))


def _narrow_sums(set_up: SetUp) -> Iterator[Reading]:
    """Gradients of float32 weights that are summed over ranks in 16 bits."""
    many, model = all_ranks().size, set_up.model
    for place, policy in _policies(model):
        dtype = getattr(policy, "reduce_dtype", None) or getattr(policy, "param_dtype", None)
        if many > 1 and dtype in NARROW and any(p.parameter.dtype is torch.float32 for p in set_up.stepped):
            yield KINDS["narrow-rank-sums"].reading(place, many, dtype=dtype_name(dtype))
    for hook, _ in getattr(model, "_comm_hooks", []) if isinstance(model, DistributedDataParallel) else []:
        name = getattr(hook, "__name__", str(hook))
        for dtype_word, word in (("bfloat16", "bf16"), ("float16", "fp16")):
            if word in name:
                yield KINDS["narrow-rank-sums"].reading(name, many, dtype=dtype_word)


def _policies(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the mixed-precision policies of FSDP2, FSDP and DDP in a model, each kind once."""
    if isinstance(model, DistributedDataParallel) and model.mixed_precision is not None:
        yield "DistributedDataParallel(mixed_precision=…)", model.mixed_precision
    if (policy := getattr(model, "mixed_precision", None)) is not None and type(model).__name__.startswith("Fully"):
        yield "FullyShardedDataParallel(mixed_precision=…)", policy
    policies = {repr(policy): policy for policy in fsdp_policies(model)}
    yield from (("fully_shard(mp_policy=…)", policy) for policy in policies.values())


def _order_bound(set_up: SetUp) -> Iterator[Reading]:
    if name := _order_invariant(set_up):
        bound = {n: reason for n, module in set_up.model.named_modules() if (reason := depends_on_order(module))}
        if bound:
            why, replacement = next(iter(bound.values()))
            yield KINDS["order-bound"].reading(
                of_all(bound), len(bound), 0, reduction=name, reason=why, replacement=replacement
            )


def _order_invariant(set_up: SetUp) -> str:
    """Return the name of a reduction that gives the same bits in any order; ``""`` without one."""
    rows = [getattr(getattr(optimizer, "reduction", None), "row", None) for optimizer in set_up.optimizers]
    return next((row.name for row in rows if row is not None and row.order_invariant), "")


# ── ranks ───────────────────────────────────────────────────────────────────────────────────────────────────────────────

_PATIENCE = timedelta(seconds=10)
"""How long a rank waits for the others, which may not call the check at all."""
_calls = count()
_COMPARED, _LARGEST = 3, 1 << 20
"""So many of the smallest matrices are compared between ranks, none with more elements than this."""


def _replicas_apart(set_up: SetUp) -> Iterator[Reading]:
    """DDP replicas whose optimizers store different bits: DDP copies the first rank's weights, and nothing beside them."""
    ranks = all_ranks()
    if ranks.size == 1 or not any(isinstance(module, DistributedDataParallel) for module in set_up.model.modules()):
        return
    mine = _prints(set_up)
    others = _posted(f"{next(_calls)}/{'/'.join(mine)}", fingerprint_all(mine), ranks) if mine else {}
    if apart := [rank for rank, print_ in others.items() if print_ != others[ranks.rank]]:
        names = of_all(name.partition("@")[0] for name in mine)
        yield KINDS["replicas-apart"].reading(names, len(apart), 0, count=ranks.size)


def _prints(set_up: SetUp) -> dict[str, int]:
    """Return fingerprints of the stored weights of the smallest matrices, by name and step."""
    stored = {
        p.parameter: (p.name, p.optimizer)
        for p in set_up.trained
        if isinstance(p.optimizer, Optimizer)
        and p.storage.beside
        and p.parameter.ndim > 1
        and not is_sharded(p.parameter)
    }
    prints = {}
    for parameter in sorted((p for p in stored if 0 < p.numel() <= _LARGEST), key=Tensor.numel)[:_COMPARED]:
        name, optimizer = stored[parameter]
        prints[f"{name}@{optimizer.num_steps(parameter)}"] = fingerprint(optimizer.stored(parameter))
    return prints


def _posted(key: str, value: str, ranks: Ranks) -> dict[int, str]:
    """Return the value that each rank has posted under the same key; no collective, since a rank may not call the check."""
    store, keys = default_store(), [f"narrowgauge/check/{rank}/{key}" for rank in range(ranks.size)]
    store.set(keys[ranks.rank], value)
    try:
        store.wait(keys, _PATIENCE)
    except RuntimeError:  # a rank that does not come, or is elsewhere: nothing is known
        return {ranks.rank: value}
    return {rank: store.get(name).decode() for rank, name in enumerate(keys)}
