"""The quorum of a broker without mirrors: its own disk."""

from __future__ import annotations


class OneDisk:
    """``AckQuorum``: what is durable here is committed."""

    is_degraded = False

    def check(self) -> None:
        """There is always one."""

    def durable(self, end: int) -> int:
        return end

    def trimmable(self, floor: int) -> int:
        return floor
