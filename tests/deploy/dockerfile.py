"""Reads a Dockerfile, as far as ours go."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Stage:
    """instructions: its own, as (keyword, rest of the line)."""

    name: str
    parent: str
    instructions: list[tuple[str, str]] = field(default_factory=list)

    def all(self, keyword: str) -> list[str]:
        return [rest for name, rest in self.instructions if name == keyword]

    def words(self, keyword: str) -> list[str]:
        """Of the last instruction of this name, written as JSON; options before it do not count."""
        found: list[str] = json.loads(re.search(r"\[.*\]", self.all(keyword)[-1])[0])  # type: ignore[index]
        return found


def read_stages(path: Path) -> tuple[dict[str, str], dict[str, Stage]]:
    """Defaults of the arguments before the first stage, and the stages by name, in order."""
    arguments: dict[str, str] = {}
    stages: dict[str, Stage] = {}
    stage: Stage | None = None
    for keyword, rest in _instructions(path.read_text()):
        if keyword == "FROM":
            parent, name = re.fullmatch(r"(\S+) AS (\S+)", rest).groups()  # type: ignore[union-attr]
            stage = stages[name] = Stage(name, parent)
        elif stage is None:
            assert keyword == "ARG"
            name, _, default = rest.partition("=")
            arguments[name] = default
        else:
            stage.instructions.append((keyword, rest))
    return arguments, stages


def _instructions(text: str) -> Iterator[tuple[str, str]]:
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    for line in re.sub(r"\\\n", "", "\n".join(lines)).splitlines():
        if line.strip():
            keyword, _, rest = line.strip().partition(" ")
            yield keyword, rest.strip()
