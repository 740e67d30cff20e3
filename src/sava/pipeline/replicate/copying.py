"""Copying: what a task does with its share of a link.

    open the stream ─▶ source position? ─▶ read from there ─▶ ranges ─▶ receipts ─▶ outcome

Each errand has its own thread, several run concurrently, and one that fails or waits disturbs no other. Small
errands are first copied together (``copy_together``) as far as that works. An outcome reports what the target
has confirmed, so it is true whatever else went wrong, and also when the time was over.

**Time.** A task that hangs would block its partitions. After the budget no range starts, except the first of
an errand: however slow the connection is, each round makes progress. Then there are some seconds for what is
in flight, and those are a bound: calls to the target end with them, and a thread that still waits for the
source is left behind. It ends by the deadlines of its own calls; a range that it sends later is accepted or
refused like any other.

**Together.** The small backlogs of many partitions, by one call to each broker:

    one by one   for each partition: open the stream, find and open a reader, read, append, close both
    together     from each broker of the source: read all; to each broker of the target: append all

A stream costs some milliseconds at both ends, whatever it carries. For a hundred partitions with ten messages
each, that is most of the cost. **Nothing is asked first:** the driver knows from the last copy where the
target is, and sends what it reads from there as the next range. The target takes it only if its source
position is there (``source_positions``). So ranges that come together follow the same rule as ranges that
come one by one, and nothing is kept between rounds that could be wrong. **Only the smooth case:** a copy that
has begun, messages in the source's memory, known schemas, a broker that owns the topic. Everything else is
copied one by one, which waits and reports errors. Only a range that was sent and not answered in time is left
to the next round.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import replace
from typing import Final

from sava.client.errors import ClientError, Denied, Unavailable
from sava.errors import RetryableError, SavaError
from sava.pipeline.cluster import ClusterClient, OffsetGone
from sava.pipeline.errors import SourceFailed, TopicReplaced, at_source
from sava.pipeline.replicate.target import (
    CopyOutcome,
    CopyProgress,
    CopyShare,
    EncodedRange,
    Errand,
    LinkEnds,
    TargetCluster,
    TargetStream,
)
from sava.pipeline.replicate.translation import (
    MessageTooLargeForTarget,
    RangeBuilder,
    SchemaConflict,
    Schemas,
)
from sava.pipeline.source.reading import Rows, rows_in, rows_of
from sava.proto import replica_pb2 as pb
from sava.records import STORED_COLUMNS, RecordBatch

log = logging.getLogger(__name__)

READ_S: Final = 2.0
"""The timeout for all brokers of the source, which answer from memory."""
READ_BYTES: Final = 8 << 20
"""The bytes to read from one of them."""

Answers = dict[str, pb.SourceReceipt | None]


def copy_together(
    ends: LinkEnds, errands: Sequence[Errand], *, until: float
) -> dict[str, CopyProgress | None]:
    """The confirmed progress by name; None if the target did not answer before ``until``
    (``time.monotonic``). Errands that are missing must be copied one by one."""
    tails = {errand.name: errand for errand in errands if _is_tail(errand)}
    wanted = {name: (errand.pieces[0].start, errand.end) for name, errand in tails.items()}
    target = TargetCluster.of(ends.target)
    sendings: list[tuple[dict[str, EncodedRange], Future[Answers]]] = []
    timeout_s = min(READ_S, until - time.monotonic())
    for found in ClusterClient.of(ends.source).read_each(wanted, timeout_s=timeout_s, max_bytes=READ_BYTES):
        ranges = {
            name: source_range
            for name, batches in found.items()
            if (source_range := _range_of(ends, tails[name], batches)) is not None
        }
        messages = [_message(ends, tails[name], source_range) for name, source_range in ranges.items()]
        sendings.append((ranges, target.append_each(messages, until=until)))
    copied: dict[str, CopyProgress | None] = {}
    for ranges, sending in sendings:
        answers = sending.result()
        for name, source_range in ranges.items():
            if name not in answers:
                copied[name] = None
            elif (receipt := answers[name]) is not None:
                copied[name] = progress = CopyProgress()
                progress.receive(source_range, receipt)
    return copied


def _is_tail(errand: Errand) -> bool:
    """Whether the copy has begun and the partition's owner has the messages."""
    if errand.begin is not None or len(errand.pieces) != 1:
        return False
    (piece,) = errand.pieces
    return piece.segment is None and piece.start < errand.end


