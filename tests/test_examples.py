"""The examples run as they stand, and end in what they promise."""

import json
import re
import runpy
import sys
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from trainer.fixtures import place as place  # a fixture

EXAMPLES = Path(__file__).parents[1] / "examples"
FIRST_MINUTE = "--steps 3 --sequence-length 16 --batch-size 2 --eval-sequences 2 --seeds 2"
LAST_LINES = {
    "recorded_loop": "narrowgauge report mine",
    "many_ranks": r"1 ranks  gradient norm \d\.\d+  weights \w+",
    "own_rule": r"states8 +[67]\.\d bytes per parameter, .*; loss 0\.0\d+",
}
IN_FRAMEWORKS = {
    "jamba": r"step 40 loss [01]\.\d+",  # a minute
    "trl_sft": "28 adapters.*",
}


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def lines_of(name: str, capfd: pytest.CaptureFixture[str], *words: str) -> list[str]:
    """Run an example as a script, and return what it prints."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [f"{name}.py", *words])
        try:
            runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        except SystemExit as end:
            assert not end.code
    return capfd.readouterr().out.splitlines()


@pytest.mark.parametrize("name", LAST_LINES)
def test_an_example_ends_as_promised(name, capfd):
    words = ["mine"] if name == "recorded_loop" else []
    lines = lines_of(name, capfd, *words)
    assert re.fullmatch((LAST_LINES | IN_FRAMEWORKS)[name], lines[-1]), lines


@pytest.mark.frameworks
@pytest.mark.parametrize("name", IN_FRAMEWORKS)
def test_an_example_in_a_framework(name, capfd):
    test_an_example_ends_as_promised(name, capfd)


def test_fine_tune_prints_both_losses(
    place,  # noqa: F811
    capfd,
):
    Path("text.txt").write_text("the quick brown fox jumps over a lazy dog and sleeps. " * 400)
    config = AutoConfig.from_pretrained(place / "model")
    AutoModelForCausalLM.from_config(config).save_pretrained("model")
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(place / "tokens" / "tokenizer.json"))
    tokenizer.save_pretrained("model")
    lines = lines_of("fine_tune", capfd, "model", "text.txt", "3")
    assert [line.split(":")[0] for line in lines] == ["torch", "narrowgauge"]
    starts = {line.split()[1] for line in lines}
    assert len(starts) == 1 and all(float(line.split()[3]) < 20 for line in lines)


def test_first_minute_compares_three_recipes(
    place,  # noqa: F811
    capfd,
):
    data = f"--model {place / 'model'} --data {place / 'tokens'} --out here"
    printed = lines_of("first_minute", capfd, *f"{FIRST_MINUTE} {data}".split())
    rows = json.loads(Path("here/compare.json").read_text())
    assert [row["recipe"] for row in rows] == ["bfloat16/master", "bfloat16/word", "bfloat16/naive"]
    assert all(row["num_seeds"] == 2 for row in rows)
    page = Path(printed[-1]).read_text()
    assert all(row["recipe"] in page for row in rows)
