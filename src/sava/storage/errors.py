"""What storage refuses or cannot do, by whose fault it is."""

from __future__ import annotations

from sava.errors import CallerError, HostError, Outcome, RetryableError
from sava.wal.errors import LogClosed


class Fenced(CallerError):
    """A newer owner has the topic. The broker that gets this stops serving it; nothing was written."""

    def __init__(self, topic: str, epoch: int, current: int, reason: str = "") -> None:
        reason = reason or f"epoch {epoch} is over, the current one is {current}"
        super().__init__(f"topic {topic}: {reason}; this broker must release it")
        self.topic, self.epoch, self.current = topic, epoch, current


class EpochTaken(Fenced):
    """Another journal has claimed the topic under the same epoch, before this one.

    Two brokers believe that they own it."""

    def __init__(self, topic: str, epoch: int, storage_id: str) -> None:
        super().__init__(topic, epoch, epoch, f"journal {storage_id} has claimed epoch {epoch} already")
        self.storage_id = storage_id


class TopicGone(Fenced):
    """The topic was deleted (and perhaps created again, under another id) since this owner claimed it."""

    def __init__(self, topic: str, topic_id: int, current_id: int | None) -> None:
        now = "nothing has its name" if current_id is None else f"its name belongs to topic id {current_id}"
        super().__init__(topic, 0, 0, f"topic id {topic_id} is gone and {now}")
        self.topic_id, self.current_id = topic_id, current_id


class TopicSealed(CallerError):
    """The owner of this epoch has sealed the topic. A seal is final for its epoch: the next owner
    needs the next epoch."""


class ClosedUncommitted(LogClosed):
    """The journal was closed before an append was known to be committed. The append may be in the journal,
    and the topic's next owner may find it there."""

    outcome = Outcome.UNKNOWN


class NotClaimed(CallerError):
    """A write under an epoch that never claimed the topic."""


class TailElsewhere(RetryableError):
    """The topic is neither sealed nor clean, and its last messages are in the journal of another disk. It
    waits for that journal (or for an operator).

    Starting without them would lose and renumber messages."""


class MarkDirtyFailed(RetryableError):
    """The topic is marked clean and the mark could not be removed, so nothing can be appended to it
    at the moment."""


class OffsetOutOfRange(CallerError):
    """Asked for an offset below what retention has kept, or beyond the end."""

    def __init__(self, offset: int, start: int, end: int) -> None:
        super().__init__(f"offset {offset} is outside of {start}..{end}")
        self.offset, self.start, self.end = offset, start, end


class InvalidStorageName(CallerError):
    """A namespace or topic name, or a key made of them, that storage does not accept."""


class DataGap(HostError):
    """Offsets that must exist are not there. Never skipped: the reader stops and says which."""


class SegmentConflict(HostError):
    """Offsets that are registered already, with other content. One of the two would be lost, so nothing is
    changed."""


class SegmentCorrupt(HostError):
    """An object does not hold what its descriptor says."""


class CatalogCorrupt(HostError):
    """A record of the catalog that cannot be read, or whose key names something else."""


class CatalogBusy(RetryableError):
    """The topic's state changed under every attempt to change it."""


class SequenceGap(CallerError):
    """A producer's batch does not follow its last one: something between them is missing."""


class UnsupportedStore(CallerError):
    """A storage URL that names no store which Sava can use; says why."""


class ObjectStoreUnavailable(RetryableError):
    """The object store did not answer, or refused, within the deadline and the retries. A put may yet have
    taken effect, as an object that nothing refers to."""

    outcome = Outcome.UNKNOWN


class ObjectTruncated(HostError):
    """The object ends before the bytes that were asked for."""

    def __init__(self, key: str, wanted_end: int, size: int) -> None:
        super().__init__(f"object {key} has {size} bytes, and those up to {wanted_end} were asked for")
        self.key, self.wanted_end, self.size = key, wanted_end, size


class ObjectMissing(CallerError):
    def __init__(self, key: str) -> None:
        super().__init__(f"there is no object {key}")
        self.key = key


class ObjectExists(CallerError):
    """Put-if-absent found the key taken."""

    def __init__(self, key: str) -> None:
        super().__init__(f"object {key} exists already")
        self.key = key


class StagedInvalid(CallerError):
    """A section does not hold what it says, or names an object that is none of its writer's."""


class StagedExpired(CallerError):
    """A part was staged too long ago to be published, or is gone already. The batch has to be staged
    again."""
