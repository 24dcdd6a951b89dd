"""Print a traced function of pointwise operations as lines of Triton.

Inductor compiles our definitions for CPUs. For GPUs we print them ourselves, so that one launch reads all tensors through a table
of pointers (:mod:`narrowgauge.optim.multi_tensor`). A trace runs on the meta device, where definitions take the branches of a
GPU. Every printed operation rounds as on a CPU: ``div_rn``, ``sqrt_rn``, and no fused multiply-add. Triton's interpreter runs
the same lines on a CPU.
"""

from __future__ import annotations

import itertools
import linecache
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from narrowgauge.compile import usual_defaults

LAUNCH = {"enable_fp_fusion": False}
"""Options of every launch: a fused multiply-add would not round the product."""
TYPES = {
    torch.int32: "tl.int32",
    torch.int64: "tl.int64",
    torch.float32: "tl.float32",
    torch.float64: "tl.float64",
    torch.bool: "tl.int1",
}
_OPERATIONS = {
    "add": "{0} + {1}", "sub": "{0} - {1}", "rsub": "{1} - {0}", "mul": "{0} * {1}", "neg": "-{0}",
    "div": "tl.div_rn({0}, {1})", "reciprocal": "tl.div_rn(1.0, {0})", "sqrt": "tl.sqrt_rn({0})", "abs": "tl.abs({0})",
    "sign": "tl.where({0} > 0, 1.0, tl.where({0} < 0, -1.0, 0.0))",
    "bitwise_and": "{0} & {1}", "bitwise_or": "{0} | {1}", "bitwise_xor": "{0} ^ {1}",
    "__lshift__": "{0} << {1}", "__rshift__": "{0} >> {1}",
    "eq": "{0} == {1}", "ne": "{0} != {1}", "lt": "{0} < {1}", "le": "{0} <= {1}", "gt": "{0} > {1}", "ge": "{0} >= {1}",
    "isnan": "{0} != {0}", "logical_not": "{0} == 0", "where": "tl.where({0}, {1}, {2})",
    "masked_fill": "tl.where({1}, {2}, {0})",
    # To even: below 2^52 a float64 has bits below 1, which the sum rounds off.
    "round": "tl.where(tl.abs({0}) >= 2.0**52, {0}, tl.where({0} < 0, {0} - 2.0**52 + 2.0**52, {0} + 2.0**52 - 2.0**52))",
    "view": "{0}.to({type}, bitcast=True)", "_to_copy": "{0}.to({type})",
    # PyTorch returns NaN if either is NaN.
    "maximum": "tl.maximum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)",
    "minimum": "tl.minimum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)",
}  # fmt: skip
"""The text of each operation of PyTorch, from its arguments and the ``type`` of its result."""
LARGEST, TOTAL = "tl.standard._elementwise_max", "tl.standard._sum_combine"
"""Arguments of ``tl.reduce``. The interpreter cannot call ``tl.max`` and ``tl.sum``, which are compiled functions."""
INTERPRET = False
"""Run kernels on CPU tensors, in Triton's interpreter. Tests set it."""
_CONSTANTS = {"ones_like": 1, "zeros_like": 0}
_UNCHANGED = ("detach", "alias", "clone", "expand", "scalar_tensor")
_numbers = itertools.count()


def trace(
    function: Callable[..., Any], *arguments: tuple[torch.dtype, Sequence[int]]
) -> torch.fx.Graph:
    """Return the graph of a function of tensors, given as ``(dtype, shape)``."""
    from torch.fx.experimental.proxy_tensor import make_fx

    return make_fx(function)(
        *(torch.empty(shape, dtype=dtype, device="meta") for dtype, shape in arguments)
    ).graph


