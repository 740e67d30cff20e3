"""What to do about an error, in the words of the command line.

Most errors say it themselves. Those that programs meet as well cannot know of options and commands.
"""

from __future__ import annotations

from sava.client import errors as client
from sava.errors import SavaError
from sava.peers import error_mapping as admin

_START = "; `sava up` starts a cluster on this machine, "


def way_out(error: SavaError) -> str:
    """What is added to the error's text; often nothing."""
    match error:
        case admin.BrokerUnreachable() if not error.cause.remedy:
            return f"{_START}--admin HOST:PORT or SAVA_ADMIN names another"
        case client.NotReached():
            return f"{_START}--service URL or SAVA_SERVICE names another"
        case _:
            return ""
