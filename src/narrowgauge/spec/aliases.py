"""Names of recipes in other libraries, and the recipe that each one means.

A name that means exactly one recipe is accepted. A name that is ambiguous, or has no equivalent here, is refused with the
reason and the nearest recipes. Short spellings of formats (``bf16``) are expanded, ignoring case, before a name is looked up.

The name of a 16-bit format alone is refused as a recipe, since libraries mean different weights and moments by it; as a part of
one (``bf16/word``, ``compute = "bf16"``) it is the compute.
"""

from __future__ import annotations

from dataclasses import dataclass

from narrowgauge.errors import RecipeError


@dataclass(frozen=True, slots=True)
class Alias:
    """A name of another library.

    Args:
        name: as it is looked up: in lower case, with formats in full spelling.
        recipe: the full name of its recipe, or of the nearest one; or a compute, which any storage may follow.
        source: the libraries that use it, and their spelling.
        differs: why the name is refused; empty if it is accepted.
        others: of a refused name, further recipes that may have been meant, each with what it is.
    """

    name: str
    recipe: str
    source: str
    differs: str = ""
    others: tuple[tuple[str, str], ...] = ()

    @property
    def is_taken(self) -> bool:
        """Whether the name is accepted for its recipe."""
        return not self.differs

    @property
    def is_compute(self) -> bool:
        """Whether it is, or could be, a compute, which any storage may follow."""
        return "/" not in self.recipe

    def refusal(self, said: str) -> RecipeError:
        """The error for a name that is not accepted.

        Args:
            said: the name in its user's spelling.
        """
        nearest = f"'{self.recipe}'" + (f" ({self.source})" if self.others else "")
        choices = [nearest, *(f"'{recipe}' ({what})" for recipe, what in self.others)]
        listed = " or ".join(filter(None, [", ".join(choices[:-1]), choices[-1]]))
        return RecipeError(f"no recipe is named '{said}': {self.differs}", f"Take {listed}. {SEE_ALIASES}")


SEE_ALIASES = "(narrowgauge show aliases lists the names of other libraries.)"

SPELLINGS: dict[str, str] = {
    "bf16": "bfloat16",
    **dict.fromkeys(("fp16", "f16", "16", "half"), "float16"),
    **dict.fromkeys(("fp32", "f32", "32", "single"), "float32"),
    **dict.fromkeys(("fp64", "f64", "64", "double"), "float64"),
    "tf32": "tfloat32",
    "fp8": "float8",
    "fp4": "float4",
}
"""Short spellings of formats at the beginning of a name, up to a dash."""

_NONE_OF_64_BITS = "there is no compute in 64 bits."
_TE = "it is float8 with delayed scales and does not specify a storage (there, weights in 16 bits, which lose updates)."
_FROZEN = "it is a format of frozen weights, and here all weights are trained."
_STATES = "it is a format of optimizer states and does not specify a compute."
_SIXTEEN_BITS = "it names a format, and libraries store weights and moments in different ways by that name."
_SCALED8 = "it does not specify how float8 is scaled."
_MIXED8 = (("float8-tensor/float32", "a scale per tensor"), ("float8-delayed-e5m2/float32", "TransformerEngine"))
_HOW_MIXED = "it does not say which format is mixed with float32."
_TWO_FLOAT8 = "float8 matmuls and weights that are stored in float8 both go by that name."
_BY_FLOAT16 = (
    ("float16/master", "DeepSpeed, Megatron: fp16"),
    ("float16/naive", "model.half()"),
    ("float16/split", "12 bytes per parameter, no update lost"),
)
_BY_BFLOAT16 = (
    ("bfloat16/master", "DeepSpeed, Megatron: bf16"),
    ("bfloat16/naive", "model.bfloat16(), which loses updates"),
    ("bfloat16/word", "8 bytes per parameter, no update lost"),
)
_MATMULS8 = (
    ("float8-tensor", "float8 matmuls, a scale per tensor"),
    ("float8-delayed-e5m2", "TransformerEngine"),
    ("float8/collage-plus", "bfloat16 matmuls of weights stored in float8"),
)

