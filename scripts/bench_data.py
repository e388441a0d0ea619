"""Measures the way from text to batches: rate and memory of `titanlite prepare`, resuming after SIGKILL, the loader.

    python scripts/bench_data.py [--megabytes 1000] [--kills 20] [--workers 2] [--folder DIR] [--json]

The text is generated: documents of 0.5 to 8 KB, made of lines of the embedded text in an order of their own each.
Printed: tokens/s of the whole command beside sentencepiece alone on the same text with as many threads, the memory of
all its processes over time (proportional set size, Linux only), whether a preparation killed at random instants and
resumed gives the same bytes, and the loader's tokens/s beside what llama_debug trains on this machine.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SAMPLE_BYTES = 64 << 20  # of text given to sentencepiece alone


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--folder", type=Path, help="where to work (default: a temporary folder)")
    parser.add_argument("--tokenizer", default="embedded")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-train", action="store_true", help="leave out the comparison with training")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def documents(seed: int) -> Iterator[str]:
    """Endless; no two are alike."""
    from titanlite.data.text import embedded_text

    lines = [
        line
        for document in embedded_text()[0].documents()
        for line in document.text.splitlines(keepends=True)
        if 20 < len(line) < 200
    ]
    rng = random.Random(seed)
    while True:
        yield "".join(rng.choices(lines, k=rng.randrange(10, 160)))


def generate(path: Path, size: int, seed: int) -> None:
    written = 0
    with path.open("w", encoding="utf-8") as file:
        for document in documents(seed):
            written += file.write(json.dumps({"text": document}) + "\n")
            if written >= size:
                return


# --- the command, watched ---


def command(corpus: Path, output: Path, args: argparse.Namespace) -> list[str]:
    words = [sys.executable, "-m", "titanlite.cli", "prepare", str(corpus), "--tokenizer", args.tokenizer]
    return [*words, "--output", str(output), "--workers", str(args.workers)]


def tree_memory(pid: int) -> int:
    """Proportional set size of a process and all its descendants, bytes."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
    family, grown = {pid}, True
    while grown:
        more = {child for child, parent in parents.items() if parent in family}
        grown = not more <= family
        family |= more
    total = 0
    for member in family:
        try:
            rollup = Path(f"/proc/{member}/smaps_rollup").read_text()
        except OSError:
            continue
        total += sum(int(line.split()[1]) << 10 for line in rollup.splitlines() if line.startswith("Pss:"))
    return total


