"""StoreIdentity: whether two brokers see the same segments.

A URL does not tell: ``file:///var/lib/sava`` is another directory on each machine unless it is shared, and
one bucket has many endpoints. So the store itself says who it is, in an object that whoever comes first
writes and nobody ever changes.
"""

from __future__ import annotations

import re
import uuid
from typing import Final

from sava.storage.errors import ObjectExists, ObjectMissing, UnsupportedStore
from sava.storage.objectstore import ObjectStore

KEY: Final = "store-id"
_DRAWN: Final = re.compile(rb"[0-9a-f]{32}")


async def store_id(store: ObjectStore) -> str:
    """The same for all who share the store, and for nobody else. Raises ObjectStoreUnavailable, and
    UnsupportedStore if something else has the object's place."""
    try:
        return await _read(store)
    except ObjectMissing:
        drawn = uuid.uuid4().hex
    try:
        await store.put_new(KEY, drawn.encode())
    except ObjectExists:  # somebody was faster
        return await _read(store)
    return drawn


async def _read(store: ObjectStore) -> str:
    found = await store.get(KEY)
    if not _DRAWN.fullmatch(found):
        raise UnsupportedStore(
            f"the object {KEY} in {store.url} is not the identity of a store of Sava's: {found[:40]!r}; "
            "give Sava a place of its own there, or remove the object if nothing else uses it"
        )
    return found.decode()
