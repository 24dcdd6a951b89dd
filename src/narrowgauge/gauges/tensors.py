"""Gauges: what the tensors of a model hold, and what casts lose of them, on sampled steps of a
recorded loop.

Gauges watch only tensors that are in memory anyway: the operands of linear layers' matmuls, forward
and backward; weights and gradients; queries and keys. So a run with gauges has the same bits as one
without. One exception was measured: a compiler fuses a narrow cast with what makes its operand, and
rounds this operand first where it is recorded.

On a sampled step each tensor costs one reduction and a copy of some of its rows. At the end of the
step the copies are measured, and one transfer moves the numbers to the host. They are one row of
``gauges.jsonl``.

Compiled code records tensors through a custom operator with a side effect that the compiler must
keep. The operator is in the graph only on sampled steps, which use a second version of the compiled
code. So other steps cost nothing.
"""

from __future__ import annotations

import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from narrowgauge.errors import NarrowgaugeError
from narrowgauge.gauges.attention import Heads, heads_of
from narrowgauge.matmul.experts import GroupedLinear, grouped_layers_of
from narrowgauge.matmul.linear import Linear
from narrowgauge.measuring.hooks import Hub, Listener
from narrowgauge.numerics import metrics
from narrowgauge.numerics.dtensor import gradient_of, is_split_over_ranks, local_of
from narrowgauge.numerics.exact_sums import largest_magnitude
from narrowgauge.optim.audit import AuditedUpdates, audit
from narrowgauge.optim.optimizer import Optimizer
from narrowgauge.optim.values import stored
from narrowgauge.runs.schema import FIRST_EXPONENT, METRICS, NUM_EXPONENTS, Row
from narrowgauge.spec.computes import Cast, first_of_input
from narrowgauge.spec.formats import dtype_name
from narrowgauge.torch_support import inductor, torch_names
from narrowgauge.torch_support.machine import require_float64
from narrowgauge.torch_support.torch_hooks import members_of
from narrowgauge.torch_support.torch_names import is_transformed, plain_name
from narrowgauge.transforms.scaled_tensor import Scaled

SAMPLE = 1 << 13
"""Values copied from each tensor: whole rows, evenly spaced."""
COUNTED = 3
"""Every third of them is counted in the histograms, which pool all tensors of a kind."""
_NUM_VALUES = 64
"""Values of each state that a histogram counts."""
_SLOTS = {"input": "output.left", "weight": "output.right", "output_grad": "grad_input.left"}
"""The slot whose cast is measured, for each kind of tensor."""
Key = tuple[str, str]
"""The kind of a watched tensor, of ``runs.schema.TENSOR_KINDS``, ``query`` or ``key``; its name."""


class _Sampling:
    """Whether any gauges sample the current step: compiled code has a version for each."""

    is_on = False


_KEYS: dict[int, tuple[weakref.ref[Gauges], Key]] = {}
"""The tensor of each entry, by the entry's address: a copied model has other ones."""
_ATTACHED: weakref.WeakSet[Gauges] = weakref.WeakSet()


_UNSEEN = {
    True: "the model was compiled before, or did not run; call torch.compiler.reset() first",
    False: "the model is in eval mode, and only training is watched; call model.train()",
}
"""Why no linear layer was recorded, for a model that trains and one that does not."""


