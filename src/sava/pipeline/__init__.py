"""The data pipeline: what runs on Spark, through PySpark."""
