"""What linear layers keep of their inputs between forward and backward, in a compiled model.

Claim: ``float8-tensor``, ``float8-delayed`` and ``int8-row`` keep at most 0.55 of the bytes that bfloat16 keeps: the codes
of each input, one byte each, and nothing else of it.

Method: the trainer's own model, each layer compiled, at 8 × 256 tokens. The compiler cuts a layer's graph in two, and
what the second half takes beside parameters and gradients is what is kept. In that half every kept tensor is followed
through views to whoever reads it. *Linear inputs* are those that a matmul of a weight's gradient reads (or one of our
operators); *linears alone*, those of them that nobody else reads. The two differ in bfloat16, where attention keeps its own
output, which is the input of the layer after it; so both are given: the first is what linear layers need, the second
what they cost beyond everyone else. *All kept* is the whole model: attention, norms, the residual stream, head and loss
too.

Baseline: bfloat16. Two other ways of counting must agree with this one. Every storage that autograd is handed to keep,
counted once (``saved_tensors_hooks``): it gives *all kept*, and the kept tensors of the graph must be found among its own,
once for each layer (*found*). And the bytes that glibc has given out, after the forward pass less before it (*malloc*): all
kept and what else is alive then.

Run: ``./dev bench kept_bytes [--rows …] [--quick]``. No times are taken, so ``--rounds`` has no effect.
"""

from __future__ import annotations

import ctypes
import gc
import platform
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from timing import Report, Row, parser
from torch import Tensor, nn
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.autograd.graph import saved_tensors_hooks
from torch.fx import Graph, Node
from transformers import PreTrainedModel

import narrowgauge as ng
from narrowgauge.matmul.gemm import EmulationNotice
from narrowgauge.spec.models import get_model
from narrowgauge.trainer.language_model import build, compiled_loss

ROWS = ("bfloat16", "float8-tensor", "float8-delayed", "int8-row", "float8-row", "mxfp8")
LIMIT = 0.55
HELD_TO_IT = ("float8-tensor", "float8-delayed", "int8-row")
MIB = 1 << 20

Kind = tuple[torch.dtype, int]
"""Dtype and number of elements of a kept tensor."""

_VIEWS = ("view", "permute", "reshape", "transpose", "expand", "unsqueeze", "squeeze", "slice", "clone", "t")
_MATMULS = ("aten.mm", "aten.addmm", "aten.bmm", "narrowgauge.")


@dataclass(frozen=True)
class Kept:
    """A tensor that a compiled layer keeps, and which operators read it."""

    kind: Kind
    readers: tuple[str, ...]

    @property
    def num_bytes(self) -> int:
        """Its size."""
        return self.kind[0].itemsize * self.kind[1]

    @property
    def of_linears(self) -> tuple[bool, ...]:
        """For each reader, whether it is a matmul of a linear layer."""
        return tuple(reader.startswith(_MATMULS) for reader in self.readers)


def readers_of(node: Node) -> Iterator[str]:
    """The operators that read a tensor, through views of it."""
    for user in node.users:
        name = str(user.target)
        if name.partition("aten.")[2].partition(".")[0] in _VIEWS:
            yield from readers_of(user)
        else:
            yield name


class LayerGraph(CustomGraphPass):  # type: ignore[misc]
    """Watches the compiler: what the backward halves of decoder layers are given."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.known = {(tensor.dtype, tuple(tensor.shape)) for tensor in parameters}
        self.found: list[Kept] = []

    def __call__(self, graph: Graph) -> None:
        """Note the kept tensors of a backward graph that has an attention in it."""
        given = [node for node in graph.nodes if node.op == "placeholder"]
        is_backward = any(node.name.startswith("tangents") for node in given)
        if is_backward and any("scaled_dot_product" in str(node.target) for node in graph.nodes):
            self.found = [self._kept(node) for node in given if self._is_kept(node)]

    def uuid(self) -> None:
        """None: graphs from a cache would not be seen."""

    def _is_kept(self, node: Node) -> bool:
        value = node.meta["val"]
        if node.name.startswith("tangents") or not isinstance(value, Tensor):
            return False
        return not (node.name.startswith("primals") and (value.dtype, tuple(value.shape)) in self.known)

    def _kept(self, node: Node) -> Kept:
        value = node.meta["val"]
        return Kept((value.dtype, value.numel()), tuple(readers_of(node)))


@contextmanager
def watched(model: nn.Module) -> Iterator[LayerGraph]:
    """A compiler that is watched while it compiles this model's layers."""
    watcher = LayerGraph([*model.parameters(), *model.buffers()])
    torch._dynamo.reset()
    with torch._inductor.config.patch(post_grad_custom_pre_pass=watcher):
        yield watcher