class Gauges(Listener):
    """Measure a model on sampled steps; ``ng.RunRecorder(…, gauges_every=20)`` makes them.

    On several ranks, all of them make all calls. Samples are of each rank's own shard and batch.

    Attaching sets two options of ``torch.compile`` for the whole process, so that previously
    compiled code sees the hooks. Guards on module hooks are kept, and a function may be compiled 64
    times.

    Args:
        hub: of the loop. The linear layers of its model, low-precision experts, and queries and
            keys of modules whose class name contains "Attention" are watched.
        optimizer: whose steps are counted.
        every: number of steps between samples.
        on_row: called with each row of ``gauges.jsonl``.
    Raises:
        NarrowgaugeError: a module has gauges already.

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
        self.is_recording = False
        self._hub = hub
        self._on_row = on_row
        self._parameters = _stepped(hub.model, optimizer)
        self._samples: dict[Key, Tensor] = {}
        self._largest: dict[Key, Tensor] = {}
        self._layers: dict[str, Any] = {}
        self._heads: dict[str, Heads] = {}
        self._has_warned = False
        self._undo = ExitStack()
        _ATTACHED.add(self)
        self._attach()
        hub.listeners.append(self)
        self.step = 0

    @property
    def step(self) -> int:
        """Number of optimizer steps done; set it when a loop resumes."""
        return self._step

    @step.setter
    def step(self, step: int) -> None:
        self._step = step
        self._begin((step + 1) % self.every == 0)

    def _begin(self, is_sampled: bool) -> None:
        self._samples.clear()
        self._largest.clear()
        self.is_recording = is_sampled
        _Sampling.is_on = any(gauges.is_recording for gauges in _ATTACHED)

    def end(self) -> None:
        """Remove the gauges from the model."""
        if self in self._hub.listeners:
            self._hub.listeners.remove(self)
        self._begin(False)
        self._undo.close()

    # ── watched tensors ───────────────────────────────────────────────────────────────────────────

    def _attach(self) -> None:
        inductor.heed_hooks()
        entries: dict[Any, list[Tensor | None]] = {}
        for name, module in _named_modules(self._hub.model).items():
            for entry in getattr(module, "gauge_entries", ()):
                if entry is not None and _key_of(entry) is not None:
                    raise NarrowgaugeError(
                        f"gauges were requested for '{name}', which already has gauges.",
                        "Close the recorder that has them first.",
                    )
            heads = heads_of(module)
            if _multiplies(module):
                self._layers[name] = module
                places = entries.setdefault(module, [None, None])
                # Layers with the same input are measured once.
                first = first_of_input(name)
                if first == name or first not in self._layers:
                    places[0] = self._entry("input", name)
                places[1] = self._entry("output_grad", name)
            elif heads is not None:
                self._heads[name] = heads
                for kind, child in (("query", heads.query), ("key", heads.key)):
                    entries.setdefault(child, [None, None]).append(self._entry(kind, name))
        for module, places in entries.items():
            # An attribute, not a closure, so that equal layers share compiled code.
            module.gauge_entries = tuple(places)
            self._undo.callback(module.__dict__.pop, "gauge_entries", None)
            hook = module.register_forward_hook(_record_module, with_kwargs=True)
            self._undo.callback(hook.remove)

    def _entry(self, kind: str, name: str) -> Tensor:
        """Return the entry of a tensor: a CPU tensor, so that layers share a graph."""
        entry = torch.zeros(1, device="cpu")
        _KEYS[entry.data_ptr()] = weakref.ref(self), (kind, name)
        # The callback keeps the entry, and so its address.
        self._undo.callback(lambda: _KEYS.pop(entry.data_ptr(), None))
        return entry

    def record(self, key: Key, x: Tensor) -> None:
        """Record a tensor. A later call for the same key replaces the earlier value."""
        if not self.is_recording or not x.numel() or x.layout is not torch.strided:
            return
        x = x.detach()
        kind, name = key
        if kind in ("query", "key"):
            self._largest[key] = self._heads[name].largest_norm(x, kind)
            return
        self._largest[key] = largest_magnitude(x).float()
        self._samples[key] = sample_rows(x)

    # ── the step ──────────────────────────────────────────────────────────────────────────────────

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Record weights and gradients."""
        if not self.is_recording or optimizer is not self.optimizer:
            return
        for name, parameter in self._parameters.items():
            self.record(("weight", name), local_of(parameter))
            gradient = gradient_of(parameter)
            if gradient is not None:
                self.record(("grad", name), local_of(gradient))

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Write the row of a sampled step."""
        if optimizer is not self.optimizer:
            return
        step = self._step + 1
        if self.is_recording:
            self._warn_if_nothing_recorded(step)
            self._on_row({"step": step, **self._tables()})
        self.step = step

    def _tables(self) -> Row:
        """Return the tables of a row."""
        parts: dict[Key, Tensor] = {}
        pools: dict[str, list[Tensor]] = defaultdict(list)
        for (kind, name), sample in self._samples.items():
            pools[kind].append(sample.reshape(-1)[::COUNTED])
            cast = cast_of(kind, name, self._layers)
            if cast is not None:
                parts["tensors", f"{kind}:{name}"] = _losses(
                    sample, cast, self._largest[kind, name]
                )
        for kind in ("exp_avg", "exp_avg_sq"):
            for p in self._parameters.values():
                pools[kind] += _leading(self.optimizer, p, kind)
        for kind, values in pools.items():
            if values:
                parts["histograms", kind] = metrics.exponent_histogram(
                    torch.cat(values), FIRST_EXPONENT, NUM_EXPONENTS
                )
        for name, heads in self._heads.items():
            norms = [self._largest.get((kind, name)) for kind in ("query", "key")]
            if norms[0] is not None and norms[1] is not None:
                parts["attention", name] = heads.scale * norms[0] * norms[1]
        row: Row = {}
        for (table, name), numbers in fetch(parts).items():
            row.setdefault(table, {})[name] = _READ[table](numbers)
        if isinstance(self.optimizer, Optimizer):
            audited = audit(self.optimizer)
            if audited:
                row["updates"] = {name: _figures(reading) for name, reading in audited.items()}
        return row

    def _warn_if_nothing_recorded(self, step: int) -> None:
        """Warn once if no linear layer was recorded."""
        is_recorded = any(kind in ("input", "output_grad") for kind, _ in self._samples)
        if self._has_warned or is_recorded or not self._layers:
            return
        self._has_warned = True
        reason = _UNSEEN[self._hub.model.training]
        self._hub.say(f"the gauges recorded no linear layer at step {step}: {reason}")


def _stepped(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the parameters of a model that an optimizer steps, by name."""
    stepped = {*members_of(optimizer)}
    return {plain_name(name): p for name, p in model.named_parameters() if p in stepped}


