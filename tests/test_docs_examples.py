"""Examples and sessions of the README and the documentation run as they stand, each alone, and
print what the page says.
"""

import re
from pathlib import Path

import click
import pytest
import torch

from narrowgauge.cli.main import main
from script_modules import script_module

DOCS = Path(__file__).parents[1] / "docs"
README = "../README.md"
PAGES = [README, *sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))]
# An example, at most a line of prose, and what the example prints. Prose that says "figures aside"
# compares words only, and "On one machine" nothing.
EXAMPLE = re.compile(
    r"^```python\n(.*?)^```(?:\n\n(?:(?!```)([^\n]+)\n\n)?```text\n(.*?)^```)?",
    re.DOTALL | re.MULTILINE,
)


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)


def text_of(page: str) -> str:
    return (DOCS / page).read_text(encoding="utf-8")


def examples(page: str):
    return EXAMPLE.findall(text_of(page))


def without_figures(lines: list[str]) -> list[list[str]]:
    return [re.sub(r"[+−-]?\d[\d,.]*(?:e[+-]?\d+)?", "#", line).split() for line in lines]


EXAMPLES = [(page, number) for page in PAGES for number in range(len(examples(page)))]


@pytest.mark.filterwarnings("ignore::narrowgauge.optim.audit.audit.UpdateLossWarning")
@pytest.mark.parametrize(("page", "number"), EXAMPLES)
def test_every_example_runs_alone(page, number, capsys):
    example, prose, expected = examples(page)[number]
    exec(compile(example, f"{page}, example {number}", "exec"), {"__name__": "__main__"})
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    if "figures aside" in prose:
        assert without_figures(printed) == without_figures(expected.splitlines())
    elif expected and "On one machine" not in prose:
        assert printed == expected.splitlines()


@pytest.mark.parametrize("page", [page for page in PAGES if "<!-- session: " in text_of(page)])
def test_sessions_print_what_the_page_says(page, tmp_path):
    sessions = script_module("docs/sessions.py")
    with sessions.checkout(tmp_path):
        for session in sessions.sessions(DOCS / page):
            printed = session.run()
            assert session.agrees(printed), (
                f"run python docs/sessions.py docs/{page}, which prints:\n{printed}"
            )


BLOCK = re.compile(r"^```(?:bash|console)\n(.*?)^```", re.DOTALL | re.MULTILINE)
COMMAND = re.compile(r"^(?:torchrun .*-m )?narrowgauge ([^#\n]*)", re.MULTILINE)


@pytest.mark.parametrize("page", PAGES)
def test_commands_of_a_page_parse(page):
    """Every ``narrowgauge`` command in a block names a command and flags that exist."""
    for block in BLOCK.findall(text_of(page)):
        for line in COMMAND.findall(block.replace("\\\n", "")):
            words = line.split()
            command = main
            while isinstance(command, click.Group) and words and words[0] in command.commands:
                command = command.commands[words.pop(0)]
            assert not isinstance(command, click.Group) or not words, line
            flags = {"--help"}
            for parameter in command.params:
                flags.update((*parameter.opts, *parameter.secondary_opts))
            assert {word for word in words if word.startswith("--")} <= flags, line


@pytest.mark.parametrize("page", ["../RESULTS.md", "../CLAIMS.md", *PAGES])
def test_a_figure_s_command_exists(page):
    """A benchmark, a test or a ``./dev`` command that a page names is in the checkout."""
    text = text_of(page)
    root = DOCS.parent
    commands = re.findall(
        r"^    ([a-z]+)(?:\)| \[)", (root / "dev").read_text("utf-8"), re.MULTILINE
    )
    assert set(re.findall(r"`\./dev ([a-z]+)", text)) <= set(commands)
    scripts = []
    for name in re.findall(r"\./dev bench ([a-z]\w*)", text):
        scripts.append(f"benchmarks/{name}.py")
    tests = re.findall(r"\./dev test (?:-n0 )?(tests/[\w./]+)", text)
    assert [path for path in (*scripts, *tests) if not (root / path).exists()] == []
