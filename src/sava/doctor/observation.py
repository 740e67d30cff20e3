"""Everything that is looked at, and the form of what is found. Nothing here judges, and nothing raises
because of what it finds: a broker that does not answer is the very thing that is looked for.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, TypeVar

from prometheus_client.parser import text_string_to_metric_families

from sava.api.admin_client import AdminClient
from sava.client import Refused
from sava.client.connection import Connection
from sava.client.errors import ClientError, Denied
from sava.errors import SavaError
from sava.peers.error_mapping import BrokerUnreachable
from sava.proto import (
    admin_pb2,
    brokers_pb2,
    doctor_pb2,
    ledgers_pb2,
    pipelines_pb2,
    replica_pb2,
    replication_pb2,
    security_pb2,
    topics_admin_pb2,
)
from sava.proto.replica_pb2_grpc import ReplicaStub
from sava.security.credentials import Credentials


class Level(StrEnum):
    OK = "ok"
    NOTE = "note"
    """Worth knowing, and nothing to do."""
    WARNING = "warning"
    """Works, and will not for long, or not as it should."""
    ERROR = "error"
    """Something does not work."""

    @property
    def is_trouble(self) -> bool:
        return self in (Level.WARNING, Level.ERROR)


ORDER: Final = (Level.ERROR, Level.WARNING, Level.NOTE, Level.OK)
"""The worst first."""


@dataclass(frozen=True, slots=True)
class Finding:
    level: Level
    check: str
    subject: str
    """What it is about: a broker, a topic, an address."""
    text: str
    remedy: str = ""
    """What to do; empty if there is nothing to do."""


def error(check: str, subject: str, text: str, remedy: str) -> Finding:
    return Finding(Level.ERROR, check, subject, text, remedy)


def warning(check: str, subject: str, text: str, remedy: str) -> Finding:
    return Finding(Level.WARNING, check, subject, text, remedy)


def note(check: str, subject: str, text: str, remedy: str = "") -> Finding:
    return Finding(Level.NOTE, check, subject, text, remedy)


CALL_S: Final = 5.0
PROBE_S: Final = 20.0
"""An object store has its own deadlines, several in a row."""
CONTACT_S: Final = 3.0
PAGE_S: Final = 10.0
"""A broker with thousands of topics has a page of megabytes, and writes it beside its other work."""
PARALLEL: Final = 16
MAX_TOPICS: Final = 500
"""That are described one by one; of the others only the state is known."""
MAX_LOOK_UPS: Final = 20
ROUND_S: Final = 15.0
"""For all topics together, each time: a broker that hangs would cost a call's time for every few of its
topics."""
ALPN: Final = ("h2",)

T = TypeVar("T")
Samples = dict[str, list[tuple[dict[str, str], float]]]
"""Of a page of metrics: labels and value, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contact:
    """One address as a client sees it: whether a process answers there, and with which certificate."""

    use: str
    """client, admin, raft or http."""
    address: str
    error: str = ""
    """Why no connection was made; empty: one was."""
    expires: float | None = None
    """When the certificate shown there ends, in seconds since 1970; None: none was shown."""


@dataclass(slots=True, kw_only=True)
class BrokerSeen:
    """One broker, as the others list it and as it answers."""

    listed: brokers_pb2.Broker
    contacts: list[Contact] = field(default_factory=list)
    first: admin_pb2.StatusResponse | None = None
    status: admin_pb2.StatusResponse | None = None
    """A little later."""
    examination: doctor_pb2.Examination | None = None
    error: str = ""
    """Why it did not answer on its admin port."""
    clock_offset_s: float = 0.0
    """How far its clock is ahead of the one here."""
    clock_error_s: float = 0.0
    """How much of that may be the time that the answer took."""
    store: doctor_pb2.StoreProbe | None = None
    metrics: Samples = field(default_factory=dict)

    @property
    def name(self) -> str:
        address = self.listed.client_addr or self.listed.raft_addr
        return f"broker {self.listed.broker_id}" + (f" ({address})" if address else "")

    @property
    def is_registered(self) -> bool:
        return self.listed.status not in ("unreachable", "gone")


