"""Studies on a Ray cluster of several nodes, made of this machine: `make test-cluster`."""
