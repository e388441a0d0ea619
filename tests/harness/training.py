"""Training on synthetic batches inside a test's worker, the same run whatever the layout: what parity tests compare.

`run_training(sections, world_size, ...)` starts the world; `train_run` is what each of its workers does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from tests.harness.distributed import run_distributed
from titanlite.config.layout import plan_batch, plan_pipeline
from titanlite.config.schema import Config
from titanlite.model.init import tensors_hash
from titanlite.optim.optimizer import AdamW
from titanlite.optim.schedule import lr_at
from titanlite.parallel import gradients, runtime
from titanlite.parallel.parallelize import Batch, ParallelModel, parallelize
from titanlite.parallel.whole import full_tensors
from titanlite.verify.record import Recorder

IGNORED = -100
Sections = Mapping[str, Mapping[str, Any]]

# No dimension divides by 3, 4 or 8, and the QK norms have too few elements for 8 ranks.
TINY: Sections = {
    "run": {"device": "cpu", "deterministic": True, "seed": 7},
    "model": {
        "vocab_size": 97,
        "dim": 22,
        "n_layers": 2,
        "n_heads": 2,
        "n_kv_heads": 1,
        "head_dim": 10,
        "ffn_dim": 27,
        "qk_norm": True,
        "vocab_pad_multiple": 10,
        "init_std": 0.2,  # large, so that attention and norms matter at this size
    },
    "training": {
        "seq_len": 16,
        "global_batch_size": 24,
        "local_batch_size": 24,
        "steps": 3,
        "mixed_precision_param": "float32",
        "loss_chunk_tokens": 50,
    },
    "optimizer": {"lr": 1e-2},
    "lr_scheduler": {"total_steps": 10, "warmup_steps": 2},
}


def merge(*many: Sections) -> dict[str, dict[str, Any]]:
    """Sections with later keys over earlier ones."""
    merged: dict[str, dict[str, Any]] = {}
    for sections in many:
        for name, keys in sections.items():
            merged.setdefault(name, {}).update(keys)
    return merged


class Listener(Recorder):
    """A trainer that also keeps what it says; weights and gradients are not gathered."""

    whole = False

    def __init__(self, config: Config, ranks: runtime.Ranks) -> None:
        self.said: list[str] = []
        super().__init__(config, ranks)

    def _say(self, message: str) -> None:
        self.said.append(message)
        super()._say(message)


def build(sections: Sections) -> tuple[Config, runtime.Ranks, ParallelModel, AdamW]:
    """This worker's part of the run that the sections, laid over TINY, declare; its optimizer is fresh."""
    config = Config.model_validate(merge(TINY, sections))
    ranks = runtime.start(config.comm, config.run, config.parallelism)
    model = parallelize(
        config.model,
        config.training,
        config.parallelism,
        config.activation_checkpoint,
        config.compile,
        seed=config.run.seed,
        ranks=ranks,
    )
    return config, ranks, model, AdamW(model.parameters, config.optimizer)


def run_training(
    sections: Sections, world_size: int, *, steps: int = 1, before: Callable[[], object] | None = None
) -> dict[str, Any]:
    """Rank 0's results of train_run in a new world; all ranks must agree on loss and norm.

    sections: laid over TINY, so {"parallelism": {"dp_shard": 2}} is a whole layout.
    before:   importable function that each worker calls first, e.g. to break something on purpose.
    """
    results = run_distributed(train_run, world_size, sections, steps, before)
    for result in results[1:]:
        assert result["losses"] == results[0]["losses"], "ranks disagree on the loss"
        assert result["norms"] == results[0]["norms"], "ranks disagree on the norm"
    return results[0]


def train_run(sections: Sections, steps: int, before: Callable[[], object] | None = None) -> dict[str, Any]:
    """Train `steps` steps in this worker. Returns:

    losses, norms:  one float per step: mean per valid target, and the norm of its gradient before clipping
    init_hash:      of the initial weights
    grads:          name -> whole gradient of step 1 (mean per target), float32
    parameters:     name -> whole parameter after the last step
    """
    if before is not None:
        before()
    config, ranks, model, optimizer = build(sections)
    parameters = model.parameters
    init_hash = tensors_hash(full_tensors(parameters).items())
    losses, norms, grads = [], [], {}
    for step in range(1, steps + 1):
        batches = rank_batches(config, ranks, step)
        loss, stats, tokens = train_step(model, optimizer, ranks, batches, config, step)
        losses.append(loss)
        norms.append(stats.norm.item())
        if step == 1:
            # The optimizer's kernel leaves the gradients divided by grad_scale: undo the clipping.
            scale = (stats.grad_scale / tokens).item()
            found = {name: parameter.grad for name, parameter in parameters.items() if parameter.grad is not None}
            grads = {name: gradient * scale for name, gradient in full_tensors(found).items()}
    return {
        "init_hash": init_hash,
        "losses": losses,
        "norms": norms,
        "grads": grads,
        "parameters": full_tensors(parameters),
        "n_updates": optimizer.n_updates,
    }


def train_step(
    model: ParallelModel,
    optimizer: AdamW,
    ranks: runtime.Ranks,
    batches: list[Batch],
    config: Config,
    step: int,
) -> tuple[float, gradients.GradientStats, torch.Tensor]:
    """One optimizer step. Returns the loss per valid target, the gradient statistics, and the number of targets."""
    model.zero_grad()
    batches = [model.shard(batch) for batch in batches]
    count = sum(int((batch["labels"] != IGNORED).sum()) for batch in batches)
    tokens = ranks.sum_over_data(torch.tensor(float(count), device=ranks.device))
    loss = ranks.sum_over_data(model.forward_backward(batches))
    stats = model.finish_gradients(tokens, config.training.max_norm)
    optimizer.step(lr_at(step, config.optimizer.lr, config.lr_scheduler), stats.grad_scale, stats.found_inf)
    model.finish_step(stats.found_inf)
    return (loss / tokens).item(), stats, tokens


def global_batch(config: Config, step: int) -> Batch:
    """The step's samples: random tokens; every row ignores another share of its targets, so rank counts differ."""
    training = config.training
    generator = np.random.default_rng([config.run.seed, step])
    shape = (training.global_batch_size, training.seq_len)
    tokens = generator.integers(0, config.model.vocab_size, shape)
    labels = generator.integers(0, config.model.vocab_size, shape)
    ignored = generator.random(shape) < np.linspace(0.0, 0.7, shape[0])[:, None]
    return {"tokens": torch.from_numpy(tokens), "labels": torch.from_numpy(np.where(ignored, IGNORED, labels))}


def rank_batches(config: Config, ranks: runtime.Ranks, step: int) -> list[Batch]:
    """This rank's microbatches of the step."""
    plan = plan_batch(config.training, ranks.layout, plan_pipeline(config.model, config.parallelism))
    start = ranks.data_rank * plan.rank_samples
    whole = global_batch(config, step)
    return [
        {name: rows[first : first + plan.local_batch_size] for name, rows in whole.items()}
        for first in range(start, start + plan.rank_samples, plan.local_batch_size)
    ]
