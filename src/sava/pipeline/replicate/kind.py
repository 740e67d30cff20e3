"""The kind ``replicate``: a link to another cluster, made by policies.

remote:   the name of the remote
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from sava.client.connection import Tls
from sava.client.errors import Unavailable
from sava.pipeline.link import Access
from sava.pipeline.replicate.control import AdminControl, FollowingControl
from sava.pipeline.replicate.job import Edges, LinkJob
from sava.pipeline.replicate.rounds import SparkEngine
from sava.pipeline.runner.kinds import Job, Kind, SettingsInvalid

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SOURCE_S: Final = 5.0
"""Without a broker, until a question of the driver fails. It is asked again."""


class Replicate(Kind):
    """``admin``: addresses of the admin port; ``service``: those of clients, as far as they are known. Both
    are asked for again and again: brokers come and go."""

    def __init__(
        self,
        spark: Callable[[], SparkSession],
        service: Callable[[], str],
        *,
        runner: str,
        admin: Callable[[], str],
        tls: Tls | None,
    ) -> None:
        self._spark = spark
        self._service = service
        self._runner = runner
        self._admin = admin
        self._tls = tls

    def start(self, name: str, settings: Mapping[str, Any]) -> Job:
        remote = settings.get("remote")
        if not isinstance(remote, str) or not remote:
            raise SettingsInvalid("setting remote: the name of a remote is needed")
        service = self._service()
        if not service:
            raise Unavailable("it is not known yet where brokers are")
        edges = Edges(
            control=FollowingControl(AdminControl(self._admin(), tls=self._tls), service, self._service),
            engine=SparkEngine(self._spark, name),
            source=source_access(service, self._tls),
        )
        return LinkJob(name, remote, self._runner, edges)


def source_access(service: str, tls: Tls | None) -> Access:
    files = (tls.ca, tls.cert, tls.key) if tls is not None else (None, None, None)
    ca, cert, key = (str(file) if file is not None else "" for file in files)
    return Access(service, "", ca, cert, key, SOURCE_S)
