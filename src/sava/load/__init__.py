"""Loads for a running cluster, through its public clients alone: what it bears, how long it takes, and
whether anything was lost, came twice or came out of order.

================  =====================================================================================
``payload``       what each message carries to be recognized by: run, producer, sequence, time
``tally``         what came, against what was sent
``key_order``     how far each key has come
``histogram``     durations in a bounded number of buckets
``pace``          when messages are due
``producing``     producers, as fast as they can or at a rate
``consuming``     consumers of one subscription
``subscription``  what the cluster says of it
``metadata``      calls to the metadata store
``runs``          these together: what ``sava bench`` does
``figures``       what a run has found
================  =====================================================================================
"""
