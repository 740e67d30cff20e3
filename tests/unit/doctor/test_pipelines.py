"""What a doctor makes of pipelines, and of topics that are copied to other clusters."""

from __future__ import annotations

import pytest

from sava.doctor.observation import Level, Observation
from sava.proto import pipelines_pb2, replication_pb2
from tests.unit.doctor.sights import cluster, only, troubles


def pipeline(state: str, *, made_by: str = "", error: str = "") -> Observation:
    seen = cluster()
    seen.pipelines = [
        pipelines_pb2.Pipeline(
            spec=pipelines_pb2.PipelineSpec(name="totals", kind="custom", made_by=made_by),
            status=pipelines_pb2.PipelineStatus(state=state, last_error=error, restarts=4),
        )
    ]
    return seen


def links(*states: tuple[str, str, str]) -> Observation:
    """One partition for each topic, state and reason."""
    seen = cluster()
    seen.links = [
        replication_pb2.LinkTopic(
            topic=topic,
            remote="west",
            partitions=[replication_pb2.LinkPartition(state=state, reason=reason)],
        )
        for topic, state, reason in states
    ]
    return seen


def test_a_pipeline_that_fails_again_and_again() -> None:
    seen = pipeline("failing", error="no column total")
    only(seen, Level.ERROR, "pipelines", "(so far 4 times): no column total")


def test_a_pipeline_that_its_runner_refuses() -> None:
    seen = pipeline("failed", error="this runner does not allow function os:system")
    only(seen, Level.ERROR, "pipelines", "its runner refuses it: this runner does not allow")


def test_a_pipeline_that_nobody_runs() -> None:
    only(pipeline("waiting"), Level.ERROR, "pipelines", "no runner has it")
    assert troubles(pipeline("waiting", made_by="replication")) == []  # what it copies is told by topic


@pytest.mark.parametrize("state", ["running", "starting", "paused", "stopped", "deleting"])
def test_a_pipeline_that_needs_nobody(state: str) -> None:
    assert troubles(pipeline(state)) == []


def test_topics_that_stand_still_for_one_reason_are_one_finding() -> None:
    seen = links(
        ("/default/a", "unreachable", "refused"),
        ("/default/b", "unreachable", "refused"),
        ("/default/c", "active", ""),
        ("/default/d", "idle", ""),
    )
    only(seen, Level.ERROR, "replication", "2 partitions are not copied (unreachable): refused")
    assert troubles(seen)[0].subject == "2 topics to west"
    assert "`sava remotes test west`" in troubles(seen)[0].remedy


def test_a_link_that_nobody_runs_says_how_to_run_it() -> None:
    seen = links(("/default/a", "waiting_runner", "no runner has pipeline replicate-west"))
    only(seen, Level.ERROR, "replication", "1 partition is not copied")
    assert "`sava pipelines run`" in troubles(seen)[0].remedy


@pytest.mark.parametrize(("state", "level"), [("starting", Level.NOTE), ("paused", Level.WARNING)])
def test_a_link_that_begins_or_was_paused_has_not_failed(state: str, level: Level) -> None:
    only(links(("/default/a", state, "x")), level, "replication", f"({state})")


def test_a_state_that_only_a_newer_broker_knows() -> None:
    only(links(("/default/a", "sleeping", "it is night")), Level.ERROR, "replication", "it is night")


def test_subscriptions_whose_positions_stay_here() -> None:
    seen = links(("/default/a", "active", ""))
    seen.links[0].partitions[0].unsynced_subscriptions.append("billing")
    only(seen, Level.WARNING, "replication", "billing")
