"""What a doctor may have seen: a healthy cluster of three, to be broken by each test in its way."""

from __future__ import annotations

from sava.doctor.brokers import judged
from sava.doctor.observation import BrokerSeen, Contact, Finding, Greeting, Level, Observation
from sava.proto import admin_pb2, brokers_pb2, doctor_pb2


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
        is_enforced=True,
        service="http://b1:6650",
        greetings={"b1:6650": Greeting(cluster_id="c", cluster_name="example")},
    )


def troubles(seen: Observation, *, min_free: float = 0.15) -> list[Finding]:
    return [finding for finding in judged(seen, min_free=min_free) if finding.level is not Level.OK]


def only(seen: Observation, level: Level, check: str, text: str) -> None:
    found = troubles(seen)
    assert [(finding.level, finding.check) for finding in found] == [(level, check)], found
    assert text in found[0].text
    assert found[0].remedy or level is Level.NOTE
