"""Call: who makes the call that is running, and what that caller may do.

The guard of a port (``sava.peers.guard``) makes one for each call and puts it into the context of the
handler's task, with the principal (``sava.security.principal.current``). What the table of permissions cannot
decide from the request, the handler asks here: ``require`` for the topic of a producer or a consumer that the
request names by a number, ``may`` for the entries of a list. Where roles are not enforced, and in the
broker's own tasks, every caller may do everything.

A stream remembers what was required for it, so that it ends when that is taken away.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from sava.security.permissions import Authorizer, Permission, Resource, denied
from sava.security.principal import ANONYMOUS, Principal


class Credential(NamedTuple):
    """By what the caller has proven who it is."""

    kind: str = "none"
    """``token``, ``certificate``, ``none``."""
    id: str = ""
    """The token's ``jti``, or the certificate's serial number in decimal; by it the credential is revoked."""
    expires_at: float = 0.0
    """In Unix seconds; 0: it does not end."""


NO_CREDENTIAL: Final = Credential()


@dataclass(slots=True)
class Call:
    principal: Principal = ANONYMOUS
    credential: Credential = NO_CREDENTIAL
    authorizer: Authorizer | None = None
    """None: the caller may do everything."""
    forwarder: int = 0
    """The broker that has passed the call on, or makes it itself; 0: it comes from its caller."""
    is_own: bool = False
    """The broker ``forwarder`` makes it itself, for no other caller."""
    peer: str = ""
    """The address that it comes from."""
    request_id: str = ""
    """As its caller has named it."""
    method: str = ""
    is_denied: bool = False
    """Its refusal is counted and recorded."""
    required: list[tuple[tuple[Permission, ...], Resource]] = field(default_factory=list)

    def may(self, any_of: tuple[Permission, ...], resource: Resource) -> bool:
        authorizer = self.authorizer
        return authorizer is None or self.is_own or authorizer.allows(self.principal, any_of, resource)

    def may_within(self, any_of: tuple[Permission, ...], namespace: str) -> bool:
        """Whether anything of the namespace; empty: anything at all."""
        authorizer = self.authorizer
        return (
            authorizer is None or self.is_own or authorizer.allows_within(self.principal, any_of, namespace)
        )

    def require(self, any_of: tuple[Permission, ...], resource: Resource) -> None:
        """Raises PermissionDenied."""
        if self.authorizer is None:
            return
        if not self.may(any_of, resource):
            raise denied(self.principal, any_of, resource)
        # A stream may ask many times for the same.
        if (any_of, resource) not in self.required:
            self.required.append((any_of, resource))


EVERYTHING: Final = Call()
"""What runs outside a guarded call."""
current: Final[ContextVar[Call]] = ContextVar("call", default=EVERYTHING)
