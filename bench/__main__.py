"""``python -m bench``: measure everything, print one table, and with ``--write`` put it into
``docs/benchmarks.md``. A missed target is marked and does not fail the command."""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("GRPC_VERBOSITY", "NONE")
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

import uvloop
from rich.console import Console

from bench import etcd, jetstream, kafka, load, page, report, servers, setting
from bench.plan import LIMIT_S, Plan
from bench.processes import filesystem_of
from bench.rows import SECTIONS, failover

INTERRUPTED = 130
FAULTS = [fault.name for fault in failover.FAULTS]
SYSTEMS = [kind.sender for kind in failover.systems()]


def main(arguments: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = _parser().parse_args(given)
    talk = Console(stderr=True, highlight=False, soft_wrap=True)
    peers = {"etcd": _etcd_version(), "NATS": servers.nats_version(), "Redis": servers.redis_version()}
    rivals = {"Kafka": kafka.Kafka.version(), "NATS of make nats": jetstream.JetStream.version()}
    if missing := [name for name, version in peers.items() if version is None]:
        talk.print(f"not on the PATH, so that nothing is compared with them: {', '.join(missing)}")
        talk.print("Debian: apt-get install etcd-server nats-server redis-server")
    absent = {"Kafka": kafka.MISSING, "NATS of make nats": jetstream.MISSING}
    for what in (absent[name] for name, version in rivals.items() if version is None):
        talk.print(f"failover has no rows beside {what}")
    options.dir.mkdir(parents=True, exist_ok=True)
    if (kind := filesystem_of(options.dir)) in ("tmpfs", "ramfs"):
        talk.print(f"{options.dir} is on {kind}, where a sync costs nothing: choose a disk with --dir")
    plan = Plan(
        folder=options.dir,
        with_etcd=etcd.is_installed(),
        quick=options.quick,
        faults=options.fault,
        systems=options.system,
        rounds_given=options.rounds,
        resume=options.resume,
        logs=options.logs,
        say=talk.print,
    )
    result = report.Report(
        quick=options.quick,
        rounds=plan.rounds,
        command=_command(given),
        sections=options.only or list(SECTIONS),
        client=load.client_name(),
        versions=setting.versions() | peers | rivals,
        commit=setting.commit(),
        machine=setting.machine(),
        disk=setting.disk(options.dir),
    )
    code = _measure(plan, result, talk)
    if options.out:
        report.write(result, options.out)
    if options.output == "json":
        print(result.as_json())
    else:
        result.print(Console(width=None if sys.stdout.isatty() else 160))
    if options.write:
        _write(result, talk, interrupted=bool(code))
    return code


def _write(result: report.Report, talk: Console, *, interrupted: bool) -> None:
    if interrupted:
        talk.print(f"{page.PAGE.name} is as it was: sections that were cut short look like whole ones there")
        return
    for section in page.write(result, SECTIONS):
        talk.print(f"{section} broke off before its first figure: {page.PAGE.name} keeps the former ones")
    talk.print(f"written into {page.PAGE}")


def _command(given: Sequence[str]) -> str:
    """As somebody would type it; where the data was kept is told apart, and the page is no part of it."""
    shown = [word for word in given if word != "--write"]
    for option in ("--dir", "--out", "--resume", "--logs"):
        if option in shown:
            at = shown.index(option)
            del shown[at : at + 2]
    return " ".join(("python -m bench", *shown)) if shown else "make bench"


def _measure(plan: Plan, result: report.Report, talk: Console) -> int:
    """Fill ``result``; whatever happens, no process and no directory is left behind."""
    folder = Path(tempfile.mkdtemp(prefix="sava-bench-", dir=plan.folder))
    try:
        uvloop.run(_run(replace(plan, folder=folder), result, talk))
    except (KeyboardInterrupt, asyncio.CancelledError):
        talk.print("interrupted; every process that it had started is stopped")
        return INTERRUPTED
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


async def _run(plan: Plan, result: report.Report, talk: Console) -> None:
    task = asyncio.current_task()
    assert task is not None
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, task.cancel)
    for section, measure in ((name, part) for name in result.sections for part in SECTIONS[name]):
        with talk.status(f"measuring {section} …"):
            try:
                async with asyncio.timeout(LIMIT_S):
                    result.rows += await measure(plan)
            except Exception as error:  # noqa: BLE001 - what fails must not take the others' figures with it
                result.faults.append(report.Fault(section, _reason(error)))
                if os.environ.get("SAVA_BENCH_TRACE"):
                    traceback.print_exception(error)


def _reason(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, TimeoutError):
        return f"not finished within {LIMIT_S:.0f} s, or a wait within it was not"
    return "".join(traceback.format_exception_only(error)).strip()


def _etcd_version() -> str | None:
    if not etcd.is_installed():
        return None
    output = subprocess.run(["etcd", "--version"], capture_output=True, text=True, check=False).stdout
    return output.splitlines()[0].removeprefix("etcd Version: ") if output else "unknown"


def _names(known: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    def names(text: str) -> tuple[str, ...]:
        given = tuple(text.split(","))
        if unknown := [name for name in given if name not in known]:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: choose from {', '.join(known)}")
        return given

    return names


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="rough figures in a few minutes")
    parser.add_argument("--only", action="append", choices=list(SECTIONS), metavar="NAME",
                        help=f"measure only this: {', '.join(SECTIONS)}; may be repeated")  # fmt: skip
    parser.add_argument(
        "-o", dest="output", choices=("table", "json"), default="table", help="form of the output"
    )
    parser.add_argument(
        "--write", action="store_true", help="put it into docs/benchmarks.md; other sections stay as they are"
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="also write FILE: .md as a table, otherwise JSON"
    )
    parser.add_argument("--rounds", type=int, metavar="N", help="of each fault of failover (default 20)")
    parser.add_argument("--fault", type=_names(FAULTS), default=(), metavar="NAMES",
                        help=f"of failover, with commas between: {', '.join(FAULTS)}")  # fmt: skip
    parser.add_argument("--system", type=_names(SYSTEMS), default=(), metavar="NAMES",
                        help=f"in failover, with commas between: {', '.join(SYSTEMS)}")  # fmt: skip
    parser.add_argument("--resume", type=Path, metavar="FILE",
                        help="keep the rounds of failover there, and count those that are there")  # fmt: skip
    parser.add_argument("--logs", type=Path, metavar="DIR",
                        help="keep the logs of each fault's slowest round of failover there")  # fmt: skip
    parser.add_argument("--dir", type=Path, default=Path("/var/tmp"), metavar="DIR",
                        help="on the disk to measure (default /var/tmp, which is never a tmpfs)")  # fmt: skip
    return parser


if __name__ == "__main__":
    sys.exit(main())
