#!/usr/bin/env bash
# Finds or makes the Python environment, and prints the path of its python as the only line on stdout.
# Usage: scripts/setup.sh [--test | --find]     --test: with the tools that scripts/test.sh needs.
#                                              --find: only finds one; without any, exit 1 with the reason.
#
# TITANLITE_VENV=FOLDER: use that virtual environment (made if need be), whatever is active.
# Otherwise an active environment that has all that pyproject.toml asks for is used as it is, and else .venv is made
# from constraints.txt. Several nodes may call this at once on a shared disk. Works with bash 3.2 (macOS).
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
cpu_index=https://download.pytorch.org/whl/cpu

extra="" find_only=""
case "${1-}" in
    "") ;;
    --test) extra="test" ;;
    --find) find_only=yes ;;
    *)
        echo "scripts/setup.sh: got $1; allowed: --test, --find or nothing" >&2
        exit 2
        ;;
esac

say() { echo "titanlite set-up: $*" >&2; }

die() {
    say "$@"
    exit 1
}

# ---- an active environment ---------------------------------------------------------------------------------------

# Runs the candidate rather than looking at its name: a pyenv shim of a version that is not selected exists but fails.
is_python_311() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

reason="TITANLITE_VENV is set"
use_active_environment() {
    local named="" python
    reason="no Python 3.11+ is active"
    if [ -n "${VIRTUAL_ENV-}" ]; then
        named=$VIRTUAL_ENV
        [ "$named" != "$root/.venv" ] || return 1 # our own: its stamp says whether it is whole
    elif [ -n "${CONDA_PREFIX-}" ]; then
        named=$CONDA_PREFIX
    fi
    if [ -n "$named" ]; then
        python=$named/bin/python
    else
        python=$(command -v python3 || true)
    fi
    if [ -z "$python" ] || ! is_python_311 "$python"; then
        [ -z "$named" ] || say "the active environment $named has no working Python 3.11+; using .venv"
        return 1
    fi
    if ! reason=$("$python" "$root/scripts/check_env.py" $extra 2>&1); then
        [ -z "$named" ] || say "the active environment $named is not used ($reason); using .venv"
        return 1
    fi
    echo "$python"
}

if [ -z "${TITANLITE_VENV-}" ] && use_active_environment; then
    exit 0
fi

# ---- our own environment -----------------------------------------------------------------------------------------

