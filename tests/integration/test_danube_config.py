"""A file that was written for Danube starts a broker."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import obstore
import pytest
from obstore.store import S3Store

from sava.client import Client
from tests.support.brokers import sava
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
    with log.open("ab") as stderr:
        arguments = ["broker", "--config", str(file)]
        broker = Forked("sava.cli", arguments, stderr=stderr, env={**os.environ, **environment})
    try:
        admin_address = f"127.0.0.1:{admin}"

        async def is_formed() -> bool:
            assert broker.poll() is None, log.read_text()[-2000:]
            init = ("cluster", "init", "--nodes", f"127.0.0.1:{raft}", "--admin", admin_address)
            return (await sava(*init, check=False))[0] == 0

        await until(is_formed, "the cluster of one is there")
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
