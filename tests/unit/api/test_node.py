"""RaftNode and RaftStore on an in-memory network: the driver's own duties, without processes or gRPC."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from random import SystemRandom
from typing import Any

import pytest

from sava.metadata import node as node_module
from sava.metadata.bootstrap import check_address
from sava.metadata.errors import (
    IdentityConflict,
    InvalidRequest,
    NotInitialized,
    OutcomeUnknown,
    Unavailable,
)
from sava.metadata.identity import NodeState, open_state
from sava.metadata.node import NodeOptions, RaftNode, open_node
from sava.metadata.peer import ReadIndex
from sava.metadata.replica.replica import ReplicaConfig
from sava.metadata.store import ClusterOperations, RaftStore
from sava.raft.core import Role
from sava.raft.types import NO_NODE, CoreConfig
from sava.wal.disk import LocalDisk
from sava.wal.errors import DirectoryLocked, DiskFailed
from tests.support.local_network import LocalNetwork
from tests.support.waiting import FAR_S, PATIENCE_S, OwnTime

FAST = ReplicaConfig(core=CoreConfig(election_ticks=5), tick_ms=20)


class Trio:
    """Three nodes, founded."""

    def __init__(self, directory: Path) -> None:
        self.network = LocalNetwork()
        self.addresses = [f"n{number}:1" for number in range(3)]
        self._directory = directory
        self.nodes: list[RaftNode] = []
        self.stores: list[RaftStore] = []

    async def open(self) -> None:
        for number, address in enumerate(self.addresses):
            options = NodeOptions(address=address, replica=FAST)
            place = self._directory / str(number)
            self.nodes.append(await open_node(place, options, self.network.transport(address)))
        self.stores = [RaftStore(node) for node in self.nodes]

    def leader(self) -> RaftNode:
        return next(node for node in self.nodes if node.replica.is_leader)


@pytest.fixture
async def trio(tmp_path: Path) -> AsyncIterator[Trio]:
    trio = Trio(tmp_path)
    await trio.open()
    await ClusterOperations(trio.nodes[0]).init(trio.addresses, timeout=PATIENCE_S)
    await trio.stores[0].get("/")
    first = trio.nodes[0]
    await first.wait_until(
        lambda: any(node.replica.is_leader for node in trio.nodes), "leads", timeout=PATIENCE_S
    )
    yield trio
    for node in trio.nodes:
        await node.close()


async def test_every_node_writes_and_reads(trio: Trio) -> None:
    for number, store in enumerate(trio.stores):
        await store.put(f"/{number}", b"x")
        assert store.local.get(f"/{number}") is not None
    for store in trio.stores:
        assert len((await store.range("/")).kvs) == 3


async def test_readers_of_one_moment_share_one_round(trio: Trio, monkeypatch: pytest.MonkeyPatch) -> None:
    leader = trio.leader()
    rounds = 0
    ask = leader.replica.ask

    def counted(request: Any, done: Any, *, deadline_ms: int) -> int:
        nonlocal rounds
        rounds += isinstance(request, ReadIndex)
        return ask(request, done, deadline_ms=deadline_ms)

    monkeypatch.setattr(leader.replica, "ask", counted)
    store = RaftStore(leader)
    await store.put("/x", b"1")
    answers = await asyncio.gather(*(store.get("/x") for _ in range(200)))
    assert all(answer is not None and answer.value == b"1" for answer in answers)
    assert rounds == 1


async def test_a_reader_that_comes_later_waits_for_the_next_round(trio: Trio) -> None:
    store = RaftStore(trio.leader())
    first = asyncio.create_task(store.get("/x"))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    # The round of ``first`` may have begun before this write is acknowledged; the second reader must see it.
    await store.put("/x", b"new")
    second = await store.get("/x")
    assert second is not None
    assert second.value == b"new"
    await first


async def test_without_a_majority_every_caller_gets_an_answer_in_time(trio: Trio) -> None:
    store, node = trio.stores[0], trio.nodes[0]
    for one in trio.addresses:
        for other in trio.addresses:
            trio.network.cut.add((one, other))
    own = OwnTime()
    results = await asyncio.gather(
        store.get("/x", timeout=0.5), store.put("/x", b"1", timeout=0.5), return_exceptions=True
    )
    assert all(isinstance(result, Exception) for result in results)
    assert own.seconds < 2.0
    with pytest.raises(Unavailable):
        await store.get("/x", linearizable=False, min_revision=10**9, timeout=0.2)
    trio.network.cut.clear()
    await node.wait_until(lambda: _knows_leader(node), "a leader", timeout=PATIENCE_S)
    await store.put("/x", b"2")


def _knows_leader(node: RaftNode) -> bool:
    core = node.core_status
    return core is not None and core.leader != NO_NODE


async def test_a_cancelled_caller_is_forgotten(trio: Trio) -> None:
    store = RaftStore(trio.leader())
    task = asyncio.create_task(store.put("/x", b"1"))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await store.put("/y", b"2")


async def test_a_stalled_loop_does_not_start_an_election(trio: Trio) -> None:
    """All three stand still far longer than the election timeout, as one loop does; nobody campaigns
    after it."""
    term = trio.leader().replica.term
    for _ in range(3):
        time.sleep(0.5)  # noqa: ASYNC251 (the stall under test)
        await asyncio.sleep(0.1)
    assert {node.replica.term for node in trio.nodes} == {term}


async def test_the_loop_runs_while_the_log_is_read_and_no_lock_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start that is given up leaves no lock behind.

    Reading a long log takes seconds. A signal that comes meanwhile ends the start; the thread ends later,
    and what it opened is closed, so that the directory can be opened again by the same process."""
    may_end, begun = threading.Event(), threading.Event()
    real = open_state

    def slowly(*arguments: Any, **options: Any) -> NodeState:
        begun.set()
        assert may_end.wait(PATIENCE_S)
        return real(*arguments, **options)

    monkeypatch.setattr(node_module, "open_state", slowly)
    network = LocalNetwork()

    def start() -> asyncio.Task[RaftNode]:
        opening = open_node(tmp_path, NodeOptions(address="a:1"), network.transport("a:1"))
        return asyncio.create_task(opening)

    starting = start()
    assert await asyncio.to_thread(begun.wait, PATIENCE_S)  # only a loop that runs comes to the next line
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    may_end.set()
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                node = await start()
                break
            except DirectoryLocked:
                await asyncio.sleep(0.01)
    await node.close()


