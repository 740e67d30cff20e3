"""Topics, subscriptions, namespaces, schemas and messages from the command line, with one real broker."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sava.cli import produce
from sava.cli.main import main
from tests.support.brokers import Standalone
from tests.support.commands import Result, Sava
from tests.support.waiting import FAR_S, PATIENCE_S


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A standalone broker, and the variables under which commands find it."""
    with Standalone(tmp_path_factory.mktemp("broker")) as broker:
        broker.ready()
        yield {"SAVA_ADMIN": broker.admin, "SAVA_SERVICE": broker.url}


@pytest.fixture
def sava(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> Sava:
    """The command, run in this process: starting Python for each of them would take most of the time."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)

    def run(line: str, *more: str, stdin: bytes = b"", code: int = 0) -> Result:
        monkeypatch.setattr("sys.argv", ["sava", *line.split(), *more])
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BufferedReader(io.BytesIO(stdin))))
        capfdbinary.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        sys.stdout.flush()
        captured = capfdbinary.readouterr()
        result = Result(int(ended.value.code or 0), captured.out.decode(), captured.err.decode())
        assert result.code == code, result
        if code == 1:
            assert result.err.startswith("sava: ")
            assert result.err.count("\n") == 1
        return result

    return run


# -- namespaces ----------------------------------------------------------------------------------


def test_a_namespace_from_its_creation_to_its_end(sava: Sava) -> None:
    assert "created" in sava("namespaces create shop").out
    assert "exists already" in sava("namespaces create shop", code=1).err
    assert "exists already" in sava("namespaces create shop --if-absent").out
    assert "shop" in sava("namespaces list").out.split()
    assert {"default", "shop", "system"} <= set(sava("namespaces list -o json").json)

    shown = sava("namespaces set-policy shop --max-message-size 100 --max-publish-rate 0").out
    assert ["max_message_size", "100", "100"] in [line.split() for line in shown.splitlines()]
    assert ["max_publish_rate", "none", "none"] in [line.split() for line in shown.splitlines()]
    policies = sava("namespaces policies shop -o json").json
    assert policies["policy"]["max_message_size"] == 100
    assert policies["policy"]["retention_size_mb"] is None
    assert "max_message_size" in sava("namespaces policies shop").out
    cleared = sava("namespaces set-policy shop --clear max-message-size -o json").json
    assert cleared["policy"]["max_message_size"] is None

    sava("topics create /shop/a")
    assert "/shop/a" in sava("namespaces topics shop").out
    assert sava("namespaces topics shop -o json").json[0]["name"] == "/shop/a"
    assert "1 topics" in sava("namespaces describe shop").out
    assert "has topics" in sava("namespaces delete shop --yes", code=1).err
    sava("topics delete /shop/a --yes")
    assert "deleted" in sava("namespaces delete shop --yes").out
    assert "does not exist" in sava("namespaces describe shop", code=1).err


# -- topics --------------------------------------------------------------------------------------


def test_a_topic_from_its_creation_to_its_end(sava: Sava) -> None:
    created = sava("topics create /default/life -o json").json
    assert isinstance(created["topic_id"], str)
    assert "exists already" in sava("topics create /default/life", code=1).err
    assert "is there" in sava("topics create /default/life --if-absent").out
    assert "/namespace/topic" in sava("topics create life", code=1).err
    assert "namespace nowhere does not exist" in sava("topics create /nowhere/life", code=1).err

    assert "/default/life" in sava("topics list").out
    assert {"name", "broker_id", "delivery"} <= set(sava("topics list default -o json").json[0])
    shown = sava("topics describe /default/life").out
    assert "Reliable" in shown
    described = sava("topics describe /default/life -o json").json
    # It was given to the broker, which has taken it up.
    assert (described["name"], described["next_offset"], described["epoch"]) == ("/default/life", 0, 2)

    limited = sava("topics set-policy /default/life --max-message-size 3").out
    assert ["max_message_size", "3", "3"] in [line.split() for line in limited.splitlines()]
    assert "takes 3 at most" in sava("produce /default/life long", code=1).err
    sava("topics set-policy /default/life --clear max_message_size -o json")
    sava("produce /default/life long")

    for command in (
        "topics delete /default/life",
        "subscriptions delete /default/life s",
        "topics unsubscribe /default/life s",
        "namespaces delete default",
    ):
        assert "repeat with --yes" in sava(command, code=1).err
    assert "/default/life" in sava("topics list").out
    assert "deleted" in sava("topics delete /default/life --yes").out
    assert "does not exist" in sava("topics delete /default/life --yes", code=1).err
    assert "does not exist" in sava("topics describe /default/life", code=1).err


def test_a_partitioned_topic_is_shown_as_a_whole_and_in_parts(sava: Sava) -> None:
    sava("topics create /default/parts --partitions 2")
    sava("subscriptions create /default/parts s --start earliest")
    sent = sava("produce /default/parts -o json", stdin=b"".join(b"%d\n" % n for n in range(10))).json
    assert sent["messages"] == 10
    assert sum(part["next_offset"] - part["first_offset"] for part in sent["offsets"]) == 10

    shown = sava("topics describe /default/parts").out
    assert "/default/parts-part-1" in shown
    (subscription,) = sava("topics describe /default/parts -o json").json["subscriptions"]
    assert (subscription["backlog"], subscription["cursor"]) == (10, None)
    parts = sava("topics partitions /default/parts -o json").json
    assert sum(part["next_offset"] for part in parts) == 10
    assert len(sava("topics partitions /default/parts --grow 3").out.splitlines()) == 4
    assert "only get more" in sava("topics partitions /default/parts --grow 1", code=1).err
    sava("topics create /default/plain")
    assert "has no partitions" in sava("topics partitions /default/plain", code=1).err

    assert "name one of them" in sava("topics seek /default/parts s --offset 0", code=1).err
    assert sava("topics seek /default/parts s --latest -o json").json["backlog"] == 0
    payloads = [line["payload"] for line in sava("topics peek /default/parts --limit 20 -o json").lines]
    assert sorted(payloads, key=int) == [str(number) for number in range(10)]
    assert len(sava("topics peek /default/parts --from latest --limit 3 -o json").lines) == 3


# -- messages ------------------------------------------------------------------------------------


def test_messages_come_from_arguments_files_and_standard_input(
    sava: Sava, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(produce, "QUIET_S", FAR_S)  # what takes long is told with the time that it took
    told = sava("produce /default/sources one two --key k --attribute a=1 --name me").out
    assert told == "2 messages published to /default/sources, offsets 0 to 1\n"
    file = tmp_path / "file"
    file.write_bytes(b"three\nfour\n")
    sava("produce /default/sources --lines --file", str(file))
    sava("produce /default/sources --file", str(file))
    sava("produce /default/sources --file -", stdin=b"five\n")
    sava("produce /default/sources --compression zstd", stdin=b"six\nseven")
    made = sava("produce /default/sources --size 5 --count 3 --compression lz4 -o json").json
    assert (made["messages"], made["bytes"]) == (3, 15)
    assert made["offsets"] == [{"topic": "/default/sources", "first_offset": 8, "next_offset": 11}]
    assert "cannot be read" in sava("produce /default/sources --file /does/not/exist", code=1).err

    messages = sava("consume /default/sources --count 8 -o json").lines
    assert [message["payload"] for message in messages] == [
        *("one", "two", "three", "four", "three\nfour\n", "five\n", "six", "seven"),
    ]
    first = messages[0]
    assert (first["key"], first["attributes"], first["producer"]) == ("k", {"a": "1"}, "me")
    assert (first["offset"], first["topic"]) == (0, "/default/sources")
    assert sava("consume /default/sources --start 6 --count 2 -o raw").out == "six\nseven\n"


def test_peek_shows_messages_and_touches_no_subscription(sava: Sava) -> None:
    sava("subscriptions create /default/peeked s --start earliest", code=1)
    sava("produce /default/peeked", stdin=b"\n".join(b"%d" % n for n in range(20)))
    sava("subscriptions create /default/peeked s --start earliest")
    assert sava("topics peek /default/peeked --limit 2 -o raw").out == "0\n1\n"
    assert sava("topics peek /default/peeked --from 18 -o raw").out == "18\n19\n"
    assert sava("topics peek /default/peeked --from latest --limit 2 -o raw").out == "18\n19\n"
    assert sava("topics peek /default/peeked --time 2000-01-01 --limit 1 -o raw").out == "0\n"
    assert len(sava("topics peek /default/peeked").out.splitlines()) == 11
    described = sava("subscriptions describe /default/peeked s -o json").json
    assert (described["cursor"], described["delivered"]) == (0, 0)
    assert "does not exist" in sava("topics peek /default/missing", code=1).err


def test_a_rate_takes_its_time_and_says_how_far_it_is(sava: Sava) -> None:
    result = sava("produce /default/slow --size 10 --count 30 --rate 20")
    assert "messages/s" in result.err
    assert "30 messages published" in result.out


def test_what_is_consumed_is_acked_unless_that_is_not_wanted(sava: Sava) -> None:
    sava("produce /default/consumed a b c d")
    consume = "consume /default/consumed --subscription s -o raw"
    assert sava(f"{consume} --no-ack --count 2").out == "a\nb\n"
    assert sava(f"{consume} --count 3").out == "a\nb\nc\n"
    assert sava("subscriptions describe /default/consumed s -o json").json["cursor"] == 3
    assert sava(f"{consume} --timeout 1").out == "d\n"
    assert "0 of 1 messages came" in sava(f"{consume} --count 1 --timeout 0.2", code=1).err
    assert "is shared, and not exclusive" in sava(f"{consume} --type exclusive", code=1).err
    assert "does not exist" in sava("consume /default/missing -s s", code=1).err


def test_non_reliable_topics_are_produced_to_and_have_nothing_to_read(sava: Sava) -> None:
    sava("topics create /default/prices --non-reliable")
    sava("produce /default/prices 1 2 3")
    assert sava("topics describe /default/prices -o json").json["next_offset"] is None
    assert "NonReliable" in sava("topics describe /default/prices").out
    assert "non-reliable" in sava("consume /default/prices", code=1).err
    sava("topics create /default/kept")
    assert "reliable" in sava("produce /default/kept x --non-reliable", code=1).err


def test_following_ends_cleanly_when_it_is_interrupted(environment: dict[str, str], sava: Sava) -> None:
    sava("produce /default/followed a b")
    arguments = ["consume", "/default/followed", "--subscription", "s", "--follow", "-o", "raw"]
    command = [sys.executable, "-m", "sava.cli", *arguments]
    env = {**os.environ, **environment}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == b"a\n"
        assert process.stdout.readline() == b"b\n"
        sava("produce /default/followed c")
        assert process.stdout.readline() == b"c\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=PATIENCE_S) == 130
        assert process.stderr.read() == b""
    assert sava("subscriptions describe /default/followed s -o json").json["cursor"] == 3


def test_a_line_is_published_when_it_is_typed_and_an_interruption_is_clean(
    environment: dict[str, str], sava: Sava
) -> None:
    sava("topics create /default/typed-in")
    command = [sys.executable, "-m", "sava.cli", "produce", "/default/typed-in"]
    env = {**os.environ, **environment}
    with subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stderr is not None
        process.stdin.write(b"first\nsecond, not ended")
        process.stdin.flush()
        assert sava("consume /default/typed-in --count 1 --timeout 30 -o raw").out == "first\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=PATIENCE_S) == 130
        assert process.stderr.read() == b""
    assert sava("topics peek /default/typed-in -o raw").out == "first\n"


def test_a_reader_that_leaves_ends_the_command_quietly(environment: dict[str, str], sava: Sava) -> None:
    sava("produce /default/many --size 1000 --count 20000")
    command = f"{sys.executable} -m sava.cli consume /default/many -o json | head -n 1"
    env = {**os.environ, **environment}
    ended = subprocess.run(["sh", "-c", command], env=env, capture_output=True, timeout=60, check=True)
    assert ended.stdout.count(b"\n") == 1
    assert ended.stderr == b""


# -- subscriptions -------------------------------------------------------------------------------


def test_a_subscription_from_its_creation_to_its_end(sava: Sava) -> None:
    sava("produce /default/read a b c")
    topic = "/default/read"
    assert "at offset 0, backlog 3" in sava(f"subscriptions create {topic} s --start earliest").out
    assert "already" in sava(f"subscriptions create {topic} s", code=1).err
    sava(f"subscriptions create {topic} late --type key_shared -o json")
    assert "key_shared" in sava(f"topics subscriptions {topic}").out
    listed = sava(f"subscriptions list {topic} -o json").json
    assert [each["subscription"] for each in listed] == ["late", "s"]

    assert "at offset 2" in sava(f"topics seek {topic} s --offset 2").out
    assert sava(f"subscriptions seek {topic} s --earliest -o json").json["cursor"] == 0
    assert sava(f"topics seek {topic} s --time 2000-01-01 -o json").json["cursor"] == 0
    assert "at offset 3" in sava(f"topics seek {topic} s --latest").out
    assert "99" in sava(f"topics seek {topic} s --offset 99", code=1).err

    configure = f"subscriptions configure {topic} s --max-redelivery 2 --ack-timeout 1.5 --backoff fixed"
    shown = sava(f"{configure} --dead-letter dead_letter --dead-letter-topic /default/dead").out
    assert ["ack_timeout_ms", "1500"] in [line.split() for line in shown.splitlines()]
    configured = sava(f"subscriptions configure {topic} s --max-unacked 7 -o json").json
    assert configured["max_unacked_messages"] == 7
    assert configured["failure_policy"]["dead_letter_topic"] == "/default/dead"
    assert "backoff" in sava(f"subscriptions describe {topic} s").out

    assert "deleted" in sava(f"topics unsubscribe {topic} late --yes").out
    assert "deleted" in sava(f"subscriptions delete {topic} s --yes").out
    assert "no subscription s" in sava(f"subscriptions describe {topic} s", code=1).err
    assert sava(f"subscriptions list {topic} -o json").json == []


# -- schemas -------------------------------------------------------------------------------------


def test_a_schema_from_its_registration_to_its_end(sava: Sava, tmp_path: Path) -> None:
    first, second, wrong = (tmp_path / name for name in ("first", "second", "wrong"))
    first.write_text('{"type": "object", "properties": {"id": {"type": "integer"}}, "required": ["id"]}')
    second.write_text('{"type": "object", "properties": {"id": {"type": "number"}}, "required": ["id"]}')
    wrong.write_text('{"type": "object", "properties": {"id": {"type": "boolean"}}, "required": ["id"]}')
    register = "schemas register order --type json_schema --file"
    assert "version 1 registered" in sava(register, str(first), "--description", "d", "--tag", "t").out
    assert not sava(register, str(first), "-o", "json").json["is_new_version"]
    check = "schemas check order --type json_schema --file"
    assert "compatible" in sava(check, str(second)).out
    assert "not compatible" in sava(check, str(wrong), code=1).err
    assert sava(check, str(wrong), "--mode", "none", "-o", "json").json["is_compatible"]
    assert sava(register, str(second), "-o", "json").json["version"] == 2

    assert sava("schemas get order --version 1 -o raw").out == first.read_text()
    assert sava("schemas get order -o json").json["version"] == 2
    assert "json_schema" in sava("schemas get order").out
    assert len(sava("schemas versions order").out.splitlines()) == 3
    assert [each["version"] for each in sava("schemas versions order -o json").json] == [1, 2]
    assert "order: backward" in sava("schemas mode order").out
    assert sava("schemas mode order full -o json").json["compatibility_mode"] == "full"
    assert "order" in sava("schemas list").out
    assert sava("schemas list -o json").json[0]["subject"] == "order"

    sava("topics create /default/typed --schema order")
    assert sava("topics describe /default/typed -o json").json["schema_subject"] == "order"
    bind = "schemas configure-topic /default/typed --subject order --policy enforce --validate-payload"
    assert "enforce" in sava(bind).out
    assert sava("schemas topic /default/typed -o json").json["enable_payload_validation"]
    assert "names no schema" in sava("produce /default/typed x", code=1).err
    assert "typed" in sava("produce /default/typed --schema order", '{"id": "x"}', code=1).err
    sava("produce /default/typed --schema order", '{"id": 1}')
    assert sava("topics peek /default/typed -o json").lines[0]["schema_version"] == 2

    assert "topic /default/typed refuses" in sava("schemas delete order 1", code=1).err
    sava("schemas configure-topic /default/typed --subject order --policy warn")
    assert "deleted" in sava("schemas delete order 1").out
    assert "7" in sava("schemas delete order 7", code=1).err
    assert "nothing" in sava("schemas get nothing", code=1).err
