"""Sava defines Danube's interface exactly: for what the published Python client has, by comparison with the
client that is installed, and for the rest by comparison with a table."""

from __future__ import annotations

from tests.compat.beyond_the_client import ADMIN, CLIENT_LACKS
from tests.compat.descriptors import interface_of


def test_what_clients_speak_is_what_the_published_client_defines() -> None:
    client = interface_of("danube.proto.DanubeApi_pb2", "danube.proto.SchemaRegistry_pb2")
    assert client.messages, "the installed client defines nothing"
    assert client.methods
    assert not client.messages.keys() & CLIENT_LACKS.messages.keys(), (
        "the client has caught up: shorten the table"
    )
    assert not client.methods.keys() & CLIENT_LACKS.methods.keys(), (
        "the client has caught up: shorten the table"
    )

    ours = interface_of("sava.proto.danube_api_pb2", "sava.proto.danube_schema_pb2")

    expected = client | CLIENT_LACKS
    assert ours.messages == expected.messages
    assert ours.enums == expected.enums
    assert ours.methods == expected.methods


def test_what_administration_tools_speak_is_what_the_table_says() -> None:
    ours = interface_of("sava.proto.danube_admin_pb2")

    assert ours.messages == ADMIN.messages
    assert ours.enums == ADMIN.enums
    assert ours.methods == ADMIN.methods


def test_the_notation_tells_every_kind_of_field_apart() -> None:
    ours = interface_of("sava.proto.danube_api_pb2", "sava.proto.danube_admin_pb2")

    assert ours.messages["danube.SchemaReference"][1] == "2 use_latest: bool (oneof version_ref)"
    assert ours.messages["danube.StreamMessage"][6:8] == (
        "7 attributes: map<string, string>",
        "8 schema_id: uint64 (optional)",
    )
    assert ours.messages["danube.ConsumerRequest"][4:] == (
        "5 subscription_type: ConsumerRequest.SubscriptionType",
        "6 key_filters: string (repeated)",
    )
    assert ours.messages["danube.MsgID"][3] == "5 topic_offset: uint64"
    assert ours.messages["danube_admin.Empty"] == ()
    assert ours.methods["/danube.ConsumerService/ReceiveMessages"] == (
        "ReceiveRequest",
        "stream StreamMessage",
    )
    assert ours.enums["danube.TopicLookupResponse.LookupType"] == ("0 Redirect", "1 Connect", "2 Failed")
