"""What every check of a contract is: a function of what makes the thing; it fails in sentences."""

from __future__ import annotations

from functools import partial, wraps
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Check = Callable[[Callable[[], Any]], None]


def contract(*checks: Callable[..., None], **options: Any) -> Sequence[Check]:
    """Make a contract of functions.

    Args:
        checks: Each takes what makes the thing, and the options.
        options: Passed to every check.

    Returns:
        Checks of the same names that take what makes the thing, and raise nothing but
        AssertionError with a sentence; what the thing itself raised is its cause.
    """
    return tuple(_check(partial(check, **options), check) for check in checks)


def _check(check: Callable[..., None], named: Callable[..., None]) -> Check:
    @wraps(named)
    def judge(make: Callable[[], Any]) -> None:
        try:
            check(make)
        except AssertionError as error:
            if str(error):
                raise
            raise AssertionError(f"{named.__name__}: an assertion of its own failed") from error
        except Exception as error:
            raise AssertionError(
                f"{named.__name__}: it raised {type(error).__name__}: {error}"
            ) from error

    return judge
