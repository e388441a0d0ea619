"""What all commands say to the person at the terminal, and how they read their options. Torch-free."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

from titanlite.config.docs import keys_help
from titanlite.config.load import available_configs
from titanlite.config.problems import InputError, Problem
from titanlite.config.validate import COMMAND_LINE


def say(message: str) -> None:
    print(f"titanlite: {message}", file=sys.stderr, flush=True)


def print_problems(problems: Sequence[Problem], outcome: str = "") -> None:
    """outcome: what they have led to, if it is more than that the command ends."""
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    text = "\n".join(str(problem) for problem in problems).replace("\n", "\n  ")
    say(f"{count}{outcome and f', {outcome}'}\n  {text}")


def split_name(argv: Sequence[str]) -> tuple[str, list[str]]:
    """NAME, the first word ("" if that is an option or nothing), and the words after it."""
    rest = list(argv)
    name = rest.pop(0) if rest and not rest[0].startswith("-") else ""
    return name, rest


def no_name(usage: str) -> InputError:
    """What a command raises that needs a NAME."""
    names = ", ".join(path.stem for path in available_configs())
    return InputError(Problem(COMMAND_LINE, "NAME", "nothing", f"a TOML file, or one of {names}", usage))


class Parser(argparse.ArgumentParser):
    """One whose errors are problems like all others, and whose --help ends with every key of the config.

    keys: whether it does. sparse: an option that is not given is not in the namespace.
    """

    def __init__(
        self, prog: str, usage: str, description: str, epilog: str = "", *, keys: bool = True, sparse: bool = False
    ) -> None:
        self._keys = keys
        super().__init__(
            prog=prog,
            usage=usage,
            description=description,
            epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
            argument_default=argparse.SUPPRESS if sparse else None,
        )

    def error(self, message: str) -> NoReturn:
        raise InputError(Problem(COMMAND_LINE, "argument", message, str(self.usage), "--help says more"))

    def format_help(self) -> str:
        if not self._keys:
            return super().format_help()
        title = "every key of the config, as an option (titanlite config NAME prints a run with all of them):"
        return f"{super().format_help()}\n{title}\n\n{keys_help()}\n"
