"""`python -m autotune`, and the `autotune` script."""

import os
import sys


def run() -> None:
    """Runs the command line; Ctrl-C while it is still being loaded ends it in one line, too."""
    try:
        from autotune.cli import main
    except KeyboardInterrupt:
        os.write(2, b"autotune: interrupted\n")
        sys.exit(130)
    main()


if __name__ == "__main__":
    run()
