"""mirror: how the journal of a broker survives the broker. The protocol alone: no disk, no network, no clock.

A broker's journal is one stream of bytes. Its owner appends to it; the owner's disk and a few mirrors hold
the same bytes at the same positions; what is durable on enough of them is *committed*, and only that is
acknowledged and delivered. When the owner is gone, somebody else *fences* the journal on the disks that hold
it, finds out how far it goes, and *closes* it there.

    quorum      how many disks are enough, for acknowledging and for recovering
    record      what the metadata store knows of a journal, and what may become of it
    owner       which bytes go to which mirror, what is committed, changing mirrors
    member      one disk's copy: in order, without gaps, never for an owner that was fenced
    recovery    fence, count, choose the end, check, write back, close
    messages    what they say to each other
    health      how long an owner waits for a silent mirror, and which ones it avoids

Each of the three roles is a state machine that is told what happened and says what is to be done. Whoever
drives them owes them what their docstrings call *the host's part*: the broker with files and sockets, the
simulator with twins of both.
"""

from sava.ledger.protocol.health import Answers, Health
from sava.ledger.protocol.member import (
    Kept,
    Member,
    Note,
    Work,
    held_after_restart,
)
from sava.ledger.protocol.messages import (
    Append,
    Bytes,
    Check,
    Checked,
    CopyState,
    Durable,
    Fence,
    Fenced,
    Join,
    Joined,
    Message,
    Read,
    Refusal,
    Refused,
    Trim,
    WriteBack,
)
from sava.ledger.protocol.owner import Owner
from sava.ledger.protocol.record import (
    Fragment,
    JournalId,
    JournalRecord,
    JournalState,
    Range,
    StorageId,
)
from sava.ledger.protocol.recovery import Loss, Phase, Recovery

__all__ = [
    "Answers",
    "Append",
    "Bytes",
    "Check",
    "Checked",
    "CopyState",
    "Durable",
    "Fence",
    "Fenced",
    "Fragment",
    "Health",
    "Join",
    "Joined",
    "JournalId",
    "JournalRecord",
    "JournalState",
    "Kept",
    "Loss",
    "Member",
    "Message",
    "Note",
    "Owner",
    "Phase",
    "Range",
    "Read",
    "Recovery",
    "Refusal",
    "Refused",
    "StorageId",
    "Trim",
    "Work",
    "WriteBack",
    "held_after_restart",
]
