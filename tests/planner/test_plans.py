"""Memory and time by hand, as published, and as laws; answers; and the next of a measured run."""

import json
import re
from typing import Any

import pytest
from click.testing import CliRunner

import narrowgauge as ng
from narrowgauge.cli.main import main
from narrowgauge.planner.estimate import ERRORS
from narrowgauge.planner.measured_logs import read_measured
from narrowgauge.planner.measured_run import OTHER
from narrowgauge.planner.memory import layer_bytes
from narrowgauge.planner.plan import plan
from narrowgauge.runs import Record
from planner.jobs import LLAMA, TITAN_LOG, estimate
from text.refusals import refused

# ── memory ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("recipe", "width"), [("bfloat16/word", 8), ("bfloat16/master", 16), ("bfloat16/states8", 6)]
)
def test_state_is_sharded_as_zero_says(recipe, width):
    count = LLAMA.num_parameters
    states = (width - 4) * count
    for zero, weights, gradients, optimizer in (
        (3, 8, 8, 8),
        (2, 1, 8, 8),
        (1, 1, 1, 8),
        (0, 1, 1, 1),
    ):
        asked = f"shard=8,zero={zero},micro_batches=2,accumulation_dtype=bfloat16"
        groups = estimate(asked=asked, recipe=recipe).memory
        assert groups["weights"] == pytest.approx(2 * count / weights, rel=1e-3)
        assert groups["gradients"] == pytest.approx(2 * count / gradients, rel=1e-3)
        assert groups["optimizer"] == pytest.approx(states / optimizer, rel=2e-3)


def test_what_layers_keep_by_hand():
    """34 bytes per token and feature of a GPT's fused layer, of which two are dropout masks:
    Korthikanti et al., arXiv 2205.05198, equation 1; with a flash kernel, which saves no scores.
    """
    gpt = estimate("kernels=compiled", model="gpt3-175b", recipe="bfloat16/master")
    assert layer_bytes(gpt) / 12_288 == pytest.approx(32, rel=0.15)
    kept = [
        estimate(asked=f"shard=8,micro_batch=8,recompute={how}").memory["activations"]
        for how in ("none", "selective", "full")
    ]
    assert kept == sorted(kept, reverse=True) and kept[2] == 8 * 32 * 2 * 4096 * 4096


def test_inputs_of_layers_on_the_host_leave_the_chip():
    """Rows above 100,000 tokens are trained so (TRL, Unsloth, DeepSpeed): a layer's input waits on the host."""
    layout = "shard=8,recompute=full"
    chip, host = (estimate(f"saves={where}", layout, length=131_072) for where in ("chip", "host"))
    stream = 131_072 * 4096 * 2
    moved = chip.memory["activations"] - host.memory["activations"]
    assert moved == pytest.approx((32 - 2) * stream, rel=1e-6)
    assert host.host_bytes == 8 * 32 * stream and chip.host_bytes == 0
    assert host.step_seconds >= chip.step_seconds


RULES = [("sgd", "float32", 4, 0), ("lion", "float32", 4, 4), ("adamw", "float32", 4, 8),
         ("adafactor", "naive", 0, 0.01), ("adamw8bit", "naive", 0, 2.03)]  # fmt: skip


@pytest.mark.parametrize(("rule", "storage", "wider", "width"), RULES)
def test_states_are_those_of_the_rule(rule, storage, wider, width):
    job = estimate(recipe=f"bfloat16/{storage}", optimizer=rule)
    assert job.memory["optimizer"] == pytest.approx(width * LLAMA.num_parameters, rel=1e-3)
    assert job.bytes_per_param == pytest.approx(4 + wider + width)


def test_frozen_experts_are_whole_on_the_ranks_that_share_them():
    """Two of eight ranks share the experts: each holds half of them, in bfloat16."""
    job = estimate(asked="shard=8,expert=2", model="mixtral-8x7b", lora=16)
    experts = 32 * 3 * 8 * 4096 * 14_336
    assert job.memory["weights"] > 2 * experts / 2


