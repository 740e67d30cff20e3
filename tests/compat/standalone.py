"""A broker in a process of its own, as its users start it: ``sava broker --standalone``.

Unlike the cluster harness this one belongs to no event loop, so that the tests of a module share one broker.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc
from grpc import aio

from sava.config import Auth
from sava.proto import danube_admin_pb2 as admin
from sava.proto import danube_admin_pb2_grpc as admin_rpc
from sava.proto import danube_api_pb2_grpc as api_rpc
from sava.proto import danube_schema_pb2_grpc as schema_rpc
from sava.services.admin_client import PLAIN
from tests.ports import free_ports

START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 20.0


class Standalone:
    """``with Standalone(tmp_path) as broker``. Keeps its ports and its data over a restart."""

    def __init__(self, directory: Path, auth: Auth = PLAIN, **settings: str) -> None:
        """``settings`` are configuration keys as environment variables spell them, without their prefix."""
        client, admin_port, raft, http = free_ports(4)
        self.port = client
        self.address = f"127.0.0.1:{client}"
        self.url = f"{'https' if auth.tls else 'http'}://{self.address}"
        self._tls = auth.tls
        if auth.tls is not None:
            settings["AUTH__MODE"] = auth.mode
            for name in ("cert_file", "key_file", "ca_file"):
                settings[f"AUTH__TLS__{name.upper()}"] = str(getattr(auth.tls, name))
        self.admin = f"127.0.0.1:{admin_port}"
        self.http_port = http
        self.log = directory / "broker.log"
        self._environment: dict[str, str] = {}
        self.set(**settings)
        self._arguments = [
            *("--standalone", "--data-dir", str(directory / "data"), "--host", "127.0.0.1"),
            *("--port", str(client), "--admin-port", str(admin_port)),
            *("--raft-port", str(raft), "--http-port", str(http)),
        ]
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            print(self.log.read_text()[-4000:])
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait(STOP_TIMEOUT_S)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def set(self, **settings: str) -> None:
        """From the next start on."""
        self._environment.update({f"SAVA__{name}": value for name, value in settings.items()})

    def start(self) -> None:
        """Returns when the broker has a leader, which is itself, and its first namespaces."""
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "sava.cli", "broker", *self._arguments],
                stderr=log,
                env={**os.environ, **self._environment},
            )
        deadline = time.monotonic() + START_TIMEOUT_S
        with self._admin_channel() as channel:
            stub: Any = admin_rpc.BrokerAdminStub(channel)
            while not _has_namespaces(stub):
                alive = self._process.poll() is None
                assert alive, f"the broker ended: {self.log.read_text()[-2000:]}"
                assert time.monotonic() < deadline, "the broker has not come up"
                time.sleep(0.05)

    def _admin_channel(self) -> grpc.Channel:
        if self._tls is None:
            return grpc.insecure_channel(self.admin)
        files = (self._tls.ca_file, self._tls.key_file, self._tls.cert_file)
        credentials = grpc.ssl_channel_credentials(*(file.read_bytes() for file in files))
        return grpc.secure_channel(self.admin, credentials)

    def kill(self) -> None:
        """kill -9, and wait until it is gone."""
        self._end(signal.SIGKILL)

    def stop(self) -> int:
        return self._end(signal.SIGTERM)

    def _end(self, number: signal.Signals) -> int:
        assert self._process is not None
        self._process.send_signal(number)
        return self._process.wait(STOP_TIMEOUT_S)


def _has_namespaces(stub: Any) -> bool:
    try:
        response = stub.ListNamespaces(admin.Empty(), timeout=5, wait_for_ready=True)
    except grpc.RpcError:
        return False
    return "default" in response.namespaces


class Stubs:
    """Raw stubs of every Danube service, for what no well-behaved client sends. ``async with
    Stubs(broker)``."""

    def __init__(self, broker: Standalone, address: str = "") -> None:
        self._client = aio.insecure_channel(address or broker.address)
        self._admin = aio.insecure_channel(broker.admin)
        # The generated stubs type synchronous and asynchronous use at once; here it is asynchronous only.
        self.producer: Any = api_rpc.ProducerServiceStub(self._client)
        self.consumer: Any = api_rpc.ConsumerServiceStub(self._client)
        self.discovery: Any = api_rpc.DiscoveryStub(self._client)
        self.health: Any = api_rpc.HealthCheckStub(self._client)
        self.storage: Any = api_rpc.StorageServiceStub(self._client)
        self.schemas: Any = schema_rpc.SchemaRegistryStub(self._client)
        self.brokers: Any = admin_rpc.BrokerAdminStub(self._admin)
        self.cluster: Any = admin_rpc.ClusterAdminStub(self._admin)
        self.namespaces: Any = admin_rpc.NamespaceAdminStub(self._admin)
        self.topics: Any = admin_rpc.TopicAdminStub(self._admin)
        self.security: Any = admin_rpc.SecurityAdminStub(self._admin)
        self.admin_schemas: Any = schema_rpc.SchemaRegistryStub(self._admin)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client.close(None)
        await self._admin.close(None)
