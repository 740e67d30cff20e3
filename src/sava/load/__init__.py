"""Loads for a running cluster, through its public clients alone: the rate that it sustains, how long calls
take, and whether messages were lost, duplicated or reordered.

==============  =====================================================================================
``tally``       the messages that came, against those that were sent, by the header of each
``figures``     histogram, meters and the outcome of a run
``traffic``     producers, as fast as they can or at a rate; consumers of one subscription
``runs``        these together and calls to the metadata store, as ``sava bench`` runs them
==============  =====================================================================================
"""
