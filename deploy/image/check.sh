#!/usr/bin/env bash
# Builds the image with buildah, and runs it with podman and runc: as its user, without capabilities, and with a read-only
# root. Needs root, and the wheel of `make wheel`.
#
#   deploy/image/check.sh python:3.12-slim                on a base of a registry
#   deploy/image/check.sh                                 on Debian by debootstrap, where no registry can be reached
#
# Further options of buildah are in BUILD, such as "--build-arg TORCH_INDEX=... --volume /wheels:/wheels:ro".
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
base=${1:-}
image=localhost/kvstore:check
scratch=$(mktemp -d)
name=kvstore-check-$$
read -r -a build <<<"${BUILD:-}"
podman=(podman --runtime runc --cgroup-manager cgroupfs)

finish() {
  "${podman[@]}" rm --force "$name" >/dev/null 2>&1 || true
  rm -rf "$scratch"
}
trap finish EXIT

if [ -z "$base" ]; then
  base=localhost/kvstore-check-base:bookworm
  if ! buildah inspect --type image "$base" >/dev/null 2>&1; then
    debootstrap --variant=minbase --include=python3,python3-pip,ca-certificates,passwd bookworm "$scratch/root" \
      http://deb.debian.org/debian
    container=$(buildah from scratch)
    buildah add --quiet "$container" "$scratch/root" /
    buildah commit --quiet --rm "$container" "$base"
  fi
fi

buildah build --isolation chroot --format docker --file "$here/Dockerfile" --tag "$image" --build-arg "BASE=$base" \
  "${build[@]}" "$here/../../dist"

cat >"$scratch/kvstore.yaml" <<'END'
server_listen: kvs+ipc:///run/kvstore
max_local_cpu_size: 0.25
server_http_port: 9464
END
id=$(buildah inspect --type image --format '{{.Docker.Config.User}}' "$image")
install -d -m 0700 -o "${id%:*}" -g "${id#*:}" "$scratch/sockets"
"${podman[@]}" run --detach --name "$name" --network none --read-only --cap-drop all --memory 1g --no-healthcheck \
  --security-opt no-new-privileges --ulimit nofile=4096:4096 --ulimit nproc=4096:4096 --tmpfs /tmp \
  --volume "$scratch/kvstore.yaml:/etc/kvstore/kvstore.yaml:ro" --volume "$scratch/sockets:/run/kvstore" "$image"

mapfile -t health < <(buildah inspect --type image --format '{{range .Docker.Config.Healthcheck.Test}}{{println .}}{{end}}' "$image")
for _ in $(seq 60); do
  if "${podman[@]}" exec "$name" "${health[@]:1:3}" 2>/dev/null; then
    "${podman[@]}" exec "$name" kvstore ping --url kvs+ipc:///run/kvstore
    "${podman[@]}" stop --time 20 "$name" >/dev/null
    code=$("${podman[@]}" inspect --format '{{.State.ExitCode}}' "$name")
    echo "runs as $id, is healthy, and ends with $code"
    exit "$code"
  fi
  sleep 0.5
done
"${podman[@]}" logs "$name" >&2
echo "error: the server in the image is not healthy after 30 s" >&2
exit 1
