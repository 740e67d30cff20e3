"""Payloads as values of Spark's types: what the schema languages (``avro``, ``json``, ``protobuf``) share.

A ``Reading`` is a Spark type and the function that makes its values from payloads. A payload is any bytes:
the function may raise whatever its library raises, and a value may not fit into Arrow. Then this one row is
null, and the rows beside it are not affected.
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
    """A Spark type and the functions that read its values."""

    data_type: DataType
    read: Read
    """Reads a payload of the reader's version; raises any error for other payloads."""
    read_other: Callable[[bytes], Read]
    """Makes the function for payloads of another version from its definition."""


def arrow_type_of(data_type: DataType) -> pa.DataType:
    """The Arrow type that Spark requires of a Python source."""
    return to_arrow_schema(StructType([StructField("value", data_type)]), timezone="UTC").field(0).type


def refuse(payload: bytes) -> Any:
    """The ``Read`` of payloads with an unknown schema."""
    raise ValueError("written with a schema that is not known")


def values_of(rows: Iterable[tuple[Read, bytes | None]]) -> list[Any]:
    values: list[Any] = []
    for read, payload in rows:
        try:
            values.append(None if payload is None else read(payload))
        except MemoryError:
            raise
        except Exception:  # noqa: BLE001 - any error of a decoder means that the payload has no value
            values.append(None)
    return values


NOT_FITTING: Final = (pa.ArrowException, TypeError, ValueError, ArithmeticError, LookupError)


def assemble(values: list[Any], kind: pa.DataType) -> pa.Array:
    """The values as an array. If some do not fit, which is rare, the list is halved until these stand alone
    as nulls."""
    try:
        return pa.array(values, kind)
    except NOT_FITTING:
        if len(values) == 1:
            return pa.nulls(1, kind)
    middle = len(values) // 2
    return pa.concat_arrays([assemble(values[:middle], kind), assemble(values[middle:], kind)])


# -- conversions of composite values -------------------------------------------------------------------------
# None stands for "unchanged": only the path to a value that must change has a cost.


def of_items(convert: Convert | None) -> Convert | None:
    if convert is None:
        return None
    return lambda items: None if items is None else [convert(item) for item in items]


def of_values(convert: Convert | None) -> Convert | None:
    if convert is None:
        return None
    return lambda items: None if items is None else {key: convert(value) for key, value in items.items()}


def of_fields(converts: dict[str, Convert | None], needed: Container[str] = ()) -> Convert | None:
    """Converts a record (a dictionary) in place. Converted fields in ``needed`` must be present."""
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
