"""What replication refuses, by whose fault it is."""

from __future__ import annotations

from collections.abc import Sequence

from sava.errors import CallerError, RetryableError


class RemoteUnknown(CallerError):
    def __init__(self, remote: str) -> None:
        super().__init__(
            f"there is no remote {remote}; `sava remotes list` shows those that are known, `sava remotes "
            "add` adds one"
        )
        self.remote = remote


class RemoteRefused(CallerError):
    """A cluster that cannot be a remote of this one; says why."""


class RemoteInUse(CallerError):
    def __init__(self, remote: str, scopes: Sequence[str]) -> None:
        shown = ", ".join(scopes[:5]) + (", …" if len(scopes) > 5 else "")
        super().__init__(
            f"remote {remote} is used by the policy of {shown}; set another with `sava replication set`, or "
            "`sava replication clear` it"
        )
        self.remote = remote


class RemoteUnreachable(RetryableError):
    """The remote gave no answer."""


class RemoteDenied(CallerError):
    """The remote does not let this cluster in, or not do that."""


class PolicyInvalid(CallerError):
    """A policy that cannot be one; says which part of it, and why."""


class LinkUnknown(CallerError):
    def __init__(self, topic: object, remote: str = "") -> None:
        """Without a remote: to none."""
        where = f"replicated to {remote}" if remote else "replicated"
        super().__init__(
            f"topic {topic} is not {where}, or does not exist; `sava replication status` shows what is "
            "replicated"
        )


class ReplicationBusy(RetryableError):
    """A record changed under every attempt to change it."""