_TORCHAO, _ENGINE = "torchao, torchtitan", "TransformerEngine"

_ALIASES = (
    Alias("fp8", "float8-row", "Accelerate: fp8"),
    Alias("int8", "int8-row", "torchao: int8_mixed_precision_training"),
    Alias("rowwise", "float8-row", f"{_TORCHAO}: rowwise"),
    Alias("tensorwise", "float8-tensor", f"{_TORCHAO}: tensorwise"),
    Alias("float8-rowwise", "float8-row", f"{_TORCHAO}: rowwise"),
    Alias("float8-tensorwise", "float8-tensor", f"{_TORCHAO}: tensorwise"),
    Alias("blockwise", "float8-block", "Megatron: --fp8-recipe blockwise"),
    Alias("delayedscaling", "float8-delayed-e5m2", f"{_ENGINE}: DelayedScaling"),
    Alias("float8currentscaling", "float8-tensor-e5m2", f"{_ENGINE}: Float8CurrentScaling"),
    Alias("float8blockscaling", "float8-block", f"{_ENGINE}: Float8BlockScaling"),
    Alias("mxfp8blockscaling", "mxfp8", f"{_ENGINE}: MXFP8BlockScaling"),
    Alias("nvfp4blockscaling", "nvfp4", f"{_ENGINE}: NVFP4BlockScaling"),
    Alias("bfloat16-mixed", "bfloat16/float32", "Lightning: bf16-mixed"),
    Alias("bfloat16-true", "bfloat16/naive", "Lightning: bf16-true"),
    Alias("float16-mixed", "float16/float32", "Lightning: 16-mixed"),
    Alias("float16-true", "float16/naive", "Lightning: 16-true"),
    Alias("float32-true", "float32/float32", "Lightning: 32-true"),
    Alias("collage-light", "bfloat16/collage-light", "Collage"),
    Alias("collage-plus", "bfloat16/collage-plus", "Collage"),
    Alias("o0", "float32/float32", "apex: O0"),
    Alias("o1", "float16/float32", "apex: O1"),
    Alias("o2", "float16/master", "apex: O2"),
    Alias("o3", "float16/naive", "apex: O3"),
    Alias("amp", "float16/float32", "OpenCLIP: amp"),
    Alias("amp_fp16", "float16/float32", "Composer: amp_fp16"),
    Alias("amp_bf16", "bfloat16/float32", "Composer, OpenCLIP: amp_bf16"),
    Alias("amp_bfloat16", "bfloat16/float32", "OpenCLIP: amp_bfloat16"),
    Alias("pure_fp16", "float16/naive", "OpenCLIP: pure_fp16"),
    Alias("pure_bf16", "bfloat16/naive", "OpenCLIP: pure_bf16"),
    Alias("mixed_float16", "float16/float32", "Keras: mixed_float16"),
    Alias("mixed_bfloat16", "bfloat16/float32", "Keras: mixed_bfloat16"),
    Alias("bfloat16", "bfloat16/float32", "Transformers, Accelerate, Lightning: bf16", _SIXTEEN_BITS, _BY_BFLOAT16),
    Alias("float16", "float16/float32", "Transformers, Accelerate, Lightning: fp16", _SIXTEEN_BITS, _BY_FLOAT16),
    Alias("float8", "float8-row", "Accelerate: fp8", _TWO_FLOAT8, _MATMULS8),
    Alias("mixed", "bfloat16/float32", "bf16-mixed", _HOW_MIXED, (("float16/float32", "fp16-mixed"),)),
    Alias("autocast", "bfloat16/float32", "bf16-mixed", _HOW_MIXED, (("float16/float32", "fp16-mixed"),)),
    Alias("mixed-precision", "bfloat16/float32", "bf16-mixed", _HOW_MIXED, (("float16/float32", "fp16-mixed"),)),
    Alias("float8-mixed", "float8-row/float32", "float8 matmuls, float32 weights", _SCALED8, _MIXED8),
    Alias("float8-hybrid", "float8-tensor-e5m2/word", "TransformerEngine: HYBRID", _SCALED8),
    Alias("e4m3", "float8-row", "Megatron: --fp8-format e4m3", _SCALED8, _MATMULS8[:2]),
    Alias("float8_e4m3fn", "float8-row", "PyTorch", _SCALED8, _MATMULS8[:2]),
    Alias("int4", "mxfp4/word", "torchao: int4", "there is no compute of int4.", (("nvfp4/word", "four bits too"),)),
    Alias("float64", "float32/float32", "Lightning: 64", _NONE_OF_64_BITS),
    Alias("float64-true", "float32/float32", "Lightning: 64-true", _NONE_OF_64_BITS),
    Alias("no", "float32/float32", "Accelerate: no", "it does not specify a recipe."),
    Alias("none", "float32/float32", "Accelerate: none", "it does not specify a recipe."),
    Alias("transformer-engine", "float8-delayed-e5m2/word", "Lightning: transformer-engine", _TE),
    Alias("transformer-engine-float16", "float8-delayed-e5m2/word", "Lightning: transformer-engine-float16", _TE),
    Alias("transformerengine", "float8-delayed-e5m2/word", "TransformerEngine", _TE),
    Alias("te", "float8-delayed-e5m2/word", "TransformerEngine: te", _TE),
    Alias("amp_fp8", "float8-delayed-e5m2/float32", "Composer: amp_fp8", _SCALED8),
    Alias("hybrid", "float8-tensor-e5m2/word", "Megatron: --fp8-format hybrid", _SCALED8),
    Alias("adamw_8bit", "bfloat16/compact", "Transformers: adamw_8bit", _STATES),
    Alias("adamw_bnb_8bit", "bfloat16/compact", "Transformers: adamw_bnb_8bit", _STATES),
    Alias("8bit", "int8-outlier/word", "Transformers: load_in_8bit", _FROZEN),
    Alias("4bit", "nvfp4/word", "Transformers: load_in_4bit", _FROZEN),
    Alias("nf4", "nvfp4/word", "bitsandbytes: nf4", _FROZEN),
    Alias("nf4-dq", "nvfp4/word", "Lightning: nf4-dq", _FROZEN),
    Alias("float4", "nvfp4/word", "bitsandbytes: fp4", "there are two float4 computes here, nvfp4 and mxfp4."),
    Alias("float4-dq", "nvfp4/word", "Lightning: fp4-dq", _FROZEN),
    Alias("int8-training", "int8-outlier/word", "Lightning: int8-training", _FROZEN),
)  # fmt: skip

