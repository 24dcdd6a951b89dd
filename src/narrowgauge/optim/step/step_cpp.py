"""The step of all tensors on a CPU: the C++ of a (rule, storage), and its functions.

The files of ``optim/step/cpp`` have a struct for each code, weight and rule. A storage is a struct that
names them, with the places of their fields (:func:`row_of`).
"""

import ctypes
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path

from narrowgauge.optim.rules import elementwise
from narrowgauge.optim.rules.matrix import GALORE, MUON, AnyRule, MatrixRule
from narrowgauge.optim.step.bit_layout import Field, fields_of, planes_of, roles
from narrowgauge.spec.storages import VISIBLE, Storage
from narrowgauge.torch_support.cpp import build
from narrowgauge.torch_support.proof import CPP

TILE = 8192
"""Elements that a program steps: 16 to 32 KB of each stream."""
FOLDER = Path(__file__).with_name("cpp")
FILES = ("vectors.h", "codes.h", "rules.h", "walk.h", "norm.h")
"""The files of the folder, in the order in which they are joined."""
FORMATS = {"float32": "Float32", "bfloat16": "BFloat16", "float16": "Float16"}
RULES = {
    elementwise.ADAMW: "AdamW",
    elementwise.ADAM: "Adam",
    elementwise.SGD: "SGD",
    elementwise.PLAIN_SGD: "PlainSGD",
    elementwise.LION: "Lion",
    MUON: "Muon",
    GALORE: "Given",
}
"""The struct of each rule. Another elementwise rule runs by its definition."""


def has_kernel(rule: AnyRule, storage: Storage, language: str = CPP) -> bool:
    """Return whether a kernel is written for a (rule, storage): not for a rule of the user's own,
    not in float64, and on a GPU not for float16 weights and second parts of weights.
    """
    if language != CPP and (storage.visible == "float16" or storage.weight.parts == 2):
        return False
    return storage.arithmetic != "float64" and rule in RULES


@dataclass(frozen=True)
class KernelRow:
    """Hold the constants of a (rule, storage) in both languages.

    Attributes:
        rule: the name of its struct in ``rules.h``.
        scalars: how many the rule has.
        is_given: whether the change is a stream, of a matrix rule.
        addresses: in a row of the table: of the weight, the gradient, the planes, a matrix rule's
            change, and the bounds of blocks.
        bytes: of the weight and of each plane.
        below: the bits of a float32 that a visible format in fewer bits lacks.
        fields: of what lies beside the weight, of two states, and of the second part of the last.
        num_scaled: states with a scale for each block.
    """

    rule: str
    scalars: int
    is_given: bool
    addresses: int
    bytes: tuple[int, ...]
    below: int
    fields: tuple[Field, ...]
    num_scaled: int


@lru_cache
def row_of(rule: AnyRule, storage: Storage) -> KernelRow:
    """Return the constants of a (rule, storage) that has a kernel: its rule has two states at most."""
    size = VISIBLE[storage.visible][0]
    sizes = [size // 8] + [plane.dtype.itemsize for plane in planes_of(storage)]
    fields = [fields_of(storage)[name] for name in roles(storage)]
    fields += [Field()] * (3 - len(fields))
    fields.append(fields_of(storage).get("exp_avg_sq_low", Field()))
    is_given = isinstance(rule, MatrixRule)
    return KernelRow(
        rule=RULES[rule],
        scalars=len(rule.scalars),
        is_given=is_given,
        addresses=1 + len(sizes) + is_given + len(storage.scaled),
        bytes=tuple(sizes),
        below=32 - size,
        fields=tuple(fields),
        num_scaled=len(storage.scaled),
    )


# ── the text of a library ─────────────────────────────────────────────────────────────────────────


def _code(field: Field, bit: int) -> str:
    code = field.code
    if not field.name:
        return "Nothing"
    if not code.is_window:
        return f"Upper<{code.mantissa_bits}>"
    kinds = ["0"]
    for name, is_set in (("SIGNED", code.signed), ("HELD", code.hold), ("SCALED", code.scaled)):
        if is_set:
            kinds.append(name)
    size = f"{code.exponent_bits}, {code.mantissa_bits}, {code.lowest}"
    return f"Window<{size}, {' | '.join(kinds)}, {bit}, {_random_slice(field)}>"


def _random_slice(field: Field) -> str:
    if field.random_slice is None:
        return "RandomSlice{}"
    start, borrowed = field.random_slice
    return f"RandomSlice{{{start}, {borrowed}}}"


def _weight(storage: Storage, visible: str, field: Field, bit: int) -> str:
    if field.name == "master":
        return f"Master<{visible}>"
    if field.name == "weight_low":
        struct = "CollagePair" if storage.arithmetic == "expansion" else "Compensated"
        return f"{struct}<{visible}, {_code(field, bit)}>"
    if field.name == "tail":
        return f"Tail<{visible}, {field.bits}, {field.drop}, {bit}, {_random_slice(field)}>"
    return f"VisibleOnly<{visible}, {_random_slice(field)}>"


def library_text(rule: AnyRule, storage: Storage) -> str:
    """Return what is appended to the files: the struct of a storage, with its format, weight and
    codes, and the planes of their fields.
    """
    row = row_of(rule, storage)
    visible = FORMATS[storage.visible]
    weight, first, second, rest = row.fields
    bits = [32 - 8 * row.bytes[field.plane] + field.shift for field in row.fields]
    planes = ", ".join(str(field.plane - 1) for field in row.fields)
    sizes = ", ".join(map(str, row.bytes[1:]))
    struct = row.rule
    if storage.arithmetic == "expansion":
        struct = f"Collage<{visible}::BELOW, {str(bool(rest.name)).lower()}>"
    return f"""namespace {{  // libraries of one process share the names of other structs
struct Row {{
  typedef {visible} V;
  typedef {_weight(storage, visible, weight, bits[0])} W;
  typedef {_code(first, bits[1])} First;
  typedef {_code(second, bits[2])} Second;
  typedef {_code(rest, bits[3])} Rest;
  static constexpr Layout LAYOUT{{{len(row.bytes) - 1}, {{{sizes}}}, {planes}}};
}};  // {storage.name}
}}
EXPORT_STEP(Row, {struct})
"""


def joined_files() -> str:
    """Return the text that all libraries begin with."""
    return "".join([(FOLDER / name).read_text(encoding="utf-8") for name in FILES])


# ── its functions ─────────────────────────────────────────────────────────────────────────────────

TYPES = {"p": ctypes.c_void_p, "l": ctypes.c_int64, "i": ctypes.c_int32}


def _library(text: str, **signatures: str) -> ctypes.CDLL:
    """Return a library of the files and a text. Its functions take the table and the programs, and
    then the arguments of a signature.
    """
    library = build(joined_files() + text)
    for name, signature in signatures.items():
        getattr(library, name).argtypes = [TYPES[letter] for letter in f"ppl{signature}i"]
    return library


@cache
def functions(rule: AnyRule, storage: Storage) -> ctypes.CDLL:
    """Return a library with ``step``, ``gather`` and ``follow`` of an audit, and ``add`` of counts."""
    text = library_text(rule, storage)
    return _library(text, step="pp", gather="pp", follow="ppppp", add="")


@cache
def norm_functions() -> ctypes.CDLL:
    """Return a library with ``squares``."""
    return _library("EXPORT_NORM\n", squares="pl")
