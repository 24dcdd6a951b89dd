"""Exports of a run load in Hugging Face with the same bits, and overwrite nothing."""

import json
import warnings
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from narrowgauge.trainer import checkpoints
from narrowgauge.trainer import train as loop
from narrowgauge.trainer.export import export
from trainer.tiny_runs import call, trained

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def run(place: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(place, tmp_path_factory.mktemp("run") / "run", steps=2)


def test_an_export_is_the_model_bit_for_bit_and_a_model_to_train(run, place, tmp_path):
    session = loop.load(checkpoints.require(run)[0])
    out = export(run, tmp_path / "deep" / "out")
    loaded = AutoModelForCausalLM.from_pretrained(out)
    assert loaded.dtype == torch.bfloat16
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    for name, value in session.model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name
    assert [path.name for path in out.parent.iterdir()] == ["out"]
    tokenizer = AutoTokenizer.from_pretrained(out)
    text = "def one(two):\n\treturn  'ü' , 3\n"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    for name in ("config", "generation_config"):
        table = json.loads((out / f"{name}.json").read_text())
        assert (table["eos_token_id"], table["use_cache"]) == (tokenizer.eos_token_id, True)
    trained(place, tmp_path / "run", model=str(out), steps=1)


def test_an_export_says_that_a_newer_checkpoint_is_damaged(place, tmp_path):
    run = trained(place, tmp_path / "run", steps=2, checkpoint_every=1)
    next(checkpoints.folders(run)[0].glob("*.distcp")).unlink()
    words = "step-00000002 is damaged: .*out has the weights of step-00000001"
    with pytest.warns(UserWarning, match=words):
        assert call("export", str(run), str(tmp_path / "out")).exit_code == 0
    assert warnings.formatwarning("one line", UserWarning, "file", 1) == "UserWarning: one line\n"
