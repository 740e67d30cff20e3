"""The source of ``format("sava")``: batch and streaming.

============  =============================================================================
``columns``   the columns of a message, and conditions on them that the source applies
``query``     the batch and the stream reader, as Spark calls them; the state of a running stream
``planning``  offset ranges: where they start and end, where messages are, tasks
``reading``   what a task does: segments from the object store, tails from owners
``decoding``  payloads as values, by registered schemas; ``values`` has the languages
============  =============================================================================
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from pyspark.sql.types import DataType, StructType

from sava.pipeline.cluster import ClusterClient
from sava.pipeline.errors import SourceRefused
from sava.pipeline.options import OptionError, SourceOptions
from sava.pipeline.source.columns import COLUMNS, VALUE, Choice, check_schema
from sava.pipeline.source.query import BatchReader, FilteringReader, QueryTopics, StreamReader

if TYPE_CHECKING:
    from sava.pipeline.source.decoding import Decoder

__all__ = ["BatchReader", "StreamReader", "reader", "schema", "stream_reader"]


def schema(options: Mapping[str, str]) -> StructType:
    """The schema of a query that does not choose columns. Raises OptionError."""
    parsed = SourceOptions.parse(options, stream=None)
    if not parsed.decode:
        return COLUMNS
    return StructType([*COLUMNS]).add(VALUE, _decoder(parsed).data_type)


def reader(options: Mapping[str, str], schema: StructType) -> BatchReader:
    """Raises OptionError, SourceRefused."""
    parsed = SourceOptions.parse(options, stream=False)
    check_schema(schema, decode=parsed.decode)
    kind = FilteringReader if parsed.filter_pushdown else BatchReader
    return kind(parsed, Choice(schema), _decoder_for(parsed, schema))


def stream_reader(options: Mapping[str, str], schema: StructType) -> StreamReader:
    """Raises OptionError, SourceRefused."""
    parsed = SourceOptions.parse(options, stream=True)
    check_schema(schema, decode=parsed.decode)
    return StreamReader(parsed, Choice(schema), _decoder_for(parsed, schema))


def _decoder(options: SourceOptions) -> Decoder:
    # Imported late: every Spark worker imports this package, and few need the schema languages.
    from sava.pipeline.source.decoding import Decoder, fetch_schema

    subjects = QueryTopics(ClusterClient.of(options.access), options.topics).subjects()
    for topic, subject in subjects.items():
        if not subject:
            raise OptionError("decode", "true", f"topic {topic} follows no registered schema")
    if len(set(subjects.values())) != 1:
        listed = ", ".join(f"{topic} follows {subject}" for topic, subject in subjects.items())
        raise OptionError(
            "decode", "true", f"one schema for all topics is needed ({listed or 'no topic matches'})"
        )
    return Decoder.of(next(iter(subjects.values())), partial(fetch_schema, options.access))


def _decoder_for(options: SourceOptions, schema: StructType) -> Decoder | None:
    """The decoder for the type that the query has. A version registered since then may have another type."""
    if VALUE not in schema.fieldNames():
        return None
    wanted: DataType = schema[VALUE].dataType
    latest = decoder = _decoder(options)
    while decoder.data_type != wanted:
        if decoder.version <= 1:
            raise SourceRefused(
                f'format("sava"): column {VALUE} is {latest.data_type.simpleString()} by schema '
                f"{latest.subject}, and {wanted.simpleString()} was asked for"
            )
        decoder = latest.of(latest.subject, latest.fetch, decoder.version - 1)
    return decoder
