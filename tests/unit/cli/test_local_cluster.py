"""A local cluster's directory: which ports are chosen, and what is refused before any process is started; and
a runner that ends."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
import pytest

from sava import local_cluster
from sava.local_cluster import (
    LAYOUT,
    Layout,
    LocalBroker,
    LocalCluster,
    LocalClusterFailed,
    LocalRunner,
    Ports,
)
from sava.wal.disk import LocalDisk
from tests.support.commands import Sava
from tests.support.network import free_ports


@pytest.fixture
def usual(monkeypatch: pytest.MonkeyPatch) -> Ports:
    """Usual ports that the tests may use."""
    row = free_ports(12)[0]
    ports = Ports(client=row, admin=row + 3, raft=row + 6, http=row + 9)
    monkeypatch.setattr(local_cluster, "USUAL", ports)
    return ports


async def _prepare(root: Path, brokers: int | None = None, port_base: int | None = None) -> LocalCluster:
    """Everything up to the first process."""
    cluster = LocalCluster(root, brokers=brokers, port_base=port_base)
    try:
        cluster.prepare()
    finally:
        cluster.brokers = []
        await cluster.stop()
    return cluster


def _layout(root: Path) -> tuple[Ports, ...]:
    return msgspec.json.decode((root / LAYOUT).read_bytes(), type=Layout).brokers


@pytest.fixture
def taken() -> Iterator[int]:
    """A port that somebody listens on, with free ones after it."""
    row = free_ports(13)[0]
    with socket.create_server(("127.0.0.1", row)):
        yield row


async def test_the_next_brokers_get_the_next_ports(tmp_path: Path, usual: Ports) -> None:
    await _prepare(tmp_path)
    assert _layout(tmp_path) == tuple(
        Ports(**{name: port + number for name, port in msgspec.structs.asdict(usual).items()})
        for number in range(3)
    )


async def test_ports_in_a_row_pass_over_what_is_taken(tmp_path: Path, taken: int) -> None:
    await _prepare(tmp_path, brokers=2, port_base=taken)
    first, second = _layout(tmp_path)
    # The first port is passed over, and what was wanted there goes to the next that nobody has or was given.
    assert (first.client, first.admin, first.raft, first.http) == tuple(range(taken + 1, taken + 5))
    assert (second.client, second.admin, second.raft, second.http) == tuple(range(taken + 5, taken + 9))


async def test_a_second_start_has_the_ports_of_the_first(tmp_path: Path) -> None:
    await _prepare(tmp_path, brokers=2, port_base=free_ports(8)[0])
    chosen = _layout(tmp_path)
    (tmp_path / "sava.yml").write_text("cluster_name: mine\n")
    await _prepare(tmp_path)
    await _prepare(tmp_path, brokers=2)
    assert _layout(tmp_path) == chosen
    assert (tmp_path / "sava.yml").read_text() == "cluster_name: mine\n"


async def test_what_would_change_a_cluster_is_refused(tmp_path: Path) -> None:
    base = free_ports(8)[0]
    await _prepare(tmp_path, brokers=2, port_base=base)
    with pytest.raises(LocalClusterFailed, match="has 2 brokers, not 3"):
        await _prepare(tmp_path, brokers=3)
    with pytest.raises(LocalClusterFailed, match="leave out --port-base"):
        await _prepare(tmp_path, port_base=base + 1)


async def test_the_same_command_starts_it_again(tmp_path: Path, taken: int) -> None:
    """Somebody has the first port, so that the cluster does not begin at the base that was asked for. The
    same words must do at the next start all the same."""
    await _prepare(tmp_path, brokers=1, port_base=taken)
    await _prepare(tmp_path, brokers=1, port_base=taken)


async def test_a_port_that_somebody_has_taken_meanwhile_is_named(tmp_path: Path) -> None:
    base = free_ports(8)[0]
    await _prepare(tmp_path, brokers=2, port_base=base)
    with (
        socket.create_server(("127.0.0.1", base + 6)),
        pytest.raises(LocalClusterFailed, match=f"raft port {base + 6} of broker 2 is taken"),
    ):
        await _prepare(tmp_path)


async def test_one_directory_is_used_by_one(tmp_path: Path) -> None:
    other = LocalDisk(tmp_path)
    other.lock()
    with pytest.raises(LocalClusterFailed, match=r"is in use by another process \(pid \d+\)"):
        await _prepare(tmp_path)
    other.unlock()
    await _prepare(tmp_path, port_base=free_ports(12)[0])


async def test_a_broker_that_outlived_its_cluster_is_told_of(tmp_path: Path) -> None:
    await _prepare(tmp_path, brokers=2, port_base=free_ports(8)[0])
    survivor = LocalDisk(tmp_path / "broker-2")
    survivor.lock()
    with pytest.raises(LocalClusterFailed, match=r"pid \d+\): broker 2 of an earlier run; stop it first"):
        await _prepare(tmp_path)
    survivor.unlock()


async def test_the_directory_of_a_single_broker_is_not_taken_over(tmp_path: Path) -> None:
    (tmp_path / "node_id").write_text("7")
    with pytest.raises(LocalClusterFailed, match="data directory of a single broker"):
        await _prepare(tmp_path)


def test_a_single_broker_does_not_take_over_the_directory_of_a_cluster(tmp_path: Path, sava: Sava) -> None:
    (tmp_path / LAYOUT).write_text("{}")
    assert "sava up" in sava(f"broker --standalone --data-dir {tmp_path}", code=2).err


async def test_a_damaged_file_of_ports_is_not_guessed_at(tmp_path: Path) -> None:
    (tmp_path / LAYOUT).write_text("{")
    with pytest.raises(LocalClusterFailed, match="cannot be read"):
        await _prepare(tmp_path)


# -- a runner that ends ----------------------------------------------------------------------------

ENDS = """
import pathlib, sys, time
code = int(pathlib.Path(sys.argv[1]).read_text())
print("no Java", flush=True)
if code < 0:
    time.sleep(600)
