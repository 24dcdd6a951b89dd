"""Computes: how the operands of a linear layer's three matmuls are cast, and how products are
accumulated.

A linear layer multiplies three times: ``output`` = x · wᵀ, ``grad_input`` = dy · w, ``grad_weight``
= dyᵀ · x. Each is a :class:`Product` of two operands. Each operand has a :class:`Cast`: its format,
granularity (which values share a scale), rounding and scaling. A :class:`Slot` says which tensor an
operand is, and which of its dimensions the matmul contracts. Kernels, profiler, tests,
documentation and ``narrowgauge show`` read the same table. A new compute is a new row here.

An operand is a matrix ``[rows, contraction]``. So ``row`` is one scale per dot product, ``1x32``
one per 32 terms of it, and ``column`` one per term. A scale per term cannot be factored out: it
multiplies the *other* operand before that operand's cast.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace
from functools import cache, cached_property
from typing import Literal

from narrowgauge.errors import RecipeError
from narrowgauge.spec.formats import Format, bytes_per_number, get_format
from narrowgauge.spec.values import require_choice, require_number

Granularity = str
"""``"none"``, ``"tensor"``, ``"row"``, ``"column"``, or a block ``"rows x terms"`` such as
``"1x32"``.
"""
Scale = Literal["float32", "power-of-two", "float8_e8m0fnu", "float8_e4m3fn"]
Accumulation = Literal["float32", "promoted", "fast", "int32"]
_ACCUMULATIONS = ("float32", "promoted", "fast", "int32")

_WORDS: dict[str, tuple[str, ...]] = {
    "scale": ("float32", "power-of-two", "float8_e8m0fnu", "float8_e4m3fn"),
    "rounding": ("nearest", "stochastic"),
    "scale_rounding": ("up", "floor"),
    "scaling": ("current", "static"),
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


def turned(granularity: Granularity) -> Granularity:
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
            ``power-of-two`` and, in a byte, ``float8_e8m0fnu``: see ``scale_rounding``.
            ``float8_e4m3fn``: two levels, a float32 per tensor and an e4m3 per block.
        scale_rounding: of powers of two. ``up``: the smallest at which nothing saturates.
            ``floor``: the OCP rule, the exponent of amax minus the format's largest exponent, at
            which values just below the next power saturate.
        rounding: ``nearest`` (ties to even) or ``stochastic``. Stochastic casts round scales up, so
            that nothing saturates.
        scaling: ``current``: from the operand's amax; ``static``: 1.
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
    scale: Scale = "float32"
    rounding: Literal["nearest", "stochastic"] = "nearest"
    scale_rounding: Literal["up", "floor"] = "up"
    scaling: Literal["current", "static"] = "current"
    rotation: Literal["none", "hadamard"] = "none"
    outliers: float = 0.0

    def __post_init__(self) -> None:
        for name, words in _WORDS.items():
            require_choice(name, getattr(self, name), words)
        require_number("outliers", self.outliers)
        element = self.element
        if self.is_wide:
            others = self.scale, self.rounding, self.scale_rounding, self.scaling, self.outliers
            is_possible = element.kind == "float" and element.bits in (16, 32, 64)
            is_possible = is_possible and others == ("float32", "nearest", "up", "current", 0)
        else:
            has_blocks = self.block is not None
            words = self.scaling, self.granularity, self.scale
            is_static = words == ("static", "tensor", "float32")
            is_power = self.scale in ("power-of-two", "float8_e8m0fnu")
            is_possible = (
                element.kind != "scale"
                and element.bits <= 8
                and (has_blocks or (self.granularity in _TURNED and self.scale != "float8_e4m3fn"))
                and (is_static or self.scaling == "current")
                and (self.scale_rounding == "up" or (is_power and not self.needs_bits))
                and not (self.outliers and has_blocks)
            )
        if not is_possible:
            raise RecipeError(
                f"Cannot make a cast to {self} because its words do not go together.",
                "Codes of 4 to 8 bits share a scale by tensor, row, column or a block such as 1x32; "
                "two levels need blocks, static scales a tensor, outliers rows or tensors; scales that "
                "round down are powers of two of casts to nearest; 16 and more bits have no scale.",
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
        """Return whether the operand is rounded to a 16-, 32- or 64-bit format without a scale."""
        return self.granularity == "none"

    @property
    def needs_bits(self) -> bool:
        """Return whether it needs random bits."""
        return self.rounding == "stochastic"

    @property
    def carrier(self) -> str:
        """Return the PyTorch dtype of one byte that holds a code; empty without one."""
        return self.format if self.element.bits == 8 else ""

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
        return replace(self, granularity=turned(self.granularity)) == other

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
    accumulation: Accumulation = "float32"

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
            or (lhs.outliers and (rhs.is_wide or rhs.block))
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
        """Return whether ``grad_weight`` reuses the input's codes, so that only these are saved for
        backward.
        """
        return not self.is_wide and self.output.left.serves(self.grad_weight.right)

    @property
    def kept_bytes(self) -> float:
        """Return the bytes saved for backward per element of the input."""
        if self.keeps_codes and self.output.left.carrier and self.output.left.block is None:
            return 1
        format = self.output.left.format if self.is_wide else self.dtype
        return bytes_per_number(format)


Products = tuple[Product, Product, Product]


def _products(
    x: Cast,
    weight: Cast,
    gradient: Cast,
    accumulation: Accumulation = "float32",
    forward: Accumulation | None = None,
) -> Products:
    """Return three matmuls whose operands are each cast in one way.

    ``forward`` sets the output's accumulation.
    """
    return (
        Product(x, weight, forward or accumulation),
        Product(gradient, weight, accumulation),
        Product(gradient, x, accumulation),
    )


def _wide(name: str) -> Products:
    return _products(Cast(name), Cast(name), Cast(name))


def _rotated(x: Cast, weight: Cast, gradient: Cast) -> Products:
    """Return three matmuls; grad_weight rotates both operands."""
    output, grad_input, grad_weight = _products(x, weight, gradient)
    left, right = (
        replace(cast, rotation="hadamard") for cast in (grad_weight.left, grad_weight.right)
    )
    return output, grad_input, Product(left, right)


_TENSOR = Cast("float8_e4m3fn", "tensor")
_STATIC = Cast("float8_e4m3fn", "tensor", scaling="static")
_ROW = Cast("float8_e4m3fn", "row")
_BLOCK = Cast("float8_e4m3fn", "1x128", "power-of-two")
_INT8 = Cast("int8", "row")
_INT8_BACKWARD = Product(
    Cast("int8", "row", rounding="stochastic"), Cast("int8", "column"), "int32"
)
_MXFP8 = Cast("float8_e4m3fn", "1x32", "float8_e8m0fnu")
_MXFP4 = Cast("float4_e2m1fn", "1x32", "float8_e8m0fnu", scale_rounding="floor")
_NVFP4 = Cast("float4_e2m1fn", "1x16", "float8_e4m3fn")
_SM89 = "float8 matmuls of Ada and Hopper or later"
_TE = "NVIDIA TransformerEngine"
_MX = "OCP Microscaling Formats v1.0; Rouhani et al. 2023 (2310.10537)"

_COMPUTES = (
    Compute(
        "float32", *_wide("float32"), dtype="float32", native="everywhere",
        default_storage="float32",
        purpose="the reference for all other computes", source="IEEE 754",
    ),
    Compute(
        "bfloat16", *_wide("bfloat16"), native="everywhere",
        purpose="8 bits of precision, float32's range, accumulation in float32", source="Kalamkar et al. 2019",
    ),
    Compute(
        "float16", *_wide("float16"), dtype="float16", native="CUDA",
        default_storage="split",
        purpose="11 bits of precision, 2^-24 … 65504 only: the loss is scaled, and steps that overflow are skipped",
        source="Micikevicius et al. 2018",
    ),
    Compute(
        "float8-tensor", *_products(_TENSOR, _TENSOR, _TENSOR, "promoted", "fast"), native=_SM89,
        purpose="the fastest float8: one scale per tensor, from its amax; an outlier costs all values range",
        source=f"{_TE}, current scaling, E4M3; Micikevicius et al. 2022 (2209.05433) have e5m2 for gradients",
    ),
    Compute(
        "float8-row", *_products(_ROW, _ROW, _ROW, "promoted"), native=_SM89,
        purpose="the safe float8: a scale per token and per output, so that rows are independent",
        source="torchao, rowwise, where scales are powers of two",
    ),
    Compute(
        "float8-block", *_products(_BLOCK, replace(_BLOCK, granularity="128x128"), _BLOCK, "promoted"),
        purpose="long runs: e4m3 everywhere, blocks of 1×128 and, for weights, 128×128, power-of-two scales",
        source=f"DeepSeek-V3 (2412.19437), section 3.3; power-of-two scales as in {_TE}",
    ),
    Compute(
        "int8-row", Product(_INT8, _INT8, "int32"), _INT8_BACKWARD, _INT8_BACKWARD, native="CPUs with VNNI, CUDA",
        purpose="faster than bfloat16 on a CPU: int8 quantized once and saved, stochastic gradients, exact accumulation",
        source="Xi et al. 2024, Jetfire (2403.12422), for int8 in all three matmuls; torchao, int8 mixed precision",
    ),
    Compute(
        "int8-outlier-codes",
        Product(replace(_INT8, outliers=6.0), _INT8, "int32"), *_wide("bfloat16")[1:],
        native="CPUs with VNNI, CUDA",
        purpose="fine-tuning and inference: input features with outliers in 16 bits, all others in int8; a byte a weight",
        source="Dettmers et al. 2022, LLM.int8() (2208.07339), section 3.2, threshold 6; bitsandbytes",
    ),
    Compute(
        "mxfp8", *_products(_MXFP8, _MXFP8, _MXFP8),
        purpose="float8 with a power-of-two scale per 32 values: an outlier affects its block only; scales round up",
        source="NVIDIA 2025, Recipes for Pre-training LLMs with MXFP8 (2506.08027); TransformerEngine; torchao, RCEIL",
    ),
    Compute(
        "mxfp4", *_rotated(_MXFP4, _MXFP4, replace(_MXFP4, rounding="stochastic", scale_rounding="up")),
        purpose="four bits with power-of-two scales: stochastic rounding and rotation keep gradients unbiased",
        source=f"{_MX}; Tseng et al. 2025, Training LLMs with MXFP4 (2502.20586)",
    ),
    Compute(
        "nvfp4", *_rotated(_NVFP4, replace(_NVFP4, granularity="16x16"), replace(_NVFP4, rounding="stochastic")),
        keep_last=0.15,
        purpose="four bits with an e4m3 scale per 16 values, of weights per 16×16; the last blocks of the model stay wide",
        source="NVIDIA 2025, Pretraining LLMs with NVFP4 (2509.25149), section 4; TransformerEngine, NVFP4BlockScaling",
    ),
    Compute(
        "scalify", *_products(_STATIC, _STATIC, replace(_STATIC, format="float8_e5m2"), "promoted", "fast"), transform="scalify",
        native=_SM89,
        purpose="float8 without an amax per cast: tensors carry power-of-two scales, measured at few places",
        source="Balança et al. 2024, Scalify (2407.17353)",
    ),
    Compute(
        "scalify-float16", *_wide("float16"), dtype="float16", transform="scalify", native="CUDA",
        purpose="float16 throughout without a loss scale: gradients carry power-of-two scales of their own",
        source="Balança et al. 2024, Scalify (2407.17353)",
    ),
)  # fmt: skip

COMPUTES: dict[str, Compute] = {compute.name: compute for compute in _COMPUTES}


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
        random_key: distinguishes the random bits of a stochastic cast. Stored results depend on it:
            never renumber.
        reuses: the slot whose codes of the same tensor this slot takes if they serve it.
    """

    matmul: str
    tensor: str
    dim: int
    random_key: int
    reuses: str = ""


