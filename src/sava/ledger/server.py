"""Sessions: connections that others have opened here to speak about journals.

The Raft port hands a connection over when it was opened for journals and the cluster is the right one. A
session takes requests in order, gives them to this broker's disk, and sends back what it answers, when it
becomes true.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from sava.ledger.protocol import Message, StorageId
from sava.ledger.store import Reply
from sava.ledger.wire import Answer, decode_request, encode

Write = Callable[[Sequence[bytes]], None]
"""To the other side; of no effect once the connection is gone."""


class Holder(Protocol):
    """This broker's disk, with all that it holds of journals."""

    def receive(self, origin: StorageId, message: Message, reply: Reply) -> None: ...

    def forget_owner(self, reply: Reply) -> None: ...


class Session:
    """Owned by the event loop."""

    def __init__(self, holder: Holder, write: Write) -> None:
        self._holder = holder
        self._write = write
        self._stream: Reply = partial(self._answer, 0)
        self._is_closed = False

    def receive(self, payloads: Sequence[bytes]) -> None:
        """Raises BadFrame: the connection is of no use then."""
        for payload in payloads:
            request = decode_request(payload)
            reply = partial(self._answer, request.ticket) if request.ticket else self._stream
            self._holder.receive(request.origin, request.message, reply)

    def _answer(self, ticket: int, message: Message) -> None:
        if not self._is_closed:
            self._write(encode(Answer(ticket, message)))

    def closed(self) -> None:
        self._is_closed = True
        self._holder.forget_owner(self._stream)
