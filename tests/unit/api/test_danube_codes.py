"""Which status an error is: what heals is UNAVAILABLE, and nothing else is."""

from __future__ import annotations

import inspect
from types import ModuleType

import grpc
import pytest

from sava.api.danube.producers import ProducerUnknown
from sava.api.danube.wire import (
    STATUSES,
    required,
    status_of,
    topic_name,
)
from sava.errors import CallerError, HostError, RetryableError, SavaError
from sava.metadata import errors as metadata
from sava.schemas import errors as schemas
from sava.storage import errors as storage
from sava.storage.topic_log import TopicClosed
from sava.topics import errors as broker
from sava.topics import names

RETRIED = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED}
"""By Danube's clients."""
HEALED_ELSEWHERE = {
    storage.Fenced,
    storage.EpochTaken,
    storage.TopicGone,
    storage.TopicSealed,
    storage.NotClaimed,
    broker.ConsumerReplaced,
    metadata.SessionExpired,
    metadata.RequestForgotten,
}
"""The caller of an internal call is wrong; the client that is behind it finds another broker, or comes
back."""
FULL = {schemas.TooManyVersions, metadata.NoSpace}


def _errors(*modules: ModuleType) -> list[type[SavaError]]:
    return [
        kind
        for module in modules
        for kind in vars(module).values()
        if inspect.isclass(kind) and issubclass(kind, SavaError) and kind.__module__ == module.__name__
    ]


def _status(kind: type[SavaError]) -> grpc.StatusCode:
    return status_of(kind.__new__(kind))


ALL = [*_errors(broker, names, metadata, schemas, storage), TopicClosed, ProducerUnknown]


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: f"{kind.__module__}.{kind.__name__}")
def test_what_can_be_repeated_is_retried_and_nothing_else(kind: type[SavaError]) -> None:
    status = _status(kind)
    if issubclass(kind, RetryableError):
        assert status in RETRIED
    elif kind in HEALED_ELSEWHERE or kind is metadata.OutcomeUnknown:
        assert status is grpc.StatusCode.UNAVAILABLE
    elif kind in FULL:
        assert status is grpc.StatusCode.RESOURCE_EXHAUSTED
    else:
        assert status not in RETRIED


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        (names.InvalidName, "INVALID_ARGUMENT"),
        (broker.MessageInvalid, "INVALID_ARGUMENT"),
        (broker.MessageTooLarge, "INVALID_ARGUMENT"),
        (broker.TopicUnknown, "NOT_FOUND"),
        (broker.SubscriptionUnknown, "NOT_FOUND"),
        (broker.NamespaceUnknown, "NOT_FOUND"),
        (schemas.SubjectUnknown, "NOT_FOUND"),
        (broker.TopicExists, "ALREADY_EXISTS"),
        (broker.TopicMismatch, "FAILED_PRECONDITION"),
        (broker.SchemaRefused, "FAILED_PRECONDITION"),
        (broker.SubscriptionBusy, "PERMISSION_DENIED"),
        (broker.ProducerBusy, "PERMISSION_DENIED"),
        (broker.LimitReached, "RESOURCE_EXHAUSTED"),
        (broker.NotOwner, "UNAVAILABLE"),
        (broker.ConsumerUnknown, "UNAVAILABLE"),
        (ProducerUnknown, "UNAVAILABLE"),
        (TopicClosed, "UNAVAILABLE"),
    ],
)
def test_statuses_that_clients_rely_on(kind: type[SavaError], status: str) -> None:
    assert _status(kind).name == status


def test_an_error_that_nobody_has_listed_goes_by_its_fault() -> None:
    class Later(RetryableError):
        pass

    class Wrong(CallerError):
        pass

    class Broken(HostError):
        pass

    assert [_status(kind).name for kind in (Later, Wrong, Broken)] == [
        "UNAVAILABLE",
        "FAILED_PRECONDITION",
        "INTERNAL",
    ]
    assert SavaError in STATUSES


def test_names_and_fields() -> None:
    assert str(topic_name("/default/orders")) == "/default/orders"
    with pytest.raises(names.InvalidName):
        topic_name("orders")
    assert required("x", "name") == "x"
    with pytest.raises(broker.MessageInvalid, match="name is missing"):
        required("", "name")
