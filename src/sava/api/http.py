"""The HTTP port: ``/metrics``, ``/healthz`` and ``/readyz``, answered by a server of a page, since three
GETs need no framework. The last two are open to every caller who reaches the port; ``/metrics``, which has
names of topics, by ``auth.metrics``.

``/healthz`` says that the process works; an orchestrator restarts it otherwise. ``/readyz`` says that it can
serve: it belongs to a cluster, knows the leader, has applied what it knows to be committed, and is
registered, so that topics come to it. A broker that waits for ``cluster init`` is healthy and not ready, and
so is one that could not renew its registration: it has let go of its topics. One that ends because something
in it has died says what that was for as long as it is still there.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from http import HTTPStatus
from typing import Final

from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from sava.api.metrics.broker import Disks
from sava.cluster.registration import Registrar
from sava.cluster.view import ClusterView
from sava.errors import SavaError
from sava.metadata.node import RaftNode
from sava.peers.guard import AUTHORIZATION, Guard
from sava.security.permissions import Unauthenticated
from sava.supervisor import Supervisor
from sava.tasks import Slices, cancelled

log = logging.getLogger(__name__)

MAX_REQUEST_BYTES = 16 << 10
READ_TIMEOUT_S = 5.0
WRITE_TIMEOUT_S = 30.0
"""A page of many topics has megabytes."""
CAUGHT_UP = 100
"""Entries that may be committed and not yet applied while a node still counts as caught up."""

METRICS: Final = "/metrics"

Readiness = Callable[[], tuple[bool, str]]
Page = Callable[[], Awaitable[tuple[HTTPStatus, str, bytes]]]


def readiness(
    node: RaftNode, view: ClusterView, registrar: Registrar, supervisor: Supervisor
) -> tuple[bool, str]:
    if supervisor.reason:
        return False, f"this broker ends: {supervisor.reason}"
    core = node.core_status
    if core is None:
        return False, "waiting for cluster initialization"
    if core.node not in core.membership.members:
        return False, "not a member of the cluster"
    if not core.leader:
        return False, "no leader known"
    if core.commit - core.applied > CAUGHT_UP:
        return False, f"catching up: applied {core.applied} of {core.commit}"
    if not view.is_ready:
        return False, "learning which topics and brokers there are"
    if registrar.is_leaving:
        return False, "this broker stops, and hands its topics over"
    if not registrar.is_registered:
        return False, "not registered: the other brokers do not know that this one is there"
    return True, "ready"


class HttpServer:
    def __init__(
        self, metrics: Collector, disks: Disks, readiness: Readiness, guard: Guard | None = None
    ) -> None:
        """``guard``: of the page of metrics; None: it is open."""
        self._metrics = metrics
        self._guard = guard
        self._disks = disks
        self._readiness = readiness
        self._server: asyncio.Server | None = None
        self._serving: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        self._pages: dict[str, Page] = {
            METRICS: self._render,
            "/healthz": self._health,
            "/readyz": self._ready,
        }

    async def start(self, host: str, port: int) -> None:
        self._server = await asyncio.start_server(self._serve, host, port, limit=MAX_REQUEST_BYTES)

    async def close(self) -> None:
        """At once: a caller that does not read its answer would keep the broker for half a minute."""
        if self._server is not None:
            self._server.close()
            for writer in tuple(self._serving.values()):
                writer.transport.abort()
            await cancelled(*self._serving)
            await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._serving[task] = writer
        try:
            async with asyncio.timeout(READ_TIMEOUT_S):
                head = await reader.readuntil(b"\r\n\r\n")
            # However long this takes: this broker is the slow one, and the caller has a deadline of its own.
            writer.write(await self._respond(head))
            async with asyncio.timeout(WRITE_TIMEOUT_S):
                await writer.drain()
        except (TimeoutError, ConnectionError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            return
        except RuntimeError as error:
            # uvloop raises it for a connection that was lost while the page was written.
            log.debug("http: not answered error=%s", error)
        finally:
            del self._serving[task]
            writer.close()

    async def _respond(self, head: bytes) -> bytes:
        words = head.split(b"\r\n", 1)[0].decode("latin-1").split(" ")
        if len(words) != 3 or words[0] not in ("GET", "HEAD"):
            return _response(HTTPStatus.METHOD_NOT_ALLOWED, "text/plain", b"GET only\n")
        path = words[1].partition("?")[0]
        page = self._pages.get(path)
        if page is None:
            return _response(HTTPStatus.NOT_FOUND, "text/plain", b"not found\n")
        try:
            if path == METRICS and self._guard is not None:
                await self._guard.check_metrics(_authorization(head))
            status, kind, body = await page()
        except Unauthenticated as error:
            return _response(HTTPStatus.UNAUTHORIZED, "text/plain", f"{error}\n".encode())
        except SavaError as error:
            return _response(HTTPStatus.FORBIDDEN, "text/plain", f"{error}\n".encode())
        except Exception:
            log.exception("http: a page failed path=%s", words[1])
            return _response(
                HTTPStatus.INTERNAL_SERVER_ERROR, "text/plain", b"failed; the broker's log says why\n"
            )
        return _response(status, kind, body)

    async def _render(self) -> tuple[HTTPStatus, str, bytes]:
        await self._disks.look()
        return HTTPStatus.OK, TYPE, await written(self._metrics)

    async def _health(self) -> tuple[HTTPStatus, str, bytes]:
        return HTTPStatus.OK, "text/plain", b"ok\n"

    async def _ready(self) -> tuple[HTTPStatus, str, bytes]:
        ready, reason = self._readiness()
        status = HTTPStatus.OK if ready else HTTPStatus.SERVICE_UNAVAILABLE
        return status, "text/plain", f"{reason}\n".encode()


def _authorization(head: bytes) -> str:
    """Of the request; empty: it has none."""
    for line in head.decode("latin-1").split("\r\n")[1:]:
        name, _, value = line.partition(":")
        if name.lower() == AUTHORIZATION:
            return value.strip()
    return ""


def _response(status: HTTPStatus, kind: str, body: bytes) -> bytes:
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
    )
    return head.encode("latin-1") + b"Connection: close\r\n\r\n" + body


# -- the page of metrics ---------------------------------------------------------------------------


TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
SLICE_S: Final = 0.005
"""Of an event loop that owes a heartbeat every 100 ms."""
_LINES: Final = 200
"""Between two looks at the clock; well below a slice."""
_ESCAPES: Final = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})


async def written(registry: Collector) -> bytes:
    slices = Slices(SLICE_S)
    families: dict[str, Metric] = {}
    for part in registry.collect():
        family = families.setdefault(part.name, part)
        if family is not part:
            family.samples += part.samples
        await slices.next()
    page: list[bytes] = []
    for family in families.values():
        lines: list[str] = []
        for count, line in enumerate(_lines(family)):
            lines.append(line)
            if not count % _LINES:
                await slices.next()
        page.append("".join(lines).encode())
    return b"".join(page)


def _lines(family: Metric) -> Iterator[str]:
    name = f"{family.name}_total" if family.type == "counter" else family.name
    text = family.documentation.replace("\\", r"\\").replace("\n", r"\n")
    yield f"# HELP {name} {text}\n# TYPE {name} {family.type}\n"
    created = f"{family.name}_created"
    for sample in family.samples:
        if sample.name != created:
            yield _line(sample)


def _line(sample: Sample) -> str:
    """Labels in order of their names, as the library writes them: people compare lines as text."""
    labels = ",".join(
        f'{name}="{value.translate(_ESCAPES)}"' for name, value in sorted(sample.labels.items())
    )
    return f"{sample.name}{f'{{{labels}}}' if labels else ''} {float(sample.value)!r}\n"
