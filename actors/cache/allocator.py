"""The free list of KV pages.

Knows page numbers 0 .. total - 1 and which of them are out. Does not know what a page holds, who
holds it, or the radix tree. Pages are handed out last-in first-out, so a small working set stays
in a small part of the pool.
"""

import numpy as np
import numpy.typing as npt

Pages = npt.NDArray[np.int32]


class DoubleFree(RuntimeError):
    """A page was given back that is not out, or twice in one call. Suspect KV: never continue."""


class PageAllocator:
    """A stack of free page numbers; `alloc` and `free` cost O(pages moved)."""

    def __init__(self, total: int) -> None:
        if total < 1:
            raise ValueError(f"a pool of {total} pages: at least 1 is needed")
        self.total = total
        self._stack: Pages = np.arange(total - 1, -1, -1, dtype=np.int32)
        self.free_pages = total
        self._out = np.zeros(total, dtype=np.bool_)
        self._place = np.zeros(total, dtype=np.int32)  # scratch: finds duplicates within one call
        self._order = np.arange(total, dtype=np.int32)

    def alloc(self, count: int) -> Pages:
        """`count` pages, int32[count]. Raises ValueError if fewer are free: the caller checks first."""
        if not 0 <= count <= self.free_pages:
            raise ValueError(f"{count} pages asked for, {self.free_pages} are free")
        self.free_pages -= count
        pages = self._stack[self.free_pages : self.free_pages + count][::-1].copy()
        self._out[pages] = True
        return pages

    def free(self, pages: Pages) -> None:
        """Give back int32[n] pages. Raises DoubleFree, and then nothing has changed."""
        count = len(pages)
        if not count:
            return
        # Compared as bytes, which costs half as much for a few pages.
        places = self._order[:count].tobytes()
        self._place[pages] = self._order[:count]
        if b"\0" in self._out.take(pages).tobytes() or self._place.take(pages).tobytes() != places:
            raise DoubleFree(f"{count} pages were freed of which some are not out, or occur twice")
        self._out[pages] = False
        self._stack[self.free_pages : self.free_pages + count] = pages
        self.free_pages += count

    def is_out(self, pages: Pages) -> npt.NDArray[np.bool_]:
        """bool[n]: which of `pages` are handed out."""
        return self._out[pages]