def test_offloaded_parameters_leave_the_chip_and_land_on_the_host():
    """LoRA of 70B on one H100: 144 GB stayed on the chip once, and the host had 3."""
    job = estimate("deepspeed,offload=true", "recompute=full", model="llama-70b", lora=16)
    assert job.memory["weights"] < 10e9 and job.host_bytes > 140e9 and job.fits
    twice = estimate("deepspeed,offload=true", "recompute=none", model="llama-70b", lora=16)
    assert job.step_seconds == pytest.approx(1.5 * twice.step_seconds)  # weights are read
    whole = estimate("offload=true", recipe="bfloat16/master")
    assert whole.host_bytes == pytest.approx(14 * LLAMA.num_parameters, rel=1e-3)


# ── answers ───────────────────────────────────────────────────────────────────────────────────────


FIRST = {
    "V100-SXM2-32GB": "float16/master",
    "A100-SXM4-80GB": "bfloat16/word",
    "H100-SXM": "float8-row/word",
    "MI300X": "bfloat16/word",
    "B200": "float8-row/word",
}


@pytest.mark.parametrize(("chip", "first"), FIRST.items())
def test_the_first_answer_of_a_chip(chip, first):
    """Stated by hand. For V100 it was once a storage that trains at 2 % of the rate."""
    best = plan("llama-8b", chip=chip, chips=8, sequence_length=2048).best
    assert best.recipe.name == first


WORD, STATES8 = "bfloat16/word", "bfloat16/states8"
GALORE = {"model": "llama-7b", "chip": "RTX-4090", "optimizer": "galore", "sequence_length": 512}
NODE = {"model": "llama-33b", "chip": "A100-SXM4-40GB", "chips": 8}
FITS = (
    # GaLore's 8-bit states and updates by layer train all of a 7B on a card of 24 GB (arXiv 2403.03507).
    ({**GALORE, "optimizer": "adamw", "recipes": WORD}, False),
    ({**GALORE, "recipes": STATES8}, False),
    ({**GALORE, "recipes": STATES8, "program": "compiled,release=true,loss=chunked"}, True),
    # torchtune's QLoRA of Llama-2 7B takes less than 10 GB.
    ({"model": "llama-7b", "chip": "RTX-4090", "lora": 8, "base": "nf4", "sequence_length": 512, "program": "torchtune",
      "layout": "micro_batch=2,recompute=full"}, True),
    # 131,072 tokens of an 8B model on eight chips ran; the preset has 8,192 positions.
    ({"model": "llama-8b", "chip": "H100-SXM", "chips": 8, "recipes": WORD, "sequence_length": 131_072}, True),
    # 33B on eight times 40 GB fit in 8 and 6 bytes, and not in 16.
    ({**NODE, "recipes": WORD}, True),
    ({**NODE, "recipes": STATES8}, True),
    ({**NODE, "recipes": "bfloat16/master"}, False),
    # 405B with its states on one host once "fitted": 5.7 TB of them.
    ({"model": "llama-405b", "recipes": "bfloat16/master", "chip": "B300", "chips": 8, "sequence_length": 2048,
      "program": "hf-trainer,offload=true,loss=chunked"}, False),
)  # fmt: skip


@pytest.mark.parametrize(("asked", "fits"), FITS)
def test_what_fits(asked, fits):
    answer = plan(**asked, advise=False)
    best = answer.best
    assert best.fits == fits
    if asked.get("base") == "nf4":
        assert best.peak_bytes < 10e9
    if "offload" in asked.get("program", ""):
        assert best.host_bytes > 12 * 405e9 and "lacks room" in answer.sentences()[0]


def test_what_fits_instead_is_named_and_fits():
    for question, texts in (
        ({"model": "llama-8b", "chip": "RTX-4090", "lora": 16, "sequence_length": 8192}, ["--base nf4"]),
        ({"model": "llama-33b", "recipes": "bfloat16/word", "chip": "H100-SXM"}, ["offload=true", "--lora 16 --base nf4"]),
        ({"model": "llama-8b", "recipes": "bfloat16/word", "chip": "H100-SXM", "program": "compiled,loss=chunked",
          "sequence_length": 131_072}, ["--sequence-length 32768", "--sequence-length 16384"]),
    ):  # fmt: skip
        answer = plan(**question)
        assert not answer.best.fits and 1 <= len(answer.instead) <= 4
        assert all(job.fits for _, job in answer.instead)
        changes = " ".join(change for change, _ in answer.instead)
        assert all(text in changes for text in texts)


