"""docs/client.md, run block by block, in order, against a real broker."""

from __future__ import annotations

import ast
import inspect
import os
import re
import sys
from pathlib import Path

import pytest

from sava import client
from sava.client import Client
from tests.support.brokers import Standalone
from tests.support.pages import all_blocks, text_of
from tests.support.processes import start_child

PAGE = "client.md"


async def run(commands: str, directory: Path, **environment: str) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    shell = await start_child(
        *("bash", "-euo", "pipefail", "-c", f"cd {directory}; {commands}"),
        env={**os.environ, **environment, "PATH": path},
    )
    assert await shell.wait() == 0, commands


async def test_the_code_of_the_guide_works(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = [block for block in all_blocks(PAGE) if block.language]
    assert {block.language for block in blocks} == {"python", "sh"}
    assert len(blocks) >= 9
    with Standalone(tmp_path) as broker:
        async with Client(broker.url, timeout=60) as waiting, waiting.producer("/default/orders"):
            pass  # the broker is ready
        names: dict[str, object] = {}
        for number, block in enumerate(blocks):
            if block.language == "sh":
                await run(block.text, tmp_path, SAVA_ADMIN=broker.admin)
                continue
            source = block.text.replace("http://127.0.0.1:6650", broker.url)
            code = compile(source, f"{PAGE}, block {number}", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            if (result := eval(code, names)) is not None and inspect.isawaitable(result):
                await result
    printed = capsys.readouterr().out
    assert "stored at 0" in printed
    assert "[10, 11, 12]" in printed
    assert "2 cups\n" in printed
    assert "2 cups, by version 1" in printed


@pytest.mark.parametrize("method", [client.Client.producer, client.Client.consumer])
def test_the_tables_name_every_option(method: object) -> None:
    table = "".join(re.findall(r"^\|(.*?)\|", text_of(PAGE), re.MULTILINE))
    assert callable(method)
    options = [name for name in inspect.signature(method).parameters if name not in ("self", "topic")]
    assert [name for name in options if f"`{name}`" not in table] == []
