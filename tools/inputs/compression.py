"""Decompressed byte streams that raise when their file is cut off or damaged."""

import gzip
import io
import zlib
from collections.abc import Callable
from typing import BinaryIO, cast

import zstandard

# What reading a damaged stream raises; gzip.BadGzipFile is an OSError, so this goes before any handling of those.
DAMAGE = (EOFError, gzip.BadGzipFile, zlib.error, zstandard.ZstdError)

_CHUNK_BYTES = 1 << 17


class _ZstandardStream(io.RawIOBase):
    """Decompresses the frames of a file one after the other.

    zstandard's own stream reader takes the end of a file in the midst of a frame for the end of the data.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._frame = self._new_frame()
        self._inside = False  # of a frame
        self._ready = memoryview(b"")

    @staticmethod
    def _new_frame() -> "zstandard.ZstdDecompressionObj":
        return zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]  # typeshed asks for any buffer
        while not self._ready:
            content = self._frame.unused_data if self._frame.eof else b""
            if self._frame.eof:
                self._frame = self._new_frame()
                self._inside = False
            content = content or self._file.read(_CHUNK_BYTES)
            if not content:
                if self._inside:
                    raise EOFError("the file ends inside a frame")
                return 0
            self._inside = True
            self._ready = memoryview(self._frame.decompress(content))
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count


def _open_gzip(file: BinaryIO) -> BinaryIO:
    # Not behind a buffer of ours: that would lose what lies before the damage.
    return cast("BinaryIO", gzip.GzipFile(fileobj=file))


def _open_zstandard(file: BinaryIO) -> BinaryIO:
    return io.BufferedReader(_ZstandardStream(file), _CHUNK_BYTES)


OPENERS: dict[str, Callable[[BinaryIO], BinaryIO]] = {
    "": lambda file: file,
    "gzip": _open_gzip,
    "zstandard": _open_zstandard,
}
