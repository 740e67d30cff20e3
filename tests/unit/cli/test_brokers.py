"""``sava brokers`` and ``sava topics unload``: what is asked of the cluster, what is printed, exit codes."""

from __future__ import annotations

import os

import pytest
from google.protobuf.message import Message

from sava.proto import brokers_pb2 as pb
from sava.proto import topics_admin_pb2 as topics_pb
from tests.support.commands import Sava
from tests.unit.cli.conftest import FIRST, SECOND, FakeAdmin, Refusal


@pytest.mark.parametrize(
    "line",
    [
        "brokers drain",
        "brokers drain 1 --broker-id 1",
        "brokers drain 1 --parallel -1",
        "brokers drain 1 --timeout 0",
        "brokers activate",
        "brokers rebalance --max-moves -1",
        "topics unload",
        "topics unload /default/a --timeout 0",
        "up --brokers 0",
    ],
)
def test_wrong_usage_is_exit_code_two(sava: Sava, line: str) -> None:
    sava(line, code=2)


@pytest.mark.parametrize(
    "command",
    [
        "up",
        "topics unload",
        *(f"brokers {name}" for name in ["list", "leader", "drain", "activate", "balance", "rebalance"]),
    ],
)
def test_every_command_explains_itself(sava: Sava, command: str) -> None:
    assert "Usage" in sava(f"{command} --help").out


def test_brokers_are_listed(admin: FakeAdmin, sava: Sava) -> None:
    header, first, second = sava("brokers list").rows
    assert header == ["BROKER_ID", "STATUS", "LEADER", "TOPICS", "CLIENT", "ADMIN", "RAFT", "HTTP"]
    assert first == [str(FIRST), "active", "yes", "7", "a:6650", "a:50051", "a:7650", "a:9040"]
    assert second == ["42", "drained", "-", "0", "b:6650", "-", "-", "-"]
    listed = sava("brokers list -o json").json
    assert set(listed[0]) == {field.name for field in pb.Broker.DESCRIPTOR.fields}
    assert (listed[0]["broker_id"], listed[0]["incarnation"]) == (str(FIRST), str(2**62))
    assert listed[1]["mode_reason"] == "upgrade"


@pytest.mark.parametrize("command", ["leader", "leader-broker"])
def test_the_leader_is_one_of_them(admin: FakeAdmin, sava: Sava, command: str) -> None:
    assert str(FIRST) in sava(f"brokers {command}").out
    assert sava(f"brokers {command} -o json").json["admin_addr"] == "a:50051"
    admin.answers["ListBrokers"] = [pb.ListBrokersResponse()]
    assert sava(f"brokers {command}", code=1).err == "sava: the cluster has no leader at the moment\n"


DRAINED = pb.DrainProgress(total=3, succeeded=3, status="drained", done=True)


def test_a_drain_tells_how_it_gets_on_and_how_it_ended(admin: FakeAdmin, sava: Sava) -> None:
    admin.answers["DrainBroker"] = [
        pb.DrainProgress(status="draining"),
        pb.DrainProgress(total=3, succeeded=1, pending=2, status="draining"),
        DRAINED,
    ]
    result = sava(f"brokers drain {FIRST}")
    assert result.err == "1 of 3 topics moved, 2 to go, 0 failed\n"
    assert result.out == f"broker {FIRST} is drained, 3 topics moved\n"
    assert admin.requests == [pb.DrainBrokerRequest(broker_id=FIRST, timeout_seconds=300)]
    shown = sava(f"brokers drain {FIRST} -o json")
    assert shown.json == {
        "total": 3,
        "succeeded": 3,
        "failed": 0,
        "pending": 0,
        "failed_topics": [],
        "topics": [],
        "status": "drained",
        "done": True,
        "waiting": "",
    }


def test_a_broker_is_found_by_any_of_its_addresses(admin: FakeAdmin, sava: Sava) -> None:
    admin.answers["DrainBroker"] = [DRAINED]
    for address in ("a:6650", "http://a:6650", "a:50051", "a:7650", "a:9040"):
        sava(f"brokers drain {address}")
        assert admin.requests[-1] == pb.DrainBrokerRequest(broker_id=FIRST, timeout_seconds=300)
    refused = sava("brokers drain c:6650", code=1).err
    assert refused == "sava: no broker has the address c:6650; `sava brokers list` shows all brokers\n"


