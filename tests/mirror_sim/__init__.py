"""The simulator of mirrored ledgers: brokers that own and mirror ledgers, recoverers that recover them,
producers and consumers, in one process on virtual time, over a faulty network, faulty disks and a metadata
store that loses its leader.

What is real: ``sava.ledger.protocol`` (owners, members, recoveries, records, messages, encoding) and the
records of ``sava.wal`` with their checksums. What is a twin: the network (``net``), the disks (those of
``tests.sim``, with ``copies`` on them), the metadata store (``store``), topics, segments and placement
(``ledgers``, ``controller``). A run is a pure function of its seed: ``python -m tests.mirror_sim --seed N
--trace``."""
