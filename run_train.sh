#!/usr/bin/env bash
# Trains what a TOML declares: ./run_train.sh [--config NAME] [--nproc N] [--section.key VALUE ...]; --help says all.
# The first call makes the Python environment; --setup-only stops after that.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
python=$("$root/scripts/setup.sh")
for argument in "$@"; do
    if [ "$argument" = --setup-only ]; then
        echo "$python"
        exit 0
    fi
done

export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
exec "$python" -m titanlite.launch "$@"
