"""Hold: while somebody copies the object store, no segment is replaced or dropped.

A backup has the metadata of one moment, and objects that are copied one after the other, for hours perhaps:

    backup   metadata: segments 0..8 are a, b, c
    broker   merges them into m, deletes a, b, c
    backup   copies the objects: there is no a, and nothing says that m has its messages

The record of a hold is a condition of every transaction that would replace or drop descriptors, so that none
succeeds once it is there. What is published meanwhile is uploaded as ever: the copy has it or not, and the
metadata of before does not name it. A hold ends by itself, since the one who asked for it may be gone.
"""

from __future__ import annotations

from typing import Final

import msgspec

from sava.errors import RetryableError
from sava.metadata.commands import Compare, Delete, Relation, Target
from sava.metadata.store import MetadataStore

KEY: Final = "/storage/hold"
IS_NONE: Final = Compare(KEY, Target.VERSION, Relation.EQUAL, 0)


class Hold(msgspec.Struct, frozen=True, kw_only=True):
    until_ms: int


class StorageHeld(RetryableError):
    """Nothing was changed."""

    def __init__(self) -> None:
        super().__init__(
            "segments are held, so that the object store can be copied; `sava storage release` ends it"
        )


async def check(metadata: MetadataStore) -> None:
    """Raises StorageHeld."""
    if await metadata.get(KEY) is not None:
        raise StorageHeld


async def is_on(metadata: MetadataStore, *, now_ms: int) -> bool:
    """Ends one whose time is over."""
    kv = await metadata.get(KEY)
    if kv is None:
        return False
    try:
        is_over = msgspec.json.decode(kv.value, type=Hold).until_ms <= now_ms
    except msgspec.DecodeError:
        is_over = False  # somebody wants something; unknown is not over
    if is_over:
        unchanged = Compare(KEY, Target.MOD_REVISION, Relation.EQUAL, kv.mod_revision)
        await metadata.txn((unchanged,), (Delete(KEY),))
    return not is_over
