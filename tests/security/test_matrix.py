"""Every role makes every call, in its own namespace and in another one, at both brokers: by one of them the
call is answered, by the other it is forwarded. What must be denied is denied, and nothing else is.

What is expected is worked out here from the roles and from what a call is about, and not by the Authorizer.
Calls that are allowed mostly fail, for they name nothing that could be changed; how, is not looked at.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

from google.protobuf.message import Message
from grpc import aio

from sava.security.permissions import ROLES, TABLE, CallAccess, Need, On
from tests.security.secured import RPCS, Secured, secured
from tests.support.brokers import BrokerProcess

OWN, FOREIGN = "own", "foreign"
PARALLEL: Final = 24
DENIED: Final = "PERMISSION_DENIED"
GONE: Final = frozenset(("DeleteTopic", "DeleteNamespace", "Unsubscribe", "DeleteSubscription"))
"""Calls that would take away what others need: they name what is not there."""


class Case(NamedTuple):
    role: str
    scope: str
    """What the role is bound to: the cluster, or the namespace ``own``."""
    path: str
    namespace: str
    """What the call is about, where it is about one."""
    broker: int

    @property
    def who(self) -> str:
        return f"user:{self.role}-{self.scope}"


def cases() -> Iterator[Case]:
    for path, row in TABLE.items():
        is_about_one = any(need.field for need in row.needs)
        for role in ROLES:
            for scope in ("cluster", OWN):
                for namespace in (OWN, FOREIGN) if is_about_one and scope == OWN else (OWN,):
                    for broker in (0, 1):
                        yield Case(role, scope, path, namespace, broker)


def is_denied(case: Case) -> bool:
    row = TABLE[case.path]
    if row.access is CallAccess.BROKERS:
        return True
    return not all(_is_met(need, case) for need in row.needs if not need.is_optional or need.on is On.WITHIN)


def _is_met(need: Need, case: Case) -> bool:
    if ROLES[case.role].isdisjoint(need.any_of):
        return False
    if case.scope == "cluster" or need.on is On.ANYWHERE:
        return True
    return need.on is not On.CLUSTER and case.namespace == OWN


def request_for(case: Case) -> Message:
    """About a topic, or the namespace, of the case."""
    rpc, row = RPCS[case.path], TABLE[case.path]
    request = rpc.request()
    topic = "none" if case.path.rpartition("/")[2] in GONE else "there"
    for need in row.needs:
        if need.when:
            setattr(request, need.when, True)
        if not need.field or (need.is_optional and need.on is On.TOPIC):
            continue
        text = {
            On.TOPIC: f"/{case.namespace}/{topic}",
            On.SCOPE: f"/{case.namespace}/{topic}",
            On.SUBJECT: f"{case.namespace}.events",
        }.get(need.on, case.namespace)
        _fill(request, need.field.split("."), text)
    for name, value in (("dry_run", True), ("check_only", True), ("skip_checks", True)):
        if name in rpc.request.DESCRIPTOR.fields_by_name:
            setattr(request, name, value)
    return request


def _fill(message: Any, path: list[str], text: str) -> None:
    name, *rest = path
    field = message.DESCRIPTOR.fields_by_name[name]
    if not rest:
        if field.is_repeated:
            getattr(message, name).append(text)
        else:
            setattr(message, name, text)
        return
    inner = getattr(message, name)
    _fill(inner.add() if field.is_repeated else inner, rest, text)


async def test_every_role_every_call(tmp_path: Path) -> None:
    async with secured(2, tmp_path, auto_create_topics=False) as cluster:
        await cluster.create_namespace(OWN)
        await cluster.create_namespace(FOREIGN)
        for namespace in (OWN, FOREIGN):
            await cluster.create(f"/{namespace}/there")
        for role in ROLES:
            await cluster.bind(f"user:{role}-cluster", role)
            await cluster.bind(f"user:{role}-{OWN}", role, namespace=OWN)
        wrong = await _made(cluster, list(cases()))
        assert not wrong, f"{len(wrong)} calls ended otherwise, such as {wrong[:10]}"
        owner = await cluster.owner("/own/there")
        assert owner in cluster.brokers
        await _broker_only(cluster, owner)


async def _made(cluster: Secured, all_cases: list[Case]) -> list[tuple[Case, str]]:
    """Those whose end is not the expected one."""
    headers = {case.who: cluster.headers(case.who) for case in all_cases}
    waiting, wrong = iter(all_cases), []

    async def take_turns() -> None:
        for case in waiting:
            broker = cluster.brokers[case.broker]
            call = cluster.call_with(broker, headers[case.who], case.path, request_for(case))
            status = await _status(call)
            if (status == DENIED) is not is_denied(case):
                wrong.append((case, status))

    await asyncio.gather(*(take_turns() for _ in range(PARALLEL)))
    return wrong


async def _status(call: Any) -> str:
    try:
        await call
    except aio.AioRpcError as error:
        trailing: Any = error.trailing_metadata() or ()
        # Danube's clients get PERMISSION_DENIED also where another client has what they ask for.
        named = dict(trailing).get("sava-code", "permission_denied") == "permission_denied"
        return error.code().name if named or error.code().name != DENIED else "OTHER"
    return "OK"


async def _broker_only(cluster: Secured, broker: BrokerProcess) -> None:
    """Not for the administrator either."""
    for path, row in TABLE.items():
        if row.access is CallAccess.BROKERS:
            assert await cluster.status(broker, "user:root", path, RPCS[path].request()) == DENIED
