"""The metric names and labels that PromQL asks for, read without a parser of the language."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_SELECTOR = re.compile(
    r"\b((?:prefixcache|process|python)_\w+|up)\b(?!\s*\()(?:\{((?:[^}\"]|\"(?:[^\"\\]|\\.)*\")*)\})?"
)
_MATCHER = re.compile(r"(\w+)\s*(?:=~|!~|!=|=)\s*\"")
_GROUPING = re.compile(r"\b(?:by|without|on|ignoring)\s*\(([^)]*)\)")


@dataclass(frozen=True, slots=True)
class Selector:
    """One metric in a query, and the labels that it is chosen by."""

    metric: str
    labels: frozenset[str]


def selectors(query: str) -> Iterator[Selector]:
    for found in _SELECTOR.finditer(query):
        yield Selector(found[1], frozenset(_MATCHER.findall(found[2] or "")))


def grouping_labels(query: str) -> set[str]:
    """Labels in `by (...)` and its like."""
    lists = (labels.split(",") for labels in _GROUPING.findall(query))
    return {label.strip() for labels in lists for label in labels if label.strip()}
