#!/usr/bin/env bash
# Linters, type checker, tests. Usage: scripts/test.sh [pytest arguments]. The last line is pytest's summary.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
python=$("$root/scripts/setup.sh" --test)
cd "$root"
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"

failed=""
"$python" -m ruff check . || failed="$failed ruff-check"
"$python" -m ruff format --check . || failed="$failed ruff-format"
"$python" -m mypy || failed="$failed mypy"
if [ -n "$failed" ]; then
    echo "scripts/test.sh: failed:$failed (pytest was not run)" >&2
    exit 1
fi

exec "$python" -m pytest "$@"
