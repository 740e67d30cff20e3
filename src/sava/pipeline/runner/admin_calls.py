"""AdminCalls: the admin port of any broker, for a program that must not wait long.

A call goes to the broker that answered last, and within its time to the next one if that fails. All calls can
be repeated: what a broker has done and not answered, another one finds done.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

from sava.client.connection import Connection, Tls
from sava.client.errors import Unavailable
from sava.client.loop_thread import LoopThread
from sava.pipeline.runner.control import CALL_S
from sava.proto import brokers_pb2, brokers_pb2_grpc

ADDRESSES_S: Final = 2.0
"""So often it is asked which brokers there are. A broker that takes the place of the only one that is known
must be heard of before that has gone, and to move its topics takes no longer than a few seconds."""
ATTEMPT_S: Final = CALL_S / 2


class AdminCalls:
    """Of one thread."""

    def __init__(self, addresses: str, *, tls: Tls | None = None, name: str = "sava runner") -> None:
        self.service = ""
        """Client addresses of the brokers, with commas between; empty: not known yet."""
        self._scheme = "https://" if "https://" in addresses else ""
        self._connection = Connection(addresses, token=None, tls=tls, timeout=CALL_S)
        self._known = list(self._connection.targets)
        self._turn = 0
        self._ask_addresses_at = 0.0
        self._loop = LoopThread(name)

    @property
    def admin(self) -> str:
        """Admin addresses, with commas between: those that were given, and those that were found since."""
        return ",".join(f"{self._scheme}{target}" for target in self._known)

    def close(self) -> None:
        self._loop.run(self._connection.close())
        self._loop.close()

    def refresh(self) -> None:
        """Ask where brokers are, if that is due."""
        if time.monotonic() >= self._ask_addresses_at:
            with suppress(Unavailable):
                self.look_up()

    def look_up(self) -> None:
        """Where brokers are. Raises Unavailable."""
        response: brokers_pb2.ListBrokersResponse = self.ask(
            "ListBrokers", brokers_pb2.ListBrokersRequest(local=True), brokers_pb2_grpc.BrokersStub
        )
        self._ask_addresses_at = time.monotonic() + ADDRESSES_S
        there = [broker for broker in response.brokers if broker.client_addr]
        if not there:
            return  # they have just begun, and do not know of each other yet
        self.service = ",".join(broker.client_addr for broker in there)
        target = self._known[self._turn]
        # The addresses that were given stay: they may be the only ones that can be reached from here.
        known = (*self._connection.targets, *(broker.admin_addr for broker in there), target)
        self._known = list(dict.fromkeys(known))
        self._turn = self._known.index(target)

    def ask(self, method: str, request: Any, service: Callable[[Any], Any]) -> Any:
        """Raises Unavailable, Refused."""
        deadline = time.monotonic() + CALL_S
        failure = Unavailable("no broker was asked")
        for _ in range(len(self._known)):
            left = deadline - time.monotonic()
            if left <= 0:
                break
            attempt = left if len(self._known) == 1 else min(left, ATTEMPT_S)
            try:
                return self._loop.run(
                    self._connection.call(
                        method, request, target=self._known[self._turn], timeout=attempt, service=service
                    )
                )
            except Unavailable as error:
                failure = error
                self._turn = (self._turn + 1) % len(self._known)
        raise failure
