"""Payloads as values of Spark's types: one file for each language of schemas, and what they have in
common.

Reading: a Spark type, and the function that makes values of it from payloads.

Payloads are anybody's bytes. A function may raise whatever its library raises on them, and a value may turn
out not to fit where it is put into Arrow: either way this one row is null, and the rows beside it are not
touched.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import DataType, StructField, StructType

Read = Callable[[bytes], Any]
Convert = Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class Reading:
    data_type: DataType
    read: Read
    """Of a payload that was written with the reader's version; raises anything when that is not so."""
    read_other: Callable[[bytes], Read]
    """The function for payloads of another version, of which it is given the definition."""


def arrow_type_of(data_type: DataType) -> pa.DataType:
    """Exactly what Spark asks of a Python source."""
    return to_arrow_schema(StructType([StructField("value", data_type)]), timezone="UTC").field(0).type


def refuse(payload: bytes) -> Any:
    """The ``Read`` of payloads that nothing is known of."""
    raise ValueError("written with a schema that is not known")


def values_of(rows: Iterable[tuple[Read, bytes | None]]) -> list[Any]:
    values: list[Any] = []
    for read, payload in rows:
        try:
            values.append(None if payload is None else read(payload))
        except MemoryError:
            raise
        except Exception:  # noqa: BLE001 - whatever a decoder says to somebody's bytes, it is not a value
            values.append(None)
    return values


NOT_FITTING: Final = (pa.ArrowException, TypeError, ValueError, ArithmeticError, LookupError)


def assemble(values: list[Any], kind: pa.DataType) -> pa.Array:
    """All at once when they fit, and nearly always they do; otherwise by halves, until those that do not are
    alone."""
    try:
        return pa.array(values, kind)
    except NOT_FITTING:
        if len(values) == 1:
            return pa.nulls(1, kind)
    middle = len(values) // 2
    return pa.concat_arrays([assemble(values[:middle], kind), assemble(values[middle:], kind)])


# -- conversions of what is made of others -------------------------------------------------------------------
# None stands for "as it is": only the path to a value that must be changed costs anything.


def of_items(convert: Convert | None) -> Convert | None:
    if convert is None:
        return None
    return lambda items: None if items is None else [convert(item) for item in items]


def of_values(convert: Convert | None) -> Convert | None:
    if convert is None:
        return None
    return lambda items: None if items is None else {key: convert(value) for key, value in items.items()}


def of_fields(converts: dict[str, Convert | None], needed: Container[str] = ()) -> Convert | None:
    """Of a record that is a dictionary, in place. Those of ``needed`` that are converted must be there."""
    changed = [(name, convert) for name, convert in converts.items() if convert is not None]
    if not changed:
        return None

    def convert_record(record: Any) -> Any:
        if record is not None:
            for name, convert in changed:
                if name in record:
                    record[name] = convert(record[name])
                elif name in needed:
                    raise ValueError(f"{name} is missing")
        return record

    return convert_record
