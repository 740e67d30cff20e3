"""A torture of whole clusters: ``make torture`` and ``make soak`` (docs/testing.md)."""