async def test_a_pristine_node_says_so_at_once(tmp_path: Path) -> None:
    node = await open_node(tmp_path, NodeOptions(address="a:1"), LocalNetwork().transport("a:1"))
    store = RaftStore(node)
    with pytest.raises(NotInitialized):
        await store.put("/x", b"1")
    with pytest.raises(NotInitialized):
        await store.get("/x")
    assert await store.get("/x", linearizable=False) is None
    await node.close()


async def test_init_refuses_what_does_not_fit(trio: Trio, tmp_path: Path) -> None:
    operations = ClusterOperations(trio.nodes[0])
    again = await operations.init(list(reversed(trio.addresses)))
    assert again.already
    with pytest.raises(IdentityConflict):
        await operations.init(trio.addresses[:2])
    with pytest.raises(InvalidRequest, match="twice"):
        await operations.init([trio.addresses[0], trio.addresses[0]])
    with pytest.raises(InvalidRequest, match="does not name the node that was asked"):
        await operations.init(trio.addresses[1:])
    with pytest.raises(Unavailable, match="gone:1"):
        await operations.init([*trio.addresses, "gone:1"])
    for wrong in ("host", ":1", "host:", "host:x", "host:99999"):
        with pytest.raises(InvalidRequest):
            check_address(wrong)


async def test_leadership_moves_on_request(trio: Trio) -> None:
    leader = trio.leader()
    target = next(node for node in trio.nodes if node is not leader)
    to = await ClusterOperations(trio.nodes[2]).transfer(target.info().node, "", timeout=PATIENCE_S)
    assert to == target.info().node
    await target.wait_until(lambda: target.replica.is_leader, "leads", timeout=PATIENCE_S)
    again = await ClusterOperations(target).transfer(to, "", timeout=PATIENCE_S)
    assert again == to, "repeating the command is harmless"


async def test_a_snapshot_is_taken_while_writes_go_on(trio: Trio) -> None:
    store = RaftStore(trio.leader())
    value = b"v" * 10_000
    for number in range(100):
        await store.put(f"/{number}", value)
    taking = asyncio.create_task(ClusterOperations(trio.leader()).snapshot())
    for number in range(20):
        await store.put(f"/{number}", b"later")
    meta = await taking
    assert meta.size > 900_000
    assert trio.leader().status.snapshot_index == meta.index


