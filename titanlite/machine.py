"""What the launcher finds on this machine and in its environment: GPUs, cores, nodes, ports. Torch-free."""

from __future__ import annotations

import errno
import os
import re
import resource
import socket
import subprocess
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from titanlite.config.problems import InputError, Problem

ENVIRONMENT = "environment"
DEFAULT_PORT = 29500  # only for several nodes, which have to agree on one
_RESOLVE_SECONDS = 10.0
_NVIDIA_SMI_SECONDS = 30.0


def cores() -> int:
    """CPU cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def raise_open_file_limit() -> None:
    """As many open files as the system allows: every rank holds a socket to every other, in several groups."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 1 << 16 if hard == resource.RLIM_INFINITY else hard
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(ValueError, OSError):  # macOS has a limit below what it says
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def gpu_count(environ: Mapping[str, str]) -> int:
    """CUDA GPUs that a worker would see, by nvidia-smi and CUDA_VISIBLE_DEVICES; 0 without nvidia-smi.

    Raises InputError when nvidia-smi is there and fails: a machine with a broken driver must not train on its CPU.
    """
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and not visible.strip():
        return 0
    try:
        listing = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=_NVIDIA_SMI_SECONDS, check=True
        ).stdout
    except FileNotFoundError:
        return 0
    except (OSError, subprocess.SubprocessError) as error:
        fix = "repair the NVIDIA driver, or train on the CPU knowingly with --run.device cpu"
        raise InputError(Problem("", "nvidia-smi -L", str(error), "a working driver", fix)) from None
    return visible_gpus(listing, visible)


def visible_gpus(listing: str, visible: str | None) -> int:
    """How many of the GPUs in `nvidia-smi -L`'s listing CUDA_VISIBLE_DEVICES leaves (None: not set)."""
    uuids = re.findall(r"^GPU \d+:.*\(UUID: ([^)]+)\)", listing, re.MULTILINE)
    if visible is None:
        return len(uuids)
    count = 0
    for entry in visible.split(","):  # CUDA stops at the first entry that names no device
        entry = entry.strip()
        if re.fullmatch(r"\d+", entry):
            known = int(entry) < len(uuids)
        elif entry.startswith("MIG-"):
            return count or 1  # CUDA shows one MIG slice to a process
        else:
            known = bool(entry) and any(uuid.startswith(entry) for uuid in uuids)
        if not known:
            break
        count += 1
    return count


@dataclass(frozen=True)
class Nodes:
    """The machines of a run and where they meet.

    count, rank: number of nodes, and which this is. rank is None when only the rendezvous will tell (RDZV_ID without
        NODE_RANK).
    address, port: where the nodes meet; port 0: any free one (a single node).
    run_id: keeps nodes of different runs apart.
    """

    count: int = 1
    rank: int | None = 0
    address: str = "127.0.0.1"
    port: int = 0
    run_id: str = "titanlite"

    @property
    def label(self) -> str:
        """A name for this node's own files in a folder that all nodes share."""
        return f"node-{self.rank if self.rank is not None else os.uname().nodename}"

    @property
    def is_main(self) -> bool:
        """Whether this node holds the meeting point, and writes what is written once."""
        return self.rank == 0 if self.rank is not None else is_local_address(self.address)


def read_nodes(environ: Mapping[str, str], problems: list[Problem]) -> Nodes:
    """NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT and RDZV_ID; what is wrong with them is added to problems."""
    before = len(problems)
    count = read_integer(environ, "NNODES", 1, 1 << 20, problems, "the number of machines")
    port = read_integer(environ, "MASTER_PORT", 1, 65535, problems, "a free port of the first node")
    run_id = environ.get("RDZV_ID") or "titanlite"
    if count is None and len(problems) > before:
        return Nodes()  # the others depend on it
    count = 1 if count is None else count
    rank = read_integer(environ, "NODE_RANK", 0, count - 1, problems, f"below NNODES = {count}")
    if count == 1:
        nodes = Nodes(port=port or 0, run_id=run_id)
    else:
        address = environ.get("MASTER_ADDR", "")
        if not address:
            fix = "export MASTER_ADDR=HOST, the same on every node: the name or address of the node with NODE_RANK=0"
            problems.append(Problem(ENVIRONMENT, "MASTER_ADDR", "nothing", f"a host, since NNODES = {count}", fix))
        elif fault := resolve_fault(address):
            fix = "give a name or address that every node can reach"
            problems.append(Problem(ENVIRONMENT, "MASTER_ADDR", f'"{address}" ({fault})', "a host that resolves", fix))
        if rank is None and not environ.get("NODE_RANK") and not environ.get("RDZV_ID"):
            allowed = f"this node's number, 0 to {count - 1}, or an RDZV_ID"
            fix = "export NODE_RANK=0 on the first node, 1 on the second, …; or the same RDZV_ID=NAME on all nodes"
            problems.append(Problem(ENVIRONMENT, "NODE_RANK", "nothing", allowed, fix))
        nodes = Nodes(count, rank, address, port or DEFAULT_PORT, run_id)
    if len(problems) == before and nodes.port and nodes.is_main and (fault := port_fault(nodes.port)):
        fix = "choose another MASTER_PORT" + ("" if count == 1 else ", the same on every node")
        if count == 1:
            fix += ", or unset it: one node finds a free port itself"
        problems.append(Problem(ENVIRONMENT, "MASTER_PORT", f"{nodes.port} ({fault})", "a free port", fix))
    return nodes


def read_integer(
    environ: Mapping[str, str], name: str, lowest: int, highest: int, problems: list[Problem], meaning: str
) -> int | None:
    """The variable as an integer; None when it is unset, empty or wrong (which is added to problems)."""
    text = environ.get(name, "")
    if not text:
        return None
    if re.fullmatch(r"[0-9]{1,9}", text) and lowest <= int(text) <= highest:
        return int(text)
    allowed = f"an integer from {lowest} to {highest} ({meaning})"
    problems.append(Problem(ENVIRONMENT, name, f'"{text}"', allowed, f"export {name}=N with such an N, or unset it"))
    return None


def resolve_fault(host: str) -> str:
    """Why the host's address cannot be had, or ""."""
    answer: list[str] = []

    def ask() -> None:  # in a thread, since name resolution knows no timeout
        try:
            socket.getaddrinfo(host, None)
            answer.append("")
        except (OSError, UnicodeError) as error:
            answer.append(f"does not resolve: {error.args[-1]}")

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(_RESOLVE_SECONDS)
    return answer[0] if answer else f"no answer within {_RESOLVE_SECONDS:g} s"


def is_local_address(host: str) -> bool:
    """Whether the host is this machine: only a local address can be bound."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return False
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.bind((address[0], 0))
                return True
        except OSError:
            continue
    return False


def port_fault(port: int) -> str:
    """Why the port cannot be listened on here, or ""."""
    for family, any_address in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the rendezvous store does
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind((any_address, port))
                probe.listen(1)
        except OSError as error:
            if family == socket.AF_INET6 and error.errno not in _PORT_ERRORS:
                continue  # a machine without IPv6
            return (error.strerror or str(error)).lower()
    return ""


_PORT_ERRORS = {errno.EADDRINUSE, errno.EACCES}
