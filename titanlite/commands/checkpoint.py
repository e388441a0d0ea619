"""`titanlite checkpoint`: lists, verifies and shows the checkpoints of a run. Changes nothing. Torch only to show."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

import tomli_w

from titanlite.checkpoint import storage
from titanlite.checkpoint.storage import MANIFEST, METADATA, CheckpointError, DamagedError
from titanlite.command_line import Parser, print_problems, say
from titanlite.config.problems import EXIT_DONE, EXIT_ERROR, InputError, Problem
from titanlite.config.validate import COMMAND_LINE

USAGE = "titanlite checkpoint list|verify|show PATH [--json]"
DESCRIPTION = """list    every checkpoint of a run: step, date, size, layout, loss, state
verify  read every byte, and name each file that is not what was written
show    what is in one: train state, layout, config, tensors (of a run: in its newest one)

PATH is a run folder, its checkpoints/, or a step folder."""
EPILOG = "exit code: 0 all is well, 1 something is damaged, 2 there is no checkpoint there to look at"
VERIFY_THREADS = 4


def make_parser() -> Parser:
    parser = Parser("titanlite checkpoint", USAGE, DESCRIPTION, EPILOG, keys=False)
    parser.add_argument("action", metavar="list|verify|show", choices=("list", "verify", "show"))
    parser.add_argument("path", metavar="PATH")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def main(argv: Sequence[str]) -> int:
    """Runs the command. Raises InputError."""
    options = make_parser().parse_args(list(argv))
    path = Path(options.path)
    try:
        if options.action == "list":
            return print_list(path, options.json)
        if options.action == "verify":
            return verify(path, options.json)
        return show(path, options.json)
    except DamagedError as error:
        print_problems(error.problems)
        return EXIT_ERROR
    except CheckpointError as error:
        say(str(error))
        return EXIT_ERROR
    except PermissionError as error:
        raise not_permitted(error, "files that can be read") from None


def not_permitted(error: PermissionError, allowed: str) -> InputError:
    got = f"{error.filename}: {error.strerror}"
    return InputError(Problem(COMMAND_LINE, "PATH", got, allowed, "change their permissions"))


# --- which ---


def step_folders(path: Path) -> list[Path]:
    """The checkpoints that PATH means, by step, committed or not, also those that were set aside. Raises InputError."""
    if not path.is_dir():
        got = f"{path}, which is {'a file' if path.exists() else 'not there'}"
    elif (path / MANIFEST).exists() or storage.step_and_state(path):
        return [path]
    else:
        found = storage.all_folders(path) or storage.all_folders(path / "checkpoints")
        if found:
            return found
        got = f"{path}, in which there is no checkpoint"
    raise InputError(Problem(COMMAND_LINE, "PATH", got, "a run folder, its checkpoints/, or a step folder", USAGE))


def committed(path: Path) -> list[Path]:
    """Those of them that a run may resume from, by step, or the one step folder that PATH is. Raises InputError."""
    step_folders(path)
    folders = storage.committed_at(path)[::-1]
    if not folders:
        got = f"{path}, in which no checkpoint is committed"
        fix = f"one counts once it has its {MANIFEST}, which is written last"
        raise InputError(Problem(COMMAND_LINE, "PATH", got, "a committed checkpoint", fix))
    return folders


def files_in(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except FileNotFoundError:  # a run has removed it meanwhile
        return []


# --- list ---


@dataclass(frozen=True)
class Entry:
    """A line of the list.

    time:   of the commit, ISO 8601
    bytes:  of the tensor files and their metadata, on the disk
    layout: degrees, by name
    loss:   of its step, if metrics.jsonl has a row of it
    state:  "committed" (its files are there in their sizes; they were not read), "damaged", "uncommitted"
    aside:  why and as which it was set aside ("superseded-1"); "" if it was not
    """

    path: str
    step: int | None
    time: str | None
    bytes: int
    layout: Mapping[str, int]
    loss: float | None
    state: str
    aside: str
    problems: Sequence[Problem]


def print_list(path: Path, as_json: bool) -> int:
    entries = [make_entry(folder) for folder in step_folders(path)]
    code = EXIT_ERROR if any(entry.state == "damaged" and not entry.aside for entry in entries) else EXIT_DONE
    if as_json:
        print_json({"path": str(path), "checkpoints": [asdict(entry) for entry in entries]})
        return code
    rows = [("step", "date", "size", "layout", "loss", "state"), *(cells(entry) for entry in entries)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        aligned = [
            cell.rjust(w) if i in (0, 2) else cell.ljust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ]
        print("  ".join(aligned).rstrip())
    return code


def make_entry(folder: Path) -> Entry:
    step, aside = storage.step_and_state(folder) or (None, "")
    time, layout = None, {}
    problems: Sequence[Problem] = ()
    state = "committed" if (folder / MANIFEST).exists() else "uncommitted"
    if state == "committed":
        try:
            manifest = storage.read_manifest(folder)
            step, time, layout = manifest["step"], manifest["time"], manifest["layout"]
            storage.check_sizes(folder, manifest)
        except InputError as error:
            state, problems = "damaged", error.problems
    size = sum(storage.file_size(file) or 0 for file in files_in(folder) if file.name != MANIFEST)
    return Entry(str(folder), step, time, size, layout, loss_of(folder, step), state, aside, problems)


def loss_of(folder: Path, step: int | None) -> float | None:
    """The loss in the row of that step of the run that the folder lies in; None if there is none."""
    return None if step is None else losses(folder.resolve().parent.parent).get(step)


@cache
def losses(run_folder: Path) -> dict[int, float]:
    found = {}
    try:
        lines = (run_folder / "metrics.jsonl").read_text(errors="replace").splitlines()
    except OSError:
        return {}
    for line in lines:
        with suppress(ValueError, KeyError, TypeError):  # no row: a killed run leaves half of one
            row = json.loads(line)
            found[int(row["step"])] = float(row["loss"])
    return found


def cells(entry: Entry) -> tuple[str, ...]:
    state = entry.state + (f", set aside as {entry.aside}" if entry.aside else "")
    if entry.problems:
        state += f": {entry.problems[0].key}: {entry.problems[0].got}"
        state += f" (and {len(entry.problems) - 1} more)" if len(entry.problems) > 1 else ""
    return (
        "?" if entry.step is None else str(entry.step),
        date(entry.time),
        size_text(entry.bytes),
        layout_text(entry.layout),
        "-" if entry.loss is None else f"{entry.loss:.5f}",
        state,
    )


def date(time: str | None) -> str:
    try:
        return datetime.fromisoformat(time or "").strftime("%Y-%m-%d %H:%M:%S")
    except ValueError:
        return "-"


def size_text(size: int) -> str:
    return f"{size / 1e6:,.1f} MB" if size < 1e9 else f"{size / 1e9:,.2f} GB"


def layout_text(layout: Mapping[str, Any]) -> str:
    if not layout:
        return "-"
    degrees = [f"{name} {degree}" for name, degree in layout.items() if name != "world_size" and degree != 1]
    return ", ".join(degrees) or "one process"


# --- verify ---


@dataclass(frozen=True)
class Verdict:
    """What reading a checkpoint has shown.

    bytes:             that its manifest names
    without_checksum:  files of which only the size could be compared
    foreign:           what else lies in the folder; it is never read
    """

    path: str
    ok: bool
    bytes: int
    problems: Sequence[Problem]
    without_checksum: Sequence[str]
    foreign: Sequence[str]


def verify(path: Path, as_json: bool) -> int:
    verdicts = []
    for folder in committed(path):
        verdict = examine(folder)
        if not verdict.ok and not (folder / MANIFEST).exists():
            continue  # a run has removed it meanwhile
        verdicts.append(verdict)
        if not as_json:
            print(verdict_text(folder, verdict), flush=True)
    good = all(verdict.ok for verdict in verdicts)
    if as_json:
        print_json({"ok": good, "checkpoints": [asdict(verdict) for verdict in verdicts]})
    return EXIT_DONE if good else EXIT_ERROR


def examine(folder: Path) -> Verdict:
    """Reads every file. Raises PermissionError."""
    try:
        manifest = storage.read_manifest(folder)
    except InputError as error:
        return Verdict(str(folder), False, 0, error.problems, [], [])
    files = storage.records(manifest)
    with ThreadPoolExecutor(VERIFY_THREADS) as threads:
        found = list(threads.map(lambda name: storage.wrong_with(folder, name, files[name]), files))
    problems = [problem for problem in found if problem]
    without = [name for name, record in files.items() if record.checksum is None]
    foreign = sorted(file.name for file in files_in(folder) if file.name not in files and file.name != MANIFEST)
    return Verdict(
        str(folder), not problems, sum(record.bytes for record in files.values()), problems, without, foreign
    )


def verdict_text(folder: Path, verdict: Verdict) -> str:
    lines = [f"{folder}: {'good' if verdict.ok else 'DAMAGED'} ({size_text(verdict.bytes)})"]
    lines += [f"  {problem.key}: got {problem.got}; allowed: {problem.allowed}" for problem in verdict.problems]
    if verdict.without_checksum:
        count = len(verdict.without_checksum)
        lines.append(f"  {count} files were written without checksums: only their sizes were compared")
    if verdict.foreign:
        lines.append(f"  not of the checkpoint, and never read: {', '.join(verdict.foreign)}")
    return "\n".join(lines)


# --- show ---


def show(path: Path, as_json: bool) -> int:
    folder = committed(path)[-1]
    manifest = storage.read_manifest(folder)
    wrong = storage.wrong_with(folder, METADATA, storage.records(manifest)[METADATA])
    if wrong:
        raise DamagedError(replace(wrong, fix=f"titanlite checkpoint verify {folder} looks at all files"))
    from titanlite.checkpoint import dcp

    saved = dcp.saved_tensors(dcp.read_metadata(folder))
    tensors = {
        key: {"dtype": str(dtype).removeprefix("torch."), "shape": list(shape)} for key, (shape, dtype) in saved.items()
    }
    if as_json:
        print_json({"path": str(folder), **manifest, "tensors": tensors})
    else:
        print(contents(folder, manifest, tensors))
    return EXIT_DONE


def contents(folder: Path, manifest: Mapping[str, Any], tensors: Mapping[str, Mapping[str, Any]]) -> str:
    """All of it as text: TOML sections, with what is no TOML as comments."""
    size = sum(record.bytes for record in storage.records(manifest).values())
    writer = ", ".join(f"{name} {version}" for name, version in manifest["versions"].items())
    width = max((len(key) for key in tensors), default=0)
    tables = {"train_state": manifest["train_state"], "layout": manifest["layout"], "config": manifest["config"]}
    lines = [
        f"# {folder}",
        f"# step {manifest['step']}, written {date(manifest['time'])} by {writer}",
        f"# {size_text(size)} in {len(manifest['files'])} files, {len(tensors)} tensors:",
        *(f"#   {key:{width}}  {value['dtype']} {value['shape']}" for key, value in sorted(tensors.items())),
        "",
        tomli_w.dumps(tables).rstrip(),
    ]
    return "\n".join(lines)


def print_json(value: Mapping[str, Any]) -> None:
    print(json.dumps(value, indent=2))
