"""Judgements about what brokers keep and do: the object store, topics without a broker, subscriptions without
progress, ledgers that cannot be recovered, pipelines without a runner, topics that are not replicated."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from sava.cluster.pipelines import PipelineState
from sava.doctor.observation import MAX_TOPICS, ORDER, Finding, Level, Observation, error, note, warning
from sava.ledger.protocol import Fragment, StorageId
from sava.ledger.protocol.record import recovery_quorum, suffices
from sava.proto import ledgers_pb2, pipelines_pb2, topics_admin_pb2
from sava.replication.matrix import CONNECTED, LinkState

MAX_NAMED: Final = 20
"""Findings of one kind."""


def check_store(seen: Observation) -> Iterator[Finding]:
    probes = [(broker.name, broker.store) for broker in seen.brokers if broker.store is not None]
    for name, probe in probes:
        if not probe.reachable:
            yield error(
                "object store",
                name,
                f"cannot use {probe.url}: {probe.error}",
                "see that the store runs, that this broker reaches it, and that its credentials are right; "
                "until then the journal grows, and topics of this broker do not move",
            )
        elif not probe.puts_if_absent:
            yield error(
                "object store",
                name,
                f"{probe.url} lets an object be written twice: put-if-absent does not work",
                "use a store that honours If-None-Match; two brokers could overwrite each other's segments",
            )
    stores = {probe.store_id for _, probe in probes if probe.store_id}
    if len(stores) > 1:
        yield warning(
            "object store",
            "cluster",
            f"brokers use {len(stores)} different stores, and topics move only between those that share one",
            "give all brokers the same storage.url; a file:// directory must be a shared one",
        )


def check_topics(seen: Observation) -> Iterator[Finding]:
    if seen.topics_error:
        yield error(
            "topics",
            "cluster",
            f"topics cannot be listed: {seen.topics_error}",
            "see what is said of the leader",
        )
        return
    yield from _bounded(list(_unserved(seen)), "topics", "`sava topics list` shows their state")
    if len(seen.topics) > MAX_TOPICS:
        yield note(
            "topics",
            "cluster",
            f"of {len(seen.topics)} topics the subscriptions of {MAX_TOPICS} were looked at",
        )
    for broker in seen.brokers:
        leftovers = broker.examination.leftover_topic_ids if broker.examination is not None else ()
        if leftovers:
            yield note(
                "orphaned tails",
                broker.name,
                f"its journal has messages of {len(leftovers)} topics that it does not serve, such as that "
                f"with id {leftovers[0]}, and is not trimmed below them",
                "it lets go of them by itself, or takes the topics up again; if that lasts, look for topics "
                "that are not served",
            )


def _bounded(found: list[Finding], check: str, where: str) -> Iterator[Finding]:
    """The worst of them, and how many there are beside."""
    found.sort(key=lambda finding: ORDER.index(finding.level))
    yield from found[:MAX_NAMED]
    if left := found[MAX_NAMED:]:
        yield Finding(left[0].level, check, "cluster", f"{len(left)} further findings of this kind", where)


def _unserved(seen: Observation) -> Iterator[Finding]:
    """Topics of which the same is to be said are one finding: those of a dead broker have one cause."""
    said: dict[tuple[Level, str, str, str], list[str]] = {}
    for topic in seen.topics:
        finding = None if topic.partitions else _unserved_topic(seen, topic)
        if finding is not None:
            said.setdefault(finding, []).append(topic.name)
    for (level, check, text, remedy), names in said.items():
        subject = names[0] if len(names) == 1 else f"{len(names)} topics (for example {names[0]})"
        yield Finding(level, check, subject, text, remedy)


def _unserved_topic(
    seen: Observation, topic: topics_admin_pb2.TopicSummary
) -> tuple[Level, str, str, str] | None:
    """How bad, of which check, what, and the way out."""
    first, second = seen.first.get(topic.name), seen.second.get(topic.name)
    reason = f": {second.reason}" if second is not None and second.reason else ""
    if topic.state == "orphan":
        text = f"the owner, broker {topic.broker_id}, is gone, and no broker has taken over yet{reason}"
        return Level.ERROR, "orphaned tails", text, _way_on(seen, topic.broker_id)
    if topic.state == "unassigned" or (topic.state == "sealed" and not _has_takers(seen)):
        remedy = "activate a broker (`sava brokers activate`), or start one more"
        return Level.ERROR, "topics", f"without a broker{reason}", remedy
    if topic.state in ("moving", "sealed") and _stays(first, second):
        return (
            Level.WARNING,
            "topics",
            f"has been {topic.state} for {seen.waited_s:.0f} s at least{reason}",
            "a move has a deadline and is taken back after it; if it stays so, look into the log of the "
            "broker that leads",
        )
    return None


def _has_takers(seen: Observation) -> bool:
    return any(broker.listed.status == "active" for broker in seen.brokers)


def _way_on(seen: Observation, owner: int) -> str:
    """For a topic whose owner is gone: what was in no segment is on the mirrors of the owner's journal."""
    for ledger in waiting(seen):
        if ledger.broker_id == owner:
            return (
                f"its last messages are in ledger {name_of(ledger)}, which waits for disks that "
                f"are gone: start broker {owner} or one of its mirrors again, with its disk; if they are "
                f"lost for good, {give_up(ledger)}"
            )
    for ledger in seen.ledgers:
        if ledger.broker_id == owner and ledger.error:
            return (
                f"what was in no segment yet is in ledger {name_of(ledger)}, and cannot be "
                f"stored: {ledger.error}; mend that, and the topic continues on another broker by itself"
            )
    if any(broker.store is not None and not broker.store.reachable for broker in seen.brokers):
        return "mend the object store first: the topic continues when all that was in no segment is stored"
    return (
        "wait some seconds: another broker takes over once the owner's journal is recovered from the "
        f"mirrors; if it stays so, `sava ledgers list` shows what becomes of the ledgers of {owner}"
    )


