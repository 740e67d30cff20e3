"""Replication to other clusters: what is to be copied where, and what has become of it."""
