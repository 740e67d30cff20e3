"""What ``sava doctor`` does: look at a cluster from here, as a client would see it, and say what is wrong and
what to do about it.

================  =====================================================================================
``observation``   everything that is looked at, gathered at one time, and what moves at two
``brokers``       judgements about brokers: addresses, leader, terms, clocks, versions, disks, metrics,
clients
``contents``      judgements about what they keep and do: store, topics, subscriptions, ledgers, pipelines
``findings``      what is said: how bad, about what, why, and the way out
``visit``         these together: look, judge, report
================  =====================================================================================

Gathering judges nothing, and judging asks no broker: a judgement is a function from an observation to
findings."""
