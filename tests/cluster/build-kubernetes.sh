#!/usr/bin/env bash
# Builds the Kubernetes API server and controller manager that tests/cluster uses, from Debian's source package, into
# build/kubernetes (about 10 minutes of CPU, 2 GB on disk while it builds). Needs root for Debian's packages, and
# deb-src in apt's sources. Debian's newest is 1.20.2: what the chart needs beyond it is said in tests/cluster/control_plane.py.
set -euo pipefail
out="$(cd "$(dirname "$0")/../.." && pwd)/build/kubernetes"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
apt-get install -y -qq --no-install-recommends golang-1.19-go golang-github-modern-go-reflect2-dev etcd-server dpkg-dev rsync
cd "$work"
apt-get source -qq kubernetes
cd kubernetes-*/
# The vendored copy of this package does not work with a Go as new as Debian's.
cp /usr/share/gocode/src/github.com/modern-go/reflect2/*.go vendor/github.com/modern-go/reflect2/
rm -f vendor/github.com/modern-go/reflect2/*_test.go
mkdir -p .go/src/k8s.io "$work/home"
ln -sfn ../../.. .go/src/k8s.io/kubernetes
export PATH="/usr/lib/go-1.19/bin:$PATH" GOPATH="$PWD/.go" CGO_ENABLED=0 HOME="$work/home"
make WHAT="cmd/kube-apiserver cmd/kube-controller-manager" GOLDFLAGS="-s -w"
mkdir -p "$out"
cp _output/bin/kube-apiserver _output/bin/kube-controller-manager "$out"
