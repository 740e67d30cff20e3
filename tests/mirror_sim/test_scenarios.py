"""The rows of the failure table in docs/design/journal.md, one calm world for each: what is acknowledged
before the fault is there after it, or recovery waits and says for whom."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest

from sava.ledger.protocol.record import LedgerId, LedgerState, StorageId
from tests.mirror_sim.clients import Prober, Producer
from tests.mirror_sim.knobs import Knobs, draw
from tests.mirror_sim.ledgers import OwnJournal
from tests.mirror_sim.net import RAFT
from tests.mirror_sim.records import TopicState
from tests.mirror_sim.world import MS, World
from tests.sim.disk import CrashPolicy


def calm(**changes: object) -> Knobs:
    plain = replace(
        draw(1),
        brokers=3,
        qw=3,
        qa=2,
        allows_degraded=False,
        self_fences=False,
        faults=frozenset(),
        topics=1,
        producers=1,
        messages=1000,
        think_ms=5,
        payload_bytes=100,
        window=1 << 20,
        note_bytes=4000,
        max_backlog=1 << 20,
        latency_us=500,
        sync_us=1000,
        lease_ms=500,
        replace_ms=60_000,
        upload_ms=60_000,
        rejoin_ms=100,
    )
    return replace(plain, **changes)  # type: ignore[arg-type]


class Story:
    """A world in which one broker owns the topic and has acknowledged messages that are in no segment."""

    def __init__(self, **changes: object) -> None:
        self.world = World(calm(**changes))
        self.world.begin()
        self.producer = Producer(self.world, 0)
        self.producer.start()
        self.run_until(lambda: self.world.counts["acked"] >= 20, "twenty messages are acknowledged")
        self.ledger = next(
            broker.ledger for broker in self.world.brokers.values() if broker.ledger and broker.ledger.served
        )
        self.owner = self.ledger.broker
        self.mirrors = [
            self.world.brokers[self.world.located[storage]] for storage in self.ledger.core.mirrors
        ]

    def run_until(self, condition: Callable[[], bool], what: str, seconds: int = 20) -> None:
        world = self.world
        assert condition() or world.schedule.run_until(world.now + seconds * 1000 * MS, condition), (
            f"{what}\n{world.describe()}"
        )

    def run(self, milliseconds: int) -> None:
        self.world.schedule.run_until(self.world.now + milliseconds * MS)

    def state(self, ledger: LedgerId) -> LedgerState | None:
        record = self.world.store.get(("ledger", ledger)).value
        return record.state if record is not None else None

    def has_left(self, storage: StorageId) -> bool:
        return storage not in self.ledger.core.record.last.members

    def more(self, messages: int) -> Callable[[], bool]:
        """Whether so many more have been acknowledged since this call."""
        enough = self.world.counts["acked"] + messages
        return lambda: self.world.counts["acked"] >= enough

    def serves_elsewhere(self) -> bool:
        record = self.world.store.get(("topic", 0)).value
        return record.state is TopicState.ASSIGNED and record.ledger != self.ledger.id

    def goes_on(self) -> None:
        """Another ledger serves the topic, with all that was promised, and takes more."""
        self.run_until(self.serves_elsewhere, "the topic goes on in another ledger")
        prober = Prober(self.world)
        for _ in range(80):
            prober.probe()
            self.run(100)
            if prober.acked:
                break
        assert prober.acked, self.world.describe()
        self.producer.is_stopped = True
        self.world.oracle.settle()

    def waits(self) -> tuple[str, ...]:
        """The recovery of the ledger, which does not end; for whom it waits."""
        self.run(5000)
        assert self.state(self.ledger.id) is LedgerState.RECOVERING
        assert self.world.store.get(("topic", 0)).value.state is TopicState.ORPHAN
        attempts = [
            broker.controller.attempts[self.ledger.id]
            for broker in self.world.brokers.values()
            if broker.controller is not None and self.ledger.id in broker.controller.attempts
        ]
        return attempts[0].core.waiting_for


def test_the_owner_crashes_and_is_back_at_once() -> None:
    story = Story()
    story.owner.stop(None)
    story.owner.start()
    story.goes_on()


def test_the_owner_s_machine_is_gone() -> None:
    story = Story()
    story.owner.stop(None)
    story.goes_on()


def test_the_owner_is_cut_from_raft_but_not_from_its_mirrors() -> None:
    """Its mirrors refuse it; what it has under way is not acknowledged by it any more."""
    story = Story()
    story.world.net.block([(story.owner.id, RAFT), (RAFT, story.owner.id)])
    story.run_until(lambda: story.ledger.core.is_fenced, "the owner notices that it was fenced")
    story.goes_on()


def test_the_owner_is_cut_from_its_mirrors_but_not_from_raft() -> None:
    """It acknowledges nothing until it has other mirrors: here there is one more broker."""
    story = Story(brokers=5, replace_ms=200)
    links = [
        link
        for mirror in story.mirrors
        for link in ((story.owner.id, mirror.id), (mirror.id, story.owner.id))
    ]
    story.world.net.block(links)
    before = story.world.counts["acked"]
    first = story.ledger.core.record
    story.run_until(lambda: story.world.counts["acked"] > before + 20, "it goes on with other mirrors")
    assert story.ledger.core.record.last.members != first.last.members


def test_a_mirror_is_stopped_replaced_and_continues_late() -> None:
    """The owner and one mirror must both have a message. The mirror is stopped with its connections open; the
    owner replaces it. When it continues, what was on its way arrives, and its answers come from a disk that
    is no member any more: they must count for nothing when the owner is gone."""
    story = Story(brokers=4, qw=2, qa=2, replace_ms=200, lease_ms=5_000)
    (mirror,) = story.mirrors
    before = story.world.counts["acked"]
    mirror.paused_until = story.world.now + 3_000 * MS
    story.run_until(lambda: story.world.counts["acked"] > before + 20, "it goes on with another mirror", 2)
    assert mirror.is_paused
    assert mirror.storage not in story.ledger.core.record.last.members
    story.run(4_000)
    assert story.world.now > mirror.paused_until, "it has continued"
    story.owner.stop(None)
    story.goes_on()


def test_without_enough_mirrors_nothing_is_acknowledged() -> None:
    story = Story()
    for mirror in story.mirrors:
        mirror.stop(None)
    story.run(50)
    before = story.world.counts["acked"]
    story.run(2000)
    assert story.world.counts["acked"] == before


def test_degraded_is_recorded_before_the_first_single_copy_is_acknowledged() -> None:
    story = Story(allows_degraded=True, replace_ms=200)
    seen: list[bool] = []
    acked = story.world.oracle.acked

    def watch(ledger: OwnJournal, batch: object) -> None:
        record = story.world.store.get(("ledger", ledger.id)).value
        alone = all(not mirror.is_up for mirror in story.mirrors)
        seen.append(not alone or record.is_degraded)
        acked(ledger, batch)  # type: ignore[arg-type]

    story.world.oracle.acked = watch  # type: ignore[method-assign]
    for mirror in story.mirrors:
        mirror.stop(None)
    before = story.world.counts["acked"]
    story.run_until(lambda: story.world.counts["acked"] > before + 20, "it goes on alone")
    assert all(seen[2:])


def test_a_mirror_loses_its_page_cache_and_catches_up() -> None:
    story = Story()
    mirror = story.mirrors[0]
    mirror.stop(CrashPolicy.LOSE)
    story.run(300)
    mirror.start()
    other = story.mirrors[1]
    story.run(1000)
    other.stop(None)
    before = story.world.counts["acked"]
    story.run_until(lambda: story.world.counts["acked"] > before + 10, "the one that came back counts again")


def test_a_leaving_mirror_is_replaced_before_it_stops() -> None:
    """Messages are acknowledged meanwhile.

    Schedule: a mirror's broker gets SIGTERM and says that it leaves. The owner takes another disk while
    the mirror still answers. Then the mirror stops, and the owner dies: nothing acknowledged is lost."""
    story = Story(brokers=4)
    leaving = story.mirrors[0]
    story.world.leaving.add(leaving.id)
    story.run_until(lambda: leaving.storage not in story.ledger.core.record.last.members, "it is left")
    assert len(story.ledger.core.record.last.members) == 3
    before = story.world.counts["acked"]
    leaving.stop(None)
    story.run_until(lambda: story.world.counts["acked"] > before + 10, "messages are acknowledged without it")
    story.owner.stop(None)
    story.goes_on()


def test_a_mirror_that_leaves_stays_if_messages_need_it() -> None:
    """Schedule: two brokers, both of which must have a message, and the mirror says that it leaves. It stays
    a member: with fewer disks than an acknowledgement needs, the record would promise what it cannot hold."""
    story = Story(brokers=2, qw=2, qa=2)
    leaving = story.mirrors[0]
    story.world.leaving.add(leaving.id)
    before = story.world.counts["acked"]
    story.run_until(lambda: story.world.counts["acked"] > before + 10, "the mirror still answers")
    assert leaving.storage in story.ledger.core.record.last.members
    assert story.ledger.core.record.last.qa == 2


def test_both_mirrors_die_in_turn_and_then_the_owner() -> None:
    """What was acknowledged between the death of the first mirror and its replacement is on the owner and the
    second one. The new mirror gets it too: when those two are gone, recovery does not wait for them."""
    story = Story(brokers=5, replace_ms=200)
    first, second = story.mirrors
    for mirror in (first, second):
        mirror.stop(None)
        story.run_until(partial(story.has_left, mirror.storage), "it is replaced")
        story.run_until(story.more(20), "it goes on")
        first.start()
    story.owner.stop(None)
    story.goes_on()


def test_a_mirror_s_disk_is_wiped() -> None:
    story = Story(brokers=4, replace_ms=200)
    lost = story.mirrors[0].storage
    story.mirrors[0].wipe()
    story.mirrors[0].start()
    story.run_until(lambda: lost not in story.ledger.core.record.last.members, "another disk takes its place")


@pytest.mark.parametrize("is_wiped", [True, False])
def test_the_owner_and_one_of_two_mirrors_are_gone(is_wiped: bool) -> None:
    """One answer of the two that are needed: the topic waits, and nothing is invented. A disk that comes back
    empty is no answer; the one that comes back as it was, is."""
    story = Story(brokers=4)
    away = [story.owner, story.mirrors[0]]
    silent = {broker.storage for broker in away}
    for broker in away:
        if is_wiped:
            broker.wipe()
            broker.start()
        else:
            broker.stop(None)
    assert set(story.waits()) == silent
    if not is_wiped:
        story.mirrors[0].start()
        story.goes_on()


def test_everybody_loses_power() -> None:
    story = Story()
    for broker in story.world.brokers.values():
        broker.stop(CrashPolicy.LOSE)
    story.run(500)
    for broker in story.world.brokers.values():
        broker.start()
    story.goes_on()


def test_coordinators_come_and_go_and_get_into_each_other_s_way() -> None:
    story = Story(brokers=4)
    story.owner.stop(None)
    others = [broker for broker in story.world.brokers.values() if broker.is_up]
    for turn in range(6):
        story.run(120)
        story.world.lead(others[turn % 2])
    others[0].controller = None
    story.goes_on()


def test_a_bit_flips_below_the_watermark_of_a_mirror() -> None:
    """It is no end of the ledger: the other copy is taken."""
    story = Story(note_bytes=1)
    story.run(200)
    mirror = story.mirrors[0]
    mirror.stop(CrashPolicy.LOSE)
    directory = mirror.disk.directory(f"{story.ledger.id.broker}-{story.ledger.id.incarnation}")
    directory.flip_bit("data-0", 300)
    story.world.oracle.rotted(mirror.storage, story.ledger.id, 300)
    mirror.start()
    story.run(300)
    story.owner.stop(None)
    story.goes_on()
