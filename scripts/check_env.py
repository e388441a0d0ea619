"""Can this Python run titanlite as it is? Exit 0 if so, else 1 with the reason on stdout.

Usage: check_env.py [EXTRA]. Standard library only; Python 3.11+. Every requirement of pyproject.toml (and of the named
extra) is compared with what is installed; torch is imported once, and that it could be is remembered in the user's
cache, so that later calls take a tenth of a second.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def release(version: str) -> tuple[int, ...]:
    """The leading numbers of a version, without trailing zeros: "2.13.0+cpu" -> (2, 13)."""
    match = re.match(r"(\d+(?:\.\d+)*)", version)
    numbers = [int(part) for part in match.group(1).split(".")] if match else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def requirements(extra: str) -> list[tuple[str, str]]:
    """(name, lowest version) of what pyproject.toml asks for; it only uses the form name>=version."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = project["dependencies"] + (project["optional-dependencies"][extra] if extra else [])
    return [(name.strip(), lowest.strip()) for name, _, lowest in (line.partition(">=") for line in lines)]


def missing(extra: str) -> list[str]:
    faults = []
    for name, lowest in requirements(extra):
        try:
            found = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            faults.append(f"no {name}")
            continue
        if release(found) < release(lowest):
            faults.append(f"{name} {found} is older than {lowest}")
    return faults


def torch_import_fault() -> str:
    """Why `import torch` fails here, or ""."""
    files = importlib.metadata.distribution("torch")
    key = f"{sys.executable} {files.version} {files.locate_file('torch')} {sys.version}"
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "titanlite"
    stamp = cache / f"imports-torch-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    if stamp.exists():
        return ""
    try:
        import torch  # noqa: F401
    except Exception as error:  # a broken build can raise nearly anything
        return f"import torch fails: {type(error).__name__}: {error}"
    try:
        cache.mkdir(parents=True, exist_ok=True)
        stamp.touch()
    except OSError:
        pass  # a home that cannot be written only costs the import again
    return ""


def main(argv: list[str]) -> int:
    faults = missing(argv[0] if argv else "")
    if not faults:
        fault = torch_import_fault()
        faults = [fault] if fault else []
    print(", ".join(faults))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
