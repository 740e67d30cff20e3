"""How the journal of a broker survives the broker. The protocol alone: no disk, no network, no clock.

A broker's ledger is one stream of bytes: one generation of its journal. Its owner appends to it; the owner's
disk and a few mirrors hold the same bytes at the same positions; what is durable on enough of them is
*committed*, and only that is acknowledged and delivered. When the owner is gone, a recovery *fences* the
ledger on the disks that hold it, finds out how far it goes, and *closes* it there.

    record      a ledger, how many of its disks are enough, and what may become of its record
    owner       which bytes go to which mirror, what is committed, changing mirrors
    member      one disk's copy: in order, without gaps, never for an owner that was fenced
    recovery    fence, count, choose the end, check, write back, close
    messages    what they say to each other
    health      how long an owner waits for a silent mirror, and which ones it avoids

Each of the three roles is a state machine that hears what happened and says what is to be done. Their host
owes them what their docstrings call *the host's part*: the broker with files and sockets, the simulator with
twins of both.
"""

from sava.ledger.protocol.health import Answers, Health
from sava.ledger.protocol.member import (
    Kept,
    LedgerMember,
    MemberNote,
    Work,
    held_after_restart,
)
from sava.ledger.protocol.messages import (
    Check,
    CheckAnswer,
    CopyState,
    Durable,
    Fence,
    FenceAnswer,
    Join,
    JoinAnswer,
    LedgerAppend,
    LedgerRefused,
    Message,
    Read,
    ReadAnswer,
    RefusalReason,
    Trim,
    WriteBack,
)
from sava.ledger.protocol.owner import Owner
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
