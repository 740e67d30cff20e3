"""Which processes there are, and who has started them."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple


class _Stat(NamedTuple):
    state: str
    parent: int
    group: int
    session: int


def running(program: str = "") -> Iterator[int]:
    """Processes with this word in their command."""
    for place in Path("/proc").iterdir():
        if place.name.isdigit():
            with suppress(OSError):
                if program.encode() in (place / "cmdline").read_bytes():
                    yield int(place.name)


def has_started(ancestors: Collection[int], pid: int) -> bool:
    """Whether one of them has started the process, or one that has."""
    while pid > 1:
        pid = parent_of(pid)
        if pid in ancestors:
            return True
    return False


def parent_of(pid: int) -> int:
    """0: there is no such process."""
    found = _stat(pid)
    return found.parent if found is not None else 0


def of_session(session: int) -> list[int]:
    """Those that run, and have not left the session: Python's workers have a group of their own."""
    found = ((pid, _stat(pid)) for pid in running())
    return [
        pid for pid, stat in found if stat is not None and stat.session == session and stat.state not in "ZX"
    ]


def _stat(pid: int) -> _Stat | None:
    """None: there is no such process."""
    try:
        # The name of a program may hold spaces and parentheses; what follows it does not.
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return _Stat(words[0], *map(int, words[1:4]))
