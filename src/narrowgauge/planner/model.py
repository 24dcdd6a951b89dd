"""Models: the shape of a decoder down to each matmul, from a preset or a ``config.json``.

Parameters and operations are sums over one list of matmuls, so they always agree. A preset answers
at once. transformers builds a ``config.json`` on the meta device, without memory. We read its
parameters and guess none.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

from narrowgauge.errors import DataError, RecipeError, suggestion
from narrowgauge.spec.models import MODELS, Model, refuse_own_code
from narrowgauge.spec.toml import load_data

Part = Literal["attention", "mlp", "experts", "head"]
Split = Literal["column", "row", "none"]
Norm = Literal["rms", "rms-float32", "layer"]


@dataclass(frozen=True, slots=True)
class Mixture:
    """Describe the experts of a mixture: a router chooses ``experts_per_token`` of ``num_experts``
    in each of ``num_layers``.

    ``shared_size`` is the total intermediate size of the experts that every token visits.
    """

    num_experts: int
    experts_per_token: int
    expert_size: int
    num_layers: int
    shared_size: int = 0


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Describe attention with keys and values expanded from a latent vector (MLA).

    Args:
        query_rank: of the latent query; None for direct projection.
        plain_dim, rotary_dim: dimensions of a head's query and key without and with positions.

    Source: DeepSeek-V2, arXiv 2405.04434, section 2.1.
    """

    query_rank: int | None
    key_value_rank: int
    plain_dim: int
    rotary_dim: int
    value_dim: int


class Counts(NamedTuple):
    """Hold what a step of a user's module took: bytes of activations and gradients at its peak, and
    operations per token.

    ``trained`` counts the parameters that train.
    """

    tokens: int
    activations: int
    gradients: int
    trained: int
    operations: float


@dataclass(frozen=True, slots=True)
class Matmul:
    """Describe equal multiplied weights, ``[out_features, in_features]`` each.

    Args:
        count: number of weights in the model.
        split: dimension that tensor parallelism shards: output rows (``"column"``), the sum
            (``"row"``) or none.
        tokens_share: fraction of tokens per weight, 1 outside mixtures.
    """

    name: str
    in_features: int
    out_features: int
    count: int
    part: Part
    split: Split
    tokens_share: float = 1.0
    has_bias: bool = False

    @property
    def is_expert(self) -> bool:
        """Tell whether expert parallelism shards it."""
        return self.name.startswith("experts.")

    @property
    def num_elements(self) -> int:
        return self.count * self.out_features * self.in_features

    @property
    def num_parameters(self) -> int:
        return self.count * self.out_features * (self.in_features + self.has_bias)

    @property
    def flops_per_token(self) -> float:
        """Count forward's operations per token: two per weight that the token meets."""
        return 2 * self.num_elements * self.tokens_share


