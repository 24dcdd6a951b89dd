"""The command line: what it passes on, what it prints, and one line with status 2 for every mistake."""

from __future__ import annotations

import dataclasses
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import click
import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner, Result

import narrowgauge
import narrowgauge.trainer
from narrowgauge.cli import launching
from narrowgauge.cli.exit_status import open_streams
from narrowgauge.cli.flags import SECTIONS
from narrowgauge.cli.main import main
from narrowgauge.errors import ChipError, Terminated
from narrowgauge.runs.record import Run
from narrowgauge.runs.writer import RunWriter
from narrowgauge.spec import show
from narrowgauge.spec.notation import parse
from narrowgauge.trainer import resume_checks
from narrowgauge.trainer.config import TrainConfig, kind_of
from narrowgauge.trainer.experiment.definition import read_settings
from narrowgauge.trainer.exporting import MAX_FILE_BYTES

# The package that is tested, wherever a process is started.
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(narrowgauge.__file__).parents[1])}
TABLES = (
    "formats",
    "recipes",
    "aliases",
    "gathers",
    "scales",
    "storages",
    "reductions",
    "chips",
    "models",
    "frameworks",
)


def call(*words: str) -> Result:
    return CliRunner().invoke(main, list(words), prog_name="narrowgauge")


def run_process(*words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "narrowgauge", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd, env=ENVIRONMENT)


