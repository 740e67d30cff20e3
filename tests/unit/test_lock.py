"""The locks: every file that an installation may take, by its hash; and the list of what Sava consists of."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tools import lock, sbom
from tools.lock import LOCKS, LockFailed, Pin, hashes, locked, pins, planned, written

DIGESTS = {letter: letter * 64 for letter in "abcdef"}
PIN = Pin("some-thing", "1.2.0")


def test_the_locks_fit_the_constraints() -> None:
    assert list(lock.faults()) == []
    named = {pin for each in planned().values() for pin in each}
    assert named == set(pins(lock.CONSTRAINTS.read_text()))


def test_no_address_is_in_a_lock() -> None:
    for path in LOCKS.glob("*.lock"):
        text = path.read_text()
        assert "://" not in text
        assert "--index" not in text
        assert "--find-links" not in text


def test_brokers_need_nothing_of_the_tests() -> None:
    names = {lock: {pin.name for pin in found} for lock, found in planned().items()}
    assert {"grpcio", "pyjwt", "cryptography", "typing-extensions"} <= names["run"]
    assert {"pyspark", "py4j"} <= names["spark"]
    assert {"pytest", "mypy", "hypothesis"} <= names["dev"]
    assert not names["run"] & (names["spark"] | names["dev"])


@pytest.mark.parametrize(
    "lines",
    [
        "some-thing==1.2.0",
        "some-thing==1.2.0 --hash=md5:0123",
        "some-thing==1.2.0 --hash=sha256:0123",
        "some-thing>=1.2.0 --hash=sha256:" + "a" * 64,
    ],
)
def test_a_version_without_a_hash_is_no_lock(lines: str) -> None:
    with pytest.raises(LockFailed):
        locked(lines)


@pytest.mark.parametrize("python", ["3.11.2", "3.12.3", "3.13.0", "3.14.0"])
@pytest.mark.parametrize(
    ("system", "machine"), [("linux", "x86_64"), ("linux", "aarch64"), ("darwin", "arm64")]
)
def test_every_python_finds_what_it_needs(python: str, system: str, machine: str) -> None:
    """With 3.11.2, which is Debian's, redis needs one more package than with 3.11.3: pip refuses all
    if one has no hash."""
    there = {"python_full_version": python, "python_version": python.rpartition(".")[0]}
    there |= {"sys_platform": system, "platform_system": system.title(), "platform_machine": machine}
    pinned = {pin.name for pin in pins(lock.CONSTRAINTS.read_text())}
    missing = set()
    for name in pinned:
        try:
            needs = map(Requirement, metadata.requires(name) or [])
        except metadata.PackageNotFoundError:
            continue
        for each in needs:
            if each.marker is None or each.marker.evaluate({**there, "extra": ""}):
                missing |= {canonicalize_name(each.name)} - pinned
    assert not missing


def test_what_is_written_is_read() -> None:
    found = {PIN: [DIGESTS["a"], DIGESTS["b"]], Pin("other", "2"): [DIGESTS["c"]]}
    assert locked(written(found)) == found


def test_the_files_of_a_version_that_pip_may_choose() -> None:
    files = [
        ("some_thing-1.2.0-cp311-cp311-manylinux_2_28_x86_64.whl", DIGESTS["a"]),
        ("some_thing-1.2-cp39-abi3-manylinux_2_17_aarch64.manylinux2014_aarch64.whl", DIGESTS["b"]),
        ("Some.Thing-1.2.0-py3-none-any.whl", DIGESTS["c"]),
        ("some_thing-1.2.0-cp311-cp311-win_amd64.whl", DIGESTS["d"]),
        ("some_thing-1.2.0-cp310-cp310-manylinux_2_28_x86_64.whl", DIGESTS["d"]),
        ("some_thing-1.2.0-cp313-cp313t-manylinux_2_28_x86_64.whl", DIGESTS["d"]),
        ("some_thing-1.2.1-py3-none-any.whl", DIGESTS["d"]),
        ("some_thing_else-1.2.0-py3-none-any.whl", DIGESTS["d"]),
        ("some_thing-1.2.0-py3-none-any.whl", ""),
        ("some_thing-1.2.0.tar.gz", DIGESTS["e"]),
        ("some_thing-1.2.0.exe", DIGESTS["f"]),
    ]
    assert hashes(PIN, files) == [DIGESTS["a"], DIGESTS["b"], DIGESTS["c"]]
    assert hashes(PIN, files[-2:]) == [DIGESTS["e"]], "a source where there is no wheel"
    with pytest.raises(LockFailed, match=r"some-thing==1\.2\.0"):
        hashes(PIN, files[3:9])


def test_pip_refuses_another_file_of_the_same_version(tmp_path: Path) -> None:
    """A mirror hands out something else under the name and version of what is locked."""
    source = tmp_path / "source"
    source.mkdir()
    (source / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["setuptools"]\nbuild-backend = "setuptools.build_meta"\n'
        '[project]\nname = "some-thing"\nversion = "1.2.0"\n[tool.setuptools]\npy-modules = []\n'
    )
    wheels = tmp_path / "wheels"
    _pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(wheels), str(source))
    (tmp_path / "some.lock").write_text(written({PIN: [DIGESTS["a"]]}))
    place = ("--no-index", "--find-links", str(wheels), "--target", str(tmp_path / "there"))
    refused = _pip(
        "install", "--require-hashes", *place, "--requirement", str(tmp_path / "some.lock"), code=1
    )
    assert "DO NOT MATCH THE HASHES" in refused
    assert not (tmp_path / "there").exists()


def _pip(*words: str, code: int = 0) -> str:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_the_bill_lists_what_is_locked_with_its_scope_and_hashes() -> None:
    text = json.dumps(sbom.bill())
    assert text == json.dumps(sbom.bill())
    assert "://" not in text
    bill = json.loads(text)
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    scopes = {each["purl"]: each["scope"] for each in bill["components"]}
    expected = {
        f"pkg:pypi/{pin}".replace("==", "@"): scope
        for name, scope in sbom.SCOPES.items()
        for pin in locked((LOCKS / f"{name}.lock").read_text())
    }
    assert scopes == expected
    assert all(each["hashes"] for each in bill["components"])
    references = {each["bom-ref"] for each in bill["components"]} | {bill["metadata"]["component"]["bom-ref"]}
    for each in bill["dependencies"]:
        assert {each["ref"], *each["dependsOn"]} <= references
