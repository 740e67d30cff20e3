"""What the operator of a runner has not allowed is not done, however a pipeline writes it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from sava.pipeline.runner.allowing import AllowInvalid, AllowList, NotAllowed, one_form, targets
from sava.pipeline.runner.kinds import Custom, applied
from tests.unit.pipeline.runner.fakes import Hosts

CHECKPOINTS = Path("/checkpoints")
SOURCE = {"topic": "/default/orders"}


def allow(**more: Any) -> AllowList:
    return AllowList.of(CHECKPOINTS, **more)


# -- functions ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("allowed", "function"),
    [
        ("shop:shout", "shop:shout"),
        ("shop", "shop:shout"),
        ("shop:*", "shop:whisper"),
        ("shop.*", "shop:shout"),
        ("shop.*", "shop.front.door:open"),
    ],
)
def test_functions_that_are_allowed(allowed: str, function: str) -> None:
    allow(functions=[allowed]).check_function(function)


@pytest.mark.parametrize(
    ("allowed", "function"),
    [
        ("shop:shout", "shop:whisper"),
        ("shop:*", "shop.front:open"),
        ("shop", "shopping:spree"),
        ("shop.*", "shopping:spree"),
        ("shop.front.*", "shop:shout"),
        ("shop:shout", "subprocess:getoutput"),
    ],
)
def test_functions_that_are_not(allowed: str, function: str) -> None:
    with pytest.raises(NotAllowed, match=f"--allow-function '{function}'"):
        allow(functions=[allowed]).check_function(function)
    with pytest.raises(NotAllowed):
        allow().check_function(function)


@pytest.mark.parametrize(
    "pattern", ["", "*", "shop:", ":shout", "sh*p:*", "shop.**", "shop:a.b", ".*", "a;b"]
)
def test_a_pattern_that_is_none_is_refused_at_the_start(pattern: str) -> None:
    with pytest.raises(AllowInvalid, match="--allow-function"):
        allow(functions=[pattern])


def test_what_a_module_has_imported_is_not_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "edge_shop.py").write_text("from os import system\nfrom subprocess import Popen as shout\n")
    monkeypatch.syspath_prepend(tmp_path)
    for function, module in (("edge_shop:system", "posix"), ("edge_shop:shout", "subprocess")):
        with pytest.raises(NotAllowed, match=f"comes from {module}"):
            applied(function, None, allow(functions=["edge_shop:*"]))  # type: ignore[arg-type]


def test_a_module_that_is_not_allowed_is_not_even_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "edge_mine.py").write_text("raise SystemExit('imported')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(NotAllowed):
        applied("edge_mine:run", None, allow(functions=["shop:*"]))  # type: ignore[arg-type]
    assert "edge_mine" not in sys.modules


# -- paths -------------------------------------------------------------------------------------------


def test_a_path_has_one_form(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "there")
    there = f"file://{tmp_path}/there/x"
    for text in (
        *(
            f"{tmp_path}/there/x",
            f"file:{tmp_path}/there/x",
            f"file://{tmp_path}/there/x",
            f"FILE:///{tmp_path}/there/x/",
        ),
        *(f"{tmp_path}/link/x", f"{tmp_path}/there/../link/./x", f"{tmp_path}//there///x"),
    ):
        assert one_form(text) == there, text
    assert one_form("S3A://Lake//a/b/") == "s3a://lake/a/b"


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            "relative/x",
            "./x",
            "file:x",
            "file://host/x",
            "//host/x",
            "s3a:lake/x",
            "s3a:///x",
            "s3a://lake/../x",
        ),
        *(
            "s3a://lake/a/./b",
            "s3a://lake/%2e%2e/x",
            "/data/{a,b}",
            "/data/*",
            "/data/a\nb",
            "s3a://lake/x#y",
        ),
        *("s3a://lake\\x", "/data/a\0b"),
    ],
)
def test_a_path_without_one_is_refused(text: str) -> None:
    with pytest.raises(NotAllowed):
        one_form(text)


@pytest.mark.parametrize(
    ("path", "is_allowed"),
    [
        ("s3a://lake/out", True),
        ("s3a://lake/out/orders", True),
        ("S3A://lake//out/orders/", True),
        ("s3a://lake/outside", False),
        ("s3a://lake/", False),
        ("s3://lake/out/x", False),
        ("s3a://lake-of-others/out", False),
        ("/data/x", True),
        ("file:/data/x", True),
        ("/data/../etc/x", False),
        ("/database/x", False),
        ("/", False),
    ],
)
def test_a_sink_writes_below_allowed_paths_alone(path: str, is_allowed: bool) -> None:
    allowed = allow(formats=["parquet"], paths=["s3a://lake/out/", "/data"])
    if is_allowed:
        checked = allowed.checked_sink("parquet", {"path": path, "compression": "zstd"})
        assert checked == {"path": one_form(path), "compression": "zstd"}
    else:
        with pytest.raises(NotAllowed, match="--allow-path"):
            allowed.checked_sink("parquet", {"PATH": path})


def test_a_link_out_of_an_allowed_directory_is_followed_first(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "etc").symlink_to("/etc")
    with pytest.raises(NotAllowed):
        allow(formats=["text"], paths=[str(tmp_path / "out")]).checked_sink(
            "text", {"path": f"{tmp_path}/out/etc/cron.d"}
        )


# -- formats, options, services, checkpoints ---------------------------------------------------------


@pytest.mark.parametrize("form", ["parquet", "SAVA", "Sava", "org.apache.spark.sql.jdbc", "jdbc", ""])
def test_no_format_but_topics_is_allowed_by_default(form: str) -> None:
    with pytest.raises(NotAllowed, match="--allow-format"):
        allow().checked_sink(form, {})


def test_an_option_of_a_format_that_names_a_place_needs_its_own_leave() -> None:
    for name in ("url", "kafka.bootstrap.servers", "dbtable", "credentialsFile"):
        with pytest.raises(NotAllowed, match="--allow-option"):
            allow(formats=["jdbc"]).checked_sink("jdbc", {name: "x"})
        assert allow(formats=["jdbc"], options=[name.upper()]).checked_sink("jdbc", {name: "x"}) == {
            name: "x"
        }


@pytest.mark.parametrize(
    "name",
    [
        *("token", "TOKENFILE", "tlsCa", "tlscert", "TlsKey", "checkpointLocation", "checkpointlocation"),
        *("queryName", "writerId"),
    ],
)
def test_credentials_and_names_of_the_runner_stay_its_own(name: str) -> None:
    with pytest.raises(NotAllowed, match="the runner sets it itself"):
        allow().check_topics("from", {**SOURCE, name: "/etc/passwd"})
    with pytest.raises(NotAllowed, match="the runner sets it itself"):
        allow(formats=["console"]).checked_sink("console", {name: "x"})
    with pytest.raises(AllowInvalid, match="the runner sets this one itself"):
        allow(options=[name])


def test_another_cluster_needs_leave_and_gets_no_credentials() -> None:
    one = allow(services=["https://West:6650"])
    assert one.check_topics("from", SOURCE) is False
    assert one.check_topics("from", {**SOURCE, "Service": "http://west:6650"}) is True
    for service in ("west:6651", "west:6650,evil:6650", "unix:/run/x:1", "evil:6650/west:6650", ""):
        with pytest.raises(NotAllowed, match="service"):
            one.check_topics("from", {**SOURCE, "service": service})
    assert targets("https://A:1/, b:2") == ["a:1", "b:2"]

    access = {"tlsCa": "ca.pem", "tlsCert": "cert.pem", "tlsKey": "key.pem", "tokenFile": "t"}
    custom = Custom(lambda: None, lambda: "east:6650", one, access=access)  # type: ignore[arg-type, return-value]
    assert custom._reach(True, "delegation") == {"token": "", "tlsCa": "ca.pem"}
    own = custom._reach(False, "delegation")
    assert own["token"] == "delegation"
    assert "tokenFile" not in own
    assert own["service"] == "east:6650"
    assert custom._reach(False, "")["tokenFile"] == "t"


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("", "file:///checkpoints/shout"),
        ("/checkpoints/shout/again", "file:///checkpoints/shout/again"),
        ("file:/checkpoints/shout", "file:///checkpoints/shout"),
        ("/checkpoints/other", None),
        ("/checkpoints/shout-again", None),
        ("/checkpoints/shout/../other", None),
        ("/checkpoints", None),
        ("/etc", None),
        ("s3a://lake/x", None),
    ],
)
def test_a_checkpoint_is_in_the_pipelines_own_directory(given: str, found: str | None) -> None:
    if found is None:
        with pytest.raises(NotAllowed, match="checkpoint"):
            allow().checked_checkpoint("shout", given)
    else:
        assert allow().checked_checkpoint("shout", given) == found


# -- what a runner does with a refusal ---------------------------------------------------------------


def test_a_refused_pipeline_has_failed_and_is_not_tried_again() -> None:
    hosts = Hosts("a")
    hosts.cluster.apply("pwn", forbidden=True)
    hosts.pass_time(300)
    status = hosts.cluster.status("pwn")
    assert (status.state, status.restarts) == ("failed", 0)
    assert "--allow-function" in status.last_error
    assert not hosts.kinds["a"].jobs

    hosts.cluster.apply("pwn")  # changed into one that is allowed
    hosts.pass_time(5)
    status = hosts.cluster.status("pwn")
    assert (status.state, status.last_error) == ("running", "")


def test_a_refused_pipeline_can_be_deleted_and_its_runner_stopped() -> None:
    hosts = Hosts("a")
    hosts.cluster.apply("pwn", forbidden=True)
    hosts.cluster.apply("good")
    hosts.pass_time(5)
    hosts.cluster.change("pwn", is_wanted=False)
    hosts.pass_time(5)
    assert hosts.cluster.holders() == {"pwn": "", "good": "a"}
    hosts.cluster.change("pwn", is_wanted=True)
    hosts.pass_time(5)
    assert hosts.cluster.status("pwn").state == "failed"
    hosts.runners["a"].stop()
    hosts.pass_time(5)
    assert hosts.runners["a"].is_done


def test_a_job_runs_with_the_token_of_who_applied_last() -> None:
    hosts = Hosts("a")
    hosts.cluster.apply("copy", by="user:ann")
    hosts.pass_time(5)
    assert hosts.kinds["a"].tokens == ["for user:ann"]
    hosts.cluster.apply("copy", by="user:bob")
    hosts.pass_time(5)
    assert hosts.kinds["a"].tokens == ["for user:ann", "for user:bob"]
    assert "user:bob" not in repr(hosts.runners["a"].hosted["copy"].granted)


@pytest.mark.parametrize("is_hosted", [False, True])
def test_settings_of_one_principal_are_never_run_with_the_token_of_another(is_hosted: bool) -> None:
    """bob applies, the runner lists that; ann applies in its place, and the runner gets her token."""
    hosts = Hosts("a")
    if is_hosted:
        hosts.cluster.apply("copy", by="user:cyd", who="cyd")
        hosts.pass_time(5)
    hosts.cluster.apply("copy", by="user:bob", who="bob")
    list_now = hosts.controls["a"].list

    def list_and_change() -> Any:
        listed = list_now()
        if hosts.cluster.records["copy"].listed.created_by == "user:bob":
            hosts.cluster.apply("copy", by="user:ann", who="ann")
        return listed

    hosts.controls["a"].list = list_and_change  # type: ignore[method-assign]
    hosts.pass_time(5)
    kind = hosts.kinds["a"]
    ran = [(job.settings["who"], token) for job, token in zip(kind.jobs, kind.tokens, strict=True)]
    assert ran == [*([("cyd", "for user:cyd")] if is_hosted else []), ("ann", "for user:ann")]