@dataclass(frozen=True)
class Architecture:
    """Describe the shape of a decoder.

    Args:
        matmuls: every multiplied weight, the head last, also if tied to the embedding.
        vectors: parameters of norms and other vectors in all layers, including biases of matmuls.
        outer_vectors: other parameters outside the layers, without embedding, positions, head and
            its biases. They include norms and parts that no text decoder has, such as a vision
            tower.
        num_heads, num_kv_heads, query_dim, value_dim: of attention.
        intermediate_size: of an MLP.
        is_gated: the MLP multiplies two projections (SwiGLU, GeGLU) instead of one.
        positions: number of learned positions; 0 for rotary or other fixed positions.
        norm: ``"rms"`` has gains, ``"rms-float32"`` applies them in float32, ``"layer"`` may have
            gains and biases.
        norms_per_layer: norms of the residual stream's width.
        head_norms: norms of queries and keys: ``"none"``, per ``"head"``, or over ``"all"`` heads.
        activation: the MLP's function, in Hugging Face's spelling.
        has_fused_inputs: queries, keys and values are one matmul.
        window, window_share: attended tokens per layer, None for all; and the fraction of layers
            with that window.
        counts: of a step of a user's module; None for formulas.
        left_out: parts of the model without planned time and activations; empty if none.
    """

    name: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    matmuls: tuple[Matmul, ...]
    vectors: int
    outer_vectors: int
    num_heads: int
    num_kv_heads: int
    query_dim: int
    value_dim: int
    intermediate_size: int
    is_gated: bool = True
    tie_embeddings: bool = False
    positions: int = 0
    norm: Norm = "rms"
    norms_per_layer: int = 2
    head_norms: Literal["none", "head", "all"] = "none"
    activation: str = "silu"
    has_fused_inputs: bool = False
    window: int | None = None
    window_share: float = 1.0
    mixture: Mixture | None = None
    latent: LatentAttention | None = None
    left_out: str = ""
    counts: Counts | None = None

    def __hash__(self) -> int:
        return hash((self.name, self.num_parameters))

    @property
    def num_dense_layers(self) -> int:
        """Count layers with an MLP instead of a mixture."""
        return self.num_layers - (self.mixture.num_layers if self.mixture else 0)

    @cached_property
    def outer_parameters(self) -> int:
        """Count the parameters outside the layers; the head's weight counts unless tied."""
        head = self.matmuls[-1]
        tables = (self.vocab_size + self.positions) * self.hidden_size
        return (
            tables
            + head.num_parameters
            - (head.num_elements if self.tie_embeddings else 0)
            + self.outer_vectors
        )

    @cached_property
    def num_parameters(self) -> int:
        """Count all parameters; a tied embedding counts once."""
        return (
            self.outer_parameters
            + self.vectors
            + sum(m.num_parameters for m in self.matmuls if m.part != "head")
        )

    @cached_property
    def expert_parameters(self) -> int:
        """Count the parameters of routed experts, which expert parallelism shards."""
        return sum(matmul.num_parameters for matmul in self.matmuls if matmul.is_expert)

    @cached_property
    def largest_layer(self) -> int:
        """Count the parameters of the largest layer without its experts."""
        sizes = {"attention": self.vectors / self.num_layers, "mlp": 0.0, "experts": 0.0}
        mixtures = self.mixture.num_layers if self.mixture else 0
        for matmul in self.matmuls:
            if matmul.part != "head" and not matmul.is_expert:
                part = (
                    "experts"
                    if matmul.part == "experts" or matmul.name.startswith("shared.")
                    else matmul.part
                )
                layers = {
                    "attention": self.num_layers,
                    "mlp": self.num_dense_layers,
                    "experts": mixtures,
                }[part]
                sizes[part] += matmul.num_parameters / layers
        return round(sizes["attention"] + max(sizes["mlp"], sizes["experts"]))

    def mean_keys(self, sequence_length: int, *, is_causal: bool = True) -> float:
        """Return the attended keys per token, averaged over tokens and layers.

        This is half the sequence with the mask, all of it in Megatron's convention. A window ``w``
        shortens the causal mean to ``w - w² / 2s``.
        """
        all_keys = sequence_length / 2 if is_causal else float(sequence_length)
        if self.window is None or self.window >= sequence_length:
            return all_keys
        near = (
            self.window - self.window**2 / (2 * sequence_length)
            if is_causal
            else float(self.window)
        )
        return self.window_share * near + (1 - self.window_share) * all_keys

    def attention_flops(self, sequence_length: int, *, is_causal: bool = True) -> float:
        """Count operations of scores and values per token, forward and backward, in all layers.

        ``is_causal`` counts the half below the diagonal, ``6 L h s``. Megatron-LM counts the whole,
        ``12 L h s``.

        Source: Narayanan et al., arXiv 2104.04473, appendix; Dao, FlashAttention-2, arXiv
        2307.08691, section 4.1 (causal half).
        """
        if self.counts:  # all that no linear layer does
            beyond = self.counts.operations - 3 * sum(m.flops_per_token for m in self.matmuls)
            return max(0.0, beyond)
        per_key = 2 * self.num_heads * (self.query_dim + self.value_dim)
        return 3 * self.num_layers * per_key * self.mean_keys(sequence_length, is_causal=is_causal)

    def flops_per_token(self, sequence_length: int) -> float:
        """Count a training step's operations per token: ``6`` per multiplied parameter that a token
        meets, plus attention.

        Recomputation does not count: it is in HFU, not in MFU.
        """
        return 3 * sum(matmul.flops_per_token for matmul in self.matmuls) + self.attention_flops(
            sequence_length
        )


# ── presets: a decoder from its sizes ─────────────────────────────────────────────────────────────


