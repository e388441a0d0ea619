"""What the README and the shipped configs tell people to type works."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.cli.processes import ROOT, TITANLITE, run
from titanlite.config.load import load
from titanlite.launch import make_parser

README = (ROOT / "README.md").read_text()
CODE = re.findall(r"```(\w*)\n(.*?)```", README, re.DOTALL)
LINES = [line for kind, block in CODE if kind == "bash" for line in block.splitlines() if line.strip()]
INLINE = re.findall(r"`((?:\./run_train\.sh|titanlite config)[^`]*)`", README)
COMMANDS = sorted({*LINES, *INLINE})
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
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
    words = [word for word in shlex.split(command) if not re.fullmatch(r"[A-Z_]+=\S*", word)]
    if words[0] == "./run_train.sh":
        if "--help" in words:
            assert "--training.steps" in make_parser().format_help()
            return
        options, overrides = make_parser().parse_known_args(words[1:])
        if options.config != "mine.toml":  # the reader's own: test_own_text_section_is_a_config
            load(options.config, overrides)
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
    assert config.tokenizer.path == "my_tokenizer.model"


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
