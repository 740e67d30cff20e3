"""What only a real directory can show: the kernel's errors, and the lock against another process."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from sava.wal import DirectoryLocked, DiskFailed, DiskFull, LocalDisk
from tests.unit.wal.helpers import append, open_log, recovered_payloads


def failing(number: int) -> Callable[..., int]:
    def call(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    return call


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_no_room_in_the_middle_of_a_write_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    log = open_log(LocalDisk(tmp_path))
    append(log, b"before")
    end, write = log.end, os.pwritev

    def write_half(fd: int, buffers: list[bytes], offset: int) -> int:
        whole = b"".join(buffers)
        return write(fd, [whole[: len(whole) // 2]], offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", write_half)
        patch.setattr(os, "pwrite", failing(number))
        with pytest.raises(DiskFull):
            append(log, b"x" * 100, b"y" * 100)

    assert log.end == end
    assert sum(path.stat().st_size for path in tmp_path.glob("log-*")) == end
    append(log, b"after")
    log.close()
    assert recovered_payloads(LocalDisk(tmp_path)) == [b"before", b"after"]


def test_a_short_write_is_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda fd, buffers, offset: write(fd, [buffers[0][:3]], offset))
    file = LocalDisk(tmp_path).open("f", create=True)
    file.write(0, [b"hello ", memoryview(b"world")])
    assert file.read(0, 100) == b"hello world"
    file.close()


def test_much_is_written_in_calls_of_a_megabyte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    write = os.pwritev

    def counting(fd: int, buffers: list[memoryview], offset: int) -> int:
        sizes.append(sum(map(len, buffers)))
        return write(fd, buffers, offset)

    monkeypatch.setattr(os, "pwritev", counting)
    parts = [os.urandom(size) for size in (100, 5 << 19, 1, 1 << 20, 0, 7)]
    file = LocalDisk(tmp_path).open("f", create=True)
    assert file.write(3, parts) == sum(map(len, parts))
    assert file.read(3, 1 << 30) == b"".join(parts)
    assert sizes == [1 << 20] * 3 + [(1 << 19) + 108]
    file.close()


def test_no_room_in_a_later_call_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = LocalDisk(tmp_path).open("f", create=True)
    file.write(0, [b"before"])
    calls, sizes, sync = [os.pwritev, failing(errno.ENOSPC)], [], os.fdatasync
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", lambda *call: calls.pop(0)(*call))
        patch.setattr(
            "sava.wal.disk._fdatasync", lambda fd: sizes.append((sync(fd), os.fstat(fd).st_size)[1])
        )
        with pytest.raises(DiskFull):
            file.write(6, [bytes(3 << 20)])
    assert calls == []
    assert sizes == [6], "what was refused would be back after a power cut"
    assert file.read(0, 100) == b"before"
    file.close()


def test_other_errors_are_failures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = LocalDisk(tmp_path)
    file = disk.open("f", create=True)
    calls: list[tuple[str, Callable[[], object]]] = [
        ("pwritev", lambda: file.write(0, [b"x"])),
        ("pread", lambda: file.read(0, 1)),
        ("ftruncate", lambda: file.truncate(0)),
    ]
    for name, call in calls:
        with monkeypatch.context() as patch:
            patch.setattr(os, name, failing(errno.EIO))
            with pytest.raises(DiskFailed):
                call()
    file.close()


def test_writing_durably_goes_on_in_two_calls_where_one_will_not_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = LocalDisk(tmp_path).open("f", create=True)
    file.write(0, [bytes(20)])
    file.write_durably(0, b"one call")
    write, sync = os.pwritev, os.fdatasync
    syncs: list[None] = []
    monkeypatch.setattr("sava.wal.disk._fdatasync", lambda fd: syncs.append(sync(fd)))

    def refusing(number: int, fd: int, buffers: list[bytes], offset: int, *flags: int) -> int:
        if flags and number:
            raise OSError(number, os.strerror(number))
        return write(fd, [buffers[0][:3]] if flags else buffers, offset)

    for number in (errno.EOPNOTSUPP, errno.ENOSPC, 0):
        monkeypatch.setattr(os, "pwritev", partial(refusing, number))
        file.write_durably(8, b", or two")
        assert file.read(0, 100) == b"one call, or two" + bytes(4)
    assert len(syncs) == 3
    monkeypatch.setattr(os, "pwritev", failing(errno.ENOSPC))
    with pytest.raises(DiskFull):
        file.write_durably(0, b"x")
    monkeypatch.setattr(os, "pwritev", failing(errno.EIO))
    with pytest.raises(DiskFailed):
        file.write_durably(0, b"x")
    file.close()


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_a_sync_that_fails_is_a_failed_disk_even_for_want_of_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    disk = LocalDisk(tmp_path)
    file = disk.open("f", create=True)
    monkeypatch.setattr("sava.wal.disk._fdatasync", failing(number))
    monkeypatch.setattr(os, "fsync", failing(number))
    with pytest.raises(DiskFailed):
        file.sync()
    with pytest.raises(DiskFailed):
        disk.sync_dir()
    file.close()


def test_the_lock_holds_against_another_process_and_names_its_holder(tmp_path: Path) -> None:
    log = open_log(LocalDisk(tmp_path))
    attempt = f"from sava.wal import LocalDisk; LocalDisk({str(tmp_path)!r}).lock()"
    result = subprocess.run([sys.executable, "-c", attempt], capture_output=True, text=True, check=False)
    assert result.returncode != 0
    assert DirectoryLocked.__name__ in result.stderr
    assert f"pid {os.getpid()}" in result.stderr
    log.close()
    subprocess.run([sys.executable, "-c", attempt], check=True)


def test_missing_parents_are_created(tmp_path: Path) -> None:
    disk = LocalDisk(tmp_path / "a" / "b").directory("c")
    assert disk.path == str(tmp_path / "a" / "b" / "c")
    assert disk.list() == []
    disk.lock()
    assert disk.list() == []
    disk.unlock()
