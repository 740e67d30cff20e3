"""Schemas: the payloads that a topic allows, how a schema may change, and where its versions are kept.

* ``registry`` keeps subjects and their versions in the metadata store; ``records`` has its records and keys.
  No other module here knows the metadata store.
* Everything else is pure: ``definition`` reads a schema of any type, checks payloads with it and compares it
  with older ones, ``codecs`` turns values into payloads and back. A client uses these without a broker.
* ``avro``, ``avro_payload``, ``json_schema``, ``json_containment`` and ``protobuf`` each implement one schema
  language. ``bounds`` bounds the depth, time and work that a definition or payload may cost.

Definitions and payloads come from clients: every reader here bounds size, depth and work, and refuses with a
typed error what exceeds them.
"""
