"""Computes: how the operands of a linear layer's three matmuls are cast, and how products are
accumulated.

A linear layer multiplies three times: ``output`` = x · wᵀ, ``grad_input`` = dy · w, ``grad_weight``
= dyᵀ · x. Each is a :class:`Product` of two operands. Each operand has a :class:`Cast`: its format,
granularity (which values share a scale) and rounding. A :class:`Slot` says which tensor an
operand is, and which of its dimensions the matmul contracts. Kernels, profiler, tests,
documentation and ``narrowgauge show`` read the same table, ``data/computes.toml``. A new compute is a
new row there.

An operand is a matrix ``[rows, contraction]``. So ``row`` is one scale per dot product, ``1x32``
one per 32 terms of it, and ``column`` one per term. A scale per term cannot be factored out: it
multiplies the *other* operand before that operand's cast.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace
from functools import cache, cached_property

from narrowgauge.errors import RecipeError
from narrowgauge.spec.formats import Format, bytes_per_number, get_format
from narrowgauge.spec.require import require_choice, require_number
from narrowgauge.spec.toml import load_data

Granularity = str
"""``"none"``, ``"tensor"``, ``"row"``, ``"column"``, or a block ``"rows x terms"`` such as
``"1x32"``.
"""
_ACCUMULATIONS = ("float32", "promoted", "fast", "int32")

_WORDS = {
    "scale": ("float32", "float8_e8m0fnu", "float8_e4m3fn"),
    "rounding": ("nearest", "stochastic"),
    "scale_rounding": ("up", "floor"),
    "rotation": ("none", "hadamard"),
}
_TURNED = {"none": "none", "tensor": "tensor", "row": "column", "column": "row"}


@cache
def block_of(granularity: Granularity) -> tuple[int, int] | None:
    """Return the rows and terms of the blocks that share a scale; ``None`` without blocks.

    Both are powers of two.

    Example:
        >>> block_of("1x256"), block_of("row")
        ((1, 256), None)
    """
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", granularity)
    if match is None:
        return None
    rows, terms = int(match[1]), int(match[2])
    return (rows, terms) if rows.bit_count() == terms.bit_count() == 1 else None


def transposed(granularity: Granularity) -> Granularity:
    """Return the granularity of a matrix's transpose."""
    return _TURNED.get(granularity) or "x".join(reversed(granularity.split("x")))


ROTATION_SIZE = 16
"""Consecutive elements of the contraction that one Hadamard rotation mixes."""
PLACES = ("output", "grad_input", "grad_weight")


@dataclass(frozen=True)
class Cast:
    """The cast of one operand of a matmul.

    Args:
        format: of the codes.
        granularity: which values share a scale. ``"none"`` rounds values without a scale.
        scale: format of the scale. ``float32``: amax divided by the format's largest value.
            ``float8_e8m0fnu``: a power of two, see ``scale_rounding``.
            ``float8_e4m3fn``: two levels, a float32 per tensor and an e4m3 per block.
        scale_rounding: of powers of two. ``up``: the smallest at which nothing saturates.
            ``floor``: the OCP rule, the exponent of amax minus the format's largest exponent, at
            which values just below the next power saturate.
        rounding: ``nearest`` (ties to even) or ``stochastic``. Stochastic casts round scales up, so
            that nothing saturates.
        rotation: ``hadamard`` mixes blocks of 16 along the contraction, the same in both operands,
            after 16 fixed random signs.
        outliers: input columns with at least this amax, compared in float32, stay in 16 bits (0:
            none). They multiply the weights' codes, widened to 16 bits.
    Raises:
        RecipeError: words that do not go together. A law of the suite multiplies by every cast that
            this accepts.
    """

    format: str
    granularity: Granularity = "none"
    scale: str = "float32"
    rounding: str = "nearest"
    scale_rounding: str = "up"
    rotation: str = "none"
    outliers: float = 0.0

    def __post_init__(self) -> None:
        for name, words in _WORDS.items():
            require_choice(name, getattr(self, name), words)
        require_number("outliers", self.outliers)
        element = self.element
        has_blocks = self.block is not None
        is_power = self.scale == "float8_e8m0fnu"
        is_possible = (
            element.kind != "scale"
            and element.bits in (4, 8, 16, 32, 64)
            and (has_blocks or (self.granularity in _TURNED and self.scale != "float8_e4m3fn"))
            and (self.granularity != "none" or self.scale == "float32")
            and (self.scale_rounding == "up" or (is_power and not self.needs_bits))
            and not (self.outliers and has_blocks)
        )
        if self.is_wide:
            others = self.granularity, self.rounding, self.outliers
            is_possible = is_possible and others == ("none", "nearest", 0)
        if not is_possible:
            raise RecipeError(
                f"Cannot make a cast to {self} because its words do not go together.",
                "Codes of 4 or 8 bits share a scale by tensor, row, column or a block such as 1x32; "
                "two levels need blocks, outliers rows or tensors; scales that round down are powers "
                "of two of casts to nearest; 16 and more bits have no scale.",
            )

    @cached_property
    def element(self) -> Format:
        """Return the format of the codes."""
        return get_format(self.format)

    @cached_property
    def block(self) -> tuple[int, int] | None:
        """Return the shape ``(rows, contraction)`` of a block; ``None`` without block scales."""
        return block_of(self.granularity)

    @cached_property
    def is_wide(self) -> bool:
        """Return whether the operand is rounded to a format of 16 bits or more."""
        return self.element.bits >= 16

    @property
    def needs_bits(self) -> bool:
        """Return whether it needs random bits."""
        return self.rounding == "stochastic"

    @cached_property
    def values_format(self) -> str:
        """Return the format that holds ``code * block scale`` exactly, or rounded once if it is
        float32.
        """
        digits = self.element.mantissa_bits + (self.element.kind != "int")
        if self.block is not None:
            digits += {"float32": 24, "float8_e4m3fn": 4}.get(self.scale, 0)
        return "bfloat16" if digits <= 8 else "float32"

    def serves(self, other: Cast) -> bool:
        """Return whether ``other``, a cast of the transposed matrix, gives the same codes, which
        can then be reused.
        """
        if self.rotation != "none" or self.outliers:
            return False
        return replace(self, granularity=transposed(self.granularity)) == other

    def __str__(self) -> str:
        """Write the format, and every field that is not its default."""
        words = [self.format]
        for row in fields(self)[1:]:
            value = getattr(self, row.name)
            if value != row.default:
                words.append(f"{row.name.replace('_', ' ')} {value}")
        return ", ".join(words)


