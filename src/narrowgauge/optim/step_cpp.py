"""The step of all tensors on a CPU: what of ``step.h`` a (rule, storage) needs, and its functions.

``step.h`` has a struct for each code, weight and rule. A storage is a struct that names them, with
the places of their fields (:func:`narrowgauge.optim.planes.layout_of`).
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from pathlib import Path
from typing import Any

from narrowgauge.optim.planes import Field, Layout, layout_of, planes_of
from narrowgauge.optim.rules import elementwise
from narrowgauge.optim.rules.matrix import MUON, AnyRule, MatrixRule
from narrowgauge.spec.storages import Storage
from narrowgauge.torch_support.cpp import build
from narrowgauge.torch_support.proof import CPP

TILE = 8192
"""Elements that a program steps: 16 to 32 KB of each stream."""
STEP_H = Path(__file__).with_name("step.h")
FORMATS = {"float32": "Float32", "bfloat16": "BFloat16", "float16": "Float16"}
RULES: dict[AnyRule, str] = {
    elementwise.ADAMW: "AdamW",
    elementwise.ADAM: "Adam",
    elementwise.SGD: "SGD",
    elementwise.PLAIN_SGD: "PlainSGD",
    elementwise.LION: "Lion",
}
"""The struct of each elementwise rule. Another rule runs by its definition."""


def struct_of(rule: AnyRule) -> str:
    """Return the struct of a rule, or an empty string."""
    if isinstance(rule, MatrixRule) and rule.average is None:
        return f"Given<{str(bool(rule.decay)).lower()}>"
    if rule == MUON:
        return "Muon"
    return RULES.get(rule, "")


def has_kernel(rule: AnyRule, storage: Storage, language: str = CPP) -> bool:
    """Return whether a kernel is written for a (rule, storage): not for a rule of the user's own,
    not in float64, and for Collage in C++ alone.
    """
    if storage.arithmetic == "expansion" and language != CPP:
        return False
    return storage.arithmetic != "float64" and bool(struct_of(rule))


def num_addresses(rule: AnyRule, storage: Storage) -> int:
    """Return the number of addresses in a row of the table: of the weight, the gradient, the
    planes, a matrix rule's change, and the bounds of rows.
    """
    is_matrix = isinstance(rule, MatrixRule)
    return 2 + len(planes_of(storage)) + is_matrix + len(storage.scaled)


# ── what is appended to step.h ────────────────────────────────────────────────────────────────────


def _code(field: Field, bit: int) -> str:
    code = field.code
    if not field.name:
        return "Nothing"
    if not code.is_window:
        return f"Upper<{code.mantissa_bits}>"
    kinds = ["0"]
    for name, is_set in (("SIGNED", code.signed), ("HELD", code.hold), ("ROW", code.scaled)):
        if is_set:
            kinds.append(name)
    size = f"{code.exponent_bits}, {code.mantissa_bits}, {code.lowest}"
    return f"Window<{size}, {' | '.join(kinds)}, {bit}, {_share(field)}>"


def _share(field: Field) -> str:
    if field.share is None:
        return "Share{}"
    start, borrowed = field.share
    return f"Share{{{start}, {borrowed}}}"


def _weight(visible: str, field: Field, bit: int) -> str:
    if field.name == "master":
        return f"Master<{visible}>"
    if field.name == "weight_low":
        return f"Compensated<{visible}, {_code(field, bit)}>"
    if field.name == "tail":
        return f"Tail<{visible}, {field.bits}, {field.drop}, {bit}, {_share(field)}>"
    return f"Alone<{visible}, {_share(field)}>"


def storage_text(storage: Storage) -> str:
    """Return the struct of a storage: its format, weight and codes, and the planes of its fields."""
    layout: Layout = layout_of(storage)
    visible = FORMATS[storage.visible]
    bits = [32 - 8 * layout.bytes[field.plane] + field.shift for field in layout.fields]
    weight, *states = zip(layout.fields, bits, strict=True)
    types = {"V": visible, "W": _weight(visible, *weight)}
    for name, state in zip(("First", "Second", "SecondLow"), states, strict=True):
        types[name] = _code(*state)
    lines = [
        "namespace {  // libraries of one process share the names of other structs",
        "struct Row {",
    ]
    lines += [f"  typedef {text} {name};" for name, text in types.items()]
    planes = ", ".join(str(field.plane - 1) for field in layout.fields)
    sizes = ", ".join(map(str, layout.bytes[1:]))
    lines.append(
        f"  static constexpr Layout LAYOUT{{{len(layout.bytes) - 1}, {{{sizes}}}, {planes}}};"
    )
    lines.append(f"}};  // {storage.name}\n}}")
    return "\n".join(lines)


def library_text(rule: AnyRule, storage: Storage) -> str:
    """Return what is appended to ``step.h``."""
    kind = "InFloats"
    if storage.arithmetic == "expansion":
        kind = "InExpansions"
    struct = struct_of(rule)
    return f"{storage_text(storage)}\ntypedef {kind}<Row, {struct}> Step;\nEXPORT_STEP(Step, {struct})\n"


@lru_cache(None)
def functions(rule: AnyRule, storage: Storage) -> ctypes.CDLL:
    """Return a library with ``step``. Build it, unless this machine has done so before."""
    library = build(STEP_H.read_text() + library_text(rule, storage))
    pointer = ctypes.c_void_p
    programs: list[Any] = [pointer, pointer, ctypes.c_int64]
    library.step.argtypes = [*programs, pointer, pointer, pointer, ctypes.c_int32]
    return library


@lru_cache(None)
def norm_functions() -> ctypes.CDLL:
    """Return a library with ``largest`` and ``squares``."""
    library = build(f"{STEP_H.read_text()}EXPORT_NORM\n")
    pointer = ctypes.c_void_p
    programs: list[Any] = [pointer, pointer, ctypes.c_int64]
    library.largest.argtypes = [*programs, pointer, ctypes.c_int32]
    library.squares.argtypes = [*programs, pointer, pointer, ctypes.c_int64, ctypes.c_int32]
    return library
