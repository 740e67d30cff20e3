"""What the sink says of columns when a query is planned: one line with the column and what is accepted."""

from __future__ import annotations

import pytest
from pyspark.sql import types as t

from sava.pipeline.options import OptionError
from sava.pipeline.sink import BatchWriter, StreamWriter, WriteRefused, stream_writer, writer

TOPIC = {"topic": "/default/orders"}
TEXT_MAP = t.MapType(t.StringType(), t.StringType())
COUNT_MAP = t.MapType(t.StringType(), t.IntegerType())
KINDS: tuple[t.DataType, ...] = (
    *(t.BinaryType(), t.StringType(), t.ByteType(), t.IntegerType(), t.LongType()),
    *(t.TimestampType(), t.TimestampNTZType(), TEXT_MAP, COUNT_MAP),
)
BY_NAME = {kind.simpleString(): kind for kind in KINDS}


def schema_of(columns: str) -> t.StructType:
    """Spark's own parser would need a JVM."""
    named = (column.split(" ") for column in columns.split(", "))
    return t.StructType([t.StructField(name, BY_NAME[kind]) for name, kind in named])


@pytest.mark.parametrize(
    "columns",
    [
        "payload binary",
        "payload string",
        "payload binary, key binary, attributes map<string,string>, partition int, publish_time timestamp",
        "payload binary, partition tinyint, origin_cluster string, origin_offset bigint",
        "payload string, topic string, key string, schema_id bigint, schema_version int",
    ],
)
def test_columns_that_a_message_has_are_accepted(columns: str) -> None:
    schema = schema_of(columns)
    assert isinstance(writer(TOPIC, schema), BatchWriter)
    assert isinstance(stream_writer(TOPIC, schema), StreamWriter)


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        (
            "payload binary, value binary",
            'format("sava"): column value cannot be written; rows have payload and, if wanted, key,'
            " attributes, topic, partition, publish_time, origin_cluster, origin_offset,"
            " schema_id, schema_version, each once",
        ),
        ("key string", 'format("sava"): rows to be written need a column payload, binary or string'),
        ("payload int", 'format("sava"): column payload is int: binary or string is needed'),
        (
            "payload binary, key int",
            'format("sava"): column key is int: string, or binary that is UTF-8 is needed',
        ),
        (
            "payload binary, attributes map<string,int>",
            'format("sava"): column attributes is map<string,int>: map<string,string> is needed',
        ),
        ("payload binary, topic binary", 'format("sava"): column topic is binary: string is needed'),
        ("payload binary, partition bigint", 'format("sava"): column partition is bigint: int is needed'),
        (
            "payload binary, publish_time timestamp_ntz",
            'format("sava"): column publish_time is timestamp_ntz: timestamp is needed',
        ),
        (
            "payload binary, origin_offset bigint",
            'format("sava"): origin_cluster and origin_offset go together; one of them is missing',
        ),
    ],
)
def test_other_columns_are_refused_in_one_line(columns: str, said: str) -> None:
    for make in (writer, stream_writer):
        with pytest.raises(WriteRefused) as refused:
            make(TOPIC, schema_of(columns))
        assert str(refused.value) == said


def test_a_topic_is_needed_as_option_or_column() -> None:
    with pytest.raises(WriteRefused, match="set the option topic, or add a column topic"):
        writer({}, schema_of("payload binary"))
    writer({}, schema_of("payload binary, topic string"))


def test_overwriting_is_refused() -> None:
    schema = schema_of("payload binary")
    with pytest.raises(
        WriteRefused, match=r'mode overwrite: topics are only appended to; use mode\("append"\)'
    ):
        writer(TOPIC, schema, overwrite=True)
    with pytest.raises(WriteRefused, match="output mode complete: topics are only appended to"):
        stream_writer(TOPIC, schema, overwrite=True)


def test_a_writer_of_batch_writes_numbers_its_batches() -> None:
    with pytest.raises(OptionError, match="option writerId is 'w': a batch write needs the option batchId"):
        writer({**TOPIC, "writerId": "w"}, schema_of("payload binary"))
