"""Bad input and broken machines: each is one clear error, and nothing that was acknowledged is lost."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from sava.errors import RetryableError, SavaError
from sava.metadata.commands import encode
from sava.metadata.durable import DurableBatch, RecordKind
from sava.metadata.errors import IdentityConflict, NotAuthenticated
from sava.metadata.identity import cluster_id_of, open_state
from sava.metadata.peer import Bootstrap
from sava.proto import admin_pb2 as pb
from sava.raft.types import Entry, EntryKind, HardState, Membership, NodeId
from sava.wal.disk import LocalDisk
from tests.support.brokers import BrokerProcess, Cluster
from tests.support.peers import dialer
from tests.support.waiting import PATIENCE_S

EXIT_START = 1
EXIT_FAILED = 3


async def refused_start(broker: BrokerProcess) -> str:
    """Start a broker that must not start; returns its one critical line."""
    await broker.start(wait=False)
    assert await broker.ended() == EXIT_START
    (line,) = [line for line in broker.lines if "CRITICAL" in line]
    return line


async def stopped(broker: BrokerProcess) -> str:
    """Wait for a broker that ends itself; returns its first critical line."""
    assert await broker.ended() == EXIT_FAILED
    return next(line for line in broker.lines if "CRITICAL" in line)


async def test_a_flipped_bit_in_the_log_stops_that_broker_only(trio: Cluster) -> None:
    revision = 0
    for number in range(20):
        revision = await trio.put(f"/kept/{number}", b"x" * 200)
    victim = await trio.follower()
    await victim.caught_up(revision)
    await victim.stop()
    log = max((victim.data_dir / "raft").iterdir(), key=lambda path: path.stat().st_size)
    content = bytearray(log.read_bytes())
    at = content.index(b"/kept/3")
    content[at] ^= 0x40
    log.write_bytes(content)
    assert "LogCorrupt" in await refused_start(victim)

    await trio.put("/still", b"1")
    # The way out that the message names: join as a new node.
    leader = await trio.leader()
    client = leader.client
    await client.call(
        client.cluster.RemoveNode, pb.RemoveNodeRequest(addr=victim.raft_address), timeout=PATIENCE_S
    )
    await victim.wipe()
    await victim.start()
    await client.call(client.cluster.AddNode, pb.AddNodeRequest(addr=victim.raft_address), timeout=PATIENCE_S)
    await client.call(
        client.cluster.PromoteNode, pb.PromoteNodeRequest(addr=victim.raft_address), timeout=PATIENCE_S
    )
    assert await victim.get("/kept/19") == b"x" * 200


async def test_a_lost_disk_is_a_new_node_and_cannot_vote_as_the_old_one(trio: Cluster) -> None:
    await trio.put("/x", b"1")
    victim = await trio.follower()
    old = await victim.node_id()
    victim.kill()
    await victim.ended()
    await victim.wipe()
    await victim.start()
    await victim.logged("waiting for cluster initialization")
    assert await victim.node_id() != old
    with pytest.raises(IdentityConflict):
        await trio.init()
    await next(broker for broker in trio.running if broker is not victim).put("/y", b"2")


async def test_a_node_id_without_its_log_is_refused(tmp_path: Path) -> None:
    async with Cluster(1, tmp_path) as cluster:
        (broker,) = cluster.brokers
        await broker.stop()
        shutil.rmtree(broker.data_dir / "raft")
        assert "IdentityConflict" in await refused_start(broker)


async def test_the_log_of_another_node_is_refused(tmp_path: Path) -> None:
    async with Cluster(2, tmp_path) as cluster:
        first, second = cluster.brokers
        await asyncio.gather(first.stop(), second.stop())
        shutil.rmtree(second.data_dir / "raft")
        shutil.copytree(first.data_dir / "raft", second.data_dir / "raft")
        assert "ForeignLog" in await refused_start(second)


async def test_two_processes_on_one_directory(tmp_path: Path) -> None:
    async with Cluster(1, tmp_path) as cluster:
        await cluster.init()
        twin = await cluster.prepare()
        shutil.rmtree(twin.data_dir, ignore_errors=True)
        twin.data_dir.symlink_to(cluster.brokers[0].data_dir, target_is_directory=True)
        assert "DirectoryLocked" in await refused_start(twin)
        await cluster.put("/x", b"1")
        twin.data_dir.unlink()


async def test_a_copied_data_directory_one_of_the_two_processes_stops(trio: Cluster) -> None:
    await trio.put("/x", b"1")
    original = await trio.follower()
    await original.stop()
    copy = await trio.prepare()
    shutil.copytree(original.data_dir, copy.data_dir)
    await original.start()
    await original.get("/x")
    await copy.start()
    ended = {asyncio.create_task(broker.ended(timeout=PATIENCE_S)): broker for broker in (original, copy)}
    done, pending = await asyncio.wait(ended, return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()
    await asyncio.gather(*pending, return_exceptions=True)
    for task in done:
        assert "IdentityConflict" in await stopped(ended[task])
    await trio.put("/y", b"2")


async def test_a_broker_of_another_cluster_is_not_heard(tmp_path: Path) -> None:
    async with Cluster(2, tmp_path) as cluster:
        first, second = cluster.brokers
        await cluster.init([first])
        await cluster.init([second])
        client = first.client
        with pytest.raises(IdentityConflict, match="wipe"):
            await client.call(client.cluster.AddNode, pb.AddNodeRequest(addr=second.raft_address))
        theirs = NodeId(await second.node_id())
        bootstrap = Bootstrap(
            cluster_id_of([theirs]), Membership((theirs,), addresses=((theirs, second.raft_address),))
        )
        with pytest.raises(NotAuthenticated):
            await dialer(theirs).bind(first.raft_address, bootstrap, timeout=5.0)
        await first.put("/x", b"1")


async def test_a_command_of_a_newer_version_stops_the_broker(tmp_path: Path) -> None:
    async with Cluster(1, tmp_path) as cluster:
        await cluster.init()
        (broker,) = cluster.brokers
        await broker.put("/x", b"1")
        await broker.stop()
        _append_unknown_command(broker.data_dir)
        await broker.start(wait=False)
        assert await broker.ended() in (EXIT_START, EXIT_FAILED)
        assert any("UnknownCommand" in line for line in broker.lines)


def _append_unknown_command(data_dir: Path) -> None:
    """What a newer leader would have replicated here: a committed entry whose command has an unknown tag."""
    import random

    state = open_state(LocalDisk(data_dir), rng=random.SystemRandom())
    core = state.recovered.core
    assert core is not None
    last = core.entries[-1]
    payload = msgspec.msgpack.encode([[250, "from the future"], 0, 0, 0, 0, 0])
    entry = Entry(last.index + 1, last.term, EntryKind.COMMAND, payload)
    hard_state = HardState(core.hard_state.term, core.hard_state.vote, entry.index)
    state.log.append(RecordKind.BATCH, [encode(DurableBatch(hard_state, None, (entry,)))])
    state.log.sync()
    state.log.close()
    state.release()


async def _put_until_accepted(broker: BrokerProcess, key: str, value: bytes) -> None:
    """Refusals without effect are repeated, as a client would; the broker notices the room within a tick."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                await broker.put(key, value)
                return
            except RetryableError:
                await asyncio.sleep(0.05)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("mounting a small filesystem needs root")
    mount = tmp_path / "small"
    mount.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(mount)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"tmpfs cannot be mounted here: {mounted.stderr.decode().strip()}")
    yield mount
    subprocess.run(["umount", "-l", str(mount)], check=True)


