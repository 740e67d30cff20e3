"""The payload message of a Protobuf schema, and payloads of it.

A file may define many messages; the payload of a topic is the first one of the main file.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from google.protobuf import message_factory, unknown_fields
from google.protobuf.descriptor import Descriptor, FileDescriptor
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError, Message

from sava.schemas.errors import PayloadInvalid, SchemaInvalid
from sava.schemas.protobuf.compiler import MAIN_FILE, load

CACHED_SCHEMAS: Final = 64


class Descriptors:
    """Raises SchemaInvalid when the main file has no message."""

    def __init__(self, compiled: bytes) -> None:
        self.pool: DescriptorPool = load(compiled)
        self.file: FileDescriptor = self.pool.FindFileByName(MAIN_FILE)
        self.payload: Descriptor = _first_message(self.file)
        self.message_class: type[Message] = message_factory.GetMessageClass(self.payload)
        self._numbers = frozenset(self.payload.fields_by_number)

    def parse(self, payload: bytes) -> Message:
        """Raises PayloadInvalid. Nesting is bounded by the parser."""
        message = self.message_class()
        try:
            message.ParseFromString(payload)
        except DecodeError as error:
            raise PayloadInvalid(f"not a {self.payload.full_name}: {error}") from None
        if not message.IsInitialized():
            raise PayloadInvalid(f"a required field of {self.payload.full_name} is missing")
        unknown = unknown_fields.UnknownFieldSet(message)
        for index in range(len(unknown)):
            if (number := unknown[index].field_number) in self._numbers:
                raise PayloadInvalid(
                    f"field {number} of {self.payload.full_name} holds a value of another type"
                )
        return message


@lru_cache(maxsize=CACHED_SCHEMAS)
def descriptors_of(compiled: bytes) -> Descriptors:
    return Descriptors(compiled)


def _first_message(file: FileDescriptor) -> Descriptor:
    """In the order of the source; a dictionary of descriptors keeps it."""
    first = next(iter(file.message_types_by_name.values()), None)
    if first is None:
        raise SchemaInvalid("the file defines no message")
    return first
