"""Detection that a replica should accept no further work, because Ray drains its node.

Ray drains a node before the node stops, for example after a notice of preemption (`ray drain-node`, KubeRay,
autoscaler). Serve then starts a replica on another node. Serve stops the replica on the drained node as soon as the
other replica runs, but early enough for a graceful stop in the remaining time. During a graceful stop, new requests go
to other replicas, and Serve waits for the requests that the stopping replica still has.
"""

from __future__ import annotations

import logging

from workers.errors import ServeUnavailable
from workers.serving.application import replica_state

__all__ = ["is_being_moved"]

log = logging.getLogger(__name__)


def is_being_moved() -> bool:
    """Whether this replica is being moved off its node: Ray drains the node, and Serve has begun to stop the replica.

    Serve is queried only if Ray drains the node. If Ray or Serve does not answer, the result is False, because it does
    no harm if the replica then accepts one more request.
    """
    import ray
    from ray._private.state import state
    from ray.exceptions import RayError
    from ray.serve import get_replica_context

    if not ray.is_initialized():
        return False
    try:
        if ray.get_runtime_context().get_node_id() not in state.get_draining_nodes():
            return False
        context = get_replica_context()
        return replica_state(context.app_name, context.replica_id.unique_id) in ("STOPPING", None)
    except (RayError, ServeUnavailable) as error:
        log.warning("whether this replica's node is drained is unknown: %s", error)
        return False