class Calls(list[tuple[Any, ...]]):
    """What was asked of a part of the trainer that stands in for the true one."""

    answer: Any = None

    def __init__(self) -> None:
        self.options: list[dict[str, Any]] = []

    def __call__(self, *words: Any, **options: Any) -> Any:
        self.append(words)
        self.options.append({name: value for name, value in options.items() if name != "screen"})
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Calls]:
    """Stand-ins for the trainer's verbs, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    found: dict[str, Calls] = {}
    for module, verbs in {"loop": ("train", "resume"), "exporting": ("export",), "text_sampling": ("sample",)}.items():
        stand_in = ModuleType(f"narrowgauge.trainer.{module}")
        for verb in verbs:
            found[verb] = Calls()
            setattr(stand_in, verb, found[verb])
        monkeypatch.setitem(sys.modules, stand_in.__name__, stand_in)
        monkeypatch.setattr(narrowgauge.trainer, module, stand_in, raising=False)
    monkeypatch.setattr(resume_checks, "require_resumable", lambda folder: Run(folder, {"config": {}}))
    monkeypatch.setattr(resume_checks, "require_trained", lambda folder: None)
    return found


def asked(calls: dict[str, Calls], *words: str) -> TrainConfig:
    result = call("train", *words)
    assert result.exit_code == 0, result.stderr
    [(config,)] = calls["train"]
    assert isinstance(config, TrainConfig)
    return config


def test_every_setting_is_a_flag_and_every_flag_a_setting() -> None:
    train = main.commands["train"]
    flags = {option.name: option for option in train.params if isinstance(option, click.Option)}
    fields = {field.name: field for field in dataclasses.fields(TrainConfig)}
    assert set(flags) - set(fields) == {"file", "watched", *launching.OPTIONS}
    for name, field in fields.items():
        option = flags[name]
        assert option.opts == [f"--{name.replace('_', '-')}"]
        assert bool(option.secondary_opts) == (kind_of(field) is bool)
        assert option.get_default(click.Context(train)) is None, "a flag that is not given must not overrule a file"
        assert option.help is not None and "[default: " in option.help


def test_the_help_of_train_shows_every_setting_in_one_section() -> None:
    shown = [name for names in SECTIONS.values() for name in names.split()]
    assert sorted(shown) == sorted([*(field.name for field in dataclasses.fields(TrainConfig)), *launching.OPTIONS])
    text = call("train", "--help").stdout
    places = [text.index(f"\n{title}:\n") for title in SECTIONS]
    assert places == sorted(places)
    for title, names in SECTIONS.items():
        section = text.partition(f"\n{title}:\n")[2].partition("\n\n")[0]
        flags = [f"--{name.replace('_', '-')}" for name in names.split()]
        assert [text.count(f"\n  {flag} ") for flag in flags] == [1] * len(flags)
        assert all(f"  {flag} " in section for flag in flags), title


def test_the_help_of_a_comparison_tells_its_own_defaults() -> None:
    told = {option.name: str(getattr(option, "help", "")) for option in main.commands["compare"].params}
    config, num_evals = read_settings({}, None)
    assert f"[default: steps / {num_evals}]" in told["eval_every"]
    usual = TrainConfig().to_dict()
    others = {name for name, value in config.to_dict().items() if value != usual.get(name)}
    assert others == {"keep_checkpoints"}
    assert f"[default: {config.keep_checkpoints}]" in told["keep_checkpoints"]
    assert "[default: 100]" in told["checkpoint_every"]


def test_without_flags_the_defaults_run(calls: dict[str, Calls]) -> None:
    assert asked(calls) == TrainConfig().validated()


def test_flags_reach_the_loop(calls: dict[str, Calls]) -> None:
    calls["train"].answer = Path("runs/here")
    config = asked(
        calls, "--model", "llama-8m", "--recipe", "bf16/exact", "--lr", "2e-3", "--batch-size", "12",
        "--gradient-accumulation-steps", "3", "--no-compile", "--activation-checkpointing", "--beta2", "0.99",
        "--max-grad-norm", "inf", "--stop-after", "7", "--out", "here",
    )  # fmt: skip
    expected = TrainConfig(
        model="llama-8m", recipe=parse("bf16/exact"), lr=2e-3, batch_size=12, gradient_accumulation_steps=3, compile=False,
        activation_checkpointing=True, beta2=0.99, max_grad_norm=float("inf"), stop_after=7, out="here",
    )  # fmt: skip
    assert config == expected.validated()


def test_the_run_folder_is_printed(calls: dict[str, Calls]) -> None:
    calls["train"].answer = calls["resume"].answer = Path("runs/here")
    assert call("train").stdout == call("resume", "runs/here").stdout == f"{Path('runs/here')}\n"


def test_a_flag_overrules_the_file_and_the_file_the_default(calls: dict[str, Calls], tmp_path: Path) -> None:
    (tmp_path / "my.toml").write_text("steps = 7\nbatch_size = 4\nactivation_checkpointing = true\ncompile = true\n")
    config = asked(calls, "--config", "my.toml", "--steps", "9", "--no-activation-checkpointing")
    assert (config.steps, config.batch_size, config.activation_checkpointing) == (9, 4, False)
    assert (config.compile, config.sequence_length) == (True, TrainConfig().sequence_length)


def test_resume_passes_on(calls: dict[str, Calls]) -> None:
    call("resume", "runs/a")
    call("resume", "runs/a", "--stop-after", "30")
    assert calls["resume"] == [(Path("runs/a"), None, False), (Path("runs/a"), 30, False)]
    assert calls["resume"].options == [{"chosen": {}}, {"chosen": {}}]
    call("resume", "runs/a", "--threads", "2", "--shard", "none", "--no-offload")
    assert calls["resume"].options[-1] == {"chosen": {"threads": 2, "shard": "none", "offload": False}}


def test_export_passes_on(calls: dict[str, Calls]) -> None:
    call("export", "runs/a", "out")
    call("export", "runs/a", "out", "--dtype", "float32", "--max-shard-size", "1.5 MB")
    assert calls["export"] == [
        (Path("runs/a"), Path("out"), "visible", MAX_FILE_BYTES),
        (Path("runs/a"), Path("out"), "float32", 1_500_000),
    ]


@pytest.mark.parametrize("size", ["0", "five", "5PB", "-1GB", "1e400", "9" * 40])
def test_a_size_that_is_none_costs_one_line(size: str, calls: dict[str, Calls]) -> None:
    refused = call("export", "runs/a", "out", "--max-shard-size", size)
    assert (refused.exit_code, refused.stderr.count("\n"), calls["export"]) == (2, 1, [])
    assert "is no size, such as 5GB or 500MB." in refused.stderr


def test_a_signal_while_the_command_is_loaded_costs_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(ModuleType):
        def __getattr__(self, name: str) -> Any:
            raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "narrowgauge.cli.main", Interrupted("narrowgauge.cli.main"))
    monkeypatch.delitem(sys.modules, "narrowgauge.__main__", raising=False)
    with pytest.raises(SystemExit) as left:
        runpy.run_module("narrowgauge", run_name="__main__")
    assert left.value.code == 130


def test_sample_passes_on_and_prints(calls: dict[str, Calls]) -> None:
    calls["sample"].answer = "def f():\n    pass"
    result = call("sample", "runs/a", "def ", "--tokens", "5", "--temperature", "0", "--seed", "3")
    assert calls["sample"] == [(Path("runs/a"), "def ", 5, 0.0, 3)]
    assert result.stdout == "def f():\n    pass\n"


@pytest.mark.parametrize("table", TABLES)
def test_tables_as_text_and_json(table: str) -> None:
    assert call("show", table).stdout == show.table(table).plain()
    rows = json.loads(call("show", table, "--json").stdout)
    assert [row["name"] for row in rows] == [row["name"] for row in show.rows(table)]


@pytest.mark.parametrize(
    ("words", "key", "value"),
    [
        (("format", "bf16"), "max", show.detail_format("bfloat16")["max"]),
        (("recipe", "bf16/word"), "bytes_per_param", 8.0),
        (("value", "0x1p-3"), "value", 0.125),
        (("value", "-0.5"), "value", -0.5),
        (("value", "-1e-8"), "value", -1e-8),
        (("value", "-inf"), "value", "-inf"),
    ],
)
def test_details_as_text_and_json(words: tuple[str, str], key: str, value: object) -> None:
    rows = json.loads(call("show", *words, "--json").stdout)
    assert rows[0][key] == value
    assert all("name" in row for row in rows)
    text = call("show", *words)
    assert text.exit_code == 0 and rows[0]["name"] in text.stdout


WRONG = [
    (("shwo",), "UsageError: ", "'shwo'"),
    (("show", "format"), "UsageError: ", "NAME"),
    (("show", "format", "bfloat17"), "FormatError: ", "Did you mean 'bfloat16'"),
    (("show", "value", "abc"), "FormatError: ", "'abc' is not a number"),
    (("show", "value", "--jsn"), "FormatError: ", "'--jsn' is not a number"),
    (("show", "recipe", "bfloat16/wrod"), "RecipeError: ", "Did you mean 'word'"),
    (("show", "recipe", "none"), "RecipeError: ", "Take 'float32/float32'"),
    (("show", "formats", "extra"), "UsageError: ", "extra"),
    (("train", "--recpie", "x"), "UsageError: ", "Did you mean '--recipe'"),
    (("train", "--steps", "many"), "UsageError: ", "'many'"),
    (("train", "--steps"), "UsageError: ", "--steps"),
    (("train", "--steps", "0"), "NarrowgaugeError: ", "at least 1"),
    (("train", "--lr", "0"), "NarrowgaugeError: ", "above 0"),
    (("train", "--lr", "nan"), "NarrowgaugeError: ", "above 0"),
    (("train", "--recipe", "bfloat16/wrod"), "RecipeError: ", "Did you mean 'word'"),
    (("train", "--model", "lama-1m"), "RecipeError: ", "Did you mean 'llama-1m'"),
    (("train", "--data", "nowhere"), "DataError: ", "No data in nowhere"),
    (("train", "--config", "nowhere.toml"), "DataError: ", "nowhere.toml does not exist"),
    (("train", "--batch-size", "8", "--gradient-accumulation-steps", "3"), "NarrowgaugeError: ", "cannot be split"),
    (("train", "--sequence-length", "4096"), "RecipeError: ", "2048 positions"),
    (("resume",), "UsageError: ", "DIR"),
    (("export", "a", "b", "--dtype", "int8"), "UsageError: ", "'int8'"),
    (("sample", "a", "b", "--tokens", "0"), "UsageError: ", "--tokens"),
]


@pytest.mark.parametrize(("words", "kind", "word"), WRONG)
def test_mistakes_cost_one_line_and_status_2(
    words: tuple[str, ...], kind: str, word: str, calls: dict[str, Calls], tmp_path: Path
) -> None:
    result = call(*words)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith(kind) and word in result.stderr
    assert result.stderr.count("\n") == 1
    assert not any(calls.values()), "nothing runs"
    assert not any(tmp_path.iterdir()), "nothing is written"


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None  # from here on, to import it is an error
from narrowgauge.cli import launching
from narrowgauge.cli.main import main
for line in sys.stdin:
    try:
        main(line.split(), prog_name="narrowgauge")
    except SystemExit as end:
        print(end.code, line.strip(), flush=True)
"""
REFUSED_AT_ONCE = [
    "train --recipe bfloat16/wrod", "train --model lama", "train --steps 0", "train --data nowhere", "train --recpie x",
    "train --batch-size 9223372036854775807", "train --model llama-8b --batch-size 1000000",
    "compare --recipes bf16 --batch-size 9223372036854775807", "profile --model llama-1m --recipes bf16 --batch-size 99999999999",
    "train --batch-size 7 --gradient-accumulation-steps 2", "train --tokenizer nowhere", "train --config nowhere",
    "resume nowhere", "resume nowhere --stop-after 0", "resume done", "resume odd",
    "compare --recipes bfloat16/wrod", "compare --recipes bfloat16/word --model lama", "compare --out nowhere",
    "compare --recipes bfloat16/word --steps 0", "compare --recipes bfloat16/word --data nowhere", "compare --recpies x",
    "export nowhere out", "export done done", "export done out", "sample nowhere x", "sample done x",
    "convert nowhere --recipe bfloat16/word", "convert done --recipe bfloat16/wrod",
    "convert done --recipe bfloat16/word --out done", "convert done --recipe bfloat16/word --optimizer nowhere",
    "profile --model lama --recipes bfloat16/word", "profile --model llama-1m --recipes bfloat16/wrod",
    "plan layers --model llama-1m --recipe bfloat16/word --chip h101", "report nowhere", "show recipe nowhere",
]  # fmt: skip


