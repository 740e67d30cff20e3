"""Write the locks: every file that ``make setup`` may install, by its hash.

``constraints.txt`` says which versions; a lock adds the SHA-256 of each file of those versions that pip may
choose on Linux and macOS (wheels; the source of a package that has no wheel). pip installs nothing else from
it, whatever the registry or a mirror hands out later.

    requirements/build.lock    what builds packages that come as source: installed first
    requirements/run.lock      what brokers, clients and commands need
    requirements/spark.lock    what Spark needs beside that
    requirements/dev.lock      what tests and `make lint` need beside that
    requirements/kafka.lock    the client of `make kafka`

The registry is the one that pip is configured for (PIP_INDEX_URL, pip.conf), or --index. Its address is
written nowhere: a lock is the same from every mirror.

    python -m tools.lock           write them
    python -m tools.lock --check   see whether they fit constraints.txt, without the network
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tomllib
import urllib.request
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from html.parser import HTMLParser
from importlib import metadata
from pathlib import Path
from typing import Final, NamedTuple

from packaging.requirements import Requirement
from packaging.utils import (
    InvalidSdistFilename,
    InvalidWheelFilename,
    canonicalize_name,
    parse_sdist_filename,
    parse_wheel_filename,
)
from packaging.version import Version

ROOT: Final = Path(__file__).parents[1]
CONSTRAINTS: Final = ROOT / "constraints.txt"
LOCKS: Final = ROOT / "requirements"
BUILD: Final = frozenset({"setuptools"})
KAFKA: Final = frozenset({"confluent-kafka"})
TIMEOUT_S: Final = 60.0
MAX_PAGE: Final = 32 << 20
_PINNED: Final = re.compile(r"([A-Za-z0-9._-]+)==([^\s;]+)")
_INTERPRETER: Final = re.compile(r"py3|cp3(\d+)")
_PLATFORM: Final = re.compile(r"any|manylinux.*_(x86_64|aarch64)|macosx_.*")
OLDEST: Final = 11
"""The minor version of the oldest Python."""
NEWEST: Final = 14


class LockFailed(Exception):
    """A lock cannot be written, or does not fit."""


class Pin(NamedTuple):
    name: str
    version: str

    def __str__(self) -> str:
        return f"{self.name}=={self.version}"


def pins(text: str) -> list[Pin]:
    """What a file pins, in its order."""
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    found = [_PINNED.match(line) for line in lines if line and not line.startswith("--")]
    if not all(found):
        raise LockFailed("a line is not NAME==VERSION")
    return [Pin(canonicalize_name(each[1]), each[2]) for each in found if each is not None]


def planned() -> dict[str, list[Pin]]:
    """The pins of each lock. A package is in the first that needs it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    run = closure(project["dependencies"])
    spark = closure(project["optional-dependencies"]["spark"])
    chosen = {"build": BUILD, "kafka": KAFKA, "run": run, "spark": spark}
    locks: dict[str, list[Pin]] = {name: [] for name in (*chosen, "dev")}
    for pin in pins(CONSTRAINTS.read_text()):
        lock = next((name for name, names in chosen.items() if pin.name in names), "dev")
        locks[lock].append(pin)
    return locks


def closure(requirements: Iterable[str]) -> frozenset[str]:
    """The names of packages and all that they need, by what is installed here. Raises LockFailed."""
    found: set[tuple[str, str]] = set()
    left = [(Requirement(each), "") for each in requirements]
    while left:
        needed, extra = left.pop()
        if needed.marker is not None and not needed.marker.evaluate({"extra": extra}):
            continue
        name = canonicalize_name(needed.name)
        for wanted in ("", *needed.extras):
            if (name, wanted) not in found:
                found.add((name, wanted))
                left += [(Requirement(each), wanted) for each in _needs(name)]
    return frozenset(name for name, _ in found)


def _needs(name: str) -> list[str]:
    try:
        return metadata.requires(name) or []
    except metadata.PackageNotFoundError:
        raise LockFailed(f"{name} is not installed; run `make setup`") from None


# -- the registry --------------------------------------------------------------


class _Links(HTMLParser):
    """The files of a page, as mirrors serve it that know no JSON."""

    def __init__(self) -> None:
        super().__init__()
        self.files: list[tuple[str, str]] = []
        self._hash = ""

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        if tag == "a":
            self._hash = (dict(attributes).get("href") or "").partition("#sha256=")[2]

    def handle_data(self, data: str) -> None:
        if self._hash and data.strip():
            self.files.append((data.strip(), self._hash))
            self._hash = ""


