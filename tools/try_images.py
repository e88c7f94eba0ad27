#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Execute docker/*.Dockerfile without Docker, start what they start, and check what they promise.

    python tools/try_images.py [ops serve train] [--chroot] [--build-arg NAME=VALUE] [--keep FOLDER]

``tools/run_dockerfile.py`` executes the steps: in a virtual environment, or with ``--chroot`` in a Debian that
debootstrap makes. Then the entry point is started as the user of the image. A server must answer its health check and
a request, and end with SIGTERM; another program must end with status 0. The packages of ``ops`` may take 60 MB more
than torch.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import run_dockerfile
from run_dockerfile import ChrootRoot, DockerfileError, Image, Root, StepError, VenvRoot

ROOT = Path(__file__).resolve().parent.parent
DOCKER = ROOT / "docker"
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
#: Megabytes of the packages above torch.
LIMITS = {"ops": 60}
#: Seconds until a server has to answer; the model is tiny, the machine may be busy.
START = 300


def torch_index() -> str:
    """Return the index for torch: the public one if it answers, else that of pip's own settings."""
    wanted = os.environ.get("TORCH_INDEX_URL", "")
    if wanted:
        return wanted
    try:
        with urllib.request.urlopen(f"{TORCH_INDEX}/torch/", timeout=10):  # noqa: S310
            return TORCH_INDEX
    except OSError as error:
        command = [sys.executable, "-m", "pip", "config", "get", "global.index-url"]
        found = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
        index = os.environ.get("PIP_INDEX_URL", found) or "https://pypi.org/simple"
        print(f"{TORCH_INDEX} does not answer ({error}): torch comes from pip's own index")
        return index


