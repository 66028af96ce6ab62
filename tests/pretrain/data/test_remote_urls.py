"""Places: which are allowed, how names join them, what of them is shown; redirects and logins on a real server."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from pretrain.data.sources import open_source
from pretrain.data.transfer import Patience, read_whole
from pretrain.data.urls import is_remote, join_url, local_path, require_plain_name, split_url
from pretrain.errors import UserError
from pretrain.redaction import redact
from tests.servers.http import HttpServer, http_server


@pytest.mark.parametrize(
    "place",
    [
        "pipe:touch owned",
        "pipe://touch owned",
        "ftp://host/manifest.json",
        "gs://bucket/manifest.json",
        "javascript:alert(1)",
        "data:,{}",
        "hdfs://x/y",
        "ssh://host/x",
    ],
)
def test_other_schemes_are_refused(place: str) -> None:
    with pytest.raises(UserError, match="is not supported; give a path, or a URL of file, http, https or s3"):
        is_remote(place)


def test_a_scheme_without_slashes_is_no_url() -> None:
    with pytest.raises(UserError, match=r"a URL begins http://; a path that holds a colon is written \./http:"):
        is_remote("http:host/manifest.json")


def test_places() -> None:
    assert [is_remote(place) for place in ("s3://b/m", "http://h/m", "HTTPS://h/m")] == [True] * 3
    assert [is_remote(place) for place in ("m.json", "/a/m.json", "./a:b/m.json", "file:///a/m.json")] == [False] * 4
    assert local_path("a/b%20c") == Path("a/b%20c")
    assert local_path("file:///a/b%20c") == Path("/a/b c")
    with pytest.raises(UserError, match="a file URL names no host"):
        local_path("file://host/a")


def test_folders_and_names() -> None:
    assert split_url("s3://bucket/a/b/manifest.json") == ("s3://bucket/a/b", "manifest.json")
    assert split_url("https://u:p@h:1/m.json?sig=x#top") == ("https://u:p@h:1?sig=x", "m.json")
    assert join_url("https://h/a?sig=x", "t%2F r.tar") == "https://h/a/t%252F%20r.tar?sig=x"
    for url in ("s3://bucket", "s3://bucket/", "http:///m.json", "https://h/folder/"):
        with pytest.raises(UserError, match="names server and file"):
            split_url(url)


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "a/b", "a\\b", "/etc/passwd", "pipe:x", "a\nb", "a\0b"])
def test_names_that_lead_elsewhere_are_refused(name: str) -> None:
    with pytest.raises(UserError, match="is no plain file name"):
        require_plain_name(name)
    with pytest.raises(UserError, match="is no plain file name"):
        join_url("http://h/a", name)


def test_what_is_secret_in_a_url_is_not_shown() -> None:
    text = "see https://user:pass@host:8/a/m.json?X-Amz-Signature=abc&b=c#d, or s3://KEY:SECRET@bucket/x and file:///y"
    shown = redact(text)
    assert shown == "see https://***@host:8/a/m.json?***#*** or s3://***@bucket/x and file:///y"
    assert redact("plain text, a/b?c=d, user@host") == "plain text, a/b?c=d, user@host"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[HttpServer]:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "m.json").write_bytes(b"content")
    with http_server(tmp_path) as running:
        yield running


def read(url: str) -> bytes:
    folder, name = split_url(url)
    return read_whole(open_source(folder, 2), name, 100, Patience(timeout=1))


def test_user_and_password_of_the_url(server: HttpServer) -> None:
    server.login = "us er:p@ss"
    assert read(f"http://us%20er:p%40ss@127.0.0.1:{server.port}/folder/m.json") == b"content"
    with pytest.raises(UserError) as raised:
        read(f"http://us%20er:wrong@127.0.0.1:{server.port}/folder/m.json")
    assert str(raised.value) == (
        f"http://127.0.0.1:{server.port}/folder/m.json: the server answers 401 Unauthorized; give credentials"
    )


def test_a_token_goes_with_the_request_and_not_into_messages(server: HttpServer) -> None:
    assert read(f"http://127.0.0.1:{server.port}/folder/m.json?sig=token") == b"content"
    assert server.log == [("/folder/m.json?sig=token", None)]
    with pytest.raises(UserError, match=r"/folder/absent\?\*\*\*: the server answers 404") as raised:
        read(f"http://127.0.0.1:{server.port}/folder/absent?sig=token")
    assert "token" not in str(raised.value)


def test_redirects_lead_to_http_alone_and_without_the_password(server: HttpServer, tmp_path: Path) -> None:
    server.redirects = {"/a/m.json": "/folder/m.json"}
    assert read(f"http://u:p@127.0.0.1:{server.port}/a/m.json") == b"content"
    assert None not in server.logins
    with http_server(tmp_path) as other:
        server.redirects = {"/a/m.json": f"http://127.0.0.1:{other.port}/folder/m.json"}
        assert read(f"http://u:p@127.0.0.1:{server.port}/a/m.json") == b"content"
        assert other.logins == [None]
    for target in ("file:///etc/passwd", "ftp://127.0.0.1/m.json", "s3://bucket/m.json", "pipe:touch owned", ""):
        server.redirects = {"/a/m.json": target}
        with pytest.raises(UserError, match=r"/a/m.json: redirected to .*, which is not followed; give the URL itself"):
            read(f"http://127.0.0.1:{server.port}/a/m.json")
    server.redirects = {"/a/m.json": "/a/m.json"}
    with pytest.raises(UserError, match="more than 5 redirects"):
        read(f"http://127.0.0.1:{server.port}/a/m.json")


def test_a_manifest_of_any_length_is_not_swallowed(server: HttpServer) -> None:
    (server.folder / "folder" / "m.json").write_bytes(bytes(101))
    with pytest.raises(UserError, match="has more than 100 bytes; is it the right file"):
        read(f"http://127.0.0.1:{server.port}/folder/m.json")


def test_an_s3_url_holds_no_credentials() -> None:
    with pytest.raises(UserError) as raised:
        open_source("s3://KEY:SECRET@bucket/folder", 2)
    assert str(raised.value).startswith("s3://***@bucket/folder: an s3 URL holds bucket and folder alone; credentials")


def test_a_port_that_is_none() -> None:
    with pytest.raises(UserError, match=r"http://\*\*\*@host:99999999/folder: Port out of range"):
        open_source("http://u:p@host:99999999/folder", 2)
