"""Beginnings and ends: from what the options say to offsets."""

from __future__ import annotations

from collections.abc import Mapping

from sava.pipeline.link import Link
from sava.pipeline.options import EARLIEST, LATEST, Instant, OptionError, Position
from sava.pipeline.positions import Part, to_positions


def begins_at_end(position: Position) -> bool:
    """Whether it is another offset with every message that comes."""
    return position == "latest" or (isinstance(position, Mapping) and LATEST in position.values())


def resolve(link: Link, position: Position, names: Mapping[Part, str], option: str) -> dict[Part, int]:
    """Of every partition. ``option`` is the one that offsets by partition were given by. Raises OptionError
    when it leaves out a partition, or names one that is not read or an offset that does not exist yet."""
    if isinstance(position, Instant):
        return {part: link.offset_at(name, position.publish_time) for part, name in names.items()}
    extents = link.extents(list(names.values()))
    if position == "earliest":
        return {part: extents[name].start for part, name in names.items()}
    if position == "latest":
        return {part: extents[name].end for part, name in names.items()}
    given = str(to_positions(position)).replace("'", '"')
    if missing := sorted(names.keys() - position.keys()):
        raise OptionError(option, given, f"{missing[0]} is not in it: all partitions that are read must be")
    if foreign := sorted(position.keys() - names.keys()):
        raise OptionError(option, given, f"{foreign[0]} is not one that is read")
    offsets: dict[Part, int] = {}
    for part, name in names.items():
        offset, extent = position[part], extents[name]
        if offset > extent.end:
            raise OptionError(option, given, f"{part} ends at {extent.end}")
        offsets[part] = {EARLIEST: extent.start, LATEST: extent.end}.get(offset, offset)
    return offsets
