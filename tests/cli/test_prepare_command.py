"""`titanlite prepare` as a user calls it: text to tokens, a tokenizer, a look at them, and everything that is wrong."""

from __future__ import annotations

import gzip
import json
import os
import random
import shlex
import shutil
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

from tests.cli.processes import TITANLITE, environment, run, write_config

PREPARE = (*TITANLITE, "prepare")
WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "lazy", "dogs", "in", "Prague", "—", "naïve", "café", "🙂"]


def assert_refused(done: subprocess.CompletedProcess[str], *words: str) -> None:
    """Exit 2 with one list of problems, which has the words, after whatever was said before, and no traceback."""
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr and done.stdout == ""
    assert done.stderr.count("problem\n") + done.stderr.count("problems\n") + done.stderr.count("was started\n") == 1
    for word in words:
        assert word in done.stderr, done.stderr


def sentences(seed: int, count: int) -> str:
    rng = random.Random(seed)
    return "\n".join(" ".join(rng.choices(WORDS, k=12)) for _ in range(count)) + "\n"


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with text in several formats, and a tokenizer of 400 pieces trained from it beside it."""
    folder = tmp_path_factory.mktemp("own") / "texts"
    folder.mkdir()
    for i in range(12):
        (folder / f"{i:02d}.txt").write_text(sentences(i, 40), encoding="utf-8")
    lines = "".join(json.dumps({"text": sentences(100 + i, 8), "body": "x"}) + "\n" for i in range(60))
    (folder / "more.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    done = run(PREPARE, str(folder), "--train-tokenizer", str(folder.parent / "my.model"), "--vocab-size", "350")
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def tokens(texts: Path) -> Path:
    folder = texts.parent / "tokens"
    done = run(PREPARE, "texts", "--tokenizer", "my.model", "--output", "tokens", cwd=texts.parent)
    assert done.returncode == 0, done.stderr
    assert (
        "--config llama_debug --run.name mine --model.vocab_size 350 --tokenizer.path tokens/tokenizer.model"
        in done.stderr
    )
    return folder


def test_the_folder_is_whole_and_a_second_time_nothing_is_done(texts: Path, tokens: Path) -> None:
    assert (tokens / "tokenizer.model").read_bytes() == (texts.parent / "my.model").read_bytes()
    before = {path: path.stat().st_mtime_ns for path in tokens.rglob("*")}
    done = run(PREPARE, "texts", "--tokenizer", "my.model", "--output", "tokens", cwd=texts.parent)
    assert done.returncode == 0 and "nothing to do" in done.stderr
    assert before == {path: path.stat().st_mtime_ns for path in tokens.rglob("*")}


def test_a_second_time_damage_is_found(texts: Path, tokens: Path, tmp_path: Path) -> None:
    shutil.copytree(tokens, tmp_path / "tokens")
    damage(tmp_path / "tokens", "flipped")
    done = run(PREPARE, "texts", "--tokenizer", "my.model", "--output", str(tmp_path / "tokens"), cwd=texts.parent)
    assert_refused(done, "00000.bin", "contents with sha256")
    (tmp_path / "tokens" / "train" / "meta.json").unlink()
    assert_refused(run(PREPARE, "--stats", "tokens", cwd=tmp_path), "finished, without train/meta.json", "damaged")


def test_how_an_input_is_spelled_does_not_matter(texts: Path, tokens: Path) -> None:
    for spelling in ("texts/", "./texts", str(texts)):
        done = run(PREPARE, spelling, "--tokenizer", "my.model", "--output", "tokens", cwd=texts.parent)
        assert done.returncode == 0 and "nothing to do" in done.stderr, done.stderr


def test_what_is_shown_where_there_is_no_unicode_or_no_stderr(texts: Path, tokens: Path, tmp_path: Path) -> None:
    assert run(PREPARE, "--show", "1", str(tokens), PYTHONIOENCODING="ascii").returncode == 0
    shell = f"{shlex.join(PREPARE)} texts/00.txt --tokenizer my.model --output {tmp_path / 'out'} 2>&-"
    assert subprocess.run(shell, shell=True, cwd=texts.parent, env=environment(), check=False).returncode == 0


def test_all_held_out_is_said(texts: Path, tmp_path: Path) -> None:
    almost_all = ["--validation-fraction", "0.99999999999"]
    done = run(
        PREPARE,
        "texts/00.txt",
        "--tokenizer",
        "my.model",
        "--output",
        str(tmp_path / "out"),
        *almost_all,
        cwd=texts.parent,
    )
    assert done.returncode == 0 and "none is left to train on" in done.stderr and "run_train" not in done.stderr


def test_shards_named_as_files_are_refused(tokens: Path, tmp_path: Path) -> None:
    """Read as nanoGPT's they would be of no checked tokenizer, and uint32 ones two ids each."""
    sources = f"--data.sources=[{{ path = '{tokens}/train/*.bin' }}]"
    done = run((*TITANLITE, "train"), "--config", str(write_config(tmp_path)), sources, cwd=tmp_path)
    assert_refused(done, "data.sources.0.path", f"name their folder, '{tokens}/train'")