ALIASES: dict[str, Alias] = {alias.name: alias for alias in _ALIASES}
FOREIGN_COMPUTES: dict[str, str] = {
    alias.name: alias.recipe for alias in _ALIASES if alias.is_taken and alias.is_compute
}
"""The names of computes in other libraries, and the compute that each means."""


def spelled(part: str) -> str:
    """The full spelling of a part of a name.

    Example:
        >>> spelled("BF16-mixed")
        'bfloat16-mixed'
    """
    head, dash, rest = part.strip().lower().partition("-")
    return SPELLINGS.get(head, head) + dash + rest


def compute_name(part: str) -> str:
    """The full name of a compute, or of a recipe where a compute is allowed.

    Example:
        >>> compute_name("fp8"), compute_name("FP8-tensor")
        ('float8-row', 'float8-tensor')
    """
    full = spelled(part)
    return FOREIGN_COMPUTES.get(part.strip().lower()) or FOREIGN_COMPUTES.get(full, full)


def require_one_compute(said: str) -> None:
    """Refuse a name that could be several computes, where no storage beside it says which.

    Raises:
        RecipeError: it could.
    """
    alias = ALIASES.get(compute_name(said))
    if alias is not None and not alias.is_taken and alias.is_compute:
        raise alias.refusal(said)
