"""Judgements about brokers: whether they are reached where they say, agree on who leads, have the time, room
and version that they should, what their metrics say, and where they send clients. A visit looks, judges by
these and those of ``contents``, and reports the worst first.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Final

import sava
from sava.doctor import contents
from sava.doctor.contents import give_up, waiting
from sava.doctor.observation import (
    ORDER,
    Access,
    BrokerSeen,
    Finding,
    Greeting,
    Level,
    Looking,
    Observation,
    days_left,
    error,
    note,
    warning,
)
from sava.proto import admin_pb2
from sava.security import is_loopback

CLOCK_S: Final = 0.5
"""Publish times are compared, and searched by, across brokers; leases tolerate more than this."""
CATCHING_UP: Final = 1000
"""Entries that a broker may lag behind."""
EXPIRY_DAYS: Final = 30.0
WHEN_FULL: Final = "a broker whose disk is full refuses messages and changes until there is room again"
CRITICAL: Final = 1 / 3
"""Of the room that should be free: below it there is no time left."""
SETTING: Final = (
    "set broker.advertised_host (SAVA__BROKER__ADVERTISED_HOST) to a name that works from everywhere"
)

ASK_AGAIN: Final = (
    "ask again in a few seconds; if it stays so, some of them cannot reach each other on the Raft port"
)


def check_reachability(seen: Observation) -> Iterator[Finding]:
    for broker in seen.brokers:
        if not broker.is_registered:
            yield _missing(seen, broker)
            continue
        lost = [contact for contact in broker.contacts if contact.error]
        if len(lost) == len(broker.contacts) > 0:
            listed = ", ".join(f"{contact.use} {contact.address}" for contact in lost)
            yield error(
                "reachability",
                broker.name,
                f"is registered, and none of its addresses is reached from here ({listed}): {lost[0].error}",
                f"it runs, for it answers at {seen.admin}: {SETTING}"
                if seen.asked is not None and seen.asked.self_node_id == broker.listed.broker_id
                else f"see whether it runs: it may have died a moment ago; if it does, {SETTING}",
            )
            continue
        for contact in lost:
            yield error(
                "reachability",
                broker.name,
                f"advertises {contact.address} as its {contact.use} address, which is not reached from "
                f"here: {contact.error}",
                f"let the network pass to this port, or {SETTING}",
            )
        answered = broker.status or broker.first
        if answered is not None and answered.self_node_id != broker.listed.broker_id:
            yield error(
                "reachability",
                broker.name,
                f"advertises {broker.listed.admin_addr}, where broker {answered.self_node_id} answers",
                f"two brokers advertise one address: {SETTING}, one for each",
            )
        elif broker.error and not any(each.use == "admin" and each.error for each in broker.contacts):
            yield error(
                "reachability",
                broker.name,
                f"takes connections on its admin port and does not answer: {broker.error}",
                "look into its log; a broker that hangs is restarted without loss",
            )
        if broker.examination is not None and not broker.examination.ready:
            yield error(
                "readiness",
                broker.name,
                f"cannot serve: {broker.examination.ready_reason}",
                "look into its log; it says what it waits for",
            )


def _missing(seen: Observation, broker: BrokerSeen) -> Finding:
    topics = f", {broker.listed.topics} topics wait for it or its journal" if broker.listed.topics else ""
    hanging = [each.address for each in broker.contacts if each.use == "raft" and not each.error]
    if not hanging:
        text = f"is a member of the cluster, and is not there{topics}"
        return error("reachability", broker.name, text, _without(seen, broker))
    return error(
        "reachability",
        broker.name,
        f"is a member of the cluster, and the others do not hear of it{topics}; but a process takes "
        f"connections at its Raft address {hanging[0]}",
        "it starts, hangs, or cannot reach the others, and its log says which: a broker that hangs is "
        f"restarted without loss; otherwise {_without(seen, broker)}",
    )


def _without(seen: Observation, broker: BrokerSeen) -> str:
    """What to do about a broker that is not there."""
    number = broker.listed.broker_id
    removal = f"`sava cluster remove-node --node-id {number}`"
    for journal in waiting(seen):
        if journal.broker_id == number:
            return (
                "start it again, with its disk: its topics wait, for too few of the disks that hold its "
                f"journal are there; if they are lost for good, {give_up(journal)}, and {removal} "
                "removes it"
            )
    gone = ", when its topics have gone to others, which takes some seconds" if broker.listed.topics else ""
    return (
        "start it again; if it runs, its log says what keeps it away, such as a full disk; if it never "
        f"returns, {removal}{gone}"
    )


def check_consensus(seen: Observation) -> Iterator[Finding]:
    if seen.asked is not None and not seen.asked.cluster_id:
        yield error(
            "leader",
            seen.admin,
            "the broker belongs to no cluster yet",
            "run `sava cluster init --nodes …` with the Raft addresses of all founding brokers, once",
        )
        return
    statuses = {broker.name: broker.status for broker in seen.brokers if broker.status is not None}
    if not statuses:
        return
    clusters = {status.cluster_id for status in statuses.values()}
    if len(clusters) > 1:
        yield error(
            "leader",
            "cluster",
            f"brokers of {len(clusters)} clusters answer: {', '.join(sorted(clusters))}",
            "brokers of another cluster have taken over addresses of this one; give each its own",
        )
        return
    yield from _leaders(seen)
    yield from _quorum(seen)
    top = max(status.commit for status in statuses.values())
    for name, status in statuses.items():
        if top - status.last_applied > CATCHING_UP:
            yield warning(
                "leader",
                name,
                f"has applied {status.last_applied} of {top} entries of the metadata store",
                "if it does not catch up within minutes, its disk or its network is too slow",
            )


def _leaders(seen: Observation) -> Iterator[Finding]:
    answered = [(broker, broker.status) for broker in seen.brokers if broker.status is not None]
    leaders = {status.leader_id for _, status in answered}
    if leaders == {0}:
        yield _no_leader(answered[0][1], {broker.listed.broker_id for broker, _ in answered})
    elif len(leaders) > 1:
        listed = "; ".join(
            f"{broker.name} says {status.leader_id or 'no leader'}" for broker, status in answered
        )
        yield warning(
            "leader",
            "cluster",
            f"brokers do not agree on who leads: {listed}",
            ASK_AGAIN,
        )
    rises = [
        broker.status.current_term - broker.first.current_term
        for broker in seen.brokers
        if broker.status is not None and broker.first is not None
    ]
    if rises and max(rises) > 0:
        yield warning(
            "terms",
            "cluster",
            f"the term rose by {max(rises)} within {seen.waited_s:.0f} s: elections continue",
            "look for a broker that is overloaded, paused, or cut off in one direction; a larger "
            "meta_store.election_timeout_ms tolerates slower machines",
        )
    terms = {status.current_term for _, status in answered}
    if len(terms) > 1 and len(leaders) == 1:
        yield warning(
            "terms",
            "cluster",
            f"brokers are in different terms: {', '.join(map(str, sorted(terms)))}",
            ASK_AGAIN,
        )


def _no_leader(status: admin_pb2.StatusResponse, answered: set[int]) -> Finding:
    voters = set(status.voters)
    there, needed = len(answered & voters), len(voters) // 2 + 1
    text = "no broker knows a leader: nothing can be changed, and topics do not move"
    if there < needed:
        return error(
            "leader",
            "cluster",
            f"{text}; {there} of {len(voters)} voters answer here, and {needed} have to be there",
            "start those that are missing, with their disks; if these are lost, docs/operations.md tells how "
            "to recover",
        )
    return error(
        "leader", "cluster", f"{text}, though {there} of {len(voters)} voters answer here", ASK_AGAIN
    )


def _quorum(seen: Observation) -> Iterator[Finding]:
    status = next(broker.status for broker in seen.brokers if broker.status is not None)
    voters = set(status.voters)
    there = {broker.listed.broker_id for broker in seen.brokers if broker.status is not None} & voters
    needed = len(voters) // 2 + 1
    if len(voters) > 1 and len(there) == needed < len(voters):
        yield warning(
            "quorum",
            "cluster",
            f"{len(there)} of {len(voters)} voters are there: if one more goes, nothing can be changed",
            "bring back the voters that are missing",
        )
    if len(voters) > 1 and len(voters) % 2 == 0:
        yield note(
            "quorum",
            "cluster",
            f"{len(voters)} voters tolerate no more failures than {len(voters) - 1}; use an odd number",
        )
    if status.learners:
        yield note(
            "quorum",
            "cluster",
            f"{len(status.learners)} members are learners and do not vote",
            "`sava cluster promote-node` when they have caught up",
        )
    if status.membership_state == "joint":
        yield warning(
            "quorum",
            "cluster",
            "a change of the voters is not finished",
            "it finishes when a majority of the old and of the new voters is there",
        )


def check_modes(seen: Observation) -> Iterator[Finding]:
    """Brokers that were drained and not activated again."""
    there = [broker for broker in seen.brokers if broker.is_registered]
    active = [broker for broker in there if broker.listed.status == "active"]
    idle = [broker for broker in there if broker.listed.status in ("draining", "drained")]
    if idle and len(active) < 2:
        yield warning(
            "modes",
            "cluster",
            f"{len(active)} of {len(there)} brokers may get topics, the others are drained: no broker takes "
            "over when one dies",
            f"`sava brokers activate {idle[0].listed.broker_id}`, and so on",
        )
    for broker in idle:
        reason = f" ({broker.listed.mode_reason})" if broker.listed.mode_reason else ""
        yield note(
            "modes",
            broker.name,
            f"is {broker.listed.status}{reason}: it gets no topics",
            f"`sava brokers activate {broker.listed.broker_id}` when it is to have some again",
        )


def check_clocks(seen: Observation) -> Iterator[Finding]:
    timed = [broker for broker in seen.brokers if broker.examination is not None]
    if not timed:
        return
    middle = statistics.median(broker.clock_offset_s for broker in timed)
    for broker in timed:
        apart = broker.clock_offset_s - middle
        if abs(apart) > CLOCK_S + broker.clock_error_s:
            yield warning(
                "clocks",
                broker.name,
                f"its clock is {abs(apart):.1f} s {'ahead of' if apart > 0 else 'behind'} the others'",
                "let a time service (NTP, chrony) set the clocks of all brokers",
            )
    if abs(middle) > CLOCK_S + max(broker.clock_error_s for broker in timed):
        yield note(
            "clocks",
            "this machine",
            f"its clock is {abs(middle):.1f} s {'behind' if middle > 0 else 'ahead of'} the brokers'",
            "times given to and taken from the cluster differ by that",
        )


def check_versions(seen: Observation) -> Iterator[Finding]:
    versions = Counter(broker.listed.version for broker in seen.brokers if broker.listed.version)
    if len(versions) > 1:
        listed = ", ".join(f"{version} ({count})" for version, count in sorted(versions.items()))
        yield warning(
            "versions",
            "cluster",
            f"brokers have different versions: {listed}",
            "finish the upgrade, or take it back",
        )
    elif versions and sava.__version__ not in versions:
        yield note("versions", "this machine", f"has {sava.__version__}, the brokers {next(iter(versions))}")


def check_disks(seen: Observation, *, min_free: float) -> Iterator[Finding]:
    """``min_free``: the part that should be free, 0 to 1."""
    for broker in seen.brokers:
        for disk in broker.examination.disks if broker.examination is not None else ():
            if disk.error:
                yield error(
                    "disks",
                    broker.name,
                    f"{disk.use} directory {disk.path} cannot be looked at: {disk.error}",
                    "mount it, or correct the path in the configuration",
                )
            elif disk.size and disk.free < min_free * disk.size:
                judge = error if disk.free < CRITICAL * min_free * disk.size else warning
                yield judge(
                    "disks",
                    broker.name,
                    f"{disk.use} directory {disk.path}: {disk.free / disk.size:.0%} of "
                    f"{disk.size / 2**30:.1f} GiB is free",
                    _room_for(broker, disk.use),
                )


def _room_for(broker: BrokerSeen, use: str) -> str:
    if use == "segments":
        return "set retention (`sava namespaces set-policy --help`), or give the segments more room"
    held = broker.examination.journal_held_bytes if broker.examination is not None else 0
    if use == "journal" and held > 1 << 30:
        return (
            f"{held / 2**30:.1f} GiB of the journal are not in segments yet: see that the object store is "
            f"reached, and give the journal more room; {WHEN_FULL}"
        )
    return f"give it more room; {WHEN_FULL}"


def check_certificates(seen: Observation) -> Iterator[Finding]:
    for broker in seen.brokers:
        ends = [contact.expires for contact in broker.contacts if contact.expires is not None]
        if ends and (left := days_left(min(ends))) < EXPIRY_DAYS:
            judge = error if left <= 0 else warning
            yield judge(
                "certificates",
                broker.name,
                "its certificate has ended" if left <= 0 else f"its certificate ends in {left:.0f} days",
                "replace the files that auth.tls names, and restart one broker after the other",
            )


def check_access(seen: Observation) -> Iterator[Finding]:
    if seen.is_enforced is None:
        yield note("access", "cluster", "not known: the broker does not say whether calls need permissions")
        return
    if seen.is_enforced:
        return
    addresses = [broker.listed.client_addr or broker.listed.admin_addr for broker in seen.brokers]
    reached = [each for each in addresses if each and not is_loopback(each.rpartition(":")[0])]
    if reached:
        yield warning(
            "access",
            "cluster",
            f"every caller may do everything, also from the network ({', '.join(reached)})",
            "set auth.tokens and auth.tls (`sava auth bootstrap DIR --ca` makes the files and the settings)",
        )


# -- metrics -----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MetricAlert:
    """What to say of a metric that is not zero. ``text`` may contain the value."""

    metric: str
    level: Level
    text: str
    remedy: str


METRIC_ALERTS: Final = (
    MetricAlert(
        "sava_controller_unplaced_topics",
        Level.ERROR,
        "{value:.0f} topics cannot be given to any broker",
        "activate a broker (`sava brokers activate`), or start one more",
    ),
    MetricAlert(
        "sava_ledger_degraded",
        Level.ERROR,
        "its journal has fewer mirrors than it should: what is acknowledged now is on fewer disks",
        "bring back the brokers that are missing",
    ),
    MetricAlert(
        "sava_ledger_refusing",
        Level.ERROR,
        "it refuses messages: too few mirrors of its journal are there to acknowledge anything",
        "bring back the brokers that are missing (`sava ledgers list` shows who holds its ledger), or "
        "start others; a smaller journal.ack_quorum, or journal.degraded: allow, is content with fewer "
        "copies",
    ),
    MetricAlert(
        "sava_ledger_recoveries_waiting",
        Level.ERROR,
        "{value:.0f} ledgers of brokers that are gone wait for disks which do not answer; topics whose last "
        "messages are in them are not served",
        "`sava ledgers list` names them and their disks: start a broker with one of these again; if they "
        "are lost for good, `sava ledgers recover BROKER/NUMBER` shows what would be lost, and gives it up "
        "with --yes",
    ),
)


def check_metrics(seen: Observation) -> Iterator[Finding]:
    for broker in seen.brokers:
        for alert in METRIC_ALERTS:
            for _, value in broker.metrics.get(alert.metric, ()):
                if value:
                    text = alert.text.format(value=value)
                    yield Finding(alert.level, "metrics", broker.name, text, alert.remedy)


# -- what a client sees -------------------------------------------------------

CLIENT_PORT: Final = (
    "see that this is the client port of a broker (6650 by default; `sava brokers list` has all of them), "
    "that the broker runs, and that it is reached from here"
)
LEADER_FIRST: Final = "without a leader no broker knows: see what is said of the leader"


def check_clients(seen: Observation) -> Iterator[Finding]:
    if not seen.greetings:
        yield note("clients", "cluster", "not known: no broker tells a client address")
        return
    strangers = list(_strangers(seen))
    yield from strangers
    if len(strangers) < len(seen.greetings):
        yield from _look_ups(seen)


def _strangers(seen: Observation) -> Iterator[Finding]:
    """Addresses that do not lead to this cluster. As long as one does, clients find their way."""
    answered = any(not greeting.error for greeting in seen.greetings.values())
    for address, greeting in seen.greetings.items():
        if greeting.error:
            if not seen.is_service_given and _is_broker_of(seen, address):
                continue  # said of the broker already
            level = Level.WARNING if answered else Level.ERROR
            yield Finding(level, "clients", address, _unanswered(greeting), CLIENT_PORT)
        elif seen.asked is not None and greeting.cluster_id != seen.asked.cluster_id:
            yield error(
                "clients",
                address,
                f"clients come to cluster {greeting.cluster_name} (id {greeting.cluster_id}) here, and "
                f"{seen.admin} is of another (id {seen.asked.cluster_id})",
                "let --service and --admin (SAVA_SERVICE and SAVA_ADMIN) name the same cluster",
            )


def _unanswered(greeting: Greeting) -> str:
    if greeting.is_stranger:
        return f"a process answers there that is not the client port of a broker: {greeting.error}"
    return f"a client learns nothing there: {greeting.error}"


def _is_broker_of(seen: Observation, address: str) -> bool:
    return any(broker.listed.client_addr == address for broker in seen.brokers)


def _look_ups(seen: Observation) -> Iterator[Finding]:
    known = {broker.listed.client_addr for broker in seen.brokers if broker.is_registered}
    for topic, answer in seen.look_ups.items():
        if isinstance(answer, str):
            yield error(
                "clients",
                seen.service,
                f"a client that looks up {topic} learns nothing: {answer}",
                CLIENT_PORT if seen.has_leader else LEADER_FIRST,
            )
            continue
        for part, address in answer:
            if address and address not in known:
                yield error(
                    "clients",
                    part,
                    f"clients are sent to {address}, which is no broker's client address",
                    "ask again in a few seconds: its broker may have just gone; if it stays so, see that "
                    "--service and --admin name the same cluster",
                )


Judgement = Callable[[Observation], Iterable[Finding]]

FROM_BROKERS: Final[dict[str, Callable[[BrokerSeen], bool]]] = {
    "leader and terms": lambda broker: broker.status is not None,
    "clocks": lambda broker: broker.examination is not None,
    "disks": lambda broker: broker.examination is not None,
    "certificates": lambda broker: any(not contact.error for contact in broker.contacts),
    "object store": lambda broker: broker.store is not None,
    "metrics": lambda broker: bool(broker.metrics),
}
"""What each broker has to be asked for: whether this one has answered."""


def judgements(min_free: float) -> dict[str, Judgement]:
    return {
        "reachability": check_reachability,
        "leader and terms": check_consensus,
        "clocks": check_clocks,
        "modes": check_modes,
        "versions": check_versions,
        "disks": partial(check_disks, min_free=min_free),
        "certificates": check_certificates,
        "access": check_access,
        "object store": contents.check_store,
        "topics": contents.check_topics,
        "ledgers": contents.check_ledgers,
        "subscriptions": contents.check_subscriptions,
        "pipelines": contents.check_pipelines,
        "replication": contents.check_replication,
        "clients": check_clients,
        "metrics": check_metrics,
    }


def judged(seen: Observation, *, min_free: float) -> list[Finding]:
    if seen.asked_error:
        return [
            error(
                "reachability",
                seen.admin,
                f"no broker answers: {seen.asked_error}",
                seen.asked_remedy or "start one, or name another with --admin HOST:PORT (or SAVA_ADMIN)",
            )
        ]
    if seen.asked is not None and not seen.asked.cluster_id:
        return list(check_consensus(seen))
    found: list[Finding] = []
    for name, judge in judgements(min_free).items():
        found += list(judge(seen)) or [_nothing_found(name, seen)]
    return sorted(found, key=lambda finding: ORDER.index(finding.level))


def _nothing_found(name: str, seen: Observation) -> Finding:
    """A broker that could not be asked is unknown, not well."""
    total = len(seen.brokers)
    looked = sum(map(FROM_BROKERS[name], seen.brokers)) if name in FROM_BROKERS else total
    if not looked:
        return note(name, "cluster", "not known: no broker could be asked")
    if looked < total:
        text = f"nothing is wrong with the {looked} of {total} brokers that could be asked"
        return Finding(Level.OK, name, "cluster", text)
    return Finding(Level.OK, name, "cluster", "nothing is wrong")


async def visit(
    access: Access, *, watch_s: float, min_free: float, tell: Callable[[str], None]
) -> list[Finding]:
    return judged(await Looking(access, watch_s=watch_s, tell=tell).look(), min_free=min_free)
