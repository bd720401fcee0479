#!/bin/sh
# Sets up .venv, then runs examples/quickstart.py with the arguments given.
set -u
cd "$(dirname "$0")/.." || exit 1
. examples/setup_env.sh

set_up ''
say "python examples/quickstart.py $*"
exec "$py" examples/quickstart.py "$@"
