"""Spark as a program: how it is started, its session, and its errors in one line.

``program`` prepares PySpark's own programs for ``format("sava")``. It starts the Spark of the ``pyspark``
package with this interpreter, so that driver and workers import the same code. Settings of the user's
environment win, and arguments for Spark pass through unchanged. ``open_session`` makes the session of Sava's
own programs: the driver is this process, and Java is its child.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn

from sava.errors import CallerError, HostError, Outcome

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

MAX_ERROR: Final = 500
_PACKAGES: Final = frozenset({"pyspark", "py4j"})
"""Known by name: they may not be installed when Spark does not start."""
_AFTER: Final = re.compile(r"^(=== Streaming Query ===|JVM stacktrace:?)$", re.MULTILINE)
"""The start of Spark's description of the query and of the Java trace."""
_BEFORE: Final = re.compile(
    r"^(An error occurred while calling \S+\s+: "
    r"|\[STREAM_FAILED\] Query \[id = \S+, runId = \S+\] terminated with exception: )"
)
_RAISED: Final = re.compile(r"Traceback \(most recent call last\):\n(?:[ \t].*\n)*(\S.*)")
"""The error stands below the indented lines of a trace."""


def brief(error: Exception) -> str:
    """The error in one line. Spark's texts hold traces of two languages; the user can act on what Python
    raised last. Other errors get their type as a prefix: the text of a KeyError is only a key."""
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
"""The options of spark-submit without a value."""


class SparkMissing(HostError):
    """The package pyspark is not installed, or no Java that is new enough for Spark."""


class ValueMissing(CallerError):
    """An option has no value."""


@dataclass(frozen=True, slots=True)
class Program:
    path: Path
    arguments: tuple[str, ...]
    environment: dict[str, str]

    def become(self) -> NoReturn:
        """Replace this process by the program, which then has its signals and its exit code."""
        os.execve(self.path, (str(self.path), *self.arguments), self.environment)


def program(
    name: str, arguments: Sequence[str], environment: Mapping[str, str], service: str = ""
) -> Program:
    """``name``: pyspark or spark-submit. Raises SparkMissing."""
    given_master, given_service, passed_on = _read(arguments)
    settings = dict(environment)
    master = given_master or environment.get("SPARK_REMOTE", "")
    home = _set_homes(settings, master or DEFAULT_MASTER)
    if service := service or given_service:
        settings["SAVA_SERVICE"] = service
    if not master:
        passed_on = ("--master", DEFAULT_MASTER, *passed_on)
    return Program(home / "bin" / name, passed_on, settings)


def _set_homes(environment: MutableMapping[str, str], master: str) -> Path:
    """Set where Spark, Java and Python are, for Java and Python's workers. Returns the home of Spark."""
    home = spark_home()
    environment["SPARK_HOME"] = str(home)
    environment["JAVA_HOME"] = str(find_java(environment))
    environment.setdefault("PYSPARK_PYTHON", sys.executable)
    environment.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    if master.startswith("local"):
        # Otherwise Spark resolves the host name, and a laptop's may have no address.
        environment.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    return home


def spark_home() -> Path:
    found = importlib.util.find_spec("pyspark")
    if found is None or found.origin is None:
        raise SparkMissing(
            "PySpark is not installed; install it with: pip install '.[spark]' (in a clone of Sava)"
        )
    return Path(found.origin).parent


def _read(arguments: Sequence[str]) -> tuple[str, str, tuple[str, ...]]:
    """Master, service, and what is passed on of the arguments of spark-submit up to the application; the rest
    belongs to the application."""
    master = service = ""
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
            service = value
            continue
        if name in ("--master", "--remote"):
            master = value
        elif name in ("--conf", "-c") and value.startswith(("spark.master=", "spark.remote=")):
            master = value.partition("=")[2]
        elif name == "--properties-file":
            master = master or "by that file"
        kept += words
    return master, service, tuple(kept)


# -- Java ----------------------------------------------------------------------------------------------------


def find_java(environment: Mapping[str, str], usual: Iterable[str] = USUAL_PLACES) -> Path:
    """The home of JAVA_HOME, else of the java of PATH, else of the oldest sufficient version in the usual
    places: Spark is tested with those. Raises SparkMissing."""
    seen: list[tuple[int, Path]] = []
    for home in _configured(environment):
        seen.append((_version(home), home))
        if seen[-1][0] >= OLDEST_JAVA:
            return home
    found = sorted(((_version(home), home) for home in _installed(usual)), key=lambda java: java[0])
    for version, home in found:
        if version >= OLDEST_JAVA:
            return home
    too_old = "".join(f"; {home} is version {version or 'unknown'}" for version, home in (*seen, *found))
    raise SparkMissing(
        f"Spark needs Java {OLDEST_JAVA} or newer{too_old}; install one (Debian: apt-get install "
        "default-jre-headless, macOS: brew install openjdk) or set JAVA_HOME"
    )


def _configured(environment: Mapping[str, str]) -> Iterator[Path]:
    if home := environment.get("JAVA_HOME"):
        yield Path(home)
    if path := shutil.which("java", path=environment.get("PATH", os.defpath)):
        yield Path(path).resolve().parents[1]


def _installed(places: Iterable[str]) -> Iterator[Path]:
    for place in places:
        for java in Path("/").glob(f"{place.lstrip('/')}/bin/java"):
            yield java.parents[1]


def _version(home: Path) -> int:
    """0 if Java does not print it."""
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
    """Spark's Java process has ended: it was killed or ran out of memory."""

    outcome = Outcome.UNKNOWN


class SparkRefused(HostError):
    """Spark does not start with these settings."""


def open_session(
    name: str, master: str, *, conf: Mapping[str, str] | None = None, python_path: Sequence[Path] = ()
) -> SparkSession:
    """``conf`` overrides the settings below. Workers also find modules in ``python_path``.
    Raises SparkMissing, JavaGone, SparkRefused."""
    _set_homes(os.environ, master)
    paths = [str(path.absolute()) for path in python_path]
    sys.path[:0] = paths
    os.environ["PYTHONPATH"] = os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])])
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
        # A dozen types, depending on the call during which Java ended or refused.
        raise _not_started(master, error) from error
    return session


def _is_not_of_py4j(record: logging.LogRecord) -> bool:
    """False for Py4J's log records: it logs a trace of each failed call that its caller also gets as an
    error."""
    return Path(record.pathname).parent.name != "py4j"


def java_of_spark() -> subprocess.Popen[bytes] | None:
    """The Java process; None if it has not started or is not a child of this process."""
    from pyspark import SparkContext

    return getattr(SparkContext._gateway, "proc", None)


def _not_started(master: str, error: Exception) -> JavaGone | SparkRefused:
    java = java_of_spark()
    code = None
    if java is not None:
        # Java closes its connections before it exits.
        with suppress(subprocess.TimeoutExpired):
            code = java.wait(ENDING_S)
    if java is None or code is not None:
        how = "" if code is None else f" with code {code}"
        return JavaGone(
            f"Spark's Java has ended{how} during its start: it was killed, ran out of memory, or rejected "
            "--master or --conf (see stderr); start it again"
        )
    reason = brief(error)
    java.kill()
    return SparkRefused(f"Spark does not start with master {master}: {reason}; check --master and --conf")
