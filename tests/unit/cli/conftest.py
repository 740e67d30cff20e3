"""The command in this process, and an admin port that answers what a test says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message

from sava.cli.main import main
from sava.peers.error_mapping import CODE_KEY, DETAIL_KEY
from sava.proto import brokers_pb2 as pb
from sava.proto import brokers_pb2_grpc, topics_admin_pb2_grpc
from tests.support.commands import Result, Sava

FIRST, SECOND = 7091252298936157877, 42


class Refusal(Exception):
    """What a scripted broker refuses a call with."""

    def __init__(self, code: str, text: str, status: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE) -> None:
        super().__init__(text)
        self.code, self.status = code, status


class FakeAdmin:
    """Remembers requests; gives the answers that a test has laid down for a method, one after another."""

    def __init__(self) -> None:
        self.requests: list[Message] = []
        self.answers: dict[str, list[Message | Refusal]] = {
            "ListBrokers": [
                pb.ListBrokersResponse(
                    brokers=[
                        pb.Broker(
                            broker_id=FIRST,
                            status="active",
                            is_leader=True,
                            client_addr="a:6650",
                            admin_addr="a:50051",
                            raft_addr="a:7650",
                            http_addr="a:9040",
                            topics=7,
                            incarnation=2**62,
                        ),
                        pb.Broker(
                            broker_id=SECOND, status="drained", mode_reason="upgrade", client_addr="b:6650"
                        ),
                    ]
                )
            ]
        }

    def _tell(self, answer: Message | Refusal, context: Any) -> Message:
        if isinstance(answer, Refusal):
            context.set_trailing_metadata(((CODE_KEY, answer.code), (DETAIL_KEY, "0")))
            context.abort(answer.status, str(answer))
        assert isinstance(answer, Message)
        return answer

    def one(self, method: str) -> Callable[[Message, Any], Message]:
        def handle(request: Message, context: Any) -> Message:
            self.requests.append(request)
            return self._tell(self.answers[method][0], context)

        return handle

    def many(self, method: str) -> Callable[[Message, Any], Iterator[Message]]:
        def handle(request: Message, context: Any) -> Iterator[Message]:
            self.requests.append(request)
            for answer in self.answers[method]:
                yield self._tell(answer, context)

        return handle


@pytest.fixture
def admin(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeAdmin]:
    fake = FakeAdmin()
    brokers, topics = brokers_pb2_grpc.BrokersServicer(), topics_admin_pb2_grpc.TopicsServicer()
    for name in ("ListBrokers", "ActivateBroker", "GetBalance", "Rebalance"):
        setattr(brokers, name, fake.one(name))
    setattr(brokers, "DrainBroker", fake.many("DrainBroker"))  # noqa: B010 (as the others)
    setattr(topics, "UnloadTopic", fake.many("UnloadTopic"))  # noqa: B010
    server = grpc.server(ThreadPoolExecutor(2))
    brokers_pb2_grpc.add_BrokersServicer_to_server(brokers, server)
    topics_admin_pb2_grpc.add_TopicsServicer_to_server(topics, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    monkeypatch.setenv("SAVA_ADMIN", f"127.0.0.1:{port}")
    yield fake
    server.stop(None).wait(10)


@pytest.fixture
def sava(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Sava:
    def run(line: str, *, code: int = 0) -> Result:
        monkeypatch.setattr("sys.argv", ["sava", *line.split()])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capsys.readouterr()
        result = Result(int(ended.value.code or 0), captured.out, captured.err)
        assert result.code == code, result
        return result

    return run