def test_rows_have_one_number_of_tokens_per_step():
    answer = plan("llama-8b", chip="H100-SXM", chips=12)
    assert len({option.tokens_per_step for option in answer.options}) == 1


def test_what_is_fixed_stays():
    for asked in ({"tensor": 2, "recompute": "full", "micro_batch": 2, "zero": 1}, {"zero": 0}):
        best = plan("llama-33b", chip="A100-SXM4-80GB", chips=32, layout=asked, advise=False).best
        assert {name: getattr(best.layout, name) for name in asked} == asked


def test_a_chip_without_a_format_is_named():
    answer = plan("llama-8b", recipes=["bfloat16/word", "float16/master"], chip="V100", chips=8)
    assert [job.recipe.name for job in answer.options] == ["float16/master"]
    assert any("V100" in line and "bfloat16" in line for line in answer.sentences())
    assert answer.tables()[0].plain() in str(answer) and answer.sentences()[0] in str(answer)


# ── the next run ──────────────────────────────────────────────────────────────────────────────────

TITAN = {
    "model": "llama-8b", "chip": "H100-SXM", "chips": 8, "sequence_length": 8192, "recipes": "bfloat16/float32",
    "program": "torchtitan-2024", "layout": "tensor=1,pipeline=1,context=1,micro_batch=2,micro_batches=1,recompute=selective",
    "tokens_per_second": 53_336, "peak_gb": 82.7,
}  # fmt: skip


def titan(**changes: Any) -> ng.MeasuredRun:
    return ng.MeasuredRun(**{**TITAN, **changes})


@pytest.mark.parametrize(
    ("changes", "rate", "peak"),
    [({"chips": 128}, 834_000, 66.6), ({"recipes": "float8-tensor/float32"}, 68_300, 82.5)],
)
def test_torchtitans_next_runs_are_as_measured(changes, rate, peak):
    """pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md."""
    told = titan().next(**changes)
    assert told.difference == "size, layout, batch, precision, chips"
    assert "recompute=selective" in str(told) and told.rate_interval and told.peak_interval
    assert told.rate_interval[0] < rate < told.rate_interval[1]
    assert told.peak_interval[0] < peak < told.peak_interval[1]


def test_the_next_run_is_moved_towards_what_was_measured():
    free = titan()
    counted = free.job.allocated_bytes / 1e9
    plain = ng.plan(**{**free.asked, "chips": 16}, tokens_per_step=1 << 18, advise=False).best
    for factor, more in ((0.7, 0.0), (1.3, 5.0)):
        rate = factor * free.job.tokens_per_second
        run = titan(tokens_per_second=rate, peak_gb=counted + more)
        told = run.next(chips=16)
        assert told.tokens_per_second / plain.tokens_per_second == pytest.approx(factor**0.8)
        assert told.peak_gb == pytest.approx(plain.allocated_bytes / 1e9 + more)


def test_without_a_change_the_answer_is_what_was_measured():
    """67,416 tokens/s were once planned where 60,000 had been measured."""
    run = titan(tokens_per_second=60_000)
    for changes in ({}, {"chips": 8}):
        told = run.next(**changes)
        assert (told.tokens_per_second, told.peak_gb) == pytest.approx((60_000, 82.7))
        assert "60,000 tokens/s" in str(told) and "this is the run you gave" in str(told)