def _stays(
    first: topics_admin_pb2.TopicDescription | None, second: topics_admin_pb2.TopicDescription | None
) -> bool:
    return (
        first is not None
        and second is not None
        and (first.state, first.epoch) == (second.state, second.epoch)
    )


def check_subscriptions(seen: Observation) -> Iterator[Finding]:
    if seen.topics_error:
        yield note("subscriptions", "cluster", "not known: topics cannot be listed")
    wanted = [topic.name for topic in seen.topics if not topic.partitions][:MAX_TOPICS]
    missed = [name for name in wanted if name not in seen.second]
    if missed:
        yield note(
            "subscriptions",
            "cluster",
            f"no status for {len(missed)} of {len(wanted)} topics (for example {missed[0]})",
        )
    yield from _bounded(
        list(_lags(seen)), "subscriptions", "`sava subscriptions list TOPIC` shows their state"
    )


def _lags(seen: Observation) -> Iterator[Finding]:
    for name, later in seen.second.items():
        earlier = seen.first.get(name)
        known = {each.subscription: each for each in earlier.subscriptions} if earlier is not None else {}
        for now in later.subscriptions:
            yield from _lag(name, known.get(now.subscription), now, seen.waited_s)


def _lag(
    topic: str,
    before: topics_admin_pb2.SubscriptionDescription | None,
    now: topics_admin_pb2.SubscriptionDescription,
    waited_s: float,
) -> Iterator[Finding]:
    subject = f"{now.subscription} of {topic}"
    if now.error:
        yield error(
            "subscriptions",
            subject,
            f"has failed: {now.error}",
            "mend what the error names (`sava storage verify` finds objects that are missing or damaged); "
            "it is tried again by itself, and reported until a consumer gets messages",
        )
    elif now.blocked:
        yield error(
            "subscriptions",
            subject,
            f"is blocked by a message that failed too often, {now.backlog} messages wait",
            "mend its consumer, or let such messages go to a dead-letter topic: "
            f"`sava subscriptions configure {topic} {now.subscription} --dead-letter dead_letter`",
        )
    elif now.type == "link":
        return  # it has no consumers; what replication says of itself tells whether it gets on
    elif before is None or not before.backlog or now.acked > before.acked or now.backlog < before.backlog:
        return  # it gets on, or there is nothing to do
    elif now.consumers:
        yield warning(
            "subscriptions",
            subject,
            f"{now.backlog} messages wait, {now.unacked} of them with {len(now.consumers)} consumers, and "
            f"none was acked within {waited_s:.1f} s{_again(before, now)}",
            "its consumers do not get on, or do not ack; look at them, or restart them",
        )
    else:
        yield note(
            "subscriptions",
            subject,
            f"{now.backlog} messages wait, and it has no consumer",
            "start a consumer; or delete the subscription, which keeps messages from being deleted",
        )


def _again(
    before: topics_admin_pb2.SubscriptionDescription, now: topics_admin_pb2.SubscriptionDescription
) -> str:
    """What came back meanwhile: consumers that fail, rather than slow ones."""
    if (late := now.timed_out - before.timed_out) > 0:
        return f"; {late} came back because their ack timeout was over"
    if (again := now.redelivered - before.redelivered) > 0:
        return f"; {again} were given back and delivered again"
    return ""


