"""docs/design/paths.md names files and what they define: all of it exists."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).resolve().parents[2]
PAGE: Final = ROOT / "docs" / "design" / "paths.md"
SOURCE: Final = ROOT / "src" / "sava"

_STEP: Final = re.compile(r"^(\S+\.py) +([A-Za-z_][\w.]*) ", re.MULTILINE)
_METHOD: Final = re.compile(r"`([A-Z]\w*\.\w+)`")


def steps() -> list[tuple[str, str]]:
    return _STEP.findall(PAGE.read_text(encoding="utf-8"))


@cache
def defined(place: str) -> frozenset[str]:
    """Functions, and methods as ``Class.method``, that the file defines."""
    names = set()
    for node in ast.parse((SOURCE / place).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.ClassDef):
            names.update(
                f"{node.name}.{item.name}"
                for item in node.body
                if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)
            )
    return frozenset(names)


@pytest.mark.parametrize(("place", "name"), sorted({*steps()}))
def test_a_step_names_what_exists(place: str, name: str) -> None:
    assert (SOURCE / place).is_file(), f"src/sava/{place} does not exist"
    assert name in defined(place), f"src/sava/{place} does not define {name}"


def test_every_line_that_names_a_file_is_a_step() -> None:
    named = re.findall(r"[\w/]+\.py\b", PAGE.read_text(encoding="utf-8"))
    assert named == [place for place, _ in steps()]
    assert len(named) > 50


def test_methods_in_the_text_are_those_of_the_files_on_the_page() -> None:
    known = frozenset[str]().union(*(defined(place) for place, _ in steps()))
    assert {*_METHOD.findall(PAGE.read_text(encoding="utf-8"))} <= known
