"""Control: what a link asks of the cluster that sends, and tells it.

Both can be repeated at will, and fail within a second or two: a cluster that is electing a leader keeps
nobody from copying what is known to be wanted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

from sava.client.connection import Tls
from sava.errors import RetryableError
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


class BrokersReplaced(RetryableError):
    """None of the brokers is there any more that were there when the link began."""


class FollowingControl:
    """Ends a link that has outlived all brokers of its cluster. Its own connections may have learned of
    others, but processes that are started for its tasks know the addresses that it began with, and no more:
    it is to be begun again with new ones."""

    def __init__(self, control: Control, service: str, now: Callable[[], str]) -> None:
        """Client addresses, with commas between: of the beginning, and ``now``; empty: not known."""
        self._control = control
        self._service = service
        self._now = now
        self.report, self.close = control.report, control.close

    def link(self, remote: str) -> pb.Link:
        """Raises BrokersReplaced."""
        now = self._now()
        if now and not set(now.split(",")) & set(self._service.split(",")):
            raise BrokersReplaced(
                f"the brokers that the link began with ({self._service}) are all gone, and others have come "
                f"({now}); it is begun again with these"
            )
        return self._control.link(remote)


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
