"""``sava spark submit``: a program in a Spark of its own finds ``format("sava")`` and the cluster."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.spark.sink_topics import read
from tests.spark.source_topics import new_topic
from tests.spark.test_examples import send
from tests.support.brokers import Standalone
from tests.support.long import only_long

pytestmark = only_long("a Spark of its own")

EXAMPLE = Path(__file__).parents[2] / "examples" / "spark" / "history.py"


def submit(*arguments: str, directory: Path, service: str) -> subprocess.CompletedProcess[str]:
    """From anywhere, with no more in the environment than the service."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("SPARK", "PY"))}
    return subprocess.run(
        [sys.executable, "-m", "sava.cli", "spark", "submit", *arguments],
        cwd=directory,
        env={**environment, "SAVA_SERVICE": service},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_a_program_finds_the_source_and_the_cluster(broker: Standalone, tmp_path: Path) -> None:
    topic = new_topic()
    send(broker, topic, ("a", "1"), ("b", "2"))
    query = "select concat('total ', sum(cast(decode(payload, 'UTF-8') as int))) as t from messages"
    options = ("--master", "local[2]", "--conf", "spark.ui.enabled=false")
    done = submit(*options, str(EXAMPLE), "--topic", topic, query, directory=tmp_path, service=broker.url)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "total 3" in done.stdout
    assert [message.key for message in read(broker, topic)] == ["a", "b"]


def test_the_exit_code_is_the_programs(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("import sys\nsys.exit(7)\n")
    done = submit("--conf", "spark.ui.enabled=false", str(program), directory=tmp_path, service="")
    assert done.returncode == 7, done.stderr[-4000:]
