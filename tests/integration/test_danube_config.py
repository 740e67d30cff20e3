"""A file that was written for Danube starts a broker."""

from __future__ import annotations

import asyncio
import os
import stat
from functools import partial
from pathlib import Path

import obstore
import pytest
import yaml
from obstore.store import S3Store

from sava.client import Client, PermissionDenied, Tls, Unauthenticated
from sava.security.principal import Principal
from sava.security.tokens import create_token
from tests.support.brokers import sava
from tests.support.certificates import Authority
from tests.support.network import free_ports
from tests.support.objects import BUCKET, S3Server, s3_server
from tests.support.processes import Forked
from tests.support.waiting import PATIENCE_S, until
from tests.unit.config.test_danube_config import REFERENCE

__all__ = ["s3_server"]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """The reference in whole; its bucket is one that the server here has."""
    path = tmp_path / "danube-broker.yaml"
    path.write_text(REFERENCE.replace('"danube-production"', f'"{BUCKET}/danube-production"'))
    return path


def started(file: Path, log: Path, environment: dict[str, str]) -> Forked:
    with log.open("ab") as stderr:
        arguments = ["broker", "--config", str(file)]
        return Forked("sava.cli", arguments, stderr=stderr, env={**os.environ, **environment})


async def is_formed(broker: Forked, log: Path, raft: int, admin: int) -> bool:
    assert broker.poll() is None, await asyncio.to_thread(log.read_text)
    init = ("cluster", "init", "--nodes", f"127.0.0.1:{raft}", "--admin", f"127.0.0.1:{admin}")
    return (await sava(*init, check=False))[0] == 0


async def test_the_reference_file_starts_a_broker_that_stores_messages_in_s3(
    tmp_path: Path, file: Path, s3_server: S3Server
) -> None:
    """Only what this machine has otherwise comes from the environment: ports, directories, credentials. The
    broker used to refuse ``wal_cloud``."""
    client_port, admin, raft, http = free_ports(4)
    options = s3_server.options
    environment = {
        "SAVA__BROKER__HOST": "127.0.0.1",
        "SAVA__BROKER__PORTS__CLIENT": str(client_port),
        "SAVA__BROKER__PORTS__ADMIN": str(admin),
        "SAVA__BROKER__PORTS__RAFT": str(raft),
        "SAVA__BROKER__PORTS__PROMETHEUS": str(http),
        "SAVA__META_STORE__DATA_DIR": str(tmp_path / "raft"),
        "SAVA__STORAGE__JOURNAL_DIR": str(tmp_path / "wal"),
        "SAVA__STORAGE__UPLOAD_INTERVAL_SECONDS": "1",
        "AWS_ENDPOINT_URL": options["endpoint"],
        "AWS_REGION": options["region"],
        "AWS_ACCESS_KEY_ID": options["access_key_id"],
        "AWS_SECRET_ACCESS_KEY": options["secret_access_key"],
    }
    log = tmp_path / "broker.log"
    broker = started(file, log, environment)
    try:
        await until(partial(is_formed, broker, log, raft, admin), "the cluster of one is there")
        address = f"http://127.0.0.1:{client_port}"
        async with (
            Client(address, timeout=PATIENCE_S) as client,
            client.producer("/default/orders") as producer,
        ):
            await producer.send(b"from Danube's file")
        bucket = S3Store(BUCKET, config=options, client_options={"allow_http": True})  # type: ignore[arg-type]

        async def is_stored() -> bool:
            found = await asyncio.to_thread(lambda: obstore.list(bucket, "danube-production/").collect())
            return any(each["path"].endswith(".parquet") for each in found)

        await until(is_stored, "a segment below the root of the file")
        broker.terminate()
        assert await asyncio.to_thread(broker.wait, PATIENCE_S) == 0
    finally:
        broker.kill()
    logged = log.read_text()
    assert "configuration: wal_cloud.cloud is storage.url here" in logged
    assert "configuration: wal_cloud.metadata is ignored: metadata is in the embedded Raft store" in logged


async def test_a_file_with_tokens_starts_a_broker_that_checks_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Certificates as for Danube, which name hosts alone; the secret of tokens stands in the file."""
    authority = Authority(tmp_path / "certificates")
    node = authority.issue("node")
    client_port, admin, raft, http = free_ports(4)
    file, log = tmp_path / "danube-broker.yaml", tmp_path / "broker.log"
    file.write_text(
        yaml.safe_dump(
            {
                "cluster_name": "MY_CLUSTER",
                "broker": {
                    "host": "127.0.0.1",
                    "ports": {"client": client_port, "admin": admin, "raft": raft, "prometheus": http},
                },
                "meta_store": {"data_dir": str(tmp_path / "raft")},
                "storage": {"url": (tmp_path / "segments").as_uri(), "local_wal_root": str(tmp_path / "wal")},
                "auth": {
                    "mode": "tlswithjwt",
                    "tls": {
                        "cert_file": str(node.cert),
                        "key_file": str(node.key),
                        "ca_file": str(authority.path),
                    },
                    "jwt": {"secret_key": "marker-of-a-secret", "issuer": "danube-auth"},
                },
            }
        )
    )
    root, bob = (
        create_token("danube-auth", Principal("user", name), 600, b"marker-of-a-secret")
        for name in ("admin", "bob")
    )
    monkeypatch.setenv("SAVA_TLS_CA", str(authority.path))
    monkeypatch.setenv("SAVA_TOKEN", root)
    broker = started(file, log, {})
    try:
        await until(partial(is_formed, broker, log, raft, admin), "the cluster of one is there")
        address, tls = f"https://127.0.0.1:{client_port}", Tls(ca=authority.path)
        async with (
            Client(address, token=root, tls=tls, timeout=PATIENCE_S) as client,
            client.producer("/default/orders") as producer,
        ):
            await producer.send(b"from an administrator")
        for token, refusal in ((bob, PermissionDenied), (None, Unauthenticated), ("x.y.z", Unauthenticated)):
            async with Client(address, token=token, tls=tls, timeout=PATIENCE_S) as client:
                with pytest.raises(refusal):
                    await client.producer("/default/orders").open()
        assert await asyncio.to_thread(stat_mode, tmp_path / "raft" / "danube_jwt_secret") == 0o600
    finally:
        broker.terminate()
        await asyncio.to_thread(broker.wait, PATIENCE_S)
    assert "configuration: auth.jwt is auth.tokens here" in log.read_text()
    assert "marker-of-a-secret" not in log.read_text()


def stat_mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)
