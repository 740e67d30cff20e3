"""The commands of the page about pipelines, and with them ``sava up --pipelines``."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.integration.test_docs import session
from tests.support.long import only_long
from tests.support.network import free_ports


@only_long("starts a cluster with Spark")
@pytest.mark.timeout(1200)
def test_the_commands_of_the_pipelines_page_work(tmp_path: Path) -> None:
    base = free_ports(4)[0]
    patient = {
        "--timeout 120": "--timeout 900"
    }  # on a machine that does ten other things Spark takes minutes
    output = session("pipelines.md", tmp_path, instead=patient, environment={"BASE": str(base)})
    assert output.count("ORDER 100") == 2, "once more from the start"
    assert re.search(r"^shout +custom +running", output, re.MULTILINE)
    assert "pipeline shout changed" in output
    assert re.search(r" order 100$", output, re.MULTILINE), "the copy has it as it was"
    assert "pipeline copy deleted" in output
    assert "pipeline shout deleted" in output
