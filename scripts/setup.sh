# Sourced by the other scripts: a virtual environment with exact versions, made once and remade when they change.
# Usage: setup_environment [EXTRA]   ->   $root, $python
# pip's own variables (PIP_INDEX_URL, PIP_FIND_LINKS, ...) choose where packages come from, for example a CPU-only torch.
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=$root/.venv/bin/python

find_python() {
  local candidate
  for candidate in python3 python3.12 python3.11 python3.13; do
    if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null; then
      command -v "$candidate"
      return
    fi
  done
  echo "Rung needs Python 3.11, 3.12 or 3.13 on the PATH; found: $(python3 --version 2>&1)" >&2
  return 1
}

setup_environment() {
  local extra=${1:-} base stamp
  stamp=$root/.venv/.installed-${extra:-run}-$(cat "$root/pyproject.toml" "$root/constraints.txt" | cksum | cut -d' ' -f1)
  [ -e "$stamp" ] && return
  base=$(find_python) || return 1
  [ -x "$python" ] || "$base" -m venv "$root/.venv"
  echo "installing Rung${extra:+ with extra '$extra'} into .venv (once; torch is large) ..." >&2
  # torch first and alone: anything that pulls it in without a pin may bring gigabytes of CUDA.
  "$python" -m pip install --quiet --disable-pip-version-check -c "$root/constraints.txt" torch
  "$python" -m pip install --quiet --disable-pip-version-check -c "$root/constraints.txt" -e "$root${extra:+[$extra]}"
  rm -f "$root/.venv/.installed-${extra:-run}-"*
  touch "$stamp"
}