sys.exit(code)
"""


@pytest.fixture
async def with_runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[LocalCluster]:
    """It ends with the code that the file ``code`` has; -1: it goes on."""
    monkeypatch.setattr(local_cluster, "FIRST_DELAY_S", 0.1)
    cluster = LocalCluster(tmp_path, pipelines=True)
    cluster.runner = LocalRunner(tmp_path, [sys.executable, "-c", ENDS, str(tmp_path / "code")])
    yield cluster
    await cluster.stop()
    assert not cluster.runner.is_running


async def test_a_runner_that_ends_is_started_again_after_growing_pauses(
    tmp_path: Path, with_runner: LocalCluster
) -> None:
    (tmp_path / "code").write_text("70")
    assert with_runner.runner is not None
    with_runner.runner.start()
    pids = set()
    for delay in ("0.1", "0.2", "0.4"):
        ended = await with_runner.next_end()
        pids.add(ended.pid)
        assert ended.end() == (
            f"the runner of pipelines ended with code 70 and is started again in {delay} s; "
            f"the end of {tmp_path / 'pipelines.log'}: no Java"
        )
    assert len(pids) == 3


async def test_a_runner_that_was_killed_is_started_again(tmp_path: Path, with_runner: LocalCluster) -> None:
    (tmp_path / "code").write_text("-1")
    runner = with_runner.runner
    assert runner is not None
    runner.start()
    killed = runner.pid
    os.kill(killed, signal.SIGKILL)
    assert "was killed by SIGKILL and is started again in 0.1 s" in (await with_runner.next_end()).end()
    (tmp_path / "code").write_text("70")
    again = await with_runner.next_end()
    assert (again.code, again.pid != killed) == (70, True)


async def test_a_runner_that_was_told_to_end_stays_away(tmp_path: Path, with_runner: LocalCluster) -> None:
    (tmp_path / "code").write_text("0")
    assert with_runner.runner is not None
    with_runner.runner.start()
    ended = await with_runner.next_end()
    assert "the runner of pipelines ended with code 0; the end of" in ended.end()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5):
            await with_runner.next_end()


async def test_a_broker_that_cannot_run_is_not_started_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends with code 1 each time. After the third end it stays away, and the end says how to start it."""
    monkeypatch.setattr(local_cluster, "FIRST_DELAY_S", 0.01)
    monkeypatch.setattr(local_cluster, "MOST_RESTARTS", 2)
    cluster = LocalCluster(tmp_path, restart=True)
    (tmp_path / "code").write_text("1")
    broker = LocalBroker(tmp_path, 1, local_cluster.USUAL, restart=True)
    broker._command = [sys.executable, "-c", ENDS, str(tmp_path / "code")]
    cluster.brokers = [broker]
    broker.start()
    said: list[str] = []
    for delay in ("0.01", "0.02"):
        ended = await cluster.next_end(said.append)
        assert f"broker 1 ended with code 1 and is started again in {delay} s" in ended.end()
        assert not cluster.has_ended
    last = (await cluster.next_end(said.append)).end()
    assert "broker 1 ended with code 1 and is not started again: it was, 2 times in a row; the end" in last
    assert "start it again, in another terminal: " in last
    assert len(said) == 2
    assert cluster.has_ended


@pytest.mark.parametrize("place", ["file", "file/below"])
async def test_a_directory_that_cannot_be_is_told_with_the_way_out(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(LocalClusterFailed, match=r"cannot create: .*; give another --data-dir"):
        await _prepare(tmp_path / place)
