"""Guards of brokers that know each other: one cluster secret for all brokers of this process's tests."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Final

from sava.peers.guard import BrokerIdentity, Guard, Rules
from sava.security.cluster_secret import ClusterSecret

_DIRECTORY: Final = tempfile.TemporaryDirectory(prefix="sava-tests-")
SECRET: Final = ClusterSecret(Path(_DIRECTORY.name) / "cluster_secret")
SECRET.create()


def identity(broker: int) -> BrokerIdentity:
    return BrokerIdentity(broker, SECRET)


def guard_of(broker: int, rules: Rules | None = None) -> Guard:
    return Guard(identity(broker), rules)
