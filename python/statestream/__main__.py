"""The script `statestream`, and `python -m statestream`."""

import sys

from statestream.extras import cli_extra

__all__ = ["main"]


def main() -> None:
    """Runs the command line. Where a package is missing that every command needs, it says in one line on stderr what
    to install, and exits with 2."""
    try:
        with cli_extra():
            import rich  # noqa: F401 - typer prints help without it, but no command runs

            from statestream.cli import main as run
    except ImportError as error:
        print(f"statestream: {error}", file=sys.stderr)
        sys.exit(2)
    run()


if __name__ == "__main__":
    main()
