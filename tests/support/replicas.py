"""What is published while it is replicated, and what must have become of it everywhere: each message once,
and those of one origin in their order."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from sava.client.blocking import Client
from sava.records import Message
from sava.storage.source_positions import PATH

SEND_S = 150.0
"""A producer waits so long for a broker that was killed."""
SHOWN = 5


class Load:
    """A thread that publishes numbers to some topics (plain ones, or partitions) of a cluster."""

    def __init__(
        self,
        cluster: str,
        urls: str | Sequence[str],
        names: Sequence[str],
        seed: int,
        *,
        pause_s: float = 0.02,
        padding: int = 0,
    ) -> None:
        self.cluster = cluster
        self.published = dict.fromkeys(names, 0)
        """By topic, as far as it is acked."""
        self._urls = urls
        self._chance = random.Random(seed)
        self._pause_s = pause_s
        self._padding = padding
        self._is_over = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"load of {cluster}", daemon=True)
        self._thread.start()

    def wait_begun(self) -> None:
        """Until something was published to each topic, however slow the machine is."""
        deadline = time.monotonic() + SEND_S
        while not all(self.published.values()) and self._failure is None:
            assert time.monotonic() < deadline, f"{self.cluster}: {self.published}"
            time.sleep(0.05)

    def stop(self) -> None:
        """Raises what a producer was told."""
        self._is_over.set()
        self._thread.join(SEND_S + 30)
        assert not self._thread.is_alive(), f"the producers of {self.cluster} hang"
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        try:
            with Client(self._urls, timeout=SEND_S) as client:
                producers = {name: client.producer(name, timeout=SEND_S) for name in self.published}
                for producer in producers.values():
                    producer.open()
                while not self._is_over.wait(self._chance.uniform(0, self._pause_s)):
                    name = self._chance.choice(list(producers))
                    first, count = self.published[name], self._chance.randrange(1, 60)
                    numbers = range(first, first + count)
                    sent = [payload(self.cluster, each, self._padding) for each in numbers]
                    producers[name].send_many(sent)
                    self.published[name] += count
                for producer in producers.values():
                    producer.close()
        except BaseException as error:  # noqa: BLE001 (raised by stop)
            self._failure = error


def payload(cluster: str, number: int, padding: int = 0) -> bytes:
    return f"{cluster} {number} ".encode() + b"." * padding


def differences(where: str, messages: Iterable[Message], published: Mapping[str, int]) -> list[str]:
    """What is wrong with a topic of cluster ``where``, of which so many messages of each cluster are to be
    there. Empty: nothing."""
    found: dict[str, list[int]] = {cluster: [] for cluster in published}
    wrong: list[str] = []
    for message in messages:
        cluster, number, _ = message.payload.decode().split(" ")
        found.setdefault(cluster, []).append(int(number))
        origin = message.origin.cluster if message.origin is not None else where
        path = message.attributes.get(PATH, where).split(",")
        if origin != cluster or path[0] != cluster or len(set(path)) < len(path):
            wrong.append(f"{where}: {cluster} {number} says that it is from {origin}, by way of {path}")
        if cluster != where and where in path:
            wrong.append(f"{where}: {cluster} {number} was here before: {path}")
    for cluster, numbers in found.items():
        counts, expected = Counter(numbers), range(published.get(cluster, 0))
        missing = [number for number in expected if number not in counts]
        repeated = [number for number, count in counts.items() if count > 1]
        unknown = [number for number in counts if number not in expected]
        late = [after for before, after in pairwise(numbers) if after < before]
        kinds = {"missing": missing, "repeated": repeated, "never published": unknown, "out of order": late}
        for what, which in kinds.items():
            if which:
                wrong.append(f"{where}: of {cluster} {len(which)} are {what}: {which[:SHOWN]}")
    return wrong
