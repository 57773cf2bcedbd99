"""Images of the tests: a base made of Debian's packages, others' programs on it, and ours, built from the Dockerfile.

No registry of images is asked. Packages come from where this machine has its own from: its sources of apt, its pip.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from tests.deployment.compose import COMPOSE, DOCKERFILE, compose
from tests.deployment.docker import Docker
from tests.deployment.downloads import Downloads
from tests.services import ROOT

Say = Callable[[str], None]
IN_BASE = "python3,python3-venv,python3-pip,libpython3-dev,ca-certificates"
CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"
CLEAN = """\
DPkg::Post-Invoke { "rm -f /var/cache/apt/archives/*.deb /var/cache/apt/*.bin || true"; };
Dir::Cache::pkgcache "";
Dir::Cache::srcpkgcache "";
"""
"""As in the images that this base stands for: packages are not kept once they are installed."""

FOREIGN = """\
FROM {base}
RUN apt-get update && apt-get install --yes --no-install-recommends {package} wget && \
    ln -s /usr/bin/{package} /bin/{name}; \
    install --directory --owner=65534 --group=65534 /{name}
WORKDIR /{name}
ENTRYPOINT ["{name}"]
"""
SYSTEMD = """\
FROM tidegate-control:{version} AS built
FROM {base}
RUN apt-get update && apt-get install --yes --no-install-recommends systemd systemd-sysv dbus sudo
COPY --from=built /opt/tidegate /opt/tidegate
COPY systemd /src/deploy/systemd
CMD ["/sbin/init"]
"""


def base_image() -> str:
    """The one that the Dockerfile begins with."""
    [name] = re.findall(r"^ARG PYTHON_IMAGE=(\S+)$", DOCKERFILE.read_text(), flags=re.MULTILINE)
    return str(name)


def version() -> str:
    """That of our images."""
    return str(compose()["services"]["daemon"]["image"]).partition(":")[2]


def make_base(docker: Docker, downloads: Downloads) -> None:
    """Debian's Python under the name that the Dockerfile asks for, with what pip has to know on this machine."""
    root, release = docker.folder / "base", _release()
    sources = _sources()
    mirror = next(uri for uri, suite in sources if suite == release)
    command = ["debootstrap", "--variant=minbase", f"--include={IN_BASE}", release, str(root), mirror]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    (root / "etc/apt/sources.list").write_text("".join(f"deb {uri} {suite} main\n" for uri, suite in sources))
    (root / "etc/apt/apt.conf.d/docker-clean").write_text(CLEAN)
    (root / "usr/local/bin/python").symlink_to("/usr/bin/python3")
    settings = dict(downloads.pip)
    for name, place in (("constraint", "/etc/pip-constraints.txt"), ("cert", CERTIFICATES)):
        if name in settings:
            shutil.copy(settings[name], f"{root}{place}")
            settings[name] = place
    (root / "etc/pip.conf").write_text(
        "[global]\n" + "".join(f"{name} = {value}\n" for name, value in settings.items())
    )
    for place in ("var/cache/apt/archives", "var/lib/apt/lists"):
        shutil.rmtree(root / place)
        (root / place / "partial").mkdir(parents=True)
    with subprocess.Popen(["tar", "-C", root, "-c", "."], stdout=subprocess.PIPE) as tar:
        docker("import", "--change", 'CMD ["python3"]', "-", base_image(), stdin=tar.stdout)
    shutil.rmtree(root)


def _release() -> str:
    found = re.search(r"^VERSION_CODENAME=(\w+)$", Path("/etc/os-release").read_text(), flags=re.MULTILINE)
    assert found, "no name of a Debian release in /etc/os-release"
    return found[1]


def _sources() -> list[tuple[str, str]]:
    """Debian's among this machine's sources of apt: address and suite."""
    command = ["apt-get", "indextargets", "--format", "$(ORIGIN) $(COMPONENT) $(REPO_URI) $(RELEASE)",
               "Identifier: Packages"]  # fmt: skip
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    rows = [line.split() for line in dict.fromkeys(lines)]
    return [(row[2], row[3]) for row in rows if row[:2] == ["Debian", "main"]]


def project(folder: Path) -> Path:
    """A copy of what a user has, with secrets: the context of builds, and where compose runs."""
    given = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    left_out = shutil.ignore_patterns("__pycache__", "*.so", "secrets")
    folder.mkdir()
    for name in sorted(given | {"deploy", "Dockerfile", ".dockerignore"}):
        source, target = ROOT / name, folder / name
        if source.is_dir():
            shutil.copytree(source, target, symlinks=True, ignore=left_out)
        else:
            shutil.copy(source, target)
    (folder / "docker-compose.yml").write_text(for_old_compose(COMPOSE.read_text()))
    subprocess.run([folder / "deploy" / "make-secrets"], check=True, capture_output=True)
    return folder


def for_old_compose(text: str) -> str:
    """The file without what Debian's compose, 1.29, does not know: `name` and `start_interval`."""
    lines = text.splitlines(keepends=True)
    return "".join(line for line in lines if not re.match(r"name: |\s+start_interval: ", line))


def build(docker: Docker, project: Path, downloads: Downloads, target: str) -> None:
    """One of ours, as the Dockerfile's head says."""
    words = [word for name, value in downloads.arguments.items() for word in ("--build-arg", f"{name}={value}")]
    named = f"tidegate-{target}:{version_of(project)}"
    docker("build", *words, "--target", target, "--tag", named, str(project), seconds=1800)


def version_of(project: Path) -> str:
    found = re.search(r'^version = "(.*)"$', (project / "pyproject.toml").read_text(), flags=re.MULTILINE)
    assert found
    return found[1]


def build_others(docker: Docker, downloads: Downloads) -> None:
    """Prometheus and Alertmanager, by Debian, under the names that the compose file asks for."""
    services = compose()["services"]
    for name, package in (("prometheus", "prometheus"), ("alertmanager", "prometheus-alertmanager")):
        text = FOREIGN.format(base=base_image(), package=package, name=name)
        _build_from(docker, downloads, text, services[name]["image"])


def build_systemd(docker: Docker, downloads: Downloads, ours: str) -> str:
    """A machine with systemd, and the packages of our image of that version where the units look for them."""
    _build_from(
        docker, downloads, SYSTEMD.format(base=base_image(), version=ours), "tidegate-machine:1", ROOT / "deploy"
    )
    return "tidegate-machine:1"


def _build_from(docker: Docker, downloads: Downloads, text: str, tag: str, context: Path | None = None) -> None:
    proxies = {name: value for name, value in downloads.arguments.items() if name.endswith("_proxy")}
    words = [word for name, value in proxies.items() for word in ("--build-arg", f"{name}={value}")]
    place = ["--file", "-", str(context)] if context else ["-"]
    docker("build", *words, "--tag", tag, *place, input=text, seconds=600)


def size(docker: Docker, image: str) -> int:
    """In bytes, without the layers of the base image."""
    return int(docker.inspect(image)["Size"]) - int(docker.inspect(base_image())["Size"])
