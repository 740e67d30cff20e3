"""Options: what is understood, and that every mistake is one line that says what would be right."""

from __future__ import annotations

from pathlib import Path

import pytest

from sava.client.errors import Refused
from sava.pipeline.options import (
    NAMES,
    OptionError,
    SinkOptions,
    SourceOptions,
    TopicChoice,
    TopicPartition,
)

ORDERS = {"topic": "/default/orders"}


def source(stream: bool = False, **options: str) -> SourceOptions:
    return SourceOptions.parse({**ORDERS, **options}, stream=stream)


def test_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SAVA_SERVICE", raising=False)
    batch, stream = source(), source(stream=True)
    assert batch.topics == TopicChoice(("/default/orders",))
    assert (batch.start, batch.end, stream.start) == ("earliest", "latest", "latest")
    assert batch.access.service == "127.0.0.1:6650"
    assert batch.access.timeout_s == 60
    assert batch.fail_on_data_loss
    assert not batch.decode
    assert not batch.filter_pushdown
    assert (stream.max_messages, stream.max_bytes, stream.min_partitions) == (None, None, 0)


def test_the_service_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAVA_SERVICE", "http://a:1")
    assert source().access.service == "http://a:1"
    assert source(service="b:2").access.service == "b:2"


def test_every_option_is_in_the_guide() -> None:
    guide = (Path(__file__).parents[3] / "docs" / "pipeline.md").read_text()
    assert [name for name in NAMES if f"\n| `{name}` |" not in guide] == []


def test_names_and_words_in_any_case() -> None:
    options = source(
        stream=True, MAXMESSAGESPERTRIGGER="7", failondataloss="FALSE", startingOffsets="Earliest"
    )
    assert options.max_messages == 7
    assert not options.fail_on_data_loss
    assert options.start == "earliest"


def test_what_spark_adds_itself_is_no_option() -> None:
    SinkOptions.parse({"topic": "/default/o", "checkpointLocation": "/tmp/x", "queryName": "q"}, stream=True)


def test_several_topics() -> None:
    several = SourceOptions.parse({"topics": "/a/b, /c/d,/a/b"}, stream=False)
    assert several.topics == TopicChoice(("/a/b", "/c/d"))
    pattern = SourceOptions.parse({"topicPattern": "/default/o.*"}, stream=False)
    assert pattern.topics == TopicChoice(pattern="/default/o.*")


def test_positions() -> None:
    offsets = source(startingOffsets='{"/default/orders": {"0": 5, "10": -2}}').start
    assert offsets == {TopicPartition("/default/orders", 0): 5, TopicPartition("/default/orders", 10): -2}
    assert source(startingTimestamp="1500", startingOffsets="latest").start == 1_500_000
    assert source(endingTimestamp="1970-01-01T00:00:02+00:00").end == 2_000_000
    assert source(endingTimestamp="1970-01-01T01:00:02+01:00").end == 2_000_000


def test_sink() -> None:
    sink = SinkOptions.parse({**ORDERS, "writerId": "w", "batchId": "0"}, stream=False)
    assert (sink.topic, sink.writer_id, sink.batch_id) == ("/default/orders", "w", 0)
    assert sink.exactly_once
    assert sink.compression == "none"
    assert not SinkOptions.parse({"delivery": "atleastonce"}, stream=True).exactly_once


