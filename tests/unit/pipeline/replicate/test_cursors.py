"""What a link lets go of at its source."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from functools import partial

import pytest

from sava.client.errors import ClientError, Refused, Unavailable
from sava.pipeline.replicate.acks import SlotUpdater


class Source:
    def __init__(self) -> None:
        self.calls: list[dict[str, int]] = []
        self.failing: dict[str, ClientError] = {}
        self.called = threading.Event()
        self.may_answer = threading.Event()
        self.may_answer.set()

    def advance_all(
        self, subscription: str, offsets: Mapping[str, int], *, timeout_s: float
    ) -> dict[str, ClientError]:
        assert subscription == "sava-link.west"
        self.called.set()
        assert self.may_answer.wait(10)
        self.calls.append(dict(offsets))
        return {name: self.failing[name] for name in offsets if name in self.failing}

    def heard(self) -> None:
        assert self.called.wait(10)
        self.called.clear()


@pytest.fixture
def source() -> Source:
    return Source()


@pytest.fixture
def cursors(source: Source) -> Iterator[SlotUpdater]:
    made = SlotUpdater(partial(source.advance_all, timeout_s=1.0), "west", every_s=0.01)
    yield made
    source.may_answer.set()
    made.close()


def test_the_latest_offsets_are_sent_together_and_nobody_waits(source: Source, cursors: SlotUpdater) -> None:
    source.may_answer.clear()
    cursors.advance("a", 1)
    source.heard()  # and does not answer
    for offset in range(2, 100):
        cursors.advance("a", offset)
        cursors.advance("b", offset)
    cursors.advance("a", 50)  # goes on where it is
    source.may_answer.set()
    source.heard()
    cursors.close()
    assert source.calls == [{"a": 1}, {"a": 99, "b": 99}]


def test_what_failed_is_sent_again_and_logged_once(
    source: Source, cursors: SlotUpdater, caplog: pytest.LogCaptureFixture
) -> None:
    source.failing = {"a": Unavailable("its broker is down")}
    cursors.advance("a", 5)
    cursors.advance("b", 6)
    for _ in range(4):
        source.heard()
    source.failing = {}
    source.heard()
    cursors.close()
    assert source.calls[-1] == {"a": 5}
    assert [call for call in source.calls if "b" in call] == [{"a": 5, "b": 6}] or {"b": 6} in source.calls
    assert caplog.text.count("its broker is down") == 1


def test_a_cursor_that_is_not_there_is_no_reason_to_worry(
    source: Source, cursors: SlotUpdater, caplog: pytest.LogCaptureFixture
) -> None:
    """The policy was cleared a moment ago, or its leader has not come to it yet."""
    source.failing = {"a": Refused("there is no such subscription", "subscription_unknown")}
    cursors.advance("a", 5)
    source.heard()
    source.heard()
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def test_it_goes_no_further_than_what_was_said_of_subscriptions(source: Source, cursors: SlotUpdater) -> None:
    cursors.hold("a", "s", 3)
    cursors.hold("a", "t", 7)
    cursors.advance("a", 10)
    source.heard()
    cursors.hold("a", "s", None)
    source.heard()
    cursors.hold("a", "t", 12)
    source.heard()
    cursors.close()
    assert source.calls == [{"a": 3}, {"a": 7}, {"a": 10}]


def test_a_topic_of_the_same_name_begins_anew(source: Source, cursors: SlotUpdater) -> None:
    cursors.advance("a", 10)
    source.heard()
    cursors.forget("a")
    cursors.advance("a", 2)
    source.heard()
    cursors.close()
    assert source.calls == [{"a": 10}, {"a": 2}]


def test_what_is_copied_again_goes_on_from_the_beginning(source: Source, cursors: SlotUpdater) -> None:
    cursors.hold("a", "billing", 8)
    cursors.advance("a", 10)
    source.heard()
    cursors.begin_again("a")
    cursors.advance("a", 3)
    source.heard()
    cursors.advance("a", 9)
    source.heard()
    cursors.close()
    assert source.calls == [{"a": 8}, {"a": 3}, {"a": 8}], "acks that were not said still count"
