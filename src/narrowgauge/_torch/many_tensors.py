"""One launch of a GPU for many tensors: Inductor's kernel, whose blocks find their tensor in a table.

A model has hundreds of tensors, and Inductor writes a kernel for one; each launch costs the host some 50 µs and the device
some 3. :func:`with_table` rewrites the head of the kernel alone: every block loads the arguments from a row of a table, and the
rest is as Inductor wrote it, so no bit of a result changes. A row stands for at most so many elements as ``SPANS`` says.

``triton_meta`` of a kernel in a module of :func:`narrowgauge._torch.triton_code.triton_code`
    The types of its arguments, and which of them are multiples of 16. The way out: a launch for each tensor.
"""

from __future__ import annotations

import ast
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from narrowgauge._torch.aligned import Loaded, is_aligned, on_aligned
from narrowgauge._torch.transfers import stream_id, to_device

SPANS = {"pointwise": 1 << 17, "reduction": 1 << 6, "persistent_reduction": 1 << 6}
"""By the kind of a kernel: elements of a result for which a row of the table stands, a multiple of every block. Blocks beyond a
tensor's last one do nothing."""
MOST_TABLES = 256
"""Tables that are kept. A model whose gradients stay in place needs one for each kernel and param group."""

_KERNEL = re.compile(r"^(\w+) = async_compile\.triton\('\1', '''(?P<code>.*?)''', device_str=", re.S | re.M)
_MARK = re.compile(r"# takes a table: (\w+) (\d+) (\w+)\n")
_KINDS = {
    "*fp32": "tl.pointer_type(tl.float32)",
    "*fp64": "tl.pointer_type(tl.float64)",
    "*i32": "tl.pointer_type(tl.int32)",
    "*i64": "tl.pointer_type(tl.int64)",
    "i32": "tl.int32",
    "i64": "tl.int64",
}
"""Triton's names of the types of arguments, and what a number of the table is cast to."""


def with_table(text: str) -> str:
    """A module of Inductor whose kernel takes a table; the text itself where it has several, or one of another form."""
    kernels = list(_KERNEL.finditer(text))
    found = _takes_table(kernels[0]["code"]) if len(kernels) == 1 else None
    if found is None:
        return text
    kind, place, code = found
    start, end = kernels[0].span("code")
    return f"# takes a table: {kind} {place} {kernels[0][1]}\n{text[:start]}{code}\n{text[end:]}"


def _takes_table(code: str) -> tuple[str, int, str] | None:
    """The kind of a kernel, which of its arguments counts the elements, and its code with another head."""
    tree = ast.parse(code)
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    heuristic = functions[0].decorator_list[0] if len(functions) == 1 else None
    if not isinstance(heuristic, ast.Call) or not isinstance(heuristic.func, ast.Attribute):
        return None
    (function,), kind = functions, heuristic.func.attr
    meta = {keyword.arg: keyword.value for keyword in heuristic.keywords}.get("triton_meta")
    begins = [n for n, line in enumerate(function.body) if ast.unparse(line) == "xoffset = tl.program_id(0) * XBLOCK"]
    if kind not in SPANS or len(begins) != 1 or not isinstance(meta, ast.Dict):
        return None
    entries = {ast.unparse(key).strip("'"): place for place, key in enumerate(meta.keys) if key is not None}
    try:
        signature = ast.literal_eval(meta.values[entries["signature"]])
        (multiples,) = ast.literal_eval(meta.values[entries["configs"]])
    except (KeyError, ValueError):  # another release
        return None
    names = [name for name, kind in signature.items() if kind != "constexpr"]
    if "xnumel" not in names or not all(signature[name] in _KINDS for name in names):
        return None
    row = f"row = table + tl.program_id(0) // ({SPANS[kind]} // XBLOCK) * {len(names) + 1}"
    loads = {}
    for place, name in enumerate(names):
        value = f"tl.load(row + {place}).to({_KINDS[signature[name]]})"
        is_multiple = ["tt.divisibility", 16] in multiples.get((place,), [])
        loads[name] = f"{name} = tl.multiple_of({value}, 16)" if is_multiple else f"{name} = {value}"
    offset = [
        f"start = tl.multiple_of(tl.load(row + {len(names)}).to(tl.int32), {SPANS[kind]})",
        f"xoffset = start + tl.program_id(0) % ({SPANS[kind]} // XBLOCK) * XBLOCK",
        "if xoffset >= xnumel:\n    return",
    ]
    function.body[begins[0] : begins[0] + 1] = ast.parse("\n".join(offset)).body
    function.body = [*ast.parse(row).body, *_before_first_use(loads, function.body)]
    function.args.args[: len(names)] = [ast.arg("table"), ast.arg("xnumel")]
    blocks = {name: given for name, given in signature.items() if given == "constexpr"}
    own = {
        "signature": repr({"table": "*i64", "xnumel": "i32", **blocks}),
        "configs": repr([{(place,): [["tt.divisibility", 16]] for place in range(2)}]),
    }
    for entry, text in own.items():
        meta.values[entries[entry]] = ast.parse(text, mode="eval").body
    return kind, names.index("xnumel"), ast.unparse(tree)


