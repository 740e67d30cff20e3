"""A visit: look, judge, and report, the worst first."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Final

from sava.doctor import brokers, contents
from sava.doctor.findings import ORDER, Finding, Level, error, note
from sava.doctor.observation import Access, BrokerSeen, Looking, Observation

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
        "reachability": brokers.check_reachability,
        "leader and terms": brokers.check_consensus,
        "clocks": brokers.check_clocks,
        "modes": brokers.check_modes,
        "versions": brokers.check_versions,
        "disks": partial(brokers.check_disks, min_free=min_free),
        "certificates": brokers.check_certificates,
        "object store": contents.check_store,
        "topics": contents.check_topics,
        "ledgers": contents.check_ledgers,
        "subscriptions": contents.check_subscriptions,
        "pipelines": contents.check_pipelines,
        "replication": contents.check_replication,
        "clients": brokers.check_clients,
        "metrics": brokers.check_metrics,
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
        return list(brokers.check_consensus(seen))
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
