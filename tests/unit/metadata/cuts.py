"""A process that ends at a chosen operation of its disk, whichever that is."""

from __future__ import annotations

from tests.sim.disk import SimDisk


class CutError(BaseException):
    """Not an Exception: nothing may take it for something to deal with."""


def cut_at(disk: SimDisk, operation: int) -> None:
    """Let so many operations pass; the next one raises CutError."""
    left = operation

    def hook(_: str) -> None:
        nonlocal left
        if left == 0:
            raise CutError
        left -= 1

    disk.on_operation(hook)
