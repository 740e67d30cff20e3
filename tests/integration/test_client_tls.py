"""The client over TLS: it shows its certificate, and strangers stay out."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from sava.client import Client, Refused, Tls, Unavailable
from tests.integration.test_tls import make_certificates
from tests.standalone import Standalone

TOPIC = "/default/orders"


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the openssl command")
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
        for stranger in (
            Client(broker.url, tls=Tls(ca=ca), timeout=1),
            Client(f"http://{broker.address}", timeout=1),
        ):
            async with stranger:
                with pytest.raises(Unavailable):
                    await stranger.producer(TOPIC).open()


def test_a_file_that_cannot_be_read_is_told_at_once() -> None:
    with pytest.raises(Refused, match="nowhere"):
        Client("https://127.0.0.1:1", tls=Tls(ca="/nowhere"))