def print_graph(
    graph: torch.fx.Graph, inputs: Sequence[str], prefix: str
) -> tuple[list[str], list[str], list[tuple[str, str]]]:
    """Print a graph as lines of Triton.

    Args:
        graph: from :func:`trace`.
        inputs: the names of the arguments. Element ``k`` of an argument ``v`` is named ``v_k``.
        prefix: begins the names that the lines assign.
    Returns:
        The lines, the names of the results, and ``(argument, value)`` for each argument that the function overwrites.
    Raises:
        NotImplementedError: an operation has no text.
    """
    lines: list[str] = []
    writes: list[tuple[str, str]] = []
    names: dict[Any, str] = dict(
        zip((n for n in graph.nodes if n.op == "placeholder"), inputs, strict=True)
    )

    def name(line: str) -> str:
        lines.append(f"{prefix}{len(lines)} = {line}")
        return f"{prefix}{len(lines) - 1}"

    for node in graph.nodes:
        if node.op != "call_function":
            continue
        operation, dtype = node.target.overloadpacket.__name__, node.meta["val"].dtype
        tensors = [a for a in node.args if isinstance(a, torch.fx.Node)]
        # Comparisons take numbers of their operands' dtype.
        scalar = tensors[0].meta["val"].dtype if dtype is torch.bool and tensors else dtype
        arguments = [
            a for a in node.args if a is None or isinstance(a, torch.fx.Node | int | float)
        ]
        texts = [names[a] if a in names else literal(a, scalar) for a in arguments]
        if operation in _UNCHANGED:
            names[node] = texts[0]
        elif operation == "select":
            names[node] = f"{texts[0]}_{node.args[2]}"
        elif operation == "copy_":
            writes.append((texts[0], texts[1]))
        elif operation in _CONSTANTS:
            names[node] = literal(_CONSTANTS[operation], dtype)
        elif operation == "clamp":
            low, high = (*texts[1:], literal(node.kwargs.get("max"), dtype))[:2]
            names[node] = texts[0]
            for limit, form in ((low, "maximum"), (high, "minimum")):
                if limit != "None":
                    names[node] = name(_OPERATIONS[form].format(names[node], limit))
        elif operation in _OPERATIONS:
            names[node] = name(_OPERATIONS[operation].format(*texts, type=TYPES[dtype]))
        elif operation != "new_zeros":  # the result of a step without an audit
            raise NotImplementedError(f"no text in Triton for {node.target}")
    output = next(node for node in graph.nodes if node.op == "output")
    results = torch.utils._pytree.tree_leaves(output.args)
    return lines, [names[result] for result in results if result in names], writes


def literal(value: Any, dtype: torch.dtype) -> str:
    """Return a number as an argument of an operation in a dtype. An int32 has a sign."""
    if dtype is torch.int32 and value is not None:
        return str((int(value) + (1 << 31)) % (1 << 32) - (1 << 31))
    if value is None or not dtype.is_floating_point:
        return str(value)
    return repr(float(value)) if math.isfinite(value) else f"float('{float(value)}')"


def launches_on(device: torch.device) -> bool:
    """Return whether printed kernels run on a device."""
    return device.type == "cuda" or INTERPRET


def proves(name: str, compare: Callable[[], bool]) -> bool:
    """Return whether a printed kernel has the bits of its definition. If not, warn that each tensor takes its own launches."""
    try:
        with usual_defaults():
            if compare():
                return True
        reason = f"Triton compiles {name} to code that gives other bits."
    except torch.OutOfMemoryError:
        raise  # another call may have the memory
    except Exception as error:  # a broken compiler must not stop a training run
        reason = f"Cannot compile {name} ({type(error).__name__}: {(str(error).splitlines() or [''])[0][:160]})."
    warnings.warn(
        f"{reason} Each tensor takes launches of its own: slower, with the same bits.", stacklevel=4
    )
    return False


def load(source: str, *, interpret: bool = False) -> dict[str, Any]:
    """Return the names that a text defines. Its ``@triton.jit`` functions are compiled at their first launch, or interpreted."""
    import triton

    file = f"<narrowgauge kernel {next(_numbers)}>"  # Triton reads the text of a function there
    linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file
    names: dict[str, Any] = {"triton": triton, "tl": triton.language, "__name__": __name__}
    with triton.knobs.runtime.scope():
        triton.knobs.runtime.interpret = interpret
        exec(compile(source, file, "exec"), names)
    return names
