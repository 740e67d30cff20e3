"""Prometheus metrics. ``broker`` has the registry, the page and the figures of Raft; ``cluster`` those of the
cluster, of replication and of pipelines, most of which only the leader has; ``storage`` those of journals and
disks; ``topics`` those of topics and subscriptions."""
