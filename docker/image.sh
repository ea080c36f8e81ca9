#!/usr/bin/env bash
# Build or test the image with the engine that this machine has: docker, podman, or buildah.
#
# usage: docker/image.sh build|test
#
#   IMAGE            its name (default: hvd-gradcomp)
#   PIP_TORCH_ARGS   for the installation of torch: README, "The CPU build of torch"
#   IMAGE_ARGS       more arguments for the engine's build command
#
# buildah serves machines without an engine and without a registry of images (root needed): the base is made
# by debootstrap, and the machine's own settings of pip are lent to the build, which does not keep them.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
image=${IMAGE:-hvd-gradcomp}
base=localhost/hvd-gradcomp-base
say() { echo "image: $*" >&2; }
die() { say "error: $*"; exit 1; }

find_engine() {
  local each
  for each in docker podman; do
    if "$each" info >/dev/null 2>&1; then echo "$each"; return; fi
  done
  command -v buildah >/dev/null || die "neither docker nor podman runs here, and there is no buildah (Debian: apt-get install buildah debootstrap)"
  command -v debootstrap >/dev/null || die "buildah needs debootstrap, which makes the base (Debian: apt-get install debootstrap)"
  [ "$(id -u)" = 0 ] || die "buildah and debootstrap need root here"
  echo buildah
}
engine=$(find_engine)
export STORAGE_DRIVER=${STORAGE_DRIVER:-vfs} BUILDAH_ISOLATION=${BUILDAH_ISOLATION:-chroot}  # both work anywhere
cleanup=()
finish() { local i; for ((i = ${#cleanup[@]} - 1; i >= 0; i--)); do eval "${cleanup[i]}" || true; done; }
trap finish EXIT
trap 'exit 130' INT TERM

make_base() {
  buildah inspect --type image "$base" >/dev/null 2>&1 && return
  say "base image by debootstrap, usually 1 to 2 minutes"
  local root container
  root=$(mktemp -d)
  cleanup+=("rm -rf --one-file-system '$root'")
  debootstrap --variant=minbase bookworm "$root/base" >"$root/log" 2>&1 || { tail -n 20 "$root/log" >&2; die "debootstrap failed"; }
  rm -rf "$root"/base/var/cache/apt/archives/*.deb "$root"/base/var/lib/apt/lists/*
  container=$(buildah from scratch)
  cleanup+=("buildah rm '$container' >/dev/null")
  buildah copy --quiet "$container" "$root/base" / >/dev/null
  buildah config --cmd bash "$container"
  buildah commit --quiet "$container" "$base" >/dev/null
}

# Prints the --volume arguments that lend pip's settings to a build, one a line: a pip.conf of its own, and the local
# folders and files that it names.
lend_pip() {
  local lent=$1
  python3 - "$lent" <<'PY'
import os, re, shutil, subprocess, sys
lent = sys.argv[1]
settings, volumes = {}, {f"{lent}/pip.conf": "/etc/pip.conf"}
listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True).stdout
for line in listed.splitlines():
    name, _, value = line.partition("=")
    section, _, key = name.rpartition(".")
    value = value.strip("'\"")
    if section not in ("global", ":env:") or key in ("require-virtualenv", "user", "target", "prefix"):
        continue
    for path in re.findall(r"(?:(?<=\s)|^|(?<=file://))/[^\s]+", value):
        if os.path.isfile(path):  # a copy: the image may have a file of its own in that place
            shutil.copy(path, f"{lent}/{os.path.basename(path)}")
            value = value.replace(path, f"/lent/{os.path.basename(path)}")
            volumes[lent] = "/lent"
        elif os.path.isdir(path):
            folder = os.path.dirname(path) if path.endswith("/simple") else path  # an index links to its neighbors
            volumes[folder] = folder
    settings[key] = value
with open(f"{lent}/pip.conf", "w") as file:
    file.write("[global]\n" + "".join(f"{key} = {value}\n" for key, value in settings.items()))
for outside, inside in volumes.items():
    print(f"--volume={outside}:{inside}:ro")
PY
}

# build NAME TARGET
build() {
  local arguments=(-f docker/Dockerfile --target "$2" -t "$1" --build-arg "PIP_TORCH_ARGS=${PIP_TORCH_ARGS:-}")
  # shellcheck disable=SC2206  # several arguments in one variable
  arguments+=(${IMAGE_ARGS:-})
  if [ "$engine" = buildah ]; then
    make_base
    local lent
    lent=$(mktemp -d)
    chmod 755 "$lent"
    cleanup+=("rm -rf '$lent'")
    mapfile -t -O "${#arguments[@]}" arguments < <(lend_pip "$lent")
    buildah bud --layers --network host --pull-never --build-arg "BASE=$base" "${arguments[@]}" .
  else
    "$engine" build "${arguments[@]}" .
  fi
}

container=
in_image() {
  say "\$ $*"
  if [ "$engine" = buildah ]; then
    [ -n "$container" ] || die "no container"
    # Gloo crashes where the host's own name has no address; docker and podman see to that.
    timeout 900 buildah run --network host --hostname localhost "$container" -- "$@"
  else
    timeout 900 "$engine" run --rm --shm-size 1g "$image-test" "$@"
  fi
}

run_tests() {
  build "$image-test" test
  if [ "$engine" = buildah ]; then
    container=$(buildah from --pull-never "$image-test")
    cleanup+=("buildah rm '$container' >/dev/null")
  fi
  in_image bash -c 'set -e; id -un; python --version; horovodrun --check-build; ! command -v g++ gcc cmake ninja make'
  in_image python -m hvd_gradcomp codecs
  for transport in gloo mpi; do
    for example in pytorch_mnist tensorflow2_mnist; do
      in_image horovodrun -np 2 "--$transport" python "examples/$example.py" --epochs 2 --compression 'topk(ratio=0.01)'
    done
  done
  in_image env HVD_GRADCOMP_KERNELS=require python -m pytest tests/unit tests/contract/test_table.py -q -p no:cacheprovider
  say "all of it passed inside $image-test, by $engine"
}

case ${1:-} in
  build) build "$image" image; say "built: $image, by $engine" ;;
  test) run_tests ;;
  *) sed -n '2,11s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2; exit 2 ;;
esac
