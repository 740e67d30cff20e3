"""What replication does with a topic, by what there is of it at both clusters: every row of PIP-370's tables
and those that it leaves open, under both mismatch policies.

Each case says what is created there, which partitions are copied, how many count as disconnected, the state
of those, and what the reason must name so that somebody can act on it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from sava.replication import matrix
from sava.replication.matrix import (
    Do,
    Here,
    KnownThere,
    LinkState,
    Mismatch,
    Settings,
    There,
    TopicRelation,
    Verdict,
)

TOPIC, REMOTE = "/default/orders", "west"
BOTH = (Mismatch.PIP370, Mismatch.STRICT)
PIP370, STRICT = ((each,) for each in BOTH)
EITHER = (True, False)
"""Whether replication may create topics does not matter."""
MISMATCH, WAITING = LinkState.PARTITION_MISMATCH, LinkState.WAITING_REMOTE_TOPIC
NONE = There(remote=REMOTE, exists=False)
UNKNOWN = KnownThere()


def here(partitions: int) -> Here:
    return Here(topic=TOPIC, partitions=partitions)


def there(partitions: int, **more: object) -> There:
    return replace(There(remote=REMOTE, partitions=partitions), **more)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Case:
    local: Here
    remote: There
    known: KnownThere = UNKNOWN
    may_create: tuple[bool, ...] = EITHER
    policies: tuple[Mismatch, ...] = BOTH
    create: int | None = None
    grow: int = 0
    copied: tuple[int, ...] = ()
    disconnected: int = 0
    state: LinkState = LinkState.STARTING
    names: tuple[str, ...] = ()
    """What the reason must say."""


CASES: dict[str, Case] = {
    # The remote has no topic of this name.
    "a missing partitioned topic is created with as many partitions and copied": Case(
        here(2), NONE, may_create=(True,), create=2, copied=(0, 1)
    ),
    "a missing plain topic is created plain and copied": Case(
        here(0), NONE, may_create=(True,), create=0, copied=(0,)
    ),
    "a missing partitioned topic that may not be created is waited for": Case(
        here(2), NONE, may_create=(False,), disconnected=2, state=WAITING,
        names=("sava topics create /default/orders --partitions 2", "create_topic_to_remote_cluster"),
    ),
    "a missing plain topic that may not be created is waited for": Case(
        here(0), NONE, may_create=(False,), disconnected=1, state=WAITING,
        names=("`sava topics create /default/orders`",),
    ),
    # It has one, with the same partitions.
    "equal partitions are copied": Case(here(2), there(2), copied=(0, 1)),
    "one partition on both sides is copied": Case(here(1), there(1), copied=(0,)),
    "a plain topic is copied into a plain one": Case(here(0), there(0), copied=(0,)),
    # In dispute: it has fewer, or more.
    "of two partitions the first is copied into the only one there": Case(
        here(2), there(1), policies=PIP370, copied=(0,), disconnected=1, state=MISMATCH,
        names=("2 partitions here", "1 partition at west", "partition 1 is not copied", "--grow 2` at west"),
    ),
    "nothing is copied into fewer partitions strictly": Case(
        here(2), there(1), policies=STRICT, disconnected=2, state=MISMATCH,
        names=("partition_mismatch_policy is strict", "--grow 2` at west"),
    ),
    "partitions are copied one to one into more, the others get nothing": Case(
        here(2), there(4), policies=PIP370, copied=(0, 1)
    ),
    "nothing is copied into more partitions strictly": Case(
        here(2), there(4), policies=STRICT, disconnected=2, state=MISMATCH,
        names=("2 partitions here", "4 partitions at west", "--grow 4` here"),
    ),
    # In dispute: one is partitioned, the other is not.
    "a partitioned topic is not copied into a plain one": Case(
        here(2), there(0), disconnected=2, state=MISMATCH,
        names=("2 partitions here", "no partitions at west", "delete it at west"),
    ),
    "a plain topic is not copied into a partitioned one": Case(
        here(0), there(3), disconnected=1, state=MISMATCH,
        names=("no partitions here", "3 partitions at west"),
    ),
    "a plain topic is not copied into a single partition either": Case(
        here(0), there(1), disconnected=1, state=MISMATCH, names=("no partitions here", "1 partition at west")
    ),
    # What the proposal does not state.
    "a missing namespace is waited for, not created": Case(
        here(2), there(0, exists=False, namespace_exists=False), disconnected=2, state=WAITING,
        names=("`sava namespaces create default`",),
    ),
    "a topic that keeps no messages there is not copied into": Case(
        here(2), there(2, reliable=False), disconnected=2, state=MISMATCH, names=("not reliable at west",)
    ),
    "partitions added here are added there, then all are copied": Case(
        here(4), there(2), KnownThere(topic_ids=(1, 2), is_grown=True), grow=4, copied=(0, 1, 2, 3)
    ),
    "partitions added here are added there also where they were fewer before": Case(
        here(4), there(1), KnownThere(topic_ids=(1,), is_grown=True), grow=4, copied=(0, 1, 2, 3)
    ),
    "partitions added here do not make a plain topic there partitioned": Case(
        here(4), there(0), KnownThere(topic_ids=(1,), is_grown=True), disconnected=4, state=MISMATCH
    ),
    "partitions added here are there already": Case(
        here(4), there(4), KnownThere(topic_ids=(1, 2, 3, 4), is_grown=True), copied=(0, 1, 2, 3)
    ),
    "partitions added there get nothing": Case(
        here(2), there(4), KnownThere(topic_ids=(1, 2)), policies=PIP370, copied=(0, 1)
    ),
    "partitions added there stop it strictly": Case(
        here(2), there(4), KnownThere(topic_ids=(1, 2)), policies=STRICT, disconnected=2, state=MISMATCH
    ),
    "a topic deleted there is not created again": Case(
        here(2), NONE, KnownThere(topic_ids=(7, 8)), disconnected=2, state=LinkState.REMOTE_DELETED,
        names=("deleted at west", "`sava replication recreate /default/orders --remote west`"),
    ),
    "a topic deleted there with its namespace is deleted, not merely missing": Case(
        here(0), there(0, exists=False, namespace_exists=False), KnownThere(topic_ids=(7,)), disconnected=1,
        state=LinkState.REMOTE_DELETED,
    ),
    "another topic of the same name is not filled with the deleted one's messages": Case(
        here(2), there(2, topic_ids=(9, 10)), KnownThere(topic_ids=(7, 8)), disconnected=2,
        state=LinkState.REMOTE_DELETED,
    ),
    "a deletion is remembered though another topic of the same name is there": Case(
        here(2), there(2, topic_ids=(9, 10)), KnownThere(is_tombstone=True), disconnected=2,
        state=LinkState.REMOTE_DELETED,
    ),
    "a topic that is still the one that was seen is copied": Case(
        here(2), there(2, topic_ids=(7, 8)), KnownThere(topic_ids=(7, 8)), copied=(0, 1)
    ),
    "a partition that was missing and is there now does not make it another topic": Case(
        here(2), there(2, topic_ids=(7, 9)), KnownThere(topic_ids=(7, 0)), copied=(0, 1)
    ),
    "a half-created topic gets the partitions that it has": Case(
        here(3), there(3, missing=(1,), topic_ids=(7, 0, 8)), policies=PIP370, copied=(0, 2), disconnected=1,
        state=MISMATCH, names=("no partition 1", "partition 1 is not copied"),
    ),
    "a half-created topic gets nothing strictly": Case(
        here(3), there(3, missing=(1,), topic_ids=(7, 0, 8)), policies=STRICT, disconnected=3, state=MISMATCH
    ),
    "a partition missing beyond those of the topic here is no hole": Case(
        here(2), there(4, missing=(3,)), policies=PIP370, copied=(0, 1)
    ),
}  # fmt: skip


@pytest.mark.parametrize("story", CASES)
def test_what_is_done(story: str) -> None:
    case = CASES[story]
    for may_create in case.may_create:
        for policy in case.policies:
            settings = Settings(may_create=may_create, mismatch=policy)
            verdict = matrix.decide(case.local, case.remote, settings, case.known)
            shown = (verdict.create, verdict.grow, verdict.copied, verdict.disconnected, verdict.state)
            assert shown == (case.create, case.grow, case.copied, case.disconnected, case.state), settings
            assert bool(verdict.reason) == bool(case.disconnected)
            for name in case.names:
                assert name in verdict.reason


def test_every_relation_has_a_rule_for_both_policies_and_a_case_here() -> None:
    assert set(matrix.RULES) == set(TopicRelation)
    seen = set()
    for case in CASES.values():
        for may_create in case.may_create:
            for policy in case.policies:
                settings = Settings(may_create=may_create, mismatch=policy)
                seen.add((matrix.relate(case.local, case.remote, settings, case.known), policy))
    assert seen == {(relation, policy) for relation in TopicRelation for policy in Mismatch}


def test_the_policies_differ_in_nothing_but_the_number_of_partitions() -> None:
    differing = {each for each in TopicRelation if len(set(matrix.RULES[each].values())) > 1}
    assert differing == {TopicRelation.FEWER, TopicRelation.MORE, TopicRelation.HOLES}
    assert all(matrix.RULES[each][Mismatch.STRICT] is Do.HOLD for each in differing)


@pytest.mark.parametrize("may_create", EITHER)
@pytest.mark.parametrize("policy", BOTH)
def test_whether_topics_may_be_created_matters_only_where_there_is_none(
    policy: Mismatch, may_create: bool
) -> None:
    for case in CASES.values():
        if case.remote.exists:
            one, other = (
                matrix.decide(case.local, case.remote, Settings(may_create=each, mismatch=policy), case.known)
                for each in (may_create, not may_create)
            )
            assert one == other


@pytest.mark.parametrize("policy", BOTH)
def test_a_topic_that_was_waited_for_is_copied_once_it_is_created(policy: Mismatch) -> None:
    settings = Settings(may_create=False, mismatch=policy)
    assert matrix.decide(here(2), NONE, settings).disconnected == 2
    assert matrix.decide(here(2), there(2), settings).copied == (0, 1)


def settled(local: Here, found: There, created: There, policy: Mismatch) -> Verdict:
    """As whoever copies does it: create if that is said, then compare with what is there by then."""
    settings = Settings(may_create=True, mismatch=policy)
    verdict = matrix.decide(local, found, settings)
    return verdict if verdict.create is None else matrix.decide(local, created, settings)


@pytest.mark.parametrize("policy", BOTH)
def test_both_sides_create_at_once_with_the_same_partitions(policy: Mismatch) -> None:
    assert settled(here(2), NONE, there(2), policy).copied == (0, 1)


@pytest.mark.parametrize(
    ("policy", "copied", "disconnected"), [(Mismatch.PIP370, (0,), 1), (Mismatch.STRICT, (), 2)]
)
def test_somebody_else_was_faster_with_fewer_partitions(
    policy: Mismatch, copied: tuple[int, ...], disconnected: int
) -> None:
    """Creating is answered with what is there, and that is compared like anything else: it is not grown."""
    verdict = settled(here(2), NONE, there(1), policy)
    assert (verdict.copied, verdict.disconnected, verdict.grow) == (copied, disconnected, 0)


@pytest.mark.parametrize("state", [LinkState.UNREACHABLE, LinkState.DENIED])
@pytest.mark.parametrize("partitions", [0, 3])
def test_of_a_remote_that_does_not_answer_nothing_is_created_or_copied(
    partitions: int, state: LinkState
) -> None:
    verdict = matrix.unanswered(here(partitions), state, "connection refused")
    assert (verdict.create, verdict.copied, verdict.disconnected) == (None, (), max(1, partitions))
    assert (verdict.state, verdict.reason) == (state, "connection refused")
