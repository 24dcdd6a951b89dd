"""Makes the fixture of one version for ``tests/test_older_runs.py``: run folders, a comparison, optimizer states, zipped.

    PYTHONPATH=CHECKOUT/src OMP_NUM_THREADS=1 python tests/golden/older/make.py tests/golden/older/VERSION

Run it once for each release, with the code of that release, into a new folder. Never replace an existing folder: it stands
for the files that users of that version have. Only public names and the command line are used, so any version can run it.
"""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch

import narrowgauge as ng

sys.path.insert(0, str(Path(__file__).parents[2]))
from golden_files import digest, machine_key

SHAPE = {
    "model_type": "llama", "vocab_size": 272, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64, "tie_word_embeddings": True,
}  # fmt: skip
SETTINGS = {
    "steps": 10, "batch_size": 4, "sequence_length": 16, "eval_every": 5, "eval_batches": 2, "checkpoint_every": 5,
    "keep_checkpoints": 1, "audit_every": 1, "gauges_every": 2, "held_out": 0.2,
}  # fmt: skip
RUNS = {
    "finished": {"recipe": "bfloat16/naive", "lr": 1e-5, "schedule": "constant", "warmup_steps": 0},
    "stopped": {"recipe": "float8-delayed/word", "lr": 3e-3, "gradient_accumulation_steps": 2},
    "stopped-compact": {"recipe": "bfloat16/compact", "lr": 3e-3},
}
OPTIMIZERS = {
    "AdamW-word": ("AdamW", {"storage": "word"}),
    "AdamW-compact": ("AdamW", {"storage": "compact"}),
    "AdamW-collage-plus": ("AdamW", {"storage": "collage-plus"}),
    "Muon-split": ("Muon", {"storage": "split"}),
}
OBJECTS = ("float8-delayed/split8", "bfloat16/collage-plus")


def call(*words: object) -> None:
    subprocess.run([sys.executable, "-m", "narrowgauge", *map(str, words)], check=True, stdout=subprocess.DEVNULL)


def flags(place: Path, out: Path, **changes: Any) -> list[object]:
    given = {**SETTINGS, "model": place / "model", "data": place / "text", "out": out, **changes}
    return [word for name, value in given.items() for word in (f"--{name.replace('_', '-')}", value)]


def lay_out(place: Path) -> None:
    """A model's shape and some text."""
    (place / "model").mkdir()
    (place / "model" / "config.json").write_text(json.dumps(SHAPE))
    (place / "text").mkdir()
    draw = random.Random(0)
    words = ["def", "return", "the", "quick", "brown", "fox", "jumps", "over", "import", "lazy", "dog", "self", "None"]
    for number in range(6):
        (place / "text" / f"{number}.txt").write_text(" ".join(draw.choices(words, k=120)))


def make_runs(place: Path) -> dict[str, list[float]]:
    """A finished run and two stopped ones; returns the losses of the same runs without a stop."""
    losses = {}
    for name, changes in RUNS.items():
        whole, stopped = place / f"{name}-whole", place / name
        call("train", *flags(place, whole, **changes))
        losses[name] = [row["loss"].hex() for row in ng.read_run(whole).steps]
        if name == "finished":
            whole.rename(stopped)
        else:
            call("train", *flags(place, stopped, **changes, stop_after=5))
    return losses


def make_states(place: Path) -> None:
    """For each optimizer: weights, gradients, the state after three steps, and the weights after one more."""
    for name, (kind, options) in OPTIMIZERS.items():
        draw = torch.Generator().manual_seed(0)
        weight = torch.nn.Parameter((torch.rand(12, 32, generator=draw) - 0.5).bfloat16())
        bias = torch.nn.Parameter((torch.rand(12, generator=draw) - 0.5).bfloat16())
        optimizer = getattr(ng, kind)([weight, bias], lr=1e-2, **options)
        for step in range(4):
            gradients = [(torch.rand(p.shape, generator=draw) - 0.5).bfloat16() for p in (weight, bias)]
            if step == 3:
                before, state = [weight.detach().clone(), bias.detach().clone()], optimizer.state_dict()
                stored = [optimizer.stored(p).clone() for p in (weight, bias)]
            weight.grad, bias.grad = gradients
            optimizer.step()
        saved = {
            "weights": before, "state": state, "stored": stored, "gradients": gradients,
            "next": [optimizer.stored(p) for p in (weight, bias)],
        }  # fmt: skip
        torch.save(saved, place / f"{name}.pt")


def make_objects(place: Path) -> None:
    """For each recipe: a model and its optimizer, pickled whole after two steps, and the parameters after one more."""
    for recipe in OBJECTS:
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(32, 16), torch.nn.Linear(16, 32))
        model, optimizer = ng.prepare(net, recipe, lr=1e-2)
        for step in range(3):
            if step == 2:
                torch.save({"model": model, "optimizer": optimizer}, place / f"{recipe.replace('/', '-')}.pt")
            for parameter in model.parameters():
                parameter.grad = ((torch.arange(parameter.numel()) % 7 - 3) / 8).view_as(parameter).to(parameter.dtype)
            optimizer.step()
        torch.save([p.detach() for p in model.parameters()], place / f"{recipe.replace('/', '-')}-next.pt")


def pack(folder: Path, file: Path, without: tuple[str, ...] = ()) -> None:
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as packed:
        for path in sorted(folder.rglob("*")):
            name = path.relative_to(folder)
            if path.name == "run.toml":  # it names this machine's kernel release
                packed.writestr(str(name), re.sub(r'(?m)^system = ".*"', 'system = "Linux"', path.read_text()))
            elif path.is_file() and not any(part in without for part in name.parts):
                packed.write(path, name)


def main() -> None:
    out = Path(sys.argv[1])
    out.mkdir(parents=True)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        lay_out(place)
        losses = make_runs(place)
        for name in RUNS:
            pack(place / name, out / f"{name}.zip")
        changes = {"steps": 6, "eval_every": 2, "lr": 3e-3}
        call(
            "compare",
            "--recipes",
            "bfloat16/master,bfloat16/word",
            "--seeds",
            2,
            *flags(place, place / "compared", **changes),
        )
        # The page can be written again, and finished runs need neither tokens nor weights.
        pack(place / "compared", out / "compared.zip", without=("report.html", "data", "checkpoints"))
        (place / "states").mkdir()
        make_states(place / "states")
        pack(place / "states", out / "states.zip")
        (place / "objects").mkdir()
        make_objects(place / "objects")
        pack(place / "objects", out / "objects.zip")
        call("export", place / "finished", place / "export", "--dtype", "float32")
        known = {
            "key": machine_key(),
            "version": ng.__version__,
            "losses": losses,
            "exported": digest(place / "export"),
        }
    (out / "config.json").write_text(json.dumps(SHAPE, indent=1) + "\n")
    (out / "expected.json").write_text(json.dumps(known, indent=1) + "\n")


main()
