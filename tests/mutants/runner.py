"""Applies one mutant to a copy of ``src`` and runs what must kill it. The work tree is never touched."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TIME_LIMIT_S = 1200
"""Far beyond what any killer needs. Running into it proves nothing about the mutant: it does not count as
killed."""


class MutantOutdated(Exception):
    """The text to replace is not there exactly once: the code has moved on, adapt the mutant."""


@dataclass(frozen=True, slots=True)
class Mutant:
    id: str
    story: str
    file: str
    old: str
    new: str
    seeds: int = 0
    """Simulator seeds that must find it, from ``start`` on; 0: the simulator is not asked."""
    start: int = 1
    simulator: str = "tests.sim"
    tests: tuple[str, ...] = ()
    """Pytest node ids that must find it."""
    more: tuple[tuple[str, str, str], ...] = ()
    """Further replacements (file, old, new) that belong to the same mutation."""

    def edits(self) -> list[tuple[str, str, str]]:
        return [(self.file, self.old, self.new), *self.more]


@dataclass(frozen=True, slots=True)
class Verdict:
    mutant: Mutant
    killer: str
    """What killed it; empty: it survived."""
    seconds: float
    detail: str = ""
    outdated: bool = False


def check_applies(mutant: Mutant) -> None:
    for file, old, _ in mutant.edits():
        found = (ROOT / "src" / file).read_text().count(old)
        if found != 1:
            raise MutantOutdated(
                f"{mutant.id}: mutant no longer applies: its text stands {found} times in {file}"
            )


def judge(mutant: Mutant) -> Verdict:
    started = time.monotonic()
    try:
        check_applies(mutant)
    except MutantOutdated as outdated:
        return Verdict(mutant, "", 0.0, str(outdated), outdated=True)
    with tempfile.TemporaryDirectory(prefix=f"sava-{mutant.id}-") as folder:
        sources = Path(folder) / "src"
        shutil.copytree(ROOT / "src", sources, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        for file, old, new in mutant.edits():
            path = sources / file
            path.write_text(path.read_text().replace(old, new))
        killer, detail = _run(mutant, sources)
    return Verdict(mutant, killer, time.monotonic() - started, detail)


def _run(mutant: Mutant, sources: Path) -> tuple[str, str]:
    environment = {**os.environ, "PYTHONPATH": f"{sources}{os.pathsep}{ROOT}", "PYTHONDONTWRITEBYTECODE": "1"}
    if mutant.seeds:
        command = [
            sys.executable,
            "-m",
            mutant.simulator,
            "--seeds",
            str(mutant.seeds),
            "--start",
            str(mutant.start),
        ]
        killed, output = _call([*command, "--jobs", "1"], environment)
        if killed:
            return _sim_killer(output), output
    if mutant.tests:
        killed, output = _call([sys.executable, "-m", "pytest", "-x", "-q", *mutant.tests], environment)
        if killed:
            return f"test {_first_failed(output)}", output
    return "", output


def _call(command: list[str], environment: dict[str, str]) -> tuple[bool, str]:
    """Whether the command noticed the mutant, that is, failed."""
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=TIME_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return False, f"no verdict within {TIME_LIMIT_S} s: {' '.join(command)}"
    output = done.stdout + done.stderr
    if "ImportError" in output or "SyntaxError" in output:
        raise RuntimeError(f"the mutated code does not load:\n{output[-3000:]}")
    if done.returncode == 4 or (done.returncode == 5 and "pytest" in command):
        raise RuntimeError(f"no such test: {' '.join(command[-2:])}\n{output[-2000:]}")
    return done.returncode != 0, output


def _sim_killer(output: str) -> str:
    for line in output.splitlines():
        if line.startswith("seed ") and ": " in line and not line.endswith(": ok"):
            return f"sim {line[:90]}"
    return f"sim ({output.strip().splitlines()[-1][:80]})"


def _first_failed(output: str) -> str:
    for line in output.splitlines():
        if line.startswith("FAILED "):
            return line.split()[1].split("::", 1)[-1]
    return "?"
