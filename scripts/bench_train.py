"""Times the trainer's step against a bare hand-written loop of the same model, on one CPU process.

    python scripts/bench_train.py [--rounds 5] [--steps 20] [--threads 1] [--dim 256 --layers 6 …] [--json]

The bare loop is frozen on purpose: F.rms_norm, F.scaled_dot_product_attention, plain F.cross_entropy and fused
torch.optim.AdamW, with the clip and nothing else. Each variant runs in its own process; rounds are interleaved, so
that a machine that drifts slows both. Printed: the median step of each, the ratio round by round, and the share of the
trainer's step that is outside forward, backward, norm, optimizer and collectives.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20, help="timed steps of a round")
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--ffn-dim", type=int, default=688)
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worker", choices=("bare", "trainer"), help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def bare(args: argparse.Namespace) -> dict[str, float]:
    import torch
    import torch.nn as nn
    import torch.nn.functional as F

    torch.manual_seed(0)
    D, H, K, S, V = args.dim, args.heads, args.kv_heads, args.seq_len, args.vocab
    head_dim = D // H

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.norm2 = nn.Parameter(torch.ones(D)), nn.Parameter(torch.ones(D))
            self.q, self.o = nn.Linear(D, H * head_dim, bias=False), nn.Linear(H * head_dim, D, bias=False)
            self.k, self.v = nn.Linear(D, K * head_dim, bias=False), nn.Linear(D, K * head_dim, bias=False)
            self.gate, self.up = nn.Linear(D, args.ffn_dim, bias=False), nn.Linear(D, args.ffn_dim, bias=False)
            self.down = nn.Linear(args.ffn_dim, D, bias=False)

        def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
            B = x.shape[0]
            h = F.rms_norm(x, (D,), self.norm1, 1e-5)
            q = self.q(h).view(B, S, H, head_dim).transpose(1, 2)
            k = self.k(h).view(B, S, K, head_dim).transpose(1, 2)
            v = self.v(h).view(B, S, K, head_dim).transpose(1, 2)
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
            a = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            x = x + self.o(a.transpose(1, 2).reshape(B, S, H * head_dim))
            h = F.rms_norm(x, (D,), self.norm2, 1e-5)
            return x + self.down(F.silu(self.gate(h)) * self.up(h))

    def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        a, b = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-b, a), dim=-1) * sin

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(V, D)
            self.blocks = nn.ModuleList(Block() for _ in range(args.layers))
            self.norm = nn.Parameter(torch.ones(D))
            self.output = nn.Linear(D, V, bias=False)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.embedding(tokens)
            for block in self.blocks:
                x = block(x, cos, sin)
            return self.output(F.rms_norm(x, (D,), self.norm, 1e-5))

    angles = torch.outer(torch.arange(S), 10000.0 ** (-torch.arange(0, head_dim, 2) / head_dim)).repeat(1, 2)
    cos, sin = angles.cos(), angles.sin()
    model = Model()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.02)
    decay = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}], lr=1e-3, fused=True
    )
    text = torch.randint(V, (args.batch * (args.warmup + args.steps), S + 1))
    times = [time.perf_counter()]
    for step in range(args.warmup + args.steps):
        window = text[step * args.batch : (step + 1) * args.batch]
        logits = model(window[:, :-1])
        loss = F.cross_entropy(logits.view(-1, V), window[:, 1:].reshape(-1))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter())
    assert math.isfinite(loss.item())
    steps = [b - a for a, b in zip(times[args.warmup :], times[args.warmup + 1 :], strict=False)]
    return {"step_seconds": statistics.median(steps)}


def trainer(args: argparse.Namespace) -> dict[str, float]:
    import titanlite.parallel.gradients as gradients
    from titanlite.config.schema import Config
    from titanlite.parallel import runtime
    from titanlite.trainer import Trainer

    inside = [0.0]  # seconds of the current step in forward, backward, norm, optimizer and collectives

    @contextmanager
    def counted():
        begin = time.perf_counter()
        yield
        inside[0] += time.perf_counter() - begin

    def count(function):
        def wrapped(*positional, **keywords):
            with counted():
                return function(*positional, **keywords)

        return wrapped

    total = args.warmup + args.steps
    with tempfile.TemporaryDirectory() as folder:
        config = Config.model_validate(
            {
                "run": {"name": "bench", "output_dir": folder, "device": "cpu"},
                "model": {
                    "vocab_size": args.vocab,
                    "dim": args.dim,
                    "n_layers": args.layers,
                    "n_heads": args.heads,
                    "n_kv_heads": args.kv_heads,
                    "ffn_dim": args.ffn_dim,
                },
                "training": {
                    "seq_len": args.seq_len,
                    "global_batch_size": args.batch,
                    "local_batch_size": args.batch,
                    "steps": total,
                    "mixed_precision_param": "float32",
                },
                "lr_scheduler": {"total_steps": total},
                "optimizer": {"lr": 1e-3},
                "checkpoint": {"enable": False},
                "metrics": {"enable_tensorboard": False, "log_freq": 10, "peak_tflops": 1.0},
            }
        )
        ranks = runtime.start(config.comm, config.run, config.parallelism)
        times: list[float] = []
        outside: list[float] = []

        class Timed(Trainer):
            def _after_step(self) -> None:
                super()._after_step()
                now = time.perf_counter()
                if times:
                    outside.append((now - times[-1]) - inside[0])
                inside[0] = 0.0
                times.append(now)

        run = Timed(config, ranks)
        run.model.forward_backward = count(run.model.forward_backward)  # type: ignore[method-assign]
        run.optimizer.step = count(run.optimizer.step)  # type: ignore[method-assign]
        run.ranks.sum_over_data = count(run.ranks.sum_over_data)  # type: ignore[method-assign]
        gradients.finish = count(gradients.finish)
        run.train()
        runtime.stop()
    steps = [b - a for a, b in zip(times[args.warmup - 1 :], times[args.warmup :], strict=False)]
    shares = [out / step for out, step in zip(outside[args.warmup - 1 :], steps, strict=False)]
    return {"step_seconds": statistics.median(steps), "outside_share": statistics.median(shares)}


def main() -> None:
    args = parse()
    if args.worker:
        import torch

        torch.set_num_threads(args.threads)
        result = {"bare": bare, "trainer": trainer}[args.worker](args)
        print("RESULT " + json.dumps(result))
        return
    results: dict[str, list[dict[str, float]]] = {"bare": [], "trainer": []}
    environment = os.environ | {"OMP_NUM_THREADS": str(args.threads)}
    for _ in range(args.rounds):
        for name in results:
            command = [sys.executable, str(Path(__file__).resolve()), *sys.argv[1:], "--worker", name]
            done = subprocess.run(command, env=environment, capture_output=True, text=True)
            line = next((line for line in done.stdout.splitlines() if line.startswith("RESULT ")), None)
            if line is None:
                sys.exit(f"{name} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
            results[name].append(json.loads(line.removeprefix("RESULT ")))
    ratios = [
        mine["step_seconds"] / other["step_seconds"]
        for mine, other in zip(results["trainer"], results["bare"], strict=True)
    ]
    summary: dict[str, Any] = {
        "bare_step_seconds": statistics.median(r["step_seconds"] for r in results["bare"]),
        "trainer_step_seconds": statistics.median(r["step_seconds"] for r in results["trainer"]),
        "ratio_median": statistics.median(ratios),
        "ratios": ratios,
        "outside_share": statistics.median(r["outside_share"] for r in results["trainer"]),
    }
    if args.json:
        print(json.dumps(summary))
        return
    print(f"bare loop   {summary['bare_step_seconds'] * 1e3:8.1f} ms a step")
    print(f"trainer     {summary['trainer_step_seconds'] * 1e3:8.1f} ms a step")
    print(f"trainer/bare {summary['ratio_median']:.3f}  (rounds: {', '.join(f'{r:.3f}' for r in ratios)})")
    print(f"outside forward, backward, norm, optimizer, collectives: {100 * summary['outside_share']:.2f} % of a step")


if __name__ == "__main__":
    main()
