"""Every command and every piece of code of the documentation works.

* Blocks marked ``sh`` are run: all of a page as one session, from its top to its end.
* Blocks marked ``python`` are run by the tests that ``PYTHON`` names.
* Everything else that looks like a command of Sava's, in a block or between backticks, in a page or in a
  message of the program itself, names a command that exists, with options that it has.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import typer.main

from sava.cli.main import app
from sava.client import Client
from tests.integration.harness import sava
from tests.long import only_long
from tests.ports import free_ports
from tests.standalone import Standalone

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
README = "../README.md"
PAGES = [README, *sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))]

PYTHON = {
    README: ("tests/integration/test_docs.py", "tests/spark/test_pipeline_guide.py"),
    "client.md": ("tests/integration/test_client_guide.py",),
    "danube.md": ("tests/compat/test_examples.py",),
    "pipeline.md": ("tests/spark/test_pipeline_guide.py",),
}
"""Which tests run the Python of a page."""
SHELL = {"pipeline.md": ("tests/spark/test_pipeline_guide.py",)}
"""And its commands, if that is not done by ``session``."""


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", (DOCS / page).read_text(), re.MULTILINE | re.DOTALL)


def session(
    page: str,
    directory: Path,
    *,
    instead: Mapping[str, str] | None = None,
    timeout: float = 150,
    **environment: str,
) -> str:
    """What the commands of the page print. They must all succeed. ``instead`` has other ports than those of
    the page: several tests share a machine."""
    commands = blocks(page, "sh")
    assert commands
    for written, run in (instead or {}).items():
        assert any(written in command for command in commands), f"{page} says {written} no more"
        commands = [command.replace(written, run) for command in commands]
    # What must fail is written as `! command`, and bash takes either outcome of that.
    script = [re.sub(r"^! (.+)$", r"if \1; then exit 1; fi", each, flags=re.MULTILINE) for each in commands]
    bin_dir = str(Path(sys.executable).parent)
    # Into a file: a pipe that nobody reads fills up, and one that is read does not end before the brokers do
    # which the page starts.
    log = directory / "session.log"
    with log.open("w") as said:
        shell = subprocess.Popen(
            ["bash", "-euc", "\n".join(script)],
            cwd=directory,
            env={**os.environ, **environment, "PATH": f"{bin_dir}{os.pathsep}{os.environ['PATH']}"},
            stdout=said,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # the brokers that the page starts die with it
        )
    code: int | str = f"not done after {timeout:.0f} s"
    try:
        code = shell.wait(timeout=timeout)
    except subprocess.TimeoutExpired:
        pass  # what it has said so far tells more
    finally:
        os.killpg(shell.pid, signal.SIGKILL)
        shell.wait()
    output = log.read_text()
    assert code == 0, f"{code}: {output}"
    return output


def own_ports() -> dict[str, str]:
    """For pages that use the usual ports."""
    client, admin, raft, http = free_ports(4)
    return {
        "SAVA_ADMIN": f"127.0.0.1:{admin}",
        "SAVA_SERVICE": f"http://127.0.0.1:{client}",
        "SAVA__BROKER__PORTS__CLIENT": str(client),
        "SAVA__BROKER__PORTS__ADMIN": str(admin),
        "SAVA__BROKER__PORTS__RAFT": str(raft),
        "SAVA__BROKER__PORTS__PROMETHEUS": str(http),
    }


def test_the_commands_of_the_operations_page_work(tmp_path: Path) -> None:
    output = session("operations.md", tmp_path)
    assert "hello" in output
    assert "is now a voter" in output
    assert re.search(r"^/default/orders-part-0 +\d+ +\d+ +\d+ +\d+ +moved", output, re.MULTILINE)
    assert output.count(" is drained, ") == 2


def test_the_commands_of_the_topics_page_work(tmp_path: Path) -> None:
    output = session("topics.md", tmp_path, **own_ports())
    assert "second order" in output
    assert "subscription billing of /default/orders moved, at offset 10" in output
    assert "namespace shop deleted" in output


@only_long("a session of its own")
def test_the_commands_of_the_subscriptions_page_work(tmp_path: Path) -> None:
    output = session("subscriptions.md", tmp_path, **own_ports())
    assert "table-2 tea for 2\ntable-2 cake for 2\n" in output
    assert '"x-failure-reason": "the oven is cold"' in output
    assert "subscription billing of /default/orders moved, at offset 0" in output


@only_long("a session of its own")
def test_the_commands_of_the_schemas_page_work(tmp_path: Path) -> None:
    output = session("schemas.md", tmp_path, **own_ports())
    assert '"name": "Order"' in output
    assert "order: compatible" in output
    assert "order: not compatible: " in output
    assert "much" not in output.partition('{"total": 4.5}')[2], "what was refused is not in the topic"


def test_the_commands_of_the_replication_page_work(tmp_path: Path) -> None:
    output = session("replication.md", tmp_path)
    assert "remote west is cluster west" in output
    assert "it will be created at west with 2 partitions" in output
    assert re.search(r"^/default/orders +west +1 +waiting_runner", output, re.MULTILINE)
    assert "remote west removed" in output


@only_long("a session of its own")
def test_the_commands_of_the_diagnosis_page_work(tmp_path: Path) -> None:
    output = session("diagnosis.md", tmp_path, **own_ports())
    assert re.search(r"^published +20,000 +0 ", output, re.MULTILINE)
    assert re.search(r"^20,001 +0 +0 +0 ", output, re.MULTILINE)
    assert "leader and terms: cluster: nothing is wrong" in output
    assert "sava_raft_is_leader 1.0" in output


@only_long("a session of its own")
def test_the_commands_of_the_migration_page_work(tmp_path: Path) -> None:
    output = session("danube.md", tmp_path, **own_ports())
    assert '{"id": 1}' in output
    assert re.search(r"^billing +shared ", output, re.MULTILINE)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the openssl command")
def test_the_commands_of_the_install_page_work(tmp_path: Path) -> None:
    ports = own_ports()
    ports["SAVA_SERVICE"] = ports["SAVA_SERVICE"].replace("http://", "https://")
    output = session("install.md", tmp_path, **ports)
    assert "a secret order" in output
    assert "certificates: cluster: nothing is wrong" in output


def test_the_unit_of_the_install_page_is_the_one_of_the_repository() -> None:
    assert blocks("install.md", "ini") == [(ROOT / "deploy" / "systemd" / "sava.service").read_text()]


@only_long("Spark is started twice, on ground that the demo covers")
def test_the_tour_of_the_readme_works(tmp_path: Path) -> None:
    """Two clusters, a runner and a query of Spark: as a newcomer sees it, but for the ports."""
    here, there = (free_ports(count)[0] for count in (12, 4))
    output = session(
        "../README.md",
        tmp_path,
        instead={"sava up >": f"sava up --port-base {here} >", "7750": str(there)},
        timeout=580,
        SAVA_SERVICE=f"http://127.0.0.1:{here}",
        SAVA_ADMIN=f"127.0.0.1:{here + 1}",
    )
    assert output.count("1000 messages published to /default/orders") == 2
    assert re.search(r"^billing +shared +0 +- +0 ", output, re.MULTILINE)
    assert len(re.findall(r"^/default/orders-part-\d +\d+ +\d+ +\d+ +\d+ +moved", output, re.MULTILINE)) == 3
    assert re.search(r"^\| +2000\|2001000\|$", output, re.MULTILINE), "Spark counts and adds up all of them"
    assert re.search(r"^│ +[12]000 │$", output, re.MULTILINE), "DuckDB sees what is in segments"
    assert re.search(r"sava-path=\S+ +2000$", output, re.MULTILINE), "the other cluster has the last of them"


async def test_the_python_of_the_readme_works(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    [block] = [block for block in blocks(README, "python") if "Client(" in block]
    with Standalone(tmp_path) as broker:
        async with Client(broker.url, timeout=60) as waiting, waiting.producer("/default/ready"):
            pass
        await sava("topics", "create", "/default/orders", "--partitions", "3", admin=broker.admin)
        names: dict[str, Any] = {}
        exec(block.replace("http://127.0.0.1:6650", broker.url), names)
        assert inspect.iscoroutinefunction(names["orders"])
        task = asyncio.create_task(names["orders"]())
        printed = ""
        async with asyncio.timeout(60):
            while printed.count("b'one ") < 3:
                printed += capsys.readouterr().out
                assert not task.done(), task
                await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert "table 4 b'one coffee'" in printed


# -- nothing is left out --------------------------------------------------------------------------


def sources_of_tests() -> dict[str, str]:
    return {str(path.relative_to(ROOT)): path.read_text() for path in (ROOT / "tests").rglob("*.py")}


def test_every_block_is_run_by_a_test() -> None:
    sources = sources_of_tests()
    sessions = {
        page for source in sources.values() for page in re.findall(r"""\bsession\(\s*"([^"]+)\"""", source)
    }
    for page in PAGES:
        if blocks(page, "sh") and page not in sessions:
            assert page in SHELL, f'the commands of {page} are not run: write session("{page}", …) in a test'
        if blocks(page, "python"):
            assert page in PYTHON, f"the Python of {page} is not run: write a test, and name it in PYTHON"
    for page, tests in (*PYTHON.items(), *SHELL.items()):
        for test in tests:
            assert Path(page).name in sources[test], f"{test} does not know of {page}"


@pytest.mark.parametrize("page", PAGES)
def test_a_loop_ends_also_when_the_page_is_repeated(page: str) -> None:
    """A command that creates is refused from the second time on, and its loop would wait for ever."""
    loops = re.findall(r"^until (sava [^;|]* create [^;]*);", (DOCS / page).read_text(), re.MULTILINE)
    assert [loop for loop in loops if "--if-absent" not in loop] == []


COMMANDS = typer.main.get_command(app)
ELLIPSES = ("…", "...")


def fault_of(text: str) -> str:
    """What is wrong with a command; empty if nothing is. Arguments are not looked at."""
    try:
        words = shlex.split(text, comments=True)
    except ValueError:
        return ""  # a piece of something else
    command: Any = COMMANDS
    path = ["sava"]
    for word in words[1:]:
        inner = getattr(command, "commands", None)
        if inner is not None and not word.startswith("-"):
            if word in ELLIPSES or "|" in word or not re.fullmatch(r"[a-z-]+[,;]?", word):
                return ""
            if word not in inner:
                return f"there is no {' '.join((*path, word))}"
            command = inner[word]
            path.append(word)
        elif re.fullmatch(r"--?[a-z][a-z-]*(=.*)?", word):
            option = word.partition("=")[0]
            known = {name for each in command.params for name in (*each.opts, *each.secondary_opts)}
            if option not in known | {"--help"}:
                return f"{' '.join(path)} has no option {option}"
        if word in ("|", "&&", ";", "&", ">", "2>", "||") or path[1:] == ["spark", "submit"]:
            break
    return ""


def commands_in(text: str) -> Iterator[str]:
    """In blocks of any kind, and between backticks."""
    for block in re.findall(r"^```\w*\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        joined = block.replace("\\\n", " ")
        yield from re.findall(r"^ *(?:until |while |seq [^|]*\| )?(sava [a-z][^\n;]*)", joined, re.MULTILINE)
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    yield from re.findall(r"(?<!`)`(sava [a-z][^`\n]*)`(?!`)", prose)


@pytest.mark.parametrize("page", [*PAGES, "../CONTRIBUTING.md"])
def test_every_command_that_a_page_names_exists(page: str) -> None:
    found = {command: fault_of(command) for command in commands_in((DOCS / page).read_text())}
    assert {command: fault for command, fault in found.items() if fault} == {}


def test_every_command_that_a_message_of_the_program_names_exists() -> None:
    faults = {}
    for path in (ROOT / "src" / "sava").rglob("*.py"):
        source = re.sub(r"\"\n\s+f?\"", "", path.read_text())
        for command in re.findall(r"`(sava [a-z][^`\n]*)`", source):
            if fault := fault_of(command):
                faults[f"{path.name}: {command}"] = fault
    assert faults == {}


@pytest.mark.parametrize(
    ("command", "fault"),
    [
        ("sava topics create /default/orders --partitions 3", ""),
        ("sava topics …", ""),
        ("sava nothing", "there is no sava nothing"),
        ("sava topics invent /default/orders", "there is no sava topics invent"),
        ("sava topics create /default/orders --pieces 3", "sava topics create has no option --pieces"),
    ],
)
def test_wrong_commands_are_noticed(command: str, fault: str) -> None:
    assert fault_of(command) == fault


@pytest.mark.parametrize("page", [*PAGES, "../CONTRIBUTING.md"])
def test_links_lead_somewhere(page: str) -> None:
    text = re.sub(r"^```.*?^```$", "", (DOCS / page).read_text(), flags=re.MULTILINE | re.DOTALL)
    targets = re.findall(r"\]\((?!https?://|#)([^)#\s]+)(?:#[^)]*)?\)", text)
    assert [target for target in targets if not ((DOCS / page).parent / target).exists()] == []
