"""Clusters of several brokers that replicate to each other: they have names, and topics that move."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from sava.errors import SavaError
from tests.support.brokers import Brokers


class NamedBrokers(Brokers):
    def __init__(self, name: str, directory: Path, *, size: int = 2, **sections: Any) -> None:
        """``sections`` of the configuration."""
        directory.mkdir()
        super().__init__(size, directory)
        written = yaml.safe_load(self._config.read_text())
        self._config.write_text(yaml.safe_dump({**written, **sections, "cluster_name": name}))
        self.name = name

    @property
    def service(self) -> str:
        return ",".join(broker.client_url.removeprefix("http://") for broker in self.brokers)

    async def move(self, topic: str) -> bool:
        """To another broker; False if it cannot be just now."""
        try:
            moves = await self.unload(topic)
        except SavaError as error:
            print(f"{self.name}: {topic} was not moved: {error}")
            return False
        return not any(move.error for move in moves)
