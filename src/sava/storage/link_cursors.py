"""Link cursors: the subscriptions that keep messages for other clusters until these have them.

Each link of a topic to a remote has one, of a name that is kept from users. It has no consumers: whoever
copies moves it on, and retention spares what is not below it, as with any subscription.
"""

from __future__ import annotations

from typing import Final

PREFIX: Final = "sava-link."


def link_cursor(remote: str) -> str:
    return f"{PREFIX}{remote}"


def remote_of(subscription: str) -> str | None:
    """None: it is no link's."""
    return subscription.removeprefix(PREFIX) if subscription.startswith(PREFIX) else None


def is_link_cursor(subscription: str) -> bool:
    return subscription.startswith(PREFIX)
