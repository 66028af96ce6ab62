"""What a tar of raw text holds, counted from the bytes that pass by, whatever a reader makes of them.

A reader that meets a damaged header takes it for the end of the tar, and says nothing. The census looks for the next
sound header instead, so what the reader did not give can be counted.
"""

import re
import tarfile

from webdataset.tariterators import base_plus_ext

TEXT_SUFFIXES = ("txt", "json")

_BLOCK = tarfile.BLOCKSIZE
_ZEROS = tarfile.NUL * _BLOCK
_META = re.compile(r"__[^/]*__($|/)")  # webdataset passes such members over
_PAX_PATH = re.compile(rb"(?:^|\n)\d+ path=([^\n]*)\n")
_LONGEST_NAME = 1 << 20

# Headers that belong to the one behind them; the first three may carry its name.
_NAMING = (tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE)
_LEADING = (*_NAMING, tarfile.GNUTYPE_LONGLINK, tarfile.XGLTYPE)


def split_name(name: str) -> tuple[str | None, str]:
    """A member's sample and, in lower case, its suffix, as webdataset splits them; None: it belongs to no sample."""
    key, suffix = (None, None) if _META.match(name) else base_plus_ext(name)
    return key, (suffix or "").lower()


class TarCensus:
    """Counts while it is fed a tar from its first byte on.

    Attributes:
        documents: samples with a member .txt or .json, by the headers that are sound.
        textless: samples without.
        unnamed: files whose name has no suffix, so that they belong to no sample.
        first_gap: first byte that is no sound header where there should be one; None where there always is.
        cut: after :meth:`finish`, whether the tar ends before its end mark.
        joined: whether another tar follows behind the end mark.
    """

    def __init__(self) -> None:
        self.documents = 0
        self.textless = 0
        self.unnamed = 0
        self.first_gap: int | None = None
        self.cut = False
        self.joined = False
        self._place = 0  # of the first byte of _rest
        self._rest = b""
        self._skip = 0  # payload still to come
        self._naming: tarfile.TarInfo | None = None
        self._name_bytes = b""
        self._name: str | None = None
        self._gap: int | None = None  # where the present one begins
        self._end: int | None = None  # where a mark of the end was met
        self._start = 0  # of the present one of joined tars
        self._last_is_zeros = False
        self._gaps_before_files = 0
        self._other_gaps = 0
        self._led = False  # whether files have leading headers, and the header just met is one
        self._leads = False
        self._key: str | None = None
        self._has_text = False
        self._text_key: str | None = None
        self._text_suffixes: set[str] = set()
        self._one_member_each = True

    @property
    def documents_in_gaps(self) -> int:
        """Documents whose own headers the gaps held, as far as can be told: one for each gap.

        None where samples have several members, by another of which they may be counted; and none for a gap in the
        place of a leading header, behind which the file's own is sound.
        """
        if not self._one_member_each:
            return 0
        return self._other_gaps + (0 if self._led else self._gaps_before_files)

    def feed(self, chunk: bytes) -> None:
        """Take the next bytes."""
        data = self._rest + chunk if self._rest else chunk
        at = 0
        while True:
            step = min(self._skip, len(data) - at)
            if self._naming is not None:
                self._name_bytes += data[at : at + step]
            self._skip -= step
            at += step
            if self._skip or len(data) - at < _BLOCK:
                break
            self._block(data[at : at + _BLOCK], self._place + at)
            at += _BLOCK
        self._place += at
        self._rest = data[at:]

    def finish(self) -> None:
        """There are no more bytes."""
        self._close_sample()
        self._other_gaps += self._gap is not None
        self._gap = None
        self.cut = not self._last_is_zeros or bool(self._skip or self._rest)

    def _block(self, block: bytes, place: int) -> None:
        """A header, the mark of the end, or what stands in the place of one."""
        self._last_is_zeros = block == _ZEROS
        if self._last_is_zeros:
            self._end = place if self._end is None else self._end
            return
        found = self._header(block)
        if found is None:
            self._begin_gap(place if self._end is None else self._end)
            return
        if self._end is not None and self._gap is None:  # what looked like the end was none
            if (place - self._start) % tarfile.RECORDSIZE == 0 and place - self._end >= 2 * _BLOCK:
                self.joined, self._start = True, place
            else:
                self._begin_gap(self._end)
        self._close_gap(found)
        self._end = None
        self._take(found)

    def _header(self, block: bytes) -> tarfile.TarInfo | None:
        """The header in a block; where one must be looked for, only one that says of itself what it is."""
        if (self._gap is not None or self._end is not None) and block[257:262] != b"ustar":
            return None
        try:
            found = tarfile.TarInfo.frombuf(bytearray(block), "utf-8", "surrogateescape")
        except tarfile.HeaderError:
            return None
        return found if found.size >= 0 else None

    def _begin_gap(self, place: int) -> None:
        if self._gap is None:
            self._gap = place
            self.first_gap = place if self.first_gap is None else self.first_gap
            self._name = self._naming = None

    def _close_gap(self, found: tarfile.TarInfo) -> None:
        if self._gap is not None:
            self._gap = None
            self._gaps_before_files += found.isreg()
            self._other_gaps += not found.isreg()
            self._leads = False

    def _take(self, found: tarfile.TarInfo) -> None:
        self._finish_name()
        # Links and folders have no payload, whatever their size says.
        if found.isreg() or found.type not in tarfile.SUPPORTED_TYPES or found.type in tarfile.GNU_TYPES:
            self._skip = -(-found.size // _BLOCK) * _BLOCK
        if found.type in _LEADING:
            self._leads = True
            if found.type in _NAMING and found.size <= _LONGEST_NAME:
                self._naming, self._name_bytes = found, b""
            return
        if found.isreg():
            self._led |= self._leads
            self._member(self._name or found.name)
        self._leads, self._name = False, None

    def _finish_name(self) -> None:
        """The name that the payload of a leading header carried, if it did."""
        if self._naming is None:
            return
        content = self._name_bytes[: self._naming.size]
        path = None if self._naming.type == tarfile.GNUTYPE_LONGNAME else _PAX_PATH.search(content)
        if self._naming.type == tarfile.GNUTYPE_LONGNAME or path is not None:
            self._name = (path[1] if path else content.rstrip(b"\0")).decode("utf-8", "surrogateescape")
        self._naming = None

    def _member(self, name: str) -> None:
        key, suffix = split_name(name)
        if key is None:
            self.unnamed += not _META.match(name)
            return
        if key == self._key:
            self._one_member_each = False
        else:
            self._close_sample()
            self._key, self._has_text = key, False
        if suffix not in TEXT_SUFFIXES:
            return
        self._has_text = True
        # A suffix that comes again begins another document, which webdataset refuses.
        if key != self._text_key or suffix in self._text_suffixes:
            self.documents += 1
            self._text_key, self._text_suffixes = key, set()
        self._text_suffixes.add(suffix)

    def _close_sample(self) -> None:
        if self._key is not None and not self._has_text:
            self.textless += 1
        self._key = None