def test_what_is_refused_is_refused_before_torch_is_loaded(tmp_path: Path) -> None:
    with RunWriter.create(tmp_path / "done", {"config": {}}) as writer:
        writer.summary({"steps": 1, "val_loss": 2.0})
    RunWriter.create(tmp_path / "odd", {"config": {"nonsense": 1}}).close()
    found = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH], input="\n".join(REFUSED_AT_ONCE), capture_output=True, text=True,
        check=False, cwd=tmp_path, env=ENVIRONMENT,
    )  # fmt: skip
    assert found.stdout.splitlines() == [f"2 {line}" for line in REFUSED_AT_ONCE], found.stderr
    assert len(found.stderr.splitlines()) == len(REFUSED_AT_ONCE)


LONG = "x" * 3000


@pytest.mark.parametrize(
    "words",
    [
        (LONG,), ("train", "--recipe", LONG), ("train", "--model", LONG), ("train", "--data", LONG), ("train", "--steps", LONG),
        ("train", f"--{LONG}"), ("train", "--config", LONG), ("show", "recipe", LONG),
        ("show", "format", LONG), ("show", "value", LONG), ("resume", LONG), ("export", LONG, "out"), ("report", LONG),
        ("convert", LONG, "--recipe", "bf16/word"),
        ("plan", "layers", "--model", "llama-1m", "--recipe", "bf16/word", "--chip", LONG),
        ("train", "--recipe", " ".join(["x"] * 3000)),
    ],
    ids=lambda words: " ".join(words)[:20],
)  # fmt: skip
def test_long_values_are_cut_in_messages(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = call(*words)
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1), result.exception
    assert len(result.stderr) < 2500 and "…" in result.stderr and not any(tmp_path.iterdir())


