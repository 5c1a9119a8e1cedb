"""The command `opusmon`, and `python -m opusmon`."""

import sys


def main() -> int:
    """Run opusmon; ctrl+c ends it in silence while its modules are loaded too."""
    try:
        from opusmon.cli import main as run

        return run()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
