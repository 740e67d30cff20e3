"""Ledgers: the journals of brokers, mirrored so that they survive their brokers.

**Journal and ledger.** Each broker appends to one log on its own disk, which never ends: its *journal*
(``storage.journal``). A *ledger* is one generation of a broker's journal as the cluster knows it: it begins
where the journal stood when the broker registered, it is mirrored on other disks, and it is closed when its
owner is gone. Positions continue from one ledger of a journal to the next.

**Numbers.** The incarnation of a ledger is the broker's registration (its lease) under which it was opened.
The metadata store gives leases out once, in order, so a broker that lost its disk does not use a number
twice; and a ledger whose broker is not registered under that very number is one that no broker continues: it
is to be recovered.

**Origin.** Records of the log verify only for a reader that knows whose log it is (the storage id seeds their
checksums). Every request to a disk therefore names the *origin*: the owner's disk, the first member.

=================  ===================================================================================
``protocol``       the decisions, pure: owner, member, recovery, and the record that they change
``registry``       the ledgers' records in the metadata store; the disks of live brokers, and which mirror
``host``           a ledger for each generation of this broker, and this broker as a mirror of others
``writer``         one generation: what is committed, and which disks mirror it
``streams``        a ledger on its way to one mirror, from memory or from the log's files
``store``          the mirror store: the ledgers of other brokers on this disk; ``mirror_log``: as files
``endpoint``       this disk as one that is asked about ledgers, the broker's own included: which part of
                   the own log belongs to which ledger
``recoverer``      one recovery, carried out; and the reader of closed ledgers
``tail_recovery``  what topics have in closed ledgers becomes segments
``failover``       which ledgers get a recovery or a tail recovery, and what an operator may abandon
``wire``           the bytes between brokers, and both ends of a connection
=================  ===================================================================================

**What can happen to bytes after a crash.** Every byte of a ledger meets one of these:

===========  ===========================================  ================================================
what         when                                         how, and where
===========  ===========================================  ================================================
recover      the owner is not registered under the        the disks promise the next epoch and say how far
             ledger's number any more                     they go; bytes that too few disks have are
                                                          written back (``protocol.recovery``)
close        enough members of the last fragment have     the record gets the end: nothing beyond it
             answered, each byte has an intact copy,      exists, and everything acknowledged lies before
             and enough disks hold all of it              it (``protocol.record.closed``)
truncate     the owner's disk has more than the closed    the *uncommitted tail* was never acknowledged; it
             ledger: it wrote on while it was cut off     stays in the log, and the index leaves it out
                                                          (``Generation.uncommitted_tail``)
re-append    the owner's disk has less than the closed    the *missing range* is read from the disks that
             ledger: mirrors synced what it had not       have it, and appended to the next ledger before
                                                          that is opened to topics (``host``)
segment      the disk is gone, and all of its ledgers     the tail of each topic becomes segments, and the
             are closed                                   topic ends there (``tail_recovery``)
abandon      no disk that answers has the bytes           an operator accepts exactly the loss that was
                                                          reported, or no topic needs them (``failover``)
===========  ===========================================  ================================================
"""
