#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Execute the steps of a Dockerfile without Docker, to see whether one of them is broken.

    python tools/run_dockerfile.py docker/ops.Dockerfile ROOT [--context .] [--build-arg NAME=VALUE] [--base DEBIAN]

There are two kinds of root. Both start from nothing but what ``FROM python:X.Y`` gives, and both are stand-ins:

``VenvRoot``
    A folder with a fresh virtual environment. Absolute paths of the image that the Dockerfile names itself
    (``WORKDIR``, ``COPY``, ``VOLUME``, mounts and values of ``ENV``) lead into the folder. Steps that change the system
    of the image (``apt-get``, ``useradd``) are not executed, and reported as such. Needs no privileges.
``ChrootRoot``
    A copy of a Debian that ``debootstrap`` made, entered with ``chroot`` in a mount namespace. Every step is executed.
    Needs root.

A step that ends with another status than 0 raises `StepError`. An instruction, or a form of one, that is not known here
is an error: nothing is passed over in silence. It reads one stage, without heredocs, and no ``.dockerignore``.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

__all__ = [
    "ChrootRoot",
    "DockerfileError",
    "Image",
    "Instruction",
    "StepError",
    "VenvRoot",
    "build",
    "parse",
    "substitute",
]

KNOWN = {
    *("ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "EXPOSE", "FROM", "HEALTHCHECK", "LABEL", "RUN"),
    *("STOPSIGNAL", "USER", "VOLUME", "WORKDIR"),
}
#: What changes the system of the image rather than its Python.
SYSTEM = re.compile(r"(?:^|[;&|(]\s*|\s)(apt-get|apt|dpkg|useradd|adduser|groupadd|addgroup)\s")
OWNERS = re.compile(r"(?:^|[;&|(]\s*)(?:chown\s|install\s[^;&|]*(?:--owner|-o)\b)")
#: A user who is not root and owns nothing.
OTHER = 65534
#: What the build may use of this machine: how pip and apt reach an index. None of it stays in the image.
PASSED = re.compile(r"(?i)^(pip_\w+|(https?|no|all)_proxy|ssl_cert_file|requests_ca_bundle)$")


class DockerfileError(ValueError):
    """The Dockerfile has something that is wrong or that is not known here."""


class StepError(RuntimeError):
    """A step was executed and failed."""


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction: ``options`` are the words with two dashes in front, ``words`` the JSON form if it has that."""

    line: int
    name: str
    options: tuple[str, ...]
    text: str
    words: tuple[str, ...] | None = None


@dataclasses.dataclass
class Image:
    """What the instructions lead to, and what was done."""

    base: str = ""
    args: dict[str, str] = dataclasses.field(default_factory=dict)
    env: dict[str, str] = dataclasses.field(default_factory=dict)
    workdir: str = "/"
    user: str = ""
    entrypoint: tuple[str, ...] = ()
    cmd: tuple[str, ...] = ()
    healthcheck: tuple[str, ...] | None = None
    executed: list[str] = dataclasses.field(default_factory=list)
    skipped: list[str] = dataclasses.field(default_factory=list)
    sizes: list[tuple[str, int]] = dataclasses.field(default_factory=list)

    def command(self, more: Sequence[str] | None = None) -> list[str]:
        """Return entry point and arguments, with ``more`` in the place of CMD."""
        return [*self.entrypoint, *(self.cmd if more is None else more)]


# -- reading --------------------------------------------------------------------------------------------------


def parse(text: str) -> list[Instruction]:
    """Return the instructions of a Dockerfile.

    Raises:
        DockerfileError: An instruction is unknown, or has a form that is not supported here.
    """
    found: list[Instruction] = []
    pending, start = "", 0
    for number, line in enumerate(text.splitlines(), start=1):
        stripped = line.strip()
        if not stripped or stripped.startswith("#"):
            continue  # also inside a continued instruction
        start = start if pending else number
        pending += stripped.removesuffix("\\").strip() + " "
        if not stripped.endswith("\\"):
            found.append(_instruction(pending.strip(), start))
            pending = ""
    if pending:
        raise DockerfileError(f"line {start}: the last instruction ends with a backslash")
    if not found or next((i.name for i in found if i.name != "ARG"), "") != "FROM":
        raise DockerfileError("the Dockerfile must begin with FROM, after ARG at most")
    if sum(i.name == "FROM" for i in found) > 1:
        raise DockerfileError("the Dockerfile must have one stage, got several FROM")
    return found


def _instruction(text: str, line: int) -> Instruction:
    name, _, rest = text.partition(" ")
    name, rest = name.upper(), rest.strip()
    if name not in KNOWN:
        raise DockerfileError(
            f"line {line}: {name} is not known here, only {', '.join(sorted(KNOWN))}"
        )
    if "<<" in rest and name in {"RUN", "COPY"}:
        raise DockerfileError(f"line {line}: heredocs are not supported here")
    options = []
    while found := re.match(r"(--[a-z-]+(?:=\S+)?)\s+", rest):
        options.append(found[1])
        rest = rest[found.end() :]
    command = rest
    if name == "HEALTHCHECK" and rest.startswith("CMD"):
        command = rest[3:].strip()
    words = None
    if command.startswith("["):
        try:
            words = tuple(json.loads(command))
        except json.JSONDecodeError as error:
            raise DockerfileError(
                f"line {line}: {name} must be a JSON list, got {command}: {error}"
            ) from None
    return Instruction(line, name, tuple(options), rest, words)


def substitute(text: str, values: Mapping[str, str]) -> str:
    """Return a text with ``$NAME``, ``${NAME}``, ``${NAME:-default}`` and ``${NAME:+other}`` replaced."""

    def value(found: re.Match[str]) -> str:
        name = found["plain"] or found["name"]
        known = values.get(name, "")
        if found["sign"] == "-":
            return known or found["word"]
        if found["sign"] == "+":
            return found["word"] if known else ""
        return known

    pattern = r"(?<!\\)\$(?:(?P<plain>\w+)|\{(?P<name>\w+)(?::(?P<sign>[-+])(?P<word>[^}]*))?\})"
    return re.sub(pattern, value, text)


def pairs(instruction: Instruction, values: Mapping[str, str]) -> dict[str, str]:
    """Return the names and values of an ENV or LABEL instruction."""
    words = shlex.split(instruction.text)
    if not all("=" in word for word in words):
        raise DockerfileError(
            f"line {instruction.line}: {instruction.name} must be NAME=VALUE, got {instruction.text}"
        )
    return {n: substitute(v, values) for n, _, v in (word.partition("=") for word in words)}


def mounts(instruction: Instruction) -> list[tuple[str, str]]:
    """Return (folder of the context, place in the image) of the bind mounts of a RUN instruction."""
    found = []
    for option in instruction.options:
        fields = dict(f.partition("=")[::2] for f in option.partition("=")[2].split(","))
        if not option.startswith("--mount=") or fields.get("type") != "bind" or "from" in fields:
            raise DockerfileError(
                f"line {instruction.line}: RUN takes --mount=type=bind,source=...,target=... here, got {option}"
            )
        found.append((fields.get("source", "."), fields["target"]))
    return found


# -- roots ----------------------------------------------------------------------------------------------------


class Root:
    """A folder that stands for the file system of the image."""

    def __init__(self, folder: Path, context: Path) -> None:
        self.folder = folder.resolve()
        self.context = context.resolve()
        #: Why commands do not get the user of the image here; empty if they do.
        self.why_no_user = ""

    def inside(self, path: str) -> Path:
        """Return where a path of the image is on this machine."""
        return self.folder / path.lstrip("/")

    def site_packages(self) -> Path:
        """Return the folder of the packages."""
        (found,) = self.folder.glob("usr/local/lib/python3*/site-packages")
        return found

    def size(self) -> int:
        """Return the bytes of all files of the packages."""
        files = self.site_packages().rglob("*")
        return sum(f.lstat().st_size for f in files if f.is_file() and not f.is_symlink())

    def why_not(self, command: str) -> str:
        """Return why a step cannot be executed here, or an empty string."""
        raise NotImplementedError

    def take_base(self, image: str) -> str:
        """Make what FROM gives; returns in words what stands for it."""
        raise NotImplementedError

    def prepare(self, instructions: Iterable[Instruction]) -> None:
        """Look at all instructions before the first is executed."""

    def copy(self, sources: Sequence[str], target: str, workdir: str) -> None:
        """Copy files of the context."""
        place = self.inside(os.path.join(workdir, target))
        for source in sources:
            matches = sorted(self.context.glob(source)) if source != "." else [self.context]
            if not matches:
                raise StepError(f"COPY {source}: there is no such file in {self.context}")
            for path in matches:
                if path.is_dir():
                    ignore = shutil.ignore_patterns("__pycache__")
                    shutil.copytree(path, place, dirs_exist_ok=True, ignore=ignore)
                    continue
                file = place / path.name if target.endswith("/") or len(sources) > 1 else place
                file.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, file)

    def start(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        workdir: str = "/",
        user: str = "",
        binds: Iterable[tuple[str, str]] = (),
        network: bool = True,
    ) -> subprocess.Popen[str]:
        """Start a command in the root, in a session of its own; its output goes to a pipe.

        Args:
            command: The words.
            env: Its whole environment but PATH.
            workdir: In the image.
            user: Of the image; empty for root.
            binds: Folders of the context that it sees for its time, and where.
            network: Whether it gets this machine's settings of pip and proxies.
        """
        raise NotImplementedError


class VenvRoot(Root):
    """A virtual environment in a folder; see the text of this module."""

    python = sys.executable
    venv_options: tuple[str, ...] = ()

    def prepare(self, instructions: Iterable[Instruction]) -> None:
        """Collect the paths of the image that lead into the folder."""
        self.places: set[str] = set()
        for one in instructions:
            if one.name in {"WORKDIR", "VOLUME"}:
                self.places.update(one.words or one.text.split())
            elif one.name == "COPY":
                self.places.add((one.words or shlex.split(one.text))[-1].rstrip("/"))
            elif one.name == "RUN":
                self.places.update(target for _, target in mounts(one))
            elif one.name == "ENV":
                self.places.update(
                    v for v in pairs(one, {}).values() if re.fullmatch(r"(/[\w.-]+)+", v)
                )
        self.places = {place for place in self.places if place.startswith("/") and place != "/"}

    def take_base(self, image: str) -> str:
        """Make the environment, with the Python that FROM names if this machine has it."""
        wanted = re.match(r"(?:docker\.io/(?:library/)?)?python:(\d+\.\d+)", image)
        if wanted is None:
            raise DockerfileError(f"FROM must be python:X.Y here, got {image}")
        candidates = [shutil.which(f"python{wanted[1]}"), self.python, "/usr/bin/python3"]
        able = [path for path in candidates if path and can_make_environments(path)]
        if not able:
            raise StepError(f"no Python with venv was found: {', '.join(filter(None, candidates))}")
        for_others = [path for path in able if runs_as(path, OTHER)]
        python = (for_others or able)[0]
        if not for_others:
            self.why_no_user = f"other users cannot run {python}" if os.geteuid() == 0 else ""
        # A copy of what is in the real image: nothing else is on the path of modules.
        subprocess.run(
            [python, "-m", "venv", *self.venv_options, str(self.inside("/usr/local"))], check=True
        )
        version = subprocess.run([python, "--version"], capture_output=True, text=True, check=True)
        return f"a virtual environment of {version.stdout.strip()}"

    def why_not(self, command: str) -> str:
        """Return why a step cannot be executed here."""
        if found := SYSTEM.search(command):
            return f"{found[1]} changes the system of the image"
        if OWNERS.search(command) and os.geteuid() != 0:
            return "it changes owners, which needs root"
        return ""

    def translate(self, text: str) -> str:
        """Return a text with the paths of the image that lead into the folder."""
        for place in sorted(self.places, key=len, reverse=True):
            text = re.sub(
                rf"(?<![\w./-]){re.escape(place)}(?![\w.-])", str(self.inside(place)), text
            )
        return text

    def start(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        workdir: str = "/",
        user: str = "",
        binds: Iterable[tuple[str, str]] = (),
        network: bool = True,
    ) -> subprocess.Popen[str]:
        """Start a command; the environment comes first on its path."""
        for source, target in binds:
            place = self.inside(target)
            place.parent.mkdir(parents=True, exist_ok=True)
            if place.is_symlink():
                place.unlink()
            place.symlink_to(self.context / source)
        where = self.inside(workdir)
        where.mkdir(parents=True, exist_ok=True)
        variables = {name: self.translate(value) for name, value in env.items()}
        variables.setdefault("HOME", str(self.folder))
        variables["PATH"] = f"{self.inside('/usr/local/bin')}:/usr/sbin:/usr/bin:/sbin:/bin"
        passed = {n: v for n, v in os.environ.items() if network and PASSED.match(n)}
        uid: int | None = None
        if user and os.geteuid() == 0 and not self.why_no_user:
            uid = numeric(user)
            home = Path(variables["HOME"])
            if not home.exists():  # useradd would have made it
                home.mkdir(parents=True)
                os.chown(home, uid, uid)
        return subprocess.Popen(
            [self.translate(word) for word in command],
            cwd=where,
            env={**passed, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            user=uid,
            group=uid,
            extra_groups=None if uid is None else [],
        )


class ChrootRoot(Root):
    """A copy of a Debian, entered with chroot; see the text of this module."""

    def __init__(self, folder: Path, context: Path, base: Path) -> None:
        super().__init__(folder, context)
        self.base = base.resolve()

    def take_base(self, image: str) -> str:
        """Copy the Debian; its Python gets the place that it has in the image."""
        if not re.match(r"(?:docker\.io/(?:library/)?)?python:\d", image):
            raise DockerfileError(f"FROM must be python:X.Y here, got {image}")
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(["cp", "--archive", str(self.base), str(self.folder)], check=True)
        finish(self.start(["/usr/bin/python3", "-m", "venv", "/usr/local"], {}), "FROM", quiet=True)
        (python,) = self.folder.glob("usr/lib/python3.*/os.py")
        return f"a Debian with its own {python.parent.name}"

    def why_not(self, command: str) -> str:
        """Every step is executed."""
        return ""

    def start(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        workdir: str = "/",
        user: str = "",
        binds: Iterable[tuple[str, str]] = (),
        network: bool = True,
    ) -> subprocess.Popen[str]:
        """Start a command in the chroot; what is mounted for it goes with its mount namespace."""
        root = str(self.folder)
        lines = ["set -e"]
        for name in ("proc", "sys", "dev"):
            lines.append(f"mkdir -p {root}/{name}; mount --rbind /{name} {root}/{name}")
        variables = {"HOME": "/root"}
        folders: list[tuple[str, str]] = [(str(self.context / s), t) for s, t in binds]
        if network:
            shutil.copy("/etc/resolv.conf", self.inside("/etc/resolv.conf"))
            shutil.copy("/etc/hosts", self.inside("/etc/hosts"))
            settings, places = pip_settings()
            variables |= settings
            folders += [(place, place) for place in places]
        for source, target in folders:
            where = shlex.quote(f"{root}/{target.lstrip('/')}")
            make = "mkdir -p" if os.path.isdir(source) else f"mkdir -p $(dirname {where}); touch"
            lines.append(f"{make} {where}; mount --bind {shlex.quote(source)} {where}")
        variables |= env
        variables["PATH"] = "/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin"
        self.inside(workdir).mkdir(parents=True, exist_ok=True)
        identity = f"--userspec={numeric(user)}:{numeric(user)} --groups=" if user else ""
        words = ["/usr/bin/env", "-i", *(f"{n}={v}" for n, v in variables.items())]
        words += ["/bin/sh", "-c", f'cd {shlex.quote(workdir)} && exec "$@"', "sh", *command]
        lines.append(f"exec chroot {identity} {shlex.quote(root)} {shlex.join(words)}")
        return subprocess.Popen(
            ["unshare", "--mount", "/bin/sh", "-c", "\n".join(lines)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )


def can_make_environments(python: str) -> bool:
    """Return whether a Python works and has venv; a shim may name a Python that is not there."""
    command = [python, "-c", "import ensurepip, venv"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def runs_as(python: str, uid: int) -> bool:
    """Return whether another user can run a Python, which may lie in the home of root."""
    if os.geteuid() != 0:
        return True
    command = [os.path.realpath(python), "-c", ""]
    try:
        done = subprocess.run(
            command, capture_output=True, user=uid, group=uid, extra_groups=[], check=False
        )
    except OSError:
        return False
    return done.returncode == 0


def numeric(user: str) -> int:
    """Return the number of a user; only numbers are known, so that an orchestrator can see that it is not root."""
    if not re.fullmatch(r"\d+(:\d+)?", user):
        raise DockerfileError(f"USER must be a number such as 10001, got {user!r}")
    return int(user.partition(":")[0])


def pip_settings() -> tuple[dict[str, str], list[str]]:
    """Return this machine's settings of pip as variables, and the files and folders that they name."""
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=False
    ).stdout
    found = {n: v for n, v in os.environ.items() if PASSED.match(n)}
    for line in listed.splitlines():
        if match := re.fullmatch(r"(?:global|install)\.([a-z-]+)='(.*)'", line):
            value = match[2].replace("\\n", " ").strip()
            found.setdefault("PIP_" + match[1].replace("-", "_").upper(), value)
    words = (word.removeprefix("file://") for value in found.values() for word in value.split())
    places = {word for word in words if word.startswith("/") and os.path.exists(word)}
    # An index of files may lead out of its folder.
    roots = {str(Path(p).parent) if Path(p).name == "simple" else p for p in places}
    if os.path.isdir("/etc/ssl/certs"):
        roots.add("/etc/ssl/certs")
    return found, sorted(roots)


