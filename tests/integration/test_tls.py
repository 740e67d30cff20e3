"""Mutual TLS on the Raft and admin ports: members talk, strangers do not."""

from __future__ import annotations

import ssl
from pathlib import Path

import grpc.aio
import pytest

from sava.api.admin_client import AdminClient, own_credentials
from sava.config import Auth
from sava.errors import SavaError
from sava.metadata.errors import NotAuthenticated, Unavailable
from sava.peer_connection import Dialer
from sava.peers import tls
from sava.proto import admin_pb2 as pb
from sava.proto import admin_pb2_grpc
from sava.security.cluster_secret import FILE, ClusterSecret
from sava.security.handshake import BrokerCredentials
from tests.support.brokers import Cluster
from tests.support.certificates import HOSTS, Authority, make_certificates
from tests.support.peers import credentials
from tests.support.waiting import PATIENCE_S


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


@pytest.mark.parametrize("mode", ["none", "optional"])
async def test_clients_need_no_certificate_where_none_is_asked_for(tmp_path: Path, mode: str) -> None:
    """The Raft port asks for a broker's all the same."""
    auth = make_certificates(tmp_path / "certificates")
    assert auth.tls is not None
    files = auth.tls.model_copy(update={"client_certificates": mode})
    open_to_all = Auth(tls=files, anonymous=True, super_admins=("anonymous:anonymous",))
    async with Cluster(1, tmp_path, auth=open_to_all) as cluster:
        await cluster.init()
        (broker,) = cluster.brokers
        channel = grpc.aio.secure_channel(
            broker.admin, grpc.ssl_channel_credentials(auth.tls.ca_file.read_bytes())
        )
        async with channel:
            status = await admin_pb2_grpc.ClusterStub(channel).Status(pb.StatusRequest())
            assert status.self_node_id == await broker.node_id()
        bare = ssl.create_default_context(cafile=str(auth.tls.ca_file))
        with pytest.raises(SavaError):
            await Dialer(credentials(), lambda: bare).identify(broker.raft_address, timeout=2.0)


async def test_an_application_is_no_broker(tmp_path: Path) -> None:
    """Its certificate is of the same authority: it was let in, and could do everything."""
    authority = Authority(tmp_path / "certificates")
    uris = [f"sava://test/broker/{host}" for host in HOSTS]
    auth = authority.issue("node", uris=uris).auth(authority.path)
    async with Cluster(1, tmp_path, auth=auth) as cluster:
        await cluster.init()
        (broker,) = cluster.brokers
        secret = ClusterSecret(broker.data_dir / FILE)
        for name, its in (
            ("user", ["sava://test/user/app"]),
            ("plain", []),
            ("other", ["sava://x/broker/1"]),
        ):
            application = authority.issue(name, uris=its).auth(authority.path)
            asker = Dialer(BrokerCredentials(secret), tls.client_contexts(application))
            with pytest.raises(NotAuthenticated, match="is no broker's of cluster test"):
                await asker.identify(broker.raft_address, timeout=PATIENCE_S)
        known = Dialer(BrokerCredentials(secret), tls.client_contexts(auth))
        info = await known.identify(broker.raft_address, timeout=PATIENCE_S)
        assert info.cluster == (await broker.status()).cluster_id


async def test_a_broker_has_the_id_that_its_certificate_names(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "certificates")
    auth = authority.issue("node", uris=["sava://test/broker/17"]).auth(authority.path)
    async with Cluster(1, tmp_path, auth=auth) as cluster:
        (broker,) = cluster.brokers
        assert await broker.node_id() == 17
        await cluster.init()
        await broker.put("/x", b"1")
        await broker.stop()
        authority.issue("node", uris=["sava://test/broker/18"])
        await broker.start(wait=False)
        assert await broker.ended()
        assert [line for line in broker.lines if "is that of node 17" in line]
        authority.issue("node", uris=["sava://test/user/17"])
        await broker.start(wait=False)
        assert await broker.ended()
        assert [line for line in broker.lines if "is no broker's certificate" in line]


async def test_a_broker_of_a_cluster_does_not_start_without_its_secret(tmp_path: Path) -> None:
    async with Cluster(2, tmp_path) as cluster:
        await cluster.init()
        one, two = cluster.brokers
        await two.stop()
        (two.data_dir / FILE).unlink()
        await two.start(wait=False)
        assert await two.ended()
        assert [line for line in two.lines if f"copy {FILE} from another broker" in line]
        (two.data_dir / FILE).write_bytes((one.data_dir / FILE).read_bytes())
        (two.data_dir / FILE).chmod(0o644)
        await two.start(wait=False)
        assert await two.ended()
        assert [line for line in two.lines if "may be read by others" in line]
        (two.data_dir / FILE).chmod(0o600)
        await two.start()
        await two.put("/x", b"1")
