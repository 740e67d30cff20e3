"""One broker in a process of its own, as its users start it: ``sava broker --standalone``. It can be killed
and started again on the same ports and data.

Unlike the cluster harness this belongs to no event loop, so that the tests of a module, or of a session, can
share a broker.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc

from sava.api.admin_client import PLAIN
from sava.config import Auth
from sava.proto import danube_admin_pb2 as admin
from sava.proto import danube_admin_pb2_grpc as admin_rpc
from tests.support.ports import free_ports
from tests.support.processes import Forked
from tests.support.waiting import PATIENCE_S

SOON = [("grpc.initial_reconnect_backoff_ms", 50), ("grpc.max_reconnect_backoff_ms", 50)]
"""A port that is not open yet is tried again; gRPC would wait for a second."""


class Standalone:
    """``with Standalone(tmp_path) as broker``. Entering starts it and waits for nothing: clients do, and that
    is part of what is tested. Who calls it without such a client waits for ``ready``."""

    module = "sava.cli"
    """What is run; another program takes the arguments of the ``sava`` command."""

    def __init__(self, directory: Path, auth: Auth = PLAIN, /, **environment: str) -> None:
        client, admin_port, raft, http = free_ports(4)
        self.port = client
        self.address = f"127.0.0.1:{client}"
        self.url = f"{'https' if auth.tls else 'http'}://{self.address}"
        self.admin = f"127.0.0.1:{admin_port}"
        self.http_port = http
        self.log = directory / "broker.log"
        self._tls = auth.tls
        # Nobody takes anything over from the only broker: however busy the machine is, it stays registered.
        self.environment = {"SAVA__CLUSTER__REGISTRATION_TTL_MS": "60000", **environment}
        if auth.tls is not None:
            self.set(SAVA__AUTH__MODE=auth.mode)
            for name in ("cert_file", "key_file", "ca_file"):
                self.set(**{f"SAVA__AUTH__TLS__{name.upper()}": str(getattr(auth.tls, name))})
        self._arguments = [
            *("--standalone", "--data-dir", str(directory / "data"), "--host", "127.0.0.1"),
            *("--port", str(client), "--admin-port", str(admin_port)),
            *("--raft-port", str(raft), "--http-port", str(http)),
        ]
        self._process: Forked | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            print(self._last_words())
            self.kill()
        elif self._running.poll() is None:
            self.stop()

    @property
    def _running(self) -> Forked:
        assert self._process is not None, "not started"
        return self._process

    @property
    def pid(self) -> int:
        return self._running.pid

    def add_arguments(self, *arguments: str) -> None:
        """From the next start on."""
        self._arguments += arguments

    def set(self, **environment: str) -> None:
        """From the next start on."""
        self.environment.update(environment)

    def start(self) -> None:
        with self.log.open("ab") as stderr:
            self._process = Forked(
                self.module,
                ["broker", *self._arguments],
                stderr=stderr,
                env={**os.environ, **self.environment},
            )

    def ready(self) -> None:
        """Returns when the broker has a leader, which is itself, and its first namespaces."""
        deadline = time.monotonic() + PATIENCE_S
        with self._admin_channel() as channel:
            stub: Any = admin_rpc.BrokerAdminStub(channel)
            while not _has_namespaces(stub):
                assert self._running.poll() is None, f"the broker ended: {self._last_words()}"
                assert time.monotonic() < deadline, f"the broker has not come up: {self._last_words()}"
                time.sleep(0.05)

    def _admin_channel(self) -> grpc.Channel:
        if self._tls is None:
            return grpc.insecure_channel(self.admin, SOON)
        files = (self._tls.ca_file, self._tls.key_file, self._tls.cert_file)
        credentials = grpc.ssl_channel_credentials(*(file.read_bytes() for file in files))
        return grpc.secure_channel(self.admin, credentials, SOON)

    def kill(self) -> None:
        """kill -9, and wait until it is gone."""
        self._running.kill()
        self._running.wait(PATIENCE_S)

    def stop(self) -> None:
        """SIGTERM; the broker must end cleanly."""
        self._running.terminate()
        try:
            assert self._running.wait(PATIENCE_S) == 0, self._last_words()
        finally:
            self.kill()

    def _last_words(self) -> str:
        return self.log.read_text()[-4000:]


def _has_namespaces(stub: Any) -> bool:
    try:
        response = stub.ListNamespaces(admin.Empty(), timeout=PATIENCE_S, wait_for_ready=True)
    except grpc.RpcError:
        return False
    return "default" in response.namespaces