def test_an_existing_folder_is_left_alone(calls: dict[str, Calls], tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "notes.txt").write_text("mine")
    result = call("train", "--out", "here")
    assert result.exit_code == 2 and "not empty" in result.stderr
    assert not calls["train"]


def test_errors_of_the_trainer_are_told_the_same_way(calls: dict[str, Calls]) -> None:
    calls["resume"].answer = ChipError("no CUDA device\n  here.", "Leave it out.")
    result = call("resume", "runs/a")
    assert (result.exit_code, result.stderr) == (2, "ChipError: no CUDA device here. Leave it out.\n")


@pytest.mark.parametrize(
    ("stop", "line"),
    [
        (KeyboardInterrupt(), "Interrupted: the command was stopped.\n"),
        (KeyboardInterrupt("saved at step 7."), "Interrupted: saved at step 7.\n"),
    ],
)
def test_an_interruption_is_one_line_and_status_130(
    stop: KeyboardInterrupt, line: str, calls: dict[str, Calls]
) -> None:
    calls["train"].answer = stop
    result = call("train")
    assert (result.exit_code, result.stderr) == (130, line)


def test_a_termination_is_one_line_and_status_143(calls: dict[str, Calls]) -> None:
    calls["train"].answer = Terminated("saved at step 7.")
    result = call("train")
    assert (result.exit_code, result.stderr) == (143, "Interrupted: saved at step 7.\n")