async def _move(broker: BrokerProcess, disk: Path) -> None:
    await broker.stop()
    shutil.move(broker.data_dir, disk / "data")
    broker.data_dir.symlink_to(disk / "data", target_is_directory=True)
    await broker.start()


async def test_a_full_disk_refuses_writes_and_recovers(tmp_path: Path, small_disk: Path) -> None:
    async with Cluster(1, tmp_path) as cluster:
        (broker,) = cluster.brokers
        await _move(broker, small_disk)
        await cluster.init()
        ballast = small_disk / "ballast"
        await broker.put("/before", b"kept")
        ballast.write_bytes(b"b" * (1 << 20))
        written: list[str] = []

        async def fill() -> None:
            for number in range(200):
                await broker.put(f"/fill/{number}", b"f" * 20_000, timeout=2.0)
                written.append(f"/fill/{number}")

        with pytest.raises(SavaError):
            await fill()
        assert broker.is_running
        assert await broker.get("/before", local=True) == b"kept"

        ballast.unlink()
        await _put_until_accepted(broker, "/after", b"1")
        assert await broker.get("/before") == b"kept"
        for key in written:
            assert await broker.get(key) == b"f" * 20_000
        assert await broker.stop() == 0
        await broker.start()
        assert await broker.get("/after") == b"1"
        await broker.stop()


async def test_a_port_in_use_is_one_clear_line(tmp_path: Path) -> None:
    async with Cluster(1, tmp_path) as cluster:
        rival = await cluster.prepare()
        taken = cluster.brokers[0].admin.rpartition(":")[2]
        position = rival._arguments.index("--admin-port")
        rival._arguments[position + 1] = taken
        assert f"cannot listen on 127.0.0.1:{taken}" in await refused_start(rival)


async def test_a_leader_whose_disk_is_full_does_not_stop_the_others(tmp_path: Path, small_disk: Path) -> None:
    """One disk of three is full, and it is the leader's. It could neither write nor be deposed, for all heard
    it: every change in the whole cluster waited for an operator, and all brokers lost their leases."""
    async with Cluster(3, tmp_path) as cluster:
        victim, *others = cluster.brokers
        await _move(victim, small_disk)
        await cluster.init()
        full = await victim.node_id()
        if (leader := await cluster.leader()) is not victim:
            request = pb.TransferLeaderRequest(node_id=full)
            await leader.client.call(leader.client.cluster.TransferLeader, request)
        with contextlib.suppress(OSError), (small_disk / "ballast").open("wb", buffering=0) as ballast:
            while ballast.write(b"b" * 4096):
                pass
        async with asyncio.timeout(30):
            while (await others[0].status()).leader_id in (0, full):
                with contextlib.suppress(SavaError):
                    await others[0].put("/fill", b"f" * 20_000, timeout=2.0)
        revision = await others[0].put("/after", b"1")
        assert victim.is_running
        (small_disk / "ballast").unlink()
        await victim.caught_up(revision)
        assert await victim.get("/after") == b"1"
