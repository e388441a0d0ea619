"""Memory that converting a model takes, both ways, in a process of its own: python -m ... FOLDER.

Prints bytes: of the model, and by how much the process has grown at most (without transformers, and without threads).
"""

import sys
from pathlib import Path

import torch

from titanlite.checkpoint import convert, dcp, storage
from titanlite.checkpoint.huggingface import HuggingFaceWeights
from titanlite.checkpoint.huggingface_model import model_section, parameter_shapes
from titanlite.checkpoint.initial import open_weights
from titanlite.config.schema import ModelConfig

MODEL = ModelConfig(vocab_size=500, dim=256, n_layers=24, n_heads=4, n_kv_heads=4, ffn_dim=1024)
STATUS = Path("/proc/self/status")
LIMIT = 4 << 20  # bytes of a shard, of a file of a checkpoint, of a block


def peak() -> int:
    """Of this program alone: getrusage's maximum begins with that of the process which started it."""
    (line,) = (line for line in STATUS.read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    dcp.STREAMED_FILE_BYTES = dcp.STREAMED_PIECE_BYTES = convert._BLOCK_BYTES = LIMIT
    there = folder / "there"
    there.mkdir(parents=True)
    shapes = {f"model.{fqn}": shape for fqn, shape in parameter_shapes(MODEL).items()}
    size = sum(shape.numel() * 4 for shape in shapes.values())
    storage.prepare_folder(folder, 0)
    files = dcp.write_streamed(
        storage.step_folder(folder, 0), shapes, lambda key, offsets, lengths: torch.ones(*lengths)
    )
    assert len(files) > 20
    parts = {"layout": {}, "versions": {}, "config": {"model": MODEL.model_dump(mode="json")}, "train_state": {}}
    storage.commit(storage.step_folder(folder, 0), storage.make_manifest(0, files, parts))
    started = peak()
    convert.write_huggingface(
        open_weights(folder, MODEL), there, MODEL, dtype="bfloat16", shard_bytes=LIMIT, max_position_embeddings=64,
        token_ids={}, others={}, report=lambda line: None,
    )  # fmt: skip
    weights = HuggingFaceWeights(there, ModelConfig.model_validate(model_section(there)))
    convert.write_checkpoint(weights, folder / "back", config={}, max_position_embeddings=64, report=lambda line: None)
    print(size, peak() - started)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
