"""A trace of torch.profiler in the terms of a plan: one that PyTorch wrote here, and one of a GPU
made by hand, whose shares are known.
"""

from __future__ import annotations

import gzip
import json
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
    steps = [event("user_annotation", f"ProfilerStep#{i}", 50 * i, 50 * i + 50) for i in range(4)]
    times = read_trace(write(tmp_path / "gpu.json", [*GPU, *steps]))
    assert times.steps == 4
    assert times.seconds["matmuls"] == pytest.approx(50e-6 / 4)


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
    assert times.seconds["optimizer"] == pytest.approx(1e-6 * sum(updates) / 3)
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
    with pytest.raises(RecordError, match="No plan in"):
        read_trace(path, path)
    result = call("diagnose", str(path), str(tmp_path / "plan.json"), "--json")
    assert json.loads(result.stdout)["seconds"]["matmuls"] == pytest.approx(50e-6)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{", "is no JSON"),
        (gzip.compress(b"{}" * 99)[:20], "is no JSON"),
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
