"""The follower's side of replication: log matching, commit, heartbeats."""

from __future__ import annotations

from collections.abc import Sequence

from sava.raft.messages import Append, AppendReply, Heartbeat, HeartbeatReply, SnapshotChunk
from sava.raft.output import Role
from sava.raft.replication import on_snapshot_chunk
from sava.raft.state import CoreState
from sava.raft.types import NO_NODE, Entry, InvariantError, NodeId

__all__ = ["on_append", "on_heartbeat", "on_snapshot"]


def _recognise_leader(state: CoreState, leader: NodeId) -> None:
    """A message that only a term's leader sends: follow it, and restart the election timer."""
    if state.role is Role.LEADER or state.leader not in (NO_NODE, leader):
        other = state.node if state.role is Role.LEADER else state.leader
        raise InvariantError(f"nodes {other} and {leader} both lead term {state.term}")
    if state.role is not Role.FOLLOWER:
        state.become_follower(state.term, leader)
    state.leader = leader
    state.election_elapsed = 0
    # If there was evidence against it, it was wrong; kept, it would make this follower campaign after every
    # short pause.
    state.hurried_timeout = 0


def on_heartbeat(state: CoreState, message: Heartbeat) -> None:
    _recognise_leader(state, message.src)
    state.log.commit_to(message.commit)
    state.reply(HeartbeatReply(state.node, message.src, state.term, message.round))


def on_snapshot(state: CoreState, message: SnapshotChunk) -> None:
    _recognise_leader(state, message.src)
    on_snapshot_chunk(state, message)


def on_append(state: CoreState, message: Append) -> None:
    _recognise_leader(state, message.src)
    if state.install is not None:
        return  # the log is about to be replaced
    log = state.log
    if message.prev_index < log.commit:
        # Late or duplicated: what is committed here matches the leader by definition. Say how far that goes.
        _accept(state, message.src, log.commit)
    elif log.matches(message.prev_index, message.prev_term):
        checked = message.prev_index + len(message.entries)
        _take_entries(state, message.prev_index, message.entries)
        # Neither commit nor the answer may go beyond what this message has compared: whatever follows in our
        # log may be another leader's.
        log.commit_to(min(message.commit, checked))
        _accept(state, message.src, checked)
    else:
        _reject(state, message)


def _take_entries(state: CoreState, prev_index: int, entries: Sequence[Entry]) -> None:
    log = state.log
    position = log.first_conflict(prev_index, entries)
    if position == len(entries):
        return
    news = entries[position:] if position else entries
    changed = False
    if news[0].index <= log.last_index:
        log.truncate_from(news[0].index)
        # Configurations go with their entries; the one before is in force again.
        changed = state.history.truncate_from(news[0].index)
    log.append(news)
    if state.note_memberships(news) or changed:
        state.membership_changed()


def _accept(state: CoreState, leader: NodeId, index: int) -> None:
    state.reply(AppendReply(state.node, leader, state.term, True, index), index)


def _reject(state: CoreState, message: Append) -> None:
    log = state.log
    # What is committed matches any leader, so the hint never points below it.
    hint = max(log.probe_point(min(message.prev_index, log.last_index), message.prev_term), log.commit)
    reply = AppendReply(state.node, message.src, state.term, False, message.prev_index, hint, log.term(hint))
    state.reply(reply)
