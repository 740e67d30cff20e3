"""What a doctor makes of what it has seen: cases that a real cluster does not get into on demand."""

from __future__ import annotations

import time

import pytest
from obstore.store import MemoryStore

from sava.doctor.brokers import judged
from sava.doctor.observation import BrokerSeen, Contact, Level, Observation
from sava.proto import admin_pb2, brokers_pb2, doctor_pb2, ledgers_pb2, topics_admin_pb2
from sava.storage.objectstore import PROBES_PREFIX, ObjectStore, probe
from tests.unit.doctor.sights import broker, cluster, only, troubles


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


def test_no_leader_though_all_are_there() -> None:
    seen = cluster(*(broker(number, leader=0) for number in (1, 2, 3)))
    only(seen, Level.ERROR, "leader", "no broker knows a leader")
    assert "Raft port" in troubles(seen)[0].remedy


def test_no_leader_for_want_of_voters() -> None:
    seen = cluster(broker(1, leader=0))
    only(seen, Level.ERROR, "leader", "1 of 3 voters answer here, and 2 have to be there")
    assert "start those that are missing" in troubles(seen)[0].remedy


def test_a_broker_that_hangs_is_not_one_that_is_gone() -> None:
    """Its lease is over, so that the cluster counts it out; but its process holds its port."""
    seen = cluster()
    silent = brokers_pb2.Broker(broker_id=4, status="unreachable", raft_addr="b4:7650")
    seen.brokers.append(BrokerSeen(listed=silent, contacts=[Contact(use="raft", address="b4:7650")]))
    only(seen, Level.ERROR, "reachability", "a process takes connections at its Raft address b4:7650")
    assert "a broker that hangs is restarted" in troubles(seen)[0].remedy
    seen.brokers[-1].contacts = [Contact(use="raft", address="b4:7650", error="connection refused")]
    only(seen, Level.ERROR, "reachability", "is a member of the cluster, and is not there")


def test_a_drain_that_somebody_forgot_to_end() -> None:
    seen = cluster()
    seen.brokers[2].listed.status = "drained"
    seen.brokers[2].listed.mode_reason = "upgrade"
    only(seen, Level.NOTE, "modes", "is drained (upgrade): it gets no topics")
    assert "`sava brokers activate 3`" in troubles(seen)[0].remedy
    seen.brokers[1].listed.status = "draining"
    found = troubles(seen)
    assert [finding.level for finding in found] == [Level.WARNING, Level.NOTE, Level.NOTE]
    assert "1 of 3 brokers may get topics" in found[0].text


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


def test_a_sealed_topic_that_nobody_may_have() -> None:
    """Its owner died while the others were drained: it waits for no move."""
    seen = cluster()
    for each in seen.brokers:
        each.listed.status = "drained"
    seen.topics = [topics_admin_pb2.TopicSummary(name="/default/a", state="sealed")]
    seen.first = seen.second = {"/default/a": topics_admin_pb2.TopicDescription(state="sealed")}
    [told] = [finding for finding in troubles(seen) if finding.check == "topics"]
    assert (told.level, told.text) == (Level.ERROR, "without a broker")
    assert "sava brokers activate" in told.remedy


@pytest.mark.parametrize(
    ("later", "text"),
    [
        ({"timed_out": 8, "redelivered": 8}, "; 5 came back because their ack timeout was over"),
        ({"timed_out": 3, "redelivered": 5}, "; 2 were given back and delivered again"),
        ({"timed_out": 0, "redelivered": 0}, "within 3.0 s"),
    ],
    ids=["late", "refused", "counted anew after a move"],
)
def test_consumers_that_fail_are_told_from_those_that_are_slow(later: dict[str, int], text: str) -> None:
    seen = cluster()
    seen.topics = [topics_admin_pb2.TopicSummary(name="/default/a", state="open")]
    before = topics_admin_pb2.SubscriptionDescription(
        subscription="s", type="shared", backlog=10, unacked=5, consumers=["c"], timed_out=3, redelivered=3
    )
    now = topics_admin_pb2.SubscriptionDescription()
    now.CopyFrom(before)
    now.timed_out, now.redelivered = later["timed_out"], later["redelivered"]
    seen.first = {"/default/a": topics_admin_pb2.TopicDescription(subscriptions=[before])}
    seen.second = {"/default/a": topics_admin_pb2.TopicDescription(subscriptions=[now])}
    [told] = troubles(seen)
    assert told.level is Level.WARNING
    assert told.text.endswith(text)


