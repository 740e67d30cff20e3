"""Judgements about what a client sees: whether each address that it is given leads to this cluster, and where
look-ups send it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from sava.doctor.findings import Finding, Level, error, note
from sava.doctor.observation import Greeting, Observation

CLIENT_PORT: Final = (
    "see that this is the client port of a broker (6650 by default; `sava brokers list` has all of them), "
    "that the broker runs, and that it is reached from here"
)
LEADER_FIRST: Final = "without a leader nobody knows: see what is said of the leader"


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
        return f"somebody answers there who is not the client port of a broker: {greeting.error}"
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
