"""``sava broker``: what its options make of the configuration."""

from __future__ import annotations

from pathlib import Path

import pytest

from sava import server
from sava.config import Config
from tests.support.commands import Sava


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Config]:
    """The configurations of brokers that would be running."""
    configs: list[Config] = []

    def run(config: Config, *, standalone: bool) -> int:
        configs.append(config)
        return 0

    monkeypatch.setattr(server, "run", run)
    monkeypatch.setattr("sava.logs.set_up", lambda **_: None)
    return configs


def test_everything_of_a_broker_is_below_its_data_directory(
    sava: Sava, started: list[Config], tmp_path: Path
) -> None:
    sava(f"broker --standalone --data-dir {tmp_path}")
    (config,) = started
    assert config.meta_store.data_dir == tmp_path
    assert config.storage.journal_dir == tmp_path / "journal"
    assert config.storage.url == (tmp_path / "segments").as_uri()


def test_segments_may_be_elsewhere_so_that_brokers_share_them(
    sava: Sava, started: list[Config], tmp_path: Path
) -> None:
    file = tmp_path / "sava.yml"
    file.write_text("storage: {url: 's3://of-the/file'}\n")
    sava(f"broker --config {file} --data-dir {tmp_path} --storage-url s3://bucket/prefix")
    sava(f"broker --config {file} --storage-url s3://bucket/prefix")
    sava(f"broker --config {file}")
    below, elsewhere, as_written = started
    assert (below.storage.url, below.storage.journal_dir) == ("s3://bucket/prefix", tmp_path / "journal")
    assert elsewhere.storage.url == "s3://bucket/prefix"
    assert as_written.storage.url == "s3://of-the/file"


def test_a_data_directory_does_not_take_segments_from_where_the_file_says(
    sava: Sava, started: list[Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given `storage.url: s3://…` for all brokers and a `--data-dir` for each, segments went below the data
    directories: history was on one disk each, and topics could not move."""
    file = tmp_path / "sava.yml"
    file.write_text("storage: {url: 's3://of-the/file'}\n")
    sava(f"broker --config {file} --data-dir {tmp_path}")
    monkeypatch.setenv("SAVA__STORAGE__URL", "s3://of-the/environment")
    sava(f"broker --config {file} --data-dir {tmp_path}")
    by_file, by_environment = started
    assert (by_file.storage.url, by_file.storage.journal_dir) == ("s3://of-the/file", tmp_path / "journal")
    assert by_environment.storage.url == "s3://of-the/environment"