def _range_of(ends: LinkEnds, errand: Errand, batches: Sequence[RecordBatch]) -> EncodedRange | None:
    """The first range; None if it cannot be built, which the copy one by one then reports."""
    start = errand.pieces[0].start
    # The target knows its limit and refuses larger messages.
    builder = RangeBuilder.of(ends, errand, max_message_size=0, may_ask=False)
    try:
        rows = rows_in(batches, errand.name, start, STORED_COLUMNS, topic_id=errand.topic_id)
        return next(builder.ranges(rows, start, begin=False), None)
    except Exception as error:  # noqa: BLE001 (an errand that fails must not take others with it)
        log.info("copy: %s is copied by itself: %s", errand.name, error)
        return None


def _message(ends: LinkEnds, errand: Errand, source_range: EncodedRange) -> pb.EachAppend:
    return pb.EachAppend(
        open=pb.OpenSource(topic=errand.name, source=ends.source_of(errand.name, errand.topic_id)),
        topic_id=errand.target_topic_id,
        range=source_range.message(),
    )


SIDE_BY_SIDE: Final = 16
"""Concurrent errands of a share. Small ones mostly wait for the other side; large ones have some megabytes in
flight each."""
OPEN_S: Final = 5.0
SETTLE_S: Final = 8.0
"""The time after the budget for opening streams and for answers."""
END_S: Final = 9.0
"""The time after the budget for everything."""
SOURCE_S: Final = 5.0
"""An errand gives up after this time without a broker of the source."""

BROKEN: Final = "source_position_mismatch"


def copy(share: CopyShare) -> list[CopyOutcome]:
    """Copy, and return the outcome of each errand in order, within the budget and about ten seconds."""
    until = time.monotonic() + share.budget_s
    source = replace(share.ends.source, timeout_s=min(share.ends.source.timeout_s, SOURCE_S))
    ends = replace(share.ends, source=source)
    copies = [_Copy(ends, errand, until) for errand in share.errands]
    if share.is_light:
        _try_together(ends, copies, until + SETTLE_S)
    waiting = deque(copy for copy in copies if not copy.is_over)
    threads = [
        threading.Thread(target=_work, args=(waiting,), name="sava copy", daemon=True)
        for _ in range(min(SIDE_BY_SIDE, len(waiting)))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(until + END_S - time.monotonic(), 0))
    waiting.clear()
    return [each.give_up() for each in copies]


def _try_together(ends: LinkEnds, copies: Sequence[_Copy], until: float) -> None:
    """Copy what can be copied together; the other copies stay unfinished."""
    try:
        found = copy_together(ends, [copy.errand for copy in copies], until=until)
    except Exception:
        # The copies one by one meet the same fault and report it.
        log.exception("copy: %d errands could not be copied together", len(copies))
        return
    for copy in copies:
        if copy.errand.name in found:
            copy.end(found[copy.errand.name])


def _work(waiting: deque[_Copy]) -> None:
    while True:
        try:
            copy = waiting.popleft()
        except IndexError:
            return
        copy.run()


