"""What Spark raises, in one line.

Launch: PySpark's own programs, with everything in place for ``format("sava")``.

The Spark of the ``pyspark`` package is started, by this interpreter, so that driver and workers import the
same code. What the user has set in the environment stays; what Spark is told on the command line goes through
untouched.

The Spark session of a program of Sava's own: the driver is this process, and Java a child of it.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn

from sava.errors import CallerError, HostError, Outcome

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

MAX_ERROR: Final = 500
_PACKAGES: Final = frozenset({"pyspark", "py4j"})
"""Known by name: whoever asks why Spark does not start may not have it."""
_AFTER: Final = re.compile(r"^(=== Streaming Query ===|JVM stacktrace:?)$", re.MULTILINE)
"""From here on: what the query was doing, and where in Java."""
_BEFORE: Final = re.compile(
    r"^(An error occurred while calling \S+\s+: "
    r"|\[STREAM_FAILED\] Query \[id = \S+, runId = \S+\] terminated with exception: )"
)
_RAISED: Final = re.compile(r"Traceback \(most recent call last\):\n(?:[ \t].*\n)*(\S.*)")
"""Below the lines of a trace, which are indented, the error."""


def brief(error: Exception) -> str:
    """Spark's texts hold the traces of two languages; what was raised last in Python is what the user can do
    something about. Errors of others are named with their type: a KeyError's text is a mere key."""
    text = str(error).strip()
    if type(error).__module__.partition(".")[0] in _PACKAGES:
        line = _cause(text)
    else:
        line = _first(f"{type(error).__name__}: {text}" if text else "")
    line = line or type(error).__name__
    return line if len(line) <= MAX_ERROR else f"{line[: MAX_ERROR - 1]}…"


def _cause(text: str) -> str:
    reason = _BEFORE.sub("", _AFTER.split(text)[0].strip())
    raised: list[str] = _RAISED.findall(reason)
    return raised[-1] if raised else _first(reason)


def _first(text: str) -> str:
    return text.partition("\n")[0]


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


ENDING_S: Final = 2.0


class JavaGone(HostError):
    """Java was killed, or ran out of memory."""

    outcome = Outcome.UNKNOWN


class SparkRefused(HostError):
    """Java runs, and there is no Spark as it was asked for."""


def open_session(
    name: str, master: str, *, conf: Mapping[str, str] | None = None, python_path: Sequence[Path] = ()
) -> SparkSession:
    """``conf`` wins over what is set here. ``python_path``: where Python's workers look for modules, too.
    Raises JavaMissing, SparkMissing, JavaGone, SparkRefused."""
    _prepare(master, python_path)
    from pyspark.sql import SparkSession

    logging.getLogger("py4j").setLevel(logging.WARNING)
    logging.getLogger().addFilter(_is_not_of_py4j)
    settings = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.session.timeZone": "UTC",
        "spark.scheduler.mode": "FAIR",
        **(conf or {}),
    }
    builder = SparkSession.builder.master(master).appName(name)
    for key, value in settings.items():
        builder = builder.config(key, value)
    try:
        session: SparkSession = builder.getOrCreate()
        session.sparkContext.setLogLevel("ERROR")
    except Exception as error:
        # Whatever was being asked of Java when it ended, or refused: a dozen of types.
        raise _not_started(master, error) from error
    return session


def _is_not_of_py4j(record: logging.LogRecord) -> bool:
    """Py4J tells the root logger, with a trace, of each call that fails; its caller is told, too."""
    return Path(record.pathname).parent.name != "py4j"


def java_of_spark() -> subprocess.Popen[bytes] | None:
    """None: it has not come up, or is not a child of this process."""
    from pyspark import SparkContext

    return getattr(SparkContext._gateway, "proc", None)


def _not_started(master: str, error: Exception) -> JavaGone | SparkRefused:
    java = java_of_spark()
    code = None
    if java is not None:
        # Its connections end before it does.
        with suppress(subprocess.TimeoutExpired):
            code = java.wait(ENDING_S)
    if java is None or code is not None:
        how = "" if code is None else f" with code {code}"
        return JavaGone(
            f"Spark's Java has ended{how} while it was being started: it was killed, there was not enough "
            "memory for it, or it has not taken --master or --conf, which it has said on stderr then; start "
            "it again"
        )
    reason = brief(error)  # Java knows it
    java.kill()
    return SparkRefused(f"Spark does not start with master {master}: {reason}; look at --master and --conf")


def _prepare(master: str, python_path: Sequence[Path]) -> None:
    """What Java and Python's workers find in their environment."""
    environment = os.environ
    environment["SPARK_HOME"] = str(spark_home())
    environment["JAVA_HOME"] = str(find_java(environment).home)
    environment.setdefault("PYSPARK_PYTHON", sys.executable)
    environment.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    if master.startswith("local"):
        environment.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    paths = [str(path.absolute()) for path in python_path]
    sys.path[:0] = paths
    environment["PYTHONPATH"] = os.pathsep.join([*paths, *filter(None, [environment.get("PYTHONPATH")])])
