#!/usr/bin/env bash
# Stands for a Python interpreter in test_setup.py: makes virtual environments and installs in no time, and notes it.
here=$(cd "$(dirname "$0")/.." && pwd)
case "$*" in
    *"sys.version_info < (3, 11)"*) exit "${FAKE_TOO_OLD:-0}" ;;
    *"import ensurepip, venv"*) exit "${FAKE_NO_VENV:-0}" ;;
    *check_env.py*) echo "no torch" && exit 1 ;;
    "-V") echo "Python 3.12.1" ;;
    "-m venv "*)
        echo "venv $3" >>"$FAKE_LOG"
        mkdir -p "$3/bin"
        touch "$3/pyvenv.cfg"
        cp "$0" "$3/bin/python"
        ;;
    "-m pip install"*)
        words="$*"
        echo "${words#-m }" >>"$FAKE_LOG"
        sleep "${FAKE_PIP_SECONDS:-0}"
        [ -z "${FAKE_PIP_FAILS-}" ] || exit 1
        echo "${FAKE_TORCH:-2.13.0+cpu}" >"$here/torch"
        ;;
    "-m pip uninstall"*)
        echo "uninstall" >>"$FAKE_LOG"
        rm -f "$here/torch"
        ;;
    *'version("torch")'*) cat "$here/torch" 2>/dev/null ;;
    "-m titanlite.launch"*)
        words="$*"
        echo "launch:${words#-m titanlite.launch}"
        ;;
    "- https://"*) exit "${FAKE_NO_CPU_INDEX:-1}" ;;
esac
