"""A training loop of your own, recorded like a run of narrowgauge train, which goes on where it was
killed.

Run with: python examples/recorded_loop.py [FOLDER]; then narrowgauge report FOLDER. Kill it and run
it again.
"""

import os
import sys
from pathlib import Path

import torch

import narrowgauge as ng

folder = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/recorded-loop")
STEPS = 200
RECIPE = "bfloat16/word"

torch.manual_seed(0)
inputs = torch.randn(512, 32)
targets = torch.sin(inputs @ torch.randn(32, 8))
model = torch.nn.Sequential(torch.nn.Linear(32, 256), torch.nn.GELU(), torch.nn.Linear(256, 8))
model, optimizer = ng.prepare(model, RECIPE, lr=3e-3)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS)

settings = {"model": "two layers", "steps": STEPS, "lr": 3e-3, "schedule": "cosine"}
recorder = ng.RunRecorder(folder, model, optimizer, settings=settings, resume=True)
checkpoint = folder / "checkpoint.pt"
parts = {"model": model, "optimizer": optimizer, "schedule": schedule}
done = 0
if checkpoint.exists():
    saved = torch.load(checkpoint)
    done = saved.pop("step")
    for name, state in saved.items():
        parts[name].load_state_dict(state)
recorder.go_back(done)


def loss_of(rows: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.mse_loss(model(inputs[rows].bfloat16()).float(), targets[rows])


with recorder:
    for step in range(done + 1, STEPS + 1):
        rows = torch.randint(512, (64,), generator=torch.Generator().manual_seed(step))
        loss = loss_of(rows)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        recorder.step(loss, tokens=64)
        schedule.step()
        if step % 50 == 0:
            with torch.no_grad():
                recorder.evaluate(loss_of(torch.arange(512)))
            states = {name: part.state_dict() for name, part in parts.items()}
            torch.save({"step": step, **states}, f"{checkpoint}.new")
            os.replace(f"{checkpoint}.new", checkpoint)  # whole, or not there

summary = ng.read_run(folder).summary
print(f"validation loss {summary['val_loss']:.4f}  EDQ {summary['edq']:.3f}")
print(f"narrowgauge report {folder}")
