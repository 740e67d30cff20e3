"""What must hold of a history, whatever was done to the cluster. Pure: events in, findings out.

=============  ==============================================================================================
oracle         what it says
=============  ==============================================================================================
loss           an acknowledged message is in its topic, at the offset that was acknowledged
phantom        what is in a topic was sent; what failed for certain is not in it
double         no message is in a topic twice (a producer without a name may repeat one)
order          one producer's messages are in the order of their numbers
hole           offsets begin with 0 and have no hole
fencing        once a later producer of a name has a message in the topic, an earlier one gets none in
delivery       every subscription received every message, with its own payload
skip           an exclusive or failover subscription never passes a message over
key order      nor does a key-shared one within a key
copy           the other cluster has each message once, in the same order
register       the answers of the metadata store are linearizable, key by key, and every key is decided
revision       revisions follow real time over all keys
watch          a watcher sees each change once, in order, and nothing else
recovery       the cluster was whole again after each fault
exit           no broker ended by itself
=============  ==============================================================================================
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Sequence

import msgspec

from tests.torture import linearizability
from tests.torture.history import (
    Acked,
    Called,
    Caught,
    Event,
    Exited,
    Fault,
    Received,
    Stored,
    Unsent,
    Watched,
    Watching,
)

MOST = 20
"""Findings of one oracle about one thing; more of the same tell nothing new."""
ORDERED = ("exclusive", "failover")
KEYED = "key_shared"
REPEATS = "danube"
"""Producers whose names begin so have no memory across reconnects: they may store a message twice."""


class Finding(msgspec.Struct, frozen=True):
    oracle: str
    where: str
    what: str

    def __str__(self) -> str:
        return f"{self.oracle}: {self.where}: {self.what}"


class History:
    """Events by kind and topic."""

    def __init__(self, events: Iterable[Event]) -> None:
        self.acked: dict[str, list[Acked]] = defaultdict(list)
        self.unsent: dict[str, list[Unsent]] = defaultdict(list)
        self.stored: dict[str, list[Stored]] = defaultdict(list)
        self.copied: dict[str, list[Stored]] = defaultdict(list)
        self.received: dict[tuple[str, str], list[Received]] = defaultdict(list)
        self.calls: list[Called] = []
        self.watches: dict[str, list[Watching | Watched | Caught]] = defaultdict(list)
        self.faults: list[Fault] = []
        self.exits: list[Exited] = []
        for event in events:
            self._take(event)

    def _take(self, event: Event) -> None:
        match event:
            case Acked():
                self.acked[event.topic].append(event)
            case Unsent():
                self.unsent[event.topic].append(event)
            case Stored(copy=""):
                self.stored[event.topic].append(event)
            case Stored():
                self.copied[event.topic].append(event)
            case Received():
                self.received[event.topic, event.subscription].append(event)
            case Called():
                self.calls.append(event)
            case Watching() | Watched() | Caught():
                self.watches[event.watcher].append(event)
            case Fault():
                self.faults.append(event)
            case Exited():
                self.exits.append(event)


class Checked(msgspec.Struct, frozen=True):
    """How much one oracle had to look at. Without it, an oracle that got no history looks like one that has
    found nothing."""

    oracle: str
    count: int
    what: str

    def __str__(self) -> str:
        return f"{self.oracle:<10} {self.count:>8} {self.what}"


class Judgement(msgspec.Struct, frozen=True):
    findings: list[Finding]
    checked: list[Checked]
    """One for each oracle, in the order of the table above."""

    def idle(self, but: Container[str] = ()) -> list[Finding]:
        """Oracles that had nothing to check, which is a finding of its own."""
        return [
            Finding("idle", each.oracle, "had nothing to check")
            for each in self.checked
            if not each.count and each.oracle not in but
        ]


def judge(
    history: History,
    *,
    subscriptions: Iterable[tuple[str, str]] = (),
    copies: Iterable[str] = (),
    limit_s: float = 10.0,
) -> Judgement:
    """``subscriptions`` are those, by topic and name, that must have received everything; ``copies`` the
    topics that another cluster must have. The search for an order has ``limit_s`` for each key."""
    findings: list[Finding] = []
    topics, copies = sorted({*history.acked, *history.stored}), sorted(copies)
    subscriptions = sorted({*history.received, *subscriptions})
    for topic in topics:
        found: dict[str, int] = defaultdict(int)
        for finding in _check_log(topic, history):
            found[finding.oracle] += 1
            if found[finding.oracle] <= MOST:
                findings.append(finding)
    for topic, subscription in subscriptions:
        findings += _some(_check_delivery(topic, subscription, history))
    for topic in copies:
        findings += _some(_check_copy(topic, history))
    verdicts = linearizability.check(history.calls, limit_s=limit_s)
    findings += _some(_check_register(history.calls, verdicts))
    findings += _some(check_watches(history.watches, history.calls))
    for fault in history.faults:
        if not fault.recovered:
            where = f"{fault.kind} at {fault.where}"
            findings.append(Finding("recovery", where, "the cluster was not whole again in time"))
    for exit_ in history.exits:
        if not exit_.excuse:
            findings.append(Finding("exit", exit_.host, f"ended by itself with code {exit_.code}"))
    return Judgement(
        findings, [*_count_messages(history, topics, subscriptions, copies), *_count_rest(history, verdicts)]
    )


def _count_messages(
    history: History, topics: Sequence[str], subscriptions: Sequence[tuple[str, str]], copies: Sequence[str]
) -> list[Checked]:
    stored = [each for topic in topics for each in history.stored[topic]]
    by_topic = ", ".join(f"{topic.rpartition('/')[2]} {len(history.acked[topic])}" for topic in topics)
    producers = {(each.topic, each.producer) for each in stored}
    named = [each for each in stored if "#" in each.producer]
    heirs = {(each.topic, each.producer) for each in named}
    got = {name: len(history.received[topic, name]) for topic, name in subscriptions}
    in_order = [len(history.received[topic, name]) for topic, name in subscriptions if name in ORDERED]
    keyed = [each for topic, name in subscriptions if name == KEYED for each in history.received[topic, name]]
    by_subscription = ", ".join(f"{name} {count}" for name, count in got.items())
    copied = sum(len(history.copied[topic]) for topic in copies)
    return [
        Checked("loss", sum(len(history.acked[topic]) for topic in topics), f"acknowledged: {by_topic}"),
        Checked("phantom", len(stored), f"stored messages of {len(topics)} topics"),
        Checked("double", len(stored), f"stored messages of {len(producers)} producers"),
        Checked("order", len(stored), f"stored messages of {len(producers)} producers"),
        Checked("hole", len(stored), f"offsets of {len(topics)} topics"),
        # One producer alone cannot be overtaken.
        Checked(
            "fencing", len(named) if len(heirs) > 1 else 0, f"messages of {len(heirs)} producers of one name"
        ),
        Checked("delivery", sum(got.values()), f"deliveries: {by_subscription}"),
        Checked("skip", sum(in_order), f"deliveries of {len(in_order)} subscriptions"),
        Checked("key order", len(keyed), f"deliveries of {len({each.key for each in keyed})} keys"),
        Checked("copy", copied, f"copied messages of {len(copies)} topics"),
    ]


def _count_rest(history: History, verdicts: Sequence[linearizability.Verdict]) -> list[Checked]:
    undecided = sum(not verdict.is_decided for verdict in verdicts)
    unknown = sum(call.outcome == "unknown" for call in history.calls)
    answered = sum(call.outcome in ("ok", "refused") for call in history.calls)
    seen = [event for events in history.watches.values() for event in events if isinstance(event, Watched)]
    changes = len({event.revision for event in seen})
    calls = f"calls of {len(verdicts)} keys, {undecided} keys undecided, {unknown} outcomes unknown"
    return [
        Checked("register", len(history.calls), calls),
        Checked("revision", answered, "answers"),
        Checked("watch", len(seen), f"events of {changes} changes, {len(history.watches)} watchers"),
        Checked("recovery", len(history.faults), "rounds of faults"),
        Checked("exit", len(history.exits), "brokers that ended by themselves"),
    ]


def _some(findings: Iterator[Finding]) -> list[Finding]:
    return [finding for _, finding in zip(range(MOST), findings, strict=False)]


# -- topics --------------------------------------------------------------------------------------------------


def _check_log(topic: str, history: History) -> Iterator[Finding]:
    stored = sorted(history.stored[topic], key=lambda each: each.offset)
    acked, unsent = history.acked[topic], history.unsent[topic]
    for expected, each in enumerate(stored):
        if each.offset != expected:
            yield Finding("hole", topic, f"offset {each.offset} where {expected} is due")
            break
    at = {each.offset: (each.producer, each.number) for each in stored}
    there = set(at.values())
    for ack in acked:
        message = (ack.producer, ack.number)
        if ack.offset < 0 and message not in there:
            yield Finding("loss", topic, f"{message} was acknowledged and is not there")
        elif ack.offset >= 0 and at.get(ack.offset) != message:
            yield Finding("loss", topic, f"{message} was acknowledged at {ack.offset}: {at.get(ack.offset)}")
    known = {(each.producer, each.number) for each in acked}
    known |= {(each.producer, each.number) for each in unsent if each.is_unknown}
    for each in stored:
        if (each.producer, each.number) not in known:
            yield Finding("phantom", topic, f"{each} was not sent, or failed for certain")
    yield from _check_sequences(topic, stored)


def _check_sequences(topic: str, stored: Sequence[Stored]) -> Iterator[Finding]:
    last: dict[str, int] = {}
    seen: set[tuple[str, int]] = set()
    generations: dict[str, int] = {}
    for each in stored:
        message = (each.producer, each.number)
        if not each.producer.startswith(REPEATS):
            if message in seen:
                yield Finding("double", topic, f"{message} again at offset {each.offset}")
            elif each.number <= last.get(each.producer, -1):
                yield Finding("order", topic, f"{message} at {each.offset} after {last[each.producer]}")
        seen.add(message)
        last[each.producer] = max(each.number, last.get(each.producer, -1))
        name, mark, generation = each.producer.partition("#")
        if mark:
            newest = generations.setdefault(name, int(generation))
            if int(generation) < newest:
                yield Finding("fencing", topic, f"{message} at {each.offset} after {name}#{newest}")
            generations[name] = max(newest, int(generation))


def _check_delivery(topic: str, subscription: str, history: History) -> Iterator[Finding]:
    where = f"{topic} {subscription}"
    received = history.received[topic, subscription]
    stored = {each.offset: each for each in history.stored[topic]}
    for each in received:
        there = stored.get(each.offset)
        if there is None or (there.producer, there.number, there.key) != (
            each.producer,
            each.number,
            each.key,
        ):
            yield Finding("delivery", where, f"{each} is {there} in the topic")
    missing = sorted(stored.keys() - {each.offset for each in received})
    if missing:
        yield Finding("delivery", where, f"{len(missing)} messages were never received: {missing[:5]}")
    if subscription in ORDERED:
        yield from _check_skips("skip", where, received, sorted(stored))
    elif subscription == KEYED:
        by_key: dict[str, list[Received]] = defaultdict(list)
        offsets: dict[str, list[int]] = defaultdict(list)
        for each in received:
            by_key[each.key].append(each)
        for offset, message in sorted(stored.items()):
            offsets[message.key].append(offset)
        for key, of_key in by_key.items():
            yield from _check_skips("key order", f"{where} key {key}", of_key, offsets[key])


def _check_skips(
    oracle: str, where: str, received: Sequence[Received], offsets: Sequence[int]
) -> Iterator[Finding]:
    """A message may come again, but none comes before all earlier ones have come once."""
    due = 0
    for each in received:
        position = bisect_left(offsets, each.offset)
        if position > due:
            yield Finding(oracle, where, f"{each.consumer} got {each.offset} before {offsets[due]}")
            return
        due = max(due, position + 1)


def _check_copy(topic: str, history: History) -> Iterator[Finding]:
    stored = sorted(history.stored[topic], key=lambda each: each.offset)
    copied = sorted(history.copied[topic], key=lambda each: each.offset)
    for number, (original, copy) in enumerate(zip(stored, copied, strict=False)):
        if (original.producer, original.number) != (copy.producer, copy.number):
            yield Finding("copy", topic, f"message {number} is {copy} instead of {original}")
            return
    if len(stored) != len(copied):
        yield Finding("copy", topic, f"{len(copied)} messages of {len(stored)}")


# -- metadata ------------------------------------------------------------------------------------------------


def _check_register(
    calls: Sequence[Called], verdicts: Sequence[linearizability.Verdict]
) -> Iterator[Finding]:
    for verdict in verdicts:
        if not verdict.is_decided or not verdict.is_linearizable:
            yield Finding("register", verdict.key, verdict.why)
    for found in linearizability.out_of_order(calls):
        yield Finding("revision", "all keys", found)


def check_watches(
    watches: dict[str, list[Watching | Watched | Caught]], calls: Sequence[Called]
) -> Iterator[Finding]:
    """Each watcher against the writes, and against what all watchers together have seen."""
    changes: dict[int, tuple[str, str | None]] = {}
    for watcher, events in watches.items():
        for event in events:
            if isinstance(event, Watched):
                change = (event.key, event.value)
                if changes.setdefault(event.revision, change) != change:
                    yield Finding("watch", watcher, f"{event} where others saw {changes[event.revision]}")
    writes = {call.value: call for call in calls if call.kind in ("put", "cas")}
    deleted = {call.key for call in calls if call.kind == "delete"}
    for call in calls:
        change = (call.key, None if call.kind == "delete" else call.value)
        is_change = call.kind != "get" and call.outcome == "ok"
        if call.kind == "delete" and call.seen is None:
            is_change = False
        if is_change and changes.get(call.revision, change) != change:
            yield Finding("watch", "all", f"{call} but watchers saw {changes[call.revision]}")
        elif is_change:
            changes[call.revision] = change
    for revision, (key, value) in sorted(changes.items()):
        author = writes.get(value) if value is not None else None
        if value is not None and (author is None or author.outcome in ("failed", "refused")):
            yield Finding("watch", key, f"revision {revision} has {value}, which had no effect: {author}")
        if value is None and key not in deleted:
            yield Finding("watch", key, f"revision {revision} is a deletion that no client asked for")
    for watcher, events in watches.items():
        yield from _check_watcher(watcher, events, changes)


def _check_watcher(
    watcher: str,
    events: Sequence[Watching | Watched | Caught],
    changes: dict[int, tuple[str, str | None]],
) -> Iterator[Finding]:
    revisions = sorted(changes)
    reached, is_watching, has_ended = 0, False, False
    for event in events:
        match event:
            case Watching():
                if event.revision < reached:
                    yield Finding("watch", watcher, f"begins at {event.revision} again after {reached}")
                reached, is_watching = max(reached, event.revision), True
            case Watched():
                if not is_watching or event.revision <= reached:
                    yield Finding("watch", watcher, f"{event} after {reached}")
                    continue
                yield from _missed(watcher, revisions, reached, event.revision - 1)
                reached = event.revision
            case Caught():
                yield from _missed(watcher, revisions, reached, event.revision)
                has_ended = True
    if not has_ended:
        yield Finding("watch", watcher, f"did not see the last change; it is at {reached}")


def _missed(watcher: str, revisions: Sequence[int], after: int, through: int) -> Iterator[Finding]:
    low, high = bisect_left(revisions, after + 1), bisect_left(revisions, through + 1)
    if low < high:
        yield Finding("watch", watcher, f"missed revisions {list(revisions[low:high])[:5]}")