class FailingDisk(LocalDisk):
    """A disk whose files fail to sync once told so."""

    broken = False

    def open(self, name: str, *, create: bool = False) -> Any:
        file = super().open(name, create=create)
        sync = file.sync

        def fail_or_sync() -> None:
            if FailingDisk.broken:
                raise DiskFailed(f"{name}: cannot sync: Input/output error")
            sync()

        file.sync = fail_or_sync  # type: ignore[method-assign]
        return file

    def directory(self, name: str) -> FailingDisk:
        return FailingDisk(self._path / name)


async def test_a_failed_sync_stops_the_node_and_nothing_is_acknowledged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    state = open_state(FailingDisk(tmp_path / "data"), rng=SystemRandom())
    node = RaftNode(state, NodeOptions(address="a:1", replica=FAST), LocalNetwork().transport("a:1"))
    store = RaftStore(node)
    await ClusterOperations(node).init(["a:1"])
    await store.put("/kept", b"1")
    monkeypatch.setattr(FailingDisk, "broken", True)
    with pytest.raises(Exception, match="cannot sync"):
        await store.put("/lost", b"2", timeout=5)
    error = await asyncio.wait_for(node.failed, PATIENCE_S)
    assert isinstance(error, DiskFailed)
    assert sum("raft: stopped" in record.message for record in caplog.records) == 1
    monkeypatch.setattr(FailingDisk, "broken", False)
    await node.close()

    again = await open_node(tmp_path / "data", NodeOptions(address="a:1"), LocalNetwork().transport("a:1"))
    kept = await RaftStore(again).get("/kept")
    assert kept is not None
    assert kept.value == b"1"
    await again.close()


async def test_an_impossible_state_stops_the_node_and_nobody_waits_for_ever(
    trio: Trio, monkeypatch: pytest.MonkeyPatch
) -> None:
    leader = trio.leader()
    waiting = asyncio.create_task(RaftStore(leader).put("/x", b"1", timeout=FAR_S))
    await asyncio.sleep(0)

    def impossible(now_ms: int) -> None:
        raise AssertionError("a state that cannot be")

    monkeypatch.setattr(leader.replica, "pump", impossible)
    monkeypatch.setattr(leader.replica, "tick", impossible)
    assert isinstance(await asyncio.wait_for(leader.failed, PATIENCE_S), AssertionError)
    with pytest.raises(OutcomeUnknown):
        await asyncio.wait_for(waiting, PATIENCE_S)
    with pytest.raises(Unavailable):
        await RaftStore(leader).put("/y", b"1")


async def test_an_error_of_one_connection_ends_nothing_else(
    trio: Trio, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """uvloop    closes the handle of one connection, and says nothing
    leader    sends its next append there: RuntimeError, in the middle of the pump
    node      took it for a state that cannot be, stopped, and the healthy broker ended with it
    """
    leader = trio.leader()
    followers = [
        address for node, address in zip(trio.nodes, trio.addresses, strict=True) if node is not leader
    ]
    # The one that comes first in a pump: the other must hear what is behind it.
    broken, transport = followers[0], leader.transport
    send = transport.send

    def raising(address: str, envelopes: Sequence[Any]) -> None:
        if address == broken:
            raise RuntimeError("unable to perform operation on <TCPTransport closed=True>")
        send(address, envelopes)

    monkeypatch.setattr(transport, "send", raising)
    store = RaftStore(leader)
    for number in range(10):
        await store.put(f"/{number}", b"x")
    assert not leader.failed.done()
    assert leader.send_errors > 0
    assert caplog.text.count(f"raft: not sent peer={broken}") == 1, "logged once, and counted each time"

    monkeypatch.setattr(transport, "send", send)
    behind = trio.nodes[trio.addresses.index(broken)]
    await behind.wait_until(
        lambda: RaftStore(behind).local.get("/9") is not None, "it has caught up", timeout=PATIENCE_S
    )


async def test_a_node_that_was_cut_off_steps_down_and_learns(trio: Trio) -> None:
    leader = trio.leader()
    address = leader.info().address
    others: Sequence[RaftNode] = [node for node in trio.nodes if node is not leader]
    for other in trio.addresses:
        trio.network.cut |= {(address, other), (other, address)}
    await RaftStore(others[0]).put("/x", b"new", timeout=PATIENCE_S)
    await leader.wait_until(
        lambda: (core := leader.core_status) is not None and core.role is not Role.LEADER,
        "the old leader steps down",
        timeout=PATIENCE_S,
    )
    trio.network.cut.clear()
    kv = await RaftStore(leader).get("/x", timeout=PATIENCE_S)
    assert kv is not None
    assert kv.value == b"new"
