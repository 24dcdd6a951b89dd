"""What is refused, as one table: each refusal is one line that names what was asked and gives one
advice.

The regular expressions hold the essential words only. Those of a call are of its
message, then of its advice. Nothing is changed or written by what is refused.
"""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import narrowgauge as ng
from narrowgauge.errors import (
    ChipError,
    DataError,
    FormatError,
    NarrowgaugeError,
    RecipeError,
    RecordError,
)
from narrowgauge.matmul.inference import quantize_for_inference
from narrowgauge.numerics.hashing import fingerprint
from narrowgauge.numerics.rounding import round_to
from narrowgauge.optim.rules.elementwise import ADAMW
from narrowgauge.optim.validation import device_of_step
from narrowgauge.planner.layouts import read_layout
from narrowgauge.planner.plan import plan
from narrowgauge.planner.program import Program
from narrowgauge.runs.atomic_io import digest
from narrowgauge.runs.record import read_run
from narrowgauge.runs.schema import VERSION
from narrowgauge.runs.writer import Record
from narrowgauge.spec.chips import get_chip
from narrowgauge.spec.parse import get_compute, parse
from narrowgauge.spec.storages import STORAGES
from narrowgauge.trainer.tokens import load_tokenizer, open_tokens, write_tokens
from tensors import take_steps
from text.refusals import expected
from trainer.tiny_runs import ENVIRONMENT, bytes_of

# ── commands: status 2, one line on standard error, nothing on standard output, and no PyTorch ─────

CHIP = "plan run --model llama-8b --chip H100-SXM"
TRAIN = "train --data ids"
LONG = "x" * 3000
COMMANDS = {
    "show recipe": ("UsageError", "NAME"),
    "show recipe nowhere": ("RecipeError", "no recipe is named 'nowhere'"),
    LONG: ("UsageError", "No such command"),
    f"train --recipe {LONG}": ("RecipeError", "no recipe is named"),
    f"export {LONG} y": ("OSError", "File name too long"),
    "export nowhere out": ("RecordError", "it has no checkpoint"),
    "report nowhere": ("RecordError", "No run in 'nowhere'"),
    # settings
    "train --recpie x": ("UsageError", "--recpie"),
    "train --recipe bfloat16/wrod": ("RecipeError", "no storage is named 'wrod'. Did you mean 'word'?"),
    "train --recipe float8-rwo": ("RecipeError", "no recipe is named 'float8-rwo'. Did you mean 'float8-row'?"),
    "train --recipe x/word": ("RecipeError", "no compute is named 'x'"),
    "train --recipe recipe.toml": ("RecipeError", "no recipe is named"),
    "train --model llama-120m": ("RecipeError", "named 'llama-120m'. Did you mean 'llama-125m'"),
    "train --steps 0": ("RecipeError", "steps = 0: it must be one integer and at least 1"),
    "train --lr nan": ("RecipeError", "lr = nan: it must be one finite number and at least 0"),
    "train --max-grad-norm -1": ("RecipeError", r"max_grad_norm = -1\.0: it must be one finite number"),
    "train --seed 4294967296": ("RecipeError", "seed = 4294967296"),
    "train --batch-size 7 --gradient-accumulation-steps 2": ("RankError", "7 sequences into 2 micro-batches for 1 rank"),
    "train --data nowhere": ("DataError", "No such file"),
    "train --out nowhere": ("DataError", "narrowgauge tokenize TEXT OUT"),
    f"{TRAIN} --sequence-length 10000 --batch-size 1": ("DataError", "its held-out part has 500 tokens, and more than 10,000"),
    f"{TRAIN} --batch-size 100000000000000": ("DataError", "training part has 9,501 tokens, and more than 25,600,000,"),
    "train --out odd": ("RecordError", "not to be overwritten.*in the program that wrote it"),
    f"{TRAIN} --out odd": ("RecordError", "not to be overwritten"),
    f"{TRAIN} --out ids/tokens.npy/run": ("RecordError", "npy is not a folder that may be written"),
    "train --out done --lr 1": ("RecordError", r"lr was 0\.001 and is 1\.0"),
    "train --out done --seed 3": ("RecordError", "seed was 0 and is 3"),
    "compare --seeds 2": ("UsageError", "'--recipes'"),
    "compare --out nowhere": ("UsageError", "'--recipes'"),
    "compare --recpies x": ("UsageError", "--recpies"),
    "compare --recipes ,": ("RecipeError", "no recipe was named"),
    "compare --recipes bfloat16/wrod": ("RecipeError", "mean 'word'"),
    "compare --recipes bfloat16/word --model lama": ("RecipeError", "'lama'"),
    "compare --recipes bfloat16/word --steps 0": ("RecipeError", "steps = 0"),
    "compare --recipes bfloat16/word --data nowhere": ("DataError", "nowhere"),
    # plans
    "plan run": ("UsageError", "--model"),
    "plan run --model llama-1m --recipe bfloat16/word --chip h101": ("ChipError", "no chip is named 'h101'"),
    f"{CHIP} --layout head": ("RecipeError", "'head'.*NAME=VALUE"),
    f"{CHIP} --chips eight": ("UsageError", "'eight'"),
    "plan run --model llama-8b --chip no.toml": ("DataError", r"no\.toml"),
    "plan run --model llama-8b": ("ChipError", "no machine.*--chip"),
    f"{CHIP} --rule moun": ("RecipeError|UsageError", "moun"),
    "plan run --model gpt2-124m --chip H100-SXM --sequence-length 4096": ("RecipeError|NarrowgaugeError", "1,024 positions"),
    "plan scaling 128:10d": ("DataError", "two or more"),
    "plan scaling 128:10d,256:7d --at 0": ("UsageError", "0 is not in the range x>=1"),
}  # fmt: skip
FINISHED = ("train --out done", "train --out done --steps 1")
WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None  # from here on, to import it is an error
from narrowgauge.cli.main import main
for line in sys.stdin:
    try:
        main(line.split(), prog_name="narrowgauge")
    except SystemExit as end:
        print(end.code, line.strip(), flush=True)
