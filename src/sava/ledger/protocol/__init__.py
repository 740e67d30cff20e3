"""How the journal of a broker survives the broker. The protocol alone: no disk, no network, no clock.

A broker's ledger is one stream of bytes: one generation of its journal. Its owner appends to it; the owner's
disk and a few mirrors hold the same bytes at the same positions; what is durable on enough of them is
*committed*, and only that is acknowledged and delivered. When the owner is gone, a recovery *fences* the
ledger on the disks that hold it, finds out how far it goes, and *closes* it there.

    record      a ledger, how many of its disks are enough, and what may become of its record
    owner       which bytes go to which mirror, what is committed, how long to wait for a silent one
    member      one disk's copy: in order, without gaps, never for an owner that was fenced; all messages
    recovery    fence, count, choose the end, check, write back, close

Each of the three roles is a state machine that hears what happened and says what is to be done. Their host
owes them what their docstrings call *the host's part*: the broker with files and sockets, the simulator with
twins of both.
"""

from sava.ledger.protocol.member import (
    Check,
    CheckAnswer,
    CopyState,
    Durable,
    Fence,
    FenceAnswer,
    Join,
    JoinAnswer,
    Kept,
    LedgerAppend,
    LedgerMember,
    LedgerRefused,
    MemberNote,
    Message,
    Read,
    ReadAnswer,
    RefusalReason,
    Trim,
    Work,
    WriteBack,
    held_after_restart,
)
from sava.ledger.protocol.owner import Answers, Health, Owner
from sava.ledger.protocol.record import (
    Fragment,
    LedgerId,
    LedgerRecord,
    LedgerState,
    Range,
    StorageId,
)
from sava.ledger.protocol.recovery import Loss, Phase, Recovery

__all__ = [
    "Answers",
    "Check",
    "CheckAnswer",
    "CopyState",
    "Durable",
    "Fence",
    "FenceAnswer",
    "Fragment",
    "Health",
    "Join",
    "JoinAnswer",
    "Kept",
    "LedgerAppend",
    "LedgerId",
    "LedgerMember",
    "LedgerRecord",
    "LedgerRefused",
    "LedgerState",
    "Loss",
    "MemberNote",
    "Message",
    "Owner",
    "Phase",
    "Range",
    "Read",
    "ReadAnswer",
    "Recovery",
    "RefusalReason",
    "StorageId",
    "Trim",
    "Work",
    "WriteBack",
    "held_after_restart",
]
