#!/bin/bash
# Makes a container a "host" of a Horovod job: an ssh server, without root, on port 2222.
#
# usage: host keys           make the key with which all hosts of the job let each other in, in ~/.ssh, a volume they share
#        host serve          run the ssh server
#        host run COMMAND    run it in the background, wait for the other hosts named in $HOSTS, then run COMMAND
set -euo pipefail
home=${HOME:-/home/trainer}

keys() {
  [ -f "$home/.ssh/id_ed25519" ] && return
  ssh-keygen -q -t ed25519 -N '' -f "$home/.ssh/id_ed25519"
  cp "$home/.ssh/id_ed25519.pub" "$home/.ssh/authorized_keys"
}

serve() {
  local own
  own=$(mktemp -d)
  ssh-keygen -q -t ed25519 -N '' -f "$own/host_key"
  # A login has nothing of the image's environment: what ranks and orted need is handed on.
  exec /usr/sbin/sshd -D -e -f /dev/null -p "${SSH_PORT:-2222}" -h "$own/host_key" -o PidFile=none -o UsePAM=no \
    -o PasswordAuthentication=no -o StrictModes=no -o LogLevel=ERROR \
    -o "SetEnv=PATH=$PATH OPAL_PREFIX=${OPAL_PREFIX:-} OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} TF_CPP_MIN_LOG_LEVEL=${TF_CPP_MIN_LOG_LEVEL:-3}"
}

run() {
  serve &
  # shellcheck disable=SC2064  # expand now
  trap "kill $! 2>/dev/null || true" EXIT
  for host in ${HOSTS:-}; do
    for attempt in $(seq 30); do
      ssh -p "${SSH_PORT:-2222}" -o StrictHostKeyChecking=no "$host" true 2>/dev/null && break
      [ "$attempt" -lt 30 ] || { echo "host: $host does not answer" >&2; exit 1; }
      sleep 1
    done
  done
  "$@"
}

case ${1:-} in
  keys) keys ;;
  serve) serve ;;
  run) shift; run "$@" ;;
  *) sed -n '2,6s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
esac
