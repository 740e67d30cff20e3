"""What a runner shows to remotes comes from its own files, and never from the cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sava.pipeline.replicate.background import RemoteSecrets
from sava.proto import replication_pb2 as pb
from sava.security.secret_files import MAX_BYTES, SecretFileRefused


def token(path: Path, text: str, mode: int = 0o600) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


def remote(**more: Any) -> pb.Remote:
    return pb.Remote(name="west", service="west:6650", **more)


def test_names_are_files_below_the_directory_of_this_machine(tmp_path: Path) -> None:
    token(tmp_path / "west.token", "secret\n")
    secrets = RemoteSecrets(tmp_path)
    access = secrets.access(remote(token_file="west.token", tls_ca="west.pem"))
    assert (access.token, access.ca, access.cert) == ("secret", str(tmp_path / "west.pem"), "")
    assert "secret" not in repr(access)
    assert secrets.access(remote(token_file=str(tmp_path / "west.token"))).token == "secret"
    token(tmp_path / "west.token", "another")
    assert secrets.access(remote(token_file="west.token")).token == "another", "it is read each time"


@pytest.mark.parametrize("name", ["../key", "/etc/hostname", "sub/../../key", "link", "", "a\nb", "x" * 600])
def test_the_cluster_names_no_other_file(tmp_path: Path, name: str) -> None:
    """A token is sent to an address that the cluster names as well."""
    inside = tmp_path / "inside"
    inside.mkdir()
    token(tmp_path / "key", "private")
    (inside / "link").symlink_to(tmp_path / "key")
    secrets = RemoteSecrets(inside)
    if name:
        with pytest.raises(SecretFileRefused):
            secrets.access(remote(token_file=name))
        with pytest.raises(SecretFileRefused):
            secrets.access(remote(tls_key=name))
    else:
        assert secrets.access(remote(token_file=name)).token == ""


def test_a_link_within_the_directory_is_followed(tmp_path: Path) -> None:
    """As Kubernetes lays secrets out, to replace all of them at once."""
    (tmp_path / "..data").mkdir()
    token(tmp_path / "..data" / "west.token", "secret")
    (tmp_path / "west.token").symlink_to(Path("..data") / "west.token")
    assert RemoteSecrets(tmp_path).access(remote(token_file="west.token")).token == "secret"


def test_without_a_directory_only_whole_paths_are_good(tmp_path: Path) -> None:
    there = token(tmp_path / "west.token", "secret")
    assert RemoteSecrets().access(remote(token_file=str(there))).token == "secret"
    for name in ("west.token", "../west.token"):
        with pytest.raises(SecretFileRefused, match="--secrets-dir"):
            RemoteSecrets().access(remote(token_file=name))


def test_the_runners_own_file_comes_first(tmp_path: Path) -> None:
    token(tmp_path / "west.token", "of-the-cluster")
    own = token(tmp_path / "own", "of-the-runner")
    secrets = RemoteSecrets(tmp_path, {"west": own})
    assert secrets.access(remote(token_file="west.token")).token == "of-the-runner"
    east = pb.Remote(name="east", service="east:6650", token_file="west.token")
    assert secrets.access(east).token == "of-the-cluster"


@pytest.mark.parametrize(
    ("text", "mode"), [("", 0o600), ("two words", 0o600), ("x" * (MAX_BYTES + 1), 0o600), ("secret", 0o604)]
)
def test_a_file_that_holds_no_token_for_its_owner_alone_is_refused(
    tmp_path: Path, text: str, mode: int
) -> None:
    token(tmp_path / "west.token", text, mode)
    with pytest.raises(SecretFileRefused) as refused:
        RemoteSecrets(tmp_path).access(remote(token_file="west.token"))
    assert "secret " not in str(refused.value)
