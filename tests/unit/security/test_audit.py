"""The audit of one broker: what is recorded, what is counted together, and what becomes of events that the
topic cannot take."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Sequence

import pytest

from sava.logs import JsonFormatter
from sava.metadata.errors import Unavailable
from sava.security import audit
from sava.security.audit import Audit, AuditedCall, AuditEvent
from sava.security.principal import ANONYMOUS, Principal
from sava.tasks import cancelled

ALICE = Principal("user", "alice")
DELETE = AuditedCall(
    ALICE,
    "/sava.admin.Topics/DeleteTopic",
    "/sales/orders",
    permission="manage-topic",
    is_change=True,
    credential="token",
    token_id="t-1",
    peer="ipv4:10.0.0.7:51234",
    request_id="r-1",
)
LIST = AuditedCall(ALICE, "/sava.admin.Topics/ListTopics", "sales", permission="lookup")


class Clock:
    def __init__(self) -> None:
        self.now = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now


class Topic:
    """Takes batches, unless it is broken."""

    def __init__(self) -> None:
        self.events: list[AuditEvent] = []
        self.batches = 0
        self.is_broken = False
        self.written = asyncio.Event()
        self.refused = asyncio.Event()

    async def publish(self, events: Sequence[AuditEvent]) -> None:
        if self.is_broken:
            self.refused.set()
            raise Unavailable("no quorum")
        self.events += events
        self.batches += 1
        self.written.set()


def recorded(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "sava.audit"]


async def flushed(book: Audit) -> list[AuditEvent]:
    """What the topic has when the broker stops."""
    topic = Topic()
    running = asyncio.create_task(book.run(topic.publish))
    await asyncio.sleep(0)
    await book.flush(topic.publish)
    await cancelled(running)
    return topic.events


def started(book: Audit, topic: Topic) -> asyncio.Task[None]:
    return asyncio.create_task(book.run(topic.publish))


@pytest.mark.parametrize(
    ("level", "kinds"),
    [
        ("off", set()),
        ("denied", {"denied"}),
        ("changes", {"denied", "change"}),
        ("all", {"denied", "change", "look"}),
    ],
)
async def test_the_level_says_what_is_recorded(
    level: audit.Level, kinds: set[str], caplog: pytest.LogCaptureFixture
) -> None:
    book = Audit(level, broker="7")
    book.denied(DELETE, "no")
    book.allowed(DELETE)
    book.allowed(LIST)
    lines = recorded(caplog)
    assert len(lines) == len(kinds)
    assert any("decision=denied" in line for line in lines) == ("denied" in kinds)
    assert any("allowed" in line and "DeleteTopic" in line for line in lines) == ("change" in kinds)
    assert any("ListTopics" in line for line in lines) == ("look" in kinds)
    assert book.wants(is_change=True) == ("change" in kinds)
    assert book.wants(is_change=False) == ("look" in kinds)


async def test_an_event_has_the_documented_fields() -> None:
    book, topic = Audit("changes", broker="7", clock=lambda: 1_800_000_000.25), Topic()
    running = started(book, topic)
    await asyncio.sleep(0)
    book.denied(DELETE, "user:alice lacks manage-topic")
    await book.flush(topic.publish)
    await cancelled(running)
    (event,) = topic.events
    assert json.loads(event.as_json()) == {
        "version": 1,
        "time": "2027-01-15T08:00:00.250Z",
        "principal": "user:alice",
        "credential": "token",
        "token_id": "t-1",
        "peer": "ipv4:10.0.0.7:51234",
        "method": "/sava.admin.Topics/DeleteTopic",
        "permission": "manage-topic",
        "resource": "/sales/orders",
        "decision": "denied",
        "reason": "user:alice lacks manage-topic",
        "broker": "7",
        "request_id": "r-1",
        "count": 1,
    }
    assert event.attributes == {
        "principal": "user:alice",
        "method": "/sava.admin.Topics/DeleteTopic",
        "decision": "denied",
    }


async def test_a_line_keeps_what_a_caller_chose_in_its_field(caplog: pytest.LogCaptureFixture) -> None:
    book = Audit("changes", broker="7")
    book.denied(DELETE._replace(resource="/a/b decision=allowed\nforged"), "no")
    (line,) = recorded(caplog)
    assert "\n" not in line
    assert line.startswith("audit: decision=denied ")
    assert r'resource="/a/b decision=allowed\nforged"' in line
    (record,) = [each for each in caplog.records if each.name == "sava.audit"]
    written = json.loads(JsonFormatter().format(record))
    assert written["decision"] == "denied"
    assert written["count"] == 1
    assert written["principal"] == "user:alice"


async def test_long_texts_are_cut(caplog: pytest.LogCaptureFixture) -> None:
    book, topic = Audit("changes", broker="7"), Topic()
    running = started(book, topic)
    await asyncio.sleep(0)
    book.denied(DELETE._replace(resource="/a/" + "x" * 1_000_000), "y" * 1_000_000)
    await book.flush(topic.publish)
    await cancelled(running)
    assert len(recorded(caplog)[0]) < 2000
    assert len(topic.events[0].as_json()) < 2000


async def test_denials_beyond_a_few_a_second_are_one_event(caplog: pytest.LogCaptureFixture) -> None:
    clock, topic = Clock(), Topic()
    book = Audit("changes", broker="7", clock=clock)
    running = started(book, topic)
    await asyncio.sleep(0)
    for number in range(1000):
        book.denied(DELETE._replace(resource=f"/sales/t{number}"), "no")
    book.denied(DELETE._replace(principal=ANONYMOUS), "no")
    clock.now += 1.5
    book.denied(DELETE, "no")
    await book.flush(topic.publish)
    await cancelled(running)
    by_alice = [each for each in topic.events if each.call.principal == ALICE]
    assert [each.calls for each in by_alice] == [1] * audit.EACH_SECOND + [995, 1]
    assert by_alice[-2].call.resource == "/sales/t999"
    assert len(topic.events) == len(by_alice) + 1
    assert len(recorded(caplog)) == len(topic.events)


async def test_each_change_is_recorded_by_itself() -> None:
    book, topic = Audit("changes", broker="7", clock=Clock()), Topic()
    running = started(book, topic)
    await asyncio.sleep(0)
    for number in range(100):
        book.allowed(DELETE._replace(resource=f"/sales/t{number}"))
    await book.flush(topic.publish)
    await cancelled(running)
    assert [each.call.resource for each in topic.events] == [f"/sales/t{number}" for number in range(100)]


async def test_kinds_of_denials_are_bounded() -> None:
    book, topic = Audit("denied", broker="7", clock=Clock()), Topic()
    running = started(book, topic)
    await asyncio.sleep(0)
    for number in range(3 * audit.MAX_WINDOWS):
        for _ in range(audit.EACH_SECOND + 2):
            book.denied(DELETE._replace(principal=Principal("user", f"u{number}")), "no")
    assert len(book._windows) == audit.MAX_WINDOWS
    await cancelled(running)


async def test_no_call_waits_for_a_topic_that_fails_and_the_loss_is_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock, topic = Clock(), Topic()
    topic.is_broken = True
    book = Audit("changes", broker="7", clock=clock)
    running = started(book, topic)
    await asyncio.sleep(0)
    for _ in range(audit.MAX_WAITING + 50):
        book.allowed(DELETE)
    assert book.dropped == 50
    # The log has them all, also those that the topic will never have.
    assert len(recorded(caplog)) == audit.MAX_WAITING + 50
    book._say_dropped()
    clock.now += 59
    book.allowed(DELETE)
    book._say_dropped()
    said = [each for each in caplog.records if "missing in the topic" in each.getMessage()]
    assert len(said) == 1
    clock.now += 2
    book._say_dropped()
    said = [each for each in caplog.records if "missing in the topic" in each.getMessage()]
    assert [each.getMessage().rpartition("=")[2] for each in said] == ["50", "51"]
    async with asyncio.timeout(30):
        await topic.refused.wait()
        topic.is_broken = False
        await topic.written.wait()
    await book.flush(topic.publish)
    assert len(topic.events) == audit.MAX_WAITING
    assert topic.batches == -(-audit.MAX_WAITING // audit.BATCH)
    await cancelled(running)


async def test_of_what_brokers_do_themselves_only_refusals_are_recorded(
    caplog: pytest.LogCaptureFixture,
) -> None:
    book = Audit("all", broker="7")
    append = AuditedCall(Principal("broker", "8"), "/sava.streams.Streams/Append", audit.TOPIC)
    book.allowed(append)
    book.denied(append, "no")
    assert len(recorded(caplog)) == 1


async def test_lines_are_written_whatever_the_level_of_others(caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("sava").setLevel(logging.ERROR)
    try:
        Audit("changes", broker="7").allowed(DELETE)
    finally:
        logging.getLogger("sava").setLevel(logging.NOTSET)
    assert len(recorded(caplog)) == 1


@pytest.mark.parametrize(
    ("resource", "is_reserved"),
    [("/system/audit", True), ("/system/x", True), ("system", True), ("/systems/a", False), ("", False)],
)
def test_the_namespace_of_the_audit_is_reserved(resource: str, is_reserved: bool) -> None:
    assert audit.is_reserved(resource) is is_reserved
