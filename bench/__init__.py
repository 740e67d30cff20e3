"""Sava beside its peers: ``python -m bench``, explained in ``docs/benchmarks.md``."""
