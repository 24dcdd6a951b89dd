"""What the casts of low-precision layers lose, and a bound of attention's logits, on sampled steps of a
recorded loop.

Hooks watch only tensors that are in memory anyway: the operands of linear layers' matmuls, forward
and backward; weights; queries and keys. So a watched run has the same bits. On a sampled step each
tensor costs one reduction and a copy of some of its rows. One transfer moves the numbers to the
host: a row of ``gauges.jsonl``. Layers inside code that the user compiled are not seen.

A logit is a product of a query and a key, so the largest norms of both bound it. Rotary embeddings
keep norms. Attention modules are known by the name of their class. Not seen are modules that do not
state the width of a head, and those that never call their projections, such as
``nn.MultiheadAttention``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from narrowgauge.matmul.experts import GroupedLinear, grouped_layers_of
from narrowgauge.matmul.linear import Linear
from narrowgauge.measuring.hooks import Hub, Listener
from narrowgauge.numerics import metrics
from narrowgauge.numerics.dtensor import is_split_over_ranks, local_of
from narrowgauge.numerics.exact_sums import largest_magnitude
from narrowgauge.optim.audit import AuditedUpdates, audit
from narrowgauge.optim.optimizer import Optimizer
from narrowgauge.runs.schema import METRICS, Row
from narrowgauge.spec.computes import Cast, first_of_input
from narrowgauge.spec.formats import dtype_name
from narrowgauge.torch_support.machine import require_float64
from narrowgauge.torch_support.torch_hooks import OwnHook
from narrowgauge.torch_support.torch_names import is_transformed, plain_name

SAMPLE = 1 << 13
"""Values copied from each tensor: whole rows, evenly spaced."""
_SLOTS = {"input": "output.left", "weight": "output.right", "output_grad": "grad_input.left"}
"""The slot whose cast is measured, for each kind of tensor."""
_PAIRS = (
    ("q_norm", "k_norm"), ("q_proj", "k_proj"), ("query", "key"), ("q_lin", "k_lin"),
    ("to_q", "to_k"), ("wq", "wk"),
)  # fmt: skip
"""Names of the modules that give queries and keys, in libraries and models; what comes last in the
forward pass first.
"""
_FUSED = ("qkv", "c_attn", "qkv_proj", "query_key_value")
"""Names of projections to queries, keys and values of equal widths."""


class Gauges(Listener):
    """Measure a model on sampled steps; ``ng.RunRecorder(…, gauges_every=20)`` makes them.

    On several ranks, all of them make all calls. Samples are of each rank's own shard and batch.

    Args:
        hub: of the loop. The low-precision layers and experts of its model, and queries and keys of
            modules whose class name contains "Attention" are watched.
        optimizer: whose steps are counted.
        every: number of steps between samples.
        on_row: called with each row of ``gauges.jsonl``.

    Cost: 32 KiB of memory per watched tensor on sampled steps, where the host waits for the device
    once.
    """

    title = "the gauges"

    def __init__(
        self,
        hub: Hub,
        optimizer: torch.optim.Optimizer,
        every: int,
        on_row: Callable[[Row], object],
    ) -> None:
        require_float64(hub.model.parameters())
        self.optimizer = optimizer
        self.every = every
        self._hub = hub
        self._on_row = on_row
        self._samples: dict[tuple[str, str], Tensor] = {}
        self._largest: dict[tuple[str, str], Tensor] = {}
        self._undo = ExitStack()
        self._layers: dict[str, Any] = {}
        self._heads: dict[str, Heads] = {}
        names = {}
        for name, grouped in grouped_layers_of(hub.model).items():
            names[id(grouped)] = name
        for name, module in hub.model.named_modules():
            heads = heads_of(module)
            if isinstance(module, (Linear, GroupedLinear)):
                self._layers[plain_name(names.get(id(module), name))] = module
            elif heads is not None:
                self._heads[plain_name(name)] = heads
        hub.listeners.append(self)
        self.step = 0

    @property
    def step(self) -> int:
        """Number of optimizer steps done; set it when a loop resumes."""
        return self._step

    @step.setter
    def step(self, step: int) -> None:
        self._step = step
        self._undo.close()
        self._samples.clear()
        self._largest.clear()
        self.is_recording = (step + 1) % self.every == 0
        if self.is_recording:
            self._attach()

    def end(self) -> None:
        """Remove the gauges from the model."""
        if self in self._hub.listeners:
            self._hub.listeners.remove(self)
        self.is_recording = False
        self._undo.close()

    def _attach(self) -> None:
        """Hook the layers for one step."""
        seen = set()
        for name, layer in self._layers.items():
            # Layers with the same input are measured once.
            source = first_of_input(name)
            is_first = source == name or source not in seen
            seen.add(name)
            self._hook(layer, partial(self._see_layer, name, is_first=is_first))
        for name, heads in self._heads.items():
            for kind, module in (("query", heads.query), ("key", heads.key)):
                self._hook(module, partial(self._see_heads, kind, name))

    def _hook(self, module: nn.Module, see: Callable[..., None]) -> None:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            is_eager = not torch.compiler.is_compiling() and not is_transformed()
            if is_eager and torch.is_grad_enabled() and module.training:
                self._hub.guard(self, see, args, output)

        self._undo.callback(module.register_forward_hook(OwnHook(hook)).remove)

    def _see_layer(self, name: str, args: Any, output: Any, *, is_first: bool) -> None:
        if is_first and args:
            self._record("input", name, args[0])

        def see_gradient(gradient: Tensor) -> None:
            self._hub.guard(self, self._record, "output_grad", name, gradient)

        # A hook does not change the tensor, so it may still be modified in place.
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(see_gradient)

    def _see_heads(self, kind: str, name: str, args: Any, output: Any) -> None:
        if type(output) is Tensor:
            norm = self._heads[name].largest_norm(output.detach(), kind)
            self._largest[kind, name] = norm

    def _record(self, kind: str, name: str, x: Tensor) -> None:
        """Record a tensor. A later call for the same one replaces the earlier value."""
        if self.is_recording and type(x) in (Tensor, nn.Parameter) and x.numel():
            self._largest[kind, name] = largest_magnitude(x.detach()).float()
            self._samples[kind, name] = sample_rows(x.detach())

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Record the weights of low-precision layers."""
        if self.is_recording and optimizer is self.optimizer:
            for name, layer in self._layers.items():
                if isinstance(layer, Linear):
                    self._record("weight", f"{name}.weight", local_of(layer.weight))

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Write the row of a sampled step."""
        if optimizer is not self.optimizer:
            return
        step = self._step + 1
        if self.is_recording:
            self._on_row({"step": step, **self._tables()})
        self.step = step

    def _tables(self) -> Row:
        """Return the tables of a row."""
        parts: dict[tuple[str, str], Tensor] = {}
        for (kind, name), sample in self._samples.items():
            cast = cast_of(kind, self._layers[name.removesuffix(".weight")])
            if cast is not None:
                largest = self._largest[kind, name]
                parts["tensors", f"{kind}:{name}"] = _losses(sample, cast, largest)
        for name, heads in self._heads.items():
            query = self._largest.get(("query", name))
            key = self._largest.get(("key", name))
            if query is not None and key is not None:
                parts["attention", name] = (heads.scale * query * key).double().view(1)
        row: Row = {}
        for (table, name), numbers in _on_host(parts).items():
            row.setdefault(table, {})[name] = _metrics(numbers)
        if isinstance(self.optimizer, Optimizer):
            audited = audit(self.optimizer)
            if audited:
                row["updates"] = {name: _figures(reading) for name, reading in audited.items()}
        return row


def sample_rows(x: Tensor) -> Tensor:
    """Copy evenly spaced rows of a tensor, about ``SAMPLE`` values, as float32 ``[rows, columns]``.

    Example:
        >>> sample_rows(torch.arange(6).reshape(3, 2)).shape
        torch.Size([3, 2])
    """
    matrix = x.reshape(-1, x.shape[-1])[:, :SAMPLE]
    rows, columns = matrix.shape
    count = max(1, min(rows, SAMPLE // columns))
    return matrix[:: rows // count][:count].to(torch.float32, copy=True)


# ── the numbers ───────────────────────────────────────────────────────────────────────────────────


def cast_of(kind: str, layer: Any) -> Cast | None:
    """Return the cast before a tensor's matmul, if its sample shows what the cast loses.

    Not shown are experts that scale their tokens alone, and shards of a weight with one scale.
    """
    cast: Cast | None = layer.compute.casts[_SLOTS[kind]]
    if cast is None:
        return None
    is_unseen = cast.is_wide and cast.format == dtype_name(layer.weight.dtype)
    if isinstance(layer, GroupedLinear):
        is_unseen = _has_one_scale(cast) or cast.is_wide
    elif kind == "weight" and _has_one_scale(cast):
        is_unseen = is_split_over_ranks(layer.weight)
    if is_unseen:
        return None
    return cast


def _has_one_scale(cast: Cast) -> bool:
    return cast.granularity == "tensor" or cast.scale == "float8_e4m3fn"


def _losses(sample: Tensor, cast: Cast, largest: Tensor) -> Tensor:
    """Return the sums of a cast's loss, and the largest magnitude over the rms."""
    finite = sample.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    scale = None
    if _has_one_scale(cast):
        scale = largest.view(1, 1)
    sums = metrics.cast_sums(finite, cast, amax=scale).sum(0)
    outlier = finite.abs().amax() / finite.square().mean().sqrt()
    return torch.cat([sums, outlier.double().view(1)])


