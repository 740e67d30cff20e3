"""What a doctor makes of what it has seen: cases that a real cluster does not get into on demand."""

from __future__ import annotations

import time

import pytest
from obstore.store import MemoryStore

from sava.doctor.findings import Finding, Level
from sava.doctor.observation import NO_TOPIC, BrokerSeen, Observation, parsed
from sava.doctor.reach import Contact
from sava.doctor.visit import judged
from sava.proto import admin_pb2, brokers_pb2, doctor_pb2, journals_pb2, topics_admin_pb2
from sava.storage.objectstore import ObjectStore
from sava.storage.probe import PREFIX, probe


def broker(number: int, *, voters: int = 3, term: int = 5, leader: int = 1) -> BrokerSeen:
    status = admin_pb2.StatusResponse(
        self_node_id=number,
        leader_id=leader,
        current_term=term,
        cluster_id="c",
        voters=range(1, voters + 1),
        membership_state="stable",
        commit=100,
        last_applied=100,
    )
    return BrokerSeen(
        listed=brokers_pb2.Broker(
            broker_id=number, status="active", version="0.1.0", admin_addr=f"b{number}:50051"
        ),
        contacts=[Contact(use="admin", address=f"b{number}:50051")],
        first=status,
        status=status,
        examination=doctor_pb2.Examination(
            broker_id=number,
            ready=True,
            disks=[doctor_pb2.DiskRoom(use="journal", path="/j", size=100, free=50)],
        ),
        store=doctor_pb2.StoreProbe(url="s3://x", store_id="s", reachable=True, puts_if_absent=True),
        metrics={"sava_journal_open": [({}, 1.0)]},
    )


def cluster(*brokers: BrokerSeen) -> Observation:
    return Observation(
        admin="b1:50051",
        asked=admin_pb2.StatusResponse(cluster_id="c"),
        brokers=list(brokers) or [broker(number) for number in (1, 2, 3)],
        waited_s=3,
        look_ups={NO_TOPIC: []},
    )


def troubles(seen: Observation, *, min_free: float = 0.15) -> list[Finding]:
    return [finding for finding in judged(seen, min_free=min_free) if finding.level is not Level.OK]


def only(seen: Observation, level: Level, check: str, text: str) -> None:
    found = troubles(seen)
    assert [(finding.level, finding.check) for finding in found] == [(level, check)], found
    assert text in found[0].text
    assert found[0].remedy or level is Level.NOTE


def test_a_healthy_cluster_has_nothing_wrong() -> None:
    assert troubles(cluster()) == []


def test_nobody_answers() -> None:
    only(Observation(admin="x:1", asked_error="refused"), Level.ERROR, "reachability", "no broker answers")


def test_what_is_known_of_the_cause_is_the_remedy() -> None:
    seen = Observation(admin="x:1", asked_error="it speaks without TLS", asked_remedy="do without TLS")
    assert [finding.remedy for finding in troubles(seen)] == ["do without TLS"]


def test_a_broker_that_waits_for_its_cluster() -> None:
    seen = Observation(admin="x:1", asked=admin_pb2.StatusResponse())
    only(seen, Level.ERROR, "leader", "belongs to no cluster")


def test_no_leader() -> None:
    seen = cluster(*(broker(number, leader=0) for number in (1, 2, 3)))
    only(seen, Level.ERROR, "leader", "no broker knows a leader")


def test_two_leaders() -> None:
    only(cluster(broker(1), broker(2, leader=2), broker(3)), Level.WARNING, "leader", "do not agree")


def test_elections_that_go_on() -> None:
    seen = cluster()
    for each in seen.brokers:
        each.status = admin_pb2.StatusResponse()
        assert each.first is not None
        each.status.CopyFrom(each.first)
        each.status.current_term += 3
    only(seen, Level.WARNING, "terms", "rose by 3")


def test_a_broker_in_an_older_term() -> None:
    only(cluster(broker(1), broker(2, term=4), broker(3)), Level.WARNING, "terms", "4, 5")


def test_a_broker_far_behind() -> None:
    seen = cluster()
    late = admin_pb2.StatusResponse()
    assert seen.brokers[0].status is not None
    late.CopyFrom(seen.brokers[0].status)
    late.commit = late.last_applied = 5000
    seen.brokers[0].status = late
    found = troubles(seen)
    assert [finding.subject for finding in found] == [seen.brokers[1].name, seen.brokers[2].name]


def test_as_few_voters_as_can_be() -> None:
    only(cluster(broker(1), broker(2)), Level.WARNING, "quorum", "2 of 3 voters")


def test_another_broker_at_the_same_address() -> None:
    seen = cluster()
    seen.brokers[1].listed.broker_id = 9
    found = troubles(seen)
    assert "where broker 2 answers" in found[0].text


