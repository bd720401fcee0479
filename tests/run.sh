#!/bin/sh
# Sets up .venv, then lints, type-checks and tests. Arguments go to pytest: sh tests/run.sh -m "not slow"
set -u
cd "$(dirname "$0")/.." || exit 1
. examples/setup_env.sh
failed=

check() {
    say "$*"
    "$py" -m "$@" || failed="${failed:+$failed, }$*"
}

set_up test
check ruff check .
check ruff format --check .
check mypy
check pytest -n auto --maxprocesses 8 "$@"
[ -z "$failed" ] || die "$failed"
