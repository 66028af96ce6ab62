"""Files in an S3 bucket, by the AWS SDK's own rules for credentials, region and endpoint."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import unquote, urlsplit

import boto3
import botocore.exceptions as errors
import urllib3.exceptions
from botocore import UNSIGNED
from botocore.config import Config

from pretrain.data.sources import CHUNK_BYTES, Body, RefusedError, TransientError, distrusted, failure
from pretrain.data.urls import join_url, require_plain_name
from pretrain.errors import UserError
from pretrain.redaction import redact

_CONTENT_RANGE = re.compile(r"bytes (\d+)-\d+/(\d+)")
_PASSING = (
    errors.ConnectionError,
    errors.HTTPClientError,
    errors.IncompleteReadError,
    errors.CredentialRetrievalError,
    urllib3.exceptions.HTTPError,
    OSError,
)


class S3Source:
    """A folder in a bucket. Without any credentials in sight requests go unsigned, as public buckets allow."""

    def __init__(self, folder: str, read_timeout: float) -> None:
        """Prepare a client (AWS_ACCESS_KEY_ID, AWS_PROFILE, AWS_ENDPOINT_URL, ~/.aws and so on decide).

        Raises:
            UserError: the URL holds more than bucket and folder, or the SDK's own settings are wrong.
        """
        parts = urlsplit(folder)
        if "@" in parts.netloc or parts.query:
            raise UserError(
                f"{redact(folder)}: an s3 URL holds bucket and folder alone; credentials are given as to any AWS "
                "program, for example by AWS_ACCESS_KEY_ID"
            )
        self._folder = folder
        self._bucket = parts.netloc
        self._prefix = unquote(parts.path).lstrip("/")
        try:
            session = boto3.Session()
            signing = {} if session.get_credentials() else {"signature_version": UNSIGNED}
            self._client: Any = session.client(
                "s3",
                region_name=session.region_name or "us-east-1",
                config=Config(
                    # Tries are counted in one place, pretrain.data.transfer, and content is verified by sha256.
                    retries={"total_max_attempts": 1},
                    response_checksum_validation="when_required",
                    connect_timeout=read_timeout,
                    read_timeout=read_timeout,
                    **signing,
                ),
            )
        except (errors.BotoCoreError, ValueError) as error:
            raise UserError(f"{redact(folder)}: {redact(str(error))}") from error

    def describe(self, name: str) -> str:
        """The file's URL without passwords and tokens."""
        return redact(join_url(self._folder, name))

    @contextmanager
    def open(self, name: str, start: int) -> Iterator[Body]:
        """The file of that name from byte ``start`` on; see :class:`pretrain.data.sources.Source`."""
        require_plain_name(name)
        key = f"{self._prefix}/{name}" if self._prefix else name
        try:
            answer = self._client.get_object(
                Bucket=self._bucket, Key=key, **({"Range": f"bytes={start}-"} if start else {})
            )
        except errors.ClientError as error:
            status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
            raise failure(status, self.describe(name), str(error.response.get("Error", {}).get("Code", ""))) from error
        except _PASSING as error:
            refused = distrusted(error, self.describe(name), "AWS_CA_BUNDLE")
            raise refused or TransientError(redact(str(error))) from error
        except errors.BotoCoreError as error:
            raise RefusedError(f"{self.describe(name)}: {redact(str(error))}") from error
        stream = answer["Body"]
        try:
            yield self._body(answer, stream, start)
        finally:
            stream.close()

    def _body(self, answer: dict[str, Any], stream: Any, asked: int) -> Body:
        found = _CONTENT_RANGE.fullmatch(answer.get("ContentRange", ""))
        if not found:
            return Body(0, int(answer["ContentLength"]), self._chunks(stream))
        if int(found[1]) != asked:
            raise TransientError("the server sent another range than it was asked for")
        return Body(asked, int(found[2]), self._chunks(stream))

    def _chunks(self, stream: Any) -> Iterator[bytes]:
        try:
            while chunk := stream.read(CHUNK_BYTES):
                yield chunk
        except _PASSING as error:
            raise TransientError(redact(str(error))) from error
