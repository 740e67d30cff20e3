"""The cluster's secret: who may read its file, which lines count, and how it is replaced."""

from __future__ import annotations

import stat
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import pytest

from sava.security import cluster_secret
from sava.security.cluster_secret import ClusterSecret, SecretUnusable

OLD, NEW = "old-secret-of-16-bytes", "new-secret-of-16-bytes"


@pytest.fixture(autouse=True)
def looks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_secret, "LOOK_S", 0.0)


def written(path: Path, *lines: str, mode: int = 0o600) -> ClusterSecret:
    path.write_text("".join(f"{line}\n" for line in lines))
    path.chmod(mode)
    return ClusterSecret(path)


def test_a_secret_that_is_made_is_its_owners_alone(tmp_path: Path) -> None:
    secret = ClusterSecret(tmp_path / "data" / "cluster_secret")
    with pytest.raises(SecretUnusable, match="cannot be read"):
        secret.mac(b"p", b"t")
    secret.create()
    assert secret.is_known
    assert stat.S_IMODE(secret.path.stat().st_mode) == 0o600
    drawn = secret.shown()
    secret.create()
    assert secret.shown() == drawn, "one that is there stays"
    assert [each.name for each in secret.path.parent.iterdir()] == ["cluster_secret"]


def test_two_who_make_it_at_once_make_one(tmp_path: Path) -> None:
    made = [ClusterSecret(tmp_path / "secret") for _ in range(16)]
    with ThreadPoolExecutor(16) as threads:
        list(threads.map(ClusterSecret.create, made))
    assert len({each.shown() for each in made}) == 1


def test_a_mac_is_of_one_secret_one_purpose_and_one_text(tmp_path: Path) -> None:
    one, other = written(tmp_path / "one", OLD), written(tmp_path / "other", NEW)
    mac = one.mac(b"purpose", b"text")
    assert len(mac) == 32
    assert one.verify(b"purpose", b"text", mac)
    for purpose, text in ((b"purpose", b"texts"), (b"purposet", b"ext"), (b"other", b"text")):
        assert not one.verify(purpose, text, mac)
    assert not other.verify(b"purpose", b"text", mac)
    assert not one.verify(b"purpose", b"text", b"")


def test_a_secret_is_replaced_line_by_line_without_a_pause(tmp_path: Path) -> None:
    """Two brokers, one always a step ahead: each accepts the other at every step."""
    steps = [(OLD,), (OLD, NEW), (NEW, OLD), (NEW,)]
    ahead, behind = written(tmp_path / "ahead", OLD), written(tmp_path / "behind", OLD)
    for before, after in pairwise(steps):
        written(behind.path, *before)
        written(ahead.path, *after)
        for shows, checks in ((ahead, behind), (behind, ahead)):
            assert checks.verify(b"p", b"t", shows.mac(b"p", b"t")), (before, after)
    stale = written(tmp_path / "stale", OLD)
    assert not ahead.verify(b"p", b"t", stale.mac(b"p", b"t")), "the old one is worth nothing at the end"


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o620, 0o666])
def test_a_file_that_others_may_read_is_refused(tmp_path: Path, mode: int) -> None:
    secret = written(tmp_path / "secret", OLD, mode=mode)
    with pytest.raises(SecretUnusable, match="chmod 600"):
        secret.load()
    assert not secret.is_known
    secret.path.chmod(0o600)
    assert secret.is_known


@pytest.mark.parametrize("lines", [(), ("# a comment",), ("short",), (OLD, "short"), (f"{OLD} {NEW}",)])
def test_a_file_without_a_secret_is_refused(tmp_path: Path, lines: tuple[str, ...]) -> None:
    secret = written(tmp_path / "secret", *lines)
    with pytest.raises(SecretUnusable) as caught:
        secret.load()
    assert OLD not in str(caught.value)
    with pytest.raises(SecretUnusable):
        secret.mac(b"p", b"t")


def test_a_file_that_is_written_badly_changes_nothing_and_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    secret = written(tmp_path / "secret", OLD)
    mac = secret.mac(b"p", b"t")
    secret.path.write_text("sh")
    for _ in range(3):
        assert secret.verify(b"p", b"t", mac)
    assert len([each for each in caplog.records if "stays as it was" in each.message]) == 1
    secret.path.unlink()
    for _ in range(3):
        assert secret.verify(b"p", b"t", mac)
    assert len([each for each in caplog.records if "is gone" in each.message]) == 1
    assert OLD not in caplog.text


def test_what_another_broker_hands_over_does_not_replace_what_is_there(tmp_path: Path) -> None:
    secret = ClusterSecret(tmp_path / "secret")
    secret.store(OLD)
    secret.store(OLD)
    with pytest.raises(SecretUnusable, match="holds another secret"):
        secret.store(NEW)
    assert secret.shown() == OLD
    for bad in ("", "short", f"{OLD}\n{NEW}", f"{OLD} "):
        with pytest.raises(SecretUnusable):
            ClusterSecret(tmp_path / "bad").store(bad)
    assert not (tmp_path / "bad").exists()
