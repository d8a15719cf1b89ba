"""`python -m statestream`."""

from statestream.cli import main

if __name__ == "__main__":
    main()
