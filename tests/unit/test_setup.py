"""The scripts that `make setup` runs beside pip."""

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "tools" / "java.sh"


def test_the_set_up_finds_java_as_sava_does(tmp_path: Path) -> None:
    """A name that the script imports was merged into another, and every set-up ended with a traceback."""
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    java.write_text("#!/bin/sh\necho 'openjdk version \"21.0.1\"' >&2\n")
    java.chmod(0o755)

    done = subprocess.run(
        ["sh", SCRIPT, sys.executable],
        env={"PATH": "/usr/bin:/bin", "JAVA_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )

    assert (done.stdout, done.stderr) == (f"java: {tmp_path}\n", "")
