"""A visit: look, judge, and tell, the worst first."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Final

from sava.doctor import cluster, contents, signs
from sava.doctor.findings import ORDER, Finding, Level, error, note
from sava.doctor.observation import Access, Looking, Observation

Judgement = Callable[[Observation], Iterable[Finding]]

FROM_BROKERS: Final = frozenset(
    {"leader and terms", "clocks", "disks", "certificates", "object store", "metrics"}
)
"""What is not seen from outside."""


def judgements(min_free: float) -> dict[str, Judgement]:
    return {
        "reachability": cluster.check_reachability,
        "leader and terms": cluster.check_consensus,
        "clocks": cluster.check_clocks,
        "versions": cluster.check_versions,
        "disks": partial(cluster.check_disks, min_free=min_free),
        "certificates": cluster.check_certificates,
        "object store": contents.check_store,
        "topics": contents.check_topics,
        "subscriptions": contents.check_subscriptions,
        "clients": contents.check_client_view,
        "metrics": signs.check_signs,
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
        return list(cluster.check_consensus(seen))
    is_answered = any(broker.examination is not None for broker in seen.brokers)
    found: list[Finding] = []
    for name, judge in judgements(min_free).items():
        said = list(judge(seen))
        if not said and name in FROM_BROKERS and not is_answered:
            said = [note(name, "cluster", "not known: no broker could be asked")]
        found += said or [Finding(Level.OK, name, "cluster", "nothing is wrong")]
    return sorted(found, key=lambda finding: ORDER.index(finding.level))


async def visit(
    access: Access, *, watch_s: float, min_free: float, tell: Callable[[str], None]
) -> list[Finding]:
    return judged(await Looking(access, watch_s=watch_s, tell=tell).look(), min_free=min_free)
