"""``make demo`` shows what it claims, says so when it does not, and leaves nothing behind."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from examples.demo.interrupts import SIGNALS, Interrupts
from examples.demo.steps import Measured, Show, Step, StepFailed
from tests.support.brokers import REPOSITORY
from tests.support.long import IS_LONG, only_long
from tests.support.network import free_ports

READY_TIMEOUT_S = 900.0
"""A bound and no promise: two starts of Spark take minutes where other tests want the same cores."""
STOP_TIMEOUT_S = 120.0
ORDERS = () if IS_LONG else ("--orders", "20000")
SLOW = ("verify", "shell", "doctor")
"""What is not tried: two start Spark, which has tests of its own, and the last one rightly fails because a
broker is dead."""


@contextmanager
def demo(directory: Path, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    """Running, with all that it writes in ``directory``."""
    with (directory / "said").open("wb") as said:
        process = subprocess.Popen(
            [sys.executable, "-u", "-m", "examples.demo", "--port-base", str(free_ports(60)[0]), *options],
            cwd=REPOSITORY,
            env={**os.environ, "TMPDIR": str(directory)},
            stdout=said,
            stderr=said,
        )
    try:
        yield process
    finally:
        process.terminate()
        process.wait(STOP_TIMEOUT_S)


def wait_said(process: subprocess.Popen[bytes], directory: Path, text: str) -> str:
    deadline = time.monotonic() + READY_TIMEOUT_S
    while text not in (said := (directory / "said").read_text()):
        assert process.poll() is None, said
        assert time.monotonic() < deadline, said
        time.sleep(0.1)
    return said


def processes_of(directory: Path) -> list[str]:
    """Whatever has the directory in its command line."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = file.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:  # it has just ended
            continue
        if str(directory) in command:
            found.append(command)
    return found


def left_behind(directory: Path) -> list[str]:
    return [path.name for path in directory.glob("sava-demo-*")] + processes_of(directory)


@pytest.mark.timeout(1200)
def test_the_demo_shows_what_it_claims_and_what_to_try_next(tmp_path: Path) -> None:
    with demo(tmp_path, "--keep", *ORDERS) as process:
        said = wait_said(process, tmp_path, "Ctrl-C stops everything")
        assert said.count("✔") == 2 * 8, said  # in its line, and in the summary
        assert "FAILED" not in said
        assert processes_of(tmp_path)

        commands = re.findall(r"^  ((?:export|sava|seq|curl) .*)$", said, re.MULTILINE)
        quick = [command for command in commands if not any(word in command for word in SLOW)]
        assert len(quick) == len(commands) - len(SLOW) > 5
        tried = subprocess.run(
            ["bash", "-euxo", "pipefail", "-c", "\n".join(quick)], capture_output=True, text=True, timeout=180
        )
        assert tried.returncode == 0, tried.stderr
        assert "1000 messages published to /default/numbers" in tried.stdout + tried.stderr

        process.send_signal(signal.SIGINT)
        assert process.wait(STOP_TIMEOUT_S) == 0
    assert left_behind(tmp_path) == []


@only_long("it starts all brokers once more")
def test_a_demo_that_is_interrupted_under_load_stops_what_it_started(tmp_path: Path) -> None:
    with demo(tmp_path) as process:
        wait_said(process, tmp_path, "sava topics unload")
        process.send_signal(signal.SIGINT)
        assert process.wait(STOP_TIMEOUT_S) == 130
    assert left_behind(tmp_path) == []


@only_long("it starts all brokers once more")
@pytest.mark.timeout(300)
def test_a_broker_that_ends_by_itself_is_told_and_the_demo_fails(tmp_path: Path) -> None:
    with demo(tmp_path) as process:
        said = wait_said(process, tmp_path, "brokers are the processes")
        one_of_three = int(re.findall(r"processes (\d+)", said)[0])
        os.kill(one_of_three, signal.SIGKILL)
        assert process.wait(STOP_TIMEOUT_S) == 1
    said = (tmp_path / "said").read_text()
    assert "broker 1 of east has ended by itself" in said
    assert "not run" in said
    assert processes_of(tmp_path) == []


def nothing() -> str:
    return ""


def test_a_step_that_fails_says_so_and_steps_that_need_it_do_not_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run: list[str] = []

    def holds() -> Measured:
        run.append("holds")
        return Measured("from broker 1 to 2 in 7 ms", "7 ms")

    def differs() -> Measured:
        raise StepFailed("1000 orders", "999")

    def breaks() -> Measured:
        raise ValueError("not JSON")

    show = Show(tmp_path, nothing)
    assert not show.run([Step("one", differs, is_needed=False), Step("two", holds)])
    assert run == ["holds"]
    assert not show.run([Step("three", holds), Step("four", breaks), Step("five", holds)])
    assert run == ["holds", "holds"]
    show.summary(1.0)
    said = capsys.readouterr().out
    assert f"1. one (0.0 s): FAILED: expected 1000 orders; found 999. Logs: {tmp_path}" in said
    assert "2. two (0.0 s): from broker 1 to 2 in 7 ms" in said
    assert re.search(r"2\. two +7 ms +0\.0 s", said)
    assert "FAILED: ValueError: not JSON" in said
    assert "not run" in said
    assert Show(tmp_path, nothing).run([Step("six", holds)])


def test_a_step_that_holds_while_something_else_breaks_has_failed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken: list[str] = []

    def breaks_another() -> Measured:
        broken.append("broker 3 of east has ended by itself")
        return Measured("7 ms", "7 ms")

    show = Show(tmp_path, lambda: ", ".join(broken))
    assert not show.run([Step("one", breaks_another)])
    said = capsys.readouterr().out
    assert "FAILED: it held, but something else did not: 7 ms; broker 3 of east has ended by itself" in said


def test_a_terminal_without_utf_8_is_shown_what_it_can_show(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="latin-1", errors="replace")
    monkeypatch.setattr(sys, "stdout", terminal)
    show = Show(tmp_path, nothing)
    show.run([Step("one", lambda: Measured("7 ms", "7 ms"))])
    show.summary(1.0)
    terminal.flush()
    said = terminal.buffer.getvalue().decode("latin-1")
    assert "+ 1. one (0.0 s): 7 ms" in said


def test_an_interrupt_waits_for_a_process_that_is_being_started() -> None:
    """The signal comes while a process is started. It must be known before the demo ends, or it goes on."""
    known: list[str] = []

    def start(interrupts: Interrupts) -> None:
        with interrupts.held():
            signal.raise_signal(signal.SIGINT)
            known.append("process")

    with own_signals() as interrupts:
        with pytest.raises(KeyboardInterrupt):
            start(interrupts)
        assert known == ["process"]


def test_a_second_interrupt_does_not_disturb_the_end_of_the_demo() -> None:
    with own_signals() as interrupts:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGINT)
        with interrupts.held():
            signal.raise_signal(signal.SIGTERM)


@contextmanager
def own_signals() -> Iterator[Interrupts]:
    before = [(number, signal.getsignal(number)) for number in SIGNALS]
    interrupts = Interrupts()
    interrupts.listen()
    try:
        yield interrupts
    finally:
        for number, handler in before:
            signal.signal(number, handler)
