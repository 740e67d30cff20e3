"""Programs for ``sava spark submit``, for any cluster; ``--once`` ends one when it has caught up."""
