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
from narrowgauge.cli.planning import plan_group
from narrowgauge.trainer.config import TrainConfig

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

EIGHT = ("run", "--model", "llama-8b", "--chip", "H100-SXM", "--chips", "8", "--recipe", "bfloat16/word")
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
        (("regresion", "a", "b"), "Did you mean 'regression'"),
        (("--chip", "H100-SXM"), "Name the question first: narrowgauge plan run --chip …"),
        (("--at", "512"), "Name the question first: narrowgauge plan scaling --at …"),
        (("--html",), "Name the question first: narrowgauge plan run --html …"),
        (("--", "--model", "llama-8b"), "Name the question first: narrowgauge plan run --model …"),
        (("--chip", "--model", "llama-8b"), "Name the question first"),
        (("--html=a.html", "--chp"), "Name the question first"),
        (("former",), "No such command 'former'"),
        (("run",), "Missing option '--model'"),
        (("run", "--model", "llama-8b", "--params", "1e9"), "--params"),
        (("scaling", "1:1d,2:1d", "--chip", "H100-SXM"), "--chip"),
        (("state", "--params", "1e9", "--tokens", "1e9"), "--tokens"),
        (("calibrate",), "RUN…"),
        (("run", "--model", "llama-8b", "run"), "unexpected extra argument (run)"),
        (("state", "--params", "0"), "'0' is not a number of at least 1, such as 10e9"),
        (("state", "--params", "nan"), "--params"),
        (("state", "--params", "1e9", "--chips", "eight"), "'eight' is not a list of numbers"),
        (("state", "--params", "1e9", "--chips", "0"), "'0' is not a list of numbers"),
        (("run", "--model", "llama-9b", "--chip", "H100-SXM"), "Did you mean"),
        (("run", "--model", "llama-8b", "--chip", "H100"), "2 names begin with it"),
        (("run", "--model", "llama-8b", "--chip", "H900-SXM"), "Did you mean"),
        (("run", "--model", "llama-8b", "--chip", "H100-SXM", "--chips", "12"), "12 chips"),
        (("run", "--model", "llama-8b", "--cluster", "no.toml"), "no.toml"),
        (("run", "--model", "llama-8b", "--chip", "H100-SXM", "--layout", "tensr=2"), "Did you mean 'tensor'"),
        (("run", "--model", "llama-8b", "--chip", "H100-SXM", "--recipe", "bfloat16/wurd"), "Did you mean"),
        (("run", "--model", "gpt2-124m", "--chip", "H100-SXM", "--sequence-length", "4096"), "1,024 positions"),
        (("run", "--model", "llama-8b", "--chip", "H100-SXM", "--days", "14"), "a run whose tokens are not known"),
        (("run", "--model", "llama-8b", "--chip", "H100-SXM", "--days", "0", "--tokens", "1e9"), "--days"),
        (
            ("run", "--model", "llama-8b", "--chip", "H100-SXM", "--budget", "9", "--tokens", "1e9"),
            "no price of a chip is known",
        ),
        (("run", "--model", "llama-8b", "--chip", "H100-SXM", "--largest", "contxt"), "contxt"),
        (("run", "--model", "llama-8b", "--chip", "H100-SXM", "--base", "nf4"), "--base goes with --lora"),
        (("run", "--model", "llama-8b", "--chip", "H100-SXM", "--lora", "8", "--toml"), "which runs no adapters"),
        (
            ("run", "--model", "llama-8b", "--chip", "H100-SXM", "--optimizer", "adafactor", "--toml"),
            "leaves embedding and head to AdamW",
        ),
        ((*EIGHT, "--largest", "context", "--toml"), "which has 8,192 positions"),
        (("run", "--model", "llama-8b", "--chip", "H100-SXM", "--lora", "0"), "--lora"),
        (("run", "--model", "llama-8b", "--chip", "H100-SXM", "--optimizer", "moun"), "moun"),
        (("state", "--params", "1e9", "--lora", "8"), "--lora"),
        (("state", "--params", "1e9", "--price", "8"), "--price"),
        (("scaling", "128:10d"), "128 chips only"),
        (("scaling", ""), "Times or run folders are missing"),
    ],
)
def test_a_mistake_costs_one_line(words: tuple[str, ...], fault: str) -> None:
    assert fault in refusal(*words)


def test_the_state_of_a_number_of_parameters() -> None:
    text = answer("state", "--params", "10e9", "--recipe", "bfloat16/master,bfloat16/split,bfloat16/states8")
    assert all(f"{size} GB" in text for size in (160, 120, 60))


def test_a_question_is_answered_in_json_too() -> None:
    found = json.loads(answer(*EIGHT, "--tokens", "1e12", "--dollars-per-hour", "2", "--json"))
    best = found["options"][0]
    assert best["fits"] is True and best["days"] > 0
    assert best["cost"] == pytest.approx(best["days"] * 24 * 8 * 2)
    assert found["question"]["num_parameters"] == 8_030_261_248 and found["answer"]


