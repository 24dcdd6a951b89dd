"""What there is to compute: the linear layers of a model by kind, and how a recipe and its baseline compute each.

A model of 32 blocks has hundreds of linear layers and seven kinds of them. A kind is the layers whose names differ only in
numbers (``model.layers.*.self_attn.q_proj``); kinds of one shape take the same time and are timed once. q, k and v get the same
tensor, so one cast serves all three, and its cost is split between them.

The *baseline* of a recipe is bfloat16 over the same storage. The *plain recipe* is the recipe with the plain compute of its own
dtype: its step shows what everything except linear layers takes. The two differ only where that dtype is not bfloat16.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from narrowgauge.errors import DataError
from narrowgauge.planner.time.roofline import Setting, Shape, setting_of
from narrowgauge.spec.computes import COMPUTES, first_of_input
from narrowgauge.spec.models import MODELS, Model, get_model, refuse_own_code
from narrowgauge.spec.recipes import Recipe
from narrowgauge.spec.storages import STORAGES

ELSEWHERE = "Predict it for another machine: narrowgauge plan layers --chip NAME (narrowgauge show chips)."
"""Advice where a model is too large to be measured."""


@dataclass(frozen=True, slots=True)
class Kind:
    """Layers of one shape whose names differ only in numbers, ``*`` in ``pattern``."""

    pattern: str
    shape: Shape
    count: int

    @property
    def name(self) -> str:
        """The name of the first layer."""
        return self.pattern.replace("*", "0")

    @property
    def group(self) -> str:
        """Equal for kinds that get the same input."""
        return first_of_input(self.pattern)


def kinds_of(names: Iterable[tuple[str, Shape]]) -> tuple[Kind, ...]:
    """The kinds of named layers, in their order.

    Example:
        >>> [(k.pattern, k.count) for k in kinds_of([("a.0.fc", Shape(8, 4)), ("a.1.fc", Shape(8, 4)), ("head", Shape(9, 4))])]
        [('a.*.fc', 2), ('head', 1)]
    """
    counts = Counter((_pattern(name), shape) for name, shape in names)
    return tuple(Kind(pattern, shape, count) for (pattern, shape), count in counts.items())


def read_model(name: str) -> tuple[Model, tuple[Kind, ...]]:
    """The shape of a model and its linear layers.

    ``name`` is a preset, which needs no PyTorch, or a folder with a Hugging Face ``config.json``.
    """
    path = Path(name).expanduser()
    if name.strip().lower() in MODELS or not (path.exists() or "/" in name or "\\" in name):
        model = get_model(name)
        return model, kinds_of_preset(model)
    return _read_folder(path)


def kinds_of_module(model: Any) -> tuple[Kind, ...]:
    """The kinds of a PyTorch model."""
    found = ((name, module) for name, module in model.named_modules() if type(module).__name__ in ("Linear", "Conv1D"))
    return kinds_of((name, _shape_of(module)) for name, module in found)


def kinds_of_preset(model: Model) -> tuple[Kind, ...]:
    """The kinds of a preset, from the table.

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
    """Kinds that get the same input, together."""
    groups: dict[str, list[Kind]] = {}
    for kind in kinds:
        groups.setdefault(kind.group, []).append(kind)
    return list(groups.values())


Settings = Mapping[Kind, Setting]


def plain_recipe(recipe: Recipe) -> Recipe:
    """The recipe with the plain compute of its own dtype: the same storage, no narrow layers."""
    overrides = tuple(replace(o, compute=None) for o in recipe.overrides if o.storage is not None)
    # A storage that belongs to one compute is plain, and is used with no other.
    compute = recipe.compute if recipe.storage.owner else COMPUTES[recipe.dtype]
    return replace(recipe, compute=compute, overrides=overrides, phases=(), evaluation=None)


def baseline_of(recipe: Recipe) -> Recipe:
    """The bfloat16 recipe that a recipe is compared with: of the same storage, where bfloat16 can be used with it.

    Example:
        >>> from narrowgauge.spec.notation import parse
        >>> baseline_of(parse("float32/float32")).name, baseline_of(parse("float16/split")).name
        ('bfloat16/float32', 'bfloat16/word')
    """
    if recipe.storage.owner:
        return Recipe(COMPUTES["bfloat16"], STORAGES["word"])
    return replace(plain_recipe(recipe), compute=COMPUTES["bfloat16"])


def compared_steps(recipes: Iterable[Recipe]) -> list[Recipe]:
    """The recipes whose whole steps the costs of these recipes need, none twice."""
    return list(dict.fromkeys(other for recipe in recipes for other in (plain_recipe(recipe), baseline_of(recipe))))


def settings_of(kinds: Iterable[Kind], recipe: Recipe) -> dict[Kind, Setting]:
    """How a recipe computes each kind."""
    return {kind: setting_of(kind.name, recipe) for kind in kinds}


def timed_settings(kinds: Sequence[Kind], recipes: Iterable[Recipe]) -> list[tuple[Shape, Setting]]:
    """Everything whose seconds the costs of these recipes need, none twice."""
    needed: dict[tuple[Shape, Setting], None] = {}
    for recipe in recipes:
        own = settings_of(kinds, recipe)
        plain = {kind: setting.plain for kind, setting in own.items()}
        for each in (own, plain, settings_of(kinds, plain_recipe(recipe)), settings_of(kinds, baseline_of(recipe))):
            needed |= {(kind.shape, setting): None for kind, setting in each.items()}
    return list(needed)


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
        # On the meta device a model of any size takes no memory.
        with torch.device("meta"):
            kinds = kinds_of_module(AutoModelForCausalLM.from_config(config, trust_remote_code=False))
    except (OSError, ValueError, KeyError, RecursionError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        advice = "Name a preset (narrowgauge show models) or a folder with a Hugging Face config.json."
        raise DataError(f"cannot read a causal language model from {path}: {reason}", advice) from error
    text = config.get_text_config()
    model = Model(
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
    return model, kinds


def _pattern(name: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in name.split("."))