def _multiplies(module: nn.Module) -> bool:
    """Return whether a module is a linear layer, transformers' ``Conv1D`` or a projection of
    low-precision experts.
    """
    # nn.MultiheadAttention reads the weight of such a layer and never calls it.
    if isinstance(module, NonDynamicallyQuantizableLinear):
        return False
    if isinstance(module, (nn.Linear, GroupedLinear)):
        return True
    return "Conv1D" in {kind.__name__ for kind in type(module).__mro__}


def _named_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules of a model by name. Low-precision experts are named like their weights."""
    names = {id(module): name for name, module in grouped_layers_of(model).items()}
    modules: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        modules[plain_name(names.get(id(module), name))] = module
    return modules


def sample_rows(x: Tensor) -> Tensor:
    """Copy evenly spaced rows of a tensor, about ``SAMPLE`` values, as float32 ``[rows, columns]``.

    Example:
        >>> sample_rows(torch.arange(6).reshape(3, 2)).shape
        torch.Size([3, 2])
    """
    matrix = x.reshape(-1, x.shape[-1]) if x.ndim > 1 else x.reshape(1, -1)
    rows, columns = matrix.shape
    if columns > SAMPLE:  # a long vector
        matrix = matrix[:, :SAMPLE]
        columns = SAMPLE
    count = max(1, min(rows, SAMPLE // columns))
    return matrix[:: rows // count][:count].to(torch.float32, copy=True)


# ── the hook of a layer ───────────────────────────────────────────────────────────────────────────


def _record_module(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    """Record the input, the output and the gradient of the output of a watched module, as its
    forward hook. One function hooks all layers, so that they share compiled code.
    """
    # In this order, so that code compiled for evaluation is not guarded on the sampling.
    if not (torch.is_grad_enabled() and module.training and _Sampling.is_on) or is_transformed():
        return None
    input_entry, gradient_entry, *output_entries = module.gauge_entries
    if input_entry is not None:
        x = args[0] if args else kwargs["input"]
        device = x.device.type
        if x.dtype == torch.float32 and torch.is_autocast_enabled(device):
            x = x.to(torch.get_autocast_dtype(device))  # as the matmul reads it
        _record_tensor(x, input_entry)
    if type(output) is Tensor:
        for entry in output_entries:
            _record_tensor(output, entry)
    if gradient_entry is None:
        return output
    return _record_gradient(output, gradient_entry)


def _key_of(entry: Tensor) -> tuple[Gauges, Key] | None:
    """Return the gauges and the key of an entry; ``None`` for one of a copied model."""
    if entry.data_ptr() not in _KEYS:
        return None
    reference, key = _KEYS[entry.data_ptr()]
    gauges = reference()
    return None if gauges is None else (gauges, key)


@torch.library.custom_op("narrowgauge::record", mutates_args=())
def record(x: Tensor, entry: Tensor) -> None:
    place = _key_of(entry)
    if place is not None:
        gauges, key = place
        gauges.record(key, x)


record.register_fake(lambda x, entry: None)
torch_names.keep_effect(record)


class _RecordGradient(torch.autograd.Function):
    """The identity, whose backward records the gradient: a tensor hook of compiled code."""

    @staticmethod
    def forward(ctx: object, y: Tensor, entry: Tensor) -> Tensor:
        ctx.entry = entry  # type: ignore[attr-defined]
        # Not a view, which compiled code could not modify in place. The compiler removes an
        # unnecessary copy.
        return y.clone()

    @staticmethod
    def backward(ctx: object, *grads: Tensor) -> tuple[Tensor, None]:
        record(grads[0], ctx.entry)  # type: ignore[attr-defined]
        return grads[0], None


def _record_tensor(x: Tensor, entry: Tensor) -> None:
    """Record a tensor. For a scaled tensor record its data, which a cast without an amax reads."""
    data = x._data if isinstance(x, Scaled) else x
    if type(data) in (Tensor, nn.Parameter):
        record(data.detach(), entry)


def _record_gradient(y: Tensor, entry: Tensor) -> Tensor:
    """Return ``y`` with its gradient recorded in backward."""
    if torch.compiler.is_compiling():
        if isinstance(y, Scaled):  # scaled tensors are not traced into a graph
            return y
        recorded: Tensor = _RecordGradient.apply(y, entry)  # type: ignore[no-untyped-call]
        return recorded
    # A hook does not change the tensor, so it may still be modified in place.
    if y.requires_grad:
        y.register_hook(lambda grad: _record_tensor(grad, entry))
    return y


# ── the numbers ───────────────────────────────────────────────────────────────────────────────────


def cast_of(kind: str, name: str, layers: Mapping[str, Any]) -> Cast | None:
    """Return the cast before a tensor's matmul, if its sample shows what the cast loses.

    Not shown are experts that scale their tokens alone, and shards of a weight with one scale.
    """
    layer = layers.get(name.removesuffix(".weight") if kind == "weight" else name)
    if kind not in _SLOTS or not isinstance(layer, (Linear, GroupedLinear)):
        return None
    cast: Cast | None = layer.compute.casts[_SLOTS[kind]]
    if cast is None:
        return None
    has_one_scale = cast.granularity == "tensor" or cast.scale == "float8_e4m3fn"
    is_unseen = cast.is_wide and cast.format == dtype_name(layer.weight.dtype)
    if isinstance(layer, GroupedLinear):
        is_unseen = kind == "weight" or has_one_scale or cast.is_wide
    elif kind == "weight" and has_one_scale:
        is_unseen = is_split_over_ranks(layer.weight)
    return None if is_unseen else cast


def _losses(sample: Tensor, cast: Cast, largest: Tensor) -> Tensor:
    """Return the sums of a cast's loss, and the largest magnitude over the rms."""
    finite = sample.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    scale = None
    if cast.granularity == "tensor" or cast.scale == "float8_e4m3fn":
        scale = largest.view(1, 1)
    sums = metrics.cast_sums(finite, cast, amax=scale).sum(0)
    outlier = finite.abs().amax() / finite.square().mean().sqrt()
    return torch.cat([sums, outlier.double().view(1)])


