"""Together: the little that each of many partitions has, by one call to each broker.

    one by one   for each partition: open the chain, find and open a reader, read, append, close both
    together     from each broker of the source: read all; to each broker of the target: append all

A stream costs some milliseconds at both ends, whatever it carries. Of a hundred partitions with ten messages
each, that is most of what copying them costs.

**Nothing is asked first.** The driver was told by the target where a chain is when it was copied last. What
is read from there on is sent as the next stretch, and the target takes it if the chain is there: who is wrong
is refused, as always (``storage.chains``). So there is no other rule here than for stretches that come one by
one, and nothing is kept from one round to the next that could be wrong.

**Only what goes smoothly.** A chain that has begun, messages that the source has in memory, schemas that are
known, a broker that has the topic. Whatever is not so, is refused or gets no answer is copied one by one,
where it is waited for, and says what is wrong with it. Only a stretch that was sent, and has no answer when
the time is up, is left to the next round.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Final

from sava.pipeline.link import Link
from sava.pipeline.replicate.chains import Progress, Stretch
from sava.pipeline.replicate.stretches import Stretcher
from sava.pipeline.replicate.target import Target
from sava.pipeline.replicate.work import Errand, LinkEnds
from sava.pipeline.source.reading import rows_in
from sava.proto import replica_pb2 as pb
from sava.records import STORED_COLUMNS, RecordBatch

log = logging.getLogger(__name__)

READ_S: Final = 2.0
"""For all brokers of the source: what they have in memory, they have at once."""
READ_BYTES: Final = 8 << 20
"""Of one of them."""

Answers = dict[str, pb.ChainReceipt | None]


def copy_together(ends: LinkEnds, errands: Sequence[Errand], *, until: float) -> dict[str, Progress | None]:
    """By name, what the target has said of those that were copied; None: it has not answered by then (of
    ``time.monotonic``). Those that are missing are to be copied one by one."""
    tails = {errand.name: errand for errand in errands if _is_tail(errand)}
    wanted = {name: (errand.pieces[0].start, errand.end) for name, errand in tails.items()}
    target = Target.of(ends.target)
    sendings: list[tuple[dict[str, Stretch], Future[Answers]]] = []
    timeout_s = min(READ_S, until - time.monotonic())
    for found in Link.of(ends.source).read_each(wanted, timeout_s=timeout_s, max_bytes=READ_BYTES):
        stretches = {
            name: stretch
            for name, batches in found.items()
            if (stretch := _stretch(ends, tails[name], batches)) is not None
        }
        messages = [_message(ends, tails[name], stretch) for name, stretch in stretches.items()]
        sendings.append((stretches, target.append_each(messages, until=until)))
    copied: dict[str, Progress | None] = {}
    for stretches, sending in sendings:
        answers = sending.result()
        for name, stretch in stretches.items():
            if name not in answers:
                copied[name] = None
            elif (receipt := answers[name]) is not None:
                copied[name] = progress = Progress()
                progress.receive(stretch, receipt)
    return copied


def _is_tail(errand: Errand) -> bool:
    """Its chain has begun, and the owner of the partition has what is to be copied."""
    if errand.begin is not None or len(errand.pieces) != 1:
        return False
    (piece,) = errand.pieces
    return piece.segment is None and piece.start < errand.end


def _stretch(ends: LinkEnds, errand: Errand, batches: Sequence[RecordBatch]) -> Stretch | None:
    """The first; None: something is wrong with what is to be copied, which is told when it is copied by
    itself."""
    start = errand.pieces[0].start
    # How large a message may be, the target knows, and refuses what is larger.
    stretcher = Stretcher.of(ends, errand, max_message_size=0, may_ask=False)
    try:
        rows = rows_in(batches, errand.name, start, STORED_COLUMNS, topic_id=errand.topic_id)
        return next(stretcher.stretches(rows, start, begin=False), None)
    except Exception as error:  # noqa: BLE001 (an errand that fails must not take others with it)
        log.info("copy: %s is not copied together with others: %s", errand.name, error)
        return None


def _message(ends: LinkEnds, errand: Errand, stretch: Stretch) -> pb.ChainStretch:
    return pb.ChainStretch(
        chain=pb.OpenChain(topic=errand.name, source=ends.source_of(errand.name, errand.topic_id)),
        topic_id=errand.target_topic_id,
        stretch=stretch.message(),
    )