def test_a_run_without_one_step_of_data_is_refused(tokens: Path, tmp_path: Path) -> None:
    words = [f"--data.sources=[{{ path = '{tokens}' }}]", f"--tokenizer.path={tokens / 'tokenizer.model'}"]
    words += ["--data.epochs=1", "--training.global_batch_size=65536", "--training.local_batch_size=1", "--nproc=1"]
    done = run((*TITANLITE, "train"), "--config", str(write_config(tmp_path)), *words, cwd=tmp_path)
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert "data.epochs: got 1, in which there is not one step of 65536 samples" in done.stderr + done.stdout


def test_stats(tokens: Path) -> None:
    done = run(PREPARE, "--stats", str(tokens), "--json")
    found = json.loads(done.stdout)
    assert found["verified"] is True
    assert found["train"]["documents"] + found["validation"]["documents"] == 72
    assert 0.1 < found["train"]["tokens_per_byte"] < 1 and found["train"]["unknown_share"] == 0
    assert found["train"]["longest_document"] > found["train"]["mean_document"]
    table = run(PREPARE, "--stats", str(tokens)).stdout
    assert "longest document" in table and f"{found['train']['tokens']:,}" in table


def test_show_decodes_a_window(tokens: Path) -> None:
    done = run(PREPARE, "--show", "1", str(tokens), "--seq-len", "64")
    assert done.returncode == 0, done.stderr
    assert "window 1 of" in done.stdout and "--- label only ---" in done.stdout
    assert any(word in done.stdout for word in WORDS)


def test_a_run_is_prepared_and_shown_as_it_will_train(texts: Path, tmp_path: Path) -> None:
    config = write_config(
        tmp_path,
        f'[tokenizer]\npath = "{texts.parent / "my.model"}"\n[[data.sources]]\npath = "{texts}"\nweight = 0.5\n'
        f'[[data.sources]]\npath = "{texts / "00.txt"}"\nweight = 0.5\n',
    )
    done = run(PREPARE, "--config", str(config), cwd=tmp_path)
    assert done.returncode == 0 and "is ready" in done.stderr, done.stderr
    again = run(PREPARE, "--show", "3", "--config", str(config), cwd=tmp_path)
    assert "tokenised" not in again.stderr  # found in the cache
    assert again.stdout.startswith("sample 3: source ")
    other = run(PREPARE, "--show", "3", "--config", str(config), "--run.seed", "7", cwd=tmp_path)
    assert other.stdout != again.stdout
    config.write_text(config.read_text().replace("[[data.sources]]", "[data]\nepochs = 1\n[[data.sources]]", 1))
    assert_refused(
        run(PREPARE, "--show", "999999", "--config", str(config), cwd=tmp_path), "sample 999999", "data.epochs"
    )


