"""Parameters of tests, of which the short suite (`make test`) runs some."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pytest


def cases(values: Iterable[Any], *short: Any) -> list[pytest.ParameterSet]:
    """Return parameters, all but the named ones marked slow; of a mapping its values, by their names."""
    named = values.items() if isinstance(values, Mapping) else [(value, value) for value in values]
    return [
        pytest.param(
            value, marks=() if name in short else pytest.mark.slow, id=name if isinstance(values, Mapping) else None
        )
        for name, value in named
    ]
