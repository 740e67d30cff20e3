"""``sava wait``: what it waits for, and what it says if that does not come."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from sava.proto import brokers_pb2 as pb
from tests.support.commands import Sava as Command
from tests.support.network import free_ports
from tests.unit.cli.conftest import FakeAdmin, Refusal

LEADER = pb.Broker(broker_id=1, status="active", is_leader=True, raft_addr="a:7650")
DRAINED = pb.Broker(broker_id=2, status="drained", raft_addr="b:7650")
GONE = pb.Broker(broker_id=3, status="unreachable", raft_addr="c:7650")


def brokers(*listed: pb.Broker) -> pb.ListBrokersResponse:
    return pb.ListBrokersResponse(brokers=listed)


def test_a_cluster_that_can_be_used_is_not_waited_for(admin: FakeAdmin, sava: Command) -> None:
    admin.answers["ListBrokers"] = [brokers(LEADER, DRAINED)]
    assert " is ready, with 2 brokers\n" in sava("wait --timeout 60").out
    assert sava("wait -o json").json == {"brokers": 2}


@pytest.mark.parametrize(
    ("answer", "missing"),
    [
        (brokers(), "its broker waits for `sava cluster init`"),
        (brokers(DRAINED), "it has no leader"),
        (brokers(LEADER, GONE), "not there: c:7650"),
        (Refusal("unavailable", "the store has no leader"), "the store has no leader"),
    ],
)
def test_what_is_missing_is_told_in_one_line(
    admin: FakeAdmin, sava: Command, answer: pb.ListBrokersResponse | Refusal, missing: str
) -> None:
    admin.answers["ListBrokers"] = [answer]
    said = sava("wait --timeout 0.5", code=1).err
    assert f" is not ready after 0.5 s: {missing}; " in said
    assert said.count("\n") == 1


def test_a_cluster_that_comes_meanwhile_is_noticed(admin: FakeAdmin, sava: Command) -> None:
    """It is asked, answers that a broker is missing, and is whole a moment later."""
    admin.answers["ListBrokers"] = [brokers(LEADER, GONE)]

    def come() -> None:
        while not admin.requests:
            time.sleep(0.01)
        admin.answers["ListBrokers"] = [brokers(LEADER, DRAINED)]

    coming = threading.Thread(target=come)
    coming.start()
    assert "with 2 brokers" in sava("wait --timeout 60").out
    coming.join()


def test_a_port_that_nobody_has_is_not_waited_for_in_silence(sava: Command) -> None:
    [port] = free_ports(1)
    said = sava(f"wait --timeout 1.5 --admin 127.0.0.1:{port}", code=1).err.splitlines()
    assert said[0].startswith(f"waiting for the cluster at 127.0.0.1:{port}: ")
    assert "Connection refused" in said[0]
    assert said[-1].startswith(f"sava: the cluster at 127.0.0.1:{port} is not ready after 1.5 s: ")


@pytest.fixture
def web() -> Iterator[int]:
    """Another program that has the port, and does not speak HTTP/2."""
    server = HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
    serving = threading.Thread(target=server.serve_forever)
    serving.start()
    yield server.server_port
    server.shutdown()
    serving.join()
    server.server_close()


def test_a_port_of_another_program_is_told(web: int, sava: Command) -> None:
    """The tour's loop waited for ever without a word: ``sava up`` had passed over the port, the commands had
    not."""
    said = sava(f"wait --timeout 1.5 --admin 127.0.0.1:{web}", code=1).err
    assert "another program has this port" in said


def test_what_listens_and_never_answers_ends_the_wait_too(sava: Command) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        said = sava(f"wait --timeout 0.5 --admin 127.0.0.1:{port}", code=1).err
    assert "is not ready after 0.5 s: no answer yet; " in said
