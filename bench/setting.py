"""Setting: on what figures were measured. Names the machine by what it is, never by what it is called."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Final

from bench.processes import filesystem_of

ROOT: Final = Path(__file__).parents[1]
PACKAGES: Final = {"gRPC": "grpcio", "pyarrow": "pyarrow", "Spark": "pyspark"}


def machine() -> str:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)
    kernel = platform.release().partition("-")[0]  # what follows may be a name that somebody gave it
    return f"{os.cpu_count()} cores, {memory:.0f} GiB of memory, {platform.system()} {kernel}"


def disk(path: Path) -> str:
    """The filesystem that ``path`` is on, and what is below it."""
    number = path.stat().st_dev
    device = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
    if not device.exists():
        return filesystem_of(path)
    device = device.resolve()
    whole = device.parent if (device / "partition").exists() else device
    return f"{filesystem_of(path)} on {_kind(whole)}"


def _kind(device: Path) -> str:
    if device.name.startswith(("vd", "xvd")):
        return "a virtual disk"
    if device.name.startswith("nvme"):
        return "NVMe"
    rotational = device / "queue" / "rotational"
    if not rotational.exists():
        return "a disk of unknown kind"
    return "a rotating disk" if rotational.read_text().strip() == "1" else "a solid-state disk"


def versions() -> dict[str, str | None]:
    """Of what Sava runs on; None for what is not there."""
    found: dict[str, str | None] = {"Python": platform.python_version()}
    for name, package in PACKAGES.items():
        try:
            found[name] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def commit() -> str:
    """Which Sava; says so if files have changed since."""
    try:
        short = _git("rev-parse", "--short=7", "HEAD")
        # The page that figures are written into is no part of what is measured.
        changed = _git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!docs", ":!*.md")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{short} with changes" if changed else short


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()
