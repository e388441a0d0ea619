"""`titanlite COMMAND …`: finds the command and imports only that."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Sequence

from titanlite import __version__
from titanlite.command_line import print_problems, say
from titanlite.config.problems import EXIT_DONE, EXIT_ERROR, EXIT_WRONG_INPUT, InputError

# name -> (module with main(argv) -> exit code, what it does)
COMMANDS = {
    "train": ("titanlite.launch", "train what a TOML declares; the same as ./run_train.sh"),
    "prepare": ("titanlite.commands.prepare", "turn text into tokens or a tokenizer, and look at them"),
    "verify": ("titanlite.commands.verify", "compare a small copy of a run under layouts with one process"),
    "config": ("titanlite.commands.config", "print, check or list runs"),
    "checkpoint": ("titanlite.commands.checkpoint", "list, verify or show checkpoints"),
    "convert": ("titanlite.commands.convert", "checkpoints to Hugging Face's files and back"),
}


def usage() -> str:
    width = max(len(name) for name in COMMANDS)
    lines = [f"  {name:{width}}  {what}" for name, (_, what) in COMMANDS.items()]
    return "\n".join(["usage: titanlite COMMAND [...]", "", *lines, "", "titanlite COMMAND --help says more"])


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns its exit code."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed by the shell
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  # for as long as the process lives
        elif hasattr(stream, "reconfigure"):  # in a locale without Unicode, texts are still shown
            stream.reconfigure(errors="backslashreplace")
    arguments = list(sys.argv[1:] if argv is None else argv)
    name = arguments.pop(0) if arguments else ""
    if name in ("--help", "-h", "help"):
        print(usage())
        return EXIT_DONE
    if name == "--version":
        print(f"titanlite {__version__}")
        return EXIT_DONE
    if name not in COMMANDS:
        close = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        got = f'got "{name}"' if name else "no command given"
        say(f"{got}; allowed: {', '.join(COMMANDS)}{hint}")
        return EXIT_WRONG_INPUT
    try:
        return int(importlib.import_module(COMMANDS[name][0]).main(arguments))
    except InputError as error:
        print_problems(error.problems)
        return EXIT_WRONG_INPUT
    except KeyboardInterrupt:
        say("interrupted")
        return EXIT_ERROR
    except BrokenPipeError:  # `titanlite config NAME | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_ERROR


if __name__ == "__main__":
    sys.exit(main())
