"""A broker process: from its configuration to its exit code.

Exit codes: 0 stopped on request, 1 could not start, 3 stopped because going on could do harm (the log says
why).
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import resource
import signal
import threading
from typing import Final

import uvloop

from sava.config import Config
from sava.errors import SavaError
from sava.metadata.store import ClusterOperations
from sava.server.assembly import raft_address
from sava.server.broker import Broker
from sava.tasks import cancelled

log = logging.getLogger(__name__)

EXIT_OK: Final = 0
EXIT_START: Final = 1
EXIT_FAILED: Final = 3
LEAVE_GRACE_S: Final = 5.0
"""Beyond the time for handing topics over, which bounds itself: for one that hangs."""
END_S: Final = 30.0
"""For stopping in order, which takes some seconds at most unless something hangs."""
LAST_RESORT_S: Final = 5.0
"""After that: the process ends whatever it does. A loop that is blocked (a thread is joined that waits for a
disk) rings no timer, and a log whose reader is stopped takes no line."""

OPEN_FILES: Final = 1 << 16


async def serve(config: Config, *, standalone: bool = False) -> int:
    """Run one broker until a signal or a failure, and end the process; returns only if it has not started."""
    stop, hurry = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        # A second signal ends the hand-over that the first one began.
        loop.add_signal_handler(number, lambda: (hurry if stop.is_set() else stop).set())
    broker = Broker(config)
    try:
        if not await _started(broker, stop):
            return EXIT_OK
    except SavaError as error:
        log.critical("broker: cannot start error=%s: %s", type(error).__name__, error)
        end_at_last(EXIT_START)  # Python waits for its threads, and one may wait for a disk
        return EXIT_START
    broker.leaves_clients = True
    try:
        await _announce(broker, config, standalone=standalone)
        broker.supervisor.died.add_done_callback(lambda _: hurry.set())
        broker.supervisor.died.add_done_callback(lambda _: stop.set())
        await stop.wait()
        if not hurry.is_set():
            await _leave(broker, hurry, config.cluster.leave_timeout_seconds + LEAVE_GRACE_S)
    finally:
        reason = broker.supervisor.reason
        log.log(
            logging.CRITICAL if reason else logging.INFO, "broker: stopping reason=%s", reason or "asked to"
        )
        is_closed = await _close(broker)
    logging.shutdown()
    # Everything durable is closed. What is left are connections, which the kernel closes.
    os._exit(EXIT_OK if is_closed and not broker.supervisor.reason else EXIT_FAILED)


async def _started(broker: Broker, stop: asyncio.Event) -> bool:
    """False: it was asked to stop before it had started. A broker that waits in its start for a disk would
    hear of a signal only when the disk has answered. Raises what it cannot start for."""
    starting, asked = asyncio.create_task(broker.start()), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((starting, asked), return_when=asyncio.FIRST_COMPLETED)
    finally:
        asked.cancel()
    if not starting.done():
        log.info("broker: stopping reason=asked to, before it has started")
        end_at_last(EXIT_FAILED)
        starting.cancel()
        await asyncio.wait((starting,), timeout=END_S)
        return False
    starting.result()
    return True


def end_at_last(code: int) -> None:
    """End this process after its time for stopping, whatever the event loop does until then."""
    timer = threading.Timer(END_S + LAST_RESORT_S, os._exit, (code,))
    timer.daemon = True
    timer.start()


async def _leave(broker: Broker, hurry: asyncio.Event, timeout: float) -> None:
    """Until topics are handed over, or a second signal comes. However it goes, the broker stops next."""
    leaving, hurried = asyncio.create_task(broker.parts.leave()), asyncio.create_task(hurry.wait())
    await asyncio.wait((leaving, hurried), timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
    if leaving.done() and (error := leaving.exception()) is not None:
        log.error("broker: topics were not handed over in order", exc_info=error)
    elif not leaving.done():
        log.warning("broker: stopping before all topics are handed over")
    await cancelled(leaving, hurried)


async def _close(broker: Broker) -> bool:
    """Whether that was possible. However it goes, the process ends: what it has acknowledged is on disk, and
    its lease ends by itself."""
    end_at_last(EXIT_FAILED)
    closing = asyncio.create_task(broker.close())
    await asyncio.wait((closing,), timeout=END_S)
    if not closing.done():
        log.error("broker: not stopped within %g s", END_S)
        return False
    error = closing.exception()
    if error is not None:
        log.error("broker: not stopped in order", exc_info=error)
        return False
    return closing.result()


async def _announce(broker: Broker, config: Config, *, standalone: bool) -> None:
    info, ports = broker.node.info(), config.broker.ports
    log.info(
        "broker: started node=%d cluster=%s host=%s client=%d admin=%d raft=%d http=%d data_dir=%s",
        info.node,
        info.cluster or "-",
        config.broker.host,
        ports.client,
        ports.admin,
        ports.raft,
        ports.prometheus,
        config.meta_store.data_dir,
    )
    if info.cluster:
        _tell_where_others_look(broker, config)
        return
    if standalone:
        founded = await ClusterOperations(broker.node).init((raft_address(config),))
        log.info("raft: standalone cluster founded cluster=%s", founded.cluster)
    elif info.seeds:
        log.info("raft: waiting for all seeds seeds=%s node=%d", ",".join(info.seeds), info.node)
    else:
        log.info(
            "raft: waiting for cluster initialization, run `sava cluster init --nodes …` node=%d", info.node
        )


def _tell_where_others_look(broker: Broker, config: Config) -> None:
    """A node that was started at another address than it was added with hears from no other, and silence says
    nothing of the reason. Two names of one machine differ as well, and do no harm."""
    members = ClusterOperations(broker.node).membership()
    known, own = members.address(broker.node.info().node), raft_address(config)
    if known not in (None, own) and len(members.addresses) > 1:
        log.info(
            "raft: the others send to the address that this node was added with; if that does not lead here, "
            "start it under that name, or remove it and let it join with an empty directory "
            "(docs/operations.md) known=%s own=%s",
            known,
            own,
        )


def allow_open_files() -> None:
    """As many as it may have, within reason. A shell gives a process 1024 unless it asks for more, every
    connection is one, and a broker that cannot open the next file of its journal has to stop."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def freeze_modules() -> None:
    """Let the garbage collector pass over what is there before the broker starts: modules and what they
    hold, which last as long as the process. It looks through the rest in one piece, while heartbeats wait."""
    gc.collect()
    gc.freeze()


def run(config: Config, *, standalone: bool = False) -> int:
    allow_open_files()
    freeze_modules()
    if standalone:  # the list is of a cluster that this broker is not to join
        config = config.model_copy(
            update={"meta_store": config.meta_store.model_copy(update={"seed_nodes": ()})}
        )
    return uvloop.run(serve(config, standalone=standalone))
