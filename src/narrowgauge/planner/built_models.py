"""Models that transformers builds of a ``config.json`` on the meta device, without memory: no parameter is guessed."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from narrowgauge.errors import DataError
from narrowgauge.planner.model import Architecture, LatentAttention, Matmul, Mixture, Norm, Part, Split, of_size

_EXPERTS_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "top_k", "moe_top_k")
_FLOAT32_NORMS = ("Gemma", "VaultGemma", "Olmo2", "Olmo3")
_HEAD_NORM = re.compile(r"\.(q|k|qk|query|key)_?(layer)?_?norm$")
_RECURRENT = re.compile(r"A_log|conv1d|time_decay|time_mix")
_OUTSIDE = re.compile(r"vision|visual|audio|multi_modal|image")


def of_config(config: Mapping[str, Any], name: str, source: str = "") -> Architecture:
    """Return the architecture that a Hugging Face configuration describes; ``name`` is for messages.

    Raises:
        DataError: transformers has no causal language model of it.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    keys = dict(config)
    kind = keys.pop("model_type", None)
    try:
        built = AutoConfig.for_model(kind, **keys)
        kinds = [
            auto for auto in (AutoModelForCausalLM, AutoModelForImageTextToText) if type(built) in auto._model_mapping
        ]
        with torch.device("meta"):
            model = (kinds or [AutoModelForCausalLM])[0].from_config(built)  # type: ignore[no-untyped-call]
    except Exception as error:  # whatever the class of a model raises of its configuration
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        raise DataError(
            f"Cannot plan {name} (model_type {kind!r}), because transformers does not build it: {reason}.",
            "Plan its number of parameters: narrowgauge plan state --params.",
        ) from error
    return _Built(model, built.get_text_config(), name, source).architecture()


