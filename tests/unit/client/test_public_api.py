"""The names and signatures that applications rely on. A change here is a change of the contract."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

import sava
from sava import client
from sava.client import blocking


def parameters(function: Any) -> str:
    """``topic, *, name=None``: names, kinds and defaults, without types."""
    parts, is_keyword_only = [], False
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name == "self":
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not is_keyword_only:
            is_keyword_only = True
            parts.append("*")
        default = "" if parameter.default is parameter.empty else f"={parameter.default!r}"
        parts.append(f"{parameter.name}{default}")
    return ", ".join(parts)


SIGNATURES = {
    "Client.__init__": "addresses, *, token=None, tls=None, timeout=10.0",
    "Client.producer": (
        "topic, *, name=None, reliable=True, partitions=None, exclusive=False, linger_ms=5, "
        "max_batch_messages=10000, max_batch_bytes=1048576, max_pending=100000, compression=None, "
        "schema=None, codec=None, timeout=30.0"
    ),
    "Client.consumer": (
        "topic, *, subscription, type='shared', name=None, start='earliest', key_filters=(), "
        "receive_queue=10000, codec=None"
    ),
    "Client.reader": "topic, *, start='earliest', end=None, codec=None, timeout=60.0",
    "Client.schema": "subject, *, version=None",
    "Client.close": "",
    "Producer.open": "",
    "Producer.close": "*, timeout=None",
    "Producer.send": "payload, *, key=None, attributes=None, publish_time=None",
    "Producer.send_many": "payloads, *, keys=None, attributes=None, publish_time=None",
    "Producer.flush": "",
    "Consumer.open": "",
    "Consumer.close": "*, timeout=None",
    "Consumer.receive_batch": "max_messages=None, *, timeout=None",
    "Consumer.ack": "message",
    "Consumer.ack_many": "messages",
    "Consumer.nack": "message, *, delay_ms=0, reason=''",
    "Consumer.flush": "*, timeout=None",
    "Reader.open": "",
    "Reader.close": "",
    "Reader.batches": "",
    "Reader.next_batch": "",
}


def test_the_names_of_the_package() -> None:
    assert sorted(client.__all__) == [
        "Batch",
        "Client",
        "ClientError",
        "Closed",
        "Codec",
        "Consumer",
        "ConsumerReplaced",
        "Denied",
        "Message",
        "OutcomeUnknown",
        "PermissionDenied",
        "Producer",
        "ProducerFenced",
        "Reader",
        "Refused",
        "SchemaCodec",
        "Sent",
        "Timeout",
        "Tls",
        "TopicUnknown",
        "TypedMessage",
        "UNKNOWN_OFFSET",
        "Unanswered",
        "Unauthenticated",
        "Unavailable",
    ]
    assert all(hasattr(client, name) for name in client.__all__)
    assert sorted(blocking.__all__) == ["Client", "Consumer", "Producer", "Reader"]


@pytest.mark.parametrize(("path", "expected"), SIGNATURES.items())
def test_signatures(path: str, expected: str) -> None:
    kind, method = path.split(".")
    assert parameters(getattr(getattr(client, kind), method)) == expected


@pytest.mark.parametrize("path", SIGNATURES)
def test_the_blocking_client_has_the_same_signatures(path: str) -> None:
    kind, method = path.split(".")
    if path in ("Reader.next_batch", "Producer.close", "Consumer.close"):
        return
    expected = SIGNATURES[path].replace("linger_ms=5", "linger_ms=0")
    assert parameters(getattr(getattr(blocking, kind), method)) == expected


def test_what_applications_read_of_messages_and_batches() -> None:
    message = client.Message(b"x")
    for name in ("offset", "payload", "key", "attributes", "publish_time", "topic", "producer", "schema_id"):
        assert hasattr(message, name)
    for name in ("payloads", "to_arrow", "topic", "ranges", "attempt", "records"):
        assert hasattr(client.Batch, name)


def test_the_package_is_typed() -> None:
    assert Path(sava.__file__).with_name("py.typed").exists()
