"""Dispatch: which offsets of a subscription go to which consumer, and when.

    member.py       a consumer as dispatch sees it: credits, what is queued for it, key filters
    in_flight.py    what was sent and not answered yet
    failures.py     what was nacked or timed out: attempts, delays, poison
    pace.py         the dispatch rate
    keys.py         keys, key filters and the ring that gives each key a consumer
    core.py         what all types share
    slices.py       exclusive, failover, shared: ranges of offsets
    key_shared.py   keys in order, each with one consumer at a time

These know no event loop and no clock: time is an argument, and every decision is one call that returns.
Around them, ``reading`` follows the log, ``dead_letters`` hands messages on, and ``sava.topics.subscription``
is the loop that joins them."""
