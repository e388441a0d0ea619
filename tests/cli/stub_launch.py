"""The launcher with a stub in place of the training worker, and no data to prepare."""

import sys
from typing import Any

from titanlite import launch
from titanlite.command_line import print_problems
from titanlite.config.problems import InputError


def main() -> int:
    no_data: Any = lambda loaded: None  # noqa: E731
    launch.prepare_data = no_data
    try:
        return launch.launch(sys.argv[1:], worker="tests.cli.stub_worker")
    except InputError as error:
        print_problems(error.problems, "nothing was started")
        return 2


if __name__ == "__main__":
    sys.exit(main())
