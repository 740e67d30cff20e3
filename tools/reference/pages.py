"""What all pages have in common."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

DIRECTORY: Final = Path(__file__).parents[2] / "docs" / "reference"
MADE: Final = "*Made from the code by `make docs`; changes belong there.*"


def page(title: str, introduction: str, *sections: str) -> str:
    return "\n\n".join((f"# {title}", MADE, introduction.strip(), *sections)) + "\n"


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *([_cell(text) for text in row] for row in rows)]
    return "\n".join(
        f"| {' | '.join(line)} |".replace("| --- ", "|---").replace("--- |", "---|") for line in lines
    )


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def prose(docstring: str | None) -> str:
    """A docstring as Markdown: one line for each paragraph, names in single backticks."""
    if not docstring:
        return ""
    paragraphs = inspect.cleandoc(docstring).split("\n\n")
    return "\n\n".join(" ".join(each.split()) for each in paragraphs).replace("``", "`")


def first_sentences(docstring: str | None) -> str:
    """The first paragraph, in one line."""
    return prose(docstring).partition("\n\n")[0]


def anchor(title: str) -> str:
    """As GitHub makes it from a heading."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
