"""What ``sava spark`` starts: which Java, which Spark, with what around it."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sava.cli.main import tree
from sava.pipeline.launch import Program, SparkMissing, ValueMissing, find_java, program


def java(home: Path, version: str) -> Path:
    (home / "bin").mkdir(parents=True)
    file = home / "bin" / "java"
    file.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\" 2025-04-15' >&2\n")
    file.chmod(0o755)
    return home


def test_java_as_the_user_has_set_it_comes_first(tmp_path: Path) -> None:
    java(tmp_path / "set", "21.0.1")
    java(tmp_path / "path", "17.0.9")
    environment = {"JAVA_HOME": str(tmp_path / "set"), "PATH": str(tmp_path / "path" / "bin")}
    assert find_java(environment, ()) == tmp_path / "set"
    del environment["JAVA_HOME"]
    assert find_java(environment, ()) == tmp_path / "path"


def test_java_that_is_too_old_is_passed_over(tmp_path: Path) -> None:
    java(tmp_path / "set", "1.8.0_392")
    java(tmp_path / "usual" / "newest", "25")
    java(tmp_path / "usual" / "tested", "17.0.15")
    java(tmp_path / "usual" / "old", "11.0.2")
    environment = {"JAVA_HOME": str(tmp_path / "set"), "PATH": ""}
    usual = [str(tmp_path / "usual" / "*")]
    assert find_java(environment, usual) == tmp_path / "usual" / "tested"


def test_without_java_one_line_says_what_to_do(tmp_path: Path) -> None:
    java(tmp_path / "set", "11.0.2")
    with pytest.raises(SparkMissing) as error:
        find_java({"JAVA_HOME": str(tmp_path / "set"), "PATH": ""}, ())
    text = str(error.value)
    assert "\n" not in text
    for part in ("Java 17", f"{tmp_path / 'set'} is version 11", "apt-get install", "JAVA_HOME"):
        assert part in text


def started(*arguments: str, name: str = "spark-submit", **environment: str) -> Program:
    return program(name, arguments, {"JAVA_HOME": environment.pop("java", ""), **environment})


@pytest.fixture
def home(tmp_path: Path) -> str:
    return str(java(tmp_path / "java", "17.0.15"))


def test_the_surroundings(home: str) -> None:
    made = started("app.py", java=home, PATH="/bin", OTHER="x")
    assert made.path.is_file()
    assert made.arguments == ("--master", "local[*]", "app.py")
    assert made.environment == {
        "PATH": "/bin",
        "OTHER": "x",
        "JAVA_HOME": home,
        "SPARK_HOME": str(made.path.parents[1]),
        "PYSPARK_PYTHON": sys.executable,
        "PYSPARK_DRIVER_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
    }


def test_what_the_user_has_set_stays(home: str) -> None:
    made = started("app.py", java=home, PYSPARK_PYTHON="/workers/python", SPARK_LOCAL_IP="10.0.0.1")
    assert made.environment["PYSPARK_PYTHON"] == "/workers/python"
    assert made.environment["SPARK_LOCAL_IP"] == "10.0.0.1"


@pytest.mark.parametrize(
    "options",
    [
        ["--master", "spark://a:7077"],
        ["--master=spark://a:7077"],
        ["--conf", "spark.master=spark://a:7077"],
        ["--verbose", "--master", "spark://a:7077"],
        ["--remote", "sc://a:15002"],
        ["--properties-file", "mine.conf"],
    ],
    ids=" ".join,
)
def test_a_master_that_is_given_is_not_given_again(home: str, options: list[str]) -> None:
    made = started(*options, "app.py", "--master", "its own", java=home)
    assert made.arguments == (*options, "app.py", "--master", "its own")
    assert "SPARK_LOCAL_IP" not in made.environment


def test_what_the_application_is_told_is_its_own(home: str) -> None:
    made = started("--name", "n", "app.py", "--service", "a:1", "--remote", "b", java=home)
    expected = ("--master", "local[*]", "--name", "n", "app.py", "--service", "a:1", "--remote", "b")
    assert made.arguments == expected
    assert "SAVA_SERVICE" not in made.environment


def test_the_service_may_stand_among_the_options_of_spark(home: str) -> None:
    made = started("--master", "local[2]", "--service", "a:1", "--name", "n", "app.py", java=home)
    assert made.arguments == ("--master", "local[2]", "--name", "n", "app.py")
    assert made.environment["SAVA_SERVICE"] == "a:1"
    with pytest.raises(ValueMissing, match="--service needs"):
        started("--service", java=home)


def test_without_pyspark_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SparkMissing, match=r"pip install '\.\[spark\]'"):
        started("app.py")


@pytest.mark.parametrize(("command", "name"), [("shell", "pyspark"), ("submit", "spark-submit")])
def test_the_command_becomes_the_program(
    command: str, name: str, home: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    became: list[tuple[Path, tuple[str, ...], dict[str, str]]] = []
    monkeypatch.setattr(
        os, "execve", lambda path, words, environment: became.append((path, words[1:], environment))
    )
    words = ["spark", command, "--service", "a:1", "--conf", "spark.ui.enabled=false", "app.py", "-x", "--y"]
    result = CliRunner().invoke(tree(), words, env={"JAVA_HOME": home, "SAVA_SERVICE": None})
    assert result.exit_code == 0, result.output
    ((path, passed_on, environment),) = became
    assert path.name == name
    assert passed_on == ("--master", "local[*]", *words[4:])
    assert environment["SAVA_SERVICE"] == "a:1"
