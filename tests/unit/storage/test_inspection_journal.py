"""The journal of a stopped broker: everything is seen, nothing is changed, and `sava storage` tells it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from sava.cli.main import main, tree
from sava.records import Message, RecordBatch
from sava.storage.inspection import NoJournal, NotInJournal, open_stopped
from sava.storage.types import TopicKey
from sava.wal import DirectoryLocked, LocalDisk, Log
from tests.support.storage import EAGER, OTHER, TOPIC, Cluster, numbered, small_files

FIRST = Message(b"paid", key="k1", attributes={"a": "b"}, publish_time=1_000_001, producer="shop")
SECOND = Message(b"\xff\x00", publish_time=1 << 62)


@pytest.fixture
async def directory(tmp_path: Path) -> Path:
    """22 messages of one topic and 3 of another, over several files."""
    cluster = Cluster(tmp_path)
    async with cluster.broker("a", small_files(file_bytes=512)) as storage:
        log = await storage.open_topic(TOPIC, epoch=1)
        for offset in range(0, 20, 5):
            await log.append(numbered(offset, offset + 5))
        await log.append(RecordBatch.from_messages([FIRST, SECOND]))
        await (await storage.open_topic(OTHER, epoch=1)).append(numbered(0, 3))
    return tmp_path / "a"


def contents(path: Path) -> dict[str, tuple[bytes, int]]:
    """Every file with its bytes and the time of its last change, and the directory's own."""
    files = {each.name: (each.read_bytes(), each.stat().st_mtime_ns) for each in path.iterdir()}
    return {".": (b"", path.stat().st_mtime_ns), **files}


def log_files(path: Path) -> list[Path]:
    return sorted(path.glob("log-*"))


def sava(*arguments: object) -> Result:
    return CliRunner().invoke(tree(), ["storage", *map(str, arguments)])


# -- seeing --------------------------------------------------------------------------------------


def test_topics_are_listed_by_id_with_their_offsets(directory: Path) -> None:
    with open_stopped(directory) as journal:
        assert journal.scan() == []
        assert [(each.topic_id, each.ranges) for each in journal.topics] == [(7, [(0, 22)]), (8, [(0, 3)])]
        assert journal.identity is not None
        assert journal.identity.owner == "a"
        assert journal.file_count > 2


def test_messages_are_read_from_and_to_any_offset(directory: Path) -> None:
    with open_stopped(directory) as journal:
        journal.scan()
        for start, end in ((0, 20), (3, 4), (7, 18), (20, 20)):
            found = [each for batch in journal.read(7, start, end) for each in batch.payloads()]
            assert found == [b"%d" % offset for offset in range(start, end)]
        assert sum(map(len, journal.read(7, None))) == 22
        absent: list[tuple[int, int | None, int | None]]
        absent = [(7, 22, None), (7, 5, 23), (7, 5, 4), (9, None, None)]
        for topic, first, last in absent:
            with pytest.raises(NotInJournal):
                journal.read(topic, first, last)


