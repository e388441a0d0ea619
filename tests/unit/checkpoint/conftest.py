from typing import Any

import pytest

from titanlite.parallel.runtime import ObjectChannel


class OneRank:
    """A world of one, without torch.distributed."""

    rank = 0
    world_size = 1
    is_main = True

    def broadcast_object(self, obj: Any, src: int = 0) -> Any:
        return obj

    def object_channel(self) -> ObjectChannel:
        return ObjectChannel(None)


@pytest.fixture
def one_rank() -> Any:
    return OneRank()
