"""Control: what a link asks of the cluster that sends, and tells it.

Both can be repeated at will, and fail within a second or two: a cluster that is electing a leader keeps
nobody from copying what is known to be wanted.
"""

from __future__ import annotations

from typing import Final, Protocol

from sava.client.connection import Tls
from sava.pipeline.link import Access
from sava.pipeline.replicate.work import LinkEnds
from sava.pipeline.runner.admin_calls import AdminCalls
from sava.proto import replication_pb2 as pb
from sava.proto import replication_pb2_grpc as rpc

TARGET_S: Final = 5.0
"""Without a broker of the remote, until a task gives up."""


class Control(Protocol):
    """Of one thread. Raises Unavailable when nobody answers in time, and Refused."""

    def link(self, remote: str) -> pb.Link: ...

    def report(self, request: pb.ReportLinkRequest) -> None: ...

    def close(self) -> None: ...


class AdminControl:
    """By the admin port of any broker."""

    def __init__(self, addresses: str, *, tls: Tls | None = None) -> None:
        self._calls = AdminCalls(addresses, tls=tls, name="sava link control")

    def link(self, remote: str) -> pb.Link:
        self._calls.refresh()
        link: pb.Link = self._calls.ask("GetLink", pb.GetLinkRequest(remote=remote), rpc.ReplicationStub)
        return link

    def report(self, request: pb.ReportLinkRequest) -> None:
        self._calls.ask("ReportLink", request, rpc.ReplicationStub)

    def close(self) -> None:
        self._calls.close()


def ends_of(link: pb.Link, source: Access) -> LinkEnds:
    remote = link.remote
    files = (remote.tls_ca, remote.tls_cert, remote.tls_key)
    return LinkEnds(
        source=source,
        source_name=link.cluster_name,
        source_id=link.cluster_id,
        target=Access(remote.service, remote.token, *files, TARGET_S),
        target_name=remote.cluster_name,
        target_id=remote.cluster_id,
    )
