"""Checks of the process and its ranks: PyTorch's flags, policies of data parallelism, reductions."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from itertools import count
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from narrowgauge._torch import default_store, fsdp_policies
from narrowgauge.assembly.trainable import depends_on_order
from narrowgauge.distributed.ranks import Ranks, all_ranks
from narrowgauge.integrations.check.set_up import NARROW, SetUp, Values
from narrowgauge.integrations.check.watch import smallest
from narrowgauge.matmul.swapping import Layer
from narrowgauge.numerics.checksums import fingerprint, fingerprint_all
from narrowgauge.numerics.shards import is_sharded
from narrowgauge.optim.optimizer import Optimizer
from narrowgauge.runs.finding import told
from narrowgauge.spec.formats import dtype_name
from narrowgauge.spec.storages import WIDE


def default_dtype(_: SetUp) -> Iterator[Values]:
    """A default dtype other than float32, to which tensors that name no format are rounded."""
    if (dtype := torch.get_default_dtype()) is not torch.float32:
        yield {"where": "torch.get_default_dtype()", "dtype": dtype_name(dtype)}


def fast_float32(set_up: SetUp) -> Iterator[Values]:
    """Matmuls of float32 weights that are computed in fewer bits."""
    precision = torch.get_float32_matmul_precision()
    plain = [m for m in set_up.model.modules() if isinstance(m, nn.Linear) and not isinstance(m, Layer)]
    is_wide = bool(plain) and all(module.weight.dtype is torch.float32 for module in plain)
    is_replaced = "forward" in set_up.model.__dict__  # as Accelerate does, with one under autocast
    is_cast = bool(set_up.seen.autocasts - {None}) or is_replaced
    if precision != "highest" and is_wide and not is_cast:
        yield {"where": "torch.get_float32_matmul_precision()", "precision": precision}


def half_accumulation(set_up: SetUp) -> Iterator[Values]:
    """CUDA matmuls that accumulate in 16 bits."""
    flags = torch.backends.cuda.matmul
    wanted = {
        "allow_fp16_accumulation": (torch.float16, "warning"),
        "allow_fp16_reduced_precision_reduction": (torch.float16, "note"),
        "allow_bf16_reduced_precision_reduction": (torch.bfloat16, "note"),
    }
    used = {each.parameter.dtype for each in set_up.stepped if each.parameter.is_cuda}
    if used:
        used |= {dtype for dtype in set_up.seen.autocasts if dtype is not None}
    for flag, (dtype, severity) in wanted.items():
        if dtype in used and getattr(flags, flag, False):
            yield {"where": f"torch.backends.cuda.matmul.{flag}", "dtype": dtype_name(dtype), "severity": severity}


def flushed(_: SetUp) -> Iterator[Values]:
    """Subnormal numbers that the CPU flushes to zero."""
    if (torch.full((8,), 1e-40, dtype=torch.float32) * 1.0).count_nonzero() == 0:
        yield {"where": "torch.set_flush_denormal"}


def tuned_kernels(set_up: SetUp) -> Iterator[Values]:
    """cuDNN that chooses kernels by their time, with a reduction that promises the same bits."""
    has_convolution = any(isinstance(module, nn.modules.conv._ConvNd) for module in set_up.model.modules())
    if torch.backends.cudnn.benchmark and has_convolution and _order_invariant(set_up):
        yield {"where": "torch.backends.cudnn.benchmark"}


# ── ranks ───────────────────────────────────────────────────────────────────────────────────────────────────────────

_PATIENCE = timedelta(seconds=10)
"""How long a rank waits for the others, which may not call the check at all."""
_calls = count()


def replicas_apart(set_up: SetUp) -> Iterator[Values]:
    """DDP replicas whose optimizers store different bits: DDP copies the first rank's weights, and nothing beside them."""
    ranks = all_ranks()
    if ranks.size == 1 or not any(isinstance(module, DistributedDataParallel) for module in set_up.model.modules()):
        return
    mine = _prints(set_up)
    others = _posted(f"{next(_calls)}/{'/'.join(mine)}", fingerprint_all(mine), ranks) if mine else {}
    if apart := [rank for rank, print_ in others.items() if print_ != others[ranks.rank]]:
        yield {"where": told(name.partition("@")[0] for name in mine), "count": len(apart), "many": ranks.size}


