"""A trace of torch.profiler in the terms of a plan: one that PyTorch wrote here, and one of a GPU
made by hand, whose shares are known.
"""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import profile, record_function, schedule

from narrowgauge.errors import RecordError
from narrowgauge.planner.plan import plan
from narrowgauge.planner.trace import GROUPS, read_trace
from trainer.tiny_runs import call

Events = list[dict[str, Any]]


def event(cat: str, name: str, start: float, end: float, **args: Any) -> dict[str, Any]:
    thread = {"pid": 1, "tid": 1}
    return {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": end - start, "args": args, **thread}  # fmt: skip


def write(path: Path, events: Events) -> Path:
    text = json.dumps({"traceEvents": events})
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def launched(number: int, operation: str, kernel: str, start: float, end: float) -> Events:
    """Return an operation, its launch on the host, and its kernel."""
    host = 10.0 * number
    return [
        event("cpu_op", operation, host, host + 8),
        event("cuda_runtime", "cudaLaunchKernel", host + 1, host + 2, correlation=number),
        event("kernel", kernel, start, end, correlation=number, stream=7),
    ]


GPU = [
    *launched(1, "aten::mm", "nvjet_hsh_128x256_64x4_1x2_h_bz_TNN", 100, 150),
    *launched(2, "aten::gelu", "void at::native::vectorized_elementwise_kernel<4>", 150, 160),
    # The cast of an operation, by the operation that called it.
    event("cpu_op", "aten::to", 29, 39),
    *launched(3, "aten::copy_", "void at::native::unrolled_elementwise_kernel<2>", 160, 165),
    # Half of the all-gather runs beside the flash attention.
    event("kernel", "ncclDevKernel_AllGather_RING_LL", 165, 175, correlation=90),
    event("kernel", "flash_fwd_kernel<cutlass>", 170, 180, correlation=91),
    *launched(5, "mine::op", "my_kernel", 180, 184),
    event("user_annotation", "Optimizer.step#Muon.step", 59, 75),
    *launched(6, "aten::mm", "sm90_xmma_gemm_bf16", 190, 194),  # of the optimizer
    event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 194, 196),
    event("user_annotation", "enumerate(DataLoader)#_Next", 184, 188),
]
EXPECTED = {
    "matmuls": 50, "attention": 10, "optimizer": 4, "casts": 5, "elementwise": 10, "unrecognized": 4,
    "communication": 5, "copies": 2, "loader": 4, "gaps": 2,
}  # fmt: skip


@pytest.mark.parametrize("name", ["gpu.json", "gpu.pt.trace.json.gz"])
def test_the_time_of_a_gpu_is_divided_into_groups(name: str, tmp_path: Path) -> None:
    times = read_trace(write(tmp_path / name, GPU))
    assert {group: round(1e6 * value, 6) for group, value in times.seconds.items()} == EXPECTED
    assert (times.device, times.steps) == ("GPU", 1)
    assert times.names == {"my_kernel": pytest.approx(4e-6)}
    assert "Not recognized: my_kernel 4.2%." in str(times)


def test_times_are_of_one_step(tmp_path: Path) -> None:
    ends = (0, 20, 40, 59, 80)
    steps = [event("user_annotation", f"ProfilerStep#{i}", ends[i], ends[i + 1]) for i in range(4)]
    times = read_trace(write(tmp_path / "gpu.json", [*GPU, *steps]))
    assert times.steps == 4
    assert times.seconds["matmuls"] == pytest.approx(50e-6 / 4)


def test_a_mark_in_which_nothing_starts_is_no_step(tmp_path: Path) -> None:
    x = torch.ones(64, 64)
    with profile(schedule=schedule(wait=0, warmup=1, active=10)) as profiler:
        for _ in range(5):
            torch.mm(x, x)
            profiler.step()
    profiler.export_chrome_trace(str(tmp_path / "cpu.json"))
    assert read_trace(tmp_path / "cpu.json").steps == 4
    tail = [
        event("user_annotation", "ProfilerStep#0", 0, 80),
        event("user_annotation", "ProfilerStep#1", 80, 5000),
        event("user_annotation", "enumerate(DataLoader)#_Next", 82, 84),
        event("cuda_runtime", "cudaDeviceSynchronize", 100, 150, correlation=95),
    ]
    assert read_trace(write(tmp_path / "gpu.json", [*GPU, *tail])).steps == 1
    host = [row for row in (*GPU, *tail) if row["cat"] not in ("kernel", "gpu_memcpy")]
    times = read_trace(write(tmp_path / "host.json", host))
    assert times.steps == 1
    assert sum(times.seconds.values()) == pytest.approx(188e-6)  # to the loader's end


