"""``sava auth`` against a secured cluster, as an administrator types it; files that others cannot read."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sava.config import check
from sava.server.broker import Broker, make_private
from tests.integration.test_up import sava, up
from tests.support.brokers import Standalone
from tests.support.network import free_ports

As = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def as_user(tmp_path_factory: pytest.TempPathFactory) -> Iterator[As]:
    data = tmp_path_factory.mktemp("secured") / "data"
    options = ("--secure", "--brokers", "1", "--port-base", str(free_ports(12)[0]))
    with up(data, *options) as running:
        ready = running.ready

        def run(user: str, command: str, *, code: int = 0) -> subprocess.CompletedProcess[str]:
            done = sava(
                *command.split(),
                SAVA_CLUSTER=ready["cluster"],
                SAVA_TLS_CA=ready["ca"],
                SAVA_TOKEN_FILE=ready["token_files"][user],
            )
            assert done.returncode == code, done
            return done

        yield run


def shown(done: subprocess.CompletedProcess[str]) -> Any:
    return json.loads(done.stdout)


def test_a_role_of_ones_own_is_granted_and_taken_back(as_user: As) -> None:
    as_user("admin", "auth roles set looker lookup cluster-read")
    roles = {each["name"]: each for each in shown(as_user("admin", "auth roles list -o json"))}
    assert roles["looker"]["permissions"] == ["lookup", "cluster-read"]
    assert roles["producer"]["built_in"]

    as_user("admin", "auth can-i cluster-read --as carol", code=1)
    made = shown(as_user("admin", "auth bindings create carol looker -o json"))
    assert (made["principal"], made["role"], made["scope"]) == ("user:carol", "looker", "cluster")
    answer = shown(as_user("admin", "auth can-i cluster-read --as user:carol -o json"))
    assert answer["allowed"]
    assert "looker" in answer["reason"]

    in_use = as_user("admin", "auth roles delete looker", code=1)
    assert "looker" in in_use.stderr
    as_user("admin", f"auth bindings delete {made['id']}")
    as_user("admin", "auth roles delete looker")
    assert shown(as_user("admin", "auth bindings list --principal carol -o json")) == []


def test_a_quota_is_set_shown_and_removed(as_user: As) -> None:
    as_user("admin", "auth quotas set producer --max-streams 7 --publish-bytes-per-second 1000000")
    [quota] = shown(as_user("admin", "auth quotas list -o json"))
    assert (quota["principal"], quota["max_streams"]) == ("user:producer", 7)
    assert "user:producer" in as_user("admin", "auth quotas list").stdout
    as_user("admin", "auth quotas delete producer")
    assert shown(as_user("admin", "auth quotas list -o json")) == []


def test_a_revocation_is_shown_and_can_be_taken_back(as_user: As) -> None:
    as_user("admin", "auth revoke --certificate 4711 --reason lost")
    [revoked] = shown(as_user("admin", "auth revocations -o json"))
    assert (revoked["kind"], revoked["id"], revoked["reason"]) == ("certificate", "4711", "lost")
    assert revoked["created_by"] == "user:admin"
    as_user("admin", "auth revocations --delete 4711")
    assert shown(as_user("admin", "auth revocations -o json")) == []


@pytest.mark.parametrize(
    "command",
    [
        "auth bindings create producer admin",
        "auth roles set mine meta",
        "auth quotas set * --max-streams 1",
        "auth revoke --certificate 1",
        "auth can-i produce /default/t --as admin",
    ],
)
def test_a_user_cannot_give_itself_anything(command: str, as_user: As) -> None:
    assert "user:producer has no permission" in as_user("producer", command, code=1).stderr


# -- files and addresses ---------------------------------------------------------------------------


def test_a_broker_keeps_its_files_to_itself(tmp_path: Path) -> None:
    """Whatever the umask of its starter is."""
    mask = os.umask(0)
    try:
        with Standalone(tmp_path) as broker:
            broker.ready()
            data = tmp_path / "data"
            found = [data, *data.rglob("*")] if data.exists() else []
    finally:
        os.umask(mask)
    assert len(found) > 5, [*tmp_path.iterdir()]
    assert [str(path) for path in found if path.exists() and path.stat().st_mode & 0o077] == []


def test_a_directory_of_an_earlier_version_is_made_private(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    make_private(tmp_path)
    assert tmp_path.stat().st_mode & 0o777 == 0o700
    make_private(tmp_path / "missing")
    assert not (tmp_path / "missing").exists()


@pytest.mark.parametrize(
    ("host", "advertised", "said"),
    [
        ("127.0.0.1", "", ""),
        ("127.0.0.1", "localhost", ""),
        ("10.1.2.3", "", "EVERY CALLER MAY DO EVERYTHING"),
        ("0.0.0.0", "broker-1", "EVERY CALLER MAY DO EVERYTHING"),
        ("127.0.0.1", "broker-1", "listens to its own machine alone"),
    ],
)
async def test_a_broker_says_who_can_reach_it(
    host: str, advertised: str, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    tree = {"broker": {"host": host, "advertised_host": advertised}}
    Broker(check(tree, source="test"))._check_access()
    assert said in caplog.text
    assert len(caplog.records) == bool(said)
