"""Runs the command line: `python -m ckptz`."""

from ckptz_cli.main import main

if __name__ == "__main__":
    main()
