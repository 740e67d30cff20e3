"""The admin port. One chapter for each noun that an operator asks about: ``topics`` (with namespaces and
subscriptions; ``descriptions`` finds and describes them, wherever their partitions are), ``brokers``,
``cluster`` (with the metadata store and this broker's own health), ``journals``,
``replication`` (with pipelines)."""
