"""SeaweedFS as an S3 server."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
import botocore.exceptions
from botocore.config import Config

from tests.launch import free_port

BUCKET = "corpora"
ACCESS_KEY, SECRET_KEY = "tester", "secret-of-the-test"
_START_SECONDS = 60


@dataclass(frozen=True)
class S3Server:
    """A running server with one empty bucket, ``BUCKET``."""

    port: int
    client: Any

    def upload(self, folder: Path, prefix: str) -> None:
        """All files of a folder."""
        for file in sorted(folder.iterdir()):
            self.client.upload_file(str(file), BUCKET, f"{prefix}/{file.name}")


def variables(port: int) -> dict[str, str]:
    """What an AWS program's environment needs to use the server through a port."""
    return {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "NO_PROXY": "127.0.0.1",
        "no_proxy": "127.0.0.1",
    }


@contextmanager
def s3_server(folder: Path) -> Iterator[S3Server]:
    """Start the server on free ports with its files in ``folder``, and stop it at the end."""
    names = ("master.port", "volume.port", "filer.port", "s3.port")
    ports = {option: free_port() for name in names for option in (name, f"{name}.grpc")}
    identity = {"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}
    (folder / "identities.json").write_text(
        json.dumps({"identities": [{"name": "tester", "credentials": [identity], "actions": ["Admin"]}]})
    )
    command = [
        *(
            str(Path(sys.executable).with_name("weed")),
            "server",
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",
            f"-dir={folder}",
        ),
        *("-s3", f"-s3.config={folder / 'identities.json'}", "-s3.port.iceberg=0", "-s3.port.lance=0"),
        *("-master.volumeSizeLimitMB=64", "-volume.max=16", *(f"-{name}={port}" for name, port in ports.items())),
    ]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
    try:
        yield S3Server(ports["s3.port"], _wait_for_bucket(ports["s3.port"], process, folder / "log"))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait_for_bucket(port: int, process: subprocess.Popen[bytes], log: Path) -> Any:
    """A client, once the server takes a first file."""
    client = boto3.client(
        "s3",
        endpoint_url=f"http://127.0.0.1:{port}",
        aws_access_key_id=ACCESS_KEY,
        aws_secret_access_key=SECRET_KEY,
        region_name="us-east-1",
        config=Config(retries={"total_max_attempts": 1}, connect_timeout=1, proxies={}),
    )
    deadline = time.monotonic() + _START_SECONDS
    for request in (
        lambda: client.create_bucket(Bucket=BUCKET),
        lambda: client.put_object(Bucket=BUCKET, Key="first", Body=b"first"),
    ):
        while True:
            try:
                request()
                break
            except (botocore.exceptions.BotoCoreError, botocore.exceptions.ClientError) as error:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise AssertionError(f"no S3 server: {error}\n{log.read_text()[-2000:]}") from error
                time.sleep(0.1)
    return client
