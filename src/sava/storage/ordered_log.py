"""OrderedLog: the log behind a journal, which writes nothing behind what it refused (why: see ``journal``),
and its opening by somebody who may stop waiting for it."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from sava.storage.replay import Replay
from sava.wal import Buffers, Disk, DiskFull, Log, LogOptions

_log = logging.getLogger(__name__)


class OrderedLog(Log):
    """Owned by the writer's thread."""

    _refusal: DiskFull | None = None

    def append_many(
        self, records: Sequence[tuple[int, Buffers]], *, is_synced_next: bool = False
    ) -> list[int]:
        if self._refusal is not None:
            raise DiskFull("refused behind a write that found the disk full") from self._refusal
        try:
            return super().append_many(records, is_synced_next=is_synced_next)
        except DiskFull as refusal:
            self._refusal = refusal
            raise

    def accept_again(self) -> None:
        self._refusal = None


async def open_log(disk: Disk, *, owner: str, options: LogOptions, found: Replay) -> OrderedLog:
    """Raises what ``Log.open`` raises. If the caller is cancelled, the scan is broken off and the lock is
    free when this ends."""
    opening = asyncio.get_running_loop().run_in_executor(
        None,
        partial(
            OrderedLog.open,
            disk,
            owner=owner,
            new_storage_id=lambda: uuid.uuid4().hex,
            options=options,
            replay=found.take,
        ),
    )
    try:
        log = await asyncio.shield(opening)
    except asyncio.CancelledError:
        found.is_unwanted = True
        await _abandon(opening)
        raise
    assert isinstance(log, OrderedLog)
    return log


async def _abandon(opening: asyncio.Future[Log]) -> None:
    """Wait for a thread that cannot be interrupted, and undo what it has done. Whoever cancels meanwhile is
    served by the cancellation that is under way."""
    loop = asyncio.get_running_loop()
    await _settled(opening)
    if opening.exception() is None:
        closing = loop.run_in_executor(None, opening.result().close)
        await _settled(closing)
        if (failure := closing.exception()) is not None:
            _log.warning("the journal, opened for nobody, could not be closed: %s", failure)


async def _settled(future: asyncio.Future[Any]) -> None:
    while not future.done():
        with suppress(asyncio.CancelledError):
            await asyncio.wait([future])