def test_resume_goes_on_with_changes_where_that_is_said(calls: dict[str, Calls]) -> None:
    calls["resume"].answer = Path("runs/here")
    assert call("resume", "runs/a", "--accept-changes").exit_code == 0
    assert calls["resume"] == [(Path("runs/a"), None, True)]


def test_a_fault_of_ours_is_not_hidden(calls: dict[str, Calls]) -> None:
    calls["train"].answer = ZeroDivisionError("ours")
    assert isinstance(call("train").exception, ZeroDivisionError)


@pytest.mark.parametrize("words", [(), ("show",), ("train", "--help")])
def test_help_is_no_mistake(words: tuple[str, ...]) -> None:
    result = call(*words)
    assert result.exit_code == 0
    assert result.stdout.startswith("Usage: narrowgauge") and result.stderr == ""


def test_the_command_alone_says_what_can_be_done_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    lines = call().stdout.splitlines()
    examples = [line.split()[1:] for line in lines if line.startswith("  narrowgauge ")]
    assert len(examples) == 4 and "The newest run here" not in lines[-1]
    for words in examples:
        command: click.Command = main
        while isinstance(command, click.Group):
            command = command.commands[words.pop(0)]
        command.make_context("example", words)  # a UsageError where an option or a value is none
    for age, name in enumerate(("new", "old")):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "run.toml").touch()
        os.utime(tmp_path / "runs" / name / "run.toml", (100 - age, 100 - age))
    new = Path("runs") / "new"
    assert call().stdout.endswith(f"The newest run here: narrowgauge resume {new}\n")
    (new / "summary.json").touch()
    assert call().stdout.endswith(f"The newest run here: narrowgauge report {new}\n")


# ── what a shell completes ────────────────────────────────────────────────────────────────────────────────────────────


def completed(line: str) -> list[str]:
    """What is offered for the last word of a line."""
    *words, last = line.split(" ")
    return [item.value for item in ShellComplete(main, {}, "narrowgauge", "_").get_completions(words, last)]


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("train --recipe float8-ro", {"float8-row", "float8-row-e5m2", "float8-rowwise"}),
        ("train --recipe bf16/sp", {"bf16/split", "bf16/split8"}),
        ("train --recipe float16/collage-", {"float16/collage-light", "float16/collage-plus"}),
        ("train --recipe float8/", {"float8/collage-light", "float8/collage-plus"}),
        ("compare --recipes bfloat16/master,bf16/wor", {"bfloat16/master,bf16/word"}),
        ("profile --recipes int8-row/com", {"int8-row/compact"}),
        ("convert a --recipe coll", {"collage-light", "collage-plus"}),
        ("show recipe bfloat16-m", {"bfloat16-mixed"}),
        ("compare --model llama-1", {"llama-1m", "llama-125m", "llama-1b", "llama-13b"}),
        ("profile --chip h2", {"H20-SXM5-96GB", "H200-SXM-141GB"}),
        ("show format e4m3", {"e4m3", "e4m3fn", "e4m3fnuz", "e4m3b11fnuz"}),
        ("train --schedule c", {"cosine", "constant"}),
        ("train --recipe mine", {"mine"}),  # no name of ours: the shell looks for a file
        ("train --recipe ./mine", {"./mine"}),
        ("profile --chip nothing", set()),
    ],
)
def test_a_shell_completes_names(line: str, offered: set[str]) -> None:
    assert set(completed(line)) == offered


