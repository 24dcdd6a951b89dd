"""Without the extras, the optimizers, layers, tables and plans work, and what is missing is asked
for in one line.
"""

import re
import subprocess
import sys
from pathlib import Path

import narrowgauge

ROOT = Path(__file__).parents[1]
WITHOUT = """
import sys
# As for a package that is not installed: an import fails, and find_spec returns None.
for name in ("transformers", "tokenizers", "datasets", "accelerate", "lightning", "peft", "pandas"):
    sys.modules[name] = None
"""


def run(code: str, *words: str, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    path = str(Path(narrowgauge.__file__).parents[1])
    command = [sys.executable, "-c", WITHOUT + code, *words]
    return subprocess.run(
        command, capture_output=True, text=True, cwd=folder, env={"PYTHONPATH": path, "PATH": ""}
    )


COMMAND = "from narrowgauge.cli.main import main\nmain()\n"


def test_the_readmes_example_comparisons_and_narrow_layers_need_no_extra():
    example = re.search(
        r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL
    )
    code = """
def train(recipe, seed, log):
    model, optimizer = ng.prepare(torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Linear(32, 32)), recipe, lr=1e-3)
    model(torch.randn(4, 32, dtype=torch.bfloat16)).float().square().mean().backward()
    optimizer.step()
    return 1.0

print(ng.compare(train, ["float8-row/word", "bfloat16/exact"]).baseline)
"""
    done = run(example[1] + code)
    assert done.returncode == 0 and "of its update" in done.stdout, done.stderr
    assert done.stdout.splitlines()[-1] in ("float8-row/word", "bfloat16/exact")


def test_tables_and_plans_need_no_extra():
    for line in (
        "show recipe bfloat16/word",
        "plan run --model llama-8b --chip H100-SXM --chips 8",
        "train --help",
    ):
        done = run(COMMAND, *line.split())
        assert done.returncode == 0 and done.stdout, done.stderr


def test_a_missing_package_is_asked_for_in_one_line(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
    for line in (
        "train",
        "compare --recipes bfloat16/word",
        "plan run --model config.json --chip H100-SXM",
    ):
        done = run(COMMAND, *line.split(), folder=tmp_path)
        assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
        assert 'pip install "narrowgauge[' in done.stderr
    code = "import narrowgauge as ng\nng.compare(lambda *_: 1.0, ['a'], out='runs')\n"
    assert run(code, folder=tmp_path).returncode == 0
    assert (tmp_path / "runs" / "report.html").exists()  # a page needs no extra
