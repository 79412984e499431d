"""Configuration files: values out of all bounds, broken YAML, unknown names, overrides; given to `validate`."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import yaml
from case import Case
from values import NUMBERS, TEXTS, any_value, damaged

from erniekit.config.registry import PARAMETERS

ROOT = Path(__file__).parents[2]
BROKEN_LINES = [
    "a: &a [*a]", "<<: {x: 1}", "? [1, 2]\n: 3", "!!python/object:os.system x", "---\nb: 1", "\tseed: 1", "seed: 1\nseed: 2",
    "- 1", "seed:", ": 1", "{seed: 1", "x: " + "[" * 500, "%YAML 9.9", "seed: !!int x", "2020-01-01: 1", "a: &x {b: 1}\nc: *x", "...",
]  # fmt: skip


@cache
def examples() -> list[str]:
    """Return the text of every shipped configuration."""
    paths = sorted((ROOT / "examples" / "configs").rglob("*.yaml"))
    return [path.read_text(encoding="utf-8") for path in paths]


def draw(random: Random) -> Case:
    """Draw a file of parameters, mostly a shipped one that is changed, and words of a command line."""
    values: dict[Any, Any] = yaml.safe_load(random.choice(examples())) if random.random() < 0.8 else {}
    for _ in range(random.choice([0, 1, 1, 2, 3, 8])):
        values[_name(random)] = _value(random)
    text = yaml.safe_dump(values, allow_unicode=True)
    if random.random() < 0.2:
        lines = text.splitlines()
        lines.insert(random.randrange(len(lines) + 1), random.choice(BROKEN_LINES))
        text = "\n".join(lines)
    content = text.encode("utf-8", "surrogatepass")
    if random.random() < 0.15:
        content = damaged(content, random)
    words = ["validate", "{folder}/run.yaml"]
    if random.random() < 0.3:
        words += ["--world-size", str(random.choice([*NUMBERS[:8], 3, 8, 96]))]
    elif random.random() < 0.2:
        words += ["--verb", random.choice(["preview", "chat", "generate", "export"])]
    for _ in range(random.choice([0, 0, 0, 1, 2])):
        words.append(f"{_name(random)}={_value(random)}".replace("\x00", ""))
    return Case({"run.yaml": content}, [words])


def _name(random: Random) -> str:
    if random.random() < 0.9:
        return random.choice(list(PARAMETERS))
    name = random.choice(list(PARAMETERS))
    return random.choice([name[:-1], name + "s", name.upper(), name.replace("_", "-"), *TEXTS])


def _value(random: Random) -> Any:
    parameter = random.choice(list(PARAMETERS.values()))
    return random.choice([any_value(random, 2), random.choice(NUMBERS), random.choice(parameter.choices or TEXTS)])