def test_the_times_of_several_gpus_are_means(tmp_path: Path) -> None:
    """Merged, one GPU's matmuls would hide the other's communication."""
    rows = []
    for device, names in enumerate((("gemm", "ncclKernel"), ("ncclKernel", "gemm"))):
        for place, name in enumerate(names):
            rows.append(event("kernel", name, 100 * place, 100 * place + 80, device=device))
    times = read_trace(write(tmp_path / "gpu.json", rows))
    assert times.device == "mean of 2 GPUs"
    expected = {"matmuls": 80e-6, "communication": 80e-6, "gaps": 20e-6}
    assert times.seconds == pytest.approx(expected)


def test_a_name_has_no_more_than_its_group(tmp_path: Path) -> None:
    """Three streams run the same kernel; the time counts once."""
    rows = [event("kernel", "foo_a", 0, 100, stream=stream) for stream in range(3)]
    times = read_trace(write(tmp_path / "gpu.json", rows))
    assert times.names == {"foo_a": pytest.approx(100e-6)}
    assert "foo_a 100.0%" in str(times)


@pytest.mark.parametrize("seed", range(20))
def test_groups_sum_to_the_time_and_names_to_their_group(seed: int, tmp_path: Path) -> None:
    choose = random.Random(seed)
    kinds = choose.choice((("cpu_op",), ("cpu_op", "kernel", "cuda_runtime", "gpu_memcpy")))
    names = ("aten::mm", "gemm", "foo", "bar", "ncclKernel", "Optimizer.step#A", "ProfilerStep#1")
    rows = []
    for _ in range(60):
        start, duration = choose.randrange(100), choose.choice((0, 1, 7, 30))
        place = {"device": choose.randrange(3), "correlation": choose.randrange(9)}
        name, kind = choose.choice(names), choose.choice(kinds)
        kind = "user_annotation" if "#" in name else kind
        rows.append(event(kind, name, start, start + duration, **place))
        rows[-1]["tid"] = choose.randrange(3)
    # The loader waits before and after the GPUs work. That time is not theirs.
    loader = event("user_annotation", "enumerate(DataLoader)#_Next", 0, 300)
    times = read_trace(write(tmp_path / "trace.json", [*rows, loader]))
    counted = [row for row in rows if row["cat"] in ("kernel", "gpu_memcpy")] or [loader]
    end = max(row["ts"] + row["dur"] for row in counted)
    whole = end - min(row["ts"] for row in counted)
    assert times.steps * sum(times.seconds.values()) == pytest.approx(1e-6 * whole)
    assert sum(times.names.values()) == pytest.approx(times.seconds.get("unrecognized", 0))
    assert min(times.seconds.values()) > 0


