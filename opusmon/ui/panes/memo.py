"""One answer per frame: what several parts of a pane ask for in turn is computed once."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Generic, TypeVar

from opusmon.ui.panes.base import Frame, View

T = TypeVar("T")


class FrameMemo(Generic[T]):
    """A pure function of a frame that remembers its last answer.

    The answer must depend on what the view holds (its `version`), the playhead, the span, the filter and the sort
    order only. The view is referred to weakly: a closed session is not kept in memory for its last frame.

    Args:
        compute: the function.
    """

    def __init__(self, compute: Callable[[Frame], T]) -> None:
        self._compute = compute
        self._view: weakref.ref[View] | None = None
        self._key: tuple[object, ...] = ()
        self._answer: T | None = None
        self.__doc__ = compute.__doc__

    def __call__(self, frame: Frame) -> T:
        """The function's value for a frame."""
        view = frame.view
        key = (view.version, frame.t, frame.span_ns, frame.state.filter, frame.state.sort)
        known = self._view() if self._view is not None else None
        if known is view and key == self._key and self._answer is not None:
            return self._answer
        answer = self._compute(frame)
        self._view, self._key, self._answer = weakref.ref(view), key, answer
        return answer