def _on_host(parts: Mapping[tuple[str, str], Tensor]) -> dict[tuple[str, str], Tensor]:
    """Copy all numbers to the host, in one transfer."""
    if not parts:
        return {}
    pieces = torch.cat([*parts.values()]).cpu().split([*map(len, parts.values())])
    return dict(zip(parts, pieces, strict=True))


def _metrics(values: Tensor) -> list[float | None]:
    """Return the metrics of a cast, or the bound of logits, in the order of the record."""
    if len(values) == 1:
        return [rounded(float(values), keep_nan=True)]
    loss = metrics.cast_loss(values[:-1])
    return [*map(rounded, (loss.underflow, loss.overflow, loss.sqnr_db, float(values[-1])))]


def rounded(value: float | None, keep_nan: bool = False) -> float | None:
    """Round to four digits, more than a sample can resolve; ``None`` for NaN unless ``keep_nan``.

    Example:
        >>> rounded(0.123456), rounded(float("nan"))
        (0.1235, None)
    """
    if value is None or (math.isnan(value) and not keep_nan):
        return None
    return float(f"{value:.4g}")


def _figures(reading: AuditedUpdates) -> list[float | None]:
    """Return the metrics of an audited parameter, in the order of the record.

    EDQ is NaN if no update was intended.
    """
    rest = (getattr(reading, name) for name in list(METRICS["updates"])[1:])
    return [rounded(reading.edq, keep_nan=True), *map(rounded, rest)]


