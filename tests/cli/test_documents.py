"""What the README and the shipped configs tell people to type works."""

from __future__ import annotations

import json
import math
import re
import shlex
from itertools import islice
from pathlib import Path

import pytest

from tests.cli.processes import LAUNCH, ROOT, TITANLITE, run
from titanlite.commands.prepare import make_parser as make_prepare_parser
from titanlite.commands.verify import make_parser as make_verify_parser
from titanlite.config.load import load
from titanlite.data.text import embedded_text
from titanlite.launch import make_parser
from titanlite.verify.layouts import read_layouts

README = (ROOT / "README.md").read_text()
CODE = re.findall(r"```(\w*)\n(.*?)```", README, re.DOTALL)
LINES = [line for kind, block in CODE if kind == "bash" for line in block.splitlines() if line.strip()]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
INLINE = [
    command
    for document in DOCUMENTS
    for command in re.findall(
        r"`((?:\./run_train\.sh|titanlite config|titanlite prepare|titanlite verify) [^`]*)`", document.read_text()
    )
]
COMMANDS = sorted({*LINES, *INLINE})
OWN_TEXT = [line for line in LINES if line.startswith("titanlite prepare") or "data.sources" in line]
LINKS = [
    (str(document.relative_to(ROOT)), target)
    for document in DOCUMENTS
    for found in re.findall(r"\]\(([^)\s#]+)|<(?:img|a)[^>]*?(?:src|href)=\"([^\"#]+)", document.read_text())
    for target in found
    if target and not re.match(r"[a-z]+:", target)
]


def test_there_are_commands() -> None:
    assert len([command for command in COMMANDS if "run_train.sh" in command]) >= 3


@pytest.mark.parametrize("command", COMMANDS)
def test_command_is_accepted(command: str) -> None:
    command = re.sub(r"\bNAME\b", "llama_debug", command)
    words = [word for word in shlex.split(command) if not re.fullmatch(r"[A-Z_]+=\S*", word)]
    if words[0] == "./run_train.sh":
        if "--help" in words:
            assert "--training.steps" in make_parser().format_help()
            return
        options, overrides = make_parser().parse_known_args(words[1:])
        if options.config != "mine.toml":  # the reader's own: test_own_text_section_is_a_config
            load(options.config, overrides)
    elif words[:2] == ["titanlite", "prepare"]:  # run by test_own_text_to_training_in_three_commands
        _, rest = make_prepare_parser(with_inputs="--config" not in words).parse_known_args(
            ["0" if word == "K" else word for word in words[2:]]
        )
        assert not rest
    elif words[:2] == ["titanlite", "verify"]:  # run by test_verify_command
        options, overrides = make_verify_parser().parse_known_args(words[3:])
        assert read_layouts(words[2], overrides, options.layout or ["auto"])
    elif words[0] == "titanlite":
        done = run(TITANLITE, *words[1:])
        assert done.returncode == 0, done.stderr
    else:
        assert (ROOT / words[0]).exists() or words[0] in ("tensorboard", "pip", "python"), command


def test_there_are_links() -> None:
    assert any("docs/config.md" in path for _, path in LINKS)


@pytest.mark.parametrize(("document", "target"), LINKS)
def test_link_or_image_exists(document: str, target: str) -> None:
    assert ((ROOT / document).parent / target).exists()


def test_own_text_section_is_a_config(tmp_path: Path) -> None:
    (block,) = [block for kind, block in CODE if kind == "toml" and "data.sources" in block]
    (tmp_path / "train_configs").symlink_to(ROOT / "train_configs")
    (tmp_path / "mine.toml").write_text(block)
    config = load(str(tmp_path / "mine.toml")).config
    assert [source.weight for source in config.data.sources] == [0.7, 0.3]
    assert config.tokenizer.path == "my.model"
    assert config.data.document_mask


def test_own_text_to_training_in_three_commands(tmp_path: Path) -> None:
    """The README's, word for word, in a folder with some texts; only the steps are fewer."""
    assert len(OWN_TEXT) == 3
    (tmp_path / "texts").mkdir()
    for i, document in enumerate(islice(embedded_text()[0].documents(), 200)):
        (tmp_path / "texts" / f"{i:03d}.txt").write_text(document.text, encoding="utf-8", newline="")
    for command in OWN_TEXT:
        words = shlex.split(command)
        if words[0] == "titanlite":
            done = run(TITANLITE, *words[1:], cwd=tmp_path)
        else:
            done = run(LAUNCH, *words[1:], "--training.steps", "3", "--nproc", "1", cwd=tmp_path, timeout=300)
        assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "outputs/mine/metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["step"] == 3 and rows[-1]["loss"] < rows[0]["loss"]
    assert abs(rows[0]["loss"] - math.log(8000)) < 0.1
    assert rows[-1]["validation_bits_per_byte"] > 0


def test_paths_in_the_tree_exist() -> None:
    (tree,) = [block for kind, block in CODE if not kind and "trainer.py" in block]
    stack: list[tuple[int, Path]] = [(-1, ROOT)]
    for line in tree.splitlines():
        name = line.split()[0]
        indent = len(line) - len(line.lstrip())
        while stack[-1][0] >= indent:
            stack.pop()
        path = stack[-1][1] / name
        assert path.exists(), path
        if name.endswith("/"):
            stack.append((indent, path))


def test_every_shipped_config_is_in_the_readme() -> None:
    for path in (ROOT / "train_configs").glob("*.toml"):
        assert f"`{path.name}`" in README, path.name