def index_of_pip() -> str:
    asked = [sys.executable, "-m", "pip", "config", "get", "global.index-url"]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if done.stdout.strip():
        return done.stdout.strip()
    from pip._internal.models.index import PyPI  # pip's own default, which it prints nowhere

    return str(PyPI.simple_url)


def files_of(index: str, name: str) -> list[tuple[str, str]]:
    """File names and hashes of all versions."""
    accept = "application/vnd.pypi.simple.v1+json, text/html;q=0.5"
    request = urllib.request.Request(f"{index.rstrip('/')}/{name}/", headers={"Accept": accept})
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
        page, kind = response.read(MAX_PAGE), response.headers.get_content_type()
    if kind.endswith("json"):
        return [(each["filename"], each["hashes"].get("sha256", "")) for each in json.loads(page)["files"]]
    links = _Links()
    links.feed(page.decode())
    return links.files


def hashes(pin: Pin, files: Sequence[tuple[str, str]]) -> list[str]:
    """Of the files that pip may choose, sorted. Raises LockFailed if there is none."""
    wheels = [digest for file, digest in files if digest and _is_wheel_of(file, pin)]
    sources = [digest for file, digest in files if digest and _is_source_of(file, pin)]
    if not (wheels or sources):
        raise LockFailed(f"{pin}: the registry has no file of it with a hash")
    return sorted(set(wheels or sources))


def _is_wheel_of(file: str, pin: Pin) -> bool:
    try:
        name, version, _, tags = parse_wheel_filename(file)
    except InvalidWheelFilename:
        return False
    if (name, version) != (pin.name, Version(pin.version)):
        return False
    return any(_fits(tag.interpreter, tag.abi) and _PLATFORM.fullmatch(tag.platform) for tag in tags)


def _fits(interpreter: str, abi: str) -> bool:
    found = _INTERPRETER.fullmatch(interpreter)
    if found is None:
        return False
    minor = int(found[1]) if found[1] else OLDEST
    return minor <= NEWEST if abi == "abi3" else OLDEST <= minor <= NEWEST and not abi.endswith("t")


def _is_source_of(file: str, pin: Pin) -> bool:
    try:
        name, version = parse_sdist_filename(file)
    except InvalidSdistFilename:
        return False
    return (name, version) == (pin.name, Version(pin.version))


# -- the locks -----------------------------------------------------------------


def written(found: Mapping[Pin, Sequence[str]]) -> str:
    lines = ["# Written by `make lock` from constraints.txt."]
    for pin, digests in found.items():
        lines.append(f"{pin} \\")
        lines += [f"    --hash=sha256:{digest} \\" for digest in digests[:-1]]
        lines.append(f"    --hash=sha256:{digests[-1]}")
    return "\n".join(lines) + "\n"


def locked(text: str) -> dict[Pin, list[str]]:
    """What a lock holds. Raises LockFailed for a version without a hash."""
    found: dict[Pin, list[str]] = {}
    for line in text.replace("\\\n", " ").splitlines():
        if line.strip() and not line.startswith("#"):
            (pin,) = pins(line)
            found[pin] = re.findall(r"--hash=sha256:([0-9a-f]{64})(?:\s|$)", line)
            if not found[pin]:
                raise LockFailed(f"{pin} has no hash")
    return found


def faults() -> Iterator[str]:
    for lock, wanted in planned().items():
        path = LOCKS / f"{lock}.lock"
        held = locked(path.read_text()) if path.exists() else {}
        for pin in wanted:
            if pin not in held:
                yield f"{path.name} lacks {pin}"
        for pin in held:
            if pin not in wanted:
                yield f"{path.name} has {pin}, which does not belong there by constraints.txt"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--index", default="", metavar="URL", help="the registry, if it is not pip's")
    parser.add_argument("--check", action="store_true", help="compare with constraints.txt alone")
    given = parser.parse_args()
    try:
        if given.check:
            if found := list(faults()):
                sys.exit("\n".join([*found, "run `make lock`"]))
            return
        index = given.index or index_of_pip()
        for lock, wanted in planned().items():
            with ThreadPoolExecutor(8) as pool:
                pages = pool.map(lambda pin: files_of(index, pin.name), wanted)
                digests = {pin: hashes(pin, page) for pin, page in zip(wanted, pages, strict=True)}
            (LOCKS / f"{lock}.lock").write_text(written(digests))
    except (LockFailed, OSError) as error:
        sys.exit(f"not locked: {error}")


if __name__ == "__main__":
    main()
