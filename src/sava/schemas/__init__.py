"""Schemas: what the payloads of a topic may be, how that may change, and who has agreed to it.

* ``registry`` keeps subjects and their versions in the metadata store. It is the only module here that knows
  the metadata store.
* Everything else is pure: ``definition`` reads a schema of any type, ``compatibility`` compares two,
  ``validation`` checks payloads, ``codecs`` turns values into payloads and back. A client uses these without
  a broker.
* ``avro``, ``json_schema`` and ``protobuf`` hold what is particular to one language of schemas.

Definitions and payloads come from outside: every reader here bounds size, depth and work, and refuses with a
typed error what exceeds them.
"""
