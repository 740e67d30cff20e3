"""wal: the one durable append-only log, over a small Disk protocol (real and simulated).

``Log`` appends, syncs, recovers and trims; ``Writer`` commits for many callers at once on a thread of its
own.
"""

from sava.wal.disk import Disk, File, LocalDisk
from sava.wal.errors import (
    DirectoryLocked,
    DiskFailed,
    DiskFull,
    FileExists,
    FileMissing,
    ForeignLog,
    LogBusy,
    LogClosed,
    LogCorrupt,
    PositionOutside,
    RecordTooLarge,
    UnsupportedFormat,
)
from sava.wal.log import Buffers, Identity, Log, LogOptions, Record, Tap
from sava.wal.writer import Done, Writer

__all__ = [
    "Buffers",
    "DirectoryLocked",
    "Disk",
    "DiskFailed",
    "DiskFull",
    "Done",
    "File",
    "FileExists",
    "FileMissing",
    "ForeignLog",
    "Identity",
    "LocalDisk",
    "Log",
    "LogBusy",
    "LogClosed",
    "LogCorrupt",
    "LogOptions",
    "PositionOutside",
    "Record",
    "RecordTooLarge",
    "Tap",
    "UnsupportedFormat",
    "Writer",
]
