"""Runs Tidegate's command line: the entry of `python -m tidegate`."""

from tidegate.cli.main import main

if __name__ == "__main__":
    main()