class _Copy:
    """The copy of one errand. One thread calls ``run`` while another may ``give_up``."""

    def __init__(self, ends: LinkEnds, errand: Errand, until: float) -> None:
        """``until``: when the budget is over, by ``time.monotonic``."""
        self.errand = errand
        self._ends = ends
        self._until = until
        self._settled_by = until + SETTLE_S
        self._progress = CopyProgress()
        self._has_begun = False
        self._is_reading = False
        """Whether the copy waits for the source and not for the target."""
        self._guard = threading.Lock()
        self._outcome: CopyOutcome | None = None

    def run(self) -> None:
        self._has_begun = True
        try:
            outcome = self._copied()
        except Exception as error:  # noqa: BLE001 (an errand that fails must not take others with it)
            outcome = self._failed(error)
        with self._guard:
            self._outcome = self._outcome or outcome

    def end(self, progress: CopyProgress | None) -> None:
        """Finish a copy that was made together with others; None if the target did not answer."""
        if progress is not None:
            self._progress = progress
            self._outcome = self._result()
        else:
            reason = f"{self.errand.name}: the target has not answered in time"
            self._outcome = self._result("unavailable", reason, may_pass=True)

    def give_up(self) -> CopyOutcome:
        """The outcome, or what is known of it now."""
        with self._guard:
            if self._outcome is None:
                code, why = "unavailable", "the target does not answer"
                if self._is_reading:
                    code, why = "source_unavailable", "the source does not answer"
                elif not self._has_begun:
                    why = "other errands of its share took all the time"
                reason = f"{self.errand.name}: not done in time: {why}"
                self._outcome = self._result(code, reason, may_pass=True)
            return self._outcome

    @property
    def is_over(self) -> bool:
        """Whether the copy has an outcome."""
        with self._guard:
            return self._outcome is not None

    # -- one errand --------------------------------------------------------------------------

    def _copied(self) -> CopyOutcome:
        ends, errand = self._ends, self.errand
        stream = TargetCluster.of(ends.target).append_stream(
            errand.name, ends.source_of(errand.name, errand.topic_id)
        )
        self._progress = stream.progress
        try:
            until = min(time.monotonic() + OPEN_S, self._settled_by)
            opened = stream.open(until=until, end_by=self._settled_by)
            if opened.topic_id != errand.target_topic_id:
                return self._result(
                    "target_replaced",
                    f"{errand.name} is another topic at the target by now: its id is {opened.topic_id}, and "
                    f"was {errand.target_topic_id}",
                )
            if not opened.is_known and errand.begin is None:
                return self._result(
                    "source_position_missing",
                    f"{errand.name} at the target has nothing of this source any more, and had before",
                )
            return self._sent(stream, opened)
        finally:
            stream.close()

    def _sent(self, stream: TargetStream, opened: pb.SourceOpened) -> CopyOutcome:
        failure: Exception | None = None
        try:
            self._send(stream, opened)
        except Exception as error:  # noqa: BLE001 (reported when the ranges in flight are answered)
            failure = error
        try:
            stream.settle(until=self._settled_by)
        except ClientError as error:
            # The stream has failed, which hides a fault of the source until the next round.
            failure = error
        if stream.ended is not None:
            return self._ended(stream.ended)
        return self._result() if failure is None else self._failed(failure)

    def _send(self, stream: TargetStream, opened: pb.SourceOpened) -> None:
        errand = self.errand
        start = opened.position if opened.is_known else errand.begin
        assert start is not None
        if start >= errand.end or not errand.pieces or start < errand.pieces[0].start:
            return  # done already, or planned for another position
        builder = RangeBuilder.of(self._ends, errand, max_message_size=opened.max_message_size)
        with closing(builder.ranges(self._rows(start), start, begin=not opened.is_known)) as ranges:
            for source_range in ranges:
                if not stream.put(source_range, until=self._settled_by):
                    return
                if time.monotonic() >= self._until or self.is_over:
                    return

    def _rows(self, start: int) -> Iterator[Rows]:
        errand = self.errand
        for piece in errand.pieces:
            part = piece._replace(start=max(piece.start, start), end=min(piece.end, errand.end))
            if part.start >= part.end:
                continue
            found = rows_of(
                self._ends.source, errand.store_url, part, STORED_COLUMNS, topic_id=errand.topic_id
            )
            self._is_reading = True
            with at_source():
                for rows in found:
                    self._is_reading = False
                    yield rows
                    self._is_reading = True
            self._is_reading = False

    # -- outcomes ----------------------------------------------------------------------------

    def _result(self, code: str = "", reason: str = "", *, may_pass: bool = False) -> CopyOutcome:
        progress = self._progress
        return CopyOutcome(
            name=self.errand.name,
            is_known=progress.is_known,
            position=progress.position,
            kept_position=progress.kept_position,
            messages=progress.messages,
            bytes=progress.bytes,
            duplicates=progress.duplicates,
            skipped=progress.skipped,
            code=code,
            reason=reason,
            may_pass=may_pass,
        )

    def _ended(self, ended: pb.SourceEnded) -> CopyOutcome:
        if ended.code == BROKEN:
            return self._result()  # another driver copied it first
        if ended.code == "schema_refused":
            Schemas.forget(self.errand.name)
            subject = f"subject {self.errand.subject!r}: " if self.errand.subject else ""
            return self._result(ended.code, f"{subject}the target says: {ended.reason}")
        return self._result(ended.code, ended.reason, may_pass=ended.may_pass)

    def _failed(self, error: Exception) -> CopyOutcome:
        match error:
            case OffsetGone():
                gone = f"{error.name}: offsets {error.start} to {error.first} were deleted before they were "
                return self._result("source_gone", f"{gone}copied (retention)")
            case SourceFailed():
                return self._result(error.code, str(error), may_pass=error.may_pass)
            case TopicReplaced():
                return self._result("source_replaced", str(error), may_pass=True)
            case MessageTooLargeForTarget():
                return self._result("message_too_large", str(error))
            case SchemaConflict():
                return self._result("schema_refused", str(error))
            case Denied():
                return self._result("denied", str(error))
            case Unavailable():
                return self._result("unavailable", str(error), may_pass=True)
            case ClientError():
                may_pass = isinstance(error, RetryableError)
                return self._result(error.code or "refused", str(error), may_pass=may_pass)
            case RetryableError():
                return self._result("unavailable", str(error), may_pass=True)
            case SavaError():
                return self._result("failed", str(error))
            case _:
                log.exception("copy: %s failed", self.errand.name, exc_info=error)
                return self._result("failed", repr(error), may_pass=True)