async def test_what_is_in_segments_is_not_counted_as_held(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    async with cluster.broker("a", EAGER) as storage:
        log = await storage.open_topic(TOPIC, epoch=1)
        await log.append(numbered(0, 5))
        await log.seal()
    with open_stopped(tmp_path / "a") as journal:
        assert journal.scan() == []
        assert journal.topics == []


async def test_ranges_with_a_gap_between_them(tmp_path: Path) -> None:
    """Epoch 1 here, epoch 2 elsewhere, epoch 3 here: the journal holds 0..5 and 8..10, if nothing released
    the first."""
    log = Log.open(LocalDisk(tmp_path / "a"), owner="a", new_storage_id=lambda: "disk")
    for base, end, epoch in ((0, 5, 1), (8, 10, 3)):
        log.append(1, [numbered(base, end).assigned(topic_id=7, epoch=epoch, base_offset=base).data])
    log.sync()
    log.close()
    with open_stopped(tmp_path / "a") as journal:
        assert journal.scan() == []
        assert journal.topics[0].ranges == [(0, 5), (8, 10)]
        assert [batch.next_offset for batch in journal.read(7, 9)] == [10]
        assert [batch.next_offset for batch in journal.read(7, None)] == [5]
        with pytest.raises(NotInJournal, match=r"0\.\.5, 8\.\.10"):
            journal.read(7, 4, 9)


# -- changing nothing ----------------------------------------------------------------------------


def test_nothing_is_changed_whatever_state_it_is_in(directory: Path) -> None:
    """A torn tail and the remains of a half-made file, which a start would remove."""
    with log_files(directory)[-1].open("ab") as file:
        file.write(b"torn" * 10)
    (directory / "log.new").write_bytes(b"half")
    before = contents(directory)
    for arguments in (
        ("inspect", "--journal", directory),
        ("verify", "--journal", directory),
        ("dump", 7, "--journal", directory),
    ):
        result = sava(*arguments)
        assert result.exit_code == 0, result.output
        assert contents(directory) == before
    assert "40 bytes at the end were never acknowledged" in sava("verify", "--journal", directory).output


def test_a_directory_in_use_is_refused_and_held_while_it_is_looked_at(directory: Path) -> None:
    disk = LocalDisk(directory)
    disk.lock()
    with pytest.raises(DirectoryLocked, match="stop it"), open_stopped(directory):
        pass
    disk.unlock()
    with open_stopped(directory), open_stopped(directory), pytest.raises(DirectoryLocked):
        disk.lock()
    disk.lock()
    disk.unlock()


def test_a_copy_without_its_lock_can_be_looked_at(directory: Path) -> None:
    (directory / ".lock").unlink()
    before = contents(directory)
    with open_stopped(directory) as journal:
        assert journal.scan() == []
    assert contents(directory) == before


def test_what_is_no_journal_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(NoJournal, match=r"storage\.journal_dir"), open_stopped(tmp_path):
        pass
    monkeypatch.setattr("sys.argv", ["sava", "storage", "verify", "--journal", str(tmp_path / "missing")])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    assert "missing: cannot list: No such file or directory" in capsys.readouterr().err
    assert not (tmp_path / "missing").exists()


# -- damage --------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", [0, -2])
def test_a_flipped_byte_is_found(directory: Path, which: int) -> None:
    file = log_files(directory)[which]
    data = bytearray(file.read_bytes())
    data[-30] ^= 1
    file.write_bytes(data)
    result = sava("verify", "--journal", directory)
    assert result.exit_code == 1
    assert f"{file.name}: a bad record in a file that was closed" in result.output
    assert "1 problem" in result.output


def test_a_missing_file_is_found(directory: Path) -> None:
    log_files(directory)[1].unlink()
    result = sava("verify", "--journal", directory)
    assert result.exit_code == 1
    assert "files are missing before this one" in result.output


def test_an_intact_frame_without_a_batch_is_found_with_its_position(tmp_path: Path) -> None:
    log = Log.open(LocalDisk(tmp_path / "a"), owner="a", new_storage_id=lambda: "disk")
    good = numbered(0, 5).assigned(topic_id=7, epoch=1, base_offset=0)
    bad = bytearray(numbered(5, 9).assigned(topic_id=7, epoch=1, base_offset=5).data)
    bad[-1] ^= 1
    log.append(1, [good.data])
    position = log.append(1, [bytes(bad)])
    log.sync()
    log.close()
    result = sava("verify", "--journal", tmp_path / "a")
    assert result.exit_code == 1
    assert f"the batch at position {position}: " in result.output


def test_what_stands_before_the_damage_is_shown(
    directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log_files(directory)[-2].unlink()
    for command in (("inspect",), ("dump", "7", "--to", "5", "-o", "raw")):
        monkeypatch.setattr("sys.argv", ["sava", "storage", *command, "--journal", str(directory)])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 1
        captured = capsys.readouterr()
        assert "cannot be read to its end" in captured.err
        assert captured.out


# -- telling -------------------------------------------------------------------------------------


def test_inspect_tells_whose_journal_it_is_and_what_it_holds(directory: Path) -> None:
    shown = sava("inspect", "--journal", directory).output
    assert "of a, opened 1 times" in shown
    assert "0..22" in shown
    told = json.loads(sava("inspect", "--journal", directory, "-o", "json").output)
    assert told["identity"]["owner"] == "a"
    assert told["topics"][0] == {"topic_id": "7", "ranges": [[0, 22]], "size": told["topics"][0]["size"]}
    assert told["problems"] == []


def test_dump_prints_messages_exactly(directory: Path) -> None:
    lines = sava("dump", 7, "--journal", directory, "--from", 20).output.splitlines()
    assert [json.loads(line) for line in lines] == [
        {
            "offset": 20,
            "publish_time": "1970-01-01T00:00:01.000001Z",
            "key": "k1",
            "producer": "shop",
            "attributes": {"a": "b"},
            "payload": "paid",
        },
        {
            "offset": 21,
            "publish_time": str(1 << 62),
            "key": None,
            "producer": None,
            "attributes": {},
            "payload_base64": "/wA=",
        },
    ]
    raw = sava("dump", 7, "--journal", directory, "--from", 20, "-o", "raw")
    assert raw.stdout_bytes == b"paid\n\xff\x00\n"
    assert sava("dump", 7, "--journal", directory, "--limit", 7, "-o", "raw").output.split() == list(
        "0123456"
    )


async def test_a_table_keeps_control_characters_from_the_terminal(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    async with cluster.broker("a") as storage:
        log = await storage.open_topic(TopicKey("default", "t", 7), epoch=1)
        await log.append(RecordBatch.encode([b"\x1b[2Jhello\nworld" + b"x" * 500], publish_time=0))
    table = sava("dump", 7, "--journal", tmp_path / "a", "-o", "table").output
    header, line = table.splitlines()
    assert header.split() == ["OFFSET", "PUBLISH_TIME", "KEY", "PRODUCER", "ATTRIBUTES", "PAYLOAD"]
    assert "\\x1b[2Jhello\\nworld" in line
    assert len(line) < 250


@pytest.mark.parametrize(
    "arguments",
    [
        ["inspect", "--journal", "d", "--topic", "/a/b"],
        ["verify", "--journal", "d", "--url", "file:///x"],
        ["dump", "/a/b", "--journal", "d"],
        ["dump"],
        ["dump", "/a/b", "--from", "-1"],
        ["dump", "/a/b", "-o", "xml"],
        ["nonsense"],
    ],
    ids=" ".join,
)
def test_wrong_usage_is_exit_code_two(arguments: list[str]) -> None:
    assert sava(*arguments).exit_code == 2


@pytest.mark.parametrize("command", ["inspect", "verify", "dump"])
def test_every_command_explains_itself(command: str) -> None:
    result = sava(command, "--help")
    assert result.exit_code == 0
    assert "--journal" in result.output
