"""The pages of the documentation, and what stands in them: blocks, prose, headings."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).parents[2]
DOCS: Final = ROOT / "docs"
README: Final = "../README.md"
CONTRIBUTING: Final = "../CONTRIBUTING.md"
PAGES: Final = (README, CONTRIBUTING, *sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")))
"""By their paths from ``docs``."""

_BLOCK: Final = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    page: str
    language: str
    text: str

    @property
    def lines(self) -> list[str]:
        """With those joined that a backslash continues."""
        return [line.strip() for line in self.text.replace("\\\n", " ").splitlines() if line.strip()]


def text_of(page: str) -> str:
    return (DOCS / page).read_text(encoding="utf-8")


def all_blocks(page: str) -> list[Block]:
    return [Block(page, *found) for found in _BLOCK.findall(text_of(page))]


def blocks(page: str, language: str, *, until: str = "") -> list[str]:
    """Their texts, up to the heading ``until`` or to the end of the page."""
    text = text_of(page)
    if until:
        text, found, _ = text.partition(f"\n## {until}\n")
        assert found, f"{page} has no heading {until}"
    return [text for kind, text in _BLOCK.findall(text) if kind == language]


def prose_of(page: str) -> str:
    """All that is in no block."""
    return _BLOCK.sub("", text_of(page))


def anchors_of(page: str) -> set[str]:
    """What links can name behind ``#``: headings, as GitHub makes anchors of them."""
    found: dict[str, int] = {}
    anchors = set()
    for heading in re.findall(r"^#+ (.+)$", prose_of(page), re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        anchor = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        count = found[anchor] = found.get(anchor, 0) + 1
        anchors.add(anchor if count == 1 else f"{anchor}-{count - 1}")
    return anchors