def fetch(parts: Mapping[Key, Tensor]) -> dict[Key, Tensor]:
    """Copy all numbers to the host, in one transfer."""
    if not parts:
        return {}
    flat = [part.detach().double().reshape(-1) for part in parts.values()]
    pieces = torch.cat(flat).cpu().split([len(part) for part in flat])
    return dict(zip(parts, pieces, strict=True))


def _loss_of(values: Tensor) -> list[float | int | None]:
    """Return the metrics of a cast, in the order of the record."""
    loss = metrics.cast_loss(values[:-1])
    return list(map(rounded, (loss.underflow, loss.overflow, loss.sqnr_db, float(values[-1]))))


_READ: dict[str, Callable[[Tensor], list[Any]]] = {
    "tensors": _loss_of,
    "histograms": lambda counts: counts.long().tolist(),
    "attention": lambda bound: [rounded(float(bound), keep_nan=True)],
}
"""The entries of a row, from the numbers of each table."""


def rounded(value: float | int | None, keep_nan: bool = False) -> float | int | None:
    """Round to four digits, more than a sample can resolve; ``None`` for NaN unless ``keep_nan``.

    Example:
        >>> rounded(0.123456), rounded(float("nan")), rounded(3)
        (0.1235, None, 3)
    """
    if value is None or isinstance(value, int):
        return value
    if math.isnan(value):
        return value if keep_nan else None
    return float(f"{value:.4g}")


def _leading(optimizer: torch.optim.Optimizer, p: Tensor, name: str) -> list[Tensor]:
    """Return at most 64 float32 values of a parameter's state, of this rank's shard; none without
    the state.
    """
    if isinstance(optimizer, Optimizer):
        state = optimizer.local_state(p)
        values = None
        if state is not None and name in dict(state.storage.states):
            values = stored(state, name, _NUM_VALUES)
    else:
        values = optimizer.state.get(p, {}).get(name)
    if not isinstance(values, Tensor):
        return []
    if type(values).dequantize is not Tensor.dequantize:  # codes, as of torchao
        values = values.dequantize()
    return [local_of(values).reshape(-1)[:_NUM_VALUES].float()]


def _figures(reading: AuditedUpdates) -> list[float | int | None]:
    """Return the metrics of an audited parameter, in the order of the record.

    EDQ is NaN if no update was intended.
    """
    rest = (getattr(reading, name) for name in list(METRICS["updates"])[1:])
    return [rounded(reading.edq, keep_nan=True), *map(rounded, rest)]
