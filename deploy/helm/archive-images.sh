#!/bin/sh
# Lists the images of a release, or carries them to a cluster without a network.
#
#   archive-images.sh list [HELM OPTIONS]              print the images, one a line
#   archive-images.sh save ARCHIVE [HELM OPTIONS]      where there is a network: pull them and write them to ARCHIVE
#   archive-images.sh load ARCHIVE REGISTRY            beside the cluster: push the images of ARCHIVE to REGISTRY
#
# HELM OPTIONS are those of the release, such as --values deploy/helm/mergesearch/profiles/air-gapped.yaml, without
# `registry`. HELM and CONTAINER name the programs, by default helm and podman (docker works, too).
set -eu
HELM=${HELM:-helm} CONTAINER=${CONTAINER:-podman}
chart=$(dirname "$0")/mergesearch

images() {
    "$HELM" template images "$chart" "$@" --set registry= >"$work/manifests"
    sed -n 's/^ *-* *image: *"\{0,1\}\([^"]*\)"\{0,1\}$/\1/p' "$work/manifests" | sort -u
}

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
verb=${1:-}
[ $# -eq 0 ] || shift
case $verb in
list)
    images "$@"
    ;;
save)
    archive=${1:?save: name the archive to write}
    shift
    images "$@" >"$work/images"
    while read -r image; do # an image that was built here is in no registry, and its newest build may be localhost/NAME
        "$CONTAINER" tag "localhost/$image" "$image" 2>/dev/null || "$CONTAINER" image inspect "$image" >/dev/null 2>&1 \
            || "$CONTAINER" pull --quiet "$image"
    done <"$work/images"
    # shellcheck disable=SC2046 # names of images have no blanks
    if [ "$(basename "$CONTAINER")" = podman ]; then
        "$CONTAINER" save --quiet --multi-image-archive --output "$archive" $(cat "$work/images")
    else
        "$CONTAINER" save --output "$archive" $(cat "$work/images")
    fi
    echo "$archive: $(wc -l <"$work/images") images"
    ;;
load)
    archive=${1:?load: name the archive to read} registry=${2:?load: name the registry, such as registry.example.org/team}
    "$CONTAINER" load --input "$archive" | sed -n 's/^Loaded image[^:]*: *//p' >"$work/images"
    [ -s "$work/images" ] || { echo "$archive: has no image" >&2; exit 1; }
    while read -r image; do
        target=${registry%/}/${image##*/}
        "$CONTAINER" tag "$image" "$target"
        "$CONTAINER" push --quiet "$target"
        echo "$target"
    done <"$work/images"
    ;;
*)
    sed -n '2,/^set/s/^# \{0,1\}//p' "$0" >&2
    exit 2
    ;;
esac
