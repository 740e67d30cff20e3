"""Where others reach a broker."""

from __future__ import annotations

import time

import sava
from sava.cluster.records import Registration
from sava.config import Config


def raft_address(config: Config) -> str:
    return f"{config.broker.reachable_host}:{config.broker.ports.raft}"


def client_address(config: Config) -> str:
    return f"{config.broker.reachable_host}:{config.broker.ports.client}"


def broker_url(config: Config) -> str:
    """As Danube's clients are told it."""
    return f"{'https' if config.auth.mode == 'tls' else 'http'}://{client_address(config)}"


def registration(
    config: Config, *, broker: int, incarnation: int, store_id: str, storage_id: str
) -> Registration:
    host, ports = config.broker.reachable_host, config.broker.ports
    return Registration(
        broker=broker,
        incarnation=incarnation,
        client=client_address(config),
        admin=f"{host}:{ports.admin}",
        raft=raft_address(config),
        http=f"{host}:{ports.prometheus}",
        store_id=store_id,
        storage_id=storage_id,
        rack=config.broker.rack,
        is_tls=config.auth.mode == "tls",
        version=sava.__version__,
        started_ms=time.time_ns() // 1_000_000,
    )
