"""The commands about topics without a broker: usage, positions, sources of messages, printing."""

from __future__ import annotations

import io
import json
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from sava.cli import messages, produce
from sava.cli.main import tree
from sava.cli.messages import Printer
from sava.cli.output import RawFormat
from sava.records import Message
from tests.support.waiting import OwnTime

runner = CliRunner()

COMMANDS = {
    "namespaces": "create list describe delete topics policies set-policy",
    "topics": "create list describe delete peek seek partitions set-policy subscriptions unsubscribe",
    "subscriptions": "list describe create delete seek configure",
    "schemas": "register get versions check mode delete list configure-topic topic",
}


@pytest.mark.parametrize(
    "arguments",
    [
        ["produce"],
        ["consume"],
        *([group, name] for group, names in COMMANDS.items() for name in names.split()),
    ],
    ids=" ".join,
)
def test_every_command_explains_itself(arguments: list[str]) -> None:
    result = runner.invoke(tree(), [*arguments, "--help"])
    assert result.exit_code == 0
    assert "Usage" in result.output


@pytest.mark.parametrize(
    "line",
    [
        "topics create",
        "topics create /default/a --partitions -1",
        "topics seek /default/a s",
        "topics seek /default/a s --earliest --latest",
        "topics seek /default/a s --time yesterday",
        "topics peek /default/a --from somewhere",
        "topics set-policy /default/a",
        "topics set-policy /default/a --clear max_everything",
        "topics set-policy /default/a --max-message-size 3 --clear max-message-size",
        "subscriptions create /default/a s --type round_robin",
        "subscriptions configure /default/a s",
        "schemas register orders --type avro",
        "schemas register orders --type cobol --file x",
        "schemas mode orders sideways",
        "produce /default/a x --file y",
        "produce /default/a --lines",
        "produce /default/a --count 3",
        "produce /default/a x --attribute novalue",
        "consume /default/a --no-ack",
        "consume /default/a --follow --timeout 3",
        "consume /default/a --start whenever",
    ],
)
def test_wrong_usage_is_exit_code_two(line: str) -> None:
    result = runner.invoke(tree(), line.split())
    assert result.exit_code == 2, result.output


def test_positions_are_ends_offsets_and_times() -> None:
    assert messages.parse_position("earliest") == "earliest"
    assert messages.parse_position("17") == 17
    noon = datetime(2026, 3, 1, 12, tzinfo=UTC)
    assert messages.parse_position("2026-03-01T12:00") == noon
    assert messages.parse_position("2026-03-01T14:00+02:00") == noon
    assert messages.position_message("latest").latest
    assert messages.position_message(0).WhichOneof("kind") == "offset"
    later = messages.position_message(noon + timedelta(microseconds=1)).publish_time
    assert messages.instant(later) == "2026-03-01T12:00:00.000001Z"
    with pytest.raises(typer.BadParameter, match="earliest, latest, an offset"):
        messages.parse_position("-3")


def test_lines_are_messages_as_soon_as_they_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    class Typed(io.BytesIO):
        """What a terminal gives: a line at a time."""

        def read1(self, size: int | None = -1, /) -> bytes:
            return self.readline()

    stdin = io.TextIOWrapper(Typed(b"one\ntwo\n\nlast without an end"))
    monkeypatch.setattr("sys.stdin", stdin)
    assert list(produce.lines_of(None)) == [[b"one"], [b"two"], [b""], [b"last without an end"]]


def test_lines_of_a_file_come_in_chunks_and_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(produce, "READ_BYTES", 7)
    file = tmp_path / "lines"
    wanted = [f"line {number}".encode() for number in range(100)]
    file.write_bytes(b"\n".join(wanted) + b"\n")
    assert [line for chunk in produce.lines_of(file) for line in chunk] == wanted
    with pytest.raises(produce.FileUnreadable, match="No such file"):
        list(produce.lines_of(tmp_path / "missing"))


@pytest.mark.parametrize(("payloads", "count"), [([b"a", b"b"], 1), ([b"a"], 2500), ([b"x" * 700_000], 3)])
def test_repetitions_are_cut_into_chunks_of_bearable_size(payloads: list[bytes], count: int) -> None:
    chunks = list(produce.repeated(payloads, count))
    assert [payload for chunk in chunks for payload in chunk] == payloads * count
    assert max(map(len, chunks)) <= produce.CHUNK_MESSAGES


def test_a_rate_is_kept_and_lost_time_is_not_made_up_for() -> None:
    began, own = time.monotonic(), OwnTime()
    chunks = produce.paced(iter([[b"m"] * 30]), 100)
    sizes = [len(chunk) for chunk in chunks]
    assert sizes == [5] * 6
    assert time.monotonic() - began > 0.2
    assert own.seconds < 2.0


def test_messages_are_printed_a_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    messages = [
        Message(b"hello", key="k", attributes={"a": "1"}, offset=3, topic="/default/t", producer="p"),
        Message(b"\xff\x1b[31m", offset=4, topic="/default/t-part-2"),
    ]
    Printer(RawFormat.TABLE).show(messages)
    header, first, second = capsys.readouterr().out.splitlines()
    assert header.split() == ["OFFSET", "PUBLISH_TIME", "KEY", "PRODUCER", "ATTRIBUTES", "PAYLOAD"]
    assert first.split() == ["3", "1970-01-01T00:00:00Z", "k", "p", "a=1", "hello"]
    assert second.split()[0] == "2:4"
    assert "\x1b" not in second

    Printer(RawFormat.JSON).show(messages)
    one, other = map(json.loads, capsys.readouterr().out.splitlines())
    assert (one["payload"], one["offset"], one["topic"]) == ("hello", 3, "/default/t")
    assert "payload" not in other
    assert other["payload_base64"] == "/xtbMzFt"