def malloc_bytes() -> int | None:
    """Bytes that glibc's malloc has given out, where it reports them."""
    if platform.libc_ver()[0] != "glibc" or not hasattr(libc := ctypes.CDLL(None), "mallinfo2"):
        return None
    fields = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    structure = type("Mallinfo2", (ctypes.Structure,), {"_fields_": [(name, ctypes.c_size_t) for name in fields]})
    libc.mallinfo2.restype = structure
    info: Any = libc.mallinfo2()
    return int(info.uordblks + info.hblkhd)


@dataclass(frozen=True)
class Count:
    """What a model keeps in one row.

    Args:
        layer: what each of its layers keeps.
        num_layers: how many it has.
        storages: every storage kept in the model but parameters and buffers: bytes, and the kinds seen in it.
        malloc: bytes given out by malloc over the forward pass.
    """

    layer: list[Kept]
    num_layers: int
    storages: dict[int, tuple[int, set[Kind]]]
    malloc: int | None

    def linear_bytes(self, *, alone: bool) -> int:
        """Bytes of what linear layers read, or of what they alone read."""
        chosen = all if alone else any
        return self.num_layers * sum(k.num_bytes for k in self.layer if k.readers and chosen(k.of_linears))

    @property
    def all_bytes(self) -> int:
        """Bytes of all storages kept."""
        return sum(size for size, _ in self.storages.values())

    @property
    def is_found(self) -> bool:
        """Whether autograd was handed each kept tensor of linear layers, once for each layer, in a storage of its own."""
        wanted = Counter(kept.kind for kept in self.layer if any(kept.of_linears) and kept.num_bytes)
        held = Counter(kind for _, kinds in self.storages.values() for kind in kinds)
        return bool(wanted) and all(held[kind] >= self.num_layers * count for kind, count in wanted.items())


def count(row: str, model_name: str, batch_size: int, sequence_length: int) -> Count:
    """Train one step to compile, then count what a forward pass leaves behind."""
    vocabulary = get_model(model_name).vocab_size
    model = cast(PreTrainedModel, build(model_name, seed=0))
    ng.prepare(model, f"{row}/word")
    loss = compiled_loss(model, chunked=False)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, vocabulary, (batch_size, sequence_length + 1), generator=generator)
    with watched(model) as watcher:
        loss(tokens).backward()
    model.zero_grad(set_to_none=True)

    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    storages: dict[int, tuple[int, set[Kind]]] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            held = storages.setdefault(storage.data_ptr(), (storage.nbytes(), set()))
            held[1].add((tensor.dtype, tensor.numel()))
        return tensor

    gc.collect()
    before = malloc_bytes()
    with saved_tensors_hooks(keep, lambda tensor: tensor):
        value = loss(tokens)
    after = malloc_bytes()
    value.detach_()
    malloc = None if before is None or after is None else after - before
    return Count(watcher.found, get_model(model_name).num_layers, storages, malloc)


def row_of(name: str, found: Count, base: Count) -> Row:
    """The table's row."""
    linear, alone = found.linear_bytes(alone=False), found.linear_bytes(alone=True)
    share = linear / base.linear_bytes(alone=False)
    return {
        "": name,
        "linear inputs MiB": linear / MIB,
        "ratio": share,
        "asked": f"≤ {LIMIT:g}" if name in HELD_TO_IT else "",
        "linears alone MiB": alone / MIB,
        "ratio of it": alone / base.linear_bytes(alone=True),
        "all kept MiB": found.all_bytes / MIB,
        "ratio of all": found.all_bytes / base.all_bytes,
        "malloc MiB": "" if found.malloc is None else found.malloc / MIB,
        "found": "yes" if found.is_found else "NO",
    }


def kept_rows(found: Count) -> list[Row]:
    """What one layer keeps, tensor by tensor."""
    return [
        {
            "dtype": str(kept.kind[0]).removeprefix("torch."),
            "elements": kept.kind[1],
            "KiB": kept.num_bytes / 1024,
            "read by": ", ".join(sorted({r.removeprefix("aten.").removesuffix(".default") for r in kept.readers})),
        }
        for kept in found.layer
        if kept.num_bytes >= 1024
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    flags = parser(__doc__, rounds=1)
    flags.add_argument("--rows", nargs="+", default=list(ROWS), metavar="ROW", help="rows of computes")
    flags.add_argument("--model", default="llama-35m", help="a preset (default llama-35m)")
    options = flags.parse_args(arguments)
    report = Report("kept bytes", options)
    warnings.simplefilter("ignore", EmulationNotice)
    size = (options.model, 8, 256)
    if options.quick:
        size, options.rows = ("llama-1m", 2, 64), ["int8-row"]
    names = ["bfloat16", *(name for name in options.rows if name != "bfloat16")]
    counts = {name: count(name, *size) for name in names}
    rows = [row_of(name, found, counts["bfloat16"]) for name, found in counts.items()]
    report.add(f"kept for backward by {size[0]}, compiled, {size[1]} × {size[2]} tokens", rows)
    for name, found in counts.items():
        report.add(f"one layer in {name}", kept_rows(found))
    return report.end() or int(not all(found.is_found for found in counts.values()))


if __name__ == "__main__":
    sys.exit(main())
