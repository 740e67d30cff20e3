"""Judgements about what brokers keep: topics that nobody serves, subscriptions that do not get on, the object
store behind all of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from sava.doctor import journals
from sava.doctor.findings import ORDER, Finding, Level, error, note, warning
from sava.doctor.observation import MAX_TOPICS, Observation
from sava.proto import topics_admin_pb2 as pb

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
        subject = names[0] if len(names) == 1 else f"{len(names)} topics, such as {names[0]}"
        yield Finding(level, check, subject, text, remedy)


def _unserved_topic(seen: Observation, topic: pb.TopicSummary) -> tuple[Level, str, str, str] | None:
    """How bad, of which check, what, and the way out."""
    first, second = seen.first.get(topic.name), seen.second.get(topic.name)
    reason = f": {second.reason}" if second is not None and second.reason else ""
    if topic.state == "orphan":
        text = f"the owner, broker {topic.broker_id}, is gone, and nobody has taken over yet{reason}"
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
    for journal in journals.waiting(seen):
        if journal.broker_id == owner:
            return (
                f"its last messages are in journal {journals.name_of(journal)}, which waits for disks that "
                f"are gone: start broker {owner} or one of its mirrors again, with its disk; if they are "
                f"lost for good, {journals.give_up(journal)}"
            )
    for journal in seen.journals:
        if journal.broker_id == owner and journal.error:
            return (
                f"what was in no segment yet is in journal {journals.name_of(journal)}, and cannot be "
                f"stored: {journal.error}; mend that, and it goes on elsewhere by itself"
            )
    if any(broker.store is not None and not broker.store.reachable for broker in seen.brokers):
        return "mend the object store first: what was in no segment yet has to be stored before it goes on"
    return (
        "wait some seconds: it goes on elsewhere as soon as its owner's journal is recovered from the "
        f"mirrors; if it stays so, `sava journals list` shows what becomes of the journals of {owner}"
    )


def _stays(first: pb.TopicDescription | None, second: pb.TopicDescription | None) -> bool:
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
            f"not known for {len(missed)} of {len(wanted)} topics, such as {missed[0]}: nobody tells",
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
    topic: str, before: pb.SubscriptionDescription | None, now: pb.SubscriptionDescription, waited_s: float
) -> Iterator[Finding]:
    subject = f"{now.subscription} of {topic}"
    if now.error:
        yield error(
            "subscriptions",
            subject,
            f"has failed: {now.error}",
            "mend what the error names (`sava storage verify` finds objects that are missing or damaged); "
            "it is tried again by itself, and told of until a consumer gets messages",
        )
    elif now.blocked:
        yield error(
            "subscriptions",
            subject,
            f"is blocked by a message that failed too often, {now.backlog} messages wait",
            "mend its consumer, or let such messages go to a dead-letter topic: "
            f"`sava subscriptions configure {topic} {now.subscription} --poison dead_letter`",
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


def _again(before: pb.SubscriptionDescription, now: pb.SubscriptionDescription) -> str:
    """What came back meanwhile tells those that fail from those that are slow."""
    if (late := now.timed_out - before.timed_out) > 0:
        return f"; {late} came back because their ack timeout was over"
    if (again := now.redelivered - before.redelivered) > 0:
        return f"; {again} were given back and delivered again"
    return ""
