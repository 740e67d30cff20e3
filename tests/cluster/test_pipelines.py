"""A runner and its pipelines while brokers come and go."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from sava.pipeline.runner.control import AdminRunnerControl
from sava.pipeline.runner.runner import PipelineRunner
from sava.proto import pipelines_pb2 as pb
from tests.support.brokers import Brokers
from tests.support.waiting import until
from tests.unit.pipeline.runner.fakes import FakeKind

TTL_S = 30.0
"""Longer than an election takes on a crowded machine."""


async def test_the_death_of_the_leader_does_not_disturb_a_pipeline(tmp_path: Path) -> None:
    """The runner knows the address of the broker that dies, and finds the others by itself."""
    async with Brokers(3, tmp_path) as cluster:
        leader = await cluster.leader()
        (other, _) = [broker for broker in cluster.brokers if broker is not leader]

        async def status() -> pb.PipelineStatus:
            call, request = other.client.pipelines.ListPipelines, pb.ListPipelinesRequest()
            found: pb.ListPipelinesResponse = await other.client.call(call, request)
            return found.pipelines[0].status

        spec = pb.PipelineSpec(name="copy", kind="fake", settings="{}")
        request = pb.ApplyPipelineRequest(spec=spec)
        await other.client.call(other.client.pipelines.ApplyPipeline, request)
        kind = FakeKind()
        control = AdminRunnerControl(leader.client.target, "a", kinds=("fake",), ttl_s=TTL_S)
        runner = PipelineRunner("a", control, {"fake": kind})

        def work() -> None:
            while not runner.is_done:
                runner.step()
                time.sleep(0.05)

        thread = threading.Thread(target=work)
        thread.start()
        try:

            async def is_running() -> bool:
                return (await status()).state == "running"

            await until(is_running, "it is running")
            claim = (await status()).claim
            leader.kill()
            killed_ms = time.time_ns() // 1_000_000

            async def is_reported() -> bool:
                return (await status()).reported_ms > killed_ms

            await until(is_reported, "it is reported to the others")
            assert (await status()).claim == claim
            assert len(kind.jobs) == 1, "and went on all the time"
        finally:
            runner.stop()
            thread.join()
            control.close()
        assert (await status()).state == "waiting"
