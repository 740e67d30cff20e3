"""Loads for a running cluster, through its public clients alone: the rate that it sustains, how long calls
take, and whether messages were lost, duplicated or reordered.

==============  =====================================================================================
``payload``     the header by which a load recognizes its messages: run, producer, sequence, time
``tally``       the messages that came, against those that were sent; the order of keys
``figures``     histogram, meters and the outcome of a run
``producing``   producers, as fast as they can or at a rate
``consuming``   consumers of one subscription
``metadata``    calls to the metadata store
``runs``        these together, as ``sava bench`` runs them
==============  =====================================================================================
"""
