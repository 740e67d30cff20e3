"""docs/configuration.md names every key of the model with its default, and no other."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from sava.config import Config, Tls

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"


def _defaults(section: BaseModel, path: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            found |= _defaults(value, f"{path}{name}.")
        else:
            found[f"{path}{name}"] = value
    return found


def _written(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return str(list(value))
    return "*none*" if value is None else str(value) or "*empty*"


def test_the_page_lists_every_key_with_its_default() -> None:
    expected = {key: _written(value) for key, value in _defaults(Config()).items()}
    del expected["auth.tls"]
    expected |= {f"auth.tls.{name}": "*none*" for name in Tls.model_fields}
    rows = re.findall(r"^\| `([\w.]+)` \| (.*?) \|", PAGE.read_text(), re.MULTILINE)
    assert {key: default.strip("`") for key, default in rows} == expected