def test_every_recipe_that_is_offered_is_one() -> None:
    first = completed("train --recipe ")
    assert {"bfloat16/", "nvfp4", "bf16/", "o2", "bfloat16-mixed", "fp8"} <= set(first)
    for name in first:
        if name.endswith("/"):  # no recipe alone
            assert all(map(parse, completed(f"train --recipe {name}")))
            continue
        assert parse(name)
        stored = completed(f"train --recipe {name}/")
        # What is followed by no storage is a whole recipe, and a file is looked for.
        assert stored == [f"{name}/"] or {parse(offer).compute for offer in stored} == {parse(name).compute}
    assert len(completed("train --recipe bfloat16/")) > 10


def test_what_is_no_name_is_left_to_the_shell() -> None:
    def kind(line: str) -> str:
        *words, last = line.split(" ")
        (item,) = ShellComplete(main, {}, "narrowgauge", "_").get_completions(words, last)
        return str(item.type)

    assert [kind("train --recipe mine"), kind("train --model folder"), kind("train --data text")] == [
        "file",
        "dir",
        "file",
    ]


def test_a_real_shell_asks_in_its_own_way() -> None:
    environment = {**ENVIRONMENT, "_NARROWGAUGE_COMPLETE": "bash_complete", "COMP_CWORD": "3"}
    environment["COMP_WORDS"] = "narrowgauge train --recipe float8-blo"
    command = [sys.executable, "-m", "narrowgauge"]
    found = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert found.stdout.split() == ["plain,float8-block", "plain,float8-block-e5m2"], found.stderr


def test_version() -> None:
    assert call("--version").stdout == f"narrowgauge {narrowgauge.__version__}\n"


@pytest.mark.parametrize(
    "words", [("show", "format", "fp7"), ("train", "--steps", "-3"), ("nonsense",), ("train", "--model", "gpt3")]
)
def test_a_real_process_ends_with_status_2_and_one_line(words: tuple[str, ...], tmp_path: Path) -> None:
    result = run_process(*words, cwd=tmp_path)
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1 and "Traceback" not in result.stderr
    assert not any(tmp_path.iterdir())


def test_a_real_process_prints_json() -> None:
    result = run_process("show", "formats", "--json")
    assert (result.returncode, result.stderr) == (0, "")
    assert {row["name"] for row in json.loads(result.stdout)} >= {"bfloat16", "float8_e4m3fn"}


def test_a_reader_that_leaves_early_is_no_error() -> None:
    command = [sys.executable, "-m", "narrowgauge", "show", "chips", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENVIRONMENT) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""


