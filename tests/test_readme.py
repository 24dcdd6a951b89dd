"""The README tells the truth: its commands, its example, its table and its tree are checked against the product."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from expectations import is_excerpt
from narrowgauge.spec import show

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"

# What a line of the tree may name only in its comment, to be looked for inside the folder that the line is about.
NAMED_INSIDE = re.compile(r"(?<![\w/.-])[\w-]+\.(?:py|md|txt|toml|csv)\b")


def readme() -> str:
    return README.read_text(encoding="utf-8")


def between(text: str, marker: str) -> str:
    found = re.search(rf"<!-- {marker} -->\n(.*?)<!-- /{marker} -->", text, re.DOTALL)
    assert found, f"README.md lacks the markers <!-- {marker} --> and <!-- /{marker} -->"
    return found.group(1).strip()


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def paths_in_tree(tree: str) -> Iterator[str]:
    """Every path an annotated tree names, relative to its root.

    An entry stands behind a branch (`├── ` or `└── `) and ends where two spaces begin its comment; ` · ` parts several
    entries on one line, and a word in brackets explains the one before it. Deeper branches belong to the entry above.

    >>> list(paths_in_tree("├── a.md · b.md   two files\\n└── src/\\n    └── c/   d.py (one) · e.py"))
    ['a.md', 'b.md', 'src/', 'src/c/', 'src/c/d.py', 'src/c/e.py']
    """
    folders: list[tuple[int, str]] = []
    for line in tree.splitlines():
        branch = re.search(r"[├└]──\s+", line)
        if not branch:
            continue
        folders = [(column, folder) for column, folder in folders if column < branch.start()]
        above = folders[-1][1] if folders else ""
        entries, _, comment = line[branch.end() :].partition("  ")
        for entry in entries.split("·"):
            name = re.sub(r"\(.*?\)", "", entry).strip()
            yield above + name
            if name.endswith("/"):
                folders.append((branch.start(), above + name))
                yield from (above + name + inside for inside in NAMED_INSIDE.findall(comment))


def test_holds_the_two_commands() -> None:
    lines = [line.split("#")[0].strip() for block in blocks(readme(), r"\w*") for line in block.splitlines()]
    assert "./dev train" in lines
    assert "./dev test" in lines
    assert os.access(ROOT / "dev", os.X_OK)


def test_the_example_runs(tmp_path: Path) -> None:
    examples = blocks(readme(), "python")
    assert examples, "README.md holds no ```python block"
    for number, example in enumerate(examples):
        ast.parse(example)
        script = tmp_path / f"example_{number}.py"
        script.write_text(example, encoding="utf-8")
        result = subprocess.run(
            [sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300
        )
        assert result.returncode == 0, result.stderr


def test_the_table_is_the_one_the_words_give() -> None:
    assert is_excerpt(between(readme(), "storages"), show.markdown("storages"))


def test_every_path_of_the_tree_exists() -> None:
    paths = list(paths_in_tree(between(readme(), "tree")))
    assert len(paths) >= 20
    missing = [path for path in paths if not (ROOT / path).exists()]
    assert not missing, f"the README's tree names what is not there: {missing}"
    wrong = [path for path in paths if path.endswith("/") != (ROOT / path).is_dir()]
    assert not wrong, f"a folder ends in '/', a file does not: {wrong}"


def test_the_tree_leaves_out_no_part_of_the_package() -> None:
    package = "src/narrowgauge/"
    paths = set(paths_in_tree(between(readme(), "tree")))
    there = [entry for entry in (ROOT / package).iterdir() if entry.suffix == ".py" or (entry / "__init__.py").exists()]
    left_out = [entry.name for entry in there if not {package + entry.name, f"{package}{entry.name}/"} & paths]
    assert not left_out, f"the README's tree leaves out {left_out}"


def test_every_link_leads_somewhere() -> None:
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", readme())
    assert not [link for link in links if not (ROOT / link).exists()]


def test_no_blank_was_left_to_fill_in() -> None:
    for page in (README, *sorted((ROOT / "docs").rglob("*.md"))):
        text = page.read_text(encoding="utf-8")
        assert not re.search(r"(?<!\w)@[\w ]+@|\bTBD\b", text), f"{page.name} holds a placeholder"
        assert not re.search(r"<!-- (\w+) -->\s*<!-- /\1 -->", text), f"{page.name} holds an empty block"