def test_what_differs_most_decides_the_interval():
    run = titan()
    rows = (
        ({"model": "llama-70b", "chips": 64}, "size, layout, batch, precision, chips"),
        ({"sequence_length": 16_384, "layout": "zero=3,tensor=1,context=1"}, "length to 4 times"),
        (
            {"sequence_length": 65_536, "layout": "zero=3,tensor=1,context=1"},
            "length beyond 4 times",
        ),
    )
    for changes, difference in rows:
        told = run.next(**changes)
        assert told.difference == difference and told.rate_interval
        low, high = told.rate_interval
        assert high / low == pytest.approx((1 + ERRORS["next"][difference]) ** 2)


@pytest.mark.parametrize("changes", [
    {"chip": "B200"}, {"program": "hf-trainer"}, {"optimizer": "muon"},
    {"lora": 16, "base": "nf4"}, {"model": "mixtral-8x7b", "chips": 64},
])  # fmt: skip
def test_what_no_pair_of_runs_differs_in_has_the_plain_plan_and_no_interval(
    changes,
):
    """An H100 answered for a V100 at ±15 %, and all weights for adapters."""
    run = titan(tokens_per_second=40_000)
    told = run.next(**changes)
    assert (told.difference, told.rate_interval, told.peak_interval) == (OTHER, None, None)
    assert told.tokens_per_second == told.job.tokens_per_second
    assert told.peak_gb == told.job.allocated_bytes / 1e9 and "no interval" in str(told)


def test_adapters_are_corrected_by_adapters_and_mixtures_by_mixtures():
    asked = {"chip": "A100-SXM4-80GB", "program": "hf-trainer", "tokens_per_second": 2_000}
    run = ng.MeasuredRun("llama-8b", lora=16, base="nf4", **asked)
    assert run.next(lora=32).rate_interval
    mixture = ng.MeasuredRun("qwen3-30b-a3b", chip="H100-SXM", chips=16, tokens_per_second=100_000)
    assert mixture.next(chips=32).difference == "mixture"


def test_a_measured_run_is_one_run_that_its_machine_can_do():
    """900 GB on an 80 GB chip passed, and the rate of one GPU counted as that of eight."""
    asked = {"model": "llama-8b", "chip": "H100-SXM", "chips": 8, "tokens_per_second": 53_336}
    run = ng.MeasuredRun(**{**asked, "tokens_per_second": 0}, tokens_per_second_per_chip=6_667)
    assert run.tokens_per_second == 53_336 and run.job.recipe.name == "bfloat16/master"
    for name in ("chips", "sequence_length"):
        for value in ([16, 32], "sixteen", 0):
            with refused("a next run", name=name):
                run.next(**{name: value})
    with refused("a next run", name="advise"):
        run.next(advise=True)


EIGHT = "model=llama-8b chip=H100-SXM chips=8 tokens_per_second=53336"


def printed(*words: str) -> str:
    """Return what `plan next` prints, of an answer or a refusal."""
    return CliRunner().invoke(main, ["plan", "next", *words]).output


def test_what_the_measured_run_did_not_name_is_told():
    """`plan next` once took float8-row/word for a run that did not say its recipe."""
    text = printed(f"{EIGHT} layout=zero=3", "chips=16")
    assumed = "sequence_length=4096, recipes=bfloat16/master, program=compiled\n"
    assert f"      assumed: {assumed}" in text
    row = json.loads(printed(f"{EIGHT} layout=zero=3", "chips=16", "--json"))
    assert row["assumed"]["recipes"] == "bfloat16/master"
    assert f"{row['tokens_per_second']:,.0f} tokens/s, 80 %" in text
    assert "assumed" not in str(titan())


def test_a_run_is_read_from_a_file_and_a_log(tmp_path):
    file = tmp_path / "run.toml"
    (tmp_path / "log.csv").write_text(
        "step,loss,tokens_per_second\n1,3,50000\n2,2,53336\n3,2,54000\n"
    )
    file.write_text('model = "llama-8b"\nchip = "H100-SXM"\nchips = 8\nlog = "log.csv"\n')
    text = printed(str(file), "chips=16")
    assert "53,336 tokens/s measured" in text and "16 × H100" in text
    assert printed(EIGHT, "chips=16") == text
    file.write_text('model = "llama-8b"\nlog = "log.csv"\n')
    for run, says in (
        (str(file), "does not say its chip"),
        ("model=llama-8b chip=128 tokens_per_second=1e9", "no chip is named .128"),
        ("model=llama-8b chip=H100-SXM tokens_per_second=1e9", "more than the peak"),
        (
            "nowhere.toml",
            r"nowhere.toml' because it is not there.*'log=train.log model=llama-8b chip=",
        ),
    ):
        result = CliRunner().invoke(main, ["plan", "next", run])
        assert result.exit_code == 2 and re.search(says, result.output)


