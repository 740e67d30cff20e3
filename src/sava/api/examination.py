"""The service ``Doctor`` of the admin port: what this broker says of its own health. What follows from it,
and from what others say, is for ``sava doctor`` to find."""

# ruff: noqa: N802 (gRPC names the methods)

from __future__ import annotations

import time
from typing import Any, Final

import sava
from sava.api.disks import Disks
from sava.api.http import Readiness
from sava.config import Config
from sava.errors import SavaError
from sava.proto import doctor_pb2 as pb
from sava.proto import doctor_pb2_grpc as rpc
from sava.storage.broker_storage import BrokerStorage
from sava.storage.objectstore import ObjectStore, Probed, probe

PROBE_S: Final = 3.0
"""For each call to the object store. Brokers themselves are more patient; an operator who asks is not."""
ATTEMPTS: Final = 2


class DoctorService(rpc.DoctorServicer):
    def __init__(
        self, config: Config, disks: Disks, storage: BrokerStorage, ready: Readiness, *, broker: int
    ) -> None:
        self._config = config
        self._disks = disks
        self._storage = storage
        self._ready = ready
        self._broker = broker

    async def Examine(self, request: pb.ExamineRequest, context: Any) -> pb.Examination:
        disks = await self._disks.look()
        probed = await self._probe() if request.probe_store else None
        ready, reason = self._ready()
        return pb.Examination(
            broker_id=self._broker,
            version=sava.__version__,
            ready=ready,
            ready_reason=reason,
            disks=[
                pb.DiskRoom(
                    use=room.use, path=str(room.path), size=room.size, free=room.free, error=room.error
                )
                for room in disks
            ],
            store=probed,
            journal_held_bytes=self._storage.journal.held_bytes,
            leftover_topic_ids=self._storage.leftovers,
            clock=time.time_ns() // 1000,
        )

    async def _probe(self) -> pb.StoreProbe:
        url = self._config.storage.url
        try:
            found = await probe(ObjectStore.open(url, timeout_s=PROBE_S, attempts=ATTEMPTS))
        except SavaError as error:
            found = Probed(error=str(error))
        return pb.StoreProbe(
            url=url,
            store_id=found.store_id,
            reachable=found.is_reachable,
            puts_if_absent=found.puts_if_absent,
            milliseconds=found.milliseconds,
            error=found.error,
        )