def test_limits_sizes_and_states_in_json() -> None:
    eight = EIGHT[:5] + EIGHT[7:]
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
    assert "80 % interval" in text and "source" in text and "bfloat16" in text
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
    found = json.loads(
        answer("run", "--model", "llama-8b", "--cluster", str(file), "--recipe", "bfloat16/word", "--json")
    )
    assert found["options"][0]["chips"] == 24 and found["options"][0]["cluster"] == "mixed"
    assert "together" in refusal("run", "--model", "llama-8b", "--cluster", str(file), "--chips", "8")


def test_measured_times_are_read() -> None:
    text = answer("scaling", "128:10d,256:7d", "--at", "512,64")
    assert "768 d / N + 4 d" in text and "5.5 d" in text and "16 d" in text
    assert json.loads(answer("scaling", "128:10d,256:7d", "--json"))["is_checked"] is False


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
    text = answer("regression", str(before), str(after))
    assert "slower" in text and "communication" in text and "interconnect_gbit_per_second 3200 → 100" in text
    assert json.loads(answer("regression", str(before), str(after), "--json"))
    after.write_text(LAUNCH.replace("[cluster]", "[machines]"), encoding="utf-8")
    assert "where it runs" in refusal("regression", str(before), str(after))


def test_a_machine_that_was_not_calibrated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NARROWGAUGE_CACHE", str(tmp_path))
    assert "plan calibrate RUN…" in refusal("run", "--model", "llama-1m", "--chip", "here")
    assert "neither a run folder nor a profile" in refusal("calibrate", str(tmp_path / "none"))


def test_layers_are_what_profile_predicts() -> None:
    words = ("--model", "llama-8m", "--chip", "H100-SXM", "--json")
    found = json.loads(answer("layers", *words, "--recipe", "float8-row/word"))
    result = CliRunner().invoke(main, ["profile", *words, "--recipes", "float8-row/word"])
    assert found == json.loads(result.stdout) and found[0]["predicted"] is True
    assert "note: narrowgauge profile --chip is now narrowgauge plan layers;" in result.stderr


FORMER = {
    ("--model", *EIGHT[2:]): EIGHT,
    ("--params", "10e9", "--chips", "2"): ("state", "--params", "10e9", "--chips", "2"),
    ("--measured", "128:10d,256:7d", "--at", "512"): ("scaling", "128:10d,256:7d", "--at", "512"),
}


@pytest.mark.parametrize(("former", "words"), FORMER.items(), ids=[each[0] for each in FORMER.values()])
def test_the_former_spelling_gives_the_same_and_says_the_new_one(
    former: tuple[str, ...], words: tuple[str, ...]
) -> None:
    old, new = plan(*former, "--json"), plan(*words, "--json")
    assert old.exit_code == new.exit_code == 0 and old.stdout == new.stdout and not new.stderr
    assert old.stderr.startswith(f"note: narrowgauge plan {former[0]} is now narrowgauge plan {words[0]}")
    assert len(old.stderr.splitlines()) == 1


def test_former_spellings_of_two_files_and_of_runs(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(LAUNCH, encoding="utf-8")
    file = str(tmp_path / "a.toml")
    assert plan("--regression", file, file).stdout == plan("regression", file, file).stdout
    for former in (("--calibrate", "none"), ("--measured", "none", "nowhere")):
        found = plan(*former)
        assert found.exit_code == 2 and found.stderr.startswith(f"note: narrowgauge plan {former[0]} is now")


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (("--model", "llama-8b", "--params", "1e9"), "--model and --params ask different questions"),
        (("--measured", "1:1d,2:1d", "--chip", "H100-SXM"), "--chip does not go with --measured"),
        (("--params", "1e9", "--tokens", "1e9"), "--tokens does not go with --params"),
        (("--calibrate",), "Runs are missing"),
        (("--model", "llama-8b", "run"), "unexpected argument (run). (See narrowgauge plan --help.)"),
        (("--model", "llama-8b", "--chp", "a"), "No such option '--chp'. Did you mean '--chip'?"),
    ],
)
def test_a_mistake_in_the_former_spelling_costs_one_line(words: tuple[str, ...], fault: str) -> None:
    assert fault in refusal(*words)


def test_help_of_the_former_spelling_is_that_of_the_question() -> None:
    assert answer("--model", "llama-8b", "--help") == answer("run", "--help")
    assert answer("--help", "--params=1e9") == answer("state", "--help")


def test_recipes_are_named_by_either_spelling() -> None:
    words = ("layers", "--model", "llama-1m", "--chip", "H100-SXM", "--json")
    assert answer(*words, "--recipe", "float8-row/word") == answer(*words, "--recipes", "float8-row/word")
    shown = CliRunner().invoke(main, ["profile", "--help"]).output
    assert "--recipe, --recipes" in shown and "--chip" not in shown


def test_help_names_every_question() -> None:
    shown = set(plan_group.commands)
    assert shown == {"run", "state", "layers", "scaling", "regression", "calibrate"}
    assert all(f"\n  narrowgauge plan {name} " in answer() for name in ("run", "state", "scaling"))
    assert all(f"\n  {name} " in text for text in (answer("--help"), answer()) for name in shown)


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
