"""Sava: publish/subscribe and streaming, with embedded metadata, durable logs and Parquet history."""

__version__ = "0.1.0"
