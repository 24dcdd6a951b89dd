"""The README and CONTRIBUTING tell the truth: commands, example, figures, tables and the tree are checked against the product."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from narrowgauge.spec import show
from narrowgauge.spec.notation import parse
from script_modules import script_module

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
MOST_LINES = 120

# What a line of the tree may name only in its comment, to be looked for inside the folder that the line is about.
NAMED_INSIDE = re.compile(r"(?<![\w/.-])[\w-]+\.(?:py|md|txt|toml|csv)\b")


def readme() -> str:
    return README.read_text(encoding="utf-8")


def between(text: str, marker: str) -> str:
    found = re.search(rf"<!-- {marker} -->\n(.*?)<!-- /{marker} -->", text, re.DOTALL)
    assert found, f"the page lacks the markers <!-- {marker} --> and <!-- /{marker} -->"
    return found.group(1).strip()


def tree() -> str:
    return between((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), "tree")


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


def test_it_is_short_and_has_one_picture() -> None:
    assert len(readme().splitlines()) <= MOST_LINES
    assert len(re.findall(r"<img |!\[", readme())) == 1
    pictures = re.findall(r'(?:src|srcset)="([^"]+)"', readme())
    assert pictures == ["docs/images/costs-dark.svg", "docs/images/costs.svg"]
    assert all((ROOT / picture).is_file() for picture in pictures)


def test_words_of_our_own_are_explained_where_they_come_first() -> None:
    first = {word: readme().index(word) for word in ("EDQ", "`word`", "tail")}
    explained = {"EDQ": "*effective descent quality*", "`word`": "the default storage", "tail": "the weight's next"}
    for word, words in explained.items():
        assert abs(readme().index(words) - first[word]) < 200, word


def test_the_example_runs_and_prints_what_is_said(tmp_path: Path) -> None:
    examples = blocks(readme(), "python")
    said = re.findall(r"^It prints `(.*?)`", readme(), re.MULTILINE)
    assert examples and len(said) == len(examples), "README.md holds no ```python block, or one that it says nothing of"
    for number, example in enumerate(examples):
        ast.parse(example)
        script = tmp_path / f"example_{number}.py"
        script.write_text(example, encoding="utf-8")
        result = subprocess.run(
            [sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300
        )
        assert result.returncode == 0, result.stderr
        assert result.stdout.strip() == said[number]


def test_the_table_is_the_one_the_words_give() -> None:
    # The README had an excerpt; the whole table stands on the page that it names, as each build writes it.
    tables = script_module("docs/tables.py")
    page = tables.on_page_markdown((ROOT / "docs" / "tables.md").read_text(encoding="utf-8"))
    assert show.markdown("storages").strip() in page and "(docs/tables.md#storages)" in readme()


def test_the_recipes_are_recipes_of_so_many_bytes() -> None:
    rows = re.findall(r"^\| `(\S+)` \| (\d+) \| (.+) \|$", between(readme(), "recipes"), re.MULTILINE)
    assert len(rows) == 6
    for name, size, _ in rows:
        assert parse(name).name == name and f"{parse(name).storage.bytes_per_param:g}" == size, name


def test_every_figure_in_bold_stands_today() -> None:
    figures = re.findall(r"\*\*([+−]?\d[^*]*)\*\*", readme())
    log = (ROOT / "docs" / "log" / "index.md").read_text(encoding="utf-8")
    missing = [figure for figure in figures if not re.search(rf"(?<![\d.]){re.escape(figure)}(?!\d)", log)]
    assert len(figures) >= 7 and not missing


def test_every_path_of_the_tree_exists() -> None:
    paths = list(paths_in_tree(tree()))
    assert len(paths) >= 20
    missing = [path for path in paths if not (ROOT / path).exists()]
    assert not missing, f"the tree of CONTRIBUTING.md names what is not there: {missing}"
    wrong = [path for path in paths if path.endswith("/") != (ROOT / path).is_dir()]
    assert not wrong, f"a folder ends in '/', a file does not: {wrong}"


def test_the_tree_leaves_out_no_part_of_the_package() -> None:
    package = "src/narrowgauge/"
    paths = set(paths_in_tree(tree()))
    there = [entry for entry in (ROOT / package).iterdir() if entry.suffix == ".py" or (entry / "__init__.py").exists()]
    left_out = [entry.name for entry in there if not {package + entry.name, f"{package}{entry.name}/"} & paths]
    assert not left_out, f"the tree of CONTRIBUTING.md leaves out {left_out}"


def test_every_link_leads_somewhere() -> None:
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", readme())
    assert not [link for link in links if not (ROOT / link).exists()]


def test_no_blank_was_left_to_fill_in() -> None:
    for page in (README, *sorted((ROOT / "docs").rglob("*.md"))):
        text = page.read_text(encoding="utf-8")
        assert not re.search(r"(?<!\w)@[\w ]+@|\bTBD\b", text), f"{page.name} holds a placeholder"
        assert not re.search(r"<!-- (\w+) -->\s*<!-- /\1 -->", text), f"{page.name} holds an empty block"
