"""The workspace's wheels: what each holds and stands on, installed as the images and users install them."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import grimp
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import trainingjob
from builders import pythons

ROOT = Path(__file__).resolve().parents[3]
SOURCES = (ROOT / "operator", ROOT / "trainer_image")
UV = Path(sys.executable).with_name("uv")
MOST_OPERATOR_MB = 120
SPEC = importlib.util.spec_from_file_location("lock", ROOT / "tools" / "lock.py")
assert SPEC
assert SPEC.loader
lock = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(lock)
MEMBERS: dict[str, Path] = lock.members()
VERSION = tomllib.loads((MEMBERS["concertina-sdk"] / "pyproject.toml").read_text())["project"]["version"]
TRACKERS = {"mlflow", "tensorboard", "wandb"}
"""Packages that the agent needs with its extra `tracking`."""
START_HOOK = "concertina_agent.workers.hook.sitecustomize"
"""A module of a folder in PYTHONPATH: it belongs to no package, so the import graph does not have it."""
pytestmark = [pytest.mark.timeout(600), pytest.mark.skipif(not UV.exists(), reason="no uv: run `make environment`")]


def project(name: str) -> dict[str, Any]:
    table = tomllib.loads((MEMBERS[name] / "pyproject.toml").read_text())["project"]
    assert isinstance(table, dict)
    return table


def test_all_have_one_version_and_ask_for_each_other_in_it() -> None:
    for name in MEMBERS:
        table = project(name)
        assert table["version"] == VERSION, name
        lines = [*table["dependencies"]]
        for extra in table.get("optional-dependencies", {}).values():
            lines += extra
        for wanted in map(Requirement, lines):
            assert wanted.name not in MEMBERS or str(wanted.specifier) == f"=={VERSION}", (name, wanted)


@pytest.mark.parametrize("kind", lock.ENVIRONMENTS)
def test_an_environment_is_made_of_what_its_lock_is_for(kind: str) -> None:
    script = (ROOT / "tools" / "install-environment.sh").read_text()
    parts = re.search(rf'^    {kind}\) parts="(.*)" ;;$', script, re.MULTILINE)
    assert parts
    folders = {name: f"{name}/packages" for name in ("operator", "trainer_image")}
    folders["base"] = "trainer_image/packages/sdk"
    named = {re.sub(r"\$(\w+)", lambda variable: folders[variable[1]], part) for part in parts[1].split()}
    assert named == {MEMBERS[name].relative_to(ROOT).as_posix() for name in lock.closure(lock.ENVIRONMENTS[kind])[0]}


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Build all distributions' wheels from a copy of the checkout."""
    folder = tmp_path_factory.mktemp("wheels")
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for source in ("operator", "trainer_image"):
        shutil.copytree(ROOT / source, folder / source, symlinks=True, ignore=ignored)
    shutil.copy(ROOT / "LICENSE", folder)
    for member in MEMBERS.values():
        shutil.rmtree(folder / member.relative_to(ROOT) / "build", ignore_errors=True)
        command = [UV, "build", "--offline", "--quiet", "--wheel", "--no-build-isolation", "--python", sys.executable]
        subprocess.run([*command, "--out-dir", folder / "out", member.relative_to(ROOT)], cwd=folder, check=True)
    return {name: folder / "out" / f"{name.replace('-', '_')}-{VERSION}-py3-none-any.whl" for name in MEMBERS}


@pytest.fixture(scope="module")
def owners(wheels: dict[str, Path]) -> dict[str, str]:
    """Return the distribution of each file, by its path in the wheel."""
    found: dict[str, str] = {}
    for name, wheel in wheels.items():
        for file in zipfile.ZipFile(wheel).namelist():
            if ".dist-info/" not in file:
                assert file not in found, f"{file} is in {name} and in {found[file]}"
                found[file] = name
    return found


def test_each_file_is_in_one_distribution(owners: dict[str, str]) -> None:
    modules = {path.relative_to(root).as_posix() for root in SOURCES for path in root.rglob("*.py")}
    modules = {module for module in modules if not module.startswith("packages/")}
    typed = ("concertina_data", "concertina_protocol", "concertina_state", "trainingjob")
    assert owners.keys() - modules == {f"{name}/py.typed" for name in typed}
    assert modules <= owners.keys()


