"""Pipelines of a real broker: the command line, the admin port as runners use it, and runners that share."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from sava.cli.main import main
from sava.client.errors import Refused, Unavailable
from sava.pipeline.runner.control import AdminRunnerControl, JobStatus
from sava.pipeline.runner.kinds import JobProgress
from sava.pipeline.runner.runner import PipelineRunner
from tests.support.brokers import Standalone
from tests.support.waiting import PATIENCE_S, wait_until
from tests.unit.pipeline.runner.fakes import FakeKind

FILE = """\
name: {name}
from:
  topic: /default/orders
  startingOffsets: earliest
function: shop:upper
to:
  topic: /default/shouted
"""

Sava = Callable[..., Any]


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standalone]:
    with Standalone(tmp_path_factory.mktemp("broker")) as started:
        control = AdminRunnerControl(started.admin, "first", kinds=("custom",))
        try:
            _reached(lambda: _answers(control.list))
        finally:
            control.close()
        yield started


@pytest.fixture
def sava(broker: Standalone, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Sava:
    """The command, run in this process. The answer is JSON, or the line of an error."""
    monkeypatch.setenv("SAVA_ADMIN", broker.admin)

    def run(*words: str, code: int = 0) -> Any:
        monkeypatch.setattr("sys.argv", ["sava", "pipelines", *words, "-o", "json"])
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capfd.readouterr()
        assert (ended.value.code or 0) == code, err
        return json.loads(out) if code == 0 else err

    return run


@pytest.fixture
def control(broker: Standalone) -> Iterator[Callable[..., AdminRunnerControl]]:
    made: list[AdminRunnerControl] = []

    def make(runner: str, ttl_s: float = PATIENCE_S) -> AdminRunnerControl:
        control = AdminRunnerControl(broker.admin, runner, kinds=("custom",), ttl_s=ttl_s)
        made.append(control)
        return control

    yield make
    for each in made:
        each.close()


def _reached(done: Callable[[], bool], *, act: Callable[[], None] = lambda: None) -> None:
    """Wait for ``done``. ``act`` goes on beside it: to look takes seconds on a busy machine."""
    is_done = threading.Event()

    def go_on() -> None:
        while not is_done.wait(0.05):
            act()

    with ThreadPoolExecutor(1) as pool:
        acting = pool.submit(go_on)

        def is_there() -> bool:
            assert not acting.done(), acting.exception()
            return done()

        try:
            wait_until(is_there, poll_s=0.05)
        finally:
            is_done.set()
    acting.result()


def _answers(ask: Callable[[], object]) -> bool:
    try:
        ask()
    except Unavailable:
        return False
    return True


def test_a_pipeline_from_its_creation_to_its_end(sava: Sava, tmp_path: Path) -> None:
    file = tmp_path / "upper.yaml"
    file.write_text(FILE.format(name="upper"))
    assert [each["result"] for each in sava("apply", "-f", str(file))] == ["created"]
    assert [each["result"] for each in sava("apply", "-f", str(file))] == ["unchanged"]
    file.write_text(FILE.format(name="upper") + "trigger: 1 second\n")
    assert [each["result"] for each in sava("apply", "-f", str(file))] == ["changed"]

    described = sava("describe", "upper")
    assert described["spec"]["settings"]["trigger"] == "1 second"
    assert described["status"]["state"] == "waiting"
    assert described["status"]["lag_messages"] == -1
    assert sava("pause", "upper")["is_paused"]
    assert sava("status", "upper")[0]["state"] == "paused"
    assert not sava("resume", "upper")["is_paused"]
    assert [each["spec"]["name"] for each in sava("list")] == ["upper"]
    assert sava("delete", "upper") == {"name": "upper", "is_gone": True}
    assert sava("list") == []
    assert "there is no pipeline upper" in sava("delete", "upper", code=1)
    assert "there is no pipeline upper" in sava("describe", "upper", code=1)


def test_a_pipeline_by_options(sava: Sava) -> None:
    words = ("--from", "topic=/default/orders", "--to", "format=console", "--trigger", "2 seconds")
    created = sava("create", "shown", *words)
    assert created["spec"]["settings"] == {
        "from": {"topic": "/default/orders"},
        "to": {"format": "console"},
        "trigger": "2 seconds",
    }
    assert "there is a pipeline shown already" in sava("create", "shown", *words, code=1)
    assert "written module:function" in sava("create", "other", *words, "--function", "upper", code=1)
    assert "pipeline name" in sava("create", "a/b", *words, code=1)
    sava("delete", "shown")


def test_tables_are_for_people(
    broker: Standalone, sava: Sava, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    sava("create", "shown", "--from", "topic=/default/orders", "--to", "topic=/default/copy")
    for words in (["list"], ["status"], ["describe", "shown"], ["runners"]):
        monkeypatch.setattr("sys.argv", ["sava", "pipelines", *words])
        capfd.readouterr()
        with pytest.raises(SystemExit):
            main()
        out, _ = capfd.readouterr()
        assert "waiting" in out or "RUNNER" in out
    sava("delete", "shown")


def test_claims_by_way_of_the_admin_port(control: Callable[..., AdminRunnerControl], sava: Sava) -> None:
    a, b = control("a"), control("b")
    sava("create", "copy", "--from", "topic=/default/orders", "--to", "topic=/default/copy")
    with pytest.raises(Refused) as refused:
        a.claim("copy")
    assert refused.value.code == "runner_unknown"
    assert a.join().ttl_s == PATIENCE_S
    assert [peer.name for peer in b.join().peers] == ["a", "b"]
    assert a.service.startswith("127.0.0.1:")
    claim = a.claim("copy").claim
    assert claim > 0
    assert b.claim("copy").claim == 0
    assert b.claim("missing").claim == 0
    answer = a.report("copy", claim, JobStatus("running", rows=12, lag_messages=3, last_error="none"))
    assert (answer.is_held, answer.is_wanted) == (True, True)
    (listed,) = b.list()
    assert (listed.holder, listed.rows, listed.settings["to"]) == ("a", 12, {"topic": "/default/copy"})
    shown = sava("status", "copy")[0]
    assert (shown["state"], shown["runner"], shown["lag_messages"]) == ("running", "a", 3)

    assert sava("delete", "copy", "--no-wait") == {"name": "copy", "is_gone": False}
    assert "is about to stop it" in sava(
        "create", "copy", "--from", "topic=/default/orders", "--to", "topic=/default/copy", code=1
    )
    assert not a.report("copy", claim, JobStatus("running")).is_wanted
    a.release("copy", claim, JobStatus("stopped"))
    assert b.list() == []
    a.leave()
    b.leave()
    assert sava("runners") == []


def test_a_runner_that_is_killed_is_followed_by_another(
    control: Callable[..., AdminRunnerControl], sava: Sava
) -> None:
    for number in range(4):
        sava("create", f"p{number}", "--from", "topic=/default/orders", "--to", "topic=/default/copy")
    kinds = {"a": FakeKind(), "b": FakeKind()}
    controls = {name: control(name, ttl_s=6.0) for name in kinds}
    runners = {name: PipelineRunner(name, controls[name], {"custom": kinds[name]}) for name in kinds}
    alive = ["a", "b"]

    def step() -> None:
        for name in alive:
            runners[name].step()

    _reached(lambda: all(len(kind.running) == 2 for kind in kinds.values()), act=step)
    first = next(iter(runners["a"].hosted))
    kinds["a"].running[0].shown = JobProgress(is_running=True, rows=5)
    _reached(lambda: any(each["rows"] == 5 for each in sava("status")), act=step)
    assert first.startswith("p")
    alive.remove("a")  # as by kill -9: it says nothing any more
    _reached(lambda: len(kinds["b"].running) == 4, act=step)
    _reached(lambda: {each["holder"] for each in sava("list")} == {"b"}, act=step)
    _reached(lambda: {each["state"] for each in sava("status")} == {"running"}, act=step)
    assert sum(each["rows"] for each in sava("status")) == 5, "what was done counts"

    runners["b"].stop()
    _reached(lambda: runners["b"].is_done, act=step)
    assert {each["state"] for each in sava("status")} == {"waiting"}
    for number in range(4):
        sava("delete", f"p{number}")
