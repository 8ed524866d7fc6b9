"""Sources of the local cluster's programs: PATH, the cache, a release server, a Go module."""

import dataclasses
import hashlib
import http.server
import io
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from concertina.local.binaries import gobuild, programs, release
from concertina.local.binaries.programs import Bundle, Program
from concertina.local.binaries.release import Asset
from concertina.local.errors import LocalClusterError
from concertina.local.host import paths
from concertina.local.node import images

PROGRAM = b"#!/bin/sh\necho 'tool v1.36.9'\n"
TOOL = Bundle("tool", {"tool": Program(("--version",), r"v1\.36\.")}, {"tool": "built"}, "example.org/tool")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """Run a release server; yield its address and the folder that it serves."""
    folder = tmp_path / "served"
    folder.mkdir()

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *arguments: object) -> None:
            super().__init__(*arguments, directory=str(folder))  # type: ignore[arg-type]

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as httpd:
        threading.Thread(target=httpd.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{httpd.server_port}", folder
        httpd.shutdown()


def script(path: Path, text: bytes = PROGRAM) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text)
    path.chmod(0o755)
    return path


def say(_: str) -> None:
    pass


def test_a_program_on_path_is_taken_when_its_version_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("KUBEBUILDER_ASSETS", raising=False)
    assert programs.installed("tool", TOOL.programs["tool"]) is None
    program = script(tmp_path / "tool", b"#!/bin/sh\necho 'tool v1.35.2'\n")
    assert programs.installed("tool", TOOL.programs["tool"]) is None
    script(program)
    assert programs.installed("tool", TOOL.programs["tool"]) == program
    first = script(tmp_path / "assets" / "tool")
    monkeypatch.setenv("KUBEBUILDER_ASSETS", str(first.parent))
    assert programs.installed("tool", TOOL.programs["tool"]) == first


def test_a_release_is_checked_and_unpacked(server: tuple[str, Path], tmp_path: Path) -> None:
    address, folder = server
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        member = tarfile.TarInfo("inner/packed")
        member.size = len(PROGRAM)
        tar.addfile(member, io.BytesIO(PROGRAM))
    (folder / "tool").write_bytes(PROGRAM)
    (folder / "tool.sha256").write_text(hashlib.sha256(PROGRAM).hexdigest())
    (folder / "packed.tgz").write_bytes(buffer.getvalue())
    sums = f"{'0' * 64}  other.tgz\n{hashlib.sha256(buffer.getvalue()).hexdigest()}  packed.tgz\n"
    (folder / "SHA256SUMS").write_text(sums)
    assets = {
        "tool": (
            Asset("tool", address + "/tool", address + "/tool.sha256"),
            Asset("packed", address + "/packed.tgz", address + "/SHA256SUMS", "inner/packed"),
        )
    }
    release.download("tool", "v1.36.9", {}, tmp_path, say, assets)
    for name in ("tool", "packed"):
        assert (tmp_path / name).read_bytes() == PROGRAM
        assert (tmp_path / name).stat().st_mode & 0o111


def test_a_damaged_release_is_refused(server: tuple[str, Path], tmp_path: Path) -> None:
    address, folder = server
    (folder / "tool").write_bytes(PROGRAM + b"x")
    (folder / "tool.sha256").write_text(hashlib.sha256(PROGRAM).hexdigest())
    assets = {"tool": (Asset("tool", address + "/tool", address + "/tool.sha256"),)}
    with pytest.raises(release.Unavailable, match="is damaged: its SHA-256 is"):
        release.download("tool", "v1", {}, tmp_path, say, assets)
    assert not (tmp_path / "tool").exists()


def test_a_release_that_is_not_there(server: tuple[str, Path], tmp_path: Path) -> None:
    assets = {"tool": (Asset("tool", server[0] + "/tool", server[0] + "/tool.sha256"),)}
    with pytest.raises(release.Unavailable, match=r"tool\.sha256 cannot be had"):
        release.download("tool", "v1", {}, tmp_path, say, assets)


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create tools/tool of a checkout without a release, with an empty cache and a Go that builds a script."""
    folder = tmp_path / "checkout" / "tools" / "tool"
    folder.mkdir(parents=True)
    (folder / "go.mod").write_text("module m\n\nrequire example.org/tool v1.36.9 // indirect\n")
    (folder / "go.sum").write_text("")
    monkeypatch.setattr(paths, "checkout", lambda: tmp_path / "checkout")
    monkeypatch.setattr(release, "ASSETS", {})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", f"{tmp_path}/go:/usr/bin:/bin")
    monkeypatch.setattr(release, "download", _no_release)
    script(
        tmp_path / "go" / "go",
        f"""#!/bin/sh
