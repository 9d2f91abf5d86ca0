"""The order of axes, stated once.

`_HOST_AXES` is the only place in the project that knows how a host pool orders its axes. Shapes, strides,
the order of a stored page, its contiguous fragments, and the row maps of the copy engines all follow from it.

Axes: `p` page, `l` layer, `t` token (row of a page), `h` head, `d` dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from .named import Named

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .geometry import Component, KVGeometry, PoolKind

_HOST_AXES = {
    "layer_first": "lpthd",
    "page_first": "ptlhd",
    "page_first_direct": "plthd",
    "page_head": "phtld",
}
# Axes that a kind of pool has in size 1 only, and that a stored page therefore leaves out.
_ABSENT_AXES = {"mha": "", "mla": "h", "indexer": "th"}
_LOGICAL_AXES = "lthd"
_DIMENSION_NAMES = {"p": "page", "l": "layer", "t": "token", "h": "head", "d": "dim"}


@dataclass(frozen=True, slots=True)
class Strides:
    """Byte distances within one component's region of a host pool."""

    page: int
    layer: int
    token: int
    head: int


@dataclass(frozen=True, slots=True)
class Fragment:
    """One contiguous piece of every page: `address(page) = region + offset + page * page_stride`.

    Attributes
    ----------
    component : int
        Index of the component whose region `offset` counts from.
    offset : int
        Bytes from the start of the component's region to this piece of page 0.
    page_stride : int
        Bytes from one page's piece to the next page's.
    nbytes : int
    """

    component: int
    offset: int
    page_stride: int
    nbytes: int


class Layout(Named):
    """How a host pool and a stored page order their axes."""

    LAYER_FIRST = "layer_first"
    PAGE_FIRST = "page_first"
    PAGE_FIRST_DIRECT = "page_first_direct"
    PAGE_HEAD = "page_head"

    @classmethod
    def _noun(cls) -> str:
        return "layout"

    @classmethod
    def with_page_axes(cls, axes: object) -> list[Layout]:
        """Return the layouts whose stored pages have this order of axes."""
        return [layout for layout in cls if layout.page_axes == axes]

    @property
    def host_axes(self) -> str:
        """Axes of one component's region in a host pool, outermost first."""
        return _HOST_AXES[self.value]

    @property
    def page_axes(self) -> str:
        """Axes of one component of one stored page: the host axes without the page's."""
        return self.host_axes.replace("p", "")

    @property
    def splits_rows(self) -> bool:
        """Whether the heads of one token's row lie apart, so that a row is not one run."""
        axes = self.host_axes
        return axes.index("h") + 1 != axes.index("d")

    def why_not(self, kind: PoolKind) -> str:
        """Return why pools of this kind cannot have this layout, or nothing where they can."""
        if self.splits_rows and "h" in _ABSENT_AXES[kind.value]:
            return f"{self.value} layout splits rows by head and {kind.value} pools have no head axis"
        return ""

    def host_shape(self, geometry: KVGeometry, component: Component, num_pages: int) -> tuple[int, ...]:
        """Shape of one component's region, in elements, one entry for each of `host_axes`."""
        sizes = _sizes(geometry, component) | {"p": num_pages}
        return tuple(sizes[axis] for axis in self.host_axes)

    def strides(self, geometry: KVGeometry, component: Component, num_pages: int) -> Strides:
        """Byte strides of one component's region of a pool of `num_pages` pages."""
        shape = self.host_shape(geometry, component, num_pages)
        itemsize = geometry.dtype.itemsize
        steps = {axis: prod(shape[i + 1 :]) * itemsize for i, axis in enumerate(self.host_axes)}
        return Strides(page=steps["p"], layer=steps["l"], token=steps["t"], head=steps["h"])

    def fragments(self, geometry: KVGeometry, num_pages: int) -> tuple[Fragment, ...]:
        """Contiguous pieces of a page in a host pool, in the order of the stored page.

        Axes outside the page axis are walked one by one; everything inside it is one run.
        """
        pieces: list[Fragment] = []
        inner = self.host_axes[self.host_axes.index("p") + 1 :]
        for index, component in enumerate(geometry.components):
            sizes = _sizes(geometry, component)
            nbytes = prod(sizes[axis] for axis in inner) * geometry.dtype.itemsize
            count = geometry.component_nbytes(component) // nbytes
            pieces += [Fragment(index, i * num_pages * nbytes, nbytes, nbytes) for i in range(count)]
        return tuple(pieces)

    def is_one_run(self, geometry: KVGeometry) -> bool:
        """Whether a page is one contiguous run of host memory."""
        return len(self.fragments(geometry, 1)) == 1

    def page_shape(self, geometry: KVGeometry) -> tuple[int, ...]:
        """Shape of a stored page as a Zarr reader sees it; `[byte]` where components differ in shape."""
        if not geometry.uniform:
            return (geometry.page_nbytes,)
        shape = self.component_shape(geometry, geometry.components[0])
        return (len(geometry.components), *shape) if len(geometry.components) > 1 else shape

    def page_dimension_names(self, geometry: KVGeometry) -> tuple[str, ...]:
        """Names of the axes of `page_shape`."""
        if not geometry.uniform:
            return ("byte",)
        names = self.component_dimension_names(geometry)
        return ("kv", *names) if len(geometry.components) > 1 else names

    def component_shape(self, geometry: KVGeometry, component: Component) -> tuple[int, ...]:
        """Shape of one component of a stored page, without axes the pool kind does not have."""
        sizes = _sizes(geometry, component)
        return tuple(sizes[axis] for axis in self._stored_axes(geometry))

    def component_dimension_names(self, geometry: KVGeometry) -> tuple[str, ...]:
        """Names of the axes of `component_shape`."""
        return tuple(_DIMENSION_NAMES[axis] for axis in self._stored_axes(geometry))

    def logical_pages(self, geometry: KVGeometry, component: Component, pages: NDArray[Any]) -> NDArray[Any]:
        """View one component of stored pages by meaning, whatever their order of axes; never a copy.

        Parameters
        ----------
        geometry : KVGeometry
        component : Component
        pages : numpy.ndarray
            `[n, m]`: the m elements of the component in stored order, adjacent within a page.

        Returns
        -------
        numpy.ndarray
            `[n, layer, token, head, dim]`, the same for every layout.
        """
        sizes = _sizes(geometry, component)
        shaped = pages.reshape(len(pages), *(sizes[axis] for axis in self.page_axes))
        return shaped.transpose(0, *(1 + self.page_axes.index(axis) for axis in _LOGICAL_AXES))

    def _stored_axes(self, geometry: KVGeometry) -> str:
        absent = _ABSENT_AXES[geometry.kind.value]
        return "".join(axis for axis in self.page_axes if axis not in absent)


def _sizes(geometry: KVGeometry, component: Component) -> dict[str, int]:
    return {"l": geometry.num_layers, "t": geometry.rows, "h": component.heads, "d": component.width}
