"""Launch: PySpark's own programs, with everything in place for ``format("sava")``.

The Spark of the ``pyspark`` package is started, by this interpreter, so that driver and workers import the
same code. What the user has set in the environment stays; what Spark is told on the command line goes through
untouched.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NoReturn

from sava.errors import CallerError, HostError

OLDEST_JAVA: Final = 17
JAVA_TIMEOUT_S: Final = 10.0
USUAL_PLACES: Final = (
    "/usr/lib/jvm/*",
    "/opt/java/*",
    "/Library/Java/JavaVirtualMachines/*/Contents/Home",
    "/opt/homebrew/opt/openjdk*",
)
DEFAULT_MASTER: Final = "local[*]"
_FLAGS: Final = frozenset(("--help", "-h", "--supervise", "--usage-error", "--verbose", "-v", "--version"))
"""Of spark-submit, those without a value."""


class JavaMissing(HostError):
    """Spark runs on Java, and there is none that is new enough."""


class SparkMissing(HostError):
    """The package pyspark is not installed."""


class ValueMissing(CallerError):
    """An option without what it needs."""


@dataclass(frozen=True, slots=True)
class Java:
    home: Path
    version: int
    """0: it does not say."""


@dataclass(frozen=True, slots=True)
class Program:
    path: Path
    arguments: tuple[str, ...]
    environment: dict[str, str]

    def become(self) -> NoReturn:
        """This process is that program from here on: its exit code is ours, and so are its signals."""
        os.execve(self.path, (str(self.path), *self.arguments), self.environment)


def program(
    name: str, arguments: Sequence[str], environment: Mapping[str, str], service: str = ""
) -> Program:
    """``name``: pyspark or spark-submit. Raises JavaMissing, SparkMissing."""
    home = spark_home()
    given = _Arguments(arguments)
    settings = dict(environment)
    settings["SPARK_HOME"] = str(home)
    settings["JAVA_HOME"] = str(find_java(environment).home)
    settings.setdefault("PYSPARK_PYTHON", sys.executable)
    settings.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    if service := service or given.service:
        settings["SAVA_SERVICE"] = service
    master = given.master or environment.get("SPARK_REMOTE", "")
    if (master or DEFAULT_MASTER).startswith("local"):
        # Otherwise Spark looks for an address that others can reach, which a laptop's name may not even have.
        settings.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    passed_on = given.passed_on if master else ("--master", DEFAULT_MASTER, *given.passed_on)
    return Program(home / "bin" / name, passed_on, settings)


def spark_home() -> Path:
    found = importlib.util.find_spec("pyspark")
    if found is None or found.origin is None:
        raise SparkMissing(
            "PySpark is not installed; install it with: pip install '.[spark]' (in a clone of Sava)"
        )
    return Path(found.origin).parent


class _Arguments:
    """Those of spark-submit up to the application; what follows it is the application's own."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self.master = ""
        self.service = ""
        kept: list[str] = []
        rest = iter(arguments)
        for argument in rest:
            if not argument.startswith("-"):
                kept += (argument, *rest)
                break
            name, has_value, value = argument.partition("=")
            words = [argument]
            if not has_value and name not in _FLAGS:
                value = next(rest, "")
                words.append(value)
            if name == "--service":
                if not value:
                    raise ValueMissing("--service needs the address of a broker, such as 127.0.0.1:6650")
                self.service = value
                continue
            if name in ("--master", "--remote"):
                self.master = value
            elif name in ("--conf", "-c") and value.startswith(("spark.master=", "spark.remote=")):
                self.master = value.partition("=")[2]
            elif name == "--properties-file":
                self.master = self.master or "by that file"
            kept += words
        self.passed_on = tuple(kept)


# -- Java ----------------------------------------------------------------------------------------------------


def find_java(environment: Mapping[str, str], usual: Iterable[str] = USUAL_PLACES) -> Java:
    """As the user has set it; else as the shell finds it; else the oldest of the usual places that is new
    enough: Spark is tested with those. Raises JavaMissing."""
    too_old: list[Java] = []
    for home in _told(environment):
        java = Java(home, _version(home))
        if java.version >= OLDEST_JAVA:
            return java
        too_old.append(java)
    found = sorted((Java(home, _version(home)) for home in _installed(usual)), key=lambda java: java.version)
    for java in found:
        if java.version >= OLDEST_JAVA:
            return java
    seen = "".join(f"; {java.home} is version {java.version or 'unknown'}" for java in (*too_old, *found))
    raise JavaMissing(
        f"Spark needs Java {OLDEST_JAVA} or newer{seen}; install one (Debian: apt-get install "
        "default-jre-headless, macOS: brew install openjdk) or set JAVA_HOME"
    )


def _told(environment: Mapping[str, str]) -> Iterator[Path]:
    if home := environment.get("JAVA_HOME"):
        yield Path(home)
    if path := shutil.which("java", path=environment.get("PATH", os.defpath)):
        yield Path(path).resolve().parents[1]


def _installed(places: Iterable[str]) -> Iterator[Path]:
    for place in places:
        for java in Path("/").glob(f"{place.lstrip('/')}/bin/java"):
            yield java.parents[1]


def _version(home: Path) -> int:
    try:
        done = subprocess.run(
            [home / "bin" / "java", "-version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=JAVA_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return 0
    found = re.search(r'version "(\d+)', done.stderr + done.stdout)
    return int(found[1]) if found else 0
