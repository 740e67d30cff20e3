"""Mutual TLS on the Raft and admin ports: members talk, strangers do not."""

from __future__ import annotations

from pathlib import Path

import pytest

from sava.api.admin_client import AdminClient, own_credentials
from sava.config import Auth
from sava.errors import SavaError
from sava.metadata.errors import Unavailable
from sava.peer_connection import Dialer
from sava.peers import tls
from tests.support.brokers import Cluster
from tests.support.certificates import make_certificates
from tests.support.peers import credentials


async def test_members_talk_and_strangers_do_not(tmp_path: Path) -> None:
    auth = make_certificates(tmp_path / "certificates")
    strangers = make_certificates(tmp_path / "elsewhere")
    async with Cluster(3, tmp_path, auth=auth) as cluster:
        await cluster.init()
        first, _, third = cluster.brokers
        await first.put("/x", b"1")
        assert await third.get("/x") == b"1"
        for foreign in (Auth(), strangers):
            with pytest.raises(Unavailable):
                await Dialer(credentials(), tls.client_contexts(foreign)).identify(
                    first.raft_address, timeout=2.0
                )
            async with AdminClient(first.admin, own_credentials(foreign)) as client:
                with pytest.raises(SavaError):
                    await client.status(timeout=2.0)
