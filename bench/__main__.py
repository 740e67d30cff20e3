"""``python -m bench``: measure everything, print one table. A missed target is marked and does not fail the
command."""

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
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("GRPC_VERBOSITY", "NONE")
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

import uvloop
from rich.console import Console

from bench import etcd, load, report, servers
from bench.plan import LIMIT_S, Plan
from bench.processes import filesystem_of
from bench.rows import SECTIONS

INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    talk = Console(stderr=True, highlight=False, soft_wrap=True)
    peers = {"etcd": _etcd_version(), "NATS": servers.nats_version(), "Redis": servers.redis_version()}
    result = report.Report(
        quick=options.quick,
        client=load.client_name(),
        peers={name: version or "not installed" for name, version in peers.items()},
    )
    if missing := [name for name, version in peers.items() if version is None]:
        talk.print(f"not on the PATH, so that nothing is compared with them: {', '.join(missing)}")
        talk.print("Debian: apt-get install etcd-server nats-server redis-server")
    options.dir.mkdir(parents=True, exist_ok=True)
    if (kind := filesystem_of(options.dir)) in ("tmpfs", "ramfs"):
        talk.print(f"{options.dir} is on {kind}, where a sync costs nothing: choose a disk with --dir")
    result.machine += f", {kind}"
    code = _measure(options, result, talk)
    if options.out:
        report.write(result, options.out)
    if options.output == "json":
        print(result.as_json())
    else:
        result.print(Console(width=None if sys.stdout.isatty() else 160))
    return code


def _measure(options: argparse.Namespace, result: report.Report, talk: Console) -> int:
    """Fill ``result``; whatever happens, no process and no directory is left behind."""
    folder = Path(tempfile.mkdtemp(prefix="sava-bench-", dir=options.dir))
    plan = Plan(folder=folder, with_etcd=etcd.is_installed(), quick=options.quick)
    try:
        uvloop.run(_run(plan, options.only or list(SECTIONS), result, talk))
    except (KeyboardInterrupt, asyncio.CancelledError):
        talk.print("interrupted; every process that it had started is stopped")
        return INTERRUPTED
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


async def _run(plan: Plan, sections: Sequence[str], result: report.Report, talk: Console) -> None:
    task = asyncio.current_task()
    assert task is not None
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, task.cancel)
    deadline = loop.time() + LIMIT_S
    for section, measure in ((name, part) for name in sections for part in SECTIONS[name]):
        with talk.status(f"measuring {section} …"):
            try:
                async with asyncio.timeout_at(deadline):
                    result.rows += await measure(plan)
            except Exception as error:  # noqa: BLE001 - what fails must not take the others' figures with it
                result.faults.append(f"{section}: {_reason(error)}")
                if os.environ.get("SAVA_BENCH_TRACE"):
                    traceback.print_exception(error)


def _reason(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, TimeoutError):
        return f"not finished within the {LIMIT_S:.0f} s of a run, or a wait within it"
    return "".join(traceback.format_exception_only(error)).strip()


def _etcd_version() -> str | None:
    if not etcd.is_installed():
        return None
    output = subprocess.run(["etcd", "--version"], capture_output=True, text=True, check=False).stdout
    return output.splitlines()[0].removeprefix("etcd Version: ") if output else "unknown"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="rough figures in a few minutes")
    parser.add_argument("--only", action="append", choices=list(SECTIONS), metavar="NAME",
                        help=f"measure only this: {', '.join(SECTIONS)}; may be repeated")  # fmt: skip
    parser.add_argument(
        "-o", dest="output", choices=("table", "json"), default="table", help="form of the output"
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="also write FILE: .md as a table, otherwise JSON"
    )
    parser.add_argument("--dir", type=Path, default=Path("/var/tmp"), metavar="DIR",
                        help="on the disk to measure (default /var/tmp, which is never a tmpfs)")  # fmt: skip
    return parser


if __name__ == "__main__":
    sys.exit(main())
