"""The linear layers of a model, by kind: a name pattern, a shape, how many there are, and who shares an input.

A model of 32 blocks has hundreds of linear layers and seven kinds of them. A kind is the layers whose names differ in numbers
alone (``model.layers.*.self_attn.q_proj``); kinds of one shape take the same time and are timed once. q, k and v are given the
same tensor, so one cast serves all three, and what it costs is split between them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from narrowgauge.errors import DataError
from narrowgauge.spec.models import MODELS, Model, get_model, refuse_own_code

# By their names beside each other; a test holds that the layers themselves share by the same ones.
SAME_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


@dataclass(frozen=True, slots=True)
class Shape:
    """What the time of a linear layer depends on.

    Args:
        out_features, in_features: of its weight ``[out, in]``.
        is_transposed: whether the weight lies in memory as ``[in, out]`` (transformers' ``Conv1D``).
    """

    out_features: int
    in_features: int
    is_transposed: bool = False

    @property
    def num_weights(self) -> int:
        """Elements of the weight."""
        return self.out_features * self.in_features

    def __str__(self) -> str:
        return f"{self.out_features} × {self.in_features}"


@dataclass(frozen=True, slots=True)
class Kind:
    """Layers that differ in the numbers of their names alone.

    Args:
        pattern: of their names, numbers as ``*``.
        shape: of each.
        count: how many.
    """

    pattern: str
    shape: Shape
    count: int

    @property
    def name(self) -> str:
        """The name of the first."""
        return self.pattern.replace("*", "0")

    @property
    def group(self) -> str:
        """Equal for kinds that are given the same input."""
        parent, _, own = self.pattern.rpartition(".")
        shared = next((names[0] for names in SAME_INPUT if own in names), own)
        return f"{parent}.{shared}"


def kinds_of(names: Iterable[tuple[str, Shape]]) -> tuple[Kind, ...]:
    """Named layers, by kind, in their order.

    Example:
        >>> [(k.pattern, k.count) for k in kinds_of([("a.0.fc", Shape(8, 4)), ("a.1.fc", Shape(8, 4)), ("head", Shape(9, 4))])]
        [('a.*.fc', 2), ('head', 1)]
    """
    counts = Counter((_pattern(name), shape) for name, shape in names)
    return tuple(Kind(pattern, shape, count) for (pattern, shape), count in counts.items())


def read_model(name: str) -> tuple[Model, tuple[Kind, ...]]:
    """The shape of a model and its linear layers.

    Args:
        name: a preset's, which needs no PyTorch, or a folder with a Hugging Face ``config.json``.
    Raises:
        RecipeError: no preset has that name.
        DataError: the folder holds no model that can be read.
    """
    path = Path(name).expanduser()
    if name.strip().lower() in MODELS or not (path.exists() or "/" in name or "\\" in name):
        row = get_model(name)
        return row, kinds_of_preset(row)
    return _read_folder(path)


def kinds_of_module(model: Any) -> tuple[Kind, ...]:
    """The kinds of a PyTorch model."""
    found = ((name, module) for name, module in model.named_modules() if type(module).__name__ in ("Linear", "Conv1D"))
    return kinds_of((name, _shape_of(module)) for name, module in found)


def kinds_of_preset(model: Model) -> tuple[Kind, ...]:
    """The kinds of a preset, from its row alone.

    Example:
        >>> from narrowgauge.spec.models import get_model
        >>> [f"{kind.count} of {kind.shape}" for kind in kinds_of_preset(get_model("llama-8m"))][:2]
        ['8 of 256 × 256', '8 of 256 × 256']
    """
    width, inner, vocabulary = model.hidden_size, model.intermediate_size, model.vocab_size
    head = Kind("lm_head", Shape(vocabulary, width), 1)
    if model.family == "gpt2":
        sizes = {"attn.c_attn": (3 * width, width), "attn.c_proj": (width, width), "mlp.c_fc": (inner, width)}
        sizes["mlp.c_proj"] = (width, inner)
        return (*(Kind(f"transformer.h.*.{n}", Shape(*s, True), model.num_layers) for n, s in sizes.items()), head)
    keys = model.num_kv_heads * model.head_dim
    sizes = {"self_attn.q_proj": (width, width), "self_attn.k_proj": (keys, width), "self_attn.v_proj": (keys, width)}
    sizes |= {"self_attn.o_proj": (width, width), "mlp.gate_proj": (inner, width), "mlp.up_proj": (inner, width)}
    sizes["mlp.down_proj"] = (width, inner)
    return (*(Kind(f"model.layers.*.{n}", Shape(*s), model.num_layers) for n, s in sizes.items()), head)


def groups_of(kinds: Sequence[Kind]) -> list[list[Kind]]:
    """Kinds that are given the same input, together."""
    groups: dict[str, list[Kind]] = {}
    for kind in kinds:
        groups.setdefault(kind.group, []).append(kind)
    return list(groups.values())


def _shape_of(module: Any) -> Shape:
    is_transposed = type(module).__name__ == "Conv1D"
    rows, columns = module.weight.shape
    return Shape(columns, rows, True) if is_transposed else Shape(rows, columns)


def _read_folder(path: Path) -> tuple[Model, tuple[Kind, ...]]:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    refuse_own_code(path)
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        # Shapes without numbers, whatever the size.
        with torch.device("meta"):
            kinds = kinds_of_module(AutoModelForCausalLM.from_config(config, trust_remote_code=False))
    except (OSError, ValueError, KeyError, RecursionError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        advice = "Name a preset (narrowgauge show models) or a folder with a Hugging Face config.json."
        raise DataError(f"cannot read a causal language model from {path}: {reason}", advice) from error
    text = config.get_text_config()
    row = Model(
        name=path.name,
        family="gpt2" if text.model_type == "gpt2" else "llama",
        vocab_size=text.vocab_size,
        hidden_size=text.hidden_size,
        intermediate_size=getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
        num_layers=text.num_hidden_layers,
        num_heads=text.num_attention_heads,
        num_kv_heads=getattr(text, "num_key_value_heads", None) or text.num_attention_heads,
        max_positions=text.max_position_embeddings,
        tie_embeddings=bool(text.tie_word_embeddings),
        rope_theta=None,
        source=str(path),
    )
    return row, kinds


def _pattern(name: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in name.split("."))