SLOTS: dict[str, Slot] = {
    "output.left": Slot("output", "input", dim=1, random_key=0),
    "output.right": Slot("output", "weight", dim=1, random_key=1),
    "grad_input.left": Slot("grad_input", "gradient", dim=1, random_key=3),
    "grad_input.right": Slot("grad_input", "weight", dim=0, random_key=1, reuses="output.right"),
    "grad_weight.left": Slot(
        "grad_weight", "gradient", dim=0, random_key=2, reuses="grad_input.left"
    ),
    "grad_weight.right": Slot("grad_weight", "input", dim=0, random_key=0, reuses="output.left"),
}
"""Operands by ``matmul.side``, as in :attr:`Compute.casts`."""


# ── weights without training: codes and scales ────────────────────────────────────────────────────


def stores_codes(compute: Compute) -> bool:
    """Return whether a weight can be stored as codes of one byte with a scale per row or tensor.

    Example:
        >>> stores_codes(COMPUTES["int8-outlier-codes"]), stores_codes(COMPUTES["mxfp8"])
        (True, False)
    """
    lhs = compute.output.left
    rhs = compute.output.right
    is_plain = rhs.block is None and rhs.rotation == "none"
    return rhs.element.bits == 8 and is_plain and rhs.scaling == lhs.scaling == "current"