@dataclass(frozen=True, slots=True)
class Product:
    """One matmul: ``left [rows, contraction]`` times ``right [columns, contraction]`` transposed.

    Args:
        left, right: the casts of its operands: x and w, dy and wᵀ, dyᵀ and xᵀ.
        accumulation: ``float32``: each addition within 2^-23; ``promoted``: in the tensor core's
            register, added to float32 every 128 terms; ``fast``: in that register only; ``int32``:
            exact.
    """

    left: Cast
    right: Cast
    accumulation: str = "float32"

    def __post_init__(self) -> None:
        is_rotated = self.left.rotation != self.right.rotation
        is_column = self.left.granularity == "column"
        if is_column or is_rotated or self.accumulation not in _ACCUMULATIONS:
            raise RecipeError(
                f"Cannot multiply ({self.left}) by ({self.right}) in {self.accumulation}.",
                "Rotate both or none; scale the left operand per row, tensor or block, because a scale "
                f"per column belongs to one term of the sum; accumulate in {', '.join(_ACCUMULATIONS)}.",
            )

    @property
    def is_wide(self) -> bool:
        return self.left.is_wide and self.right.is_wide

    def __str__(self) -> str:
        return " × ".join(dict.fromkeys(map(str, (self.left, self.right))))


@dataclass(frozen=True)
class Compute:
    """The six casts of a linear layer, and the dtype of everything else.

    Args:
        name: as in a recipe.
        output, grad_input, grad_weight: the three matmuls.
        purpose: when to use it.
        source: the publication or library.
        dtype: dtype outside the casts if the model's weights are float32. Otherwise it is the
            weights' dtype.
        native: the hardware that multiplies the narrow operands. Other hardware emulates them with
            the same values.
        keep_last: the fraction of the model's blocks, at its end, whose layers stay in ``dtype``.
        transform: the method that changes the whole model first (see
            :mod:`narrowgauge.transforms`), or empty.
        default_storage: the storage of a recipe that names none.
    """

    name: str
    output: Product
    grad_input: Product
    grad_weight: Product
    purpose: str
    source: str
    dtype: str = "bfloat16"
    native: str = ""
    keep_last: float = 0.0
    transform: str = ""
    default_storage: str = "word"

    def __post_init__(self) -> None:
        require_choice("transform", self.transform, ("", "scalify"))
        require_number("keep_last", self.keep_last, below=1)
        lhs = self.output.left
        rhs = self.output.right
        for place, cast in self.casts.items():
            is_gradient = place in ("grad_input.left", "grad_weight.left")
            if (cast.outliers and place != "output.left") or (cast.needs_bits and not is_gradient):
                raise RecipeError(
                    f"Cannot cast {place} to {cast} in compute '{self.name}'.",
                    "Only the input of output has outliers, and only gradients round stochastically.",
                )
        is_shared = rhs.granularity != "column"  # several layers share the cast of their input
        if (
            self.dtype not in ("bfloat16", "float16", "float32")
            or not is_shared
            or (lhs.outliers and (rhs.granularity == "none" or rhs.block))
        ):
            raise RecipeError(
                f"Cannot make a compute '{self.name}' of dtype '{self.dtype}' with weights to {rhs}.",
                "Outside its casts it has 16 or 32 bits; scale the weights per row, tensor or block, "
                "and beside outlier columns per row or tensor.",
            )

    def __hash__(self) -> int:
        return hash(self.name)  # hashing all fields takes a tenth of a plan

    @cached_property
    def products(self) -> dict[str, Product]:
        return {place: getattr(self, place) for place in PLACES}

    @cached_property
    def casts(self) -> dict[str, Cast]:
        """Return the six casts by slot, such as ``"grad_input.left"``."""
        casts = {}
        for place, product in self.products.items():
            casts[f"{place}.left"] = product.left
            casts[f"{place}.right"] = product.right
        return casts

    @cached_property
    def cast_slots(self) -> dict[str, str]:
        """Return the slot whose cast fills each slot: the slot itself, or the slot that it reuses."""
        # A left operand is multiplied by a right one's scales per column before its cast: it
        # belongs to that product alone.
        folded = set()
        for place, product in self.products.items():
            if product.right.granularity == "column":
                folded.add(f"{place}.left")
        slots = {}
        for name, slot in SLOTS.items():
            slots[name] = name
            reused = slot.reuses
            is_free = reused and not folded & {name, reused}
            if is_free and self.casts[reused].serves(self.casts[name]):
                slots[name] = reused
        return slots

    @cached_property
    def is_wide(self) -> bool:
        return all(product.is_wide for product in self.products.values())

    @property
    def scales_loss(self) -> bool:
        """Return whether gradients need a loss scale to stay in range.

        Tensors with their own scales do not.
        """
        return not self.transform and any(cast.format == "float16" for cast in self.casts.values())

    @cached_property
    def is_stochastic(self) -> bool:
        return any(cast.needs_bits for cast in self.casts.values())

    @cached_property
    def keeps_codes(self) -> bool:
        """Return whether ``grad_weight`` reuses the input's codes of a byte, so that only these are
        saved for backward.
        """
        lhs = self.output.left
        has_codes = lhs.element.bits == 8 and lhs.block is None
        return has_codes and lhs.serves(self.grad_weight.right)

    @property
    def kept_bytes(self) -> float:
        """Return the bytes saved for backward per element of the input."""
        if self.keeps_codes:
            return 1
        format = self.output.left.format if self.is_wide else self.dtype
        return bytes_per_number(format)


