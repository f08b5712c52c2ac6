# Sourced by the other scripts: the repository's own .venv, installed through scripts/constraints.txt.
# usage: source scripts/environment.sh core|dev

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

prepare_environment() {
  local level=$1 stamp=".venv/installed-$1"
  if [ ! -x .venv/bin/python ]; then
    "$(command -v python3.11 || command -v python3)" -m venv .venv
  fi
  for done in "$stamp" .venv/installed-dev; do
    if [ -f "$done" ] && cmp -s "$done" <(cat pyproject.toml scripts/constraints.txt); then
      return
    fi
  done
  # most modules of the large packages are never imported: what is, is compiled then
  local pip=(.venv/bin/python -m pip install --quiet --disable-pip-version-check --no-compile)
  pip+=(--constraint scripts/constraints.txt)
  if [ "$level" = dev ]; then
    "${pip[@]}" torch
    "${pip[@]}" --editable '.[dev]'
  else
    "${pip[@]}" --editable .
  fi
  cat pyproject.toml scripts/constraints.txt > "$stamp"
}

prepare_environment "$1"
export PATH="$PWD/.venv/bin:$PATH"
