import subprocess
import sys

from tests.launch import REPOSITORY

TALKATIVE = "from pretrain.errors import run_cli; run_cli(lambda: [print('line') for _ in range(10**6)])"


def test_a_reader_that_has_had_enough_is_no_error() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", TALKATIVE], cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait() == 1
