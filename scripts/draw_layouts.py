"""Trains one config under several layouts, and through a kill and resume, and draws the loss curves over each other.

    python scripts/draw_layouts.py [--config llama_debug.toml] [--steps 100] [--out docs/images/one_curve.png]

Needs matplotlib (`pip install -e '.[docs]'`). The numbers behind the picture are written beside it as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

LAYOUTS: dict[str, list[str]] = {
    "one process": ["--parallelism.dp_shard", "1"],
    "DDP 2": ["--parallelism.dp_replicate", "2", "--parallelism.dp_shard", "1"],
    "DDP 3": ["--parallelism.dp_replicate", "3", "--parallelism.dp_shard", "1"],
    "FSDP 2": ["--parallelism.dp_shard", "2"],
    "FSDP 4, ZeRO-2": ["--parallelism.dp_shard", "4", "--parallelism.zero_stage", "2"],
    "HSDP 2 x 2, ZeRO-1": [
        *("--parallelism.dp_replicate", "2", "--parallelism.dp_shard", "2", "--parallelism.zero_stage", "1")
    ],
    "FSDP 2, accumulation 3": ["--parallelism.dp_shard", "2", "--training.local_batch_size", "2"],
}
KILLED = "FSDP 2, killed and resumed as DDP 2"


def command(args: argparse.Namespace, folder: str, name: str, extra: list[str]) -> list[str]:
    return [
        *(sys.executable, "-m", "titanlite.launch", "--config", args.config),
        *("--run.output_dir", folder, "--run.name", name.replace(" ", "_").replace(",", "")),
        *("--training.steps", str(args.steps), "--metrics.log_freq", "1", "--metrics.peak_tflops", "1"),
        *("--training.global_batch_size", "12", "--checkpoint.interval", "10", "--validation.enable", "false", *extra),
    ]


def losses(folder: str, name: str) -> dict[int, float]:
    rows = Path(folder, name.replace(" ", "_").replace(",", ""), "metrics.jsonl").read_text().splitlines()
    return {row["step"]: row["loss"] for row in map(json.loads, rows)}


def run(args: argparse.Namespace, folder: str, name: str, extra: list[str]) -> dict[int, float]:
    print(f"training under {name} …", flush=True)
    subprocess.run(command(args, folder, name, extra), check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    return losses(folder, name)


def killed_and_resumed(args: argparse.Namespace, folder: str) -> dict[int, float]:
    """Kills every process of the run without warning past half of its steps, then resumes under another layout."""
    print(f"training under {KILLED} …", flush=True)
    checkpoints = Path(folder, KILLED.replace(" ", "_").replace(",", ""), "checkpoints")
    process = subprocess.Popen(
        command(args, folder, KILLED, LAYOUTS["FSDP 2"]), cwd=ROOT, stdout=subprocess.DEVNULL, start_new_session=True
    )
    while not any(int(path.parent.name[5:]) >= args.steps // 2 for path in checkpoints.glob("step-*/manifest.json")):
        assert process.poll() is None, "the run ended before it could be killed"
        time.sleep(0.1)
    for pid in descendants(process.pid):
        os.kill(pid, signal.SIGKILL)
    process.wait()
    return run(args, folder, KILLED, LAYOUTS["DDP 2"])


def descendants(pid: int) -> list[int]:
    table = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], check=True, capture_output=True, text=True).stdout
    children: dict[int, list[int]] = {}
    for line in table.splitlines():
        child, parent = map(int, line.split())
        children.setdefault(parent, []).append(child)
    found = [pid]
    for parent in found:
        found.extend(children.get(parent, []))
    return found


def draw(curves: dict[str, dict[int, float]], config: str, out: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    reference = curves["one process"]
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(9, 6.5), sharex=True, height_ratios=[3, 2])
    for index, (name, curve) in enumerate(curves.items()):
        width = 1.2 + 1.1 * (len(curves) - 1 - index)
        top.plot(list(curve), list(curve.values()), linewidth=width, label=name, solid_capstyle="round")
        if name != "one process":
            gap = [abs(curve[step] - reference[step]) / reference[step] for step in curve]
            bottom.plot(list(curve), [max(g, 1e-9) for g in gap], linewidth=1.1, color=f"C{index}", label=name)
    top.set_ylabel("loss, nats per token")
    top.set_title(f"{config}: {len(curves)} runs, one curve")
    top.legend(fontsize=8)
    bottom.set_yscale("log")
    bottom.set_ylabel("relative difference\nfrom one process")
    bottom.set_xlabel("step")
    for axes in (top, bottom):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="llama_debug.toml")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--out", type=Path, default=ROOT / "docs/images/one_curve.png")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        curves = {name: run(args, folder, name, extra) for name, extra in LAYOUTS.items()}
        curves[KILLED] = killed_and_resumed(args, folder)
    draw(curves, args.config, args.out)
    reference = curves["one process"]
    worst = {
        name: {
            "first_10_steps": max(abs(curve[s] - reference[s]) / reference[s] for s in curve if s <= 10),
            "all_steps": max(abs(curve[s] - reference[s]) / reference[s] for s in curve),
        }
        for name, curve in curves.items()
    }
    summary = {"config": args.config, "steps": args.steps, "worst_relative_difference": worst, "losses": curves}
    args.out.with_suffix(".json").write_text(json.dumps(summary, indent=1) + "\n")
    print(json.dumps(worst, indent=1))


if __name__ == "__main__":
    main()
