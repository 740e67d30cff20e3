"""``sava remotes`` and ``sava replication``: what is asked of the cluster, what is printed, exit codes."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from sava.proto import replication_pb2 as pb
from sava.proto import replication_pb2_grpc as rpc
from tests.support.commands import Sava
from tests.unit.cli.conftest import FakeAdmin, Refusal

METHODS = [method.name for method in pb.DESCRIPTOR.services_by_name["Replication"].methods]
FEWER = pb.Difference(
    topic="/default/orders",
    what="partitions",
    local="2 partitions",
    remote="1 partition",
    consequence="partition 1 is not copied",
    blocks=True,
)
MISSING = pb.Difference(topic="/default/new", what="missing", consequence="it will be created")


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeAdmin]:
    fake, service = FakeAdmin(), rpc.ReplicationServicer()
    for name in METHODS:
        setattr(service, name, fake.one(name))
    server = grpc.server(ThreadPoolExecutor(2))
    rpc.add_ReplicationServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    monkeypatch.setenv("SAVA_ADMIN", f"127.0.0.1:{port}")
    yield fake
    server.stop(None).wait(10)


def compared(*differences: pb.Difference, is_set: bool) -> pb.SetReplicationResponse:
    found = pb.RemoteDifferences(remote="west", differences=differences)
    return pb.SetReplicationResponse(remotes=[found], is_set=is_set)


@pytest.mark.parametrize(
    "line",
    [
        "remotes add west",
        "remotes test",
        "replication set default",
        "replication set default --remote west --off",
        "replication set default --remote west --start yesterday",
        "replication set default --remote west --start 17",
        "remotes add west --service a:1 --max-rate -1",
        "replication recreate /default/orders",
    ],
)
def test_wrong_usage_is_exit_code_two(sava: Sava, line: str) -> None:
    sava(line, code=2)


@pytest.mark.parametrize(
    "command",
    [
        *(f"remotes {name}" for name in ["add", "list", "test", "remove"]),
        *(f"replication {name}" for name in ["set", "get", "clear", "status", "recreate"]),
    ],
)
def test_every_command_explains_itself(sava: Sava, command: str) -> None:
    assert "Usage" in sava(f"{command} --help").out


def test_a_remote_is_sent_as_given_with_the_name_of_its_token_file(cluster: FakeAdmin, sava: Sava) -> None:
    cluster.answers["AddRemote"] = [pb.AddRemoteResponse(remote=pb.Remote(cluster_name="w", cluster_id="7"))]
    result = sava(
        "remotes add west --service a:1,b:2 --token-file west.token "
        "--tls-ca ca --tls-cert cert --tls-key key --max-rate 50"
    )
    assert result.out == "remote west is cluster w (id 7)\n"
    assert cluster.requests == [
        pb.Remote(
            name="west",
            service="a:1,b:2",
            token_file="west.token",
            tls_ca="ca",
            tls_cert="cert",
            tls_key="key",
            max_rate=50,
        )
    ]


def test_a_token_on_the_command_line_is_refused_and_said_to_be_seen(cluster: FakeAdmin, sava: Sava) -> None:
    result = sava("remotes add west --service a:1 --token s3cr3t", code=1)
    assert "could be seen in `ps`" in result.err
    assert "--token-file" in result.err
    assert "s3cr3t" not in result.err
    assert not cluster.requests


def test_a_token_of_the_environment_is_not_sent(
    cluster: FakeAdmin, sava: Sava, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SAVA_REMOTE_TOKEN", "s3cr3t")
    result = sava("remotes add west --service a:1", code=1)
    assert "--token-file" in result.err
    assert "s3cr3t" not in result.err
    assert not cluster.requests


def test_a_remote_that_is_refused_is_one_line_and_exit_code_one(cluster: FakeAdmin, sava: Sava) -> None:
    cluster.answers["AddRemote"] = [Refusal("remote_refused", "both clusters are called east")]
    assert sava("remotes add west --service a:1", code=1).err == "sava: both clusters are called east\n"


def test_testing_a_remote_fails_if_it_is_silent_or_copies_nothing(cluster: FakeAdmin, sava: Sava) -> None:
    cluster.answers["TestRemote"] = [pb.TestRemoteResponse(error="a:1 cannot be reached")]
    assert sava("remotes test west", code=1).err == "sava: remote west: a:1 cannot be reached\n"
    cluster.answers["TestRemote"] = [pb.TestRemoteResponse(is_reachable=True, differences=[MISSING])]
    assert "it will be created" in sava("remotes test west").out
    cluster.answers["TestRemote"] = [pb.TestRemoteResponse(is_reachable=True, differences=[MISSING, FEWER])]
    assert "/default/orders" in sava("remotes test west", code=1).err
    assert sava("remotes test west -o json", code=1).json["differences"][1]["blocks"] is True


def test_a_policy_is_sent_as_it_was_given(cluster: FakeAdmin, sava: Sava) -> None:
    cluster.answers["SetReplication"] = [compared(is_set=True)]
    result = sava(
        "replication set /default/orders --remote west --remote north --start 2026-03-01T12:00 "
        "--forward --subscription billing --skip-checks"
    )
    assert result.out == "no differences\nthe policy of /default/orders is set\n"
    policy = pb.ReplicationPolicy(
        remotes=["west", "north"],
        start="1772366400000000",
        forward=True,
        subscriptions=["billing"],
    )
    request = pb.SetReplicationRequest(scope="/default/orders", policy=policy, skip_checks=True)
    assert cluster.requests == [request]


def test_replication_is_switched_off_by_a_policy_without_remotes(cluster: FakeAdmin, sava: Sava) -> None:
    cluster.answers["SetReplication"] = [pb.SetReplicationResponse(is_set=True)]
    assert sava("replication set default --off").out == "the policy of default is set\n"
    expected = pb.SetReplicationRequest(scope="default", policy=pb.ReplicationPolicy(start="earliest"))
    assert cluster.requests == [expected]


def test_differences_that_block_are_shown_and_the_command_fails(cluster: FakeAdmin, sava: Sava) -> None:
    cluster.answers["SetReplication"] = [compared(MISSING, FEWER, is_set=False)]
    result = sava("replication set default --remote west", code=1)
    assert "partition 1 is not copied" in result.out
    assert "differences at west; --skip-checks sets it all the same" in result.err
    assert sava("replication set default --remote west --dry-run").err == ""
    shown = sava("replication set default --remote west -o json", code=1).json
    assert (shown["is_set"], shown["remotes"][0]["remote"]) == (False, "west")


def test_the_policy_that_holds_is_shown_with_where_it_is_set(cluster: FakeAdmin, sava: Sava) -> None:
    policy = pb.ReplicationPolicy(remotes=["west"], start="1772366400000000")
    cluster.answers["GetReplication"] = [pb.GetReplicationResponse(policy=policy, from_scope="default")]
    out = sava("replication get /default/orders").out
    assert out.startswith("/default/orders, as set for default\n")
    assert "2026-03-01T12:00:00Z" in out
    cluster.answers["GetReplication"] = [pb.GetReplicationResponse()]
    assert "no policy is set" in sava("replication get /default/orders").out


def test_status_is_a_row_for_each_partition_and_says_what_is_not_known(
    cluster: FakeAdmin, sava: Sava
) -> None:
    topic = pb.LinkTopic(topic="/default/orders", remote="west", partition_count=2, topic_ids=[2**60, 3])
    topic.partitions.add(
        partition=0,
        state="active",
        position=5,
        end=7,
        backlog=2,
        backlog_seconds=1.5,
        rate=9,
        bytes_rate=1_234_567,
    )
    retry_ms = time.time_ns() // 1_000_000 + 1_000_000
    topic.partitions.add(
        partition=1, state="denied", reason="no", backlog=-1, backlog_seconds=-1, next_retry_ms=retry_ms
    )
    topic.disconnected_count = 1
    plain = pb.LinkTopic(topic="/default/a", remote="west")
    plain.partitions.add(state="idle")
    cluster.answers["GetReplicationStatus"] = [pb.ReplicationStatus(topics=[topic, plain])]
    head, *lines = sava("replication status /default/orders --remote west").out.splitlines()
    first, second, third = (re.split(r" {2,}", line.strip()) for line in lines)
    assert head.index("REASON") <= 120
    assert first == [
        *("/default/orders", "west", "0", "active", "5", "7", "2", "1.5", "9.0", "1.2M", "0", "1 of 2", "-")
    ]
    assert second[:-1] == [
        *("/default/orders", "west", "1", "denied", "0", "0", "?", "?", "0.0", "0", "0", "1 of 2")
    ]
    assert re.fullmatch(r"no \(next try in (1000|9\d\d) s\)", second[-1])
    assert (third[2], third[-1]) == ("-", "-")
    assert cluster.requests == [pb.GetReplicationStatusRequest(topic="/default/orders", remote="west")]
    shown = sava("replication status -o json").json
    assert (shown[0]["topic_ids"], shown[0]["partitions"][1]["backlog"]) == ([str(2**60), "3"], -1)


def test_a_deleted_topic_is_asked_for_again(cluster: FakeAdmin, sava: Sava) -> None:
    cluster.answers["RecreateRemoteTopic"] = [pb.RecreateRemoteTopicResponse()]
    sava("replication recreate /default/orders --remote west")
    assert cluster.requests == [pb.RecreateRemoteTopicRequest(topic="/default/orders", remote="west")]


def test_verify_without_pyspark_says_in_one_line_what_to_install(
    sava: Sava, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "sava.pipeline.replicate.verify", raising=False)
    monkeypatch.setitem(sys.modules, "pyspark", None)
    [line] = sava("replication verify /default/orders --remote west", code=1).err.splitlines()
    assert "PySpark is not installed" in line