def test_standard_input(texts: Path, tmp_path: Path) -> None:
    model = str(texts.parent / "my.model")
    done = subprocess.run(
        [*PREPARE, "-", "--format", "txt", "--tokenizer", model, "--output", "out"],
        input=(texts / "00.txt").read_bytes(),
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    meta = json.loads((tmp_path / "out" / "train" / "meta.json").read_text())
    assert (meta["documents"], meta["bytes"]) == (1, (texts / "00.txt").stat().st_size)


def test_bad_records_stop_or_are_skipped_and_named(texts: Path, tmp_path: Path) -> None:
    good = json.dumps({"text": "good"})
    (tmp_path / "bad.jsonl").write_text(f'{good}\n{{"text": \n{good}\n{{"title": "x"}}\n{good}\n')
    command = ["bad.jsonl", "--tokenizer", str(texts.parent / "my.model"), "--output", "out"]
    command += ["--validation-fraction", "0"]
    assert_refused(run(PREPARE, *command, cwd=tmp_path), "bad.jsonl:2", "--on-error skip")
    done = run(PREPARE, *command, "--on-error", "skip", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "bad.jsonl:2" in done.stderr and "bad.jsonl:4" in done.stderr and "2 records skipped" in done.stderr
    assert json.loads((tmp_path / "out" / "train" / "meta.json").read_text())["documents"] == 3


WRONG = {
    "nothing": ([], ["titanlite prepare INPUT", "--stats PATH"]),
    "no output": (["texts", "--tokenizer", "my.model"], ["--output"]),
    "no tokenizer": (["texts", "--output", "out"], ["--tokenizer"]),
    "no inputs": (["--tokenizer", "my.model", "--output", "out"], ["INPUT"]),
    "no vocabulary size": (["texts", "--train-tokenizer", "x.model"], ["--vocab-size"]),
    "unknown option": (["texts", "--tokenizr", "my.model", "--output", "out"], ["--tokenizr", "--help"]),
    "option of another mode": (["--stats", "tokens", "--workers", "2"], ["--workers", "means nothing here"]),
    "no number": (["--show", "x", "tokens"], ["--show", '"x"']),
    "fraction": (["texts", "--tokenizer", "my.model", "--output", "o", "--validation-fraction", "1"], ["below 1"]),
    "missing input": (["nowhere", "--tokenizer", "my.model", "--output", "out"], ["nowhere", "does not exist"]),
    "missing tokenizer": (["texts", "--tokenizer", "no.model", "--output", "out"], ["no.model"]),
    "no such piece": (
        ["texts", "--tokenizer", "my.model", "--output", "out", "--eos-token", "x"],
        ["--eos-token", "special pieces"],
    ),
    "no format": (["-", "--tokenizer", "my.model", "--output", "out"], ["--format"]),
    "no text key": (["texts", "--text-key", "wrong", "--tokenizer", "my.model", "--output", "out"], ["'wrong'"]),
    "stats of text": (["--stats", "texts"], ["token shards"]),
    "window beyond the end": (["--show", "99999", "tokens"], ["99999"]),
    "show of text": (["--show", "0", "texts"], ["texts", "prepared tokens"]),
    "too large a vocabulary": (["texts", "--train-tokenizer", "x.model", "--vocab-size", "99999"], ["at most"]),
    "output inside an input": (["texts", "--tokenizer", "my.model", "--output", "texts/out"], ["inside the input"]),
    "more pieces than an integer holds": (
        ["texts", "--train-tokenizer", "x", "--vocab-size", "999999999999"],
        ["from 1"],
    ),
    "stats of nothing": (["--stats", "nowhere"], ["which does not exist"]),
    "another tokenizer than that of the shards": (
        ["--show", "0", "tokens", "--tokenizer", "embedded"],
        ["--tokenizer", "another tokenizer made"],
    ),
    "folder of something else": (["texts/00.txt", "--tokenizer", "my.model", "--output", "texts"], ["other files"]),
    "unknown config": (["--config", "llama_debu"], ["llama_debug"]),
    "wrong key of a config": (["--config", "llama_debug", "--data.epoch", "1"], ["data.epochs"]),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong(case: str, texts: Path, tokens: Path) -> None:
    arguments, words = WRONG[case]
    assert_refused(run(PREPARE, *arguments, cwd=texts.parent), *words)
    assert not (texts.parent / "out" / "train" / "meta.json").exists()
    shutil.rmtree(texts.parent / "out", ignore_errors=True)


def damage(folder: Path, how: str) -> None:
    shard = folder / "train" / "00000.bin"
    data = shard.read_bytes()
    if how == "flipped":
        shard.write_bytes(data[:100] + bytes([data[100] ^ 4]) + data[101:])
    elif how == "truncated":
        shard.write_bytes(data[:-2])
    elif how == "missing":
        shard.unlink()
    else:  # mixed dtypes: a file of wider ids under a meta file that says narrow ones
        shard.write_bytes(np.frombuffer(data, dtype="<u2").astype("<u4").tobytes())


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("flipped", ["00000.bin", "contents with sha256"]),
        ("truncated", ["00000.bin", "tokens of uint16"]),
        ("missing", ["00000.bin", "no such file"]),
        ("mixed dtypes", ["00000.bin", "tokens of uint16"]),
    ],
)
def test_training_on_damaged_shards_is_refused(how: str, words: list[str], tokens: Path, tmp_path: Path) -> None:
    shutil.copytree(tokens, tmp_path / "tokens")
    damage(tmp_path / "tokens", how)
    config = write_config(tmp_path, '[tokenizer]\npath = "tokens/tokenizer.model"\n[[data.sources]]\npath = "tokens"\n')
    assert_refused(run((*TITANLITE, "train"), "--config", str(config), cwd=tmp_path), *words, "nothing was started")
    assert_refused(run(PREPARE, "--stats", "tokens", cwd=tmp_path), *words)


def test_training_with_another_tokenizer_is_refused(tokens: Path, tmp_path: Path) -> None:
    sources = f"--data.sources=[{{ path = '{tokens}' }}]"
    done = run((*TITANLITE, "train"), "--config", str(write_config(tmp_path)), sources, cwd=tmp_path)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "data.sources.0.path" in done.stderr and "made with another tokenizer" in done.stderr


def test_marks_that_differ_from_the_shards_are_refused(tokens: Path, tmp_path: Path) -> None:
    words = [f"--data.sources=[{{ path = '{tokens}' }}]", f"--tokenizer.path={tokens / 'tokenizer.model'}"]
    done = run(
        (*TITANLITE, "train"), "--config", str(write_config(tmp_path)), *words, "--tokenizer.add_bos", cwd=tmp_path
    )
    assert_refused(done, "whose documents have this BOS: none", "--tokenizer.add_bos=false")


def test_interrupted_by_the_keyboard_it_goes_on(texts: Path, tmp_path: Path) -> None:
    """Ctrl-C: no traceback, and the same command makes what an unbroken one makes."""
    with (tmp_path / "big.jsonl").open("w") as file:
        for i in range(3000):
            file.write(json.dumps({"text": sentences(i, 60)}) + "\n")
    command = [*PREPARE, "big.jsonl", "--tokenizer", str(texts.parent / "my.model"), "--workers", "2", "--output"]
    process = subprocess.Popen(
        [*command, "out"], cwd=tmp_path, env=environment(), stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("out/*/*.partial")) and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.3)
    os.killpg(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 1 and "Traceback" not in said, said
    assert "the same command goes on" in said
    assert_refused(run(PREPARE, "--stats", "out", cwd=tmp_path), "unfinished", "give the same command")
    for name in ("out", "unbroken"):
        assert run(command, name, cwd=tmp_path).returncode == 0
    for part in ("train", "validation"):
        for path in (tmp_path / "unbroken" / part).iterdir():
            assert path.read_bytes() == (tmp_path / "out" / part / path.name).read_bytes()
