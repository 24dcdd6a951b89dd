"""torchtitan's own Trainer on four processes with gloo: FSDP2 over two, tensor parallel over two."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.frameworks

STEPS = 4
TESTS = Path(__file__).parents[1]


def one_rank(folder: str, compute: str, stop: str) -> None:
    """Train on this process's rank, and write what rank 0 has computed."""
    import torch
    from torch.distributed.fsdp import FSDPModule

    from integrations import titan_on_cpu
    from narrowgauge.integrations.torchtitan import NarrowgaugeConverter, narrowgauge_adamw

    titan_on_cpu._tools.device_module.device_count = lambda: 4
    set_factor = FSDPModule.set_gradient_divide_factor

    def with_sums(module: FSDPModule, factor: float) -> None:
        """Divide gradients in a kernel of its own: gloo has no sum with a factor."""
        set_factor(module, factor)
        module.set_force_sum_reduction_for_comms(True)

    FSDPModule.set_gradient_divide_factor = with_sums
    optimizer = narrowgauge_adamw(lr=1e-3, max_grad_norm=1.0, storage="word")
    config = titan_on_cpu.configured(Path(folder), optimizer)
    config.training.dtype = "bfloat16"
    config.training.max_norm = math.inf
    config.training.local_batch_size = 2
    config.parallelism.data_parallel_shard_degree = 2
    config.parallelism.tensor_parallel_degree = 2
    # The other ways to place parameters need PyTorch 2.14.
    config.parallelism.spmd_backend = "partial_dtensor"
    config.checkpoint.enable = True
    config.checkpoint.interval = 2
    NarrowgaugeConverter.Config(compute=compute).build().convert(config.model_spec.model)  # type: ignore[union-attr]
    trained = titan_on_cpu.train(config, int(stop))
    if os.environ["RANK"] == "0":
        sums = {}
        for name, value in {**trained.weights, **trained.states}.items():
            if isinstance(value, torch.Tensor):
                sums[name] = hash(value.float().numpy().tobytes())
        size = next(iter(trained.trainer.optimizers)).bytes_per_param()
        result = {"losses": trained.losses, "sums": sums, "bytes": size}
        Path(folder, "result.json").write_text(json.dumps(result))


def train(folder: Path, stop: int = STEPS) -> dict[str, Any]:
    """Return what four ranks compute until step ``stop``, from the newest checkpoint of a folder."""
    environment = {
        **os.environ, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path]),
    }  # fmt: skip
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4",
        __file__, str(folder), "float8-row", str(stop),
    ]  # fmt: skip
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return result


def test_four_ranks_train_and_a_resume_has_their_bits(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole")
    first = train(tmp_path / "parts", stop=2)
    then = train(tmp_path / "parts")
    assert len(whole["sums"]) > 20
    assert first["losses"] + then["losses"] == whole["losses"]
    assert then["sums"] == whole["sums"]
    assert whole["bytes"] < 8.1
    assert all(4 < loss < 7 for loss in whole["losses"])


if __name__ == "__main__":
    one_rank(*sys.argv[1:])
