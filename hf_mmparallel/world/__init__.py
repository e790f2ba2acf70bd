"""
The processes that train together, what each of them is doing, and how one learns that another has failed.

May be imported by everything that runs on ranks; imports nothing of the package but `_environment`.
"""

from .activity import ACTIVITY, doing
from .failure import RemoteRankError, shared_failure
from .world import World

__all__ = ["ACTIVITY", "RemoteRankError", "World", "doing", "shared_failure"]
