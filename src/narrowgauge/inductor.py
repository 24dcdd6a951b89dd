"""Change the CPU code of PyTorch's compiler. Names that PyTorch does not promise to keep:

``torch._inductor.codegen.cpp.CppVecOverrides``, ``CppVecKernel._get_vec_load_line``, ``torch._inductor.virtualized.V``
    Inductor's code for an operation on vectors. Instead: its default code, a third slower.
``torch._dynamo.config.skip_nnmodule_hook_guards``, ``torch._dynamo.config.recompile_limit``
    By default, code compiled before a hook was attached ignores the hook. It is compiled eight times at most. Instead: attach
    before compiling, and call ``torch.compiler.reset`` between models.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

PREFETCHED = 128
"""Distance of the prefetch, in elements. The hardware's own prefetch leaves a loop of many streams waiting."""


@contextlib.contextmanager
def few_instructions() -> Iterator[None]:
    """Make Inductor write some operations on whole vectors of 32-bit values in fewer instructions, with the same bits.

    ========================  =====================================================================================
    a shift by a constant     by default by a vector of counts that is built in each iteration
    where(x != x, a, b)       by default a mask is widened to a vector and converted first: 4 instructions, now 2
    a load                    prefetches later loads; otherwise memory's latency is added
    ========================  =====================================================================================
    """
    try:
        from torch._inductor.codegen.cpp import CppVecKernel, CppVecOverrides
    except ImportError:
        yield
        return
    replaced: dict[str, Callable[..., str]] = {
        "bitwise_left_shift": _shift_left,
        "bitwise_right_shift": _shift_right,
        "where": _where_nan,
    }
    before = {name: method for name, method in vars(CppVecOverrides).items() if name in replaced}
    load = vars(CppVecKernel).get("_get_vec_load_line")

    def either(name: str) -> staticmethod[..., Any]:
        def write(*arguments: Any) -> Any:
            return replaced[name](*arguments) or before[name].__func__(*arguments)

        write.__name__ = name
        return staticmethod(write)

    def load_ahead(
        self: Any, name: str, index: Any, dtype: torch.dtype, load_mask: Any = None
    ) -> str:
        assert load is not None
        text: str = load(self, name, index, dtype, load_mask)
        if index == 0 or load_mask:
            return text
        from torch._inductor.codegen.cpp_utils import cexpr_index

        return f"(__builtin_prefetch({name} + {cexpr_index(index)} + {PREFETCHED}), {text})"

    for name in before:
        setattr(CppVecOverrides, name, either(name))
    if load is not None:
        CppVecKernel._get_vec_load_line = load_ahead  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        for name, method in before.items():
            setattr(CppVecOverrides, name, method)
        if load is not None:
            CppVecKernel._get_vec_load_line = load  # type: ignore[method-assign]


def _shift_left(a: Any, b: Any) -> str:
    return _shift("slli", a, _constant(_operands()[1]))


def _shift_right(a: Any, b: Any) -> str:
    return _shift("srai", a, _constant(_operands()[1]))


def _where_nan(condition: Any, nan: Any, rest: Any) -> str:
    from torch._inductor.virtualized import V

    test = V.interpreter.current_node.args[1]
    if getattr(test, "target", "") != "ne" or str(_value(test.args[1])) != str(
        _value(test.args[2])
    ):
        return ""
    x, kind = _value(test.args[1]), _intrinsic("")
    if x.dtype is not torch.float32 or rest.dtype is not torch.int32 or not kind:
        return ""
    value = f"at::vec::Vectorized<int32_t>({nan})"
    if kind == "_mm512_":
        chosen = (
            f"_mm512_mask_mov_epi32({rest}, _mm512_cmp_ps_mask({x}, {x}, _CMP_UNORD_Q), {value})"
        )
    else:
        floats = [f"_mm256_castsi256_ps({bits})" for bits in (rest, value)]
        chosen = f"_mm256_castps_si256(_mm256_blendv_ps({', '.join(floats)}, _mm256_cmp_ps({x}, {x}, _CMP_UNORD_Q)))"
    return f"at::vec::Vectorized<int32_t>({chosen})"


def _shift(name: str, x: Any, count: int | None) -> str:
    intrinsic = _intrinsic(f"{name}_epi32")
    fits = x.dtype is torch.int32 and count is not None and 0 <= count < 32
    return f"at::vec::Vectorized<int32_t>({intrinsic}({x}, {count}))" if intrinsic and fits else ""


def _intrinsic(name: str) -> str:
    """Return an instruction on whole vectors of 32-bit values. It is empty if the current loop has none."""
    from torch._inductor.virtualized import V

    prefix = {256: "_mm256_", 512: "_mm512_"}.get(V.kernel.vec_isa.bit_width(), "")
    is_one_register = V.kernel.tiling_factor * 32 == V.kernel.vec_isa.bit_width()
    return prefix + name if prefix and is_one_register else ""


def _operands() -> tuple[Any, Any]:
    """Return the two operands of the current operation, as nodes of the loop's graph."""
    from torch._inductor.virtualized import V

    return tuple(V.interpreter.current_node.args[1:3])


def _constant(node: Any) -> int | None:
    return node.args[1] if getattr(node, "target", "") == "constant" else None


def _value(node: Any) -> Any:
    from torch._inductor.virtualized import V

    return V.interpreter.env[node]


MANY_VERSIONS = 64
"""Recompilation limit of one piece of code, which several rows or models may share."""


def heed_hooks() -> None:
    """Recompile code after a module's hooks have changed. This affects code compiled from now on.

    A watched model has two versions of each piece of code. A process may train several models of one class.
    """
    config = torch._dynamo.config
    config.skip_nnmodule_hook_guards = False
    config.recompile_limit = max(config.recompile_limit, MANY_VERSIONS)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppress the compiler's own deprecation warnings and banners. They do not concern users of an optimizer."""
    level = logging.getLogger("torch").level
    logging.getLogger("torch").setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.getLogger("torch").setLevel(level)
