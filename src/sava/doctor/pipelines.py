"""Judgements about pipelines: whether somebody runs them, and whether topics are copied to other clusters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from sava.cluster.pipeline_records import PipelineState
from sava.doctor.findings import Finding, Level, error, note
from sava.doctor.observation import Observation
from sava.proto import pipelines_pb2 as pb
from sava.replication.matrix import CONNECTED, LinkState

RUNNER: Final = "start one: `sava pipelines run`, or another beside those that run"
STATUS: Final = "`sava replication status` shows all of them"
REMEDIES: Final[dict[str, str]] = {
    LinkState.WAITING_RUNNER: RUNNER,
    LinkState.PAUSED: "`sava pipelines resume replicate-{remote}`",
    LinkState.STARTING: "wait some seconds; if it lasts, look into the log of its runner",
    LinkState.REMOTE_DELETED: "`sava replication recreate {topic} --remote {remote}`, or clear the policy",
    LinkState.DATA_LOSS: "`sava replication recreate {topic} --remote {remote}` goes on with what is left",
    LinkState.UNREACHABLE: (
        "`sava remotes test {remote}` says whether brokers reach it; so must the machine of the runner"
    ),
    LinkState.SOURCE_UNREACHABLE: "see what is said of topics; the runner must reach all brokers",
    LinkState.DENIED: "give the token of the remote the permission (`sava remotes add {remote} --token …`)",
}
"""By state; where there is none, the reason says it."""
LEVELS: Final[dict[str, Level]] = {LinkState.STARTING: Level.NOTE, LinkState.PAUSED: Level.WARNING}
"""By intention, or soon over; everything else is an error."""


def check_pipelines(seen: Observation) -> Iterator[Finding]:
    if seen.pipelines_error:
        yield note("pipelines", "cluster", f"not known: {seen.pipelines_error}")
    for pipeline in seen.pipelines:
        name, status = pipeline.spec.name, pipeline.status
        if status.state == PipelineState.FAILING:
            yield error(
                "pipelines",
                name,
                f"fails, and is begun again by itself (so far {status.restarts} times): {status.last_error}",
                "mend what the error names; the log of its runner says more",
            )
        elif status.state == PipelineState.WAITING and not _is_link(pipeline):
            yield error("pipelines", name, "no runner has it", RUNNER)


def _is_link(pipeline: pb.Pipeline) -> bool:
    """What nobody copies is said of its topics."""
    return bool(pipeline.spec.made_by)


def check_replication(seen: Observation) -> Iterator[Finding]:
    """Partitions for the same reason are one finding: a remote that is gone is gone for all of them."""
    if seen.links_error:
        yield note("replication", "cluster", f"not known: {seen.links_error}")
    stopped: dict[tuple[str, str, str], list[str]] = {}
    for topic in seen.links:
        for partition in topic.partitions:
            if partition.state not in CONNECTED:
                cause = topic.remote, partition.state, partition.reason
                stopped.setdefault(cause, []).append(topic.topic)
    for (remote, state, reason), topics in stopped.items():
        why = f": {reason}" if reason else ""
        yield Finding(
            LEVELS.get(state, Level.ERROR),
            "replication",
            f"{topics[0]} to {remote}" if len(set(topics)) == 1 else f"{len(set(topics))} topics to {remote}",
            f"{_partitions(len(topics))} not copied ({state}){why}",
            REMEDIES.get(state, STATUS).format(remote=remote, topic=topics[0]),
        )
    for topic in seen.links:
        names = sorted({name for each in topic.partitions for name in each.unsynced_subscriptions})
        if names:
            yield Finding(
                Level.WARNING,
                "replication",
                f"{topic.topic} to {topic.remote}",
                f"positions of subscriptions are not copied: {', '.join(names)}",
                STATUS,
            )


def _partitions(count: int) -> str:
    return "1 partition is" if count == 1 else f"{count} partitions are"