def test_a_clock_that_is_ahead() -> None:
    seen = cluster()
    seen.brokers[2].clock_offset_s = 4.0
    only(seen, Level.WARNING, "clocks", "4.0 s ahead")


def test_a_clock_that_may_be_right_if_the_answer_took_long() -> None:
    seen = cluster()
    seen.brokers[2].clock_offset_s, seen.brokers[2].clock_error_s = 4.0, 4.0
    assert troubles(seen) == []


def test_the_clock_here_is_wrong() -> None:
    seen = cluster()
    for each in seen.brokers:
        each.clock_offset_s = 60.0
    only(seen, Level.NOTE, "clocks", "60.0 s behind")


@pytest.mark.parametrize(("free", "level"), [(14, Level.WARNING), (4, Level.ERROR)])
def test_a_disk_that_fills(free: int, level: Level) -> None:
    seen = cluster()
    assert seen.brokers[0].examination is not None
    seen.brokers[0].examination.disks[0].free = free
    only(seen, level, "disks", f"{free}% of")


def test_brokers_of_two_versions() -> None:
    seen = cluster()
    seen.brokers[0].listed.version = "0.2.0"
    only(seen, Level.WARNING, "versions", "0.1.0 (2), 0.2.0 (1)")


@pytest.mark.parametrize(
    ("days", "level", "text"), [(10.5, Level.WARNING, "in 10 days"), (-1, Level.ERROR, "has ended")]
)
def test_a_certificate_that_ends(days: float, level: Level, text: str) -> None:
    seen = cluster()
    end = time.time() + days * 86400
    seen.brokers[0].contacts = [Contact(use="admin", address="b1:50051", expires=end)]
    only(seen, level, "certificates", text)


def test_brokers_over_different_stores() -> None:
    seen = cluster()
    assert seen.brokers[0].store is not None
    seen.brokers[0].store.store_id = "another"
    only(seen, Level.WARNING, "object store", "2 different stores")


def test_a_store_that_overwrites() -> None:
    seen = cluster()
    assert seen.brokers[0].store is not None
    seen.brokers[0].store.puts_if_absent = False
    only(seen, Level.ERROR, "object store", "written twice")


@pytest.mark.parametrize("state", ["moving", "sealed"])
def test_a_move_that_does_not_end(state: str) -> None:
    seen = cluster()
    seen.topics = [topics_admin_pb2.TopicSummary(name="/default/a", state=state)]
    described = topics_admin_pb2.TopicDescription(name="/default/a", state=state, epoch=4)
    seen.first = seen.second = {"/default/a": described}
    only(seen, Level.WARNING, "topics", f"has been {state} for 3 s")
    seen.second = {"/default/a": topics_admin_pb2.TopicDescription(state="open", epoch=5)}
    assert troubles(seen) == []


def test_many_topics_without_an_owner_are_not_all_named() -> None:
    seen = cluster()
    seen.topics = [
        topics_admin_pb2.TopicSummary(name=f"/default/{number}", state="unassigned") for number in range(50)
    ]
    seen.second = {topic.name: topics_admin_pb2.TopicDescription() for topic in seen.topics}
    found = troubles(seen)
    assert len(found) == 21
    assert "30 further topics" in found[-1].text


def test_signs_in_metrics() -> None:
    seen = cluster()
    seen.brokers[0].metrics = parsed(
        "# HELP sava_replication_disconnected_count x\n"
        "# TYPE sava_replication_disconnected_count gauge\n"
        'sava_replication_disconnected_count{topic="/default/a",remote_cluster="west"} 2\n'
        'sava_replication_disconnected_count{topic="/default/b",remote_cluster="west"} 0\n'
    )
    only(seen, Level.ERROR, "metrics", "2 partitions are not replicated to west")


@pytest.mark.parametrize(
    ("metric", "text", "way_out"),
    [
        ("sava_journal_refusing", "it refuses messages", "sava journals list"),
        ("sava_journal_recoveries_waiting", "1 journals of brokers that are gone", "sava journals recover"),
    ],
)
def test_what_a_journal_says_of_itself(metric: str, text: str, way_out: str) -> None:
    seen = cluster()
    seen.brokers[0].metrics = {metric: [({}, 1.0)]}
    only(seen, Level.ERROR, "metrics", text)
    assert way_out in troubles(seen)[0].remedy


def journal(owner: int, *, there: set[int], state: str = "open") -> journals_pb2.Journal:
    """On the disks of three brokers, of which two must have a message."""
    holders = range(owner, owner + 3)
    return journals_pb2.Journal(
        broker_id=owner,
        incarnation=7,
        state=state,
        write_quorum=3,
        ack_quorum=2,
        members=[
            journals_pb2.JournalMember(
                storage_id=f"disk-{each}", broker_id=each if each in there else 0, is_owner=each == owner
            )
            for each in holders
        ],
        fragments=[
            journals_pb2.JournalFragment(
                start=512, storage_ids=[f"disk-{each}" for each in holders], ack_quorum=2
            )
        ],
    )