"""


def make_files(folder: Path) -> None:
    """Make tokens, a finished run and one of another program."""
    Record.create(folder / "odd", {"recorder": {"program": "mine.py"}}).close()
    tokens = write_tokens(["text " * 2000], load_tokenizer(None), folder / "ids")
    config = {"recipe": "bfloat16/word", "data": str(tokens), "steps": 1}
    with Record.create(folder / "done", {"config": config}) as writer:
        writer.summary({"steps": 1, "val_loss": 4.0})
    checkpoint = folder / "done" / "checkpoints" / "step-00000001"
    checkpoint.mkdir(parents=True)
    notes = {"step": 1, "settings": config, "tokens": open_tokens(tokens).fingerprint}
    (checkpoint / "notes.json").write_text(json.dumps(notes))
    manifest = {"notes.json": digest(checkpoint / "notes.json")}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))


def test_commands_are_refused_or_finished_before_torch_is_loaded(tmp_path):
    make_files(tmp_path)
    before = bytes_of(tmp_path)
    process = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH], input="\n".join((*COMMANDS, *FINISHED)),
        capture_output=True, text=True, check=False, cwd=tmp_path, env=ENVIRONMENT,
    )  # fmt: skip
    printed = [f"2 {line}" for line in COMMANDS]
    for line in FINISHED:
        printed += ["done is finished: 1 step.", f"0 {line}"]
    assert process.stdout.splitlines() == printed, process.stderr
    for (kind, words), line in zip(COMMANDS.values(), process.stderr.splitlines(), strict=True):
        assert re.match(rf"(?:{kind}): .*{words}", line), line
    assert bytes_of(tmp_path) == before


# ── calls ─────────────────────────────────────────────────────────────────────────────────────────


def weights(dtype: torch.dtype = torch.bfloat16) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(4, 4, dtype=dtype))]


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 16))


def on_meta() -> object:
    model = layers().to("meta")
    return ng.check(model, torch.optim.SGD(model.parameters()), batch=torch.ones(1), loss=called)


def called(weights: torch.dtype, inputs: torch.dtype) -> None:
    model = layers().to(weights)
    ng.swap_linears(model, "float8-row")
    model(torch.ones(2, 16, dtype=inputs))


B16, F16 = torch.bfloat16, torch.float16
MUON = {"lr": 0.5, "adjust_lr_fn": "match_rms_adamw"}


def vectors() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(5, dtype=B16))]


def later(optimizer: ng.Optimizer, **options: Any) -> None:
    """Change options before a step."""
    optimizer.add_param_group({"params": vectors()})
    optimizer.param_groups[1].update(options)
    take_steps(optimizer, range(1))


def appended(optimizer: ng.Optimizer) -> None:
    optimizer.param_groups.append({"params": vectors(), "lr": 1e-3})
    optimizer.step()


def falling() -> ng.Optimizer:
    rule = replace(ADAMW, name="own", monotone=False)
    options = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0}
    return ng.Optimizer(weights(), rule, options, storage="compact")


def on_one_memory() -> list[nn.Parameter]:
    memory = torch.ones(8, 8)
    return [nn.Parameter(memory), nn.Parameter(memory[:6])]


def adopt(name: str, *shape: int, has_weight: bool = True) -> None:
    """Adopt a state of a name and shape."""
    (parameter,) = weights()
    values = {parameter: torch.ones(4, 4)} if has_weight else {}
    ng.AdamW([parameter]).adopt(values, {parameter: {name: torch.ones(shape)}})


def measured(**options: Any) -> ng.MeasuredRun:
    run = {"model": "llama-8b", "chip": "H100-SXM", "chips": 8, "tokens_per_second": 53_336}
    return ng.MeasuredRun(**run | options)


CALLS = {
    # recipes by name
    "bf16": (lambda: parse("bf16"), RecipeError, "'bf16' as a recipe\n'bfloat16/word'"),
    "a reduction": (lambda: parse("bfloat16/word/reproducibl"), RecipeError, "named 'reproducibl'\nmean 'reproducible'"),
    "a recipe that is a number": (lambda: parse(16), RecipeError, "recipe = 16\na name in quotes"),
    "two meanings": (lambda: get_compute("float8"), RecipeError, "'float8' as a recipe\nfloat8-row.*float8-tensor"),
    # optimizers
    "lr": (lambda: ng.AdamW(weights(), lr=-1.0), RecipeError, "lr = -1.*must be .*at least 0"),
    "beta": (lambda: ng.AdamW(weights(), betas=(0.9, 1.0)), RecipeError, r"beta2 = 1\.0: it must be .*below 1"),
    "storage": (lambda: ng.AdamW(weights(), storage="wrod"), RecipeError, "no storage is named 'wrod'\nmean 'word'"),
    "float64": (lambda: ng.AdamW(weights(torch.float64)), RecipeError, "'word'.* is float64\nmodel.float.*'float64'"),
    "a matrix rule": (lambda: ng.Muon(weights(torch.float32), storage="float64"), RecipeError, "compute in float32\n'split'"),
    "one moment with scales": (
        lambda: replace(STORAGES["states8"], exp_avg=STORAGES["word"].exp_avg), RecipeError,
        "one moment has a scale\nTake two codes",
    ),
    "one beta": (lambda: ng.AdamW(weights(), betas=(0.9,)), RecipeError, "must be two numbers"),
    "a rate in words": (lambda: ng.AdamW(weights(), lr="1"), RecipeError, "must be one finite number"),
    "half an audit": (lambda: ng.AdamW(weights(), audit_every=1.5), RecipeError, "must be one integer"),
    "a recipe": (lambda: ng.AdamW(weights(), storage="bfloat16/word"), RecipeError, "word'\nis a compute and a storage"),
    "float32": (lambda: ng.AdamW(weights(), storage="float32"), RecipeError, "'float32'\n'word', 'exact' and others take"),
    "a norm of a group": (
        lambda: ng.AdamW([{"params": weights(), "max_grad_norm": 1.0}]), RecipeError, "max_grad_norm\nclip_grad_norm_",
    ),
    "a rate for vectors": (lambda: later(ng.Muon(weights(), **MUON), adjust_lr_fn="original"), RecipeError, "no matrix\n."),
    "no options": (lambda: appended(ng.AdamW(weights())), RecipeError, "group 1 because it has no\nadd_param_group"),
    "Muon of vectors": (lambda: ng.Muon([*weights(), *vectors()], lr=0.02), RecipeError, "no matrix\n'rule': 'adamw'"),
    "a rule that may fall": (falling, RecipeError, "does not say that it is monotone\n'word'"),
    "no momentum": (lambda: ng.SGD(weights(), nesterov=True), RecipeError, "momentum = 0.0\n."),
    "dampening": (
        lambda: ng.SGD(weights(), momentum=0.9, dampening=0.1, nesterov=True), RecipeError, "dampening = 0.1\n.",
    ),
    "two devices": (
        lambda: device_of_step([torch.ones(1), torch.ones(1, device="meta")]), RecipeError, "cpu and meta\n.",
    ),
    "one memory": (lambda: ng.AdamW(on_one_memory()), RecipeError, "another parameter has its memory\n."),
    "the meta device": (lambda: ng.AdamW(nn.Linear(4, 4, device="meta")), RecipeError, "on the meta device\n."),
    "states alone": (lambda: adopt("exp_avg", 4, 4, has_weight=False), RecipeError, "without the weights\n"),
    "a moment's shape": (lambda: adopt("exp_avg", 4, 2), RecipeError, "'exp_avg' of shape\n"),
    "an unknown moment": (lambda: adopt("momentum", 4, 4), RecipeError, "momentum.*has weight, exp_avg, exp_avg_sq\n"),
    "vectors": (lambda: replace(STORAGES["word"], vectors="mastre"), RecipeError, "vectors = 'mastre'\nmean 'master'"),
    "a factor": (lambda: Program("mine", factor=0.0), RecipeError, "factor = 0.*must be"),
    # models
    "a model of float16": (lambda: ng.prepare(layers().half(), "bfloat16/word"), RecipeError, "word.*float16\nmodel.float"),
    "inference": (lambda: quantize_for_inference(layers(), "int7"), RecipeError, "named 'int7'\nmean 'int8-row'"),
    "codes without scales of rows": (lambda: quantize_for_inference(layers(), "mxfp8"), RecipeError, "mxfp8\nint8-outlier"),
    "a model in float16": (lambda: called(F16, F16), RecipeError, "float8-row.*float16\ntorch.autocast.*bfloat16 weights"),
    "an input of 16 bits": (lambda: called(torch.float32, B16), RecipeError, "layer '0'.*weight in float32\ntorch.autocast"),
    "a batch without a loss": (
        lambda: ng.check(layers(), torch.optim.SGD(layers().parameters()), batch=torch.ones(1)), RecipeError,
        "batch= needs loss=\nPass both",
    ),
    "a batch for weights without values": (on_meta, RecipeError, "meta has no values of 0.weight and 1 other\nLoad the weights"),
    "a loop without a loss": (lambda: ng.compare(lambda *_: "abc", ["mine"]), NarrowgaugeError, "for mine, but 'abc'\nReturn"),
    "a loss of two numbers": (
        lambda: ng.compare(lambda *_: {"val_loss": torch.ones(2)}, ["mine"]), NarrowgaugeError, "for mine, but {\nReturn",
    ),
    # casts
    "a format": (lambda: round_to(torch.ones(3), "float8_e4m3fm"), FormatError, "named 'float8_e4m3fm'\nmean 'float8_e4m3fn'"),
    "a hash of sixteen bytes": (lambda: fingerprint(torch.ones(3, dtype=torch.complex128)), FormatError, "16 bytes\nview_as"),
    "a wider format": (lambda: round_to(torch.ones(3), "float64"), FormatError, "float64.*float32\nTake a format"),
    # plans
    "a layout": (lambda: read_layout("zero=4"), RecipeError, "zero = 4.*must be .*0, 1, 2, 3"),
    "what does not divide": (
        lambda: plan("llama-8b", recipes=["bfloat16/word"], chip="H100-SXM", chips=8, layout={"tensor": 3}),
        NarrowgaugeError, "tensor.: 3.*does not divide llama-8b\nLeave a field open",
    ),
    "a module": (lambda: plan(layers(), chip="H100-SXM"), DataError, "plan Sequential\nconfig.json"),
    "two chips": (lambda: get_chip("h100"), ChipError, "H100-SXM5-80GB, H100-PCIe-80GB begin with it\nName one"),
    "a near chip": (lambda: get_chip("rtx-4080"), ChipError, "no chip is named 'rtx-4080'\nmean 'RTX-4090'"),
    "a far chip": (lambda: get_chip("gaudi3"), ChipError, "no chip is named 'gaudi3'\nnarrowgauge show chips"),
    "one chip's rate": (lambda: measured(tokens_per_second=6_667), DataError, "rate of one chip\n."),
    "a large peak": (lambda: measured(peak_gb=900), RecipeError, "peak_gb of a chip = 900.*below 85"),
    "no rate": (lambda: measured(tokens_per_second=0), DataError, "without one rate\nper_chip"),
    "two rates": (lambda: measured(tokens_per_second_per_chip=6_667), DataError, "without one rate\nper_chip"),
    "two recipes": (lambda: measured(recipes=["bfloat16/word", "bfloat16/master"]), DataError, "a run has one\nName one"),
    # runs
    "no tokenizer": (lambda: load_tokenizer(Path("nothing")), DataError, "nothing\nhf download nothing"),
    "no run": (lambda: read_run(Path("nowhere")), RecordError, "No run in 'nowhere'\nName a run folder"),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_a_call(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    call, kind, words = CALLS[name]
    message, _, advice = words.partition("\n")
    with expected(kind, message, advice):
        call()
    assert not [*tmp_path.iterdir()]


# ── files ─────────────────────────────────────────────────────────────────────────────────────────

MINE = 'like = "H100-SXM"\n'


def chip(path: Path) -> None:
    plan("llama-8b", chip=path)


def log(loss: str) -> str:
    return f'{{"log_history": [{{"loss": {loss}'


FILES = [
    ("mine.toml", "chips_per_node = 4", chip, ChipError, "no chip is named"),
    ("mine.toml", f"{MINE}chips_per_nod = 8", chip, DataError, "chips_per_nod\nmean 'chips_per_node'"),
    ("mine.toml", f"{MINE}chips_per_node = 1.5", chip, RecipeError, "chips_per_node = 1.5"),
    ("mine.toml", f"{MINE}memory_gb = '94'", chip, RecipeError, "memory_gb = '94'"),
    ("mine.toml", "[[nodes", chip, DataError, r"mine\.toml: Expected"),
    ("tokenizer.json", "{damaged", lambda path: load_tokenizer(path.parent), DataError, "Cannot read"),
    ("run.toml", f"schema_version = {VERSION + 1}", read_run, RecordError, "this version reads\nthat wrote it"),
    ("run.toml", 'schema_version = "a"', read_run, RecordError, "this version reads\nthat wrote it"),
    ("run.toml", "schema_version = ", Record.open, RecordError, r"run\.toml is damaged"),
    ("run.toml", f"schema_version = {VERSION}\nconfig = 3\n", Record.open, RecordError, "'config' is not a table"),
    ("trainer_state.json", log("1.0"), read_run, RecordError, "trainer_state.json is damaged"),
    ("trainer_state.json", log("1.0}]}"), read_run, RecordError, "holds no loss"),
    ("trainer_state.json", "", lambda path: read_run(path.parent), RecordError, "trainer_state.json holds no loss"),
    ("metrics.csv", "", read_run, RecordError, "metrics.csv holds no loss at a step. It has no rows"),
    ("metrics.csv", "step,loss\n,1.0\n", read_run, RecordError, "holds no loss"),
    ("metrics.csv", "step,loss\n\x000,1.0\n", read_run, RecordError, "holds no loss"),
    ("a.csv", "Step,one - loss\n1,3.0\n", read_run, RecordError, "a.csv holds no loss at a step. It has Step, one - loss"),
    ("a.csv", "step,loss\n0.5,1.0\n", read_run, RecordError, "holds no loss"),
    ("a.csv", "step;loss\n1;2,5\n", read_run, RecordError, "holds no loss"),
    ("a.jsonl", "{", read_run, RecordError, "No run in .*a.jsonl"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "call", "kind", "words"), FILES)
def test_a_file(name, text, call, kind, words, tmp_path):
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    before = bytes_of(tmp_path)
    message, _, advice = words.partition("\n")
    with expected(kind, message, advice):
        call(path.parent if name == "run.toml" else path)
    assert bytes_of(tmp_path) == before