def _computes() -> dict[str, Compute]:
    """Return the rows of ``data/computes.toml``."""
    rows = load_data("computes")
    casts = {name: Cast(**words) for name, words in rows["casts"].items()}
    computes = {}
    for name, row in rows["computes"].items():
        for place in PLACES:
            left, right, *accumulation = row[place]
            row[place] = Product(casts[left], casts[right], *accumulation)
        computes[name] = Compute(name, **row)
    return computes


COMPUTES = _computes()


# ── slots: the six operands ───────────────────────────────────────────────────────────────────────
#
# Each of a layer's three tensors enters two matmuls. Each matmul contracts a different dimension of
# it.


@dataclass(frozen=True, slots=True)
class Slot:
    """One operand of one matmul.

    Args:
        matmul: ``output``, ``grad_input`` or ``grad_weight``.
        tensor: the tensor to cast: ``input`` x ``[tokens, in]``, ``weight`` w ``[out, in]`` or
            ``gradient`` dy ``[tokens, out]``.
        dim: the tensor's dimension that the matmul contracts. A left operand that contracts 0 is
            transposed.
        reuses: the slot whose codes of the same tensor this slot takes if they serve it.
        random_key: distinguishes the random bits of a stochastic cast: of gradients. Stored results
            depend on it: never renumber.
    """

    matmul: str
    tensor: str
    dim: int
    reuses: str = ""
    random_key: int = 0


SLOTS = {
    "output.left": Slot("output", "input", dim=1),
    "output.right": Slot("output", "weight", dim=1),
    "grad_input.left": Slot("grad_input", "gradient", dim=1, random_key=3),
    "grad_input.right": Slot("grad_input", "weight", dim=0, reuses="output.right"),
    "grad_weight.left": Slot(
        "grad_weight", "gradient", dim=0, random_key=2, reuses="grad_input.left"
    ),
    "grad_weight.right": Slot("grad_weight", "input", dim=0, reuses="output.left"),
}
"""Operands by ``matmul.side``, as in :attr:`Compute.casts`."""


# ── weights without training: codes and scales ────────────────────────────────────────────────────


def stores_codes(compute: Compute) -> bool:
    """Return whether a weight can be stored as codes of one byte with a scale per row or tensor.

    Example:
        >>> stores_codes(COMPUTES["int8-outlier-codes"]), stores_codes(COMPUTES["mxfp8"])
        (True, False)
    """
    rhs = compute.output.right
    is_plain = rhs.block is None and rhs.rotation == "none"
    return rhs.element.bits == 8 and is_plain and rhs.granularity != "none"
