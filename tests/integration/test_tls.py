"""Mutual TLS on the Raft and admin ports: members talk, strangers do not."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from sava.api.admin_client import AdminClient, own_credentials
from sava.config import Auth, TlsSettings
from sava.errors import SavaError
from sava.metadata.errors import Unavailable
from sava.peers.raft_transport import TcpTransport
from tests.support.brokers import Cluster


def make_certificates(directory: Path, *addresses: str) -> Auth:
    """An authority of our own, and one certificate for all hosts: this machine, and these addresses."""

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=directory, check=True, capture_output=True)

    directory.mkdir()
    names = ["IP:127.0.0.1", "DNS:localhost", *(f"IP:{address}" for address in addresses)]
    (directory / "san").write_text(f"subjectAltName={','.join(names)}")
    new_key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    openssl("req", "-x509", *new_key, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=ca", "-days", "1")
    openssl("req", *new_key, "-keyout", "node.key", "-out", "node.csr", "-subj", "/CN=node")
    signed_by = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial")
    openssl("x509", "-req", "-in", "node.csr", *signed_by, "-out", "node.pem", "-extfile", "san")
    return Auth(
        tls=TlsSettings(
            cert_file=directory / "node.pem", key_file=directory / "node.key", ca_file=directory / "ca.pem"
        ),
        super_admins=("user:node",),
    )


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the openssl command")
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
                await TcpTransport(foreign).identify(first.raft_address, timeout=2.0)
            async with AdminClient(first.admin, own_credentials(foreign)) as client:
                with pytest.raises(SavaError):
                    await client.status(timeout=2.0)
