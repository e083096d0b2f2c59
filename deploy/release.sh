#!/usr/bin/env bash
# Build what a release consists of, in dist/: the wheel, the Helm chart, the docs site, the images, and the list of their
# checksums. `make release` runs it. The version is the one of pyproject.toml.
#
#   HELM          the program helm (default: helm)
#   IMAGES        variants of the image to build and to save: "cpu gpu" (the default), "cpu", or "none"
#   DOCKER        the program that builds and saves images: docker (the default), or podman
#   BUILD_OPTIONS further options of its command `build`, separated by spaces, such as "--network=host --isolation=chroot"
#   COMPRESS      the command that compresses images, in gzip's format: gzip (the default), "gzip --fast", or pigz
#   PYTHON        the Python that has this project's extra `test` (default: .venv/bin/python)
set -euo pipefail
cd "$(dirname "$0")/.."
HELM=${HELM:-helm} IMAGES=${IMAGES:-cpu gpu} DOCKER=${DOCKER:-docker} PYTHON=${PYTHON:-.venv/bin/python}
read -ra build_options <<<"${BUILD_OPTIONS:-}"
read -ra compress <<<"${COMPRESS:-gzip}"

fail() {
    echo "release: $*" >&2
    exit 2
}

version=$(sed -n 's/^version = "\(.*\)"$/\1/p' pyproject.toml)
[[ $version =~ ^[0-9]+\.[0-9]+\.[0-9]+$ ]] || fail "pyproject.toml: version is ${version@Q}; give MAJOR.MINOR.PATCH"
for place in "version: $version" "appVersion: \"$version\""; do
    grep -qxF "$place" deploy/helm/mergesearch/Chart.yaml || fail "deploy/helm/mergesearch/Chart.yaml: has no line '$place'"
done
ray=$(sed -n 's/^ray==//p' deploy/constraints.txt)
tag=$version-ray$ray
grep -qF "mergesearch:$tag-cpu" deploy/compose/compose.yaml || fail "deploy/compose/compose.yaml: has no image with the tag $tag-cpu"
grep -q "^## $version" CHANGELOG.md || fail "CHANGELOG.md: has no section '## $version'"
if [ -n "$(git status --porcelain)" ]; then
    fail "the working tree has changes; commit them first: $(git status --porcelain | head -3 | tr '\n' ' ')"
fi
[ -f service/web/static/index.html ] || fail "service/web/static: the web page is not built; make web builds it"
command -v "$HELM" >/dev/null || fail "$HELM: not found; install helm, or give HELM=PROGRAM"
for variant in $IMAGES; do
    [[ $variant =~ ^(cpu|gpu|none)$ ]] || fail "IMAGES=${IMAGES@Q}: there is no variant ${variant@Q}; give cpu, gpu, both, or none"
done
if [ "$IMAGES" != none ]; then
    command -v "${compress[0]}" >/dev/null || fail "COMPRESS=${COMPRESS@Q}: ${compress[0]} is not found; give gzip or pigz"
    "$DOCKER" info >/dev/null 2>&1 \
        || fail "$DOCKER does not answer; start it, give DOCKER=PROGRAM for another one, or IMAGES=none"
fi

rm -rf dist build/lib build/site # files that are no longer there would be packed from the last two
mkdir dist
echo "release: the wheel"
"$PYTHON" -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .
echo "release: the chart"
"$HELM" package deploy/helm/mergesearch --destination dist >/dev/null
echo "release: the docs"
"$PYTHON" -m sphinx --quiet --fail-on-warning --keep-going --conf-dir docs/site --doctree-dir build/doctrees . build/site
tar --create --gzip --file "dist/mergesearch-docs-$version.tar.gz" --directory build site
if [ "$IMAGES" != none ]; then
    for variant in $IMAGES; do
        image=localhost/mergesearch:$tag-$variant # as compose and the profile cpu-dev name it
        echo "release: the image $image"
        "$DOCKER" build --quiet "${build_options[@]}" --file deploy/docker/Containerfile --build-arg "VARIANT=$variant" \
            --build-arg "MERGESEARCH_VERSION=$version" --build-arg "RAY_VERSION=$ray" --tag "$image" .
        "$DOCKER" save "$image" | "${compress[@]}" >"dist/mergesearch-image-$tag-$variant.tar.gz"
    done
fi
(cd dist && sha256sum -- * >SHA256SUMS)
echo "release: the routes that later versions keep"
"$PYTHON" -m tests.service.api.contract
echo "release: mergesearch $version is in dist/; commit tests/service/api/released.json, then tag the commit v$version"
