"""What is wrong with a run's input: a list of problems, each of which says how to fix it. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

EXIT_DONE = 0
EXIT_ERROR = 1
EXIT_WRONG_INPUT = 2
EXIT_PREEMPTED = 75


@dataclass(frozen=True)
class Problem:
    """One fault in what the user gave.

    where:   the file, or "command line", or "default" that the value came from ("" when none applies)
    key:     the dotted key, a path, or the name of what is at fault
    got:     the offending value as text
    allowed: what would have been accepted
    fix:     what to do about it
    """

    where: str
    key: str
    got: str
    allowed: str
    fix: str = ""

    def __str__(self) -> str:
        where = f"{self.where}: " if self.where else ""
        fix = f"\n    fix: {self.fix}" if self.fix else ""
        return f"{where}{self.key}: got {self.got}; allowed: {self.allowed}{fix}"


class InputError(ValueError):
    """The user's input is wrong: every problem that was found, reported at once. The process exits with 2."""

    def __init__(self, problems: Problem | Iterable[Problem]) -> None:
        self.problems = (problems,) if isinstance(problems, Problem) else tuple(problems)
        assert self.problems, "an InputError needs at least one problem"
        super().__init__("\n".join(str(problem) for problem in self.problems))