def test_a_drain_is_limited_as_asked(admin: FakeAdmin, sava: Sava) -> None:
    admin.answers["DrainBroker"] = [DRAINED]
    wanted = pb.DrainBrokerRequest(
        broker_id=9,
        parallel=2,
        timeout_seconds=10,
        namespaces_include=["a", "b"],
        namespaces_exclude=["c"],
    )
    sava(
        "brokers drain 9 --parallel 2 --timeout 10 --include-namespace a --include-namespace b "
        "--exclude-namespace c"
    )
    # As Danube's administrators type it.
    sava(
        "brokers unload --broker-id 9 --max-parallel 2 --timeout-seconds 10 --namespaces-include a "
        "--namespaces-include b --namespaces-exclude c"
    )
    assert admin.requests == [wanted, wanted]


def test_a_dry_run_only_lists(admin: FakeAdmin, sava: Sava) -> None:
    admin.answers["DrainBroker"] = [
        pb.DrainProgress(total=2, pending=2, topics=["/default/a", "/default/b"], status="active")
    ]
    assert sava("brokers drain 9 --dry-run").rows == [["TOPIC"], ["/default/a"], ["/default/b"]]
    assert sava("brokers drain 9 --dry-run -o json").json["topics"] == ["/default/a", "/default/b"]
    assert [request.dry_run for request in admin.requests] == [True, True]  # type: ignore[attr-defined]


def test_topics_that_failed_or_remain_are_a_failure(admin: FakeAdmin, sava: Sava) -> None:
    admin.answers["DrainBroker"] = [
        pb.DrainProgress(
            total=3,
            succeeded=1,
            failed=1,
            pending=1,
            failed_topics=["/default/a"],
            status="draining",
            done=True,
        )
    ]
    result = sava("brokers drain 9", code=1)
    assert result.out == ""
    assert result.err.startswith(
        "sava: broker 9 is draining: 1 of 3 topics moved, 1 failed (/default/a), 1 not moved in time"
    )
    assert result.err.count("\n") == 1
    assert sava("brokers drain 9 -o json", code=1).json["failed_topics"] == ["/default/a"]


def test_a_drain_that_cannot_be_followed_is_not_said_to_have_failed(admin: FakeAdmin, sava: Sava) -> None:
    progress = pb.DrainProgress(total=3, succeeded=1, pending=2, status="draining")
    refusal = Refusal("unavailable", "the leader has changed")
    scripts: list[list[Message | Refusal]] = [[progress, refusal], [progress]]
    for answers in scripts:
        admin.answers["DrainBroker"] = answers
        error = sava("brokers drain 9", code=4).err.splitlines()[-1]
        assert "the cluster continues the drain of broker 9, repeat the command to follow it" in error
    admin.answers["DrainBroker"] = [refusal]
    assert sava("brokers drain 9", code=1).err == "sava: the leader has changed\n"


def test_a_broker_is_activated(admin: FakeAdmin, sava: Sava) -> None:
    admin.answers["ActivateBroker"] = [pb.ActivateBrokerResponse()]
    assert sava("brokers activate b:6650 --reason done").out == f"broker {SECOND} is active\n"
    assert admin.requests[-1] == pb.ActivateBrokerRequest(broker_id=SECOND, reason="done")
    admin.answers["ActivateBroker"] = [pb.ActivateBrokerResponse(was_active=True)]
    assert sava("brokers activate --broker-id 42").out == "broker 42 was active already\n"
    assert sava("brokers activate 42 -o json").json == {"was_active": True}


BALANCE = pb.Balance(
    strategy="fair",
    coefficient_of_variation=0.5,
    threshold=0.2,
    mean_load=2,
    max_load=3,
    min_load=1,
    brokers=[
        pb.BrokerLoad(broker_id=FIRST, load=3, topics=3, overloaded=True),
        pb.BrokerLoad(broker_id=SECOND, load=1, topics=1, underloaded=True),
    ],
)


def test_the_balance_is_shown(admin: FakeAdmin, sava: Sava) -> None:
    admin.answers["GetBalance"] = [BALANCE]
    rows = sava("brokers balance").rows
    assert ["coefficient_of_variation", "0.500", "(balanced", "up", "to", "0.200)"] in rows
    assert [str(FIRST), "3.00", "3", "0", "0", "0.0", "overloaded"] in rows
    assert ["42", "1.00", "1", "0", "0", "0.0", "underloaded"] in rows
    shown = sava("brokers balance -o json").json
    assert shown["brokers"][0]["broker_id"] == str(FIRST)
    assert shown["coefficient_of_variation"] == 0.5