# -- executing ------------------------------------------------------------------------------------------------


def finish(process: subprocess.Popen[str], what: str, quiet: bool = False) -> str:
    """Wait for a process and return its output.

    Raises:
        StepError: Its status is not 0; the message has the end of its output.
    """
    output, _ = process.communicate()
    if process.returncode != 0:
        tail = "\n".join(output.splitlines()[-25:])
        raise StepError(f"{what}\nended with status {process.returncode}:\n{tail}")
    if not quiet:
        print("\n".join(f"    {line}" for line in output.splitlines()[-3:]), flush=True)
    return output


def build(
    instructions: Sequence[Instruction],
    root: Root,
    build_args: Mapping[str, str] | None = None,
    say: Callable[[str], None] = print,
) -> Image:
    """Execute all instructions and return what they lead to.

    Args:
        instructions: Of `parse`.
        root: Where; a folder that does not exist yet.
        build_args: Values for ARG, by name.
        say: Called with a line for each step.

    Raises:
        DockerfileError: An instruction is wrong, or a value is given for an ARG that there is none of.
        StepError: A step failed.
    """
    given = dict(build_args or {})
    unknown = set(given) - {i.text.partition("=")[0] for i in instructions if i.name == "ARG"}
    if unknown:
        raise DockerfileError(
            f"--build-arg {', '.join(sorted(unknown))}: the Dockerfile has no such ARG"
        )
    image = Image()
    root.prepare(instructions)
    for one in instructions:
        values = {**image.args, **image.env}
        if one.name == "ARG":
            name, _, default = one.text.partition("=")
            image.args[name] = given.get(
                name, substitute(shlex.split(default)[0] if default else "", values)
            )
        elif one.name == "FROM":
            image.base = substitute(one.text.split()[0], values)
            image.args.clear()  # those before FROM are for FROM
            say(f"FROM {image.base}: {root.take_base(image.base)}")
        elif one.name == "ENV":
            image.env |= pairs(one, values)
        elif one.name == "WORKDIR":
            image.workdir = os.path.join(image.workdir, substitute(one.text, values))
            root.inside(image.workdir).mkdir(parents=True, exist_ok=True)
        elif one.name == "USER":
            image.user = substitute(one.text, values)
            numeric(image.user)
        elif one.name == "COPY":
            words = [substitute(w, values) for w in one.words or shlex.split(one.text)]
            if any(not o.startswith("--chown=") for o in one.options):
                raise DockerfileError(
                    f"line {one.line}: COPY takes --chown here, got {one.options}"
                )
            root.copy(words[:-1], words[-1], image.workdir)
            say(f"COPY {' '.join(words)}")
            image.executed.append(f"COPY {one.text}")
        elif one.name == "RUN":
            run(one, image, root, say)
        elif one.name == "ENTRYPOINT":
            image.entrypoint = one.words or ("/bin/sh", "-c", one.text)
            image.cmd = ()
        elif one.name == "CMD":
            image.cmd = one.words or ("/bin/sh", "-c", one.text)
        elif one.name == "HEALTHCHECK" and one.text != "NONE":
            shell = one.text.removeprefix("CMD").strip()
            image.healthcheck = one.words or ("/bin/sh", "-c", shell)
    return image


