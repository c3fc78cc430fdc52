# Sourced by the other tools: makes .venv beside pyproject.toml and installs the package with the tested versions.
#   source tools/setup.sh; set_up [EXTRA]
# Nothing is installed again while pyproject.toml and constraints.txt are what they were.

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="$root/.venv"

find_python() {
  local candidate
  for candidate in ${PYTHON:-} python3 python3.12 python3.11 python3.13 python3.10 python; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  echo "fw needs Python 3.10 or later with pip; none was found (set PYTHON to one)" >&2
  return 1
}

set_up() {
  local extra="${1:-}" stamp wanted python
  if [ ! -x "$venv/bin/python" ]; then
    python="$(find_python)" || return 2
    echo "making $venv with $("$python" --version)" >&2
    "$python" -m venv "$venv" || return 2
  fi
  stamp="$venv/.fw-installed${extra:+-$extra}"
  wanted="$(cat "$root/pyproject.toml" "$root/constraints.txt" | cksum) $root"
  if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
    echo "installing fw${extra:+[$extra]} with the versions of constraints.txt" >&2
    PYTHONWARNINGS=ignore "$venv/bin/python" -m pip install --quiet --disable-pip-version-check \
      --constraint "$root/constraints.txt" --editable "$root${extra:+[$extra]}" || return 2
    echo "$wanted" >"$stamp"
  fi
}
