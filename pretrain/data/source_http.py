"""Files on an http(s) server."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import unquote, urljoin, urlsplit, urlunsplit
from urllib.request import getproxies, proxy_bypass

import urllib3
from urllib3.exceptions import HTTPError
from urllib3.util import Timeout, make_headers

from pretrain.data.sources import CHUNK_BYTES, Body, RefusedError, TransientError, distrusted, failure
from pretrain.data.urls import join_url
from pretrain.errors import UserError
from pretrain.redaction import redact

_MAX_REDIRECTS = 5
_REDIRECTS = (301, 302, 303, 307, 308)
_CONTENT_RANGE = re.compile(r"bytes (\d+)-\d+/(\d+|\*)")


class HttpSource:
    """A folder on an http(s) server; user and password may stand in its URL, a token in its query string."""

    def __init__(self, folder: str, read_timeout: float) -> None:
        """Prepare connections. Proxies are those of the environment (https_proxy, no_proxy).

        Raises:
            UserError: the URL's host or port is none.
        """
        parts = urlsplit(folder)
        try:
            host, port = parts.hostname or "", parts.port
        except ValueError as error:
            raise UserError(f"{redact(folder)}: {error}") from None
        address = f"[{host}]" if ":" in host else host
        self._folder = urlunsplit(parts._replace(netloc=address if port is None else f"{address}:{port}"))
        login = f"{unquote(parts.username or '')}:{unquote(parts.password or '')}"
        self._login = make_headers(basic_auth=login) if login != ":" else {}
        timeout = Timeout(connect=read_timeout, read=read_timeout)
        proxy = None if proxy_bypass(host) else getproxies().get(parts.scheme)
        self._pool = (
            urllib3.ProxyManager(proxy, timeout=timeout, retries=False)
            if proxy
            else urllib3.PoolManager(timeout=timeout, retries=False)
        )

    def describe(self, name: str) -> str:
        """The file's URL without passwords and tokens."""
        return redact(join_url(self._folder, name))

    @contextmanager
    def open(self, name: str, start: int) -> Iterator[Body]:
        """The file of that name from byte ``start`` on; see :class:`pretrain.data.sources.Source`."""
        response = self._ask(name, start)
        try:
            yield self._body(response, start)
        finally:
            # Not returned to the pool: what is left of a body could be many gigabytes.
            response.close()

    def _ask(self, name: str, start: int) -> urllib3.BaseHTTPResponse:
        url = join_url(self._folder, name)
        own_host = urlsplit(url).netloc
        headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={start}-"} if start else {})
        for _ in range(_MAX_REDIRECTS):
            login = self._login if urlsplit(url).netloc == own_host else {}
            try:
                response = self._pool.request(
                    "GET", url, headers=headers | login, redirect=False, preload_content=False
                )
            except HTTPError as error:
                raise self._broken(error, name) from error
            if response.status in (200, 206):
                return response
            response.close()
            if response.status not in _REDIRECTS:
                raise failure(response.status, self.describe(name), response.reason or "")
            url = self._redirected(url, response.headers.get("Location", ""), name)
        raise RefusedError(f"{self.describe(name)}: more than {_MAX_REDIRECTS} redirects; see that the URL is right")

    def _redirected(self, url: str, location: str, name: str) -> str:
        """Where a redirect leads: to http or https alone, and never from https to http."""
        target = urljoin(url, location)
        allowed = ("https",) if urlsplit(url).scheme == "https" else ("http", "https")
        if not location or urlsplit(target).scheme not in allowed:
            shown = redact(target) if location else "nowhere"
            raise RefusedError(
                f"{self.describe(name)}: redirected to {shown}, which is not followed; give the URL itself"
            )
        return target

    def _body(self, response: urllib3.BaseHTTPResponse, asked: int) -> Body:
        if response.status == 200:
            length = response.headers.get("Content-Length", "")
            return Body(0, int(length) if length.isdecimal() else None, self._chunks(response))
        found = _CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", ""))
        if not found or int(found[1]) != asked:
            raise TransientError("the server sent another range than it was asked for")
        return Body(asked, int(found[2]) if found[2] != "*" else None, self._chunks(response))

    def _chunks(self, response: urllib3.BaseHTTPResponse) -> Iterator[bytes]:
        try:
            yield from response.stream(CHUNK_BYTES, decode_content=False)
        except (HTTPError, OSError) as error:
            raise TransientError(_reason(error)) from error

    def _broken(self, error: HTTPError, name: str) -> Exception:
        return distrusted(error, self.describe(name), "SSL_CERT_FILE") or TransientError(_reason(error))


def _reason(error: Exception) -> str:
    """What happened, without the connection objects that urllib3 prints."""
    return redact(re.sub(r"<[^>]*>|\w+Connection\(.*?\): ", "", str(error))).strip() or type(error).__name__
