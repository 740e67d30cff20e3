"""TargetCluster: the cluster that is copied into, as a process of a Spark application sees it.

It is blocking, one per process and cluster, over one event loop in a thread, like ``ClusterClient`` for the
source. It calls the service ``Replica``: any broker of the target answers, or forwards the call. A call tries
one broker after the other for a few seconds only: the caller has other work, and retries.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, Final

from sava.client.loop_thread import LoopThread
from sava.pipeline import several
from sava.pipeline.calls import ClusterCalls
from sava.pipeline.cluster import ClusterAccess
from sava.pipeline.per_process import PerProcess
from sava.pipeline.replicate.chains import Chain, Owners
from sava.proto import replica_pb2 as pb
from sava.proto import replica_pb2_grpc as rpc

CALL_S: Final = 8.0
"""The timeout of a call over all brokers."""
ATTEMPT_S: Final = 3.0
"""The timeout of one broker."""
ACKS_S: Final = 20.0
"""The timeout for acks: a subscription that lags is looked up in that much of the log."""
MAX_DESCRIBED: Final = 1000
"""The topics of one describe call."""


class TargetCluster:
    """Any thread may call. Every method raises Unavailable, Denied and Refused of ``sava.client.errors``."""

    def __init__(self, access: ClusterAccess) -> None:
        self._access = access
        self._connection = access.connection()
        self._loop = LoopThread("sava target")
        self._calls = ClusterCalls(self._connection)
        self._owners = Owners()

    @staticmethod
    def of(access: ClusterAccess) -> TargetCluster:
        """The instance of this process."""
        return _targets.of(access)

    def close(self) -> None:
        """Close it. The next call of ``of`` makes a new one."""
        _targets.forget(self._access)
        self._loop.run(self._connection.close())
        self._loop.close()

    def hello(self) -> pb.HelloResponse:
        response: pb.HelloResponse = self._ask("Hello", pb.HelloRequest())
        return response

    def describe(self, topics: Sequence[str]) -> dict[str, pb.TopicShape]:
        """The shapes of plain and partitioned topics by name."""
        found: dict[str, pb.TopicShape] = {}
        for first in range(0, len(topics), MAX_DESCRIBED):
            request = pb.DescribeTopicsRequest(topics=topics[first : first + MAX_DESCRIBED])
            found.update((shape.topic, shape) for shape in self._ask("DescribeTopics", request).topics)
        return found

    def ensure_topic(
        self, topic: str, *, partitions: int, cluster: str, reliable: bool = True, grow: bool = False
    ) -> pb.TopicShape:
        """Create or grow a topic and return its shape; 0 partitions is a plain topic. ``cluster`` is for the
        log there."""
        request = pb.EnsureTopicRequest(
            topic=topic, partition_count=partitions, reliable=reliable, grow=grow, cluster_name=cluster
        )
        response: pb.TopicShape = self._ask("EnsureTopic", request)
        return response

    def ensure_schema(self, request: pb.EnsureSchemaRequest) -> pb.EnsureSchemaResponse:
        response: pb.EnsureSchemaResponse = self._ask("EnsureSchema", request)
        return response

    def apply_acks(self, request: pb.ApplyAcksRequest) -> pb.ApplyAcksResponse:
        response: pb.ApplyAcksResponse = self._ask("ApplyAcks", request, ACKS_S, ACKS_S)
        return response

    def chain(self, topic: str, source: pb.Source) -> Chain:
        """A stream that the caller opens and closes."""
        return Chain(self._loop, self._connection, self._owners, topic, source)

    def append_each(
        self, stretches: Sequence[pb.EachAppend], *, until: float
    ) -> Future[dict[str, pb.SourceReceipt | None]]:
        """Multi-topic append: one range for each topic, one call per broker. Returns receipts by topic; None
        if the range was refused or its outcome is unknown. A topic is missing if its range was sent and not
        answered before ``until`` (``time.monotonic``)."""
        return self._loop.begin(several.append(self._calls, stretches, until))

    def _ask(self, method: str, request: Any, timeout: float = CALL_S, attempt: float = ATTEMPT_S) -> Any:
        asked = self._connection.ask(
            method, request, timeout=timeout, attempt=attempt, service=rpc.ReplicaStub
        )
        return self._loop.run(asked)


_targets: Final = PerProcess[ClusterAccess, TargetCluster](TargetCluster)
