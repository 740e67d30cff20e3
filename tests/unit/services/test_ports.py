"""What the ports of a broker allow."""

from __future__ import annotations

from sava.server import ports
from sava.services.peers import PINGS_ALLOWED


def test_both_ports_let_peers_ask_whether_the_broker_is_there() -> None:
    """Otherwise a forwarded stream without traffic ends after some seconds: "too many pings"."""
    for options in (ports.CLIENT_OPTIONS, ports.ADMIN_OPTIONS):
        assert set(PINGS_ALLOWED) <= set(options)
