"""ledger: journals that survive their brokers; what ``ledger.protocol`` decides, with files, sockets, tasks.

===============  =====================================================================================
``ports``        what the two halves need of each other and of the cluster
``mirrored``     the journal of a broker through its lives, and the broker as a mirror of others
``owner_host``   one life: its streams, what is committed, who mirrors it
``streams``      the journal on its way to one mirror; ``recent``: its newest bytes
``lives``        which part of the own log belongs to which journal
``copies``       what this disk holds of others' journals; ``copy_files``, ``stretches``: as files
``own_disk``     this disk as one that is asked about journals, its own included
``wire``         the bytes between brokers; ``server`` and ``asking``: both ends
``records``      the journals' records in the metadata store
``choice``       which disks mirror
``coordinator``  one recovery, carried out
``closed``       the records of a journal that nobody writes any more, from whichever disks hold them
``tails``        which of them are a topic's history beyond its segments
``salvage``      these become segments, and the topic ends there
===============  =====================================================================================
"""
