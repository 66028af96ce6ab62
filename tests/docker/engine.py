"""Podman with a storage of its own, and a plain Debian to build on.

Needs root, and Debian's packages podman, runc and mmdebstrap, which it installs when they are missing. Packages of
Python come from where pip's configuration on this machine says; the image must not remember that, so it is given to the
build alone: a pip.conf as a secret, and folders of this machine as mounts.
"""

import ast
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from urllib.parse import urlsplit

from tests.launch import REPOSITORY

PROGRAMS = ("podman", "runc", "mmdebstrap")
PACKAGES = ("podman", "buildah", "runc", "mmdebstrap", "debian-archive-keyring")
CONFIGURATION = """
[containers]
default_ulimits = ["nofile=1024:1024", "nproc=4096:4096"]
[engine]
cgroup_manager = "cgroupfs"
events_logger = "file"
runtime = "runc"
"""
"""Lowered limits and no systemd, so that it also runs where this machine is itself a container."""
BASE = "localhost/plain-debian:test"


class Engine:
    """Builds and runs images in a folder that :meth:`close` removes.

    Attributes:
        private: places on this machine and hosts that a build saw, and that no image may name.
    """

    def __init__(self) -> None:
        """Install what is missing, and import a Debian made by mmdebstrap as :data:`BASE`."""
        assert os.geteuid() == 0, "tests marked container run podman as root"
        install()
        self._folder = folder = Path(tempfile.mkdtemp(prefix="images-", dir="/var/tmp"))  # podman wants a short path
        self._configuration = folder / "containers.conf"
        self._configuration.write_text(CONFIGURATION, encoding="utf-8")
        self._secret, self._mounts, self.private = folder / "pip.conf", list[str](), list[str]()
        self._write_pip_conf()
        archive = folder / "debian.tar"
        try:
            subprocess.run(["mmdebstrap", "--quiet", "--variant=minbase", "bookworm", archive], check=True, timeout=900)
            self.podman("import", str(archive), BASE)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Remove all containers, images and files."""
        self.podman("rm", "--all", "--force")
        shutil.rmtree(self._folder)

    def podman(self, *arguments: str, timeout: float = 300, check: bool = True) -> str:
        """A command of podman's; returns what it writes, on both channels."""
        done = subprocess.run(
            ["podman", "--root", self._folder / "images", "--runroot", self._folder / "run", *arguments],
            cwd=REPOSITORY,
            env=os.environ | {"CONTAINERS_CONF": str(self._configuration), "TMPDIR": str(self._folder)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
            timeout=timeout,
        )
        assert done.returncode == 0 or not check, f"podman {' '.join(arguments)}\n{done.stdout[-6000:]}"
        return done.stdout

    def build(self, tag: str, *options: str, file: Path, context: Path = REPOSITORY, base: str = BASE) -> str:
        """``podman build``; returns its output."""
        return self.podman(
            *("build", "--layers", "--format=docker", "--isolation=chroot", "--network=host"),
            *("--file", str(file), "--tag", tag, "--build-arg", f"BASE_IMAGE={base}"),
            *("--secret", f"id=pip_conf,src={self._secret}"),
            *(f"--volume={mount}:ro" for mount in self._mounts),
            *options,
            str(context),
            timeout=1800,
        )

    def run(self, image: str, *command: str, options: tuple[str, ...] = (), timeout: float = 300) -> str:
        """A command in a new container without a network."""
        return self.podman(
            *("run", "--rm", "--network=none", "--pids-limit=4096"), *options, image, *command, timeout=timeout
        )

    def _write_pip_conf(self) -> None:
        """pip's settings here, with what lies on this machine mounted at neutral places."""
        lines = ["[global]"]
        for name, value in pip_settings().items():
            words = [self._seen_in_a_build(word) for word in value.split() if not word.startswith("file:")]
            lines += [f"{name} = {' '.join(words)}"] if words else []
        self._secret.write_text("\n".join(lines) + "\n", encoding="utf-8")

    def _seen_in_a_build(self, word: str) -> str:
        if Path(word).is_absolute():
            if Path(word).is_dir():  # a certificate's path is the same on every Debian
                self.private.append(word)
            target = f"/mnt/pip/{len(self._mounts)}"
            self._mounts.append(f"{word}:{target}")
            return target
        host = urlsplit(word).hostname
        self.private += [host] if host else []
        return word


def pip_settings() -> dict[str, str]:
    """Where pip takes packages from on this machine."""
    done = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True, timeout=60
    )
    found = dict[str, str]()
    for line in sorted(done.stdout.splitlines(), key=lambda line: line.startswith(":env:")):  # the environment wins
        key, _, value = line.partition("=")
        name = key.removeprefix(":env:.").removeprefix("global.")
        if name in ("index-url", "extra-index-url", "find-links", "trusted-host", "cert"):
            found[name] = ast.literal_eval(value)
    return found


def install() -> None:
    """Debian's packages, when a program is missing."""
    if all(map(shutil.which, PROGRAMS)):
        return
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    for command in (("update",), ("install", "-y", "--no-install-recommends", *PACKAGES)):
        subprocess.run(["apt-get", *command], env=environment, check=True, timeout=600)
