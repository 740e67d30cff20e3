"""Every command and every piece of code of the documentation works.

Blocks marked ``sh`` are run: all of a page as one session, from its top to its end.
``tests/unit/test_pages.py`` knows who runs which page, and that none is left out.
"""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType

import pytest

from sava.client import Client
from tests.support.brokers import Standalone, sava
from tests.support.long import only_long
from tests.support.network import free_ports
from tests.support.objects import S3Server, s3_server
from tests.support.pages import README, ROOT, all_blocks, blocks
from tests.support.processes import start_sava
from tests.support.waiting import PATIENCE_S

__all__ = ["s3_server"]

OPENSSL = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the openssl command")


def session(
    page: str,
    directory: Path,
    *,
    until: str = "",
    instead: Mapping[str, str] | None = None,
    with_programs: bool = False,
    timeout: float = 1190,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """What the commands of the page print, up to the heading ``until`` or the end. They must all succeed.
    ``instead`` has other ports than those of the page: several tests share a machine. ``with_programs``:
    whole programs are run where they stand between the commands. ``timeout`` stands for "never": only what
    hangs waits so long."""
    commands = commands_and_programs(page) if with_programs else blocks(page, "sh", until=until)
    assert commands
    if instead:
        assert [written for written in instead if not any(written in each for each in commands)] == []
        written = re.compile("|".join(map(re.escape, instead)))  # all at once: none is replaced twice
        commands = [written.sub(lambda found: instead[found[0]], command) for command in commands]
    # What must fail is written as `! command`, and bash takes either outcome of that.
    script = [re.sub(r"^! (.+)$", r"if \1; then exit 1; fi", each, flags=re.MULTILINE) for each in commands]
    bin_dir = str(Path(sys.executable).parent)
    # Into a file: a pipe that nobody reads fills up, and one that is read does not end before the brokers do
    # which the page starts.
    log = directory / "session.log"
    with log.open("w") as said:
        shell = subprocess.Popen(
            ["bash", "-euo", "pipefail", "-c", "\n".join(script)],
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
        with suppress(ProcessLookupError):  # a page that has started nothing leaves nobody
            os.killpg(shell.pid, signal.SIGKILL)
        shell.wait()
    output = log.read_text()
    assert code == 0, f"{code}: {output}"
    return output


def commands_and_programs(page: str) -> list[str]:
    """In the page's order; a program as the command that runs it."""
    return [
        block.text if block.language == "sh" else f"python - <<'PROGRAM'\n{block.text}PROGRAM\n"
        for block in all_blocks(page)
        if block.language == "sh" or (block.language == "python" and is_program(block.text))
    ]


def is_program(source: str) -> bool:
    """And not a piece of one: it runs something."""
    return "asyncio.run(" in source


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


def run_the_operations_page(directory: Path, *, until: str = "") -> str:
    environment = own_ports()
    ports = {
        usual: environment[f"SAVA__BROKER__PORTS__{name}"]
        for usual, name in ((6650, "CLIENT"), (50051, "ADMIN"), (7650, "RAFT"), (9040, "PROMETHEUS"))
    }
    instead = {f":{usual}": f":{own}" for usual, own in ports.items()}
    output = session("operations.md", directory, until=until, instead=instead, environment=environment)
    assert "hello" in output
    assert re.search(r"^/default/orders-part-0 +\d+ +\d+ +\d+ +\d+ +moved", output, re.MULTILINE)
    assert output.count(" is drained, ") == 1
    assert "topics handed over left=0" in (directory / "broker-3.log").read_text(), "stopped for an upgrade"
    return output


def test_the_commands_for_a_cluster_that_is_well_work(tmp_path: Path) -> None:
    output = run_the_operations_page(tmp_path, until="A broker dies")
    assert output.count("is now a voter") == 1


@OPENSSL
@only_long("disks and majorities are lost, one after the other")
@pytest.mark.timeout(1200)
def test_the_commands_of_the_whole_operations_page_work(tmp_path: Path) -> None:
    output = run_the_operations_page(tmp_path)
    assert re.search(r"^given up; ledger \d+/\d+ ends with what is there$", output, re.MULTILINE)
    assert output.count('"payload": "') >= 3, "messages of segments are shown"
    assert re.search(r"^\d+ topics; \d+ segments with \d+ messages .* no problems$", output, re.MULTILINE)
    assert output.count("done: start the broker, then wipe the given-up members") == 2
    assert re.search(r"^200$", output, re.MULTILINE), "what was backed up is there"
    assert "certificates: cluster: nothing is wrong" in output
    assert "1 message published to /default/orders\n" in output.partition("certificates: cluster")[2]


def test_the_commands_of_the_topics_page_work(tmp_path: Path) -> None:
    output = session("topics.md", tmp_path, environment=own_ports())
    assert "second order" in output
    assert "subscription billing of /default/orders moved, at offset 10" in output
    assert "namespace shop deleted" in output


@only_long("a session of its own")
def test_the_commands_of_the_subscriptions_page_work(tmp_path: Path) -> None:
    output = session("subscriptions.md", tmp_path, environment=own_ports())
    assert "table-2 tea for 2\ntable-2 cake for 2\n" in output
    assert '"x-failure-reason": "the oven is cold"' in output
    assert "subscription billing of /default/orders moved, at offset 0" in output


@only_long("a session of its own")
def test_the_commands_of_the_schemas_page_work(tmp_path: Path) -> None:
    output = session("schemas.md", tmp_path, environment=own_ports())
    assert '"name": "Order"' in output
    assert "order: compatible" in output
    assert "order: not compatible: " in output
    assert "much" not in output.partition('{"total": 4.5}')[2], "what was refused is not in the topic"


def run_the_replication_page(directory: Path, *, until: str = "") -> str:
    east, west = free_ports(4)[0], free_ports(4)[0]
    # The ports of a cluster follow each other.
    instead = {
        f"{written + more}": f"{own + more}"
        for written, own in ((26700, east), (26710, west))
        for more in (1, 0)
    }
    output = session("replication.md", directory, until=until, instead=instead)
    assert "remote west is cluster west" in output
    assert "it will be created at west with 2 partitions" in output
    return output


def test_the_commands_for_replication_without_a_runner_work(tmp_path: Path) -> None:
    run_the_replication_page(tmp_path, until="Run it")


@only_long("starts Spark twice")
@pytest.mark.timeout(1200)
def test_the_commands_of_the_whole_replication_page_work(tmp_path: Path) -> None:
    output = run_the_replication_page(tmp_path)
    assert re.search(r"sava-path=\S+ +100$", output, re.MULTILINE), "the last message has come"
    assert re.search(r"^/default/orders +west +\d +idle", output, re.MULTILINE)
    assert re.search(r"^sava-link\.west +link ", output, re.MULTILINE)
    assert "remote west removed" in output


async def test_the_file_and_the_command_of_the_configuration_page_work(
    tmp_path: Path, s3_server: S3Server
) -> None:
    """On a real S3 server, with directories and ports of this test."""
    [settings], [command] = (blocks("configuration.md", language) for language in ("yaml", ""))
    file = tmp_path / "sava.yml"
    file.write_text(settings.replace("s3://messages/", f"{s3_server.url}/"))
    program, *arguments = shlex.split(command.replace("/etc/sava/sava.yml", str(file)))
    assert program == "sava"
    ports = own_ports()
    environment = {
        **os.environ,
        **ports,
        **{f"AWS_{name.upper()}": value for name, value in s3_server.options.items() if name != "endpoint"},
        "AWS_ENDPOINT_URL": s3_server.options["endpoint"],
        "SAVA__BROKER__HOST": "127.0.0.1",
        "SAVA__META_STORE__DATA_DIR": str(tmp_path / "raft"),
        "SAVA__STORAGE__JOURNAL_DIR": str(tmp_path / "journal"),
    }
    admin = ports["SAVA_ADMIN"]
    broker = await start_sava(*arguments, env=environment)
    try:
        nodes = f"127.0.0.1:{ports['SAVA__BROKER__PORTS__RAFT']}"
        while (await sava("cluster", "init", "--nodes", nodes, admin=admin, check=False))[0]:
            assert broker.returncode is None, "the broker has ended"
        async with asyncio.timeout(120):
            while "shop" not in (await sava("namespaces", "list", admin=admin, check=False))[1].split():
                assert broker.returncode is None, "the broker has ended"
        service = ("--service", ports["SAVA_SERVICE"])
        code, _, said = await sava("produce", "/shop/orders", "tea", *service, admin=admin, check=False)
        assert (code, "does not exist" in said) == (1, True), said
        await sava("topics", "create", "/shop/orders", admin=admin)
        await sava("produce", "/shop/orders", "tea", *service, admin=admin)
        code, found, _ = await sava("doctor", "--min-free", "0", *service, admin=admin)
        assert (code, "object store: cluster: nothing is wrong" in found) == (0, True), found
    finally:
        broker.terminate()
        await broker.wait()


FEWER = {"--seeds 2000": "--seeds 4"}


@only_long("a little of what `make sim` does")
def test_the_commands_of_the_page_about_testing_work(tmp_path: Path) -> None:
    output = session("testing.md", tmp_path, instead=FEWER, environment={"PYTHONPATH": str(ROOT)})
    assert re.search(r"^4 seeds, ", output, re.MULTILINE)
    assert re.search(r"^seed 4711: ok$", output, re.MULTILINE)


@only_long("a little of what `make mutants` does")
def test_the_commands_of_the_page_about_journals_work(tmp_path: Path) -> None:
    output = session("design/journal.md", tmp_path, instead=FEWER, environment={"PYTHONPATH": str(ROOT)})
    assert re.search(r"^seed 17: ok$", output, re.MULTILINE)
    assert "2 of 2 mutants killed" in output


@only_long("a session of its own")
def test_the_commands_of_the_diagnosis_page_work(tmp_path: Path) -> None:
    output = session("diagnosis.md", tmp_path, environment=own_ports())
    assert re.search(r"^published +20,000 +0 ", output, re.MULTILINE)
    assert re.search(r"^20,000 +0 +0 +0 ", output, re.MULTILINE)
    assert "leader and terms: cluster: nothing is wrong" in output
    assert "sava_raft_is_leader 1.0" in output


@only_long("a session of its own")
def test_the_commands_of_the_migration_page_work(tmp_path: Path) -> None:
    output = session("danube.md", tmp_path, environment=own_ports())
    assert '{"id": 1}' in output
    assert re.search(r"^billing +shared ", output, re.MULTILINE)


@OPENSSL
def test_the_commands_of_the_install_page_work(tmp_path: Path) -> None:
    ports = own_ports()
    ports["SAVA_SERVICE"] = ports["SAVA_SERVICE"].replace("http://", "https://")
    output = session("install.md", tmp_path, environment=ports)
    assert "a secret order" in output
    assert "certificates: cluster: nothing is wrong" in output


def test_the_commands_of_the_security_page_work(tmp_path: Path) -> None:
    """From nothing to three brokers; alice may, bob may not; keys change; a right and a token are taken
    back."""
    environment = own_ports()
    instead = {
        f":{usual}": f":{environment[f'SAVA__BROKER__PORTS__{name}']}"
        for usual, name in ((6650, "CLIENT"), (50051, "ADMIN"), (7650, "RAFT"))
    }
    del environment["SAVA_SERVICE"]  # the cluster says where its clients connect
    output = session("security.md", tmp_path, instead=instead, environment=environment, with_programs=True)
    assert "a pot of tea" in output
    assert "user:bob has no permission produce on topic /sales/orders" in output
    assert "sava auth bindings create user:bob producer --topic /sales/orders" in output
    assert "this cluster wants to know its callers" in output
    assert "the laptop is gone" in output
    secrets = [(tmp_path / name).read_text().strip() for name in ("auth/admin.token", "alice.token")]
    logs = "".join((tmp_path / f"broker-{number}.log").read_text() for number in (1, 2, 3))
    assert not [secret for secret in secrets if secret in output + logs]
    assert {
        path.stat().st_mode & 0o077 for path in (tmp_path / "auth").iterdir() if path.name != "token.pub"
    } == {0}


def test_the_unit_of_the_install_page_is_the_one_of_the_repository() -> None:
    assert blocks("install.md", "ini") == [(ROOT / "deploy" / "systemd" / "sava.service").read_text()]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd")
def test_systemd_understands_the_unit(tmp_path: Path) -> None:
    """With another program in it: the one that it names is not installed here."""
    unit = tmp_path / "sava.service"
    [text] = blocks("install.md", "ini")
    unit.write_text(text.replace("/usr/local/bin/sava", "/bin/sh"))
    checked = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True)
    assert "sava.service" not in checked.stdout + checked.stderr, "other units may be what they are"


@only_long("Spark is started twice, on ground that the demo covers")
@pytest.mark.timeout(1200)
def test_the_tour_of_the_readme_works(tmp_path: Path) -> None:
    """Two clusters, a runner and a query of Spark: as a newcomer sees it, but for the ports."""
    here, there = (free_ports(count)[0] for count in (12, 4))
    output = session(
        "../README.md",
        tmp_path,
        instead={
            "sava up >": f"sava up --port-base {here} >",
            "http://127.0.0.1:6650": f"http://127.0.0.1:{here}",
            "7750": str(there),
            "7751": str(there + 1),
            "--timeout 120": "--timeout 900",  # on a machine that does ten other things Spark takes minutes
        },
        with_programs=True,
        environment={
            "SAVA_SERVICE": f"http://127.0.0.1:{here}",
            "SAVA_ADMIN": f"127.0.0.1:{here + 1}",
        },
    )
    assert output.count("1000 messages published to /default/orders") == 2
    assert re.search(r"^billing +shared +0 +- +0 ", output, re.MULTILINE)
    assert re.search(r"^\d+ table 4 b'one coffee'$", output, re.MULTILINE)
    assert len(re.findall(r"^/default/orders-part-\d +\d+ +\d+ +\d+ +\d+ +moved", output, re.MULTILINE)) == 3
    assert re.search(r"^\| +2003\|2001000\|$", output, re.MULTILINE), (
        "Spark counts all, and adds up the numbers"
    )
    assert re.search(r"^│ +[12]\d\d\d │$", output, re.MULTILINE), "DuckDB sees what is in segments"
    assert re.search(r"sava-path=\S+ +\S", output), "the other cluster has them"
    assert len(re.findall(r"^/default/orders +west +\d ", output, re.MULTILINE)) == 3


async def test_the_python_of_the_readme_works(tmp_path: Path) -> None:
    """As whoever pastes it into a file and runs it: it ends by itself. Numbers are in the topic, as in the
    tour."""
    [program] = [block for block in blocks(README, "python") if is_program(block)]
    with Standalone(tmp_path) as broker:
        async with Client(broker.url, timeout=60) as waiting, waiting.producer("/default/ready"):
            pass
        await sava("topics", "create", "/default/orders", "--partitions", "3", admin=broker.admin)
        await sava("produce", "/default/orders", "1", "2", "--service", broker.url, admin=broker.admin)
        file = tmp_path / "orders.py"
        file.write_text(program.replace("http://127.0.0.1:6650", broker.url))
        for _ in range(2):
            running = await asyncio.create_subprocess_exec(
                sys.executable, str(file), stdout=asyncio.subprocess.PIPE
            )
            printed, _ = await asyncio.wait_for(running.communicate(), PATIENCE_S)
            assert running.returncode == 0
            lines = [line.split(maxsplit=1)[1] for line in printed.decode().splitlines()]
            assert sorted(lines) == ["None b'one cake'", "None b'one tea'", "table 4 b'one coffee'"]
