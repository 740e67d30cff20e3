"""docs/configuration.md names keys that exist, and its file is one that a broker takes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pydantic import BaseModel

from sava.config import Config, load

DOCS = Path(__file__).parents[3] / "docs"
PAGES = ("configuration.md", "install.md")


def keys(model: type[BaseModel], path: str = "") -> set[str]:
    """All paths, of sections and of what is in them."""
    found = set()
    for name, field in model.model_fields.items():
        found.add(f"{path}{name}")
        for kind in (field.annotation, *getattr(field.annotation, "__args__", ())):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                found |= keys(kind, f"{path}{name}.")
    return found


@pytest.mark.parametrize("page", PAGES)
def test_every_key_that_the_page_names_exists(page: str) -> None:
    known = keys(Config)
    sections = {key.partition(".")[0] for key in known}
    named = {
        name
        for name in re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)(?:: [^`]*)?`", (DOCS / page).read_text())
        if name.partition(".")[0] in sections
    }
    assert len(named) > 5
    assert sorted(named - known) == []


def test_the_file_on_the_page_is_a_valid_one(tmp_path: Path) -> None:
    blocks = re.findall(
        r"^```yaml\n(.*?)^```$", (DOCS / "configuration.md").read_text(), re.MULTILINE | re.DOTALL
    )
    assert blocks
    for block in blocks:
        file = tmp_path / "sava.yml"
        file.write_text(block)
        assert load(file, environment={}) != Config()


def test_a_key_that_does_not_exist_is_noticed() -> None:
    assert "storage.url" in keys(Config)
    assert "auth.tls.ca_file" in keys(Config)
    assert "storage.invented" not in keys(Config)
