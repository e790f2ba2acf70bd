"""Cases of parametrised tests of which only some run on each change."""

from typing import Any

import pytest


def deep(*values: Any, unless: bool = False, id: str | None = None) -> Any:
    """A case that is a deep test, unless it is one of those that always run."""
    return pytest.param(*values, id=id, marks=() if unless else pytest.mark.deep)
