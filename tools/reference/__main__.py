from __future__ import annotations

from tools.reference import cli, configuration, errors, metrics
from tools.reference.pages import DIRECTORY

PAGES = {
    "configuration.md": configuration.render,
    "cli.md": cli.render,
    "metrics.md": metrics.render,
    "errors.md": errors.render,
}

if __name__ == "__main__":
    DIRECTORY.mkdir(parents=True, exist_ok=True)
    for name, render in PAGES.items():
        (DIRECTORY / name).write_text(render(), encoding="utf-8")
        print(f"docs/reference/{name}")
