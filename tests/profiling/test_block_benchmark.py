"""Steps and blocks that are timed: the trainer's own step, and a block called just as its model calls it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from narrowgauge.matmul.linear import Linear
from narrowgauge.profiling.measurement import blocks_of, many_versions, training_block, training_session
from narrowgauge.spec.notation import parse, parse_table
from narrowgauge.trainer.config import TrainConfig
from narrowgauge.trainer.session import Session
from narrowgauge.trainer.step import train_step

SHAPES = {
    "llama": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
              "num_key_value_heads": 2, "max_position_embeddings": 64},
    "gpt2": {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64},
}  # fmt: skip
BASE = parse("bfloat16/word")
NARROW = parse("int8-row/word")


@pytest.fixture(params=SHAPES)
def session(request: pytest.FixtureRequest, tmp_path: Path, native_formats: None) -> Session:
    shape = {"model_type": request.param, "vocab_size": 280, **SHAPES[request.param]}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    config = TrainConfig(model=str(tmp_path), recipe=BASE, batch_size=2, sequence_length=16, lr=1e-3)
    return training_session(config, compile=False)


def test_the_step_trains(session: Session) -> None:
    before = [parameter.detach().clone() for parameter in session.model.parameters()]
    losses = [train_step(session)["loss"] for _ in range(2)]
    assert all(5 < loss < 6.5 for loss in losses), "random tokens: near log(280)"
    moved = [not torch.equal(old, new) for old, new in zip(before, session.model.parameters(), strict=True)]
    assert any(moved)


def test_a_block_is_called_as_its_model_calls_it(session: Session) -> None:
    found: list[torch.Tensor] = []
    name, module = blocks_of(session.model)[0]
    block = training_block(session, BASE, compile=False)
    handle = module.register_forward_hook(lambda _, __, output: found.append(output))
    session.loss(session.batch()[0])
    handle.remove()
    output = found[0][0] if isinstance(found[0], tuple) else found[0]
    assert torch.equal(block.output(), output)
    assert session.model.get_submodule(name) is module, "the model has its own block back"


def test_a_narrow_block_differs_in_its_linear_layers_alone(session: Session) -> None:
    block = training_block(session, NARROW, compile=False)
    narrow = [name for name, layer in block.module.named_modules() if isinstance(layer, Linear)]
    assert len(narrow) == (7 if "mlp.gate_proj" in dict(block.module.named_modules()) else 4)
    assert not any(isinstance(layer, Linear) for layer in session.model.modules())
    plain = training_block(session, BASE, compile=False).output()
    output = block.output()
    assert 0 < (output - plain).norm() < 0.1 * plain.norm()


def test_overrides_go_by_the_names_in_the_whole_model(session: Session) -> None:
    name, _ = blocks_of(session.model)[0]
    table = {"recipe": "int8-row/word", "override": [{"pattern": f"{name}.mlp.*", "compute": "bfloat16"}]}
    block = training_block(session, parse_table(table), compile=False)
    rows = {own: layer.compute.name for own, layer in block.module.named_modules() if isinstance(layer, Linear)}
    assert {own.split(".")[0] for own, row in rows.items() if row == "int8-row"} <= {"self_attn", "attn"}
    assert "int8-row" in rows.values()


def test_a_pass_makes_every_gradient_and_leaves_none(session: Session) -> None:
    block = training_block(session, NARROW, compile=False)
    seen: list[int] = []
    for place, leaf in enumerate(block.leaves):
        leaf.register_post_accumulate_grad_hook(lambda _, place=place: seen.append(place))
    block.pass_through()
    assert sorted(seen) == list(range(len(block.leaves)))
    assert len(block.leaves) == len(list(block.module.parameters())) + 1, "the stream too"
    assert all(leaf.grad is None for leaf in block.leaves)


@pytest.mark.parametrize("own", [8, 64, 200])
def test_the_compilers_limit_is_its_own_again_afterwards(own: int) -> None:
    with torch._dynamo.config.patch(recompile_limit=own):
        with many_versions():
            assert torch._dynamo.config.recompile_limit == max(own, 64), "never fewer than were allowed before"
        assert torch._dynamo.config.recompile_limit == own


def test_a_model_without_blocks_has_none() -> None:
    assert blocks_of(nn.Sequential(nn.Linear(2, 2))) == []
