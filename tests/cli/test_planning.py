"""``narrowgauge plan``: one question at a time, answers for people, pipes and programs, and one line for every mistake."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import narrowgauge
from narrowgauge.cli.main import main
from narrowgauge.cli.planning import QUESTIONS
from narrowgauge.trainer.config import TrainConfig

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

EIGHT = ("--model", "llama-8b", "--chip", "H100-SXM", "--chips", "8", "--recipe", "bfloat16/word")
CLUSTER = """
interconnect_gbit_per_second = 1600
[[nodes]]
count = 2
chip = "A100-SXM4-80GB"
[[nodes]]
count = 1
chip = "H100-SXM"
"""


def plan(*words: str) -> Result:
    return CliRunner().invoke(main, ["plan", *words], prog_name="narrowgauge")


def answer(*words: str) -> str:
    result = plan(*words)
    assert result.exit_code == 0, result.output
    return result.output


def refusal(*words: str) -> str:
    result = plan(*words)
    assert result.exit_code == 2 and len(result.output.splitlines()) == 1, result.output
    return result.output


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        ((), "No question was asked"),
        (("--model", "llama-8b", "--params", "1e9"), "--model and --params ask different questions"),
        (("--measured", "1:1d,2:1d", "--chip", "H100-SXM"), "--chip does not go with --measured"),
        (("--params", "1e9", "--tokens", "1e9"), "--tokens does not go with --params"),
        (("--calibrate",), "needs runs"),
        (("--model", "llama-8b", "run"), "unexpected argument (run)"),
        (("--params", "0"), "--params"),
        (("--params", "nan"), "--params"),
        (("--params", "1e9", "--chips", "eight"), "'eight' is no list of numbers"),
        (("--params", "1e9", "--chips", "0"), "'0' is no list of numbers"),
        (("--model", "llama-9b", "--chip", "H100-SXM"), "Did you mean"),
        (("--model", "llama-8b", "--chip", "H100"), "2 names begin with it"),
        (("--model", "llama-8b", "--chip", "H900-SXM"), "Did you mean"),
        (("--model", "llama-8b", "--chip", "H100-SXM", "--chips", "12"), "12 chips"),
        (("--model", "llama-8b", "--cluster", "no.toml"), "no.toml"),
        (("--model", "llama-8b", "--chip", "H100-SXM", "--layout", "tensr=2"), "Did you mean 'tensor'"),
        (("--model", "llama-8b", "--chip", "H100-SXM", "--recipe", "bfloat16/wurd"), "Did you mean"),
        (("--model", "gpt2-124m", "--chip", "H100-SXM", "--sequence-length", "4096"), "1,024 positions"),
        (("--model", "llama-8b", "--chip", "H100-SXM", "--days", "14"), "a run whose tokens are not known"),
        (("--model", "llama-8b", "--chip", "H100-SXM", "--days", "0", "--tokens", "1e9"), "--days"),
        (
            ("--model", "llama-8b", "--chip", "H100-SXM", "--budget", "9", "--tokens", "1e9"),
            "no price of a chip is known",
        ),
        (("--model", "llama-8b", "--chip", "H100-SXM", "--largest", "contxt"), "contxt"),
        (("--model", "llama-8b", "--chip", "H100-SXM", "--base", "nf4"), "--base goes with --lora"),
        (("--model", "llama-8b", "--chip", "H100-SXM", "--lora", "8", "--toml"), "which runs no adapters"),
        (("--model", "llama-8b", "--chip", "H100-SXM", "--optimizer", "muon", "--toml"), "steps with AdamW"),
        ((*EIGHT, "--largest", "context", "--toml"), "which has 8,192 positions"),
        (("--model", "llama-8b", "--chip", "H100-SXM", "--lora", "0"), "--lora"),
        (("--model", "llama-8b", "--chip", "H100-SXM", "--optimizer", "moun"), "moun"),
        (("--params", "1e9", "--lora", "8"), "--lora does not go with --params"),
        (("--params", "1e9", "--price", "8"), "--price does not go with --params"),
        (("--measured", "128:10d"), "128 chips only"),
        (("--measured", ""), "needs times or run folders"),
    ],
)
def test_a_mistake_costs_one_line(words: tuple[str, ...], fault: str) -> None:
    assert fault in refusal(*words)


def test_the_state_of_a_number_of_parameters() -> None:
    text = answer("--params", "10e9", "--recipe", "bfloat16/master,bfloat16/split,bfloat16/states8")
    assert all(f"{size} GB" in text for size in (160, 120, 60))


def test_a_question_is_answered_in_json_too() -> None:
    found = json.loads(answer(*EIGHT, "--tokens", "1e12", "--dollars-per-hour", "2", "--json"))
    best = found["options"][0]
    assert best["fits"] is True and best["days"] > 0
    assert best["cost"] == pytest.approx(best["days"] * 24 * 8 * 2)
    assert found["question"]["num_parameters"] == 8_030_261_248 and found["answer"]


def test_limits_sizes_and_states_in_json() -> None:
    eight = EIGHT[:4] + EIGHT[6:]
    found = json.loads(answer(*eight, "--tokens", "300e9", "--days", "14", "--price", "2.5", "--json"))
    assert found["question"]["deadline_days"] == 14
    best = found["options"][0]
    assert best["days"] <= 14 and best["dollars_per_token"] > 0 and best["kilowatt_hours"] > 0
    low, high = best["confidence"]["joules_per_token"]
    assert low < best["joules_per_token"] < high
    longest = json.loads(answer(*EIGHT, "--largest", "context", "--json"))["options"][0]
    assert longest["sequence_length"] > 131_072
    adapted = json.loads(answer(*EIGHT, "--lora", "16", "--base", "nf4", "--optimizer", "muon", "--json"))["question"]
    assert adapted["adapters"] == {"rank": 16, "base": "nf4"} and adapted["optimizer"] == "muon"
    assert adapted["num_trained_parameters"] < 0.01 * adapted["num_parameters"]


def test_explain_prints_terms_with_their_sources() -> None:
    text = answer(*EIGHT, "--explain")
    assert "4 of 5 times" in text and "source" in text and "bfloat16" in text
    assert "Energy of 1B tokens" in text and "the rest of their nodes" in text


def test_settings_are_read_by_train(tmp_path: Path) -> None:
    printed = answer(*EIGHT, "--toml", "--tokens", "1e9")
    config = TrainConfig.from_dict(tomllib.loads(printed))
    assert config.model == "llama-8b" and config.validated().recipe.name == "bfloat16/word"
    file = tmp_path / "plan.toml"
    answer(*EIGHT, "--toml", str(file), "--tokens", "1e9")
    assert file.read_text(encoding="utf-8") == printed


def test_a_page_is_written(tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    assert str(page) in answer(*EIGHT, "--html", str(page))
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")


def test_a_cluster_of_two_generations(tmp_path: Path) -> None:
    file = tmp_path / "mixed.toml"
    file.write_text(CLUSTER, encoding="utf-8")
    found = json.loads(answer("--model", "llama-8b", "--cluster", str(file), "--recipe", "bfloat16/word", "--json"))
    assert found["options"][0]["chips"] == 24 and found["options"][0]["cluster"] == "mixed"
    assert "together" in refusal("--model", "llama-8b", "--cluster", str(file), "--chips", "8")


def test_measured_times_are_read() -> None:
    text = answer("--measured", "128:10d,256:7d", "--at", "512,64")
    assert "768 d / N + 4 d" in text and "5.5 d" in text and "16 d" in text
    assert json.loads(answer("--measured", "128:10d,256:7d", "--json"))["is_checked"] is False


LAUNCH = """
model = "llama-8b"
recipe = "bfloat16/word"
batch_size = 256
sequence_length = 4096
gradient_accumulation_steps = 128
[cluster]
chip = "H100-SXM"
chips = 16
interconnect_gbit_per_second = 3200
"""


def test_a_launch_that_became_slower(tmp_path: Path) -> None:
    before, after = tmp_path / "before.toml", tmp_path / "after.toml"
    before.write_text(LAUNCH, encoding="utf-8")
    after.write_text(LAUNCH.replace("3200", "100"), encoding="utf-8")
    text = answer("--regression", str(before), str(after))
    assert "slower" in text and "communication" in text and "interconnect_gbit_per_second 3200 → 100" in text
    assert json.loads(answer("--regression", str(before), str(after), "--json"))
    after.write_text(LAUNCH.replace("[cluster]", "[machines]"), encoding="utf-8")
    assert "where it runs" in refusal("--regression", str(before), str(after))


def test_a_machine_that_was_not_calibrated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NARROWGAUGE_CACHE", str(tmp_path))
    assert "--calibrate RUN…" in refusal("--model", "llama-1m", "--chip", "here")
    assert "neither a run folder nor a profile" in refusal("--calibrate", str(tmp_path / "none"))


def test_help_names_every_flag_of_every_question() -> None:
    text = answer("--help")
    flags = {name for names in QUESTIONS.values() for name in names} | set(QUESTIONS)
    assert not [name for name in flags if f"--{name.replace('_', '-')}" not in text]


def test_a_plan_needs_no_torch() -> None:
    code = (
        "import sys\nfrom narrowgauge.cli.main import main\n"
        "try:\n    main(['plan', *sys.argv[1:]])\nexcept SystemExit as end:\n    assert not end.code, end.code\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(narrowgauge.__file__).parents[1])}
    words = [sys.executable, "-c", code, *EIGHT, "--explain"]
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
