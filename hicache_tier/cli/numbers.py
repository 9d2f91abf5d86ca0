"""Numbers on the command line: sizes, and such that must be finite."""

from __future__ import annotations

from typing import Any

import click


class Size(click.ParamType[int]):
    """Bytes above 0, as a number or as text such as `100 GiB`."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:  # noqa: ANN401 - click's signature
        """Read one size."""
        from humanfriendly import InvalidSize, parse_size

        try:
            nbytes = int(parse_size(str(value)))
        except (InvalidSize, OverflowError):
            nbytes = 0
        if nbytes < 1:
            self.fail(f"{value!r} is not a size above 0 such as 100GiB.", param, ctx)
        return nbytes


class Finite(click.FloatRange):
    """A number of a range, which `nan` and `inf` are not."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:  # noqa: ANN401 - click's signature
        """Read one number."""
        number = super().convert(value, param, ctx)
        if not abs(number) < float("inf"):
            self.fail(f"{value!r} is not a finite number.", param, ctx)
        return number