def run(one: Instruction, image: Image, root: Root, say: Callable[[str], None]) -> None:
    """Execute a RUN instruction, or note why not."""
    command = list(one.words) if one.words else ["/bin/sh", "-c", one.text]
    shown = re.sub(r"\s+", " ", one.text)
    why_not = root.why_not(one.text)
    if why_not:
        image.skipped.append(f"line {one.line}: {shown}: {why_not}")
        say(f"NOT EXECUTED, {why_not}: {shown}")
        return
    say(f"RUN {shown}")
    started = time.monotonic()
    env = {**image.args, **image.env}
    process = root.start(command, env, image.workdir, image.user, mounts(one))
    finish(process, f"line {one.line}: RUN {shown}")
    image.executed.append(f"RUN {shown}")
    image.sizes.append((shown, root.size()))
    say(f"    {time.monotonic() - started:.0f} s, packages {image.sizes[-1][1] / 1e6:.1f} MB")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns 1 if a step fails, 2 for a Dockerfile that is wrong."""
    parser = argparse.ArgumentParser(
        description="Execute the steps of a Dockerfile without Docker."
    )
    parser.add_argument("dockerfile", type=Path)
    parser.add_argument("root", type=Path, help="folder to make")
    parser.add_argument("--context", type=Path, default=Path())
    parser.add_argument("--build-arg", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument(
        "--base", type=Path, help="a Debian of debootstrap: chroot into a copy of it"
    )
    options = parser.parse_args(argv)
    given = dict(text.partition("=")[::2] for text in options.build_arg)
    try:
        instructions = parse(options.dockerfile.read_text(encoding="utf-8"))
        root: Root = VenvRoot(options.root, options.context)
        if options.base:
            root = ChrootRoot(options.root, options.context, options.base)
        image = build(instructions, root, given)
    except DockerfileError as error:
        print(f"{options.dockerfile}: {error}", file=sys.stderr)
        return 2
    except StepError as error:
        print(f"{options.dockerfile}: FAILED: {error}", file=sys.stderr)
        return 1
    print(f"{len(image.executed)} steps executed, {len(image.skipped)} not")
    return 0


if __name__ == "__main__":
    sys.exit(main())