CLOSED = """
import os, sys
for number in map(int, sys.argv[1].split(",")):
    os.close(number)
os.execv(sys.executable, [sys.executable, "-m", "narrowgauge", *sys.argv[2:]])
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no descriptors to inherit")
@pytest.mark.parametrize("closed", ["0", "1", "2", "0,1,2"])
def test_closed_streams_are_the_null_device(closed: str) -> None:
    def ended(*words: str) -> tuple[int, str, str]:
        command = [sys.executable, "-c", CLOSED, closed, *words]
        found = subprocess.run(command, capture_output=True, text=True, check=False, env=ENVIRONMENT)
        return found.returncode, found.stdout, found.stderr

    status, out, err = ended("show", "computes")
    assert (status, err) == (0, "") and bool(out) == ("1" not in closed)
    status, out, err = ended("show", "nothing")
    assert (status, out) == (2, "") and err.count("\n") == ("2" not in closed)


@pytest.mark.skipif(sys.platform == "win32", reason="no descriptors to inherit")
def test_no_file_takes_the_number_of_a_closed_stream(tmp_path: Path) -> None:
    script = (
        "import os; [os.close(number) for number in range(3)]\n"
        "from narrowgauge.cli.exit_status import open_streams\n"
        "open_streams()\n"
        f"opened = open({str(tmp_path / 'rows')!r}, 'w')\n"
        "opened.write(str(opened.fileno()))"
    )
    subprocess.run([sys.executable, "-c", script], check=True, env=ENVIRONMENT)
    assert int((tmp_path / "rows").read_text()) > 2


@pytest.mark.parametrize("words", [("computes",), ("recipe", "bfloat16/word"), ("chips", "--json")])
@pytest.mark.parametrize("setting", [{"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C", "PYTHONUTF8": "0"}])
def test_a_terminal_that_knows_ascii_alone_gets_it(words: tuple[str, ...], setting: dict[str, str]) -> None:
    def shown(environment: dict[str, str]) -> str:
        command = [sys.executable, "-m", "narrowgauge", "show", *words]
        found = subprocess.run(command, capture_output=True, check=True, env={**ENVIRONMENT, **environment})
        assert found.stderr == b""
        return found.stdout.decode()

    plain, full = shown({**setting, "PYTHONCOERCECLOCALE": "0"}), shown({"PYTHONIOENCODING": "utf-8"})
    assert plain.isascii() and "?" not in plain
    assert json.loads(plain) == json.loads(full) if "--json" in words else plain.count("\n") == full.count("\n")


@pytest.mark.parametrize(
    ("text", "told"), [("4 × 10⁹ ± 0.5 … done", b"4 x 10^9 +- 0.5 ... done"), ("çπ", b"c?"), ("a\udcff", b"a\xff")]
)
def test_characters_that_a_stream_lacks_read_alike(text: str, told: bytes) -> None:
    open_streams()
    assert text.encode("ascii", "narrowgauge") == told


LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
from narrowgauge.cli import launching
from narrowgauge.cli.main import main
main(sys.argv[1:], prog_name="narrowgauge")
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no limits on files")
@pytest.mark.parametrize("words", [("show", "chips"), ("show", "chips", "--json"), ("train", "--help")])
def test_output_that_cannot_be_written_costs_one_line_and_status_2(words: tuple[str, ...], tmp_path: Path) -> None:
    with (tmp_path / "out").open("wb") as out:
        result = subprocess.run(
            [sys.executable, "-B", "-c", LIMITED, *words], stdout=out, stderr=subprocess.PIPE, text=True, check=False,
            env=ENVIRONMENT,
        )  # fmt: skip
    assert (result.returncode, result.stderr.count("\n")) == (2, 1)
    assert result.stderr.startswith("OSError: Cannot write to standard output: File too large.")


def test_another_refusal_of_the_system_is_a_fault_of_ours(calls: dict[str, Calls]) -> None:
    calls["train"].answer = FileNotFoundError(2, "No such file or directory", "ours")
    assert isinstance(call("train").exception, FileNotFoundError)


@pytest.mark.skipif(sys.platform == "win32", reason="no pipes with names")
def test_a_page_does_not_take_the_place_of_a_pipe(tmp_path: Path) -> None:
    with RunWriter.create(tmp_path / "run", {"config": {"recipe": "bfloat16/word", "seed": 0}}) as writer:
        writer.step({"step": 1, "loss": 1.0})
    os.mkfifo(tmp_path / "pipe")
    result = call("report", str(tmp_path / "run"), "--out", str(tmp_path / "pipe"))
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1) and "not a regular file" in result.stderr
    assert (tmp_path / "pipe").is_fifo()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--seeds", "2"), "Missing option '--recipes'"),
        (("--out", "new", "--seeds", "2"), "it has no compare.toml. Name recipes with --recipes."),
        (("--recipes", "bfloat16/word", "--config", "a.toml"), "a.toml has seed = 3"),
        (("--recipes", "bfloat16/word", "--seconds", "inf"), "above 0 and finite"),
        (("--recipes", "bfloat16/word,bfloat16/wrd"), "Did you mean 'word'"),
        (("--recipes", "/,bfloat16/word"), "the recipe / was requested, and it is a folder. Name a .toml file."),
        (("--recipes", " , "), "no recipe was named."),
    ],
)
def test_a_comparison_that_is_asked_for_wrongly_costs_one_line(
    words: tuple[str, ...], says: str, calls: dict[str, Calls], tmp_path: Path
) -> None:
    (tmp_path / "a.toml").write_text("seed = 3\n")
    result = call("compare", *words)
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1) and says in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["a.toml"]


@pytest.mark.parametrize("words", [["train", "--help"], ["train", "--lr", "-1"], ["show", "chips"]])
def test_no_torch_until_it_is_needed(words: list[str]) -> None:
    lines = ["import sys", "from narrowgauge.cli.main import main", f"try: main({words!r})", "except SystemExit: pass"]
    result = subprocess.run(
        [sys.executable, "-c", "\n".join([*lines, "sys.exit('torch' in sys.modules)"])],
        capture_output=True, check=False, env=ENVIRONMENT,
    )  # fmt: skip
    assert result.returncode == 0
