"""Who calls, and what they may do: principals, credentials, roles, the table of permissions. Here is what the
client and the broker have to agree on."""

from __future__ import annotations

import ipaddress
from typing import Final

MAX_TOKEN_BYTES: Final = 16 << 10


def is_loopback(host: str) -> bool:
    """Whether it is this machine, so that nothing passes a network on the way there."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