def module_of(file: str) -> str:
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def test_a_distribution_imports_only_what_it_stands_on(owners: dict[str, str]) -> None:
    """Dependencies take the place of import contracts here: a package that is not installed can't be imported."""
    owner_by_module = {module_of(file): name for file, name in owners.items() if file.endswith(".py")}
    graph = grimp.build_graph(*{module.partition(".")[0] for module in owner_by_module}, cache_dir=None)
    assert owner_by_module.keys() - graph.modules == {START_HOOK}
    allowed = {name: set(lock.closure([name])[0]) for name in MEMBERS}
    for module, name in owner_by_module.items() - {(START_HOOK, owner_by_module[START_HOOK])}:
        for target in graph.find_modules_directly_imported_by(module):
            owner = owner_by_module.get(target)  # None for a namespace package, which has no file
            assert owner is None or owner in allowed[name], f"{module} of {name} imports {target} of {owner}"


BESIDE = {
    "concertina-cli": {"matplotlib"},  # for the picture of the demo, which runs in a checkout
    "concertina-core": {"kubernetes", "pydantic-core"},  # the command has the first one; the second is of pydantic
    "concertina-sdk": {"accelerate", "jax", "lightning", "pytorch-lightning", "torch", "transformers"},  # of users
}
"""Packages that a distribution imports if they are there, and does not ask for."""


def test_a_distribution_asks_for_each_package_that_it_imports(owners: dict[str, str]) -> None:
    """Look for a dependency or an extra for each import, within functions too."""
    distributions = importlib.metadata.packages_distributions()
    own = {file.partition("/")[0] for file in owners}
    asked = {name: BESIDE.get(name, set()) for name in MEMBERS}
    for name in MEMBERS:
        extras = ",".join(project(name).get("optional-dependencies", ()))
        asked[name] = asked[name] | {Requirement(line).name for line in lock.closure([f"{name}[{extras}]"])[1]}
    missing = {
        (name, module)
        for file, name in owners.items()
        if file.endswith(".py")
        for module in imported(next(root / file for root in SOURCES if (root / file).exists()))
        if module not in sys.stdlib_module_names and module not in own
        if not {canonicalize_name(d) for d in distributions.get(module, [module])} & asked[name]
    }
    assert not missing


def imported(file: Path) -> set[str]:
    """Return the names of the packages that a file imports."""
    names = set[str]()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module)
    return {name.partition(".")[0] for name in names}


def made(folder: Path, kind: str, wheels: dict[str, Path], python: str = sys.executable) -> Path:
    """Make an environment as `tools/install-environment.sh` does, from what `make environment` has downloaded."""
    subprocess.run([python, "-m", "venv", "--without-pip", folder], check=True)
    names, others = lock.closure(lock.ENVIRONMENTS.get(kind, [kind]))
    install = [UV, "pip", "install", "--quiet", "--offline", "--python", folder, "--compile-bytecode"]
    if others:  # what the distributions ask for, not the lock's file: a requirement that is not declared is lacking
        subprocess.run([*install, "--constraint", ROOT / "requirements/dev.txt", *others], check=True)
    subprocess.run([*install, "--no-deps", "--no-index", *(wheels[name] for name in names)], check=True)
    return folder


@pytest.fixture(scope="module")
def cli(tmp_path_factory: pytest.TempPathFactory, wheels: dict[str, Path]) -> Path:
    return made(tmp_path_factory.mktemp("cli"), "cli", wheels)


@pytest.fixture(scope="module")
def operator(tmp_path_factory: pytest.TempPathFactory, wheels: dict[str, Path]) -> Path:
    return made(tmp_path_factory.mktemp("operator"), "operator", wheels)


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory, wheels: dict[str, Path]) -> Path:
    return made(tmp_path_factory.mktemp("agent"), "agent", wheels)


def checked(environment: Path) -> set[str]:
    """Return the distributions of an environment, after a check that their requirements are met."""
    subprocess.run([UV, "pip", "check", "--quiet", "--python", environment], check=True)
    listed = subprocess.run(
        [UV, "pip", "list", "--format", "json", "--python", environment], capture_output=True, text=True, check=True
    )
    return {each["name"] for each in json.loads(listed.stdout)}


def lacking(environment: Path, owners: dict[str, str], names: set[str]) -> set[str]:
    """Import each module of these distributions there, and return the packages that are lacking."""
    started = ("__main__.py", "sitecustomize.py")  # which do their work when they are imported
    files = [file for file, name in owners.items() if name in names and file.endswith(".py")]
    modules = [module_of(file) for file in files if not file.endswith(started)]
    code = f"""
import importlib, json
lacking = set()
for module in {modules!r}:
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        lacking.add(error.name)
print(json.dumps(sorted(lacking)))
"""
    done = subprocess.run(
        [environment / "bin/python", "-I", "-c", code], capture_output=True, text=True, check=True, cwd=environment
    )
    return {name.partition(".")[0] for name in json.loads(done.stdout.splitlines()[-1])}


