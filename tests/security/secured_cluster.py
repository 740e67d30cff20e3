"""A cluster with TLS, tokens and roles, for tests.

    async with SecuredCluster(3, tmp_path) as cluster:
        await cluster.bind("alice", "producer", topic="/default/orders")
        async with cluster.client_of("alice") as client:
            ...

``root`` is its super admin, and what the tests do themselves is done as ``root``.
"""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

from sava.api.admin_client import AdminClient
from sava.client import Client
from sava.config import Auth, TokenIssuerSettings
from sava.proto import security_pb2 as pb
from sava.security.credentials import Credentials, Tls
from sava.security.principal import Principal
from sava.security.tokens import create_token
from tests.support.brokers import BrokerProcess, Brokers
from tests.support.certificates import make_certificates
from tests.support.waiting import PATIENCE_S, until

ROOT = "root"
HOUR_S = 3600.0


class SecuredCluster(Brokers):
    def __init__(self, size: int, directory: Path, *, has_tls: bool = True, **settings: Any) -> None:
        """``has_tls``: without it the ports are plain, and tokens are asked for all the same."""
        self.secret = secrets.token_hex(32)
        """By which tokens are signed."""
        secret_file = directory / "tokens.secret"
        secret_file.touch(mode=0o600)
        secret_file.write_text(self.secret + "\n")
        auth = make_certificates(directory / "certificates") if has_tls else Auth()
        self.tls = Tls(ca=auth.tls.ca_file) if auth.tls is not None else None
        auth = auth.model_copy(
            update={"tokens": (TokenIssuerSettings(secret_file=secret_file),), "super_admins": (ROOT,)}
        )
        super().__init__(size, directory, auth=auth, credentials=self.credentials_of(ROOT), **settings)

    def token_of(self, name: str) -> str:
        return create_token("sava", Principal("user", name), HOUR_S, self.secret.encode())

    def credentials_of(self, name: str) -> Credentials:
        return Credentials(tls=self.tls, token=self.token_of(name))

    def client_of(self, name: str, *, timeout: float = PATIENCE_S) -> Client:
        urls = [broker.client_url for broker in self.brokers]
        return Client(urls, tls=self.tls, token=self.token_of(name), timeout=timeout)

    def admin_of(self, name: str, *, broker: int = 0) -> AdminClient:
        return AdminClient(self.brokers[broker].admin, self.credentials_of(name))

    async def bind(self, name: str, role: str, *, namespace: str = "", topic: str = "") -> None:
        """Give a user a role, and wait until every broker knows it."""
        scope = "topic" if topic else "namespace" if namespace else "cluster"
        binding = pb.Binding(principal=f"user:{name}", role=role, scope=scope, resource=topic or namespace)
        client = self.running[0].client
        made = await client.call(client.security.CreateBinding, binding)
        await self._known("ListBindings", pb.ListBindingsRequest(), lambda answer: made in answer.bindings)

    async def limit(self, quota: pb.Quota) -> None:
        client = self.running[0].client
        made = await client.call(client.security.SetQuota, quota)
        await self._known("ListQuotas", pb.ListQuotasRequest(), lambda answer: made in answer.quotas)

    async def _known(self, method: str, request: Any, is_known: Any) -> None:
        for broker in self.running:

            async def knows(broker: BrokerProcess = broker) -> bool:
                answer = await broker.client.call(getattr(broker.client.security, method), request)
                return bool(is_known(answer))

            await until(knows, f"broker {broker.number} knows the change")
