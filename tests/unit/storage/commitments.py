"""Journals that wait for others, as far as a test says."""

from __future__ import annotations

from sava.storage.commit_queue import NotCommittable


class Mirrors:
    """``AckQuorum``: as far as the test says."""

    def __init__(self) -> None:
        self.position = 0
        self.own = 0
        self.refuses = False
        self.is_degraded = False
        self.floor = 1 << 62
        self.asked: list[int] = []

    def check(self) -> None:
        if self.refuses:
            raise NotCommittable("too few")

    def durable(self, end: int) -> int:
        self.own = end
        return min(end, self.position)

    def trimmable(self, floor: int) -> int:
        self.asked.append(floor)
        return self.floor


class Ended(Exception):
    pass
