"""The fixture that starts services."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest

from tests.services.factories import Services


@pytest.fixture
async def services() -> AsyncIterator[Services]:
    """What starts services; all of them end with the test."""
    async with AsyncExitStack() as stack:
        yield Services(stack)
