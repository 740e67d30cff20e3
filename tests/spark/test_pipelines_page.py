"""The commands of the page about pipelines, and with them ``sava up --pipelines``."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.integration.test_docs import session
from tests.ports import free_ports


@pytest.mark.skipif(not os.environ.get("SAVA_LONG"), reason="SAVA_LONG=1: starts a cluster with Spark")
def test_the_commands_of_the_pipelines_page_work(tmp_path: Path) -> None:
    base = free_ports(4)[0]
    output = session("pipelines.md", tmp_path, BASE=str(base))
    assert output.count("ORDER 100") == 2, "once more from the start"
    assert re.search(r"^shout +custom +running", output, re.MULTILINE)
    assert "pipeline shout changed" in output
    assert "pipeline shout deleted" in output
