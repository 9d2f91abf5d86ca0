"""The console that results are printed on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from rich.console import Console
from rich.segment import Segment

from .output import visible

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.console import ConsoleOptions, RenderableType


class ResultConsole(Console):
    """Console that prints text as it is, whatever stands in it.

    It leaves it to the command group to end where nobody reads stdout any more.
    """

    def __init__(self, **options: Any) -> None:  # noqa: ANN401 - rich's
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render; control characters that are not rich's own become visible."""
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else visible(text), style, control)

    def on_broken_pipe(self) -> NoReturn:
        """Raise what rich would turn into exit code 1."""
        raise BrokenPipeError
