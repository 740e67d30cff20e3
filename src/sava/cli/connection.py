"""How commands reach brokers: addresses and certificates from options or the environment, how users name a
broker, work that Ctrl-C ends, and what the command line adds to an error."""

from __future__ import annotations

import asyncio
import inspect
import os
import re
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Concatenate, Final, ParamSpec, TypedDict, TypeVar, cast

import typer
from google.protobuf.message import Message

from sava.api.admin_client import CALL_TIMEOUT_S, AdminClient
from sava.cli.output import Format, Output, as_dict, print_json, print_line, print_rows, print_unconfirmed
from sava.config import Auth, ConfigInvalid, TlsSettings
from sava.errors import CallerError, Outcome, SavaError
from sava.proto import brokers_pb2 as pb
from sava.proto import security_pb2
from sava.security.credentials import Credentials, Tls, Token

T = TypeVar("T")
P = ParamSpec("P")

AdminOption = Annotated[
    str,
    typer.Option(
        "--cluster",
        "--admin",
        envvar=["SAVA_CLUSTER", "SAVA_ADMIN"],
        metavar="HOST:PORT",
        help="Admin address of any broker of the cluster; several with commas between, tried in turn.",
    ),
]
DEFAULT_ADMIN = "127.0.0.1:50051"

ServiceOption = Annotated[
    str,
    typer.Option(
        "--service",
        envvar="SAVA_SERVICE",
        metavar="URL",
        help="Client address of any broker of the cluster. By default what the broker at --cluster says, if "
        "that is given, else http://127.0.0.1:6650.",
        show_default=False,
    ),
]
DEFAULT_SERVICE = "http://127.0.0.1:6650"

MAX_ID: Final = (1 << 64) - 1
CONNECT_S: Final = 2.0
"""For each of several addresses."""
_ADDRESS: Final = re.compile(r"[^\s/@]+:\d{1,5}")
_START_ONE: Final = "; `sava up` starts a cluster on this machine, "

VARIABLES: Final = {
    "SAVA_CLUSTER": "As --cluster.",
    "SAVA_TLS_CA": "The authority that has signed what brokers show.",
    "SAVA_TLS_CERT": "The certificate that commands show to brokers, where those want one.",
    "SAVA_TLS_KEY": "Its key.",
    "SAVA_TOKEN": "The token that goes with every call.",
    "SAVA_TOKEN_FILE": "The file that has it, in place of SAVA_TOKEN; it is read with every call.",
}
"""Files in PEM. No options: a user who needs them needs them for every command, and a token in the arguments
of a process can be read by every user of the machine."""


class BadAddress(CallerError):
    """An option that names no address."""


class PartlyDone(SavaError):
    """A later step of a command failed after the broker had confirmed an earlier one, which stays."""

    outcome = Outcome.PARTLY


def run(admin: str, work: Callable[[AdminClient], Awaitable[T]]) -> T:
    async def connected() -> T:
        async with await reached(admin) as client:
            try:
                return await work(client)
            except SavaError as error:
                if client.changes and error.outcome is Outcome.NOT_DONE:
                    raise PartlyDone(f"{error}; what the command has changed before this stays") from error
                raise

    return run_to_end(connected())


async def reached(admin: str) -> AdminClient:
    """The first of these addresses that accepts a connection; if none does, the first, whose error says
    why."""
    addresses, credentials = way_to(admin)
    for address in addresses[:-1] and addresses:
        client = AdminClient(address, credentials)
        if await client.is_there(CONNECT_S):
            return client
        await client.close()
    return AdminClient(addresses[0], credentials)


def way_to(admin: str) -> tuple[list[str], Credentials]:
    """The addresses of admin ports that an option names, and what to show there."""
    given = [each.strip() for each in admin.split(",") if each.strip()]
    addresses = [each.rpartition("//")[2].rstrip("/") for each in given]
    if not addresses or not all(_ADDRESS.fullmatch(each) for each in addresses):
        raise BadAddress(f"{admin[:200]!r} is no address; write HOST:PORT, several with commas between")
    is_https = any(each.startswith("https://") for each in given)
    return addresses, Credentials(tls=tls_from_environment(is_https=is_https), token=_token())


