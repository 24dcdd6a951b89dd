"""What recipes are called elsewhere: names that people bring from other libraries, and the recipe that each one means.

A name that means one recipe is taken for it. One that leaves a part open, or means what is not had here, is refused with the
nearest recipe and with what it leaves open. Formats have short spellings too (``bf16``); a name is spelt in full, and without
regard to capitals, before it is looked up.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Alias:
    """A name from elsewhere.

    Args:
        name: as it is looked up: in lower case, with formats spelt in full.
        recipe: the full name of the recipe that is meant, or of the nearest; or a compute's, which any storage may follow.
        source: who calls it so, and how they write it.
        differs: why the name is refused; nothing where it is taken.
    """

    name: str
    recipe: str
    source: str
    differs: str = ""

    @property
    def is_taken(self) -> bool:
        """Whether the name stands for its recipe."""
        return not self.differs


SPELLINGS: dict[str, str] = {
    "bf16": "bfloat16",
    **dict.fromkeys(("fp16", "f16", "16", "half"), "float16"),
    **dict.fromkeys(("fp32", "f32", "32", "single"), "float32"),
    **dict.fromkeys(("fp64", "f64", "64", "double"), "float64"),
    "tf32": "tfloat32",
    "fp8": "float8",
    "fp4": "float4",
}
"""Formats at the beginning of a name, up to a dash."""

_NONE_OF_64_BITS = "nothing here computes in 64 bits."
_TE = "it is float8 with delayed scales, and leaves open how weights are kept (there in 16 bits, which lose updates)."
_FROZEN = "it is a format of frozen weights, and every weight here is trained."
_STATES = "it is a way to keep an optimizer's states, and leaves open what the model computes in."

_TORCHAO, _ENGINE = "torchao, torchtitan", "TransformerEngine"

_ROWS = (
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
    Alias("float64", "float32/float32", "Lightning: 64", _NONE_OF_64_BITS),
    Alias("float64-true", "float32/float32", "Lightning: 64-true", _NONE_OF_64_BITS),
    Alias("no", "float32/float32", "Accelerate: no", "it says what is not done."),
    Alias("none", "float32/float32", "Accelerate: none", "it says what is not done."),
    Alias("transformer-engine", "float8-delayed-e5m2/word", "Lightning: transformer-engine", _TE),
    Alias("transformer-engine-float16", "float8-delayed-e5m2/word", "Lightning: transformer-engine-float16", _TE),
    Alias("transformerengine", "float8-delayed-e5m2/word", "TransformerEngine", _TE),
    Alias("te", "float8-delayed-e5m2/word", "TransformerEngine: te", _TE),
    Alias("amp_fp8", "float8-delayed-e5m2/float32", "Composer: amp_fp8", "it leaves open how a float8 gets its scale."),
    Alias("hybrid", "float8-tensor-e5m2/word", "Megatron: --fp8-format hybrid", "it leaves open how a float8 gets its scale."),
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

ALIASES: dict[str, Alias] = {row.name: row for row in _ROWS}
COMPUTES_ELSEWHERE: dict[str, str] = {row.name: row.recipe for row in _ROWS if "/" not in row.recipe}
"""The names that stand for a compute, and for which."""
