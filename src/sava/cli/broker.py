"""``sava broker``: run one broker in the foreground."""

from __future__ import annotations

import logging
import os
import sys
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Annotated, Any

import typer

from sava import config as settings
from sava import logs
from sava.local_cluster import LAYOUT

log = logging.getLogger(__name__)

DEFAULT_DATA_DIR = Path("sava-data")


def broker(
    config: Annotated[
        Path | None,
        typer.Option("--config", metavar="FILE", help="YAML configuration, the same on all brokers."),
    ] = None,
    standalone: Annotated[
        bool, typer.Option("--standalone", help="A cluster of one that initializes itself.")
    ] = False,
    data_dir: Annotated[
        Path | None,
        typer.Option(help="Everything of this broker is kept below it (standalone: ./sava-data)."),
    ] = None,
    storage_url: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Where segments live, one place for all brokers; else as configured, or below --data-dir.",
        ),
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address to bind (standalone: 127.0.0.1).")] = None,
    port: Annotated[int | None, typer.Option(help="Client port.")] = None,
    admin_port: Annotated[int | None, typer.Option(help="Admin port.")] = None,
    raft_port: Annotated[int | None, typer.Option(help="Raft port.")] = None,
    http_port: Annotated[int | None, typer.Option(help="Port of /metrics, /healthz and /readyz.")] = None,
) -> None:
    """Run one broker until SIGTERM or Ctrl-C."""
    if (config is None) == (not standalone):
        raise typer.BadParameter("give either --config FILE or --standalone")
    if standalone:
        data_dir = data_dir or DEFAULT_DATA_DIR
        host = host or "127.0.0.1"
        if (data_dir / LAYOUT).exists():
            raise typer.BadParameter(f"{data_dir} has a cluster of several brokers; start it with `sava up`")
    os.umask(0o077)  # messages and secrets are for the owner of the process alone
    ports = {"client": port, "admin": admin_port, "raft": raft_port, "prometheus": http_port}
    given = _given(data_dir, storage_url, host, ports)
    loaded = settings.load(config, overlay=given, underlay=_segments_below(data_dir))
    logs.set_up(form=loaded.logging.format, level=loaded.logging.level)
    loaded.keep_secret()
    for note in loaded.notes:
        log.warning("configuration: %s", note)
    if "pyarrow" not in sys.modules:  # a process of its own, and not a test
        sys.meta_path.insert(0, WithoutPandas())
    # Only here: every other command starts in half the time without the broker's parts.
    from sava import server

    sys.exit(server.run(loaded, standalone=standalone))


class WithoutPandas(MetaPathFinder):
    """pyarrow imports pandas for its first array, where that is installed: a quarter of a second and 35 MB
    that a broker has no use for."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        if fullname == "pandas":
            raise ModuleNotFoundError("a broker does without", name=fullname)


def _given(
    data_dir: Path | None, storage_url: str | None, host: str | None, ports: dict[str, int | None]
) -> dict[str, Any]:
    """The options that were given, as a tree of settings. With a data directory everything that is the
    broker's alone lives below it."""
    broker: dict[str, Any] = {"ports": {name: port for name, port in ports.items() if port is not None}}
    storage: dict[str, Any] = {}
    given: dict[str, Any] = {"broker": broker, "storage": storage}
    if host is not None:
        broker["host"] = host
    if data_dir is not None:
        root = data_dir.absolute()
        given["meta_store"] = {"data_dir": str(root)}
        storage["journal_dir"] = str(root / "journal")
    if storage_url is not None:
        storage["url"] = storage_url
    return given


def _segments_below(data_dir: Path | None) -> dict[str, Any]:
    """Segments are shared by brokers, so a data directory has them only if nothing says where they are: a
    broker that did not go by its file would keep history on a disk of its own, unnoticed until
    the disk is gone."""
    return {} if data_dir is None else {"storage": {"url": (data_dir.absolute() / "segments").as_uri()}}
