"""The command line without a broker: usage, help, errors, output."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

import sava
from sava.cli.connection import BadAddress, way_out, way_to
from sava.cli.main import COMMANDS, GROUPS, main, outline, tree
from sava.cli.output import as_dict
from sava.client import Client, Unavailable
from sava.config import ConfigInvalid
from sava.connecting import Cause
from sava.peers.error_mapping import BrokerUnreachable
from sava.proto import admin_pb2 as pb
from tools.reference.cli import section, walk

runner = CliRunner()


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["broker", "--help"],
        *(
            ["cluster", name, "--help"]
            for name in (
                "init",
                "status",
                "add-node",
                "promote-node",
                "remove-node",
                "transfer-leader",
                "snapshot",
                "force-new-cluster",
            )
        ),
        *(["meta", name, "--help"] for name in ("get", "range", "put", "delete", "watch")),
    ],
    ids=" ".join,
)
def test_every_command_explains_itself(arguments: list[str]) -> None:
    result = runner.invoke(tree(), arguments)
    assert result.exit_code == 0
    assert "Usage" in result.output


@pytest.mark.parametrize(
    "arguments",
    [
        ["broker"],
        ["broker", "--standalone", "--config", "x.yaml"],
        ["cluster", "init"],
        ["cluster", "remove-node"],
        ["cluster", "promote-node", "--addr", "a:1", "--node-id", "2"],
        ["meta", "get"],
        ["meta", "get", "/a", "-o", "xml"],
        ["nonsense"],
    ],
    ids=" ".join,
)
def test_wrong_usage_is_exit_code_two(arguments: list[str]) -> None:
    assert runner.invoke(tree(), arguments).exit_code == 2


def outputs() -> Iterator[tuple[str, Any]]:
    """Of every command that has ``--output``."""
    for name, command in walk(typer.main.get_command(tree()), "sava"):
        for option in command.params:
            if option.name == "output":
                yield name, option


def test_every_command_takes_the_formats_that_its_help_names() -> None:
    assert len(dict(outputs())) > 50
    wrong = {
        name: option.help
        for name, option in outputs()
        if {*re.findall(r"json|table|raw|csv", option.help or "")}
        != {each.value for each in type(option.default)}
    }
    assert wrong == {}


def test_raw_is_refused_where_there_is_nothing_raw() -> None:
    assert runner.invoke(tree(), ["topics", "list", "-o", "raw"]).exit_code == 2


def run_main(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr("sys.argv", ["sava", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    code = ended.value.code
    assert isinstance(code, int)
    return code


def test_an_unreachable_broker_is_one_line_and_exit_code_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_main(monkeypatch, "cluster", "status", "--admin", "127.0.0.1:1") == 1
    error = capsys.readouterr().err
    assert error.startswith("sava: broker 127.0.0.1:1 cannot be reached")
    assert error.endswith(
        "`sava up` starts a cluster on this machine, --admin HOST:PORT or SAVA_ADMIN names another\n"
    )
    assert error.count("\n") == 1


async def test_a_client_that_reaches_no_broker_is_told_how_to_start_one() -> None:
    with pytest.raises(Unavailable, match=r"broker 127\.0\.0\.1:1 cannot be reached: ") as caught:
        async with Client("127.0.0.1:1", timeout=0.5) as client, client.reader("/default/orders"):
            pass
    assert way_out(caught.value) == (
        "; `sava up` starts a cluster on this machine, --service URL or SAVA_SERVICE names another"
    )


def test_an_error_that_is_not_about_the_address_says_nothing_of_it() -> None:
    assert way_out(Unavailable("the topic has no owner", "topic_unavailable")) == ""
    tls = Cause("TLS: it speaks without TLS", "do without TLS")
    assert way_out(BrokerUnreachable("broker a:1", tls)) == ""


def test_a_full_disk_behind_standard_output_is_one_line_and_exit_code_one() -> None:
    with Path("/dev/full").open("wb") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "sava.cli", "--version"], stdout=full, stderr=subprocess.PIPE, check=False
        )
    assert ended.returncode == 1
    assert ended.stderr.decode() == "sava: standard output cannot be written: No space left on device\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ("cluster", "transfer-leader", "--to", "9" * 30),
        ("brokers", "activate", "9" * 30),
        ("brokers", "drain", "²"),
    ],
)
def test_a_number_that_is_nobodys_id_is_taken_for_an_address(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    """It ended with a traceback: no message has room for it."""
    assert run_main(monkeypatch, *arguments, "--admin", "127.0.0.1:1") == 1
    assert capsys.readouterr().err.startswith("sava: broker 127.0.0.1:1 cannot be reached")


def test_a_wrong_configuration_is_one_line_and_exit_code_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "sava.yaml"
    file.write_text("brokr: {}")
    assert run_main(monkeypatch, "broker", "--config", str(file)) == 1
    assert "brokr: unknown key" in capsys.readouterr().err


def test_recovering_what_is_no_data_directory_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run_main(monkeypatch, "cluster", "force-new-cluster", "--data-dir", str(tmp_path), "--yes") == 1
    assert "not the data directory of a broker" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_json_has_the_names_of_the_rpc_and_ids_as_text() -> None:
    status = pb.StatusResponse(leader_id=2**63 - 1, voters=[2**63 - 1], current_term=3)
    status.members.add(node_id=7, raft_addr="a:1", role="voter")
    shown = json.loads(json.dumps(as_dict(status)))
    assert shown["leader_id"] == "9223372036854775807"
    assert shown["voters"] == ["9223372036854775807"]
    assert shown["current_term"] == 3
    assert shown["learners"] == []
    assert shown["members"][0]["node_id"] == "7"
    assert shown["members"][0]["match"] is None


def test_values_that_are_no_text_are_shown_as_base64() -> None:
    assert as_dict(pb.KeyValue(key="/a", value="ž".encode()))["value"] == "ž"
    assert as_dict(pb.KeyValue(key="/a", value=b"\xff\x00"))["value"] == "base64:/wA="


def test_half_a_tls_setting_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAVA_TLS_CERT", "cert.pem")
    with pytest.raises(ConfigInvalid, match="SAVA_TLS_KEY"):
        way_to("127.0.0.1:1")


def test_two_tokens_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAVA_TOKEN", "marker")
    monkeypatch.setenv("SAVA_TOKEN_FILE", "token")
    with pytest.raises(ConfigInvalid, match="both set") as caught:
        way_to("127.0.0.1:1")
    assert "marker" not in str(caught.value)


@pytest.mark.parametrize("address", ["", ",", "host", "host:port", "user@host:1", "http://"])
def test_an_address_is_a_host_and_a_port(address: str) -> None:
    with pytest.raises(BadAddress, match="HOST:PORT"):
        way_to(address)


def test_addresses_are_understood_with_their_scheme() -> None:
    assert way_to("http://a:1/, b:2")[0] == ["a:1", "b:2"]
    assert way_to("a:1")[1].tls is None
    assert way_to("https://a:1")[1].tls is not None


def test_a_branch_of_the_tree_is_what_it_is_in_the_whole_tree() -> None:
    """``main`` imports and prepares only the branch that its first argument names."""

    def sections(only: str) -> dict[str, str]:
        found = walk(typer.main.get_command(tree(only)), "sava")
        return {name: section(name, command, set(), set()) for name, command in found}

    whole = sections("")
    assert {name.split()[1] for name in whole} == {*COMMANDS, *GROUPS}
    for branch in (*COMMANDS, *GROUPS):
        expected = {name: text for name, text in whole.items() if name.split()[1] == branch}
        assert sections(branch) == expected


def test_the_outline_says_what_the_commands_say() -> None:
    """Help and usage errors without a command import no command."""
    root, brief = (typer.main.get_command(each) for each in (tree(), outline()))
    assert {*brief.commands} == {*root.commands} == {*COMMANDS, *GROUPS}  # type: ignore[attr-defined]
    for name, command in root.commands.items():  # type: ignore[attr-defined]
        shown = brief.commands[name].help  # type: ignore[attr-defined]
        assert shown.endswith(".")
        assert " ".join(command.help.split()).startswith(shown)


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("--help",), 0, "subscriptions"),
        ((), 2, "subscriptions"),
        (("brokrs",), 2, "brokers"),
        (("--version",), 0, sava.__version__),
        (("--", "topics", "lst"), 2, "list"),
    ],
)
def test_what_names_no_command_is_answered_by_the_outline(
    arguments: tuple[str, ...], code: int, said: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    assert run_main(monkeypatch, *arguments) == code
    assert said in "".join(capsys.readouterr())


def test_no_command_waits_for_what_only_others_need() -> None:
    """Arrow and what it brings take longer to import than most commands take to run."""
    heavy = {"pyarrow", "sava.client", "sava.server", "rich.live"}
    code = f"import sys, sava.cli.main; print({heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_no_command_that_asks_a_broker_waits_for_arrow() -> None:
    groups = [
        "brokers",
        "cluster",
        "ledgers",
        "meta",
        "pipelines",
        "replication",
        "schemas",
        "subscriptions",
        "topics",
    ]
    modules = ", ".join(f"sava.cli.{group}" for group in groups)
    code = f"import sys, sava.api.admin_client, {modules}; print({{'pyarrow', 'numpy'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
