"""The files of this folder: checkpoints that the packages themselves wrote, and fingerprints of the values they read in them.

``PYTHONPATH=… TORCHDYNAMO_DISABLE=1 TRITON_INTERPRET=1 python make.py`` with torchao 0.18.0, torch-optimi 0.3.3, flashoptim
0.1.4, triton 3.9 and deepspeed 0.19.8 on a CPU; ``deepspeed-zeroN`` by ``python make.py deepspeed N`` on two processes over gloo.
FlashOptim's kernels run in Triton's interpreter; a CPU is not allowed to quantize there, so the state dict is laid out here
from the codes that its own kernels give.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

HERE = Path(__file__).parent
EXPECTED = HERE / "expected.json"


def fingerprint(values: Tensor) -> str:
    return hashlib.sha256(values.detach().float().contiguous().numpy().tobytes()).hexdigest()[:16]


def expect(name: str, values: dict[str, Tensor]) -> None:
    known = json.loads(EXPECTED.read_text()) if EXPECTED.exists() else {}
    known[name] = {key: fingerprint(value) for key, value in values.items()}
    EXPECTED.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.big = nn.Linear(64, 64)
        self.small = nn.Linear(64, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.small(self.big(x).tanh())


def trained(optimizer_of: Any, dtype: torch.dtype = torch.bfloat16) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Small().to(dtype)
    optimizer = optimizer_of(model.parameters())
    for step in range(3):
        torch.manual_seed(step)
        model(torch.randn(5, 64, dtype=dtype)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def save(name: str, model: nn.Module, state: Any) -> None:
    torch.save({"model": model.state_dict(), "optimizer": state}, HERE / f"{name}.pt")


def torchao() -> None:
    from torchao.optim import AdamW4bit, AdamW8bit, AdamWFp8

    for kind, name in ((AdamW8bit, "torchao-8bit"), (AdamW4bit, "torchao-4bit"), (AdamWFp8, "torchao-fp8")):
        model, optimizer = trained(lambda p, kind=kind: kind(p, lr=1e-2))
        save(name, model, optimizer.state_dict())
        weight = model.big.weight
        entry = optimizer.state[weight]
        expect(name, {key: entry[key].dequantize() for key in ("exp_avg", "exp_avg_sq")} | {"weight": weight})


def optimi() -> None:
    import optimi

    model, optimizer = trained(lambda p: optimi.AdamW(p, lr=1e-2, triton=False, foreach=False))
    save("optimi", model, optimizer.state_dict())
    entry = optimizer.state[model.big.weight]
    expect("optimi", {"weight": model.big.weight.double() + entry["kahan_comp"].double()})


def flashoptim() -> None:
    import flashoptim.optimizers as flash
    import triton

    global tl
    import triton.language as tl

    @triton.jit
    def copysign(a, b):  # the interpreter has no libdevice
        return tl.where(b < 0, -a, a)

    class Kernel:  # autotuning asks for a GPU
        def __init__(self, kernel: Any) -> None:
            self.kernel = kernel

        def __getitem__(self, _grid: Any) -> Any:
            return lambda *args: self.kernel.fn[lambda _: (4,)](*args, BLOCK_SIZE_N=128)

    flash.libdevice.copysign = copysign
    flash._get_sm_count = lambda device=None: 4
    flash._triton_quantize_kernel = Kernel(flash._triton_quantize_kernel)
    flash._triton_dequantize_kernel = Kernel(flash._triton_dequantize_kernel)
    for bits, dtype in ((24, torch.bfloat16), (32, torch.bfloat16), (24, torch.float16)):
        name = f"flashoptim-{bits}-{str(dtype)[6:]}"

        def make(parameters: Any, bits: int = bits) -> torch.optim.Optimizer:
            # Error bits are refused without a GPU, although their kernels run in the interpreter.
            with mock.patch.object(torch.cuda, "is_available", return_value=True):
                return flash.FlashAdamW(parameters, lr=1e-2, master_weight_bits=bits, fused=False, quantize=False)

        model, optimizer = trained(make, dtype)
        state = optimizer.state_dict()
        read: dict[str, Tensor] = {}
        for number, parameter in enumerate(model.parameters()):
            entry = state["state"][number]
            for key, spec in optimizer.quantized_state_spec.items():
                codes, scales = flash.quantize(
                    entry.pop(key), signed=spec.signed, sqrt=spec.sqrt, softsign=spec.softsign
                )
                if number == 0:
                    read[key] = flash.dequantize(
                        codes, scales, signed=spec.signed, sqrt=spec.sqrt, softsign=spec.softsign
                    )
                entry[f"{key}::quantized"] = codes
                entry[f"{key}::scales"] = scales.view(torch.bfloat16) if dtype is torch.bfloat16 else scales
            if number == 0:
                read["weight"] = flash.reconstruct_fp32_param(
                    parameter.detach(), optimizer.state[parameter]["error_bits"]
                )
        save(name, model, state)
        expect(name, read)


def deepspeed_rank(rank: int, stage: int) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="29617"
    )
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    deepspeed.comm.torch.build_shm_op = lambda: None  # compiles C++ that gloo does without
    deepspeed.init_distributed("gloo", verbose=False)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.LayerNorm(7), nn.Linear(7, 11, bias=False))
    model.register_buffer("count", torch.arange(3))
    groups = [
        {"params": [p for p in model.parameters() if (p.ndim > 1) == is_matrix], "weight_decay": 0.1 * is_matrix}
        for is_matrix in (True, False)
    ]
    config = {
        "train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": True}, "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }  # fmt: skip
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(groups, lr=1e-2), config=config)
    for step in range(3):
        torch.manual_seed(2 * step + rank)
        engine.backward(engine(torch.randn(2, 6, dtype=torch.bfloat16)).float().square().mean())
        engine.step()
    out = HERE / f"deepspeed-zero{stage}"
    engine.save_checkpoint(str(out), tag="global_step3")
    if rank == 0:
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        for name in ("zero_to_fp32.py", "zero_to_torch.py"):
            (out / name).unlink(missing_ok=True)
        values = get_fp32_state_dict_from_zero_checkpoint(str(out))
        expect(f"deepspeed-zero{stage}", {key: value for key, value in values.items() if key != "count"})


if __name__ == "__main__":
    if sys.argv[1:2] == ["deepspeed"]:
        torch.multiprocessing.spawn(deepspeed_rank, args=(int(sys.argv[2]),), nprocs=2)
    else:
        for make in (torchao, optimi, flashoptim):
            make()
