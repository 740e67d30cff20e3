"""The replicated metadata store, from the outside in:

* what callers use: ``store`` (interface), ``raft_store``, ``memory``, ``cache``, ``commands``, ``errors``;
* a node with an event loop: ``node``, ``operations`` (cluster commands), ``barrier``, ``saver``,
  ``transport``;
* the same without one: ``replica/``, and what it holds: ``machine/``, ``watch``, ``lessor``;
* on disk: ``durable`` (the log), ``snapshots``, ``identity``, ``lost_quorum`` (the last resort);
* between nodes: ``peer``.
"""
