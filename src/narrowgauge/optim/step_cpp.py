"""The step of all tensors on a CPU: what of ``step.h`` a (rule, storage) needs, and its functions.

``step.h`` has a struct for each code, weight and rule. A storage is a line that names them and says
where their fields lie, as :mod:`narrowgauge.optim.planes` does.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from pathlib import Path
from typing import Any

from narrowgauge.optim import codes
from narrowgauge.optim.planes import planes_of
from narrowgauge.optim.rules import elementwise
from narrowgauge.optim.rules.matrix import AnyRule, MatrixRule
from narrowgauge.spec.storages import VISIBLE, Code, Storage
from narrowgauge.torch_support.cpp import build

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
    if isinstance(rule, MatrixRule):
        if rule.average is not None:
            return "Muon" if rule.name == "muon" else ""
        return f"Given<{str(bool(rule.decay)).lower()}>"
    return RULES.get(rule, "")


def has_kernel(rule: AnyRule, storage: Storage) -> bool:
    """Return whether a kernel is written for a (rule, storage): not for a rule of the user's own,
    and not in float64.
    """
    return storage.arithmetic != "float64" and bool(struct_of(rule))


def num_addresses(rule: AnyRule, storage: Storage) -> int:
    """Return the number of addresses in a row of the table: of the weight, the gradient, the
    planes, a matrix rule's change, and the bounds of rows.
    """
    is_matrix = isinstance(rule, MatrixRule)
    return 2 + len(planes_of(storage)) + is_matrix + len(storage.scaled)


def record_size(rule: AnyRule, storage: Storage) -> int:
    """Return the floats of the record of a row that ranks share: its largest magnitudes and its
    bounds.
    """
    return (2 if getattr(rule, "coupled", False) else 1) + len(storage.scaled)


def _code(code: Code) -> str:
    if not code.is_window:
        return f"Upper<{code.mantissa_bits}>"
    kinds = []
    if code.signed:
        kinds.append("SIGNED")
    if code.hold:
        kinds.append("HELD")
    if code.scaled:
        kinds.append("ROW")
    if code.rounding == "stochastic":
        kinds.append("CHANCE")
    size = f"{code.exponent_bits}, {code.mantissa_bits}, {code.lowest}"
    return f"Window<{size}, {' | '.join(kinds)}>"


def _weight(storage: Storage) -> str:
    visible = FORMATS[storage.visible]
    is_random = storage.weight.rounding == "stochastic"
    if storage.master:
        return f"Master<{visible}>"
    if storage.weight.parts == 2:
        return f"Compensated<{visible}, {_code(storage.weight.part(1))}>"
    if storage.tail_bits:
        dropped = codes.dropped_bits(storage.weight)
        return f"Tail<{visible}, {storage.tail_bits}, {dropped}>"
    return f"Alone<{visible}, {VISIBLE[storage.visible][1] if is_random else 0}>"


def storage_text(storage: Storage) -> str:
    """Return the struct of a storage: its weight, its codes, and the places of its fields."""
    fields = {}
    sizes = []
    for number, plane in enumerate(planes_of(storage)):
        sizes.append(str(plane.bits // 8))
        for name, shift, _ in plane.fields:
            fields[name] = f"{{{number}, {32 - plane.bits + shift}}}"
    states = [name for name, _ in storage.states]
    state_codes = [_code(storage.code(name).part(0)) for name in states]
    state_codes += ["Nothing"] * (2 - len(states))
    places = []
    for name in ((*storage.beside, "")[0], *(*states, "", "")[:2]):
        places.append(fields.get(name, "{}"))
    lines = [
        "namespace {  // libraries of one process share the names of other structs",
        f"struct Row : Storage<{FORMATS[storage.visible]}, {_weight(storage)},",
        f"                     {', '.join(state_codes)}> {{",
    ]
    low = f"{states[1]}_low" if len(states) == 2 else ""
    if low in fields:
        lines.append(f"  typedef {_code(storage.code(states[1]).part(1))} SecondLow;")
        places.append(fields[low])
    elif storage.arithmetic == "expansion":
        lines.append("  typedef Nothing SecondLow;")
    shares = []
    for name in ("weight", *states):
        start, borrowed = codes.shares(storage).get(name, (0, 0))
        dropped = codes.dropped_bits(storage.code(name)) if name in codes.shares(storage) else 0
        shares.append(f"{{{start}, {borrowed}, {dropped}}}")
    layout = f"{len(sizes)}, {{{', '.join(sizes)}}}, {', '.join(places)}"
    lines += [
        f"  static constexpr Layout LAYOUT{{{layout}}};",
        f"  static constexpr Shares SHARES{{{', '.join(shares)}}};",
        f"}};  // {storage.name}",
        "}",
    ]
    return "\n".join(lines)


def library_text(rule: AnyRule, storage: Storage) -> str:
    """Return what is appended to ``step.h``."""
    kind = "InExpansions" if storage.arithmetic == "expansion" else "InFloats"
    struct = struct_of(rule)
    functions = {"step": "run<false>"}
    if storage.scaled:
        functions["find_peaks"] = "find_peaks"
    if isinstance(rule, MatrixRule):
        functions["average"] = "run<true>"
    lines = [storage_text(storage), f"typedef {kind}<Row, {struct}> Step;"]
    for name, function in functions.items():
        lines.append(f"EXPORT({name}, Step, {struct}, {function})")
    return "\n".join(lines) + "\n"


@lru_cache(None)
def functions(rule: AnyRule, storage: Storage) -> dict[str, Any]:
    """Return ``step``, ``find_peaks`` of rows with scales, and ``average`` of a matrix rule.

    Build them, unless this machine has done so before.
    """
    library = build(STEP_H.read_text() + library_text(rule, storage))
    pointer = ctypes.c_void_p
    result = {}
    for name in ("step", "find_peaks", "average"):
        function = getattr(library, name, None)
        if function is not None:
            function.argtypes = [pointer, pointer, ctypes.c_int64, *[pointer] * 3, ctypes.c_int32]
            function.restype = None
            result[name] = function
    return result