def lost_owner(*, there: set[int]) -> Observation:
    """Broker 4, mirrored by 5 and 6, is gone, and with it all but these of the three."""
    seen = cluster()
    gone = brokers_pb2.Broker(broker_id=4, status="unreachable", topics=1)
    seen.brokers.append(BrokerSeen(listed=gone))
    seen.topics = [topics_admin_pb2.TopicSummary(name="/default/a", state="orphan", broker_id=4)]
    seen.second = {"/default/a": topics_admin_pb2.TopicDescription(state="orphan")}
    seen.journals = [journal(1, there={1, 2, 3}), journal(4, there=there)]
    return seen


def test_two_disks_of_a_journal_are_gone() -> None:
    found = troubles(lost_owner(there={6}))
    assert [finding.check for finding in found] == ["reachability", "orphaned tails", "journals"]
    for finding in found:
        assert "`sava journals recover 4/7`" in finding.remedy
        assert "start" in finding.remedy
    assert "of the 3 disks that hold its end 1 are there (not disk-4, disk-5)" in found[-1].text


@pytest.mark.parametrize("state", ["open", "recovering"])
def test_a_journal_that_is_recovered_by_itself_needs_nobody(state: str) -> None:
    seen = lost_owner(there={5, 6})
    seen.journals[1].state = state
    found = troubles(seen)
    assert [finding.check for finding in found] == ["reachability", "orphaned tails"]
    assert "when its topics have gone to others" in found[0].remedy
    assert "wait some seconds" in found[1].remedy


def test_a_journal_that_was_closed_waits_for_nobody() -> None:
    seen = cluster()
    seen.journals = [journal(4, there=set(), state="closed")]
    assert troubles(seen) == []


def test_what_was_not_looked_at_is_not_known() -> None:
    seen = cluster()
    seen.topics_error = seen.journals_error = "no majority"
    seen.look_ups = {}
    found = troubles(seen)
    assert [(finding.level, finding.check) for finding in found] == [
        (Level.ERROR, "topics"),
        (Level.NOTE, "journals"),
        (Level.NOTE, "subscriptions"),
        (Level.NOTE, "clients"),
    ]
    assert all(finding.text.startswith("not known") for finding in found[1:])


def test_topics_that_nobody_describes() -> None:
    seen = cluster()
    seen.topics = [topics_admin_pb2.TopicSummary(name=f"/default/{each}", state="open") for each in "abc"]
    seen.second = {"/default/a": topics_admin_pb2.TopicDescription(state="open")}
    only(seen, Level.NOTE, "subscriptions", "not known for 2 of 3 topics, such as /default/b")


def test_what_some_brokers_did_not_tell_is_not_said_of_all() -> None:
    seen = cluster()
    for each in seen.brokers[1:]:
        each.examination = each.store = None
    for each in seen.brokers:
        each.metrics = {}
    said = {finding.check: finding for finding in judged(seen, min_free=0.15)}
    assert said["disks"].level is Level.OK
    assert "1 of 3 brokers" in said["disks"].text
    assert (said["metrics"].level, said["clocks"].level) == (Level.NOTE, Level.OK)
    assert said["versions"].text == "nothing is wrong"


def test_what_a_link_keeps_for_another_cluster_has_no_consumer() -> None:
    seen = cluster()
    seen.topics = [topics_admin_pb2.TopicSummary(name="/default/a", state="open")]
    waiting = topics_admin_pb2.SubscriptionDescription(subscription="sava-link.west", type="link", backlog=14)
    seen.first = seen.second = {"/default/a": topics_admin_pb2.TopicDescription(subscriptions=[waiting])}
    assert troubles(seen) == []
    waiting.type = "shared"
    seen.first = seen.second = {"/default/a": topics_admin_pb2.TopicDescription(subscriptions=[waiting])}
    only(seen, Level.NOTE, "subscriptions", "it has no consumer")


class Overwriting:
    """A backend that does not know put-if-absent, as some servers that speak S3 do not."""

    def __init__(self) -> None:
        self._inner = MemoryStore()

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    async def put_async(self, path: str, file: bytes, *, mode: str, use_multipart: bool) -> None:
        await self._inner.put_async(path, file, mode="overwrite", use_multipart=use_multipart)


async def test_the_probe_finds_a_store_that_overwrites_and_leaves_nothing_behind() -> None:
    for backend, is_refused in ((MemoryStore(), True), (Overwriting(), False)):
        store = ObjectStore("memory://", backend)  # type: ignore[arg-type]
        found = await probe(store)
        assert found.puts_if_absent is is_refused
        assert [info async for info in store.list(PREFIX)] == []
