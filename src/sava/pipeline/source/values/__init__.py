"""Payloads as values of Spark's types: one file for each language of schemas, and what they have in
common."""
