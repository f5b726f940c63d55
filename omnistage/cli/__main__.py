"""``python -m omnistage.cli``: the same as the ``omnistage`` command."""

from __future__ import annotations

from omnistage.cli import main

main()
