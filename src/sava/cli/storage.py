"""``sava storage``: what storage holds of topics, whether it is what it says, and that it stays so while
it is copied. Nothing here changes it.

Two sources. With ``--journal`` the directory of a stopped broker; otherwise the descriptors in the metadata
store, asked of any broker, and the objects that they describe.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar
from urllib.parse import unquote, urlsplit

import msgspec
import typer
from rich.filesize import decimal
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

from sava import config as settings
from sava.api.admin_client import AdminClient, own_credentials
from sava.cli.connection import DEFAULT_ADMIN, AdminSession, command, run_to_end, way_to
from sava.cli.messages import Printer, instant
from sava.cli.output import Format, Output, RawFormat, plain_console, print_json, print_line, print_table
from sava.errors import HostError
from sava.metadata.commands import KeyValue
from sava.metadata.store import RangeResult
from sava.proto import admin_pb2 as pb
from sava.records import RecordBatch
from sava.security.credentials import Credentials
from sava.storage import inspection
from sava.storage.catalog import HOLD_KEY as HOLD
from sava.storage.errors import UnsupportedStore
from sava.storage.inspection import InspectedTopic, StoppedJournal, TopicView, Verification, open_stopped
from sava.storage.keys import name_prefix
from sava.storage.objectstore import ObjectStore
from sava.storage.types import Segment

T = TypeVar("T")

app = typer.Typer(no_args_is_help=True)

Topic = Annotated[str, typer.Option("--topic", metavar="/NS/TOPIC", help="One topic only.")]
Url = Annotated[
    str,
    typer.Option("--url", help="Where segments are (file:///dir, s3://bucket/prefix); else as configured."),
]
Config = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", help="The brokers' configuration: names --url and --admin."),
]
Admin = Annotated[
    str,
    typer.Option(
        "--admin",
        envvar="SAVA_ADMIN",
        metavar="HOST:PORT",
        help="Admin address of any broker; else the one that is configured for this machine.",
    ),
]
Journal = Annotated[
    Path | None,
    typer.Option("--journal", metavar="DIR", help="Look into the journal of a stopped broker instead."),
]
DumpOutput = Annotated[
    RawFormat, typer.Option("--output", "-o", help="json, table, or raw (payloads alone).")
]


@app.command()
def inspect(
    topic: Topic = "",
    journal: Journal = None,
    url: Url = "",
    config: Config = None,
    admin: Admin = "",
    output: Output = Format.TABLE,
) -> None:
    """Show topics with their states and segments (a table of all topics leaves the segments out).

    With --url or --config also whether the objects are there, by name and size."""
    if journal is not None:
        _alone(topic=topic, url=url)
        inspect_journal(journal, output)
    else:
        show_topics(place(config, url, admin), topic, output, with_objects=bool(url or config))


@app.command()
def verify(
    topic: Topic = "", journal: Journal = None, url: Url = "", config: Config = None, admin: Admin = ""
) -> None:
    """Compare all objects with their descriptors. Exit code 1 if anything is wrong."""
    if journal is not None:
        _alone(topic=topic, url=url)
        is_sound = verify_journal(journal)
    else:
        is_sound = verify_topics(place(config, url, admin), topic)
    if not is_sound:
        raise typer.Exit(1)


@app.command()
def dump(
    topic: Annotated[str, typer.Argument(metavar="TOPIC", help="/ns/topic; with --journal a topic's id.")],
    start: Annotated[
        int | None, typer.Option("--from", min=0, help="First offset; by default the first there is.")
    ] = None,
    end: Annotated[
        int | None, typer.Option("--to", min=0, help="Offset to stop before; by default the end.")
    ] = None,
    limit: Annotated[int, typer.Option(min=0, help="At most this many messages; 0 for all.")] = 0,
    journal: Journal = None,
    url: Url = "",
    config: Config = None,
    admin: Admin = "",
    output: DumpOutput = RawFormat.JSON,
) -> None:
    """Print messages, in order."""
    wanted = DumpRange(start, end, limit, output)
    if journal is None:
        dump_topic(place(config, url, admin), topic, wanted)
        return
    _alone(url=url)
    if not topic.isdigit():
        raise typer.BadParameter("a journal knows topics by their id: see sava storage inspect --journal DIR")
    dump_journal(journal, int(topic), wanted)


@command(app)
def hold(
    session: AdminSession,
    minutes: Annotated[float, typer.Option(min=0.1, help="It ends by itself after this long.")] = 60,
) -> None:
    """Keep all segments, so that copies of metadata and objects fit together.

    Retention and the merging of small segments wait; publishing and consuming continue. Repeat it for more
    time."""
    until_ms = time.time_ns() // 1_000_000 + round(minutes * 60_000)
    request = pb.PutRequest(key=HOLD, value=json.dumps({"until_ms": until_ms}).encode())
    session.ask(request)
    until = datetime.fromtimestamp(until_ms / 1000, UTC).isoformat(timespec="seconds")
    if session.is_json:
        print_json({"until": until})
    else:
        print_line(f"segments stay as they are until {until}; `sava storage release` ends it")


@command(app)
def release(session: AdminSession) -> None:
    """End a hold. Repeating it is harmless."""
    was_held = bool(session.ask(pb.DeleteRequest(key=HOLD)).prev)
    if session.is_json:
        print_json({"was_held": was_held})
    else:
        print_line("segments are not held any more" if was_held else "segments were not held")


def _alone(**others: str) -> None:
    for name, value in others.items():
        if value:
            raise typer.BadParameter(f"--{name} has no meaning with --journal")


class JournalFaulty(HostError):
    """The journal cannot be read to its end."""


# -- where things are ----------------------------------------------------------------------------


class Place(NamedTuple):
    """Where descriptors and objects are."""

    admin: str
    credentials: Credentials
    url: str


def place(config: Path | None, url: str, admin: str) -> Place:
    """As given, else as the broker of this machine has it from ``config`` and the environment."""
    loaded = settings.load(config)
    [address, *_], credentials = way_to(admin or DEFAULT_ADMIN)
    if config is None:
        return Place(address, credentials, url or loaded.storage.url)
    host = loaded.broker.host
    local = "127.0.0.1" if host in ("", "0.0.0.0", "::") else host
    return Place(
        address if admin else f"{local}:{loaded.broker.ports.admin}",
        own_credentials(loaded.auth) if credentials.is_plain else credentials,
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
        page = await self._client.ask(request)
        kvs = (
            KeyValue(kv.key, kv.value, kv.create_revision, kv.mod_revision, kv.version, kv.lease)
            for kv in page.kvs
        )
        return RangeResult(tuple(kvs), page.revision, page.more)


def _ask(where: Place, work: Callable[[RemoteRecords], Awaitable[T]]) -> T:
    async def connected() -> T:
        async with AdminClient(where.admin, where.credentials) as client:
            return await work(RemoteRecords(client))

    return run_to_end(connected())


# -- inspect -------------------------------------------------------------------------------------


def show_topics(where: Place, topic: str, output: Format, *, with_objects: bool) -> None:
    store = open_store(where.url) if with_objects else None

    async def look(records: RemoteRecords) -> tuple[list[TopicView], dict[str, int] | None]:
        if topic:
            views = [await inspection.known_topic(records, InspectedTopic.parse(topic))]
        else:
            found = [await inspection.read_topic(records, name) async for name in inspection.topics(records)]
            views = [view for view in found if not view.is_empty]
        return views, None if store is None else await _sizes(store, views)

    views, sizes = _ask(where, look)
    show_views(views, sizes, output, with_segments=bool(topic))


async def _sizes(store: ObjectStore, views: Iterable[TopicView]) -> dict[str, int]:
    """Of all objects that there are of these topics, by key."""
    return {info.key: info.size for view in views async for info in store.list(name_prefix(view.name.any_id))}


def inspect_journal(path: Path, output: Format) -> None:
    with open_stopped(path) as journal:
        faults = journal.scan()
        show_journal(journal, faults, output)
    if faults:
        raise JournalFaulty(f"{path} cannot be read to its end: {faults[-1]}")


# -- verify --------------------------------------------------------------------------------------


def verify_topics(where: Place, topic: str) -> bool:
    """Whether all is well; every fault is printed as it is found."""
    name = InspectedTopic.parse(topic) if topic else None
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


class DumpRange(NamedTuple):
    start: int | None
    end: int | None
    limit: int
    output: RawFormat


def dump_topic(where: Place, topic: str, wanted: DumpRange) -> None:
    name, store = InspectedTopic.parse(topic), open_store(where.url)

    async def print_all(records: RemoteRecords) -> None:
        view = await inspection.known_topic(records, name)
        printer = MessagePrinter(wanted.output, wanted.limit)
        async with aclosing(inspection.read(view, store, wanted.start, wanted.end)) as batches:
            async for batch in batches:
                if not printer.take(batch):
                    return

    _ask(where, print_all)


def dump_journal(path: Path, topic_id: int, wanted: DumpRange) -> None:
    with open_stopped(path) as journal:
        faults = journal.scan()
        printer = MessagePrinter(wanted.output, wanted.limit)
        for batch in journal.read(topic_id, wanted.start, wanted.end):
            if not printer.take(batch):
                break
        if faults:
            raise JournalFaulty(f"{path} cannot be read to its end: {faults[-1]}")


# -- topics and segments -------------------------------------------------------------------------


def show_views(
    found: Sequence[TopicView], sizes: Mapping[str, int] | None, output: Format, *, with_segments: bool
) -> None:
    """``sizes``: of the objects that there are; None when they were not listed."""
    if output is Format.JSON:
        print_json([_as_json(view, sizes) for view in found])
        return
    columns = ("TOPIC", "ID", "START", "END", "SEALED", "EPOCH", "STORAGE_ID", "SEGMENTS", "SIZE")
    print_table(columns, [_row(view) for view in found])
    for view in found:
        if with_segments:
            _show_segments(view, sizes)
        for text in view.faults():
            print_line(f"{view.name.path}: {text}")
        if sizes is not None and not with_segments:
            missing = sum(_presence(segment, sizes) != "there" for segment in view.segments)
            if missing:
                print_line(f"{view.name.path}: the objects of {missing} segments are not as described")


def _row(view: TopicView) -> tuple[object, ...]:
    state = view.state
    size = decimal(sum(segment.size for segment in view.segments))
    if state is None:
        return (view.name.path, *("-" * 6), len(view.segments), size)
    is_sealed = "yes" if state.sealed else "no"
    facts = (state.topic_id, state.start, state.end, is_sealed, state.epoch, state.storage_id)
    return (view.name.path, *facts, len(view.segments), size)


def _show_segments(view: TopicView, sizes: Mapping[str, int] | None) -> None:
    print_line("")
    columns = ["START", "END", "SIZE", "ROWS", "CREATED", "EPOCH", *(["OBJECT"] if sizes is not None else [])]
    rows = [
        (
            *(each.start, each.end, each.size, each.end - each.start),
            *(instant(each.created_ms * 1000), each.epoch),
            *([_presence(each, sizes)] if sizes is not None else []),
            each.key,
        )
        for each in view.segments
    ]
    print_table((*columns, "KEY"), rows)


def _presence(segment: Segment, sizes: Mapping[str, int]) -> str:
    size = sizes.get(segment.key)
    if size is None:
        return "missing"
    return "there" if size == segment.size else f"{size} bytes"


def _as_json(view: TopicView, sizes: Mapping[str, int] | None) -> dict[str, Any]:
    state = msgspec.to_builtins(view.state)
    if state is not None:
        state["topic_id"] = str(state["topic_id"])
    segments = []
    for each in view.segments:
        segment = msgspec.to_builtins(each)
        segment.update(
            topic_id=str(each.topic_id), rows=each.end - each.start, created=instant(each.created_ms * 1000)
        )
        if sizes is not None:
            segment["object_size"] = sizes.get(each.key)
        segments.append(segment)
    return {"topic": view.name.path, "state": state, "segments": segments, "problems": list(view.faults())}


def show_journal(found: StoppedJournal, faults: Sequence[str], output: Format) -> None:
    identity = found.identity
    if output is Format.JSON:
        print_json(
            {
                "identity": msgspec.to_builtins(identity),
                "files": found.file_count,
                "size": found.size,
                "torn_bytes": found.torn_bytes,
                "topics": [
                    {"topic_id": str(each.topic_id), "ranges": each.ranges, "size": each.size}
                    for each in found.topics
                ],
                "problems": list(faults),
            }
        )
        return
    if identity is not None:
        print_line(
            f"journal {identity.storage_id} of {identity.owner}, opened {identity.incarnation} times: "
            f"{found.file_count} files, {decimal(found.size)}"
        )
    rows = [
        (each.topic_id, ", ".join(f"{first}..{end}" for first, end in each.ranges), decimal(each.size))
        for each in found.topics
    ]
    print_table(("TOPIC_ID", "OFFSETS", "SIZE"), rows)


# -- messages ------------------------------------------------------------------------------------


class MessagePrinter:
    """Prints batches as they come, up to ``limit`` messages (0: all)."""

    def __init__(self, output: RawFormat, limit: int) -> None:
        self._printer = Printer(output)
        self._left = limit or None

    def take(self, batch: RecordBatch) -> bool:
        """Whether more is wanted."""
        messages = list(islice(batch, self._left))
        self._printer.show(messages)
        if self._left is None:
            return True
        self._left -= len(messages)
        return self._left > 0