def test_many_topics_without_an_owner_are_one_finding() -> None:
    seen = cluster()
    seen.topics = [
        topics_admin_pb2.TopicSummary(name=f"/default/{number}", state="unassigned") for number in range(50)
    ]
    seen.second = {topic.name: topics_admin_pb2.TopicDescription() for topic in seen.topics}
    only(seen, Level.ERROR, "topics", "without a broker")
    assert troubles(seen)[0].subject == "50 topics (for example /default/0)"


def test_for_many_reasons_they_are_not_all_named() -> None:
    seen = cluster()
    seen.topics = [
        topics_admin_pb2.TopicSummary(name=f"/default/{number}", state="unassigned") for number in range(50)
    ]
    seen.second = {
        topic.name: topics_admin_pb2.TopicDescription(reason=f"x {topic.name}") for topic in seen.topics
    }
    found = troubles(seen)
    assert len(found) == 21
    assert (found[-1].level, found[-1].text) == (Level.ERROR, "30 further findings of this kind")


def test_of_many_subscriptions_the_worst_are_named() -> None:
    """One of five hundred is blocked, and nobody consumes the others: it must not be lost among them."""
    seen = cluster()
    idle = topics_admin_pb2.SubscriptionDescription(subscription="s", type="shared", backlog=5)
    stuck = topics_admin_pb2.SubscriptionDescription(subscription="s", type="shared", backlog=5, blocked=True)
    names = [f"/default/{number}" for number in range(500)]
    seen.topics = [topics_admin_pb2.TopicSummary(name=name, state="open") for name in names]
    seen.first = {name: topics_admin_pb2.TopicDescription(subscriptions=[idle]) for name in names}
    seen.second = {**seen.first, names[-1]: topics_admin_pb2.TopicDescription(subscriptions=[stuck])}
    found = troubles(seen)
    assert len(found) == 21
    assert (found[0].level, found[0].subject) == (Level.ERROR, "s of /default/499")
    assert (found[-1].level, found[-1].text) == (Level.NOTE, "480 further findings of this kind")


@pytest.mark.parametrize(
    ("metric", "text", "way_out"),
    [
        ("sava_ledger_refusing", "it refuses messages", "sava ledgers list"),
        ("sava_ledger_recoveries_waiting", "1 ledgers of brokers that are gone", "sava ledgers recover"),
    ],
)
def test_what_a_journal_says_of_itself(metric: str, text: str, way_out: str) -> None:
    seen = cluster()
    seen.brokers[0].metrics = {metric: [({}, 1.0)]}
    only(seen, Level.ERROR, "metrics", text)
    assert way_out in troubles(seen)[0].remedy