# -- ledgers -----------------------------------------------------------------

# The cluster recovers the ledger of a broker that is gone from the disks that hold it. With too few of them
# it does not know how far the ledger goes, and its topics wait for an operator.


def name_of(ledger: ledgers_pb2.Ledger) -> str:
    """As `sava ledgers list` writes it."""
    return f"{ledger.broker_id}/{ledger.incarnation}"


def waiting(seen: Observation) -> Iterator[ledgers_pb2.Ledger]:
    """Those that cannot be recovered, or read, with the disks that are there."""
    for ledger in seen.ledgers:
        if ledger.state == "closed" and not any(
            member.broker_id for member in ledger.members if member.is_owner or member.is_holder
        ):
            yield ledger
        # While it is recovered no broker writes it, even if its broker is back with the disk.
        is_written = ledger.state == "open" and any(
            member.is_owner and member.broker_id for member in ledger.members
        )
        if ledger.state != "closed" and not is_written and ledger.fragments:
            present = {StorageId(member.storage_id) for member in ledger.members if member.broker_id}
            if not suffices(_end_of(ledger), present):
                yield ledger


def check_ledgers(seen: Observation) -> Iterator[Finding]:
    if seen.ledgers_error:
        yield note("ledgers", "cluster", f"not known: ledgers cannot be listed: {seen.ledgers_error}")
    for ledger in waiting(seen):
        if ledger.state == "closed":
            yield _without_copies(ledger)
            continue
        end = _end_of(ledger)
        silent = [
            member.storage_id[:8]
            for member in ledger.members
            if not member.broker_id and member.storage_id in end.members
        ]
        present = len(end.members) - len(silent)
        yield error(
            "ledgers",
            f"ledger {name_of(ledger)}",
            f"its broker is or was gone, and of the {len(end.members)} disks that hold its end {present} are "
            f"there (not {', '.join(silent)}): what was acknowledged last is unknown, and topics whose "
            "last messages are in it wait",
            f"start brokers with these disks again, until {recovery_quorum(end)} are there; if the disks are "
            f"lost for good, {give_up(ledger)}",
        )


def _without_copies(ledger: ledgers_pb2.Ledger) -> Finding:
    held = [member.storage_id[:8] for member in ledger.members if member.is_owner or member.is_holder]
    return error(
        "ledgers",
        f"ledger {name_of(ledger)}",
        f"it is closed, and none of the disks that hold all of it is there ({', '.join(held)}): topics whose "
        "last messages are in it and in no segment wait",
        f"start a broker with one of these disks again; if they are lost for good, {give_up(ledger)}",
    )


def give_up(ledger: ledgers_pb2.Ledger) -> str:
    return (
        f"`sava ledgers recover {name_of(ledger)}` shows what would be lost, and gives it up with --yes; "
        "then the topics continue"
    )


def _end_of(ledger: ledgers_pb2.Ledger) -> Fragment:
    """Only who holds the end knows how far it goes."""
    last = ledger.fragments[-1]
    return Fragment(last.start, tuple(map(StorageId, last.storage_ids)), last.ack_quorum)


# -- pipelines and replication ------------------------------------------------

RUNNER: Final = "start one: `sava pipelines run`, or another beside those that run"
STATUS: Final = "`sava replication status` shows all of them"
REMEDIES: Final[dict[str, str]] = {
    LinkState.WAITING_RUNNER: RUNNER,
    LinkState.PAUSED: "`sava pipelines resume replicate-{remote}`",
    LinkState.STARTING: "wait some seconds; if it lasts, look into the log of its runner",
    LinkState.REMOTE_DELETED: "`sava replication recreate {topic} --remote {remote}`, or clear the policy",
    LinkState.DATA_LOSS: "`sava replication recreate {topic} --remote {remote}` continues with what is left",
    LinkState.UNREACHABLE: (
        "`sava remotes test {remote}` says whether brokers reach it; so must the machine of the runner"
    ),
    LinkState.SOURCE_UNREACHABLE: "see what is said of topics; the runner must reach all brokers",
    LinkState.DENIED: "give the token of remote {remote} the permission, or its file another token",
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
        elif status.state == PipelineState.FAILED:
            yield error(
                "pipelines",
                name,
                f"its runner refuses it: {status.last_error}",
                "change the pipeline, or start its runner with what the error names",
            )
        elif status.state == PipelineState.WAITING and not _is_link(pipeline):
            yield error("pipelines", name, "no runner has it", RUNNER)


def _is_link(pipeline: pipelines_pb2.Pipeline) -> bool:
    """A pipeline that copies a topic; what is not copied is said of the topic."""
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
