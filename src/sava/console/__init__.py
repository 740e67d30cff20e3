"""The HTTP port: health and metrics, an HTTP API for administration and messages, and the web console."""
