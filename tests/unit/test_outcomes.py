"""Every error type says what became of the request, and every admin call is known as a read or a change."""

from __future__ import annotations

import re

import grpc
import pytest
from grpc import aio

from sava.api import admin_client
from sava.errors import CallerError, HostError, Outcome, RetryableError, SavaError
from sava.metadata.errors import OutcomeUnknown, Unavailable
from sava.peers import error_mapping
from sava.peers.error_mapping import BrokerUnreachable, CallRefused, CallUnknown
from sava.proto import (
    admin_pb2,
    brokers_pb2,
    danube_schema_pb2,
    doctor_pb2,
    ledgers_pb2,
    pipelines_pb2,
    replication_pb2,
    security_pb2,
    topics_admin_pb2,
    writers_pb2,
)
from sava.storage.errors import ObjectStoreUnavailable
from tools.reference.errors import kinds

PROTOS = (
    admin_pb2,
    brokers_pb2,
    topics_admin_pb2,
    ledgers_pb2,
    doctor_pb2,
    pipelines_pb2,
    replication_pb2,
    security_pb2,
    writers_pb2,
    danube_schema_pb2,
)
FAMILIES = (CallerError, RetryableError, HostError)
OPEN = re.compile(r"\bmay (yet )?have (done|taken|happened)|may or may not|is unknown")
CLOSED = re.compile(r"had no effect|[Nn]othing (was|has) (sent|written|changed|appended|happened)")


def documented(pattern: re.Pattern[str]) -> list[type[SavaError]]:
    return [kind for kind in kinds() if pattern.search(" ".join((kind.__doc__ or "").split()))]


def test_an_error_outside_the_families_says_its_outcome_itself() -> None:
    """Inside one of the families "not done" is the rule. Outside there is none to inherit."""
    silent = [
        kind.__name__
        for kind in kinds()
        if not issubclass(kind, FAMILIES)
        and not kind.__subclasses__()  # the base of a package is never raised itself
        and not any("outcome" in each.__dict__ for each in kind.__mro__ if each is not SavaError)
    ]
    assert silent == []


def test_what_may_have_happened_is_not_called_undone() -> None:
    found = documented(OPEN)
    assert ObjectStoreUnavailable in found
    assert [kind.__name__ for kind in found if kind.outcome is not Outcome.UNKNOWN] == []


def test_what_had_no_effect_is_not_called_unknown() -> None:
    found = documented(CLOSED)
    assert Unavailable in found
    wrong = [kind for kind in found if kind.outcome not in (Outcome.NOT_DONE, Outcome.DONE_BEFORE)]
    assert [kind.__name__ for kind in wrong] == []


def test_every_admin_call_is_a_read_or_a_change() -> None:
    methods = {
        f"/{service.full_name}/{method.name}"
        for proto in PROTOS
        for service in proto.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    }
    assert admin_client.READS | admin_client.CHANGES.keys() == methods
    assert not admin_client.READS & admin_client.CHANGES.keys()


def test_the_check_of_every_change_can_be_made_from_its_request() -> None:
    for proto in PROTOS:
        for service in proto.DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                request = getattr(proto, method.input_type.name)()
                path = f"/{service.full_name}/{method.name}"
                check = admin_client.check_of(path, request)
                if path in admin_client.READS:
                    assert check is None
                elif method.name != "RecoverLedger":  # without what is accepted it only tells
                    assert check is not None
                    assert "{" not in check


def test_a_call_that_is_not_listed_is_taken_for_a_change() -> None:
    request = admin_pb2.StatusRequest()
    assert admin_client.check_of("/sava.admin.Cluster/FromTheFuture", request) == "sava doctor"


def failed(status: grpc.StatusCode, *trailing: tuple[str, str]) -> aio.AioRpcError:
    return aio.AioRpcError(status, aio.Metadata(), aio.Metadata(*trailing), "what gRPC says", None)


@pytest.mark.parametrize(
    ("status", "change", "read"),
    [
        (grpc.StatusCode.DEADLINE_EXCEEDED, OutcomeUnknown, Unavailable),
        (grpc.StatusCode.UNAVAILABLE, OutcomeUnknown, BrokerUnreachable),
        (grpc.StatusCode.CANCELLED, OutcomeUnknown, error_mapping.CallFailed),
        (grpc.StatusCode.UNKNOWN, OutcomeUnknown, error_mapping.CallFailed),
        (grpc.StatusCode.INTERNAL, OutcomeUnknown, error_mapping.CallFailed),
        (grpc.StatusCode.PERMISSION_DENIED, CallRefused, CallRefused),
        (grpc.StatusCode.UNIMPLEMENTED, CallUnknown, CallUnknown),
    ],
)
def test_a_call_without_an_answer(
    status: grpc.StatusCode, change: type[SavaError], read: type[SavaError]
) -> None:
    of_change = error_mapping.raised_by(failed(status), target="broker a:1", check="sava meta get /k")
    assert type(of_change) is change
    if change is OutcomeUnknown:
        assert str(of_change).endswith("it may or may not have happened, `sava meta get /k` shows which")
    else:
        assert of_change.outcome is Outcome.NOT_DONE
    of_read = error_mapping.raised_by(failed(status), target="broker a:1")
    assert (type(of_read), of_read.outcome) == (read, Outcome.NOT_DONE)


@pytest.mark.parametrize("raised", [Unavailable("x"), OutcomeUnknown("x"), ObjectStoreUnavailable("x")])
def test_the_outcome_of_an_unknown_error_survives_the_wire(
    raised: SavaError,
) -> None:
    trailing = [(key, str(value)) for key, value in error_mapping.trailing_of(raised)]
    arrived = error_mapping.raised_by(
        failed(error_mapping.status_of(raised), *trailing), target="broker a:1", check="sava doctor"
    )
    assert arrived.outcome is raised.outcome
    assert isinstance(arrived, OutcomeUnknown) == (raised.outcome is Outcome.UNKNOWN)


def test_a_read_that_ends_with_an_unknown_outcome_has_changed_nothing() -> None:
    raised = ObjectStoreUnavailable("the store does not answer")
    trailing = [(key, str(value)) for key, value in error_mapping.trailing_of(raised)]
    arrived = error_mapping.raised_by(failed(grpc.StatusCode.UNAVAILABLE, *trailing), target="broker a:1")
    assert arrived.outcome is Outcome.NOT_DONE
