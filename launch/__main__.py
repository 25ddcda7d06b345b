"""The program `baton`, also `python -m launch`. Its imports take half a second, in which Ctrl-C ends it too without a
traceback."""

from __future__ import annotations

import sys


def main() -> None:
    try:
        from launch.cli import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
