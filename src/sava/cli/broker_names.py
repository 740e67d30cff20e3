"""How commands name a broker. Ids are long and drawn at random, so any of its addresses does as well."""

from __future__ import annotations

from typing import cast

from sava.errors import CallerError
from sava.proto import brokers_pb2 as pb
from sava.services.admin_client import AdminClient


class BrokerNotFound(CallerError):
    """No broker of the cluster has this address."""


async def all_brokers(client: AdminClient) -> list[pb.Broker]:
    response = await client.call(client.brokers.ListBrokers, pb.ListBrokersRequest())
    return cast(list[pb.Broker], list(response.brokers))


async def id_of(client: AdminClient, broker: str) -> int:
    """Of a broker that is named by its id, or by the address of one of its ports. Whether an id is anybody's
    is for the cluster to say."""
    if broker.isdigit():
        return int(broker)
    address = broker.rpartition("//")[2]
    for known in await all_brokers(client):
        if address in (known.client_addr, known.admin_addr, known.raft_addr, known.http_addr):
            return known.broker_id
    raise BrokerNotFound(f"no broker has the address {address}; `sava brokers list` shows who there is")
