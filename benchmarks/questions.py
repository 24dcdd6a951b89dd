"""Ask the planner questions whose answers others published, as a reader of their pages would ask
them.

Claim: at least 80 % of the questions are answered within 10 % of a memory, 15 % of a speed or
length, and 75 to 85 % of the facts lie within the interval that the answer states.

The questions of ``questions_held_out.toml`` were written down before the planner was redrawn, and
no figure was set with them.

Run: ``./dev bench questions [--held-out] [NAME …]``; a minute, no GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from narrowgauge.errors import NarrowgaugeError
from narrowgauge.planner.built_models import of_config
from narrowgauge.planner.plan import plan, plan_longest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

HERE = Path(__file__).parent
TOLERANCE = {"memory": 0.10, "speed": 0.15, "length": 0.15}


class Answer(NamedTuple):
    """One fact: what was asked, measured and planned, in GB, tokens per second and chip, or tokens."""

    question: dict[str, Any]
    what: str
    measured: float
    planned: float
    interval: tuple[float, float] | None
    job: Any

    @property
    def error(self) -> float:
        return self.planned / self.measured - 1

    @property
    def is_right(self) -> bool:
        return abs(self.error) <= TOLERANCE[self.what]

    @property
    def is_inside(self) -> bool | None:
        """Tell whether the fact lies in the interval; None without one."""
        if self.interval is None:
            return None
        low, high = self.interval
        return low <= self.measured <= high


def load(*, held_out: bool) -> list[dict[str, Any]]:
    """Return the questions of a file, with the configurations of their models."""
    name = "questions_held_out" if held_out else "questions"
    table = tomllib.loads((HERE / f"{name}.toml").read_text(encoding="utf-8"))
    models = table["models"]
    return [{**row, "config": models.get(row["ask"]["model"])} for row in table["question"]]


@cache
def _architecture(name: str, config: str) -> Any:
    return of_config(json.loads(config), name)


def ask(question: dict[str, Any]) -> list[Answer]:
    """Return the planner's answers beside the published facts.

    Raises:
        NarrowgaugeError: the question cannot be asked.
    """
    asked = dict(question["ask"])
    fact = question["fact"]
    if question["config"]:
        asked["model"] = _architecture(asked["model"], json.dumps(question["config"]))
    if "longest" in fact:
        best = plan_longest(**asked).best
        return [Answer(question, "length", fact["longest"], best.sequence_length, None, best)]
    best = plan(**asked, advise=False).best
    answers = []
    memory = fact.get("memory_gb", 0.0) or fact.get("memory_gib", 0.0) * 2**30 / 1e9
    if memory:
        # The sources print max_memory_allocated.
        ends = best.memory_interval
        share = best.allocated_bytes / best.memory.total / 1e9
        interval = None
        if ends:
            interval = (ends[0] * share, ends[1] * share)
        answers.append(
            Answer(question, "memory", memory, best.allocated_bytes / 1e9, interval, best)
        )
    rate = _rate(fact, best)
    if rate:
        chips = best.num_chips
        ends = best.rate_interval
        interval = None
        if ends:
            interval = (ends[0] / chips, ends[1] / chips)
        answers.append(
            Answer(question, "speed", rate, best.tokens_per_second / chips, interval, best)
        )
    return answers


def _rate(fact: dict[str, float], best: Any) -> float:
    """Return the measured tokens per second of a chip; 0 if the fact has none."""
    if "tokens_per_second" in fact:
        return fact["tokens_per_second"] / best.num_chips
    if "tflops_per_chip" in fact:
        return fact["tflops_per_chip"] * 1e12 / fact["flops_per_token"]
    if "step_seconds" in fact:
        tokens: float = best.tokens_per_step / fact["step_seconds"]
        return tokens / best.num_chips
    return fact.get("tokens_per_second_per_chip", 0.0)


def main() -> int:
    """Print every answer, and how many are right."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--held-out", action="store_true", help="what no figure was set with")
    parser.add_argument("names", nargs="*", help="beginnings of names")
    options = parser.parse_args()
    answers: list[Answer] = []
    refused = 0
    for question in load(held_out=options.held_out):
        if options.names and not question["name"].startswith(tuple(options.names)):
            continue
        try:
            new_answers = ask(question)
        except NarrowgaugeError as error:
            print(f"{question['name']:28} {question['class']:9} cannot be asked: {error}")
            refused += 1
            continue
        for answer in new_answers:
            verdict = "right" if answer.is_right else "wrong"
            inside = {None: "unchecked", True: "inside", False: "outside"}[answer.is_inside]
            print(
                f"{question['name']:28} {question['class']:9} {answer.what:7} "
                f"{answer.measured:10,.1f} "
                f"{answer.planned:10,.1f} {answer.error:+7.1%}  {verdict} {inside}"
            )
        answers += new_answers
    questions = {answer.question["name"] for answer in answers}
    wrong = {answer.question["name"] for answer in answers if not answer.is_right}
    checked = [answer.is_inside for answer in answers if answer.is_inside is not None]
    print(
        f"{len(questions) + refused} questions: {len(questions - wrong)} right, {len(wrong)} "
        f"wrong, {refused} cannot be asked; "
        f"{sum(checked)} of {len(checked)} facts inside their intervals"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
