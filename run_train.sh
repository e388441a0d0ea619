#!/usr/bin/env bash
# Trains what a TOML declares: ./run_train.sh [--config NAME] [--nproc N] [--section.key VALUE ...]; --help says all.
# The first call makes the Python environment; with --setup-only it does no more than that.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)
python=$("$root/scripts/setup.sh")
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
exec "$python" -m titanlite.launch "$@"
