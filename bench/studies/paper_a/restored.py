"""Quality of compressed weights, restored by this process alone: what paper_a calls in a new one.

    python -m bench.studies.paper_a.restored TASK FILE...

Prints one line of JSON a file: the quality on each slice.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

import torch

from bench.studies.paper_a.tasks import HELD_OUT, SEARCH, TASKS
from bench.studies.paper_a.training import N_THREADS
from ckptz.torch import load_file


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("task", choices=sorted(TASKS))
    parser.add_argument("files", nargs="+", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(N_THREADS)
    task = TASKS[args.task]()
    model = task.model()
    for path in args.files:
        model.load_state_dict(load_file(path))
        print(json.dumps({part: asdict(task.evaluate(model, part)) for part in (SEARCH, HELD_OUT)}))


if __name__ == "__main__":
    main()