class Doubled(torch.autograd.Function):
    """Work that PyTorch does not record: NumPy does it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(x.numpy() * 2)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(gradients[0].numpy() * 2)


def test_what_a_cpu_works_at_is_no_gap(tmp_path: Path) -> None:
    x = torch.ones(1 << 20, requires_grad=True)
    with profile() as profiler:
        loss = Doubled.apply(x).sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_([x], 1.0)
    profiler.export_chrome_trace(str(tmp_path / "cpu.json"))
    times = read_trace(tmp_path / "cpu.json")
    assert {"Doubled", "DoubledBackward"} <= set(times.names)
    assert "optimizer" not in times.seconds


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("aten::mkldnn_rnn_layer_backward", "matmuls"),
        ("aten::_cudnn_rnn", "matmuls"),
        ("aten::gelu_backward", "elementwise"),
        ("aten::linalg_vector_norm", "elementwise"),
        ("aten::_fft_r2c", "unrecognized"),
        ("aten::linalg_eigh", "unrecognized"),
        ("AddmmBackward0", "gaps"),
        ("torch::autograd::CopyBackwards", "gaps"),
    ],
)
def test_an_operation_has_the_group_of_its_work(name: str, group: str, tmp_path: Path) -> None:
    times = read_trace(write(tmp_path / "cpu.json", [event("cpu_op", name, 0, 9)]))
    assert times.seconds == {group: pytest.approx(9e-6)}


BROKEN = ("[]", "{}", "null", "true", '"a"', "-1", "0", "NaN", "Infinity", "1e999", "9" * 400)


@pytest.mark.parametrize("value", BROKEN)
def test_no_value_of_an_event_breaks_the_reading(value: str, tmp_path: Path) -> None:
    """Put a value into each place of a trace. The answer is one of finite times, or a refusal."""
    whole = event("kernel", "gemm", 10, 20, device=0, correlation=1)
    rest = [
        event("cpu_op", "aten::mm", 0, 10),
        event("cuda_runtime", "Launch", 1, 2, correlation=1),
    ]
    path = tmp_path / "trace.json"
    for row in (whole, *rest):
        for key in (*row, *row["args"]):
            changed = {**row, "args": dict(row["args"])}
            (changed if key in row else changed["args"])[key] = "HERE"
            for others in ([], [*rest, whole]):
                text = json.dumps({"traceEvents": [changed, *others]})
                path.write_text(text.replace('"HERE"', value))
                try:
                    times = read_trace(path)
                except RecordError:
                    assert not others
                else:
                    assert 0 < sum(times.seconds.values()) < 1
                    assert "%" in str(times)


def test_a_trace_of_this_machine(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.LayerNorm(32), torch.nn.GELU())
    optimizer = torch.optim.AdamW(model.parameters())
    targets = torch.arange(8)
    with profile(schedule=schedule(wait=0, warmup=1, active=3, repeat=1)) as profiler:
        for _ in range(4):
            x = model(torch.ones(8, 32)).reshape(2, 1, 4, 32).bfloat16()
            x = torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)
            with record_function("mine"):  # a mark of the user's is no operation
                loss = torch.nn.functional.cross_entropy(x.float().reshape(8, 32), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            profiler.step()
    profiler.export_chrome_trace(str(tmp_path / "cpu.json"))
    times = read_trace(tmp_path / "cpu.json")
    assert (times.device, times.steps, times.names) == ("CPU", 3, {})
    assert set(times.seconds) == set(GROUPS) - {"unrecognized", "communication", "loader"}
    events = json.loads((tmp_path / "cpu.json").read_text())["traceEvents"]
    updates = [row["dur"] for row in events if row["name"].startswith("Optimizer.step#")]
    # A time of day in microseconds has a thousandth as its last place.
    assert times.seconds["optimizer"] == pytest.approx(1e-6 * sum(updates) / 3, rel=1e-3)
    steps = [row for row in events if row["name"].startswith("ProfilerStep#")]
    whole = max(row["ts"] + row["dur"] for row in steps) - min(row["ts"] for row in steps)
    assert sum(times.seconds.values()) == pytest.approx(1e-6 * whole / 3, rel=0.01)


def test_a_plan_stands_beside_the_trace(tmp_path: Path) -> None:
    answer = plan("llama-125m", recipes="bfloat16/word", chip="H100-SXM")
    row = answer.row()
    (tmp_path / "plan.json").write_text(json.dumps(row, default=str))
    path = write(tmp_path / "gpu.json", GPU)
    times = read_trace(path, tmp_path / "plan.json")
    groups = dict(answer.best.step.groups)
    assert times.planned == pytest.approx(groups)
    cells = {cell["group"]: cell["plan"] for cell in times.table().rows}
    assert cells["matmuls"].endswith(f" {groups['matmuls'] / sum(groups.values()):.1%}")
    assert cells["copies"] == ""
    assert "does not fit" not in str(times)
    with pytest.raises(RecordError, match="No plan in"):
        read_trace(path, path)
    result = call("diagnose", str(path), str(tmp_path / "plan.json"), "--json")
    assert json.loads(result.stdout)["seconds"]["matmuls"] == pytest.approx(50e-6)


OPTION = {"step_seconds": {"matmuls": 2.0, "total": 2.0}, "tokens_per_step": 8192, "fits": False}


def test_a_plan_that_does_not_fit_says_so(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(json.dumps({"options": [OPTION]}))
    times = read_trace(write(tmp_path / "gpu.json", GPU), tmp_path / "plan.json")
    assert "plan of 8.19k tokens, does not fit" in str(times).splitlines()[1]
    assert times.to_dict()["plan"] == "plan of 8.19k tokens, does not fit"


@pytest.mark.parametrize("value", [value for value in BROKEN if value not in ("0", "true")])
def test_a_plan_of_broken_values_is_refused(value: str, tmp_path: Path) -> None:
    path = write(tmp_path / "gpu.json", GPU)
    for broken in (
        {"step_seconds": "HERE"},
        {"step_seconds": {"matmuls": "HERE", "total": 1}},
        {"tokens_per_step": "HERE"},
    ):
        text = json.dumps({"options": [{**OPTION, **broken}]})
        (tmp_path / "plan.json").write_text(text.replace('"HERE"', value))
        with pytest.raises(RecordError, match="No plan in"):
            read_trace(path, tmp_path / "plan.json")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{", "is no JSON"),
        (gzip.compress(b"{}" * 99, mtime=0)[:20], "is no JSON"),
        (b"[]", "no list 'traceEvents'"),
        (b'{"traceEvents": {}}', "no list 'traceEvents'"),
        (b'{"traceEvents": [1, {"ph": "X", "name": "a"}]}', "no operation and no kernel"),
        (b'{"traceEvents": [{"ph": "X", "name": 1, "ts": 0, "dur": 1}]}', "no operation"),
    ],
)
def test_what_is_no_trace_is_refused_in_one_line(
    content: bytes, words: str, tmp_path: Path
) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(content)
    with pytest.raises(RecordError, match=words) as refused:
        read_trace(path)
    assert refused.value.advice
    result = call("diagnose", str(path))
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
