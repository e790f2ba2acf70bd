"""
The processes that train together. Imports nothing of the package but `_environment`; all code on ranks may import it.
"""

from .failure import RemoteRankError, failures_left_to, is_lost_connection, shared_failure
from .generations import Generation
from .membership import Membership
from .watcher import ACTIVITY, doing
from .world import ReduceScatter, World, limit_collectives

__all__ = [
    "ACTIVITY",
    "Generation",
    "Membership",
    "ReduceScatter",
    "RemoteRankError",
    "World",
    "doing",
    "failures_left_to",
    "is_lost_connection",
    "limit_collectives",
    "shared_failure",
]
