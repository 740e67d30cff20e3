"""Control: what a runner asks of the cluster.

Calls are answered or fail within CALL_S: whoever waits longer cannot look at the clock meanwhile, and the
clock is all that tells a runner which the cluster does not hear any more that it must stop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple, Protocol

CALL_S: Final = 1.5
UNKNOWN_LAG: Final = -1

State = Literal["starting", "running", "failing", "stopped"]


class Listed(NamedTuple):
    """A pipeline, as the cluster knows it."""

    name: str
    kind: str
    settings: Mapping[str, Any]
    revision: int
    is_wanted: bool = True
    """False: paused, or about to be deleted."""
    holder: str = ""
    rows: int = 0
    restarts: int = 0


class Peer(NamedTuple):
    """A runner that is there, this one included."""

    name: str
    kinds: frozenset[str]
    only: frozenset[str]
    claims: int

    def takes(self, listed: Listed) -> bool:
        return listed.kind in self.kinds and (not self.only or listed.name in self.only)


class Joined(NamedTuple):
    lease: int
    """Another one than before: all claims are lost."""
    ttl_s: float
    """How long claims live from the moment at which this was asked."""
    peers: Sequence[Peer]


class Answer(NamedTuple):
    is_held: bool
    is_wanted: bool
    revision: int


class Status(NamedTuple):
    state: State
    rows: int = 0
    rate: float = 0.0
    lag_messages: int = UNKNOWN_LAG
    lag_seconds: float = UNKNOWN_LAG
    last_error: str = ""
    restarts: int = 0
    since_ms: int = 0
    batch: int = 0


class Control(Protocol):
    """Raises Unavailable when nobody answers in time, and Refused; both of ``sava.client.errors``."""

    def join(self) -> Joined: ...

    def leave(self) -> None: ...

    def list(self) -> Sequence[Listed]: ...

    def claim(self, name: str) -> int:
        """The number of the claim; 0: it is another's, or to be nobody's."""
        ...

    def report(self, name: str, claim: int, status: Status) -> Answer: ...

    def release(self, name: str, claim: int, status: Status) -> None: ...