@pytest.mark.parametrize(
    ("options", "stream", "expected"),
    [
        ({}, False, "option topic is '': exactly one of topic, topics and topicPattern is needed"),
        (
            {**ORDERS, "topics": "/a/b"},
            False,
            "topic and topics is 'topic=/default/orders, topics=/a/b': exactly",
        ),
        ({"topic": "orders"}, False, "'orders': written /namespace/topic, such as /default/orders"),
        ({"topics": "/a/b,c"}, False, "names with commas between, each written /namespace/topic"),
        ({"topicPattern": "/a/("}, False, "a regular expression is needed"),
        (
            {**ORDERS, "maxMessagePerTrigger": "1"},
            True,
            "no such option; did you mean maxMessagesPerTrigger?",
        ),
        ({**ORDERS, "zzz": "1"}, True, "no such option; there are service, token"),
        ({**ORDERS, "maxMessagesPerTrigger": "0"}, True, "'0': a whole number from 1 on"),
        ({**ORDERS, "maxBytesPerTrigger": "1k"}, True, "'1k': a whole number from 1 on"),
        ({**ORDERS, "minPartitions": "-1"}, False, "'-1': a whole number from 1 on"),
        ({**ORDERS, "failOnDataLoss": "maybe"}, False, "'maybe': true or false"),
        ({**ORDERS, "decode": ""}, False, "'': false or true"),
        ({**ORDERS, "timeout": "soon"}, False, "'soon': seconds, more than 0 and at most 3600"),
        ({**ORDERS, "startingOffsets": "first"}, False, "'first': earliest, latest or offsets by topic and"),
        ({**ORDERS, "startingOffsets": "[1]"}, False, "'[1]': earliest, latest or offsets by topic and"),
        ({**ORDERS, "startingOffsets": '{"/default/orders": 1}'}, False, "such as {"),
        (
            {**ORDERS, "startingOffsets": '{"/default/orders": {"0": -3}}'},
            False,
            "(-2 is earliest, -1 is latest)",
        ),
        ({**ORDERS, "endingOffsets": "earliest"}, False, "'earliest': latest or offsets by topic"),
        ({**ORDERS, "endingOffsets": "latest"}, True, "it is for batch reads only"),
        ({**ORDERS, "filterPushdown": "true"}, True, "it is for batch reads only"),
        ({**ORDERS, "subscription": "s"}, False, "it is for streams only"),
        ({**ORDERS, "startingTimestamp": "2030-01-01T00:00:00"}, False, "a time with its zone is needed"),
        (
            {**ORDERS, "startingTimestamp": "yesterday"},
            False,
            "milliseconds since 1970 UTC, or a time such as",
        ),
        ({**ORDERS, "tlsKey": "k.pem"}, False, "it needs the option tlsCert beside it"),
        ({**ORDERS, "writerId": "w"}, False, "it is for writing"),
        ({**ORDERS, "paths": '["/x"]'}, False, "topics have no path"),
        ({"provider": "sava", "option.topic": "/a/b"}, False, "use CREATE TEMPORARY VIEW … USING sava"),
        ({**ORDERS, "path": "/x"}, False, "topics have no path; name one by the option topic"),
    ],
)
def test_a_bad_option_is_one_line(options: dict[str, str], stream: bool, expected: str) -> None:
    with pytest.raises(OptionError) as caught:
        SourceOptions.parse(options, stream=stream)
    assert expected in str(caught.value)
    assert str(caught.value).startswith('format("sava"): option ')
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "stream", "expected"),
    [
        ({"topic": "x"}, False, "written /namespace/topic"),
        ({"delivery": "once"}, False, "'once': exactlyOnce or atLeastOnce"),
        ({"compression": "gzip"}, False, "'gzip': none, lz4 or zstd"),
        ({"batchId": "1"}, False, "it needs the option writerId, whose batches it counts"),
        ({"writerId": "w", "batchId": "x"}, False, "'x': a whole number from 0 on"),
        ({"writerId": "w", "batchId": "1"}, True, "it is for batch writes only"),
        ({"startingOffsets": "latest"}, True, "it is for reading"),
    ],
)
def test_a_bad_option_of_the_sink_is_one_line(options: dict[str, str], stream: bool, expected: str) -> None:
    with pytest.raises(OptionError) as caught:
        SinkOptions.parse(options, stream=stream)
    assert expected in str(caught.value)


def test_a_long_value_is_shortened() -> None:
    with pytest.raises(OptionError) as caught:
        source(startingOffsets="x" * 10_000)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    "name", ["tokn", "tokne", "Tokens", "accessToken", "auth_token", "password", "apiKey"]
)
def test_a_secret_is_in_no_error_however_its_name_is_misspelt(name: str) -> None:
    """``tokn`` came back with its value, in the error that Spark prints and logs."""
    with pytest.raises(OptionError) as refused:
        SourceOptions.parse({**ORDERS, name: "s3cr3t"}, stream=True)
    assert "s3cr3t" not in str(refused.value)
    assert "s3cr3t" not in repr(vars(refused.value))


def test_a_secret_is_in_no_text_of_the_options() -> None:
    parsed = SourceOptions.parse({**ORDERS, "token": "s3cr3t"}, stream=True)
    assert parsed.access.token == "s3cr3t"
    assert "s3cr3t" not in repr(parsed)
    assert "s3cr3t" not in repr(SinkOptions.parse({**ORDERS, "token": "s3cr3t"}, stream=True))
    with pytest.raises(OptionError, match="one of both") as refused:
        SourceOptions.parse({**ORDERS, "token": "s3cr3t", "tokenFile": "/x"}, stream=True)
    assert "s3cr3t" not in str(refused.value)


def test_credentials_of_the_environment_are_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    def access(**options: str) -> tuple[str, str]:
        found = SourceOptions.parse({**ORDERS, **options}, stream=True).access
        return found.token, found.token_file

    monkeypatch.setenv("SAVA_TOKEN", "of the environment")
    assert access() == ("of the environment", "")
    assert access(token="mine") == ("mine", "")
    assert access(tokenFile="/mine") == ("", "/mine")
    assert access(token="") == ("", ""), "an empty one means none"
    monkeypatch.setenv("SAVA_TOKEN_FILE", "/theirs")
    assert access() == ("", "/theirs")


def test_a_token_file_is_read_again_when_it_has_changed(tmp_path: Path) -> None:
    file = tmp_path / "token"
    access = SourceOptions.parse({**ORDERS, "tokenFile": str(file)}, stream=True).access
    token = access.bearer
    assert callable(token)
    with pytest.raises(Refused, match="No such file"):
        token()
    file.write_text("first\n")
    assert token() == "first"
    (tmp_path / "new").write_text("second")
    (tmp_path / "new").rename(file)
    assert token() == "second"
    for wrong in ("", "two words", "x" * 70_000, "ü"):
        file.write_text(wrong)
        assert token() == "second", "a file that is being written changes nothing"
        fresh = access.bearer
        assert callable(fresh)
        with pytest.raises(Refused, match="one token and nothing else"):
            fresh()
    file.unlink()
    assert token() == "second"
