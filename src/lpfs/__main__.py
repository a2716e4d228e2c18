"""``python -m lpfs`` is the ``lpfs`` command."""

from lpfs.cli import main

main()