def test_a_run_folder_of_our_trainer_needs_no_file(tmp_path):
    config = {
        "model": "llama-8b", "recipe": "bfloat16/word", "sequence_length": 2048, "batch_size": 64,
        "gradient_accumulation_steps": 16,
    }  # fmt: skip
    machine = {"ranks": 8, "device": "NVIDIA A100-SXM4-40GB"}
    with Record.create(tmp_path / "run", {"config": config, "machine": machine}) as record:
        for step, rate in enumerate((10_000, 20_000, 21_000), 1):
            row = {"tokens_per_second": rate, "peak_memory_bytes": 3 * 10**10}
            record.append("steps", {"step": step, "loss": 1.0, **row})
    run = read_measured(str(tmp_path / "run"))
    assert (run.tokens_per_second, run.peak_gb, run.assumed) == (20_000, 30, {})
    assert run.job.cluster.name == "8 × A100-SXM4-40GB"
    assert str(run.job.layout).startswith("shard=8,micro_batch=4,micro_batches=2")


def test_a_next_run_that_no_layout_takes_is_refused(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text('like = "H100-SXM"\n')
    mine = ng.MeasuredRun("llama-8b", chip=file, chips=8, tokens_per_second=53_336)
    assert mine.next().job.tokens_per_step == mine.job.tokens_per_step
    with refused("a batch that no layout takes"):
        titan().next(chips=64, tokens_per_step=8192, layout="zero=3,tensor=1")


def test_torchtitans_log_is_a_measured_run(tmp_path):
    (tmp_path / "train.log").write_text(TITAN_LOG)
    layout = "context=2,micro_batch=1,micro_batches=1,recompute=full"
    run = read_measured(
        f"log={tmp_path / 'train.log'} model=llama-8b chip=H100-SXM chips=4 sequence_length=8192 "
        f"program=torchtitan,kernels=eager,loss=whole layout={layout}"
    )
    assert run.tokens_per_second == 4 * 5_615
    assert run.peak_gb == pytest.approx(44.84 * 1.0737, rel=1e-3)
    assert run.job.tokens_per_second == pytest.approx(4 * 5_615, rel=0.15)
    assert run.counted_gb == pytest.approx(run.peak_gb, rel=0.1)


def test_a_folder_of_the_hugging_face_trainer_is_a_measured_run(tmp_path):
    config = """{"model_type": "llama", "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22,
                 "num_attention_heads": 32, "num_key_value_heads": 4, "vocab_size": 32000}"""
    state = """{"train_batch_size": 4, "log_history": [{"step": 10, "loss": 1.0}, {"step": 20, "train_runtime": 100.0,
                "train_samples_per_second": 6.4, "train_steps_per_second": 0.2}]}"""
    (tmp_path / "config.json").write_text(config)
    (tmp_path / "adapter_config.json").write_text('{"r": 8}')
    (tmp_path / "trainer_state.json").write_text(state)
    words = f"log={tmp_path} chip=A100-SXM4-80GB"
    with refused("no length"):
        read_measured(words)
    run = read_measured(f"{words} sequence_length=1024")
    assert run.tokens_per_second == 6.4 * 1024 and run.job.tuning.lora == 8
    assert run.job.layout.micro_batch == 4 and run.job.layout.num_sequences == 32
    (tmp_path / "trainer_state.json").write_text(
        state.replace("{", '{"num_input_tokens_seen": 400000, ', 1)
    )
    assert read_measured(words).tokens_per_second == 4_000
    (tmp_path / "adapter_config.json").write_text("{")
    with refused("damaged adapters"):
        read_measured(words)