def decoder(
    name: str,
    *,
    num_layers: int,
    hidden_size: int,
    num_heads: int,
    vocab_size: int,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    intermediate_size: int | None = None,
    has_biases: bool = False,
    mixture: Mixture | None = None,
    latent: LatentAttention | None = None,
    **fields: Any,
) -> Architecture:
    """Return a usual decoder: layers of attention and an MLP (or a mixture) between an embedding
    and a head.

    Args:
        num_kv_heads: None for the number of heads; head_dim: None for width over heads;
            intermediate_size: None for four times the width.
        has_biases: all matmuls but the head have biases, and norms too.
        fields: further fields of :class:`Architecture`.
    """
    kv_heads = num_kv_heads or num_heads
    head_dim = head_dim or hidden_size // num_heads
    size = intermediate_size or 4 * hidden_size
    is_gated = fields.get("is_gated", True)
    query_dim = latent.plain_dim + latent.rotary_dim if latent else head_dim
    value_dim = latent.value_dim if latent else head_dim
    moe = mixture.num_layers if mixture else 0

    def mlp(
        inner: int, count: int, part: Part, prefix: str = "", share: float = 1.0
    ) -> list[Matmul]:
        ups = ("gate_proj", "up_proj") if is_gated else ("up_proj",)
        rows = [(up, hidden_size, inner, "column") for up in ups] + [
            ("down_proj", inner, hidden_size, "row")
        ]
        return [Matmul(prefix + n, i, o, count, part, s, share, has_biases) for n, i, o, s in rows]  # type: ignore[arg-type]

    attention: list[tuple[str, int, int, Split]]
    if latent:
        queries = latent.query_rank
        attention = [
            ("kv_a_proj", hidden_size, latent.key_value_rank + latent.rotary_dim, "none"),
            (
                "kv_b_proj",
                latent.key_value_rank,
                num_heads * (latent.plain_dim + latent.value_dim),
                "column",
            ),
            (
                "q_b_proj" if queries else "q_proj",
                queries or hidden_size,
                num_heads * query_dim,
                "column",
            ),
        ]
        attention += [("q_a_proj", hidden_size, queries, "none")] if queries else []
    else:
        sizes = (
            ("q_proj", num_heads * head_dim),
            ("k_proj", kv_heads * head_dim),
            ("v_proj", kv_heads * head_dim),
        )
        attention = [(part, hidden_size, out, "column") for part, out in sizes]
    attention.append(("o_proj", num_heads * value_dim, hidden_size, "row"))
    matmuls = [
        Matmul(n, i, o, num_layers, "attention", s, 1.0, has_biases) for n, i, o, s in attention
    ]
    matmuls += mlp(size, num_layers - moe, "mlp") if moe < num_layers else []
    if mixture:
        matmuls.append(Matmul("router", hidden_size, mixture.num_experts, moe, "experts", "none"))
        share = mixture.experts_per_token / mixture.num_experts
        matmuls += mlp(mixture.expert_size, moe * mixture.num_experts, "experts", "experts.", share)
        matmuls += mlp(mixture.shared_size, moe, "mlp", "shared.") if mixture.shared_size else []
    matmuls.append(Matmul("lm_head", hidden_size, vocab_size, 1, "head", "column"))
    norm = hidden_size * (2 if has_biases else 1)
    vectors = 2 * norm + (2 * head_dim if fields.get("head_norms") == "head" else 0)
    vectors += (latent.query_rank or 0) + latent.key_value_rank if latent else 0
    return Architecture(
        name, num_layers, hidden_size, vocab_size, tuple(matmuls), num_layers * vectors, norm, num_heads, kv_heads,
        query_dim, value_dim, size, mixture=mixture, latent=latent, **fields,
    )  # fmt: skip


_PRESETS: dict[str, Any] = load_data("presets", "planner")
PRESET_NAMES = tuple(_PRESETS["models"])
"""The presets besides the models that the trainer builds."""


def _of_preset(name: str, row: Mapping[str, Any]) -> Architecture:
    sizes = {**_PRESETS["families"][row.get("like", "llama")], **row}
    sizes = {key: value for key, value in sizes.items() if key not in ("like", "source")}
    parts = {"mixture": Mixture, "latent": LatentAttention}
    return decoder(
        name,
        **{key: parts[key](**value) if key in parts else value for key, value in sizes.items()},
    )


def _of_trainer(model: Model) -> Architecture:
    """Return the shape of a trainer model."""
    sizes = (
        "num_layers",
        "hidden_size",
        "num_heads",
        "num_kv_heads",
        "intermediate_size",
        "vocab_size",
    )
    row = {name: getattr(model, name) for name in (*sizes, "tie_embeddings")}
    if model.family == "gpt2":
        row |= {"like": "gpt", "positions": model.max_positions}
    return _of_preset(model.name, row)


def read_model(text: str) -> Architecture:
    """Return the architecture of a preset (``narrowgauge show models``), a Hugging Face model
    folder or a ``config.json``.

    Example:
        >>> read_model("mixtral-8x7b").num_parameters
        46702792704
    """
    key = text.strip().lower()
    key = _PRESETS["aliases"].get(key, key)
    if key in MODELS:
        return _of_trainer(MODELS[key])
    if key in _PRESETS["models"]:
        return _of_preset(key, _PRESETS["models"][key])
    path = Path(text).expanduser()
    file = path / "config.json" if path.is_dir() else path
    if re.fullmatch(r"[\w.-]+/[\w.-]+", text) and not path.exists():
        file = _cached_config(text)
    if not text.strip() or not file.is_file():
        near = suggestion(key, (*MODELS, *_PRESETS["models"], *_PRESETS["aliases"]))
        raise RecipeError(
            f"no model and no config.json is named {text!r}.",
            near
            or "narrowgauge plan run --help names the presets. hf download ORG/NAME config.json caches one of the hub.",
        )
    try:
        config = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(
            f"{file} cannot be read: {error}.", "It must be a Hugging Face config.json."
        ) from error
    if not isinstance(config, dict):
        raise DataError(
            f"{file} holds {type(config).__name__}, no table.",
            "It must be a Hugging Face config.json.",
        )
    refuse_own_code(file)
    # Imported here: it loads PyTorch.
    from narrowgauge.planner.built_models import of_config

    return of_config(config, str(path))


def _cached_config(name: str) -> Path:
    """Return the newest ``config.json`` of a model in the hub's cache, or a path that does not
    exist.

    Source: huggingface_hub, "Understand caching": ``models--org--name/snapshots/REVISION``.
    """
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    cache = Path(os.environ.get("HF_HUB_CACHE") or home / "hub")
    folder = cache / f"models--{name.replace('/', '--')}" / "snapshots"
    files = sorted(folder.glob("*/config.json"), key=lambda file: file.stat().st_mtime)
    return files[-1] if files else folder / "config.json"
