"""The runner: pipelines are records in the cluster; one Spark application runs them, or several share them.

control.py   what a runner asks of the cluster, through the admin port of any broker
runner.py    the pipelines of this process: its claims, its fair share, how each is started and stopped
kinds.py     what a pipeline does: the interface, and the kind ``custom``
queries.py   a Spark query as a pipeline job, with its lag
process.py   the process: session, signals, exit code
"""
