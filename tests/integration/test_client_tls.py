"""The client over TLS: it shows its certificate, and strangers stay out and are told why."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sava.client import Client, Refused, Tls, Unavailable
from tests.support.brokers import Standalone
from tests.support.certificates import make_certificates

TOPIC = "/default/orders"


async def test_a_client_with_a_certificate_is_let_in(tmp_path: Path) -> None:
    auth = make_certificates(tmp_path / "certificates")
    assert auth.tls is not None
    ca, cert, key = auth.tls.ca_file, auth.tls.cert_file, auth.tls.key_file
    with Standalone(tmp_path, auth) as broker:
        async with (
            Client(broker.url, tls=Tls(ca=ca, cert=cert, key=key), timeout=60) as client,
            client.producer(TOPIC) as producer,
        ):
            assert await producer.send(b"x") == 0
        for stranger, why in (
            (Client(broker.url, tls=Tls(ca=ca), timeout=1), "shows no certificate"),
            (Client(f"http://{broker.address}", timeout=1), "shows no certificate"),
            (Client(broker.url, timeout=1), "its certificate is not trusted here"),
        ):
            async with stranger:
                with pytest.raises(Unavailable, match=f"{why}.*SAVA_TLS_CA"):
                    await stranger.producer(TOPIC).open()


def test_commands_say_in_one_line_what_is_wrong_with_certificates(tmp_path: Path) -> None:
    """And not that there is no broker: it runs."""
    auth = make_certificates(tmp_path / "certificates")
    foreign = make_certificates(tmp_path / "elsewhere").tls
    assert foreign is not None
    with Standalone(tmp_path, auth) as broker:
        broker.ready()
        for files, why in (
            ({}, "shows no certificate"),
            (
                {"CERT": foreign.cert_file, "KEY": foreign.key_file, "CA": foreign.ca_file},
                "its certificate is not trusted here",
            ),
        ):
            environment = {f"SAVA_TLS_{name}": str(path) for name, path in files.items()}
            asked = sava("cluster", "status", SAVA_ADMIN=broker.admin, **environment)
            [line] = asked.stderr.splitlines()
            assert why in line
            assert "SAVA_TLS_CA, SAVA_TLS_CERT and SAVA_TLS_KEY" in line
            found = sava("doctor", "-o", "json", SAVA_ADMIN=broker.admin, **environment)
            [finding] = json.loads(found.stdout)["findings"]
            assert why in finding["text"]
            assert "SAVA_TLS_CERT" in finding["remedy"]
            assert "start one" not in finding["remedy"]


def sava(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "sava.cli", *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_file_that_cannot_be_read_is_told_at_once() -> None:
    with pytest.raises(Refused, match="nowhere"):
        Client("https://127.0.0.1:1", tls=Tls(ca="/nowhere"))