def make_debian(folder: Path) -> None:
    """Make a small Debian 12 with debootstrap, for all images."""
    if os.geteuid() != 0 or shutil.which("debootstrap") is None:
        raise StepError("--chroot needs root and debootstrap (Debian: apt-get install debootstrap)")
    mirror = os.environ.get("DEBIAN_MIRROR", "http://deb.debian.org/debian")
    command = ["debootstrap", "--variant=minbase", "--include=python3,python3-venv,ca-certificates"]
    print("debootstrap: minutes", flush=True)
    done = subprocess.run(
        [*command, "bookworm", str(folder), mirror], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise StepError(f"debootstrap failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


def above_torch(image: Image) -> float:
    """Return the megabytes that came after the step that installed torch."""
    with_torch = next((size for step, size in image.sizes if "torch==" in step), None)
    if with_torch is None:
        raise StepError("no step installs torch==..., which the size is measured from")
    return (image.sizes[-1][1] - with_torch) / 1e6


class Running:
    """The entry point of an image, started, with what it has printed so far."""

    def __init__(
        self, root: Root, image: Image, env: dict[str, str], cmd: Sequence[str] | None = None
    ) -> None:
        self.root, self.image, self.env = root, image, {**image.env, **env}
        command = image.command(cmd)
        self.process = root.start(command, self.env, image.workdir, image.user, network=False)
        self.lines: list[str] = []
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.lines.extend(iter(self.process.stdout.readline, ""))

    def healthy(self) -> bool:
        """Run the health check of the image once, as its user."""
        assert self.image.healthcheck is not None
        check = self.root.start(
            self.image.healthcheck, self.env, self.image.workdir, self.image.user, network=False
        )
        check.communicate()
        return check.returncode == 0

    def family(self) -> list[Path]:
        """Return it and all that it has started, as far as they are in the root by now, as folders of /proc."""
        parents, names = {}, {}
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                name, _, fields = stat.read_text().partition("(")[2].rpartition(")")
            except OSError:  # it has ended
                continue
            pid = int(stat.parent.name)
            parents[pid], names[pid] = int(fields.split()[1]), name
        # Not by session: ipexrun gives each instance one of its own.
        found = [self.process.pid] if self.process.pid in parents else []
        for pid in found:
            found += [child for child, parent in parents.items() if parent == pid]
        folders = [Path("/proc", str(pid)) for pid in found if names[pid] != "chroot"]
        if isinstance(self.root, ChrootRoot):
            folders = [f for f in folders if (f / "root").resolve() == self.root.folder]
        return folders

    def stop(self) -> int:
        """Ask it to end, as ``docker stop`` does, and return its status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            status = self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.kill()
            raise StepError(f"it goes on 60 s after SIGTERM:\n{self.tail()}") from None
        self.reader.join(10)
        return status

    def kill(self) -> None:
        """End all of its processes."""
        for folder in self.family():
            try:
                os.kill(int(folder.name), signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait()

    def tail(self) -> str:
        """Return the end of its output."""
        return "".join(self.lines[-25:])


def check_user(running: Running) -> list[str]:
    """Return the users of the processes; root must not be among them."""
    users = set()
    for folder in running.family():
        try:
            status = (folder / "status").read_text()
        except OSError:  # it has ended
            continue
        found = re.search(r"^Uid:\s+\d+\s+(\d+)", status, re.MULTILINE)
        users.add(found[1] if found else "?")
    if "0" in users and running.root.why_no_user == "":
        raise StepError(f"it must not run as root, but its processes have the users {users}")
    return sorted(users)


def check_server(root: Root, image: Image) -> None:
    """Make a tiny model, start the server, wait for its health check, ask it, and stop it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = {**image.env, "OMP_NUM_THREADS": "2"}
    make = root.start(["ipex", "llm", "make-model", image.env["MODEL"]], env, network=False)
    run_dockerfile.finish(make, "ipex llm make-model", quiet=True)
    for path in root.inside(image.env["MODEL"]).iterdir():
        path.chmod(0o644)  # root made it; the user of the image reads it
    running = Running(root, image, {"PORT": str(port)})
    try:
        started = time.monotonic()
        while not running.healthy():
            if running.process.poll() is not None:
                raise StepError(f"the server ended:\n{running.tail()}")
            if time.monotonic() - started > START:
                raise StepError(f"no health within {START} s:\n{running.tail()}")
            time.sleep(1)
        print(f"  healthy after {time.monotonic() - started:.0f} s", flush=True)
        body = json.dumps({"prompt": "Hello", "max_tokens": 4, "ignore_eos": True}).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/completions",
            body,
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as reply:  # noqa: S310
            usage = json.load(reply)["usage"]
        if usage["completion_tokens"] != 4:
            raise StepError(f"4 tokens were asked for, got {usage}")
        print(f"  4 tokens from /v1/completions; users {', '.join(check_user(running))}")
        check_settings(running, "tcmalloc" if isinstance(root, ChrootRoot) else "")
        status = running.stop()
        # 143: ended by the signal that it was asked with.
        if status not in {0, 143, -signal.SIGTERM}:
            raise StepError(f"status {status} after SIGTERM:\n{running.tail()}")
        print(f"  status {status} after SIGTERM")
    finally:
        running.kill()


def check_settings(running: Running, allocator: str) -> None:
    """Check that ipexrun has set the threads of the server, and preloaded the allocator if there is one."""
    threads, mapped = set(), False
    for folder in running.family():
        try:
            variables = (folder / "environ").read_text().split("\0")
            maps = (folder / "maps").read_text()
        except OSError:  # it has ended
            continue
        threads |= {v.partition("=")[2] for v in variables if v.startswith("OMP_NUM_THREADS=")}
        mapped |= allocator in maps
    if not threads:
        raise StepError(f"ipexrun has not set OMP_NUM_THREADS:\n{running.tail()}")
    if not mapped:
        raise StepError(f"{allocator} is not in the memory of the server:\n{running.tail()}")
    print(f"  threads {', '.join(threads)}; {allocator or 'tcmalloc not installed here'}")


def check_program(root: Root, image: Image) -> None:
    """Start what the image starts; it must end with status 0, as the user of the image."""
    running = Running(root, image, {})
    users: set[str] = set()
    try:
        started = time.monotonic()
        while running.process.poll() is None:
            if time.monotonic() - started > START:
                raise StepError(f"it goes on after {START} s:\n{running.tail()}")
            time.sleep(0.2)
            users |= set(check_user(running))
        running.reader.join(10)
        if running.process.returncode != 0:
            raise StepError(f"status {running.process.returncode}:\n{running.tail()}")
    finally:
        running.kill()
    print(f"  {' '.join(image.command())[:70]}: status 0, users {', '.join(sorted(users))}")
    print("    " + "    ".join(running.lines[-2:]).rstrip())
    if image.healthcheck is not None:
        if not running.healthy():
            raise StepError(f"the health check fails: {image.healthcheck}")
        print("  its health check passes")


def attempt(name: str, root: Root, given: dict[str, str]) -> None:
    """Execute one Dockerfile and check what it promises.

    Raises:
        StepError: A step or a promise is broken.
        DockerfileError: It cannot be read.
    """
    instructions = run_dockerfile.parse((DOCKER / f"{name}.Dockerfile").read_text(encoding="utf-8"))
    image = run_dockerfile.build(
        instructions, root, given, lambda line: print(f"  {line}", flush=True)
    )
    if image.user.partition(":")[0] in {"", "0"}:
        raise StepError("the last USER must be a number other than 0")
    more = above_torch(image)
    print(f"  {more:.1f} MB of packages above torch")
    if more > LIMITS.get(name, more):
        raise StepError(f"{name} may have {LIMITS[name]} MB above torch, got {more:.1f}")
    if "MODEL" in image.env:
        check_server(root, image)
    else:
        check_program(root, image)
    if root.why_no_user:
        print(f"  NOT CHECKED, whether it runs without root: {root.why_no_user}")
    print(f"{name}: {len(image.executed)} steps executed, {len(image.skipped)} not", flush=True)
    for line in image.skipped:
        print(f"  NOT EXECUTED: {line}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the number of images that failed."""
    names = sorted(path.name.partition(".")[0] for path in DOCKER.glob("*.Dockerfile"))
    parser = argparse.ArgumentParser(description="Execute docker/*.Dockerfile without Docker.")
    parser.add_argument("images", nargs="*", metavar="IMAGE", help=f"of {', '.join(names)}")
    parser.add_argument("--chroot", action="store_true", help="in a Debian, which needs root")
    parser.add_argument("--build-arg", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--keep", type=Path, help="folder for the roots, which stay")
    options = parser.parse_args(argv)
    unknown = set(options.images) - set(names)
    if unknown:
        parser.error(f"IMAGE must be one of {', '.join(names)}, got {', '.join(sorted(unknown))}")
    given = dict(text.partition("=")[::2] for text in options.build_arg)
    given.setdefault("TORCH_INDEX_URL", torch_index())
    failed = []
    with tempfile.TemporaryDirectory(prefix="images_") as folder:
        place = options.keep or Path(folder)
        place.mkdir(parents=True, exist_ok=True)
        place.chmod(0o755)  # the users of the images have to enter it
        base = place / "debian"
        if options.chroot and not base.exists():
            make_debian(base)
        for name in options.images or names:
            print(f"{name}:", flush=True)
            root: Root = VenvRoot(place / name, ROOT)
            if options.chroot:
                root = ChrootRoot(place / name, ROOT, base)
            shutil.rmtree(root.folder, ignore_errors=True)
            try:
                attempt(name, root, given)
            except (DockerfileError, StepError) as error:
                failed.append(name)
                print(f"{name}: FAILED: {error}", flush=True)
            if not options.keep:
                shutil.rmtree(root.folder, ignore_errors=True)
    if failed:
        print(f"failed: {', '.join(failed)}")
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
