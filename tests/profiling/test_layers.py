"""The linear layers of a model: kinds by shape and place."""

from __future__ import annotations

import json
from pathlib import Path

from narrowgauge.profiling.layers import kinds_of
from narrowgauge.trainer import language_model

LLAMA = {
    "model_type": "llama", "vocab_size": 280, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "tie_word_embeddings": True,
}  # fmt: skip


def test_equal_layers_are_one_kind(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    kinds = kinds_of(language_model.build(str(tmp_path), seed=0))
    counts = [
        (kind.pattern.rpartition(".")[2], f"{kind.out_features} × {kind.in_features}", len(kind.names))
        for kind in kinds
    ]
    assert counts == [
        ("q_proj", "32 × 32", 3), ("k_proj", "16 × 32", 3), ("v_proj", "16 × 32", 3), ("o_proj", "32 × 32", 3),
        ("gate_proj", "48 × 32", 3), ("up_proj", "48 × 32", 3), ("down_proj", "32 × 48", 3), ("lm_head", "280 × 32", 1),
    ]  # fmt: skip
    assert kinds[0].names == tuple(f"model.layers.{number}.self_attn.q_proj" for number in range(3))