def prepare(corpus: Path, output: Path, args: argparse.Namespace) -> dict[str, Any]:
    started = time.monotonic()
    process = subprocess.Popen(
        command(corpus, output, args), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    memory = []
    while process.poll() is None:
        memory.append(tree_memory(process.pid))
        time.sleep(0.25)
    seconds = time.monotonic() - started
    assert process.stderr is not None
    if process.returncode:
        raise SystemExit(process.stderr.read())
    tokens = sum(json.loads((output / part / "meta.json").read_text())["tokens"] for part in ("train", "validation"))
    quarter = max(len(memory) // 4, 1)
    peaks = [max(memory[i : i + quarter], default=0) / 2**20 for i in range(0, 4 * quarter, quarter)]
    return {"seconds": seconds, "tokens": tokens, "tokens_per_second": tokens / seconds, "memory_mib_by_quarter": peaks}


def sentencepiece_alone(corpus: Path, args: argparse.Namespace) -> float:
    """Tokens/s of the library on text that lies in memory, with as many threads as the command has processes."""
    import sentencepiece

    from titanlite.data.train_tokenizer import train_embedded_tokenizer

    path = args.tokenizer
    if path == "embedded":
        path = str(train_embedded_tokenizer(Path("outputs/cache"), lambda message: None))
    processor = sentencepiece.SentencePieceProcessor(model_file=path)
    texts, size = [], 0
    with corpus.open(encoding="utf-8") as file:
        for line in file:
            texts.append(json.loads(line)["text"])
            size += len(line)
            if size >= SAMPLE_BYTES:
                break
    started, tokens = time.monotonic(), 0
    for i in range(0, len(texts), 256):
        tokens += sum(map(len, processor.encode(texts[i : i + 256], num_threads=args.workers)))
    return tokens / (time.monotonic() - started)


# --- kills ---


def digest(folder: Path) -> str:
    """Of every shard and meta file."""
    found = hashlib.sha256()
    for path in sorted(folder.glob("*/*")):
        found.update(str(path.relative_to(folder)).encode())
        with path.open("rb") as file:
            found.update(hashlib.file_digest(file, "sha256").digest())
    return found.hexdigest()


def killed(corpus: Path, output: Path, seconds: float, args: argparse.Namespace) -> dict[str, Any]:
    """Kill the command at random instants until it has been killed so often, each time resuming; then let it finish.

    seconds: what an unbroken run takes. The instants are spread so that the run is expected to end with the last kill.
    """
    rng = random.Random(args.seed)
    happened = 0
    for _ in range(args.kills):
        process = subprocess.Popen(command(corpus, output, args), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(rng.uniform(0.05, 2.2) * seconds / args.kills + rng.uniform(0, 3))
        if process.poll() is None:
            happened += 1
        process.send_signal(signal.SIGKILL)
        process.wait()
        if (output / "train" / "meta.json").exists() and (output / "validation" / "meta.json").exists():
            shutil.rmtree(output)  # it was done: begin another one
    prepare(corpus, output, args)
    return {"kills": happened}


# --- the loader ---


def loader(output: Path, steps: int = 400) -> float:
    """Tokens/s of the loader alone, in this process, in llama_debug's batches."""
    from titanlite.config.load import load
    from titanlite.data.loader import TrainLoader
    from titanlite.data.order import SampleOrder
    from titanlite.data.shards import TokenShards

    training = load("llama_debug", []).config.training
    shards = [TokenShards(output / "train")]
    order = SampleOrder([shards[0].windows(training.seq_len)], [1.0], seed=0)
    batches = TrainLoader(
        shards,
        order,
        seq_len=training.seq_len,
        global_batch_size=training.global_batch_size,
        data_rank=0,
        data_size=1,
        local_batch_size=training.global_batch_size,
        start_sample=0,
        num_workers=0,
        pin_memory=False,
    )
    next(batches)
    started = time.monotonic()
    for _ in range(steps):
        next(batches)
    return steps * training.global_batch_size * training.seq_len / (time.monotonic() - started)


def training(folder: Path) -> float:
    """Tokens/s that llama_debug trains with, on all cores."""
    name = "bench_data"
    words = ["--run.output_dir", str(folder), "--run.name", name, "--training.steps", "24", "--metrics.log_freq", "4"]
    words += ["--checkpoint.enable=false", "--validation.enable=false", "--metrics.enable_tensorboard=false"]
    subprocess.run(["./run_train.sh", "--config", "llama_debug", *words], check=True, stdout=subprocess.DEVNULL)
    rows = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    return statistics.median(row["tokens_per_second"] for row in rows[2:])


def main() -> None:
    args = parse()
    folder = args.folder or Path(tempfile.mkdtemp(prefix="bench_data_"))
    folder.mkdir(parents=True, exist_ok=True)
    corpus = folder / f"corpus_{args.megabytes}.jsonl"
    if not corpus.exists():
        generate(corpus, args.megabytes * 10**6, args.seed)
    results: dict[str, Any] = {"megabytes": corpus.stat().st_size / 1e6, "workers": args.workers}
    results["sentencepiece_tokens_per_second"] = sentencepiece_alone(corpus, args)
    results |= prepare(corpus, folder / "unbroken", args)
    results["share_of_sentencepiece"] = results["tokens_per_second"] / results["sentencepiece_tokens_per_second"]
    if args.kills:
        results |= killed(corpus, folder / "killed", results["seconds"], args)
        results["identical"] = digest(folder / "unbroken") == digest(folder / "killed")
    results["loader_tokens_per_second"] = loader(folder / "unbroken")
    if not args.no_train:
        results["training_tokens_per_second"] = training(folder)
        results["loader_over_training"] = results["loader_tokens_per_second"] / results["training_tokens_per_second"]
    if args.folder is None:
        shutil.rmtree(folder)
    if args.json:
        print(json.dumps(results, indent=2))
        return
    for name, value in results.items():
        print(f"{name:34} {value:,.1f}" if isinstance(value, float) else f"{name:34} {value}")


if __name__ == "__main__":
    main()
