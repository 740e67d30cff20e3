"""The attacker's process: one attack, and its tally as a line of JSON."""

from __future__ import annotations

import asyncio
import logging
import sys

import msgspec

from tests.security.attacks import Target, all_attacks


async def _main(name: str, seconds: str) -> None:
    target = msgspec.json.decode(sys.stdin.buffer.read(), type=Target)
    tally = await all_attacks()[name].run(target, float(seconds))
    print(msgspec.json.encode(tally).decode(), flush=True)


if __name__ == "__main__":
    # Of each connection that a broker has closed it would say so, many thousand times.
    logging.getLogger("asyncio").setLevel(logging.ERROR)
    asyncio.run(_main(*sys.argv[1:]))
