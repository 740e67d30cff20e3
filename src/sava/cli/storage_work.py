"""What ``sava storage`` does once its options are known. Apart from them because of what it imports: every
other command starts in half the time without Arrow."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import NamedTuple, TypeVar
from urllib.parse import unquote, urlsplit

from rich.filesize import decimal
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

from sava import config as settings
from sava.api.admin_client import AdminClient
from sava.cli import storage_output as show
from sava.cli.connection import DEFAULT_ADMIN, auth_from_environment
from sava.cli.interrupts import run_to_end
from sava.cli.output import Format, RawFormat, plain_console, print_line
from sava.config import Auth
from sava.errors import HostError
from sava.metadata.commands import KeyValue
from sava.metadata.store import RangeResult
from sava.proto import admin_pb2 as pb
from sava.storage import inspection
from sava.storage.errors import UnsupportedStore
from sava.storage.inspection import TopicName, TopicView, Verification, open_stopped
from sava.storage.keys import name_prefix
from sava.storage.objectstore import ObjectStore

T = TypeVar("T")


class JournalFaulty(HostError):
    """The journal cannot be read to its end."""


# -- where things are ----------------------------------------------------------------------------


class Place(NamedTuple):
    """Where descriptors and objects are."""

    admin: str
    auth: Auth
    url: str


def place(config: Path | None, url: str, admin: str) -> Place:
    """As given, else as the broker of this machine has it from ``config`` and the environment."""
    loaded = settings.load(config)
    auth = auth_from_environment()
    if config is None:
        return Place(admin or DEFAULT_ADMIN, auth, url or loaded.storage.url)
    host = loaded.broker.host
    local = "127.0.0.1" if host in ("", "0.0.0.0", "::") else host
    return Place(
        admin or f"{local}:{loaded.broker.ports.admin}",
        loaded.auth if auth.mode == "none" else auth,
        url or loaded.storage.url,
    )


def open_store(url: str) -> ObjectStore:
    """Raises UnsupportedStore also where opening would make an empty store: it has nothing to look at."""
    parts = urlsplit(url)
    if parts.scheme == "memory":
        raise UnsupportedStore(f"storage at {url} is in the memory of one broker and cannot be looked at")
    if parts.scheme == "file" and not Path(unquote(parts.path)).is_dir():
        raise UnsupportedStore(
            f"storage at {url} cannot be opened: there is no such directory; give --url, or --config FILE"
        )
    return ObjectStore.open(url)


class RemoteRecords:
    """``inspection.Records``, asked of a broker."""

    def __init__(self, client: AdminClient) -> None:
        self._client = client

    async def range(self, prefix: str, *, limit: int = 0, start_after: str = "") -> RangeResult:
        request = pb.RangeRequest(prefix=prefix, limit=limit, start_after=start_after)
        page = await self._client.call(self._client.meta.Range, request)
        kvs = (
            KeyValue(kv.key, kv.value, kv.create_revision, kv.mod_revision, kv.version, kv.lease)
            for kv in page.kvs
        )
        return RangeResult(tuple(kvs), page.revision, page.more)


def _ask(where: Place, work: Callable[[RemoteRecords], Awaitable[T]]) -> T:
    async def connected() -> T:
        async with AdminClient(where.admin, where.auth) as client:
            return await work(RemoteRecords(client))

    return run_to_end(connected())


# -- inspect -------------------------------------------------------------------------------------


def inspect(where: Place, topic: str, output: Format, *, with_objects: bool) -> None:
    store = open_store(where.url) if with_objects else None

    async def look(records: RemoteRecords) -> tuple[list[TopicView], dict[str, int] | None]:
        if topic:
            views = [await inspection.known_topic(records, TopicName.parse(topic))]
        else:
            found = [await inspection.read_topic(records, name) async for name in inspection.topics(records)]
            views = [view for view in found if not view.is_empty]
        return views, None if store is None else await _sizes(store, views)

    views, sizes = _ask(where, look)
    show.views(views, sizes, output, with_segments=bool(topic))


async def _sizes(store: ObjectStore, views: Iterable[TopicView]) -> dict[str, int]:
    """Of all objects that there are of these topics, by key."""
    return {info.key: info.size for view in views async for info in store.list(name_prefix(view.name.any_id))}


def inspect_journal(path: Path, output: Format) -> None:
    with open_stopped(path) as journal:
        faults = journal.scan()
        show.journal(journal, faults, output)
    if faults:
        raise JournalFaulty(f"{path} cannot be read to its end: {faults[-1]}")


# -- verify --------------------------------------------------------------------------------------


def verify(where: Place, topic: str) -> bool:
    """Whether all is well; every fault is printed as it is found."""
    name = TopicName.parse(topic) if topic else None
    store = open_store(where.url)

    async def check(records: RemoteRecords) -> bool:
        verification = Verification(records, store, name)
        total, count = await verification.list_objects(), 0
        with _progress(total) as (advance, say):
            async with aclosing(verification.faults(advance)) as faults:
                async for fault in faults:
                    count += 1
                    say(f"{fault.topic.path}: {fault.text}")
        _summarize(verification, count)
        return count == 0

    return _ask(where, check)


def _summarize(seen: Verification, faults: int) -> None:
    if seen.unregistered:
        print_line(
            f"{seen.unregistered} objects that no descriptor names yet: uploads or merges may be under way"
        )
    if seen.foreign:
        print_line(f"{seen.foreign} objects whose names are not Sava's were left alone")
    print_line(
        f"{seen.topics} topics; {seen.segments} segments with {seen.messages} messages "
        f"({decimal(seen.size)}) are as described; {_problems(faults)}"
    )


def _problems(count: int) -> str:
    return f"{count or 'no'} {'problem' if count == 1 else 'problems'}"


def verify_journal(path: Path) -> bool:
    with open_stopped(path) as journal:
        done = 0
        with _progress(journal.size) as (advance, say):

            def reached(position: int) -> None:
                nonlocal done
                advance(position - done)
                done = position

            faults = journal.scan(reached)
            for fault in faults:
                say(f"{path}: {fault}")
        if journal.torn_bytes:
            print_line(
                f"{journal.torn_bytes} bytes at the end were never acknowledged; a start cuts them off"
            )
        print_line(
            f"{journal.file_count} files ({decimal(journal.size)}), {journal.records} records, "
            f"messages of {len(journal.topics)} topics; {_problems(len(faults))}"
        )
    return not faults


@contextmanager
def _progress(total: int) -> Iterator[tuple[Callable[[int], None], Callable[[str], None]]]:
    """How to tell that bytes were read, and how to print a line meanwhile. The bar is on stderr, if that is a
    terminal; a line for the same terminal must be printed through it."""
    console = plain_console(stderr=True)
    columns = BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()
    with Progress(
        *columns,
        console=console,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
        disable=not console.is_terminal,
    ) as progress:
        task = progress.add_task("", total=total)

        def say(line: str) -> None:
            if console.is_terminal and sys.stdout.isatty():
                console.print(line)
            else:
                print_line(line)

        yield (lambda size: progress.advance(task, size)), say


# -- dump ----------------------------------------------------------------------------------------


class Wanted(NamedTuple):
    start: int | None
    end: int | None
    limit: int
    output: RawFormat


def dump(where: Place, topic: str, wanted: Wanted) -> None:
    name, store = TopicName.parse(topic), open_store(where.url)

    async def print_all(records: RemoteRecords) -> None:
        view = await inspection.known_topic(records, name)
        printer = show.Messages(wanted.output, wanted.limit)
        async with aclosing(inspection.read(view, store, wanted.start, wanted.end)) as batches:
            async for batch in batches:
                if not printer.take(batch):
                    return

    _ask(where, print_all)


def dump_journal(path: Path, topic_id: int, wanted: Wanted) -> None:
    with open_stopped(path) as journal:
        faults = journal.scan()
        printer = show.Messages(wanted.output, wanted.limit)
        for batch in journal.read(topic_id, wanted.start, wanted.end):
            if not printer.take(batch):
                break
        if faults:
            raise JournalFaulty(f"{path} cannot be read to its end: {faults[-1]}")