@pytest.mark.long(law="tests/unit/repository/test_distributions.py::test_a_distribution_imports_only_what_it_stands_on")
def test_the_operator_is_small_and_whole(operator: Path, owners: dict[str, str]) -> None:
    installed = checked(operator)
    assert {name for name in installed if name.startswith("concertina")} == {
        "concertina-config", "concertina-core", "concertina-operator", "concertina-sdk",
    }  # fmt: skip
    assert not installed & {"kubernetes", "pip", "setuptools", "uv", "torch", "numpy", "typer", "rich"}
    assert lacking(operator, owners, {"concertina-operator", "concertina-core", "concertina-config"}) == set()
    (packages,) = operator.glob("lib/python*/site-packages")
    size = sum(file.stat().st_size for file in packages.rglob("*") if file.is_file())
    assert size <= MOST_OPERATOR_MB * 10**6, f"{size / 10**6:.0f} MB"
    command = operator / "bin/concertina-operator"
    helped = subprocess.run([command, "--help"], env={}, capture_output=True, text=True, check=True, cwd=operator)
    assert helped.stdout.startswith("usage: concertina-operator")
    done = subprocess.run([command], env={}, capture_output=True, text=True, check=False, cwd=operator)
    assert "CONCERTINA_NAMESPACE is not set" in done.stderr


def test_the_agent_brings_no_installer(agent: Path, owners: dict[str, str], tmp_path: Path) -> None:
    assert checked(agent) == {"concertina-agent", "concertina-sdk", "obstore", "typing-extensions"}
    assert not list(agent.glob("bin/pip*")) + list(agent.glob("bin/uv*"))
    assert lacking(agent, owners, {"concertina-agent"}) <= TRACKERS
    subprocess.run([agent / "bin/concertina-agent", "install", tmp_path], check=True, capture_output=True)
    assert {path.name for path in tmp_path.iterdir()} >= {"agent.pyz"}


HELP = """
import contextlib, io, typer.main
from concertina.cli.main import app

def tried(*arguments):
    out = io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            app([*arguments, "--help"], prog_name="concertina")
        code = 0
    except SystemExit as end:
        code = end.code or 0
    assert code == 0 and "sage:" in out.getvalue(), (arguments, code, out.getvalue())

from concertina.cli.checkpoint import app as checkpoint
from concertina.cli.local import app as local
tried()
for name in typer.main.get_command(app).commands:
    tried(name)
for group, inner in (("checkpoint", checkpoint), ("local", local)):
    for name in typer.main.get_command(inner).commands:
        tried(group, name)
for name in ("build", "show", "verify", "pack"):
    tried("data", name)
tried("data", "build", "--cluster")
"""


def test_every_help_works_on_the_base_install(cli: Path) -> None:
    assert not checked(cli) & {"numpy", "obstore", "torch", "kopf"}
    subprocess.run([cli / "bin/python", "-I", "-c", HELP], check=True, timeout=300)


@pytest.mark.parametrize(
    ("arguments", "extra"),
    [
        ("checkpoint list file:///x", "storage"),
        ("reproduce file:///x --step 1", "storage"),
        ("data show /x", "data"),
        ("generate file:///x --prompt a", "data,torch"),
    ],
    ids=["checkpoint", "reproduce", "data", "generate"],
)
def test_a_missing_extra_is_named_with_the_command_that_installs_it(cli: Path, arguments: str, extra: str) -> None:
    done = subprocess.run(
        [cli / "bin/concertina", *arguments.split()], capture_output=True, text=True, check=False, cwd=cli
    )
    said = done.stderr.strip()
    assert said == f"This command needs obstore, which is not installed: pip install 'concertina-cli[{extra}]'"
    assert done.returncode == 1


def test_the_demo_asks_for_a_checkout(cli: Path) -> None:
    done = subprocess.run([cli / "bin/concertina", "demo"], capture_output=True, text=True, check=False, cwd=cli)
    assert "the demo needs a checkout of concertina" in " ".join(done.stdout.split())
    assert done.returncode == 1