def test_a_round_of_rebalancing_is_shown_and_its_failures_fail(admin: FakeAdmin, sava: Sava) -> None:
    move = pb.PlannedMove(topic="/default/a", from_broker_id=FIRST, to_broker_id=SECOND, load=1)
    admin.answers["Rebalance"] = [pb.RebalanceResponse(moves=[move], before=BALANCE, after=pb.Balance())]
    planned = sava("brokers rebalance --dry-run --max-moves 2")
    assert ["/default/a", str(FIRST), "42", "1.00", "would", "be", "moved"] in planned.rows
    assert admin.requests == [pb.RebalanceRequest(dry_run=True, max_moves=2)]
    assert "0.500 before, 0.000 after" in sava("brokers rebalance").out

    move.error = "no answer"
    admin.answers["Rebalance"] = [pb.RebalanceResponse(moves=[move], before=BALANCE)]
    failed = sava("brokers rebalance", code=1)
    assert "failed: no answer" in failed.out
    assert failed.err == "sava: 1 of 1 topic not moved: /default/a: no answer\n"
    assert sava("brokers rebalance -o json", code=1).json["moves"][0]["to_broker_id"] == "42"

    admin.answers["Rebalance"] = [pb.RebalanceResponse(before=BALANCE)]
    assert sava("brokers rebalance").out.startswith(
        "nothing to move: coefficient of variation 0.500 (balanced up to 0.200); topics that have just come"
    )
    admin.answers["Rebalance"] = [pb.RebalanceResponse(before=pb.Balance(threshold=0.2))]
    assert sava("brokers rebalance").out == (
        "nothing to move: coefficient of variation 0.000 (balanced up to 0.200)\n"
    )


def test_a_topic_is_moved_and_its_downtime_told(admin: FakeAdmin, sava: Sava) -> None:
    moves = [
        topics_pb.TopicMove(
            topic=f"/default/a-part-{number}",
            from_broker_id=FIRST,
            to_broker_id=SECOND,
            next_offset=number * 10,
            downtime_ms=123,
            epoch=5,
        )
        for number in range(2)
    ]
    admin.answers["UnloadTopic"] = list(moves)
    header, first, second = sava("topics unload /default/a --to b:6650 --timeout 1.5").rows
    assert header == ["TOPIC", "OLD_BROKER_ID", "NEW_BROKER_ID", "NEXT_OFFSET", "DOWNTIME_MS", "RESULT"]
    assert first == ["/default/a-part-0", str(FIRST), "42", "0", "123", "moved"]
    assert second == ["/default/a-part-1", str(FIRST), "42", "10", "123", "moved"]
    assert admin.requests[-1] == topics_pb.UnloadTopicRequest(
        name="/default/a", to_broker_id=SECOND, timeout_ms=1500
    )
    (one, other) = sava("topics unload /default/a -o json").json
    assert (one["from_broker_id"], one["to_broker_id"]) == (str(FIRST), "42")
    assert (other["next_offset"], other["downtime_ms"], other["epoch"]) == (10, 123, 5)
    assert admin.requests[-1] == topics_pb.UnloadTopicRequest(name="/default/a", timeout_ms=30_000)


def test_a_topic_that_stayed_is_a_failure(admin: FakeAdmin, sava: Sava) -> None:
    stayed = topics_pb.TopicMove(
        topic="/default/a", from_broker_id=42, to_broker_id=42, error="the object store does not answer"
    )
    admin.answers["UnloadTopic"] = [stayed]
    result = sava("topics unload /default/a", code=1)
    assert "stayed: the object store does not answer" in result.out
    assert result.err == (
        "sava: 1 of 1 stayed where they were: /default/a: the object store does not answer\n"
    )
    assert sava("topics unload /default/a -o json", code=1).json[0]["next_offset"] is None
    admin.answers["UnloadTopic"] = [
        Refusal("move_refused", "Cannot unload topic: single broker cluster detected.")
    ]
    assert sava("topics unload /default/a", code=1).err.startswith("sava: Cannot unload topic: single broker")


def test_a_dead_first_address_does_not_fail_a_command(
    sava: Sava, admin: FakeAdmin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SAVA_CLUSTER", f"127.0.0.1:1, http://{os.environ['SAVA_ADMIN']}")
    assert str(SECOND) in sava("brokers list").out
    monkeypatch.setenv("SAVA_CLUSTER", "127.0.0.1:1,127.0.0.1:2")
    assert "127.0.0.1:1 cannot be reached" in sava("brokers list", code=1).err
