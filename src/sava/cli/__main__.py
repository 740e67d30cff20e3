"""``python -m sava.cli``: the command without its installed script."""

from sava.cli.main import main

main()
