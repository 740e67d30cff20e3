"""Pipelines by the admin port: whose request they are, and for whom a runner acts."""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Iterator

import pytest

from sava.api.admin.replication import PipelinesService
from sava.cluster.pipelines import MAX_SETTINGS_BYTES, PipelineInvalid, Pipelines
from sava.proto import pipelines_pb2 as pb
from sava.security import principal
from sava.security.delegation import Delegation, DelegationInvalid, verified
from sava.security.principal import Principal
from tests.support.memory_store import MemoryStore

ANN, BOB = Principal("user", "ann"), Principal("user", "bob")
SETTINGS = json.dumps({"from": {"topic": "/default/a"}, "to": {"topic": "/default/b"}})


def mac(purpose: bytes, data: bytes) -> bytes:
    return hmac.digest(b"secret", purpose + b"/" + data, hashlib.sha256)


def check(purpose: bytes, data: bytes, given: bytes) -> bool:
    return hmac.compare_digest(mac(purpose, data), given)


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    before = principal.current.set(principal.ANONYMOUS)
    yield
    principal.current.reset(before)


@pytest.fixture
def pipelines() -> Pipelines:
    return Pipelines(MemoryStore())


async def apply(service: PipelinesService, by: Principal, settings: str = SETTINGS) -> pb.Pipeline:
    before = principal.current.set(by)
    try:
        spec = pb.PipelineSpec(name="copy", kind="custom", settings=settings)
        return await service.ApplyPipeline(pb.ApplyPipelineRequest(spec=spec), None)
    finally:
        principal.current.reset(before)


async def claim(service: PipelinesService) -> pb.ClaimPipelineResponse:
    await service.JoinRunner(pb.JoinRunnerRequest(runner="a", ttl_ms=10_000, kinds=["custom"]), None)
    return await service.ClaimPipeline(pb.ClaimPipelineRequest(name="copy", runner="a"), None)


async def test_a_claim_comes_with_the_right_to_act_for_the_creator(pipelines: Pipelines) -> None:
    service = PipelinesService(pipelines, mac)
    assert (await apply(service, ANN)).created_by == "user:ann"
    granted = await claim(service)
    expected = Delegation(ANN, "copy", granted.claim)
    assert verified(granted.delegation, check, pipelines.is_delegated) == expected

    await apply(service, BOB)
    with pytest.raises(DelegationInvalid):
        verified(granted.delegation, check, pipelines.is_delegated)
    again = await claim(service)
    assert again.claim == granted.claim, "the runner keeps it"
    assert granted.revision < again.revision == (await pipelines.get("copy")).revision
    assert verified(again.delegation, check, pipelines.is_delegated).principal == BOB

    await service.LeaveRunner(pb.LeaveRunnerRequest(runner="a"), None)
    with pytest.raises(DelegationInvalid):
        verified(again.delegation, check, pipelines.is_delegated)


async def test_another_runner_gets_no_delegation(pipelines: Pipelines) -> None:
    service = PipelinesService(pipelines, mac)
    await apply(service, ANN)
    await claim(service)
    await service.JoinRunner(pb.JoinRunnerRequest(runner="b", ttl_ms=10_000, kinds=["custom"]), None)
    refused = await service.ClaimPipeline(pb.ClaimPipelineRequest(name="copy", runner="b"), None)
    assert (refused.is_granted, refused.holder, refused.delegation) == (False, "a", "")


async def test_there_is_no_delegation_where_every_caller_may_do_everything(pipelines: Pipelines) -> None:
    service = PipelinesService(pipelines)
    await apply(service, ANN)
    granted = await claim(service)
    assert granted.is_granted
    assert granted.delegation == ""


async def test_a_pipeline_of_a_policy_is_no_principals(pipelines: Pipelines) -> None:
    await pipelines.apply("copy", "replicate", {"remote": "west"}, made_by="replication")
    assert (await claim(PipelinesService(pipelines, mac))).delegation == ""


@pytest.mark.parametrize(
    "settings",
    [
        "[" * 60_000,
        '{"from": ' * 5_000 + "1" + "}" * 5_000,
        "[]",
        "{",
        json.dumps({"from": {"x": "y" * MAX_SETTINGS_BYTES}}),
        json.dumps({"from": {"token": "s3cr3t"}}),
    ],
)
async def test_settings_of_any_form_are_refused_and_not_stored(pipelines: Pipelines, settings: str) -> None:
    with pytest.raises(PipelineInvalid) as refused:
        await apply(PipelinesService(pipelines, mac), ANN, settings)
    assert len(str(refused.value)) < 500
    assert "s3cr3t" not in str(refused.value)
    assert await pipelines.list() == []