if [ -n "${TITANLITE_VENV-}" ]; then
    case "$TITANLITE_VENV" in
        /*) venv=$TITANLITE_VENV ;;
        *) venv=$PWD/$TITANLITE_VENV ;;
    esac
    lock=$venv.setup-lock
else
    venv=$root/.venv
    lock=$root/.setup-lock
fi

has_gpu() { command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q '^GPU '; }

# The stamp is written last, so an environment without one is half made. Its lines: the pins it was made from, where
# (an environment cannot be moved), and the build of torch in it: "cpu", or "default" for what a machine with a GPU gets.
pins=$(cat "$root/pyproject.toml" "$root/constraints.txt" | cksum)
place="$venv $root"
stamp=$venv/.titanlite-setup${extra:+-$extra}

read_stamp() { # $1: the file; sets made_pins made_place made_build
    made_pins="" made_place="" made_build=""
    [ -f "$1" ] && { IFS= read -r made_pins && IFS= read -r made_place && IFS= read -r made_build; } <"$1"
}

is_whole() {
    read_stamp "$stamp" && [ "$made_pins" = "$pins" ] && [ "$made_place" = "$place" ] || return 1
    # A CPU build on a machine with a GPU would be no use. A CUDA build works everywhere, so nodes with and without
    # GPUs may share one.
    [ "$made_build" != cpu ] || ! has_gpu || return 1
    "$venv/bin/python" -c '' >/dev/null 2>&1 # its base interpreter may have been removed
}

if is_whole; then
    echo "$venv/bin/python"
    exit 0
fi
[ -z "$find_only" ] || die "no usable environment. Active: $reason; own: $venv is not set up for this checkout and" \
    "machine. Make it with ./run_train.sh --setup-only, or activate one that has the packages of pyproject.toml."

# ---- lock: one set-up at a time, on this machine and on others that share the disk --------------------------------
# mkdir is atomic everywhere. The owner writes a beat every 2 s; an owner that is gone from this host, or whose beat
# has stood still for TITANLITE_LOCK_STALE seconds by our own clock, died.

stale_after=${TITANLITE_LOCK_STALE:-60}
me="$(uname -n) $$"
beater=""

unlock() {
    [ -z "$beater" ] || kill "$beater" 2>/dev/null || true
    if [ "$(cat "$lock/owner" 2>/dev/null)" = "$me" ]; then rm -rf "$lock"; fi
}

is_running() { # $1: a process of this host; one that has ended and was not reaped yet does not count
    kill -0 "$1" 2>/dev/null || return 1
    case "$(ps -o stat= -p "$1" 2>/dev/null)" in
        Z*) return 1 ;;
    esac
}

owner_is_gone() { # $1: "HOST PID"
    local host=${1% *} pid=${1##* }
    [ -n "$1" ] && [ "$host" = "$(uname -n)" ] && ! is_running "$pid"
}

break_lock() { # $1: the owner that is dead. Renaming is atomic, so only one waiter gets to do it.
    local grave=$lock.dead.$$
    mv "$lock" "$grave" 2>/dev/null || return 0
    if [ "$(cat "$grave/owner" 2>/dev/null)" = "$1" ]; then
        rm -rf "$grave"
    else
        # Another waiter was faster, and this is its new lock: give it back.
        mv "$grave" "$lock" 2>/dev/null || rm -rf "$grave"
    fi
}

take_lock() {
    local owner beat last="" quiet=0 told=""
    mkdir -p "$(dirname "$lock")" || die "cannot write $(dirname "$lock")"
    until mkdir "$lock" 2>/dev/null; do
        [ -d "$lock" ] || [ -w "$(dirname "$lock")" ] || die "cannot write $(dirname "$lock")"
        owner=$(cat "$lock/owner" 2>/dev/null || true)
        beat="$owner $(cat "$lock/beat" 2>/dev/null || true)"
        if [ "$beat" = "$last" ]; then quiet=$((quiet + 1)); else quiet=0; fi
        last=$beat
        if owner_is_gone "$owner" || [ "$quiet" -ge "$stale_after" ]; then
            say "the set-up of ${owner:-someone} died; taking over"
            break_lock "$owner"
            quiet=0
            continue
        fi
        [ -n "$told" ] || say "another set-up is at work (${owner:-just started}); waiting for it"
        told=yes
        sleep 1
    done
    trap unlock EXIT
    trap 'exit 130' INT
    trap 'exit 143' TERM HUP
    echo "$me" >"$lock/owner"
    (
        trap - EXIT INT TERM HUP
        n=0
        while is_running $$ && [ -d "$lock" ]; do
            n=$((n + 1))
            echo "$n" >"$lock/beat" || exit 0
            sleep 2
        done
    ) >/dev/null 2>&1 </dev/null &
    beater=$!
}

take_lock
if is_whole; then # made by the one we waited for
    echo "$venv/bin/python"
    exit 0
fi

# ---- make it -----------------------------------------------------------------------------------------------------

find_python() {
    local name path found=""
    for name in python3.13 python3.12 python3.11 python3 python; do
        path=$(command -v "$name" 2>/dev/null) || continue
        is_python_311 "$path" || continue
        found=$path
        if "$path" -c 'import ensurepip, venv' >/dev/null 2>&1; then
            echo "$path"
            return
        fi
    done
    if [ -n "$found" ]; then
        die "$found cannot make virtual environments: its venv module is missing." \
            "Install it (Debian, Ubuntu: apt install python3-venv) and run this again."
    fi
    die "no Python 3.11 or newer was found on PATH. Install one (python.org, your package manager or pyenv)" \
        "and run this again."
}

run_pip() {
    local quiet="-q"
    [ ! -t 2 ] || quiet=""
    "$venv/bin/python" -m pip install --disable-pip-version-check $quiet -c "$root/constraints.txt" "$@" >&2
}

# True if the CPU index answers within 3 s; name resolution is inside the limit, which no socket timeout covers.
cpu_index_answers() {
    "$venv/bin/python" - "$cpu_index/torch/" >/dev/null 2>&1 <<'PY'
import os, sys, threading, urllib.request

def ask():
    try:
        os._exit(0 if urllib.request.urlopen(sys.argv[1], timeout=3).status == 200 else 1)
    except Exception:
        os._exit(1)

threading.Thread(target=ask, daemon=True).start()
threading.Event().wait(3)
os._exit(1)
PY
}

installed_torch() {
    "$venv/bin/python" -c 'import importlib.metadata; print(importlib.metadata.version("torch"))' 2>/dev/null || true
}

started=$(date +%s)
read_stamp "$venv/.titanlite-setup" || true
rm -f "$venv"/.titanlite-setup*

if [ "$made_place" != "$place" ] || ! "$venv/bin/python" -c 'import pip' >/dev/null 2>&1; then
    # New, half made or moved: start from nothing.
    if [ -e "$venv" ] && [ -n "$(ls -A "$venv" 2>/dev/null)" ]; then
        [ -f "$venv/pyvenv.cfg" ] || die "$venv exists and is not a virtual environment; move it away"
        say "$venv is incomplete or was moved; making it anew"
        rm -rf "$venv"
    fi
    python=$(find_python)
    say "making $venv with $("$python" -V 2>&1) (once; some minutes)"
    "$python" -m venv "$venv" >&2 || die "$python -m venv failed; see above"
fi

if has_gpu; then
    case "$(installed_torch)" in
        *+cpu) "$venv/bin/python" -m pip uninstall -q -y torch >&2 ;;
    esac
elif [ -z "$(installed_torch)" ] && [ "$(uname -s)" != Darwin ] && cpu_index_answers; then # macOS has only one build
    torch=$(grep '^torch==' "$root/constraints.txt")
    # Torch alone from there, its dependencies from the usual index. A platform that it has no build for falls through.
    run_pip --index-url "$cpu_index" --no-deps "$torch" || say "no CPU build of $torch there; using pip's default"
fi

run_pip --editable "$root${extra:+[$extra]}" || die "pip could not install the packages; see above, then run this again"

build=default
if ! has_gpu; then
    case "$(installed_torch)" in
        *+cpu) build=cpu ;;
    esac
fi
finish() { printf '%s\n%s\n%s\n' "$pins" "$place" "$build" >"$1.new" && mv "$1.new" "$1"; }
[ -z "$extra" ] || finish "$stamp"
finish "$venv/.titanlite-setup"
say "ready after $(($(date +%s) - started)) s"
echo "$venv/bin/python"
