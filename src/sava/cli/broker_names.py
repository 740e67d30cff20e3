"""How commands name a broker. Ids are long and drawn at random, so any of its addresses does as well."""

from __future__ import annotations

from typing import Final, cast

from sava.api.admin_client import AdminClient
from sava.cli.output import print_unconfirmed
from sava.errors import CallerError
from sava.proto import brokers_pb2 as pb

MAX_ID: Final = (1 << 64) - 1


class BrokerNotFound(CallerError):
    """No broker of the cluster has this address."""


def is_id(text: str) -> bool:
    """Whether it can be one; whether it is anybody's is for the cluster to say."""
    return text.isascii() and text.isdecimal() and int(text) <= MAX_ID


async def all_brokers(client: AdminClient) -> list[pb.Broker]:
    """Says so on stderr if no majority has confirmed them."""
    response = await client.call(client.brokers.ListBrokers, pb.ListBrokersRequest())
    if response.unconfirmed:
        print_unconfirmed(response.unconfirmed)
    return cast(list[pb.Broker], list(response.brokers))


async def id_of(client: AdminClient, broker: str) -> int:
    """Of a broker that is named by its id, or by the address of one of its ports."""
    if is_id(broker):
        return int(broker)
    address = broker.rpartition("//")[2]
    for known in await all_brokers(client):
        if address in (known.client_addr, known.admin_addr, known.raft_addr, known.http_addr):
            return known.broker_id
    raise BrokerNotFound(f"no broker has the address {address}; `sava brokers list` shows who there is")