def _prints(set_up: SetUp) -> dict[str, int]:
    """Fingerprints of the stored weights of the smallest matrices, by name and step."""
    found = {
        each.parameter: (each.name, each.optimizer)
        for each in set_up.trained
        if isinstance(each.optimizer, Optimizer) and each.storage.beside and each.parameter.ndim > 1
        and not is_sharded(each.parameter)
    }  # fmt: skip
    prints = {}
    for parameter in smallest(found):
        name, optimizer = found[parameter]
        prints[f"{name}@{optimizer.num_steps(parameter)}"] = fingerprint(optimizer.stored(parameter))
    return prints


def _posted(key: str, value: str, ranks: Ranks) -> dict[int, str]:
    """The value that each rank has posted under the same key; without a collective, since a rank may not call the check."""
    store, keys = default_store(), [f"narrowgauge/check/{rank}/{key}" for rank in range(ranks.size)]
    store.set(keys[ranks.rank], value)
    try:
        store.wait(keys, _PATIENCE)
    except RuntimeError:  # a rank that does not come, or is elsewhere: nothing is known
        return {ranks.rank: value}
    return {rank: store.get(each).decode() for rank, each in enumerate(keys)}


def cut_again(set_up: SetUp) -> Iterator[Values]:
    """A data-parallel policy that casts weights to a format other than their storage's."""
    visible = {each.storage.visible for each in set_up.stepped}
    narrow = {name for name in visible if name not in WIDE}
    for where, policy in _policies(set_up.model):
        dtype = getattr(policy, "param_dtype", None)
        if dtype is not None and narrow and dtype_name(dtype) not in visible:
            yield {"where": where, "dtype": dtype_name(dtype), "format": ", ".join(sorted(narrow))}


def narrow_sums(set_up: SetUp) -> Iterator[Values]:
    """Gradients of float32 weights that are summed over ranks in 16 bits."""
    many = all_ranks().size
    for where, policy in _policies(set_up.model):
        dtype = getattr(policy, "reduce_dtype", None) or getattr(policy, "param_dtype", None)
        if many > 1 and dtype in NARROW and any(each.parameter.dtype is torch.float32 for each in set_up.stepped):
            yield {"where": where, "dtype": dtype_name(dtype), "many": many}
    model = set_up.model
    for hook, _ in getattr(model, "_comm_hooks", []) if isinstance(model, DistributedDataParallel) else []:
        name = getattr(hook, "__name__", str(hook))
        for dtype, word in (("bfloat16", "bf16"), ("float16", "fp16")):
            if word in name:
                yield {"where": name, "dtype": dtype, "many": many}


def _policies(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The mixed-precision policies of FSDP2, FSDP and DDP in a model, each kind once."""
    if isinstance(model, DistributedDataParallel) and model.mixed_precision is not None:
        yield "DistributedDataParallel(mixed_precision=…)", model.mixed_precision
    if (policy := getattr(model, "mixed_precision", None)) is not None and type(model).__name__.startswith("Fully"):
        yield "FullyShardedDataParallel(mixed_precision=…)", policy
    policies = {repr(policy): policy for policy in fsdp_policies(model)}
    yield from (("fully_shard(mp_policy=…)", policy) for policy in policies.values())


def order_bound(set_up: SetUp) -> Iterator[Values]:
    """Modules through which one micro-batch changes what another computes, with an order-invariant reduction."""
    if name := _order_invariant(set_up):
        found = {n: reason for n, module in set_up.model.named_modules() if (reason := depends_on_order(module))}
        if found:
            why, replacement = next(iter(found.values()))
            yield {"where": told(found), "reduction": name, "reason": why, "replacement": replacement}


def _order_invariant(set_up: SetUp) -> str:
    """The name of a reduction that gives the same bits in any order; ``""`` without one."""
    rows = [getattr(getattr(optimizer, "reduction", None), "row", None) for optimizer in set_up.optimizers]
    return next((row.name for row in rows if row is not None and row.order_invariant), "")
