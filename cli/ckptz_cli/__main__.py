"""Runs the command line: `python -m ckptz_cli`."""

from ckptz_cli.main import main

if __name__ == "__main__":
    main()
