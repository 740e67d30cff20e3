"""Secrets and certificates are replaced under a cluster that works: no election, and no call that fails."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest

from sava.api.admin_client import own_credentials
from sava.client import Client, Tls
from sava.config import Auth
from sava.peer_connection import Dialer
from sava.security.cluster_secret import ClusterSecret
from sava.security.handshake import BrokerCredentials
from tests.support.brokers import BrokerProcess, Brokers
from tests.support.certificates import CLUSTERS, HOSTS, Authority
from tests.support.waiting import PATIENCE_S, until

TOPIC = "/default/orders"
SOON_S = 10.0
"""Within this time a change of a file counts."""
URIS = [f"sava://{cluster}/broker/{host}" for cluster in CLUSTERS for host in HOSTS]


@asynccontextmanager
async def working(cluster: Brokers, client: Client) -> AsyncIterator[None]:
    """Messages are sent through a broker that forwards, and metadata is written, all the time. At the end no
    call has failed, and the leader is the one that it was."""
    await cluster.create(TOPIC)
    terms = [(await broker.status()).current_term for broker in cluster.brokers]
    is_over = asyncio.Event()

    async def send() -> int:
        sent = 0
        async with client.producer(TOPIC) as producer:
            while not is_over.is_set():
                assert await producer.send(b"%d" % sent) == sent
                sent += 1
                await asyncio.sleep(0.01)
        return sent

    async def write(broker: BrokerProcess) -> int:
        written = 0
        while not is_over.is_set():
            await broker.put(f"/test/{broker.number}", b"%d" % written)
            written += 1
            await asyncio.sleep(0.02)
        return written

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(send()), *(group.create_task(write(each)) for each in cluster.brokers)]
        try:
            yield
        finally:
            is_over.set()
    assert all(task.result() > 20 for task in tasks)
    assert [(await broker.status()).current_term for broker in cluster.brokers] == terms
    assert not [line for broker in cluster.brokers for line in broker.lines if "is not registered" in line], (
        "no broker lost its registration"
    )


async def test_the_clusters_secret_is_replaced(tmp_path: Path) -> None:
    async with Brokers(3, tmp_path) as cluster, Client(cluster.brokers[0].client_url) as client:
        files = [broker.data_dir / "cluster_secret" for broker in cluster.brokers]
        old, new = files[0].read_text().strip(), secrets.token_hex(32)
        assert {file.read_text().strip() for file in files} == {old}, "init gave it to all"
        assert {file.stat().st_mode & 0o777 for file in files} == {0o600}
        assert not [line for broker in cluster.brokers for line in broker.lines if old in line]
        asker = ClusterSecret(tmp_path / "asker")
        asker.store(old)

        async def is_known_to(broker: BrokerProcess) -> bool:
            dialer = Dialer(BrokerCredentials(asker))
            return not (await dialer.identify(broker.raft_address, timeout=PATIENCE_S)).is_reticent

        async with working(cluster, client):
            for step, lines in enumerate(([old, new], [new, old], [new]), 1):
                for file in files:
                    file.write_text("\n".join(lines))
                await until(
                    partial(have_said, cluster, "secret was read", step), "it is read", timeout=SOON_S
                )
            for broker in cluster.brokers:
                assert not await is_known_to(broker), "the old one is worth nothing"
        asker.path.write_text(new)
        for broker in cluster.brokers:
            await until(partial(is_known_to, broker), "the new one is known", timeout=SOON_S)
        last = cluster.brokers[2]
        last.kill()
        await last.ended()
        await last.start()
        await last.put("/after", b"1")


async def test_certificates_are_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them, and the authority with them: first both are trusted, then the new ones are shown, then the
    old authority goes."""
    old, new = Authority(tmp_path / "old"), Authority(tmp_path / "new")
    folder = tmp_path / "certificates"
    issued = old.issue("node", uris=URIS)
    ca, cert, key = folder / "ca.pem", folder / "node.pem", folder / "node.key"
    folder.mkdir()

    def put(authorities: list[Authority], pair: tuple[Path, Path]) -> None:
        ca.write_bytes(b"".join(each.path.read_bytes() for each in authorities))
        cert.write_bytes(pair[0].read_bytes())
        key.write_bytes(pair[1].read_bytes())

    put([old], issued)
    files = {"ca_file": ca, "cert_file": cert, "key_file": key}
    admins = old.issue("admins", uris=URIS).auth(old.path).super_admins
    auth = Auth.model_validate({"tls": files, "super_admins": admins})
    both = tmp_path / "both.pem"
    both.write_bytes(old.path.read_bytes() + new.path.read_bytes())
    old_user, new_user = old.issue("user", uris=URIS), new.issue("user", uris=URIS)
    async with Brokers(3, tmp_path, auth=auth) as cluster:
        url = cluster.brokers[0].client_url
        renewed = new.issue("node", uris=URIS)
        user = old_user.auth(both)

        async def is_read(step: int) -> bool:
            await asyncio.gather(*(shown_by(broker, user) for broker in cluster.brokers))
            return have_said(cluster, "certificates were read again", step)

        async with (
            Client(url, tls=Tls(ca=both, cert=old_user.cert, key=old_user.key)) as client,
            working(cluster, client),
        ):
            for step, (authorities, pair) in enumerate(
                (([old, new], issued), ([old, new], renewed), ([new], renewed)), 1
            ):
                put(authorities, pair)
                await until(partial(is_read, step), "they are read", timeout=SOON_S)
            for broker in cluster.brokers:
                assert await shown_by(broker, new_user.auth(new.path)) == pem_to_der(renewed.cert)
            await asyncio.sleep(2.0)  # the cluster works with them for a while
        async with (
            Client(url, tls=Tls(ca=new.path, cert=new_user.cert, key=new_user.key)) as client,
            client.producer(TOPIC) as producer,
        ):
            await producer.send(b"with the new authority alone")
        stranger = Client(url, tls=Tls(ca=new.path, cert=old_user.cert, key=old_user.key), timeout=2)
        async with stranger:
            with pytest.raises(Exception, match="certificate"):
                await stranger.producer(TOPIC).open()


def have_said(cluster: Brokers, what: str, times: int) -> bool:
    return all(sum(what in line for line in broker.lines) >= times for broker in cluster.brokers)


async def shown_by(broker: BrokerProcess, auth: Auth) -> bytes:
    """The certificate of the client port."""
    shown = own_credentials(auth).tls
    assert shown is not None
    context = shown.context()
    context.set_alpn_protocols(["h2"])
    port = int(broker.client_url.rpartition(":")[2])
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    found: bytes = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.transport.abort()
    return found


def pem_to_der(path: Path) -> bytes:
    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import Encoding

    return x509.load_pem_x509_certificate(path.read_bytes()).public_bytes(Encoding.DER)
