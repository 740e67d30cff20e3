"""The Python of docs/client.md, run block by block, in order, against a real broker."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import pytest

from sava import client
from sava.client import Client
from tests.integration.harness import sava
from tests.standalone import Standalone

PAGE = Path(__file__).parents[2] / "docs" / "client.md"


def python_blocks() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)


async def test_the_python_of_the_guide_works(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = python_blocks()
    assert len(blocks) >= 8
    with Standalone(tmp_path) as broker:
        async with Client(broker.url, timeout=60) as waiting, waiting.producer("/default/orders"):
            pass  # the broker is ready
        definition = re.findall(r"^echo '(.*)' > drinks.json$", PAGE.read_text(), re.MULTILINE)[0]
        (tmp_path / "drinks.json").write_text(definition)
        await sava(
            *("schemas", "register", "drinks", "--type", "json_schema"),
            *("--file", str(tmp_path / "drinks.json")),
            admin=broker.admin,
        )
        names: dict[str, object] = {}
        for number, block in enumerate(blocks):
            source = block.replace("http://127.0.0.1:6650", broker.url)
            code = compile(
                source, f"{PAGE.name}, block {number}", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
            )
            if (result := eval(code, names)) is not None and inspect.isawaitable(result):
                await result
    printed = capsys.readouterr().out
    assert "stored at 0" in printed
    assert "[10, 11, 12]" in printed
    assert "2 cups\n" in printed
    assert "2 cups, by version 1" in printed


@pytest.mark.parametrize("method", [client.Client.producer, client.Client.consumer])
def test_the_tables_name_every_option(method: object) -> None:
    table = "".join(re.findall(r"^\|(.*?)\|", PAGE.read_text(), re.MULTILINE))
    assert callable(method)
    options = [name for name in inspect.signature(method).parameters if name not in ("self", "topic")]
    assert [name for name in options if f"`{name}`" not in table] == []
