"""The command line: the console script `ramify`, and `python -m ramify`.

An interrupt ends it quietly from here on, also while the commands are being imported.
"""

import sys


def main() -> int:
    """Returns the exit code."""
    try:
        from ramify.clients.cli import main as run

        return run()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
