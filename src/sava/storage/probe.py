"""Probe: whether an object store does what Sava relies on, found out by doing it.

``probe`` looks at everything, for an operator. ``check_writable`` asks one thing, before a topic is moved:
whether the store takes a write now.

A store that lets a second put of the same object through looks healthy until two brokers write one: then the
later silently wins. So the probe writes an object twice.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from sava.errors import SavaError
from sava.storage.errors import ObjectExists, ObjectStoreUnavailable
from sava.storage.objectstore import ObjectStore
from sava.storage.store_identity import store_id

PREFIX: Final = "probes/"
WRITABLE_S: Final = 2.0
"""A store that takes longer to store an empty object would hold a move up for longer than publishers are to
wait."""
CONTENT: Final = b"written by sava doctor, and deleted at once"


@dataclass(frozen=True, slots=True, kw_only=True)
class Probed:
    store_id: str = ""
    is_reachable: bool = False
    puts_if_absent: bool = False
    milliseconds: int = 0
    error: str = ""


async def probe(store: ObjectStore) -> Probed:
    """Raises nothing: what goes wrong is the answer."""
    began = time.monotonic()
    key = f"{PREFIX}{uuid.uuid4().hex}"
    identity, is_refused, error = "", False, ""
    try:
        identity = await store_id(store)
        await store.put_new(key, CONTENT)
        try:
            is_refused = await _is_refused(store, key)
            if await store.get(key) != CONTENT:
                error = "an object has other bytes than were written"
        finally:
            with suppress(SavaError):
                await store.delete([key])
    except (SavaError, TimeoutError) as failure:
        error = str(failure) or type(failure).__name__
    return Probed(
        store_id=identity,
        is_reachable=not error,
        puts_if_absent=is_refused,
        milliseconds=int((time.monotonic() - began) * 1000),
        error=error,
    )


async def check_writable(store: ObjectStore) -> None:
    """Raises ObjectStoreUnavailable. An object that arrives later than its answer was waited for stays."""
    key = f"{PREFIX}{uuid.uuid4().hex}"
    try:
        async with asyncio.timeout(WRITABLE_S):
            await store.put_new(key, b"")
            await store.delete([key])
    except TimeoutError:
        reason = f"no answer within {WRITABLE_S:g} s"
    except SavaError as failure:
        reason = str(failure)
    else:
        return
    raise ObjectStoreUnavailable(f"the object store {store.url} takes no writes: {reason}")


async def _is_refused(store: ObjectStore, key: str) -> bool:
    try:
        await store.put_new(key, b"written a second time")
    except ObjectExists:
        return True
    return False
