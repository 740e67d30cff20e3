"""Leftovers: what the journal holds of topics that are not open here, and the proof that nobody needs it.

Such frames keep the journal from being trimmed until their topic is opened here again, which may be never:
the topic was deleted while this broker was down, or lives elsewhere now. The topics' state records tell which
frames may go. The danger is to let go of a tail that nobody else has:

    deleted           no state names the topic id. A state is written before the first frame, ids are never
                      used twice, and nothing but a deletion removes a state: all frames may go.
    below ``end``     is in registered segments, whoever wrote it: may go.
    from ``end`` on   not history, if the state is sealed (nothing exists there) or names another journal
                      (which could take the topic over only when nothing existed there); else it is the tail
                      that this journal keeps, and stays. (Also if the state is at rest: its owner may wake,
                      and have a tail, under the same epoch.)

A state may change between reading it and acting on it. ``end`` only grows, and a deleted topic stays deleted.
Only a tail can come into being meanwhile, when the topic moves here: it is of a later epoch than the state
that was read, and then nothing is disowned.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from sava.metadata.store import MetadataStore
from sava.storage import keys
from sava.storage.catalog import PAGE, decode_record
from sava.storage.types import TopicKey, TopicState

_BEHIND: Final = "\U0010ffff"
"""Sorts behind everything that a key may go on with."""


class Needless(NamedTuple):
    """Of a topic's frames: those below ``release`` and, if there is such an offset, those from ``disown``
    on."""

    release: int
    disown: int | None


def needless(state: TopicState | None, *, storage_id: str, epoch: int) -> Needless:
    """What a journal need not keep of a topic, ``epoch`` being the latest of its frames."""
    if state is None:
        return Needless(0, 0)
    is_superseded = state.sealed or state.storage_id != storage_id
    is_known = epoch < state.epoch or (epoch == state.epoch and state.storage_id == storage_id)
    return Needless(state.end, state.end if is_superseded and is_known else None)


async def topic_states(metadata: MetadataStore) -> dict[int, TopicState]:
    """The states of all topics, by topic id. An id that is missing here has had no state at some moment since
    the call. Raises what keeps any of them from being read: unknown is not deleted."""
    return {topic.topic_id: state for topic, state in (await named_states(metadata)).items()}


async def named_states(metadata: MetadataStore) -> dict[TopicKey, TopicState]:
    """As ``topic_states``, with the topics' names."""
    states: dict[TopicKey, TopicState] = {}
    after, more = "", True
    while more:
        page = await metadata.range(keys.TOPICS, limit=PAGE, start_after=after)
        more = page.more
        for kv in page.kvs:
            after = kv.key
            if keys.is_state_key(kv.key):
                state = decode_record(kv.key, kv.value, TopicState)
                states[keys.topic_of_state_key(kv.key, state.topic_id)] = state
        if (segments := keys.segments_prefix_of(after)) is not None:
            after = segments + _BEHIND  # the other descriptors of this topic tell nothing
    return states
