"""Avro: schemas as a graph of nodes, the specification's schema resolution, and checked binary payloads."""
