"""CUDA streams for the tracks of a plan, and how they are ordered, for any array library."""

from __future__ import annotations

import abc
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, Self, TypeVar

from crossdevice.backends.protocol import Array
from crossdevice.values.device import Device, Track

Result = TypeVar("Result")


class CudaStreams(abc.ABC):
    """Side streams that begin after, and are waited for by, the current stream of every device they touch.

    A track between two GPUs is a stream on each, so that neither a copy's reading nor its writing end waits
    for what its device computes. The host's ends have no stream: what is copied to the host is there when
    the copy returns.

    Streams are kept for the next run, apart for every current stream that they serve. So memory that one
    run made, and the caller let go, is used again only after what the caller did with it.
    """

    _kept: ClassVar[dict[Any, Any]]

    def __init__(self, devices: Iterable[Device]) -> None:
        self._device = self.current_device()
        self._current = {device: self.current_stream(device) for device in devices if not device.is_host}
        self._begun = {device: self.event_on(stream) for device, stream in self._current.items()}
        self._opened: dict[Track, tuple[Any, ...]] = {}
        self._tracks: tuple[Track, ...] = ()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        """Makes the current streams of both ends wait for each track, and for its reads of the inputs."""
        try:
            for track, streams in self._opened.items():
                if streams:
                    done = self.event_on(streams[-1])
                    for device in _gpus(track):
                        self.make_wait(self._current[device], done)
        finally:
            # Not after every step: switching costs more than a small copy.
            for stream in self._current.values():
                self.use(stream)
            self.use_device(self._device)

    def switch_to(self, tracks: tuple[Track, ...]) -> None:
        """Makes the streams of these tracks the current ones, and the last one's device the current one."""
        if tracks and tracks != self._tracks:
            for track in tracks:
                for stream in self._streams(track):
                    self.use(stream)
            self._tracks = tracks

    def mark(self, tracks: Sequence[Track]) -> list[Any]:
        """Records an event on each track; for a copy on the target's stream, which waits for the source's."""
        return [self.event_on(streams[-1]) for streams in map(self._streams, tracks) if streams]

    def wait(self, tracks: Sequence[Track], mark: list[Any]) -> None:
        """Makes all streams of these tracks wait for the events."""
        for track in tracks:
            for stream in self._streams(track):
                for event in mark:
                    self.make_wait(stream, event)

    def keep(self, array: Array, tracks: Sequence[Track]) -> None:
        """Tells the library's allocator which streams read the array."""
        for track in tracks:
            for stream in self._streams(track):
                self.keep_for(stream, array)

    def hand_over(self, array: Array, device: Device) -> None:
        """Tells the allocator about the caller's stream: PyTorch may give one stream to several tracks."""
        if not device.is_host:
            self.keep_for(self._current[device], array)

    def _streams(self, track: Track) -> tuple[Any, ...]:
        opened = self._opened.get(track)
        if opened is None:
            gpus = _gpus(track)
            serves = tuple(self.handle_of(self._current[device]) for device in gpus)
            opened = tuple(self._stream((track, device, serves), device) for device in gpus)
            for stream in opened:
                for device in gpus:
                    self.make_wait(stream, self._begun[device])
            self._opened[track] = opened
        return opened

    def _stream(self, key: object, device: Device) -> Any:
        if key not in self._kept:
            self._kept.setdefault(key, self.new_stream(device))
        return self._kept[key]

    def turn_aside(self) -> None:
        """Makes a side stream the current one of each device."""
        for device, current in self._current.items():
            side = self._stream(("aside", device, self.handle_of(current)), device)
            self.make_wait(side, self._begun[device])
            self.use(side)

    def turn_back(self) -> dict[Device, Any]:
        """Makes the streams current that were; returns an event at the end of each side stream."""
        events = {device: self.event_on(self.current_stream(device)) for device in self._current}
        for stream in self._current.values():
            self.use(stream)
        self.use_device(self._device)
        return events

    @abc.abstractmethod
    def new_stream(self, device: Device) -> Any:
        """Returns a stream that does not wait for the default stream."""

    @abc.abstractmethod
    def current_stream(self, device: Device) -> Any:
        """Returns the stream on which the calling thread works on this device."""

    @abc.abstractmethod
    def handle_of(self, stream: Any) -> int:
        """Returns CUDA's handle of the stream."""

    @abc.abstractmethod
    def use(self, stream: Any) -> None:
        """Makes it the current stream of its device, and its device the current one."""

    @abc.abstractmethod
    def current_device(self) -> Any:
        """Returns the device that the library works on when none is named."""

    @abc.abstractmethod
    def use_device(self, device: Any) -> None:
        """Makes it the current device again."""

    @abc.abstractmethod
    def event_on(self, stream: Any) -> Any:
        """Returns an event that happens when all work queued on the stream so far is done."""

    @abc.abstractmethod
    def has_happened(self, event: Any) -> bool:
        """Returns True once everything queued on the stream before the event is done."""

    @abc.abstractmethod
    def make_wait(self, stream: Any, event: Any) -> None:
        """Makes later work on the stream wait for the event."""

    @abc.abstractmethod
    def keep_for(self, stream: Any, array: Array) -> None:
        """Keeps the array's memory until the stream reaches this point."""


class SideStreams:
    """Streams beside the current one of every GPU, for work that the current ones do not wait for.

    Inside the block the library works on the side streams, after all that the current streams have by then.
    """

    def __init__(self, streams: CudaStreams) -> None:
        self._streams = streams
        self._done: dict[Device, Any] = {}

    def __enter__(self) -> Self:
        self._streams.turn_aside()
        return self

    def __exit__(self, *failure: object) -> None:
        self._done = self._streams.turn_back()

    def are_done(self) -> bool:
        """Returns True once the GPUs have finished the work on the side streams."""
        return all(map(self._streams.has_happened, self._done.values()))

    def join(self) -> None:
        """Makes later work on the current streams wait for the side streams."""
        for device, event in self._done.items():
            self._streams.make_wait(self._streams.current_stream(device), event)


def on_current_stream(work: Callable[[], Result]) -> Callable[[], Result]:
    """Wraps work for another thread: it runs there on this thread's current GPU and PyTorch stream.

    So it comes after what this thread has put on that stream; each thread has current streams of its own.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return work
    stream = torch.cuda.current_stream()

    def run() -> Result:
        with torch.cuda.stream(stream):
            return work()

    return run


def _gpus(track: Track) -> list[Device]:
    """Returns the ends that have streams, the target last."""
    return [device for device in dict.fromkeys(track) if not device.is_host]