def _before_first_use(loads: Mapping[str, str], body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a kernel, and before the first that names an argument what loads it: until then it takes no register."""
    waiting = dict(loads)
    for statement in body:
        used = {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}
        for name in [name for name in waiting if name in used]:
            yield from ast.parse(waiting.pop(name)).body
        yield statement


class ManyTensors:
    """The function of a module of :func:`with_table`: for the arguments of one tensor, and for those of many in one launch."""

    def __init__(self, module: ModuleType, kind: str, place: int, kernel: str) -> None:
        self._call: Callable[[list[Tensor]], Sequence[Tensor]] = module.call
        self._span, self._place, self._kernel = SPANS[kind], place, getattr(module, kernel)
        # What the module's function launches comes here: it knows the arguments' order, the device and the stream.
        setattr(module, kernel, self)
        self._layouts: dict[tuple[torch.Size, ...], list[tuple[int, int]]] = {}
        self._tables: dict[tuple[object, ...], Tensor] = {}
        self._launch: Callable[..., None] = self._kernel.run
        self._lock = threading.Lock()
        if len(getattr(self._kernel, "configs", None) or [None]) > 1:
            raise RuntimeError(
                f"{kernel} has several sizes of blocks, which would be tried on the tensors that it is given"
            )

    def __call__(self, arguments: list[Tensor]) -> list[Tensor]:
        """Run for one tensor, as a function of :func:`narrowgauge._torch.inductor.load_ahead`."""
        return on_aligned(lambda given: self.launch([given]))(arguments)

    def each(self, batch: Iterable[list[Tensor]]) -> None:
        """Run for many tensors, each with its own arguments: in one launch, but for those that are not aligned."""
        together = []
        for arguments in batch:
            if all(map(is_aligned, arguments)):
                together.append(arguments)
            else:
                self(arguments)
        if together:
            self.launch(together)

    def launch(self, batch: Sequence[list[Tensor]]) -> list[Tensor]:
        """One launch for aligned arguments; returns the results for the first."""
        with self._lock:
            results: list[Tensor] = []
            # An int32 counts the elements of a launch; an even number of rows begins at a multiple of 16 bytes.
            for part in self._table(batch).split(((1 << 31) - 1) // self._span // 2 * 2):

                def launch(*_: Any, stream: object, part: Tensor = part) -> None:
                    self._kernel.run(part, len(part) * self._span, stream=stream)

                self._launch = launch
                results = list(self._call(list(batch[0])))
            return results

    def _table(self, batch: Sequence[list[Tensor]]) -> Tensor:
        """The table of some tensors, made or kept for this stream, to which its memory belongs once it is dropped."""
        rows, device = tuple(map(self._row, batch)), batch[0][0].device
        key = rows, stream_id(device)
        table = self._tables.pop(key, None)
        if table is None:
            table = to_device(table_of(rows, self._place, self._span), device)
            if len(self._tables) >= MOST_TABLES:
                del self._tables[next(iter(self._tables))]  # used least recently
        self._tables[key] = table
        return table

    def run(self, *arguments: Any, stream: object) -> None:
        """What the module's function calls in place of its kernel."""
        self._launch(*arguments, stream=stream)

    def _row(self, arguments: list[Tensor]) -> tuple[int, ...]:
        """The arguments of the kernel: addresses and lengths."""
        shapes = tuple(argument.shape for argument in arguments)
        if shapes not in self._layouts:
            self._layouts[shapes] = self._layout(arguments)
        return tuple(n if place < 0 else arguments[place].data_ptr() for place, n in self._layouts[shapes])

    def _layout(self, arguments: list[Tensor]) -> list[tuple[int, int]]:
        """For each argument of the kernel the place of a tensor among ``arguments``, or -1 and a length."""
        apart = [argument.detach() for argument in arguments]  # a tensor that is given twice has two places
        places = {id(argument): place for place, argument in enumerate(apart)}
        found: list[tuple[int, int]] = []

        def note(*given: Any, stream: object) -> None:
            if any(isinstance(each, Tensor) and id(each) not in places for each in given):
                raise RuntimeError("the kernel takes a tensor that is none of its function's arguments")
            found.extend((places[id(each)], 0) if isinstance(each, Tensor) else (-1, int(each)) for each in given)

        self._launch = note
        self._call(list(apart))
        return found


def function_of(module: ModuleType, text: str) -> Loaded:
    """The function of a loaded module: a :class:`ManyTensors` where the kernel in its ``text`` takes a table."""
    marked, call = _MARK.match(text), module.call
    if marked is None:
        return on_aligned(lambda arguments: list(call(arguments)))
    return ManyTensors(module, marked[1], int(marked[2]), marked[3])


def table_of(rows: Sequence[Sequence[int]], place: int, span: int) -> Tensor:
    """What a kernel with a table reads: int64 ``[spans, arguments + 1]``.

    Each row of ``rows``, whose number at ``place`` counts a tensor's elements, stands there once for each ``span`` of them,
    followed by the first element.

    Example:
        >>> table_of([(7, 100), (8, 5)], 1, 64).tolist()
        [[7, 100, 0], [7, 100, 64], [8, 5, 0]]
    """
    given = torch.tensor(rows, dtype=torch.int64, device="cpu")
    spans = -(given[:, place] // -span)
    before = (spans.cumsum(0) - spans).repeat_interleave(spans)
    starts = (torch.arange(len(before), dtype=torch.int64, device="cpu") - before) * span
    return torch.cat([given.repeat_interleave(spans, 0), starts[:, None]], 1)