def journal(owner: int, *, there: set[int], state: str = "open") -> ledgers_pb2.Ledger:
    """On the disks of three brokers, of which two must have a message."""
    holders = range(owner, owner + 3)
    return ledgers_pb2.Ledger(
        broker_id=owner,
        incarnation=7,
        state=state,
        write_quorum=3,
        ack_quorum=2,
        members=[
            ledgers_pb2.LedgerMember(
                storage_id=f"disk-{each}",
                broker_id=each if each in there else 0,
                is_owner=each == owner,
                is_holder=each != owner,
            )
            for each in holders
        ],
        fragments=[
            ledgers_pb2.LedgerFragment(
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
    seen.ledgers = [journal(1, there={1, 2, 3}), journal(4, there=there)]
    return seen


def test_two_disks_of_a_journal_are_gone() -> None:
    found = troubles(lost_owner(there={6}))
    assert [finding.check for finding in found] == ["reachability", "orphaned tails", "ledgers"]
    for finding in found:
        assert "`sava ledgers recover 4/7`" in finding.remedy
        assert "start" in finding.remedy
    assert "of the 3 disks that hold its end 1 are there (not disk-4, disk-5)" in found[-1].text


def test_two_disks_of_a_journal_are_gone_and_the_third_is_back() -> None:
    """A majority was gone for so long that the broker lost its registration, and its journal was ended."""
    seen = cluster()
    seen.ledgers = [journal(1, there={1}, state="recovering")]
    only(seen, Level.ERROR, "ledgers", "of the 3 disks that hold its end 1 are there (not disk-2, disk-3)")


@pytest.mark.parametrize("state", ["open", "recovering"])
def test_a_journal_that_is_recovered_by_itself_needs_nobody(state: str) -> None:
    seen = lost_owner(there={5, 6})
    seen.ledgers[1].state = state
    found = troubles(seen)
    assert [finding.check for finding in found] == ["reachability", "orphaned tails"]
    assert "when its topics have gone to others" in found[0].remedy
    assert "wait some seconds" in found[1].remedy


def test_a_journal_that_cannot_be_stored_is_no_matter_of_waiting() -> None:
    """The object store was gone when a broker died: its topics wait for the store."""
    seen = lost_owner(there={5, 6})
    seen.ledgers[1].state = "closed"
    seen.brokers[0].store = doctor_pb2.StoreProbe(url="s3://x", error="refused")
    [told] = [finding for finding in troubles(seen) if finding.check == "orphaned tails"]
    assert "mend the object store first" in told.remedy
    seen.ledgers[1].error = "cannot put topics/a: refused"
    [told] = [finding for finding in troubles(seen) if finding.check == "orphaned tails"]
    assert "ledger 4/7, and cannot be stored: cannot put topics/a: refused" in told.remedy


def test_a_journal_that_was_closed_needs_one_disk_that_holds_it() -> None:
    seen = cluster()
    seen.ledgers = [journal(4, there={6}, state="closed")]
    assert troubles(seen) == []
    seen.ledgers = [journal(4, there=set(), state="closed")]
    [told] = troubles(seen)
    assert (told.check, told.subject) == ("ledgers", "ledger 4/7")
    assert "none of the disks that hold all of it is there" in told.text
    assert "`sava ledgers recover 4/7`" in told.remedy


def test_what_was_not_looked_at_is_not_known() -> None:
    seen = cluster()
    seen.topics_error = seen.ledgers_error = seen.pipelines_error = seen.links_error = "no majority"
    seen.greetings = {}
    found = troubles(seen)
    assert [(finding.level, finding.check) for finding in found] == [
        (Level.ERROR, "topics"),
        (Level.NOTE, "ledgers"),
        (Level.NOTE, "subscriptions"),
        (Level.NOTE, "pipelines"),
        (Level.NOTE, "replication"),
        (Level.NOTE, "clients"),
    ]
    assert all(finding.text.startswith("not known") for finding in found[1:])


def test_topics_that_nobody_describes() -> None:
    seen = cluster()
    seen.topics = [topics_admin_pb2.TopicSummary(name=f"/default/{each}", state="open") for each in "abc"]
    seen.second = {"/default/a": topics_admin_pb2.TopicDescription(state="open")}
    only(seen, Level.NOTE, "subscriptions", "no status for 2 of 3 topics (for example /default/b)")


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
        assert [info async for info in store.list(PROBES_PREFIX)] == []


def test_a_network_that_may_do_everything() -> None:
    seen = cluster()
    seen.is_enforced = False
    only(seen, Level.WARNING, "access", "every caller may do everything, also from the network (b1:50051")
    for each in seen.brokers:
        each.listed.admin_addr = f"127.0.0.{each.listed.broker_id}:50051"
    assert troubles(seen) == []
    seen.is_enforced = None
    only(seen, Level.NOTE, "access", "not known")
