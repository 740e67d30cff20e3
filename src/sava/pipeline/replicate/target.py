"""Target: the cluster that is copied into, as a process of a Spark application sees it.

As ``pipeline.cluster.ClusterClient`` is for the cluster that is copied from: blocking, one per process and
cluster, over one event loop in a thread. It asks the service ``Replica``, which any broker of the target
answers, itself or by passing the call on. Questions are asked of one broker after the other for a few seconds
only: whoever copies has other work, and comes again.
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
"""For one question, whoever answers it."""
ATTEMPT_S: Final = 3.0
"""For one broker of several."""
ACKS_S: Final = 20.0
"""A subscription that is far behind is looked up in as much of the log."""
MAX_DESCRIBED: Final = 1000
"""Topics that one call describes."""


class TargetCluster:
    """Any thread may call. Everything raises Unavailable, Denied and Refused of ``sava.client.errors``."""

    def __init__(self, access: ClusterAccess) -> None:
        """For ``of``."""
        self._access = access
        self._connection = access.connection()
        self._loop = LoopThread("sava target")
        self._calls = ClusterCalls(self._connection)
        self._owners = Owners()

    @staticmethod
    def of(access: ClusterAccess) -> TargetCluster:
        """The one of this process."""
        return _targets.of(access)

    def close(self) -> None:
        """Whoever asks for it after that gets a new one."""
        _targets.forget(self._access)
        self._loop.run(self._connection.close())
        self._loop.close()

    def hello(self) -> pb.HelloResponse:
        response: pb.HelloResponse = self._ask("Hello", pb.HelloRequest())
        return response

    def describe(self, topics: Sequence[str]) -> dict[str, pb.TopicShape]:
        """By name. Plain and partitioned topics, not partitions."""
        found: dict[str, pb.TopicShape] = {}
        for first in range(0, len(topics), MAX_DESCRIBED):
            request = pb.DescribeTopicsRequest(topics=topics[first : first + MAX_DESCRIBED])
            found.update((shape.topic, shape) for shape in self._ask("DescribeTopics", request).topics)
        return found

    def ensure_topic(
        self, topic: str, *, partitions: int, cluster: str, reliable: bool = True, grow: bool = False
    ) -> pb.TopicShape:
        """What there is then; 0 partitions: a plain topic. ``cluster``: who asks, for the log there."""
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
        """To be opened, and closed."""
        return Chain(self._loop, self._connection, self._owners, topic, source)

    def append_each(
        self, stretches: Sequence[pb.ChainStretch], *, until: float
    ) -> Future[dict[str, pb.ChainReceipt | None]]:
        """One stretch into each of several chains, by one call to each broker that has some of the topics. By
        topic: its receipt; None: it was not taken, or that is not known. Missing: it was sent, and had no
        answer by then (of ``time.monotonic``)."""
        return self._loop.begin(several.append(self._calls, stretches, until))

    def _ask(self, method: str, request: Any, timeout: float = CALL_S, attempt: float = ATTEMPT_S) -> Any:
        asked = self._connection.ask(
            method, request, timeout=timeout, attempt=attempt, service=rpc.ReplicaStub
        )
        return self._loop.run(asked)


_targets: Final = PerProcess[ClusterAccess, TargetCluster](TargetCluster)
