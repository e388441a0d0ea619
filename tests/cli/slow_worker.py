"""The training worker, whose saves take SLOW_SAVE seconds longer."""

import os
import sys
import time
from typing import Any

from titanlite import train


def main() -> int:
    from titanlite.checkpoint import dcp

    write = dcp.write_tensors

    def slow_write(*arguments: Any) -> Any:
        time.sleep(float(os.environ["SLOW_SAVE"]))
        return write(*arguments)

    slow: Any = slow_write
    dcp.write_tensors = slow
    return train.main(sys.argv[1:])


if __name__ == "__main__":
    train._exit(main())