def tls_from_environment(*, is_https: bool = False) -> Tls | None:
    """Any of the variables switches to TLS, as an https:// address does."""
    ca, cert, key = (os.environ.get(f"SAVA_TLS_{name}") or None for name in ("CA", "CERT", "KEY"))
    if not (ca or cert or key or is_https):
        return None
    if bool(cert) != bool(key):
        has, lacks = ("CERT", "KEY") if cert else ("KEY", "CERT")
        raise ConfigInvalid(f"SAVA_TLS_{has} is set, but not SAVA_TLS_{lacks}; a certificate needs its key")
    return Tls(ca, cert, key)


def _token() -> Token | None:
    text, file = os.environ.get("SAVA_TOKEN"), os.environ.get("SAVA_TOKEN_FILE")
    if text and file:
        raise ConfigInvalid("SAVA_TOKEN and SAVA_TOKEN_FILE are both set; unset one")
    return Path(file) if file else text or None


class Shown(TypedDict):
    """What the client library takes."""

    token: Token | None
    tls: Tls | None


def shown_to(service: str) -> Shown:
    """To a client port. Its address says whether it has TLS."""
    is_https = service.startswith("https://")
    return Shown(token=_token(), tls=tls_from_environment(is_https=True) if is_https else None)


def service_at(service: str, admin: str) -> str:
    """Where the client library connects: as it was given, else as a broker of the cluster says that was."""
    if service or admin == DEFAULT_ADMIN:
        return service or DEFAULT_SERVICE
    answer = run(admin, lambda client: client.ask(security_pb2.WhoAmIRequest(), "WhoAmI"))
    return cast(str, answer.service)


def raft_auth_from_environment() -> Auth:
    """To Raft ports, where both ends show a certificate."""
    tls = tls_from_environment()
    if tls is None:
        return Auth()
    if tls.ca is None or tls.cert is None or tls.key is None:
        raise ConfigInvalid("between brokers SAVA_TLS_CA, SAVA_TLS_CERT and SAVA_TLS_KEY are needed together")
    return Auth(tls=TlsSettings(ca_file=Path(tls.ca), cert_file=Path(tls.cert), key_file=Path(tls.key)))


def run_to_end(work: Coroutine[Any, Any, T]) -> T:
    """As ``asyncio.run``. Ctrl-C cancels the work, and KeyboardInterrupt is raised when it has ended.

    asyncio's own handling of SIGINT leaves a gap: a signal that comes just before the loop goes to sleep is
    seen when something else wakes the loop, which may be never in a command that follows a quiet topic. A
    loop with a handler for a signal is woken by it whenever it comes."""

    async def interruptible() -> T:
        if threading.current_thread() is threading.main_thread():
            task = asyncio.current_task()
            assert task is not None
            asyncio.get_running_loop().add_signal_handler(signal.SIGINT, task.cancel)
        return await work

    try:
        return asyncio.run(interruptible())
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


# -- commands that ask a broker ------------------------------------------------


@dataclass(frozen=True, slots=True)
class AdminSession:
    """What a command that asks a broker is given: which broker, and how the answer is shown."""

    admin: str
    output: Format

    @property
    def is_json(self) -> bool:
        return self.output is Format.JSON

    def run(self, work: Callable[[AdminClient], Awaitable[T]]) -> T:
        return run(self.admin, work)

    def ask(self, request: Message, method: str = "", *, timeout: float = CALL_TIMEOUT_S) -> Any:
        """The answer to one request; ``method`` if it is not named after the method."""
        return run(self.admin, lambda client: client.ask(request, method, timeout=timeout))

    def answer(self, answer: Message, text: str) -> None:
        """Show what a command has done: the broker's answer, or what that means in one line."""
        if self.is_json:
            print_json(as_dict(answer))
        else:
            print_line(text)

    def show_list(
        self, items: Iterable[Message], /, *names: str, **columns: str | Callable[[Any], object]
    ) -> None:
        """Show all fields of each, or a table with these columns (see ``print_rows``)."""
        if self.is_json:
            print_json([as_dict(item) for item in items])
        else:
            print_rows(items, *names, **columns)