SCRIPT = """
import array, sys, trainingjob
assert not {"torch", "numpy", "obstore"} & set(sys.modules)
data = trainingjob.data(sys.argv[1], length=3, batch=2)
weights = array.array("d", [0.0])
state = trainingjob.State(weights={"w": weights}, data=data)
start = state.restore()
rows = next(data)
assert rows.shape == (2, 4)
assert sorted(map(tuple, rows.tolist())) == [(97, 98, 99, 100), (100, 101, 102, 103)]
weights[0] += 1
trainingjob.report(step=start + 1, loss=0.5)
state.commit(start, durable=True)
try:
    trainingjob.data("s3://bucket/tokens", length=3, batch=2)
except ModuleNotFoundError as error:
    missing = str(error)
print(start, weights[0], data.samples, trainingjob.should_checkpoint(), missing)
"""


def version(python: str) -> str:
    command = [python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.parametrize("oldest", [False, True], ids=["this Python", "Python 3.9"])
def test_a_script_needs_the_standard_library_alone(oldest: bool, wheels: dict[str, Path], tmp_path: Path) -> None:
    from concertina_trainer.data.build.build import build

    python = pythons.oldest() if oldest else sys.executable
    if python is None:
        pytest.skip(pythons.WITHOUT)
    assert not oldest or version(python) == "3.9"
    (tmp_path / "text.txt").write_text("abcdefg")
    list(build([tmp_path / "text.txt"], str(tmp_path / "data")))
    environment = made(tmp_path / "sdk", "concertina-sdk", wheels, python)
    assert checked(environment) == {"concertina-sdk"}
    command = [environment / "bin/python", "-I", "-c", SCRIPT, str(tmp_path / "data")]
    for weight, samples in (("1.0", "2"), ("2.0", "4")):
        done = subprocess.run(command, cwd=tmp_path, env={}, capture_output=True, text=True, check=True)
        assert done.stdout.split()[1:3] == [weight, samples]
        assert "pip install 'concertina-sdk[storage]'" in done.stdout


PUBLIC = {
    "trainingjob/__init__.py": ("checkpoint_dir", "data", "report", "run", "should_checkpoint"),
    "trainingjob/_state.py": ("State",),
    "trainingjob/_data.py": ("Data",),
    "trainingjob/_world.py": ("World", "world"),
    "concertina_state/holdings.py": ("ArrayShard",),
}
"""What scripts call, by the file that defines it: the names of `trainingjob.__all__`, and what `data` returns."""


def functions_of(definition: ast.stmt) -> list[ast.FunctionDef]:
    """Return a function, or the public methods of a class, with `__init__` and `__next__` if the class has them."""
    found = definition.body if isinstance(definition, ast.ClassDef) else [definition]
    functions = [each for each in found if isinstance(each, ast.FunctionDef)]
    return [each for each in functions if each.name in ("__init__", "__next__") or not each.name.startswith("_")]


def undescribed(definition: ast.ClassDef | ast.FunctionDef) -> list[str]:
    """Return what lacks a docstring, or the type of an argument or result."""
    functions = functions_of(definition)
    own_words = [definition, *(each for each in functions if each.name != "__init__")]
    lacking = [f"{each.name} has no docstring" for each in own_words if not ast.get_docstring(each)]
    for function in functions:
        named = function.args
        arguments = [*named.posonlyargs, *named.args, *named.kwonlyargs, *filter(None, (named.vararg, named.kwarg))]
        untyped = [each.arg for each in arguments if each.annotation is None and each.arg != "self"]
        lacking += [f"{definition.name}.{function.name}: {name} has no type" for name in untyped]
        if function.returns is None:
            lacking.append(f"{definition.name}.{function.name} has no type of its result")
    return lacking


def test_an_editor_finds_types_and_words(wheels: dict[str, Path]) -> None:
    with zipfile.ZipFile(wheels["concertina-sdk"]) as wheel:
        assert {"trainingjob/py.typed", "concertina_state/py.typed"} <= set(wheel.namelist())
        trees = {file: ast.parse(wheel.read(file)) for file in PUBLIC}
    assert {name for names in PUBLIC.values() for name in names} == {*trainingjob.__all__, "Data"}
    lacking: list[str] = []
    for file, names in PUBLIC.items():
        defined = {each.name: each for each in trees[file].body if isinstance(each, (ast.ClassDef, ast.FunctionDef))}
        for name in names:
            lacking += undescribed(defined[name])
    assert not lacking


def test_wheels_name_their_licence_and_no_other_project(wheels: dict[str, Path]) -> None:
    for name, wheel in wheels.items():
        metadata = [file for file in zipfile.ZipFile(wheel).namelist() if ".dist-info/" in file]
        assert any(file.endswith("licenses/LICENSE") for file in metadata), name
        assert name != "concertina"  # which is another project's on PyPI