@dataclass(frozen=True, slots=True, kw_only=True)
class Greeting:
    """What answers at an address that clients use."""

    cluster_id: str = ""
    cluster_name: str = ""
    error: str = ""
    """Why no broker did; empty: one did."""
    is_stranger: bool = False
    """A process answers that does not know what was asked."""


@dataclass(slots=True, kw_only=True)
class Observation:
    admin: str
    asked_error: str = ""
    """Why the broker that was asked first did not answer: then there is nothing else."""
    asked_remedy: str = ""
    """What to do about that, if it is known."""
    asked: admin_pb2.StatusResponse | None = None
    brokers: list[BrokerSeen] = field(default_factory=list)
    topics: list[topics_admin_pb2.TopicSummary] = field(default_factory=list)
    topics_error: str = ""
    first: dict[str, topics_admin_pb2.TopicDescription] = field(default_factory=dict)
    second: dict[str, topics_admin_pb2.TopicDescription] = field(default_factory=dict)
    """Topics that were described twice, ``waited_s`` apart."""
    waited_s: float = 0.0
    ledgers: list[ledgers_pb2.Ledger] = field(default_factory=list)
    ledgers_error: str = ""
    links: list[replication_pb2.LinkTopic] = field(default_factory=list)
    links_error: str = ""
    pipelines: list[pipelines_pb2.Pipeline] = field(default_factory=list)
    pipelines_error: str = ""
    is_enforced: bool | None = None
    """Whether calls need permissions; None: the broker that was asked did not say."""
    service: str = ""
    is_service_given: bool = False
    """By the user; otherwise it is each broker's own address."""
    greetings: dict[str, Greeting] = field(default_factory=dict)
    """By address of the service."""
    look_ups: dict[str, str | list[tuple[str, str]]] = field(default_factory=dict)
    """Where a client is sent, by topic: partitions with addresses, or why it learned nothing."""

    @property
    def has_leader(self) -> bool:
        """Whether any broker knows one."""
        return any(broker.status is not None and broker.status.leader_id for broker in self.brokers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """How to get in."""

    admin: str
    credentials: Credentials
    service: str = ""
    """Where clients connect; empty: each broker's own address will do."""


class Looking:
    """One look at a cluster."""

    def __init__(self, access: Access, *, watch_s: float, tell: Callable[[str], None]) -> None:
        self._access = access
        self._watch_s = watch_s
        self._tell = tell
        self._turns = asyncio.Semaphore(PARALLEL)

    async def look(self) -> Observation:
        seen = Observation(admin=self._access.admin)
        async with AdminClient(self._access.admin, self._access.credentials) as client:
            try:
                seen.asked = await client.status(timeout=CALL_S)
                request = brokers_pb2.ListBrokersRequest()
                listed = (await client.call(client.brokers.ListBrokers, request, timeout=CALL_S)).brokers
            except BrokerUnreachable as error:
                seen.asked_error, seen.asked_remedy = error.cause.text, error.cause.remedy
                return seen
            except SavaError as error:
                seen.asked_error = str(error)
                return seen
            if not seen.asked.cluster_id:
                return seen
            seen.brokers = [BrokerSeen(listed=broker) for broker in listed]
            self._tell(f"looking at {len(seen.brokers)} brokers")
            await asyncio.gather(*(self._visit(broker) for broker in seen.brokers))
            await self._look_at_topics(client, seen)
            await self._ask_for_rules(client, seen)
            await self._list_ledgers(client, seen)
            await self._list_pipelines(client, seen)
            await asyncio.gather(*(self._visit_again(broker) for broker in seen.brokers))
        await self._ask_as_client(seen)
        return seen

    # -- brokers -----------------------------------------------------------------------------

    async def _visit(self, broker: BrokerSeen) -> None:
        listed = broker.listed
        tls = self._access.credentials.tls
        context = None if tls is None else tls.context()
        if context is not None:
            context.set_alpn_protocols(ALPN)
        addresses = {
            "client": listed.client_addr,
            "admin": listed.admin_addr,
            "raft": listed.raft_addr,
            "http": listed.http_addr,
        }
        broker.contacts = await asyncio.gather(
            *(
                contact(use, address, None if use == "http" else context)
                for use, address in addresses.items()
                if address
            )
        )
        if not listed.admin_addr:
            return
        async with AdminClient(listed.admin_addr, self._access.credentials) as client:
            try:
                broker.first = await client.status(timeout=CALL_S)
                await self._examine(client, broker)
            except SavaError as error:
                broker.error = str(error)
        with suppress(OSError, TimeoutError, ValueError):  # the contact says why
            broker.metrics = parsed(await fetch(listed.http_addr, "/metrics"))

    async def _examine(self, client: AdminClient, broker: BrokerSeen) -> None:
        examine = client.doctor.Examine
        # The clock alone first: the shorter the call, the better it is known.
        began = time.time()
        quick = await client.call(examine, doctor_pb2.ExamineRequest(), timeout=CALL_S)
        ended = time.time()
        broker.examination = quick
        broker.clock_offset_s = quick.clock / 1e6 - (began + ended) / 2
        broker.clock_error_s = (ended - began) / 2
        probing = doctor_pb2.ExamineRequest(probe_store=True)
        broker.store = (await client.call(examine, probing, timeout=PROBE_S)).store

    async def _visit_again(self, broker: BrokerSeen) -> None:
        if broker.first is None:
            return
        async with AdminClient(broker.listed.admin_addr, self._access.credentials) as client:
            try:
                broker.status = await client.status(timeout=CALL_S)
            except SavaError as error:
                broker.error = str(error)

    # -- topics ------------------------------------------------------------------------------

    async def _look_at_topics(self, client: AdminClient, seen: Observation) -> None:
        seen.first = await self._describe_all(client, await self._list(client, seen))
        self._tell(f"looking at {len(seen.first)} topics again in {self._watch_s:g} s")
        began = time.monotonic()
        await asyncio.sleep(self._watch_s)
        seen.second = await self._describe_all(client, await self._list(client, seen))
        seen.waited_s = time.monotonic() - began

    async def _list(self, client: AdminClient, seen: Observation) -> list[str]:
        try:
            request = topics_admin_pb2.ListTopicsRequest()
            seen.topics = list((await client.call(client.topics.ListTopics, request, timeout=CALL_S)).topics)
        except SavaError as error:
            seen.topics_error = str(error)
            return []
        return [topic.name for topic in seen.topics if not topic.partitions][:MAX_TOPICS]

    async def _describe_all(
        self, client: AdminClient, names: Sequence[str]
    ) -> dict[str, topics_admin_pb2.TopicDescription]:
        async def describe(name: str) -> Any:
            request = topics_admin_pb2.DescribeTopicRequest(name=name)
            return await client.call(client.topics.DescribeTopic, request, timeout=CALL_S)

        deadline = time.monotonic() + ROUND_S
        found = await asyncio.gather(*(self._in_turn(describe, name, deadline) for name in names))
        return {name: answer for name, answer in zip(names, found, strict=True) if answer is not None}

    async def _in_turn(self, ask: Callable[[str], Awaitable[T]], name: str, deadline: float) -> T | None:
        async with self._turns:
            if time.monotonic() >= deadline:
                return None
            try:
                return await ask(name)
            except SavaError:
                return None  # deleted meanwhile, about to be served elsewhere, or its broker hangs

    # -- access ------------------------------------------------------------------------------

    async def _ask_for_rules(self, client: AdminClient, seen: Observation) -> None:
        with suppress(SavaError):  # a broker of an earlier version does not know the call
            answer = await client.ask(security_pb2.WhoAmIRequest(), "WhoAmI", timeout=CALL_S)
            seen.is_enforced = answer.is_enforced

    # -- ledgers -----------------------------------------------------------------------------

    async def _list_ledgers(self, client: AdminClient, seen: Observation) -> None:
        try:
            request = ledgers_pb2.ListLedgersRequest()
            listed = await client.call(client.ledgers.ListLedgers, request, timeout=CALL_S)
            seen.ledgers = list(listed.ledgers)
        except SavaError as error:
            seen.ledgers_error = str(error)

    # -- pipelines and replication -----------------------------------------------------------

    async def _list_pipelines(self, client: AdminClient, seen: Observation) -> None:
        try:
            listing = client.pipelines.ListPipelines, pipelines_pb2.ListPipelinesRequest()
            seen.pipelines = list((await client.call(*listing, timeout=CALL_S)).pipelines)
        except SavaError as error:
            seen.pipelines_error = str(error)
        try:
            asking = client.replication.GetReplicationStatus, replication_pb2.GetReplicationStatusRequest()
            seen.links = list((await client.call(*asking, timeout=CALL_S)).topics)
        except SavaError as error:
            seen.links_error = str(error)

    # -- as a client -------------------------------------------------------------------------

    async def _ask_as_client(self, seen: Observation) -> None:
        own = [broker.listed.client_addr for broker in seen.brokers if broker.listed.client_addr]
        scheme = "https" if self._access.credentials.tls is not None else "http"
        seen.is_service_given = bool(self._access.service)
        seen.service = self._access.service or ",".join(f"{scheme}://{address}" for address in own)
        if not seen.service:
            return
        shown = self._access.credentials
        connection = Connection(seen.service, token=shown.token, tls=shown.tls, timeout=CALL_S)
        try:
            greetings = await asyncio.gather(*(_greeted(connection, each) for each in connection.targets))
            seen.greetings = dict(zip(connection.targets, greetings, strict=True))
            topics = [each.name for each in seen.topics if not each.partition_of][:MAX_LOOK_UPS]
            with suppress(TimeoutError):
                async with asyncio.timeout(ROUND_S):
                    await self._look_up(connection, topics, seen)
        finally:
            await connection.close()

    async def _look_up(self, connection: Connection, topics: Sequence[str], seen: Observation) -> None:
        for topic in topics:
            try:
                found = await connection.look_up(topic)
                seen.look_ups[topic] = [(part.topic, part.address) for part in found.partitions]
            except SavaError as error:
                seen.look_ups[topic] = str(error)
                if len(seen.look_ups) == 1:
                    return  # the first did not come through, so the others would not either


async def _greeted(connection: Connection, target: str) -> Greeting:
    try:
        hello = await connection.call(
            "Hello", replica_pb2.HelloRequest(), target=target, timeout=CALL_S, service=ReplicaStub
        )
    except ClientError as error:
        # A broker that refuses says why by a code; only another program does not know the question.
        is_stranger = isinstance(error, Refused) and not isinstance(error, Denied) and not error.code
        return Greeting(error=str(error), is_stranger=is_stranger)
    return Greeting(cluster_id=hello.cluster_id, cluster_name=hello.cluster_name)


def parsed(page: str) -> Samples:
    found: Samples = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((dict(sample.labels), sample.value))
    return found


# -- one address ---------------------------------------------------------------


async def contact(use: str, address: str, context: ssl.SSLContext | None) -> Contact:
    """Open a connection and close it again."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        return Contact(use=use, address=address, error="not written HOST:PORT")
    try:
        async with asyncio.timeout(CONTACT_S):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port), ssl=context)
    except TimeoutError:
        return Contact(use=use, address=address, error=f"no answer within {CONTACT_S:g} s")
    except ssl.SSLError as error:
        return Contact(use=use, address=address, error=f"TLS: {_tls_reason(error)}")
    except OSError as error:
        return Contact(use=use, address=address, error=_reason(error))
    try:
        return Contact(use=use, address=address, expires=_expiry(writer.get_extra_info("peercert")))
    finally:
        writer.close()


async def fetch(address: str, path: str) -> str:
    """The body of a page. Raises OSError, TimeoutError."""
    host, _, port = address.rpartition(":")
    async with asyncio.timeout(PAGE_S):
        reader, writer = await asyncio.open_connection(host.strip("[]"), int(port))
        try:
            writer.write(f"GET {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n".encode())
            answer = await reader.read(-1)
        finally:
            writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    status = head.partition(b"\r\n")[0].decode("latin-1")
    if " 200 " not in status:
        raise OSError(f"{path} was answered with {status!r}")
    return body.decode()


def days_left(expires: float) -> float:
    return (expires - time.time()) / 86400


def _expiry(certificate: Any) -> float | None:
    return ssl.cert_time_to_seconds(certificate["notAfter"]) if certificate else None


def _tls_reason(error: ssl.SSLError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return error.verify_message
    return error.reason or str(error)


def _reason(error: OSError) -> str:
    """asyncio's own text names the address once more, and twice when a name has two."""
    return error.strerror if error.strerror and "Connect call" not in error.strerror else "connection refused"
