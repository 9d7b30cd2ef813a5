"""Load stored chunks layer by layer: a thread reads them, and a pass places each layer when it reaches it.

A pass needs the first layer first, so reading goes on while it computes (CacheBlend, arXiv 2405.16444, section 5). A
request waits only for the first layer, and for later ones if its store is slower than its model.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from qcfuse_rag.models.rope import LayerRope
from qcfuse_rag.runtime.buffer import KVBuffer
from qcfuse_rag.runtime.device import DeviceTimestamp
from qcfuse_rag.runtime.loading.sources import BlockSource, LateMissError, LoadingChunk, SentLayers
from qcfuse_rag.store.backends.base import Miss

if TYPE_CHECKING:
    from qcfuse_rag.runtime.loading.host_to_device import HostToDevice
    from qcfuse_rag.runtime.loading.slab_source import SlabSource


T = TypeVar("T")

Tasks = SimpleQueue[tuple[Callable[[], Any], "Future[Any]"] | None]


class WaitBudget:
    """The seconds that one request may wait in total, without a limit if that is None.

    With a limit, the store is called in a thread, until `close`.
    """

    def __init__(self, limit_s: float | None) -> None:
        self._limit_s = limit_s
        self._tasks: Tasks | None = None
        self.waited_s = 0.0

    @property
    def left_s(self) -> float | None:
        """Seconds left, at least 0; None if there is no limit."""
        return None if self._limit_s is None else max(0.0, self._limit_s - self.waited_s)

    @property
    def timeout_reason(self) -> str:
        """The reason of a miss that did not arrive within the budget."""
        return f"not there within {self._limit_s:g} s"

    def lower(self, limit_s: float) -> None:
        """Allow at most so many seconds, those that were waited included."""
        self._limit_s = limit_s if self._limit_s is None else min(limit_s, self._limit_s)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time inside the context as waiting."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.waited_s += time.perf_counter() - began

    def call(self, ask: Callable[[], T]) -> T:
        """Call a function of the store that may hang.

        Raises:
            TimeoutError: if it does not return within the seconds left. The thread then stays in it, not waited for.
        """
        left_s, outcome = self.left_s, Future[T]()
        with self.waiting():
            if left_s is None:
                return ask()
            if self._tasks is None:
                self._tasks = SimpleQueue()
                _start(self._tasks)
            self._tasks.put((ask, outcome))
            try:
                return outcome.result(left_s)
            except TimeoutError:
                if outcome.done():  # the call raised the error itself, or it has just ended
                    return outcome.result()
                raise TimeoutError(f"no answer within {left_s:g} s") from None

    def close(self) -> None:
        """End the thread."""
        if self._tasks is not None:
            self._tasks.put(None)


def _start(tasks: Tasks) -> None:
    """Start a thread that computes alone: with helpers of its own, passes beside it take a fifth longer on a CPU."""
    count, ready = torch.get_num_threads(), threading.Event()
    threading.Thread(target=_work, args=(tasks, ready), name="qcfuse-lookup", daemon=True).start()
    ready.wait()
    torch.set_num_threads(count)  # what the thread has set is the number of all that begin later


@torch.inference_mode()
def _work(tasks: Tasks, ready: threading.Event) -> None:
    torch.get_num_threads()  # takes the number of the others, which its first product would do
    torch.set_num_threads(1)
    ready.set()
    while (task := tasks.get()) is not None:
        call, outcome = task
        try:
            outcome.set_result(call())
        except BaseException as error:
            outcome.set_exception(error)
        del task, call, outcome  # keeps nothing alive that the next call waits for


AHEAD_BYTES = 256 << 20
"""Most bytes on the device that are not placed yet. A transfer has at most half of them; launched placements hold at
most half of them."""
GROWTH = 3
"""From page-locked memory, each transfer has this many times the layers of the previous transfer."""

WaitInterval = tuple[DeviceTimestamp, DeviceTimestamp]
"""Beginning and end of a time in which the computing device was idle, or placed loaded blocks."""

ReadLayers = list[SentLayers]
"""Some layers, of every source."""


class LayerLoader:
    """Loads one request's chunks into its buffer while a pass runs over the buffer.

    Chunks in page-locked memory are sent by several layers at once, the first layer alone; see `slab_source`. Others
    are sent layer by layer; see `block_source`. Chunks that are all on the device need neither a transfer nor a thread.

    The thread that computes calls `wait` and `stop`. Without a `transfer`, placement copies blocks to the device.

    Attributes:
        waits: waits of passes so far.
        nbytes: bytes placed so far.
    """

    def __init__(
        self,
        buffer: KVBuffer,
        ropes: Sequence[LayerRope],
        chunks: Sequence[LoadingChunk],
        *,
        transfer: HostToDevice | None,
        wait_budget: WaitBudget,
    ) -> None:
        self._device, self._n_layers, self._wait_budget = buffer.keys[0].device, len(ropes), wait_budget
        self._sources: list[BlockSource | SlabSource] = []
        others: Sequence[LoadingChunk] = chunks
        if transfer is not None:
            from qcfuse_rag.runtime.loading.slab_source import SlabSource, slabs_by_format

            slabs, others = slabs_by_format(chunks, buffer, transfer)
            self._sources += [SlabSource(buffer, ropes, group, transfer) for group in slabs]
        if others:
            self._sources.append(BlockSource(buffer, ropes, others, transfer))
        self._sends_several_layers = not others
        self._places_several_layers = all(source.joins_layers for source in self._sources)
        self._layers: queue.SimpleQueue[LateMissError | ReadLayers] = queue.SimpleQueue()
        self._peeked: LateMissError | ReadLayers | None = None
        self._n_placed = 0
        self._placing: deque[tuple[int, torch.cuda.Event]] = deque()
        self._released: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._stopped = False
        self.waits: list[WaitInterval] = []
        self.nbytes = 0
        if any(source.needs_thread for source in self._sources):
            threading.Thread(target=self._read, name="qcfuse-loading", daemon=True).start()
        else:
            self._read()

    def wait(self, layer: int | None = None) -> None:
        """Wait until all chunks are placed in a layer and in those before it; None waits for all layers.

        Raises:
            LateMissError: if a chunk cannot be read, or not in time. The buffer is then unusable.
        """
        last = self._n_layers - 1 if layer is None else layer
        while True:
            self._release_placed()  # before every wait, because the reading thread may be waiting for released bytes
            if self._n_placed > last:
                return
            began = DeviceTimestamp.on(self._device)
            try:
                with self._wait_budget.waiting():
                    layers = self._next_layers(self._wait_budget.left_s)
                self._place([layers, *self._arrived_layers()])
            except LateMissError:
                self.stop()
                raise
            finally:
                self.waits.append((began, DeviceTimestamp.on(self._device)))

    def stop(self) -> None:
        """Stop reading, and drop all references that a hanging thread would keep alive; safe to call again."""
        self._stopped = True
        self._released.put(0)
        self._peeked = None
        with suppress(queue.Empty):
            while True:
                self._layers.get_nowait()
        for source in self._sources:
            source.stop()

    def _next_layers(self, limit_s: float | None) -> ReadLayers:
        item, self._peeked = self._peeked, None
        if item is None:
            try:
                item = self._layers.get(timeout=limit_s)
            except queue.Empty:
                late = Miss(self._wait_budget.timeout_reason)
                starts = [start for source in self._sources for start in source.starts]
                raise LateMissError(dict.fromkeys(starts, late)) from None
        if isinstance(item, LateMissError):
            raise item
        return item

    def _arrived_layers(self) -> list[ReadLayers]:
        """Return later layers that have arrived too, about as many as are placed, to be placed by the same launch."""
        arrived: list[ReadLayers] = []
        while (
            self._places_several_layers
            and sum(len(read[0][0]) for read in arrived) < self._n_placed - 1
            and self._peeked is None
            and not self._layers.empty()
        ):
            item = self._layers.get()
            if isinstance(item, list) and all(handle is None or handle.is_complete for _, handle in item):
                arrived.append(item)
            else:
                self._peeked = item
        return arrived

    def _place(self, read: Sequence[ReadLayers]) -> None:
        for source, sent in zip(self._sources, zip(*read, strict=True), strict=True):
            self.nbytes += source.place(sent)
        self._n_placed += sum(len(sent[0][0]) for sent in read)
        if self._n_placed == self._n_layers:
            for source in self._sources:
                source.stop()
        transferred = sum(handle.nbytes for sent in read for _, handle in sent if handle is not None)
        if transferred:
            self._placing.append((transferred, torch.cuda.current_stream(self._device).record_event()))

    def _release_placed(self) -> None:
        """Let the reading thread go on by as many bytes as the device has placed.

        The host drops placed blocks long before that. To bound their memory, wait for the device while more than
        AHEAD_BYTES / 2 are being placed.
        """
        while self._placing:
            nbytes, placed = self._placing[0]
            if sum(pending for pending, _ in self._placing) > AHEAD_BYTES // 2:
                placed.synchronize()
            elif not placed.query():  # type: ignore[no-untyped-call]
                return
            self._placing.popleft()
            self._released.put(nbytes)

    def _read(self) -> None:
        """Read all blocks in the order in which passes need them; an error ends reading and is queued."""
        ahead, first, count = 0, 0, 1
        try:
            with torch.inference_mode():
                while first < self._n_layers and not self._stopped:
                    layers = range(first, min(first + count, self._n_layers))
                    read = [source.read(layers) for source in self._sources]
                    self._layers.put(read)
                    sent = sum(handle.nbytes for _, handle in read if handle is not None)
                    ahead += sent
                    while ahead > AHEAD_BYTES and not self._stopped:
                        ahead -= self._released.get()
                    first, count = layers.stop, self._next_count(len(layers), sent)
        except LateMissError as late:
            self._layers.put(late)
        except Exception as error:  # a pass may be waiting, whatever the error is
            starts = [start for source in self._sources for start in source.starts]
            self._layers.put(LateMissError(dict.fromkeys(starts, Miss(f"cannot be read: {error}"))))

    def _next_count(self, count: int, nbytes: int) -> int:
        if not self._sends_several_layers:
            return 1
        return max(1, min(GROWTH * count, AHEAD_BYTES // 2 * count // max(1, nbytes)))
