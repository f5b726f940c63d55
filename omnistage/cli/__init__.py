"""The command line: ``omnistage speak``, ``omnistage keys`` and ``omnistage check``.

Exit codes: 0 done, 1 a request failed, 2 bad usage or input, 3 a stage did not start, 130 and 143
for Ctrl-C and SIGTERM.
"""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command that ``sys.argv`` names."""
    try:
        from omnistage.cli.app import app
    except ModuleNotFoundError as error:
        if error.name not in {"typer", "rich"}:
            raise
        sys.exit("the omnistage command needs two more packages: pip install 'omnistage[cli]'")
    app()
