"""`python -m opusmon`."""

import sys

from opusmon.cli import main

if __name__ == "__main__":
    sys.exit(main())