if [ "$1" = list ]; then echo {tmp_path}/source; exit; fi
echo example.org/some/package
echo run >> {tmp_path}/runs
while [ $# -gt 0 ]; do [ "$1" = -o ] && out=$2; shift; done
echo "#!/bin/sh" > "$out/built"; echo "echo v1.36.9" >> "$out/built"; chmod +x "$out/built"
""".encode(),
    )
    return folder


def _no_release(*_: object) -> None:
    raise release.Unavailable("no release here")


def test_a_build_fills_the_cache_once(module: Path, tmp_path: Path) -> None:
    said: list[str] = []
    assert programs.ready(TOOL) == {}
    first = programs.find(TOOL, said.append)
    assert programs.ready(TOOL) == first
    assert first == programs.find(TOOL, say)
    assert first["tool"].name == "tool"
    assert (tmp_path / "runs").read_text() == "run\n"
    assert any("no release here; building from source instead" in line for line in said)
    assert any("package 1, example.org/some/package" in line for line in said)
    # Another go.mod means another set of programs.
    (module / "go.sum").write_text("changed")
    assert programs.find(TOOL, say) != first
    assert (tmp_path / "runs").read_text() == "run\nrun\n"


def test_a_build_copies_files_of_a_dependency(module: Path, tmp_path: Path) -> None:
    source = tmp_path / "source" / "config"
    (source / "bases").mkdir(parents=True)
    (source / "bases" / "one.yaml").write_text("one")
    (source / "manifests.yaml").write_text("all")
    for path in source.rglob("*"):
        path.chmod(0o555)  # Go's module cache has such permissions.
    files = {"crds": "config/bases", "webhooks.yaml": "config/manifests.yaml"}
    folder = programs.find(dataclasses.replace(TOOL, files=files), say)["tool"].parent
    assert (folder / "crds" / "one.yaml").read_text() == "one"
    assert (folder / "webhooks.yaml").read_text() == "all"


def test_a_bundle_without_released_binaries_is_built(tmp_path: Path) -> None:
    with pytest.raises(release.Unavailable, match="kueue is released without binaries"):
        release.download("kueue", "v0.19.2", {}, tmp_path, say)


def test_checkouts_that_set_up_at_once_build_once(module: Path, tmp_path: Path) -> None:
    threads = [threading.Thread(target=programs.find, args=(TOOL, say)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (tmp_path / "runs").read_text() == "run\n"


def test_a_build_that_fails_leaves_nothing_and_says_why(module: Path, tmp_path: Path) -> None:
    script(tmp_path / "go" / "go", b"#!/bin/sh\necho 'go: no such module' >&2; exit 1\n")
    with pytest.raises(LocalClusterError, match="building tool failed:\ngo: no such module"):
        programs.find(TOOL, say)
    assert [path for path in (tmp_path / "cache" / "concertina" / "binaries").iterdir() if path.is_dir()] == []


def test_the_pinned_modules_name_their_versions() -> None:
    tools = paths.checkout() / "tools"
    assert programs.version(programs.CONTROL_PLANE, tools / "controlplane").startswith("v1.36.")
    assert programs.version(programs.NEXT_KUBERNETES, tools / "kubernetes-1.37").startswith("v1.37.")
    assert programs.version(programs.HELM, tools / "helm").startswith("v4.")
    assert programs.version(programs.VALE, tools / "vale").startswith("v3.")
    assert programs.version(programs.ACTIONLINT, tools / "actionlint").startswith("v1.")
    assert programs.version(programs.KIND, tools / "kind").startswith("v0.")
    assert programs.version(programs.KUEUE, tools / "kueue").startswith("v0.19.")
    assert release.prometheus(programs.version(programs.PROMETHEUS, tools / "prometheus")).startswith("3.")
    assert release.prometheus("v0.305.2") == "3.5.2"
    assert gobuild.required(tools / "controlplane")["go.etcd.io/etcd/server/v3"].startswith("v3.6.")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("mine", "/any"),
        ("mine:1.2", "/any"),
        ("mine:special", "/special"),
        ("mine@sha256:abc", "/any"),
        ("docker.io/library/mine", "/any"),
        ("host:5000/mine", None),
        ("host:5000/other:3", "/other"),
    ],
)
def test_image_names(name: str, expected: str | None) -> None:
    mapping = {"mine": "/any", "mine:special": "/special", "host:5000/other": "/other"}
    image = images.find(name, mapping)
    assert (image.environment if image else None) == expected
