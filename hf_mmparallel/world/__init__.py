"""
The processes that train together, and the launcher whose processes go on when others die. Imports nothing of the
package but `_environment`; all code on ranks may import it.
"""

from .failure import RemoteRankError, failures_left_to, is_lost_connection, raise_on_all_ranks, refuse_once
from .generations import Generation
from .membership import Membership
from .watcher import ACTIVITY, run_collective, track_activity
from .world import ReduceScatter, World, limit_collectives

__all__ = [
    "ACTIVITY",
    "Generation",
    "Membership",
    "ReduceScatter",
    "RemoteRankError",
    "World",
    "failures_left_to",
    "is_lost_connection",
    "limit_collectives",
    "raise_on_all_ranks",
    "refuse_once",
    "run_collective",
    "track_activity",
]
