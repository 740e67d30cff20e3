"""Audit: who called, from where, what on which resource, and whether it was allowed.

The guard of the ports asks ``wants`` whether a call is to be recorded, and hands it over with its outcome. An
event goes two ways:

* **The log**, at once: one line of the logger ``sava.audit``, in the form that ``logging.format`` says.
* **The topic** ``/system/audit``, in batches, by one task: one JSON object a message (``AuditEvent.as_json``
  is the schema; a field is added, never changed), with the attributes ``principal``, ``method``,
  ``decision``.

A call never waits for its audit, and never fails by it. While the topic cannot be written, events wait in a
queue of ``MAX_WAITING``; what comes beyond is counted as dropped, and the log says so once a minute. The log
has those events all the same.

A caller that is refused usually tries again, thousands of times. So of the denials of one principal and
method ``EACH_SECOND`` a second are recorded one by one, and the others of that second as one event that
carries their ``count``. The same holds for calls that are allowed and change nothing, each resource by
itself. A change is always recorded by itself.

Payloads, tokens and secrets do not come here: an event has names, ids and the text of a refusal.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from typing import Final, Literal, NamedTuple

from sava.errors import SavaError
from sava.security.principal import BROKER, Principal
from sava.tasks import Backoff, set_within

log = logging.getLogger(__name__)
lines: Final = logging.getLogger("sava.audit")
"""Whatever ``logging.level`` says of other lines."""

NAMESPACE: Final = "system"
"""Reserved: administrators read it, brokers write it, no client creates a topic in it."""
TOPIC: Final = "/system/audit"

Level = Literal["off", "denied", "changes", "all"]

EACH_SECOND: Final = 5
"""Events of one kind that are recorded one by one."""
WINDOW_S: Final = 1.0
MAX_WINDOWS: Final = 1000
"""Kinds that are counted at a time; beyond it the oldest count is closed early."""
MAX_WAITING: Final = 10_000
"""Events that wait for the topic: a few megabytes."""
BATCH: Final = 256
PUBLISH_S: Final = 10.0
FLUSH_S: Final = 1.0
"""For what waits when the broker stops."""
SAID_EVERY_S: Final = 60.0
MAX_TEXT: Final = 300
"""Characters of one field: most of them a caller can choose."""

_PLAIN: Final = re.compile(r"[A-Za-z0-9_./:*@+\-\[\]%,=]+")


class AuditedCall(NamedTuple):
    """What is known of a call when its permission is checked."""

    principal: Principal
    method: str
    """Its path: ``/sava.admin.Topics/DeleteTopic``."""
    resource: str
    """``topic /sales/orders``, ``namespace sales``, ``cluster``; empty where the request does not say."""
    permission: str = ""
    is_change: bool = False
    credential: str = ""
    """token, certificate, broker or none."""
    token_id: str = ""
    """``jti`` of the token, or the serial number of the certificate."""
    peer: str = ""
    """As gRPC writes it: ``ipv4:10.0.0.7:51234``."""
    request_id: str = ""


class AuditEvent(NamedTuple):
    call: AuditedCall
    decision: Literal["allowed", "denied"]
    reason: str
    time_s: float
    broker: str
    calls: int
    """How many this event stands for; the fields are those of the last."""

    def as_json(self) -> bytes:
        """The payload of a message in the topic. Version 1."""
        call = self.call
        return json.dumps(
            {
                "version": 1,
                "time": _written(self.time_s),
                "principal": _cut(str(call.principal)),
                "credential": call.credential,
                "token_id": _cut(call.token_id),
                "peer": _cut(call.peer),
                "method": _cut(call.method),
                "permission": call.permission,
                "resource": _cut(call.resource),
                "decision": self.decision,
                "reason": _cut(self.reason),
                "broker": self.broker,
                "request_id": _cut(call.request_id),
                "count": self.calls,
            },
            separators=(",", ":"),
        ).encode()

    @property
    def attributes(self) -> dict[str, str]:
        return {
            "principal": _cut(str(self.call.principal)),
            "method": _cut(self.call.method),
            "decision": self.decision,
        }


Publish = Callable[[Sequence[AuditEvent]], Awaitable[None]]


class _Window:
    """Events of one kind within one second."""

    __slots__ = ("began", "last", "more", "single")

    def __init__(self, now: float) -> None:
        self.began = now
        self.single = 0
        self.more = 0
        self.last: AuditEvent | None = None


class Audit:
    """Of one broker. Owned by the event loop. ``publish`` writes a batch to the topic; it raises SavaError or
    TimeoutError when that failed and is to be tried again."""

    def __init__(self, level: Level, *, broker: str, clock: Callable[[], float] = time.time) -> None:
        self.level: Final = level
        self.denials = 0
        """Calls that were refused, recorded or not."""
        self.dropped = 0
        """Events that the topic does not have."""
        self._broker = broker
        self._clock = clock
        self._windows: OrderedDict[tuple[str, ...], _Window] = OrderedDict()
        self._waiting: deque[AuditEvent] = deque()
        self._woken = asyncio.Event()
        self._said_at = float("-inf")
        self._said = 0
        self._has_topic = False
        lines.setLevel(logging.INFO)

    def wants(self, *, is_change: bool) -> bool:
        """Whether an allowed call is recorded. The caller asks before it gathers what an event needs."""
        return self.level == "all" or (is_change and self.level == "changes")

    def allowed(self, call: AuditedCall) -> None:
        """A call of a broker for itself is none of a client: the topic of the audit would audit itself."""
        if self.wants(is_change=call.is_change) and call.principal.kind != BROKER:
            kind = () if call.is_change else (str(call.principal), call.method, call.resource)
            self._take(AuditEvent(call, "allowed", "", self._clock(), self._broker, 1), kind)

    def denied(self, call: AuditedCall, reason: str) -> None:
        self.denials += 1
        if self.level != "off":
            kind = (str(call.principal), call.method)
            self._take(AuditEvent(call, "denied", reason, self._clock(), self._broker, 1), kind)

    def _take(self, event: AuditEvent, kind: tuple[str, ...]) -> None:
        if not kind:
            self._record(event)
            return
        window = self._windows.get(kind)
        if window is not None and not 0 <= event.time_s - window.began < WINDOW_S:
            self._close(kind)
            window = None
        if window is None:
            if len(self._windows) >= MAX_WINDOWS:
                self._close(next(iter(self._windows)))
            window = self._windows[kind] = _Window(event.time_s)
        if window.single < EACH_SECOND:
            window.single += 1
            self._record(event)
        else:
            window.more += 1
            window.last = event

    def _close(self, kind: tuple[str, ...]) -> None:
        window = self._windows.pop(kind)
        if window.last is not None:
            self._record(window.last._replace(calls=window.more))

    def _close_all(self, now: float) -> None:
        """Those whose second is over: a kind of which no more comes has no event that closes it."""
        for kind in [kind for kind, each in self._windows.items() if not 0 <= now - each.began < WINDOW_S]:
            self._close(kind)

    def _record(self, event: AuditEvent) -> None:
        _log(event)
        if not self._has_topic:
            return
        if len(self._waiting) >= MAX_WAITING:
            self.dropped += 1
            return
        self._waiting.append(event)
        if len(self._waiting) >= BATCH:
            self._woken.set()

    # -- the topic -------------------------------------------------------------------------------

    async def run(self, publish: Publish) -> None:
        """Write events to the topic until this is cancelled; ``level`` off has nothing to write."""
        self._has_topic = self.level != "off"
        pauses = Backoff(0.2, 10.0)
        while self._has_topic:
            self._woken.clear()
            self._close_all(self._clock())
            self._say_dropped()
            if not self._waiting:
                await set_within(WINDOW_S, self._woken)
            elif await self._write(publish):
                pauses.reset()
            else:
                await pauses.pause()

    async def flush(self, publish: Publish) -> None:
        """What waits, when the broker stops; as far as that is possible in a moment."""
        self._close_all(float("inf"))
        deadline = time.monotonic() + FLUSH_S
        while self._waiting and time.monotonic() < deadline and await self._write(publish, FLUSH_S):
            pass
        self.dropped += len(self._waiting)
        self._waiting.clear()
        self._say_dropped(at_once=True)

    async def _write(self, publish: Publish, timeout: float = PUBLISH_S) -> bool:
        """Whether the oldest batch is in the topic. One whose outcome is open is written again: an event may
        be there twice, and is not lost."""
        count = min(len(self._waiting), BATCH)
        batch = [self._waiting[index] for index in range(count)]
        try:
            async with asyncio.timeout(timeout):
                await publish(batch)
        except (SavaError, TimeoutError) as error:
            log.warning("audit: the topic cannot be written error=%s: %s", type(error).__name__, error)
            return False
        for _ in range(count):
            self._waiting.popleft()
        return True

    def _say_dropped(self, *, at_once: bool = False) -> None:
        now = self._clock()
        if self.dropped > self._said and (at_once or now - self._said_at >= SAID_EVERY_S):
            log.warning("audit: events are missing in the topic %s dropped=%d", TOPIC, self.dropped)
            self._said, self._said_at = self.dropped, now


def is_reserved(resource: str) -> bool:
    """Whether a topic or namespace is one that only brokers write."""
    return resource == NAMESPACE or resource.startswith(f"/{NAMESPACE}/")


def _log(event: AuditEvent) -> None:
    call = event.call
    lines.info(
        "audit: decision=%s principal=%s method=%s resource=%s permission=%s credential=%s token_id=%s "
        "peer=%s request_id=%s count=%d reason=%s",
        event.decision,
        *map(_word, (str(call.principal), call.method, call.resource, call.permission, call.credential)),
        *map(_word, (call.token_id, call.peer, call.request_id)),
        event.calls,
        _word(event.reason),
    )


def _word(text: str) -> str:
    """One value of a line. What a caller has chosen cannot look like the next field: it is quoted."""
    if not text:
        return "-"
    text = _cut(text)
    return text if _PLAIN.fullmatch(text) else json.dumps(text)


def _cut(text: str) -> str:
    return text if len(text) <= MAX_TEXT else f"{text[: MAX_TEXT - 1]}…"


def _written(time_s: float) -> str:
    return datetime.fromtimestamp(time_s, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
