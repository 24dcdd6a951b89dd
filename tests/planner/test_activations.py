"""What a layer keeps for backward: the formulas against the tensors that autograd saves in layers
that run.
"""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from transformers import AutoConfig, masking_utils

from narrowgauge.assembly.preparation import narrow_linears
from narrowgauge.matmul.scopes import compute_scope
from narrowgauge.planner.activations import layer_bytes
from narrowgauge.planner.built_models import of_config
from narrowgauge.planner.layouts import Layout
from narrowgauge.planner.memory import Stage, loss_terms, stages_of, worst_moment
from narrowgauge.planner.model import read_model
from narrowgauge.planner.program import read_program
from narrowgauge.planner.step_time import stage_layers
from narrowgauge.spec.notation import parse
from narrowgauge.spec.recipes import Recipe
from narrowgauge.trainer import language_model
from planner.jobs import LLAMA, estimate

_LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 640,
    "vocab_size": 512, "pad_token_id": 0,
}  # fmt: skip
_CONFIGS: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "gpt2": {
        "model_type": "gpt2",
        "n_embd": 256,
        "n_head": 8,
        "n_positions": 256,
        "vocab_size": 512,
    },
    "qwen3": {**_LLAMA, "model_type": "qwen3", "head_dim": 48},
    "olmo2": {**_LLAMA, "model_type": "olmo2"},
    "starcoder2": {**_LLAMA, "model_type": "starcoder2"},
    "gemma": {**_LLAMA, "model_type": "gemma", "head_dim": 32},
    "mixtral": {
        **_LLAMA,
        "model_type": "mixtral",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
}


def _saved_bytes(config: dict[str, Any], recipe: Recipe) -> int:
    """Bytes that autograd saves in the layers of a model for 2 × 64 tokens, besides parameters.

    Tensors are fake: they have shapes and no memory. Those of a mixture are real, since the tokens
    of each expert are data.
    """
    fake: Any = FakeTensorMode(allow_non_fake_inputs=True)
    with nullcontext() if "num_local_experts" in config else fake:
        model = language_model.drawn(AutoConfig.for_model(**config), 0)
        for parameter in model.parameters():
            parameter.data = parameter.data.to(getattr(torch, recipe.storage.visible))
        narrow_linears(model, recipe, 0)
        parameters = set()
        for tensor in (*model.parameters(), *model.buffers()):
            parameters.add(tensor.untyped_storage()._cdata)
        sizes: dict[int, int] = {}
        alive: list[Tensor] = []  # else another tensor may get the place of one

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage._cdata not in parameters:
                sizes[storage._cdata] = storage.nbytes()
                alive.append(tensor)
            return tensor

        # Fake positions have no values that say whether sequences are packed; ours are not, so no
        # mask is made.
        unpacked = patch.object(masking_utils, "find_packed_sequence_indices", lambda _: None)
        with (
            unpacked,
            saved_tensors_hooks(pack, lambda tensor: tensor),
            compute_scope(recipe, torch.device("cpu")),
        ):
            model.base_model(input_ids=torch.zeros(2, 64, dtype=torch.int64), use_cache=False)
    return sum(sizes.values())


# A compiler merges the casts of layers that share an input, as planned; run one by one, each layer
# keeps codes of its own.
_RECIPES = (
    "float32/float32",
    "bfloat16/word",
    "bfloat16/float32",
    "float8-block/split",
    "float8-row/float32",
)
_CASES = [("llama", recipe) for recipe in _RECIPES]
_CASES += [("gpt2", recipe) for recipe in ("bfloat16/word", "bfloat16/float32", "int8-row/word")]
_CASES += [
    (family, "bfloat16/word") for family in ("qwen3", "olmo2", "starcoder2", "gemma", "mixtral")
]
_CASES += [("qwen3", "bfloat16/float32")]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("family", "name"), _CASES)
def test_a_layer_keeps_what_autograd_saves(family: str, name: str) -> None:
    """What two layers save beyond one."""
    config = _CONFIGS[family]
    recipe = parse(name)
    key = "n_layer" if family == "gpt2" else "num_hidden_layers"
    single, two = (_saved_bytes({**config, key: layers}, recipe) for layers in (1, 2))
    planned = layer_bytes(
        of_config({**config, key: 2}, family), recipe, read_program("kernels=eager")
    )
    # Gemma keeps a gain, and a mixture's lists of places are not all counted.
    rel = 3e-3 if family in ("gemma", "mixtral") else 1e-4
    assert planned.per_token + planned.casts / 128 == pytest.approx((two - single) / 128, rel=rel)


def test_fused_gpt_layers_keep_what_was_published() -> None:
    """34 bytes per token and feature, of which two are dropout masks: Korthikanti et al., arXiv
    2205.05198, equation 1.
    """
    gpt = read_model("gpt3-175b")
    flash = layer_bytes(gpt, parse("bfloat16/master"), read_program("kernels=fused")).per_token
    assert flash / gpt.hidden_size == pytest.approx(34 - 2, rel=0.01)


def test_codes_count_one_byte() -> None:
    """Inputs of the projections and of the MLP halve, the product's too; the attention's result is
    kept twice.
    """
    wide, narrow = (
        layer_bytes(LLAMA, parse(f"{c}/word")).per_token for c in ("bfloat16", "float8-tensor")
    )
    saved = 2 * LLAMA.hidden_size + LLAMA.intermediate_size - LLAMA.num_heads * LLAMA.value_dim
    assert wide - narrow == pytest.approx(saved, rel=1e-3)


def test_a_stage_holds_no_more_micro_batches_than_there_are_and_only_the_last_has_logits() -> None:
    layout = Layout(pipeline=4, zero=0, micro_batches=2)
    assert stages_of(LLAMA, layout) == [(0, 8, 16), (3, 8, 8)]
    job = estimate(layout=layout)
    assert [bool(loss_terms(job, Stage(stage, 8, 8))) for stage in (0, 3)] == [False, True]
    # 31 layers, embedding and head are 33 groups: nine in the largest stage, in memory and in time.
    shallow = replace(LLAMA, layers=(replace(LLAMA.layers[0], count=31),))
    stages = stages_of(shallow, layout)
    assert [stage[:2] for stage in stages] == [(0, 8), (1, 9), (3, 8)]
    assert stage_layers(31, 4) == (9, False)
    for num_layers, num_stages in itertools.product(range(1, 40), range(2, 9)):
        largest, has_head = stage_layers(num_layers, num_stages)
        shorter = 0 if has_head else min(2, num_stages - 1)
        assert has_head == (num_layers % num_stages == 0)
        if (
            num_layers > num_stages
        ):  # the fewest layers with which all stages together hold the model
            assert 0 <= num_stages * largest - shorter - num_layers < num_stages
    for zero in (1, 2, 3):  # a layer's gradients are among the stage's, where weights are sharded
        layout = Layout(shard=2, pipeline=2, zero=zero, micro_batches=2)
        moment = worst_moment(estimate(layout=layout, length=64), Stage(0, 16, 1))
        assert bool(moment.of("gradients of a layer")) == (zero < 3)
    for chips in (1, 8):
        memory = estimate(layout=Layout(shard=chips)).memory
        assert bool(memory.of("communication buffers")) == (chips > 1)
