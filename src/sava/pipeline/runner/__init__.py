"""The runner: pipelines that are kept as records in the cluster, done by one Spark application or shared by
several.

    control.py    what a runner asks of the cluster, as a protocol; ``admin.py`` asks the admin port
    sharing.py    which pipelines a runner takes, and which it gives away
    hosted.py     one pipeline that this runner has: started, restarted, stopped
    runner.py     all of them, and the claim on them
    kinds.py      what a pipeline does, as a protocol; ``custom.py`` does it
    registry.py   which kinds there are, for those who make pipelines
    queries.py    a Spark query, as the runner wants to see it; ``lag.py``: how far it is behind
    process.py    the process: session, signals, exit code
"""
