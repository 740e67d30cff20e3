"""The metadata store side by side with etcd: ``python -m bench``, explained in ``docs/benchmarks.md``."""
