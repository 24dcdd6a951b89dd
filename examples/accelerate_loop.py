"""Narrowgauge in a loop of Hugging Face's Accelerate: one line changes, and a resume has the same
bits.

Run with: python examples/accelerate_loop.py          (or: accelerate launch examples/accelerate_loop.py)
"""

import tempfile

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset

import narrowgauge as ng

set_seed(0)  # the same weights on every rank
inputs = torch.randn(512, 32)
targets = torch.sin(inputs @ torch.randn(32, 8))
loader = DataLoader(TensorDataset(inputs.bfloat16(), targets), batch_size=64)

accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=2)
model = torch.nn.Sequential(torch.nn.Linear(32, 256), torch.nn.GELU(), torch.nn.Linear(256, 8))
model, optimizer = ng.prepare(
    model, "bfloat16/word", lr=3e-3, max_grad_norm=1.0
)  # it clips: no clip_grad_norm_
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=400)
model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)


def epoch() -> float:
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = torch.nn.functional.mse_loss(model(x).float(), y)
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    return loss.item()


accelerator.print(f"first {epoch():.4f}")
for _ in range(20):
    epoch()
with tempfile.TemporaryDirectory() as folder:
    accelerator.save_state(folder)
    once = [epoch() for _ in range(3)]
    accelerator.load_state(folder)
    again = [epoch() for _ in range(3)]
reading = ng.audit(optimizer.optimizer).total
accelerator.print(f"last {once[-1]:.4f}  EDQ {reading.edq:.3f}")
accelerator.print(f"resumed with the same bits: {once == again}")