class _Built:
    """A model on the meta device, and the architecture that its modules and parameters show."""

    def __init__(self, model: Any, config: Any, name: str, source: str) -> None:
        self.model, self.config, self.name, self.source = model, config, name, source
        self.total = sum(value.numel() for value in model.parameters())
        self.layers = self._layers()

    def _size(self, *names: str, default: int = 0) -> int:
        values = (getattr(self.config, name, None) for name in names)
        return int(next((value for value in values if isinstance(value, int) and value), default))

    def _layers(self) -> list[Any]:
        """Return the modules of the text decoder's layers."""
        import torch.nn as nn

        count = self._size("num_hidden_layers", "n_layer", "num_layers")
        lists = ((name, list(m)) for name, m in self.model.named_modules() if isinstance(m, nn.ModuleList))
        return next((layers for name, layers in lists if len(layers) == count and not _OUTSIDE.search(name)), [])

    def architecture(self) -> Architecture:
        import torch.nn as nn

        embedding, head = self.model.get_input_embeddings(), self.model.get_output_embeddings()
        heads, hidden = self._size("num_attention_heads", "n_head", "num_heads"), self._size("hidden_size", "n_embd")
        is_recurrent = any(_RECURRENT.search(n) for layer in self.layers for n, _ in layer.named_parameters())
        if is_recurrent or not (self.layers and heads and embedding is not None and head is not None):
            return of_size(self.total, self.name)  # no decoder of attention layers: its state alone is planned
        latent = self._latent()
        head_dim = self._size("head_dim", default=hidden // heads)
        groups: dict[tuple[Any, ...], int] = {}
        vectors = 0
        for layer in self.layers:
            matrices, others = self._layer(layer, hidden)
            vectors += others
            for key in matrices:
                groups[key] = groups.get(key, 0) + 1
        mixture = self._mixture(groups)
        share = mixture.experts_per_token / mixture.num_experts if mixture else 1.0
        matmuls = [
            Matmul(n, i, o, count * copies, part, split, share if n.startswith("experts.") else 1.0, bias)
            for (n, i, o, part, split, bias, copies), count in groups.items()
        ]
        vocab = head.weight.shape[0]
        has_bias = getattr(head, "bias", None) is not None
        matmuls.append(Matmul("lm_head", hidden, vocab, 1, "head", "column", 1.0, has_bias))
        tables = [
            m for n, m in self.model.named_modules() if isinstance(m, nn.Embedding) and re.search("wpe|position", n)
        ]
        positions = sum(m.weight.shape[0] for m in tables if m.weight.shape[1] == hidden)
        inputs = [m for m in matmuls if m.part == "attention" and m.in_features == hidden and m.split == "column"]
        kv_heads = (sum(m.out_features * m.count for m in inputs) / len(self.layers) / head_dim - heads) / 2
        mlp = [m for m in matmuls if m.part in ("mlp", "experts") and m.name != "router"]
        downs = [m for m in mlp if m.split == "row"]
        ups = sum(m.out_features * m.count for m in mlp if m.split == "column")
        is_gated = ups > 1.5 * sum(m.in_features * m.count for m in downs)
        modules = list(self.layers[0].named_modules())
        norms = [m for n, m in modules if "norm" in type(m).__name__.lower() and not _HEAD_NORM.search(n)]
        wide = [m for m in norms if not list(m.parameters()) or max(p.numel() for p in m.parameters()) == hidden]
        window, window_share = self._window()
        result = Architecture(
            self.name,
            len(self.layers),
            hidden,
            vocab,
            tuple(matmuls),
            vectors,
            num_heads=heads,
            num_kv_heads=round(kv_heads)
            if not latent and kv_heads >= 1
            else self._size("num_key_value_heads", default=heads),
            query_dim=latent.plain_dim + latent.rotary_dim if latent else head_dim,
            value_dim=latent.value_dim if latent else head_dim,
            intermediate_size=next(
                (m.in_features for m in downs if "." not in m.name), downs[0].in_features if downs else 0
            ),
            is_gated=is_gated,
            tie_embeddings=head.weight is embedding.weight,
            positions=positions,
            norm=self._norm_kind(wide or norms),
            norms_per_layer=len(wide),
            head_norms=self._head_norms(head_dim),
            activation=self._activation("silu" if is_gated else "gelu"),
            has_fused_inputs=len({m.name for m in inputs}) == 1 and not latent,
            window=window,
            window_share=window_share,
            mixture=mixture,
            latent=latent,
            source=self.source,
            left_out="parts beside the text decoder"
            if any(_OUTSIDE.search(n) for n, _ in self.model.named_modules())
            else "",
        )
        # Final norms, an embedding's norm, a vision tower: whatever is not counted yet.
        return replace(result, outer_vectors=self.total - result.num_parameters)

    def _layer(self, layer: Any, hidden: int) -> tuple[list[tuple[Any, ...]], int]:
        """Return the matrices of a layer as keys of equal ones, and its other parameters."""
        keys: list[tuple[Any, ...]] = []
        vectors = 0
        weights = {
            n: p for n, p in layer.named_parameters() if p.ndim in (2, 3) and not re.search(r"norm|bias|conv", n)
        }
        counted = 0
        attention = [
            n for n in weights if re.search(r"attn|attention|mixer", n.rpartition(".")[0]) and weights[n].ndim == 2
        ]
        for name, value in weights.items():
            module, leaf = name.rpartition(".")[0], name.removesuffix(".weight").rpartition(".")[2]
            if value.ndim == 3:
                is_down = "down" in leaf or leaf == "w2"
                other = next((s for s in value.shape[1:] if s != hidden), hidden)
                sizes = (other, hidden, "row") if is_down else (hidden, other, "column")
                bias = dict(layer.named_parameters()).get(f"{name}_bias")
                # Gate and up are two matmuls, as in presets, so that a model has one answer however it is named.
                names = ["gate_proj", "up_proj"] if leaf == "gate_up_proj" else [leaf]
                for part_name in names:
                    out = sizes[1] // len(names)
                    keys.append(
                        (f"experts.{part_name}", sizes[0], out, "experts", sizes[2], bias is not None, value.shape[0])
                    )
            else:
                out, inner = (
                    value.shape[::-1] if "Conv1D" in type(layer.get_submodule(module)).__name__ else value.shape
                )
                bias = getattr(layer.get_submodule(module), "bias", None)
                part: Part = "attention" if name in attention else "mlp"
                split: Split = "column"
                if part == "attention" and name == attention[-1]:
                    split = "row"
                elif part == "attention" and re.search(r"_a_proj", leaf):
                    split = "none"
                elif part == "mlp" and out == hidden and (inner != hidden or "down" in leaf):
                    split = "row"
                if part == "mlp" and re.search(r"gate$|router", module) and "shared" not in module:
                    leaf, part, split = "router", "experts", "none"
                elif "shared" in module:
                    leaf, split = f"shared.{leaf}", split if min(value.shape) > 1 else "none"
                keys.append((leaf, inner, out, part, split, bias is not None, 1))
            counted += value.numel() + (bias.numel() if bias is not None else 0)
        vectors = sum(p.numel() for p in layer.parameters()) - counted
        return keys, vectors

    def _mixture(self, groups: Mapping[tuple[Any, ...], int]) -> Mixture | None:
        downs = [(key, count) for key, count in groups.items() if key[0].startswith("experts.") and key[4] == "row"]
        if not downs:
            return None
        (_, size, _, _, _, _, experts), layers = downs[0]
        shared = sum(key[1] for key in groups if key[0].startswith("shared.") and key[4] == "row")
        return Mixture(experts, self._size(*_EXPERTS_PER_TOKEN, default=1), size, layers, shared)

    def _latent(self) -> LatentAttention | None:
        if not self._size("kv_lora_rank"):
            return None
        sizes = (self._size(n) for n in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
        return LatentAttention(self._size("q_lora_rank") or None, *sizes)

    def _window(self) -> tuple[int | None, float]:
        window = self._size("sliding_window", "attention_chunk_size", "window_size") or None
        if window is None or getattr(self.config, "use_sliding_window", True) is False:
            return None, 1.0
        kinds = getattr(self.config, "layer_types", None) or getattr(self.config, "attention_layers", None)
        share = sum(k not in ("full_attention", "global") for k in kinds) / len(kinds) if kinds else 1.0
        return (window, share) if share else (None, 1.0)

    def _activation(self, default: str) -> str:
        names = ("hidden_activation", "hidden_act", "activation_function", "activation")
        return str(next((v for n in names if isinstance(v := getattr(self.config, n, None), str)), default))

    def _norm_kind(self, norms: list[Any]) -> Norm:
        kind = type(norms[0]).__name__ if norms else "RMSNorm"
        if kind.startswith(_FLOAT32_NORMS):
            return "rms-float32"
        return "rms" if "RMS" in kind or kind.startswith("T5") else "layer"

    def _head_norms(self, head_dim: int) -> Literal["none", "head", "all"]:
        norms = [m for n, m in self.layers[0].named_modules() if _HEAD_NORM.search(n)]
        sizes = [math.prod(p.shape) for m in norms for p in m.parameters()]
        return "none" if not norms else "head" if not sizes or sizes[0] <= head_dim else "all"
