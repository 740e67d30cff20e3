"""How this broker opens connections about journals: to the Raft ports of others, with their TLS and under the
name of the cluster (``mirroring.wire.Door``)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from sava.config import Auth
from sava.errors import SavaError
from sava.framing import BadFrame
from sava.ledger.ports import PeerUnreachable
from sava.metadata.peer import error_from
from sava.peers import tls
from sava.peers.raft_wire import (
    GREETING,
    OpenJournals,
    Refusal,
    Welcome,
    decode_response,
    encode,
)
from sava.peers.sockets import connect


class JournalDoor:
    def __init__(self, auth: Auth, cluster: Callable[[], str]) -> None:
        self._tls = tls.client_context(auth)
        self._cluster = cluster

    async def connect(self, address: str, protocol: Callable[[], asyncio.Protocol]) -> None:
        try:
            await connect(address, protocol, self._tls)
        except SavaError as error:
            raise ConnectionError(str(error)) from error

    def opening(self) -> bytes:
        return GREETING + encode(OpenJournals(self._cluster()))

    def admitted(self, payload: bytes) -> None:
        match decode_response(payload):
            case Welcome():
                return
            case Refusal(code=code, message=message, detail=detail):
                raise PeerUnreachable(str(error_from(code, message, detail)))
            case _:
                raise BadFrame("an answer to another question")
