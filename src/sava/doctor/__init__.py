"""What ``sava doctor`` does: look at a cluster from here, as a client would see it, and say what is wrong and
what to do about it.

================  =====================================================================================
``observation``   everything that is looked at, gathered at one time, and what moves at two; findings
``brokers``       judgements about brokers: addresses, leader, terms, clocks, versions, disks, metrics,
                  clients; the visit: look, judge, report
``contents``      judgements about what they keep and do: store, topics, subscriptions, ledgers, pipelines
================  =====================================================================================

Gathering judges nothing, and judging asks no broker: a judgement is a function from an observation to
findings."""
