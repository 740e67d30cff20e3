"""How this broker opens connections about journals: to the Raft ports of others, with their TLS and under the
name of the cluster (``mirroring.wire.Door``)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from sava.config import Auth
from sava.errors import SavaError
from sava.framing import BadFrame
from sava.metadata.failures import error_from
from sava.mirroring.ports import PeerUnreachable
from sava.services import security
from sava.services.raft_wire import GREETING, OpenJournals, Refusal, Welcome, decode_response, encode
from sava.services.sockets import notice_vanishing, split_address


class JournalDoor:
    def __init__(self, auth: Auth, cluster: Callable[[], str]) -> None:
        self._tls = security.client_context(auth)
        self._cluster = cluster

    async def connect(self, address: str, protocol: Callable[[], asyncio.BaseProtocol]) -> None:
        try:
            host, port = split_address(address)
        except SavaError as error:
            raise ConnectionError(str(error)) from error
        transport, _ = await asyncio.get_running_loop().create_connection(
            protocol, host, port, ssl=self._tls, server_hostname=host if self._tls else None
        )
        notice_vanishing(transport)

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
