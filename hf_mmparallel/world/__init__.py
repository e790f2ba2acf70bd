"""
The processes that train together: their collectives, their current activity, and the detection of failed ranks.

May be imported by all code that runs on ranks; imports nothing of the package but `_environment`.
"""

from .activity import ACTIVITY, doing
from .failure import RemoteRankError, shared_failure
from .reduce_scatter import ReduceScatter
from .world import World

__all__ = ["ACTIVITY", "ReduceScatter", "RemoteRankError", "World", "doing", "shared_failure"]
