"""Sampling of tensors: statistics and sampled rows of the watched tensors of one training step.

During a sampled step each watched tensor costs two reductions (amax, sum of squares) and a copy of
some of its rows. Each tensor has its own entry. Histograms, outliers and the error of casts are
computed at the end of the step from the copied rows, batched over all tensors. One transfer moves
them to the host.

Compiled code records tensors through a custom operator with a side effect that the compiler must
keep. The operator only reads tensors that a matmul reads, so they are in memory anyway, and the
surrounding code is compiled as before. The operator is in the graph only on sampled steps. They use
a second version of the compiled code. Hence other steps cost nothing, and a watched run has the
same bits as an unwatched run.
"""

from __future__ import annotations

import math
import weakref

import torch
from torch import Tensor

from narrowgauge.gauges.attention import Heads
from narrowgauge.numerics.exact_sums import largest_magnitude
from narrowgauge.numerics.metrics import rms
from narrowgauge.torch_support import torch_names
from narrowgauge.transforms.scaled_tensor import Scaled

SAMPLE = 1 << 13
"""Number of values copied from each tensor: whole rows, evenly spaced."""


class Sampling:
    """Whether gauges sample the current step.

    Compiled code is guarded on ``is_on`` and therefore has two versions.
    """

    is_on = False


SAMPLING = Sampling()


def is_sampled(module: torch.nn.Module) -> bool:
    """Return whether the current forward of a module is sampled."""
    # In this order, so that code compiled for evaluation is not guarded on SAMPLING.
    return torch.is_grad_enabled() and module.training and SAMPLING.is_on


Key = tuple[str, str]
"""The kind of a watched tensor, a key of ``runs.schema.TENSOR_KINDS``, ``query`` or ``key``; and
its name.
"""


class Recorder:
    """Statistics and samples of the watched tensors of one model.

    Statistics are amax, rms and the number of non-finite values; for queries and keys the largest
    norm of a head. Calls record only while ``is_recording``. Compiled code may run its sampled
    version for another recorder.
    """

    def __init__(self) -> None:
        self.is_recording = False
        self.stats: dict[Key, tuple[Tensor, ...]] = {}
        self.samples: dict[Key, Tensor] = {}
        self.keys = list[Key]()
        self.entries = list[Tensor]()
        self.heads = dict[Key, Heads]()
        self._number = len(RECORDERS)
        RECORDERS.append(weakref.ref(self))

    def watch(self, kind: str, name: str) -> Tensor:
        """Add a tensor. Return its entry, a CPU tensor, so that layers share a graph."""
        self.entries.append(
            torch.tensor([self._number, len(self.keys)], dtype=torch.int64, device="cpu")
        )
        self.keys.append((kind, name))
        return self.entries[-1]

    @property
    def recorded(self) -> list[Key]:
        """Return the recorded tensors, in the order in which they were added."""
        return [key for key in self.keys if key in self.stats]

    def clear(self) -> None:
        self.samples.clear()
        self.stats.clear()

    def record(self, key: Key, x: Tensor) -> None:
        """Record a tensor. A later call for the same entry replaces the earlier value."""
        if not self.is_recording or not x.numel() or x.layout is not torch.strided:
            return
        x = x.detach()
        heads = self.heads.get(key)
        if heads is not None:
            norm = heads.largest_norm(x, key[0])
            self.stats[key] = norm, norm, torch.zeros_like(norm)
            return
        largest = largest_magnitude(x)
        # Counting costs more than the two reductions. On the CPU a finite amax shows for free that
        # the count is 0.
        is_finite = not x.is_cuda and math.isfinite(largest.item())
        bad = torch.zeros_like(largest) if is_finite else (~x.isfinite()).sum().float()
        self.stats[key] = (largest, rms(x), bad)
        self.samples[key] = sample_rows(x)


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


# Weak references: a recorder lives as long as its gauges. Numbers are never reused, because
# compiled code may hold one.
RECORDERS: list[weakref.ref[Recorder]] = []


def recorder_of(entry: Tensor) -> tuple[Recorder, Key] | None:
    """Return the recorder and the key of an entry.

    ``None`` if its gauges are gone, or for an entry of a copied model.
    """
    number, index = entry.tolist()
    if number >= len(RECORDERS):
        return None
    recorder = RECORDERS[number]()
    if recorder is None or recorder.entries[index].data_ptr() != entry.data_ptr():
        return None
    return recorder, recorder.keys[index]


@torch.library.custom_op("narrowgauge::record", mutates_args=())
def record(x: Tensor, entry: Tensor) -> None:
    place = recorder_of(entry)
    if place is not None:
        recorder, key = place
        recorder.record(key, x)


record.register_fake(lambda x, entry: None)
torch_names.keep_effect(record)


class _RecordGradient(torch.autograd.Function):
    """The identity.

    Its backward records the gradient. Compiled code uses it in place of a tensor hook.
    """

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


def record_tensor(x: Tensor, entry: Tensor | None) -> None:
    """Record a tensor. For a scaled tensor record its data, which a cast without an amax reads."""
    if entry is None:
        return
    data = x._data if isinstance(x, Scaled) else x
    if type(data) in (Tensor, torch.nn.Parameter):
        record(data.detach(), entry)


def record_gradient(y: Tensor, entry: Tensor | None) -> Tensor:
    """Return ``y`` with its gradient recorded in backward."""
    if entry is None:
        return y
    if torch.compiler.is_compiling():
        if isinstance(y, Scaled):  # scaled tensors are not traced into a graph
            return y
        recorded: Tensor = _RecordGradient.apply(y, entry)  # type: ignore[no-untyped-call]
        return recorded
    # A hook does not change the tensor, so it may still be modified in place.
    if y.requires_grad:
        y.register_hook(lambda grad: record_tensor(grad, entry))
    return y
