"""`python -m tests.support.check_install`: the package as others get it.

Builds the sdist of what git tracks, and the wheel from that; looks at what is in them; installs
each in an environment of its own, with the tested versions of what the package requires, and
without numpy and Triton. From the wheel the README's first example runs on two processes, from the
sdist some of its tests. It takes a minute or two, and pip must reach its index.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import time
import zipfile
from email import message_from_string
from email.message import Message
from pathlib import Path
from tempfile import TemporaryDirectory

from ring_attention_pytorch import __version__

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PACKAGE = "ring_attention_pytorch"
NOT_IN_SDIST = (".ci/", ".github/", ".gitignore", ".pre-commit-config.yaml")
ABSENT = ("einx", "numpy", "triton")  # torch for CUDA brings the last
REQUIRED = ("torch", "einops", "beartype")
FOR_TESTS = ("pytest", "pytest-timeout", "hypothesis")
TESTS = (  # of those that need none of what is absent
    "stories/test_prefix_and_positions.py", "nn/test_rotary.py", "nn/test_sharding.py",
    "ranks/test_agreement.py",
)  # fmt: skip
INSIDE = f"""
import importlib.metadata, importlib.util
print({PACKAGE.replace("_", "-")!r} + " " + importlib.metadata.version({PACKAGE!r}))
print(importlib.util.find_spec({PACKAGE!r}).origin)
print([name for name in {ABSENT} if importlib.util.find_spec(name)])
"""
START = time.monotonic()


def main() -> None:
    """Build, look, install and use."""
    with TemporaryDirectory() as name:
        folder = Path(name).resolve()
        sdist, wheel = build(folder)
        look_into(sdist, wheel)
        say(f"installs {', '.join(REQUIRED)}")
        base = Environment(folder / "required")
        base.install(*pinned(*REQUIRED))
        try_wheel(Environment(folder / "from-wheel", base), wheel)
        try_sdist(Environment(folder / "from-sdist", base), sdist)
    say("installs, and works")


def say(text: str) -> None:
    """Print what is going on, after how many seconds."""
    print(f"{time.monotonic() - START:5.1f} s  {text}", flush=True)


def run(*command: str | Path, folder: Path = ROOT) -> tuple[str, str]:
    """Return what a command wrote to stdout and stderr; exit with that if it fails."""
    hidden = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PYTHONDONTWRITEBYTECODE")
    env = {name: value for name, value in os.environ.items() if name not in hidden}
    env |= {"PYTHONNOUSERSITE": "1", "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    if ran.returncode != 0:
        told = " ".join(map(str, command))
        sys.exit(f"{ran.stdout}{ran.stderr}\n{told}: failed with exit code {ran.returncode}")
    return ran.stdout, ran.stderr


def tracked() -> set[str]:
    """The files that git tracks."""
    listed, _ = run("git", "ls-files", "-z")
    return {name for name in listed.split("\0") if name and (ROOT / name).exists()}


def pinned(*names: str) -> list[str]:
    """The tested versions of these packages, as pip takes them."""
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    return [line for line in lines if line.split("==")[0] in names]


class Environment:
    """A virtual environment, which sees the packages of another one too if that is given."""

    def __init__(self, folder: Path, base: "Environment | None" = None):
        self.folder = folder
        places = {"base": str(folder), "platbase": str(folder)}
        self.packages = Path(sysconfig.get_path("purelib", "venv", places))
        pip = [] if base is None else ["--without-pip"]
        run(sys.executable, "-m", "venv", *pip, folder)
        if base is not None:
            (self.packages / "base.pth").write_text(f"{base.packages}\n")

    def python(self, *args: str | Path, folder: Path | None = None) -> tuple[str, str]:
        """Run this environment's Python."""
        scripts = self.folder / ("Scripts" if os.name == "nt" else "bin")
        return run(scripts / "python", *args, folder=folder or self.folder)

    def install(self, *what: str | Path) -> None:
        """Install with pip, and remove what came along that the package does not need.

        What is imported is compiled then: most of PyTorch never is.
        """
        self.python("-m", "pip", "install", "--quiet", "--no-compile", *what)
        self.python("-m", "pip", "uninstall", "--quiet", "--yes", *ABSENT)

    def check(self) -> None:
        """The package is this environment's own, and what it does not need is not here."""
        told, _ = self.python("-c", INSIDE)
        name, origin, unwanted = told.splitlines()
        assert name == f"ring-attention-pytorch {__version__}", name
        assert Path(origin).resolve().is_relative_to(self.packages), origin
        assert unwanted == "[]", unwanted