# ── attention ─────────────────────────────────────────────────────────────────────────────────────


class Heads(NamedTuple):
    """The modules whose outputs are queries and keys, the width of a head, and the factor of the
    logits.
    """

    query: nn.Module
    key: nn.Module
    width: int
    scale: float

    def largest_norm(self, x: Tensor, kind: str) -> Tensor:
        """Return the largest norm of a head in ``[..., heads × width]``, the output of the module
        of ``query`` or ``key``.
        """
        if self.query is self.key:
            x = x.chunk(3, -1)[kind == "key"]
        norms: Tensor = x.float().unflatten(-1, (-1, self.width)).norm(dim=-1)
        return norms.amax()


def heads_of(module: Any) -> Heads | None:
    """Return where a module's queries and keys are; ``None`` if it is not attention or does not
    say.
    """
    if "attention" not in type(module).__name__.lower():
        return None
    children = dict(module.named_children())
    for q, k in (*_PAIRS, *zip(_FUSED, _FUSED, strict=True)):
        if q not in children or k not in children:
            continue
        query, key = children[q], children[k]
        width = _whole_number(module, "head_dim", "attention_head_size")
        count = _whole_number(module, "num_heads", "n_head")
        if not width and count and hasattr(query, "out_features"):
            width = query.out_features // count // (3 if query is key else 1)
        scale = getattr(module, "scaling", None)
        if width:
            return Heads(query, key, width, scale if isinstance(scale, float) else width**-0.5)
    return None


def _whole_number(module: Any, *names: str) -> int:
    """Return the first attribute that is a whole number, else 0."""
    for name in names:
        value = getattr(module, name, None)
        if isinstance(value, int):
            return value
    return 0