def command(
    app: typer.Typer, name: str | None = None, **options: Any
) -> Callable[[Callable[Concatenate[AdminSession, P], None]], Callable[Concatenate[AdminSession, P], None]]:
    """A command that asks a broker. Its first parameter is a ``AdminSession``, which comes from --output and
    --admin; they stand behind the command's own options. A command with an ``output`` of its own has one."""

    def register(
        work: Callable[Concatenate[AdminSession, P], None],
    ) -> Callable[Concatenate[AdminSession, P], None]:
        _, *own = inspect.signature(work, eval_str=True).parameters.values()
        has_output = any(each.name == "output" for each in own)

        def run_command(*, admin: str, **given: Any) -> None:
            output = Format.TABLE if has_output else given.pop("output")
            work(AdminSession(admin, output), **given)  # type: ignore[call-arg]  # Typer gives what the signature asks for

        shared = [_ADMIN] if has_output else [_OUTPUT, _ADMIN]
        run_command.__signature__ = inspect.Signature([*own, *shared])  # type: ignore[attr-defined]
        run_command.__name__, run_command.__doc__ = work.__name__, work.__doc__
        app.command(name=name, **options)(run_command)
        return work

    return register


_OUTPUT: Final = inspect.Parameter(
    "output", inspect.Parameter.KEYWORD_ONLY, default=Format.TABLE, annotation=Output
)
_ADMIN: Final = inspect.Parameter(
    "admin", inspect.Parameter.KEYWORD_ONLY, default=DEFAULT_ADMIN, annotation=AdminOption
)


# -- commands that destroy -----------------------------------------------------


class NotAsked(CallerError):
    """A command that destroys something could not ask whether that is meant, and was not told ``--yes``."""


Yes = Annotated[
    bool, typer.Option("--yes", "-y", help="Do not ask. Needed where there is no terminal to ask on.")
]


def confirm(question: str, *, yes: bool) -> None:
    """Ask on the terminal. A script says --yes: a command that a wrong variable turned into another must not
    destroy what no one looks at."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise NotAsked("nothing was deleted: there is no terminal to ask on; repeat with --yes to do it")
    typer.confirm(question, abort=True)


# -- how users name a broker ---------------------------------------------------

# Broker ids are long and drawn at random, so any address of a broker does as well.


class BrokerNotFound(CallerError):
    """No broker of the cluster has this address."""


def is_id(text: str) -> bool:
    """Whether it can be one; only the cluster knows whether a broker has it."""
    return text.isascii() and text.isdecimal() and int(text) <= MAX_ID


async def all_brokers(client: AdminClient) -> list[pb.Broker]:
    """Says so on stderr if no majority has confirmed them."""
    response = await client.ask(pb.ListBrokersRequest())
    if response.unconfirmed:
        print_unconfirmed(response.unconfirmed)
    return cast(list[pb.Broker], list(response.brokers))


async def id_of(client: AdminClient, broker: str) -> int:
    """Of a broker that is named by its id, or by the address of one of its ports."""
    if is_id(broker):
        return int(broker)
    address = broker.rpartition("//")[2]
    for known in await all_brokers(client):
        if address in (known.client_addr, known.admin_addr, known.raft_addr, known.http_addr):
            return known.broker_id
    raise BrokerNotFound(f"no broker has the address {address}; `sava brokers list` shows all brokers")


# -- errors ----------------------------------------------------------------------


def way_out(error: SavaError) -> str:
    """What the command line adds to an error: what to do, in options and commands that a program that meets
    the same error does not have; often nothing."""
    from sava.client.errors import NotReached
    from sava.peers.error_mapping import BrokerUnreachable

    match error:
        case BrokerUnreachable() if not error.cause.remedy:
            return f"{_START_ONE}--admin HOST:PORT or SAVA_ADMIN names another"
        case NotReached():
            return f"{_START_ONE}--service URL or SAVA_SERVICE names another"
        case _:
            return ""