def build(folder: Path) -> tuple[Path, Path]:
    """Sdist and wheel, made from a copy of what git tracks."""
    say("builds")
    source, built = folder / "checkout", folder / "built"
    for name in tracked():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, source / name)
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", built, source)
    (sdist,), (wheel,) = built.glob("*.tar.gz"), built.glob("*.whl")
    return sdist, wheel


def look_into(sdist: Path, wheel: Path) -> None:
    """Their files are those that git tracks, and what they say of themselves is right."""
    say(f"looks into {sdist.name} and {wheel.name}")
    files = tracked()
    with tarfile.open(sdist) as archive:
        inside = {m.name.partition("/")[2] for m in archive.getmembers() if m.isfile()}
    made = {n for n in inside if n in ("PKG-INFO", "setup.cfg") or ".egg-info/" in n}
    same(inside - made, {name for name in files if not name.startswith(NOT_IN_SDIST)})
    with zipfile.ZipFile(wheel) as archive:
        about = f"{PACKAGE}-{__version__}.dist-info/"
        inside = {name for name in archive.namelist() if not name.startswith(about)}
        metadata = message_from_string(archive.read(f"{about}METADATA").decode())
        licence = archive.read(f"{about}licenses/LICENSE").decode()
    same(inside, {name for name in files if name.startswith(f"{PACKAGE}/")})
    assert licence == (ROOT / "LICENSE").read_text()
    look_at(metadata)


def same(files: set[str], expected: set[str]) -> None:
    """The files are those that are expected."""
    missing, unexpected = sorted(expected - files), sorted(files - expected)
    assert files == expected, f"missing {missing}, unexpected {unexpected}"


def look_at(metadata: Message) -> None:
    """Check what the wheel says of itself."""
    expected = {
        "Name": "ring-attention-pytorch",
        "Version": __version__,
        "Author": "The ring_attention_pytorch authors",
        "License-Expression": "MIT",
        "Requires-Python": ">=3.11",
    }
    assert {name: metadata[name] for name in expected} == expected, metadata.items()
    assert {"attention", "ring attention", "long context"} <= set(metadata["Keywords"].split(","))
    requires = metadata.get_all("Requires-Dist")
    assert "torch>=2.11" in requires, requires
    assert {re.split("[><=]", r)[0] for r in requires if "extra ==" not in r} == {*REQUIRED}
    prefix = "Programming Language :: Python :: "
    classifiers = metadata.get_all("Classifier")
    versions = [c.removeprefix(prefix) for c in classifiers if c.startswith(prefix)]
    assert versions == ["3.11", "3.12", "3.13"], versions
    described = metadata.get_payload()
    assert described.startswith(README.partition("\n![")[0])
    assert not re.search(r"\]\((?!https?:|#)", described), "a link that only a checkout has"


def try_wheel(environment: Environment, wheel: Path) -> None:
    """Run the README's first example on two processes, where no checkout is near."""
    say("installs the wheel, and runs the README's first example on two processes")
    environment.install(wheel)
    environment.check()
    empty = environment.folder.with_name("empty")
    empty.mkdir()
    example = empty / "example.py"
    block = re.search(r"```python\n(.*?)```", README, re.DOTALL)[1]
    example.write_text(block + "print(tuple(whole.shape))\n")
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    told, noise = environment.python(*launcher, example, folder=empty)
    assert told.count("(1, 1000, 8, 64)") == 2, told
    assert "process_group" not in noise, noise


def try_sdist(environment: Environment, sdist: Path) -> None:
    """Install from the unpacked sdist, and run some of its tests on what was installed."""
    say("unpacks the sdist, installs from there, and runs its tests")
    with tarfile.open(sdist) as archive:
        archive.extractall(environment.folder.parent, filter="data")
    source = environment.folder.parent / sdist.name.removesuffix(".tar.gz")
    environment.install(source, *pinned(*FOR_TESTS))
    shutil.rmtree(source / PACKAGE)  # lest the tests import this one
    environment.check()
    tests = [f"tests/{name}" for name in TESTS]
    told, _ = environment.python("-m", "pytest", "-m", "not thorough", *tests, folder=source)
    say(told.strip().splitlines()[-1])


if __name__ == "__main__":
    main()
