"""Site: its reference is current, its navigation is complete, and its commands exist."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import typer.main
from tools import status_picture
from tools.reference import __main__ as reference
from tools.reference import cli, names, reasons
from typer.core import TyperGroup
from typer.exceptions import TyperException

from builders import pages
from builders.cluster import kueue, queues
from concertina.cli.checkpoint import app as checkpoint_app
from concertina.cli.local import app as local_app
from concertina.cli.main import app
from concertina.kube.manifests import names as object_names

ROOT = pages.ROOT
MARKED = {"kind": 6, "cloud": 8, "images": 1, "gpu": 4}
"""Number of blocks of commands that no test runs, because they need what no test has."""
OWN_APPS = {"local": local_app, "checkpoint": checkpoint_app}
"""Commands that pass their arguments on to an app of their own."""
RUN_BY_OTHERS = (
    ("cli.md", "concertina logs demo", "cluster/cli/test_commands.py"),
    ("cli.md", "concertina trace demo", "cluster/operator/training/test_step_traces.py"),
    ("data.md", "$ concertina data build --out data corpus/", "train/test_site.py"),
    ("dcp.md", "concertina checkpoint export s3://bucket/run-1 outputs", "train/trainer/state/test_dcp_folders.py"),
    ("diagnosis.md", "kubectl get tj JOB -o yaml", "cluster/operator/diagnosis/test_planted.py"),
    ("drills.md", "concertina drill demo", "drill/test_drills.py"),
    ("get-started/index.md", "make demo", "cluster/test_site.py"),
    ("gpu-checks.md", "PYTHONPATH=tests python3 -m builders.gpu merge", "unit/repository/test_gpu_checks.py"),
    ("lineage.md", "concertina checkpoint show", "train/checkpoints/test_lineage.py"),
    ("lineage.md", "concertina reproduce", "train/checkpoints/test_lineage.py"),
)
"""Pages, beginnings of blocks, and the files of the tests that read these blocks from the pages and run them."""
SECTIONS_RUN = (("diagnosis.md", "concertina diagnose JOB  "),)
"""Beginnings of the blocks of a page's sections, all of which tests/cluster/operator/diagnosis follows."""


def test_the_reference_is_current() -> None:
    assert not reference.stale(), "run `make reference`"


def test_the_picture_of_the_status_is_current() -> None:
    assert status_picture.PICTURE.read_text() == status_picture.picture(), "run python -m tools.status_picture"


def test_a_name_that_the_tables_lack_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(names.WORKER, "CONCERTINA_ROUND")
    with pytest.raises(ValueError, match="variables to add: \\['CONCERTINA_ROUND'\\]"):
        names.page()


def test_reasons_are_found_in_the_code() -> None:
    found = {(use.reason, use.use) for use in reasons.uses()}
    assert {
        ("ReachedMaxRestarts", "condition"),
        ("NodeAvoided", "Warning event"),
        ("NoValidSize", "the job stalls"),
    } <= found


def test_the_page_of_the_python_api_has_every_public_name() -> None:
    folder = ROOT / "trainer_image" / "trainingjob"
    modules = [path for path in sorted(folder.glob("*.py")) if path.name == "__init__.py" or path.name[0] != "_"]
    public = {
        (".".join(path.relative_to(folder.parent).with_suffix("").parts).removesuffix(".__init__"), name)
        for path in modules
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
        for name in ast.literal_eval(node.value)
    }
    shown, whole = set(), set()
    for entry in (ROOT / "docs/reference/python.md").read_text().split("\n::: ")[1:]:
        target = entry.split()[0]
        members = re.search(r"members: \[(.*?)\]", entry)
        shown |= {target.rpartition(".")[2], *(re.split(r",\s*", members[1]) if members else ())}
        whole |= set() if members else {target}
    assert len({module for module, _ in public}) == len(modules), "each public module has __all__"
    assert not [each for each in sorted(public) if each[1] not in shown and each[0] not in whole]


def test_queues_of_the_page_have_the_form_of_those_that_kueue_admits() -> None:
    """The long suite has the CRDs of Kueue; `builders.cluster.queues` is tested with Kueue itself."""
    shown = {each["kind"]: each for each in _manifests("queues.md") if each.get("apiVersion") == queues.API_VERSION}
    flavor, queue, local = shown["ResourceFlavor"], shown["ClusterQueue"], shown["LocalQueue"]
    name = flavor["metadata"]["name"]
    assert flavor.keys() < queues.resource_flavor(name).keys()
    assert local == queues.local_queue("team-a", "team-a", queue["metadata"]["name"])
    assert shown["WorkloadPriorityClass"] == queues.priority_class("high", 1000)
    group = queue["spec"]["resourceGroups"][0]
    assert [flavor["name"] for flavor in group["flavors"]] == [name]
    assert [resource["name"] for resource in group["flavors"][0]["resources"]] == group["coveredResources"]
    assert _keys(queue) <= _keys(queues.cluster_queue("q", "f", 1))
    [added] = [each["integrations"] for each in _manifests("queues.md") if "integrations" in each]
    assert added == {"externalFrameworks": [kueue.JOB_KIND]}


def test_the_network_policy_names_the_labels_and_ports_of_the_pods() -> None:
    policy = next(each["spec"] for each in _manifests("pods.md") if each.get("kind") == "NetworkPolicy")
    operator, pods, prometheus = policy["ingress"]
    selector = {"matchLabels": object_names.MANAGED_BY}
    assert policy["podSelector"] == pods["from"][0]["podSelector"] == selector
    ports = [rule["ports"][0]["port"] for rule in (operator, prometheus)]
    assert ports == [object_names.PORT_NAME, object_names.METRICS_PORT_NAME]
    label = operator["from"][0]["podSelector"]["matchLabels"]["app.kubernetes.io/name"]
    assert f"app.kubernetes.io/name: {label}\n" in (ROOT / "charts/concertina/templates/_names.tpl").read_text()


def _manifests(name: str) -> list[dict[str, Any]]:
    return [manifest for block in pages.blocks(pages.DOCS / name) for manifest in block.manifests]


def _keys(value: object) -> set[str]:
    """Return all keys in a manifest."""
    if isinstance(value, dict):
        return set(value).union(*map(_keys, value.values()))
    return set().union(*map(_keys, value)) if isinstance(value, list) else set()


def test_every_page_is_in_the_navigation_once() -> None:
    text = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    listed = Counter(re.findall(r"[\w/-]+\.md", text))
    there = {str(page.relative_to(pages.DOCS)) for page in pages.DOCS.rglob("*.md")}
    assert (set(listed), max(listed.values())) == (there, 1)


@pytest.mark.parametrize("page", sorted(pages.DOCS.rglob("*.md")), ids=lambda page: str(page.relative_to(pages.DOCS)))
def test_a_list_begins_after_an_empty_line(page: Path) -> None:
    """Check that a list is not taken for a part of the paragraph before it, as Python-Markdown does otherwise."""
    text = re.sub(r"^ *```.*?^ *```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    assert not re.findall(r"^(?!\s|[-*] |\d+\. |#|\|).+\n(?:[-*] |\d+\. ).*", text, flags=re.MULTILINE)


@pytest.mark.parametrize("page", sorted(pages.DOCS.rglob("*.md")), ids=lambda page: str(page.relative_to(pages.DOCS)))
def test_paragraphs_and_blocks_of_a_list_are_indented_by_four(page: Path) -> None:
    """Python-Markdown ends a list at a paragraph or a block with another indentation, and numbers from 1 again."""
    assert not _odd_indentations(page.read_text())


def test_an_odd_indentation_is_noticed() -> None:
    text = "1. One\n   more\n\n   Odd.\n\n   ```\n   odd\n   ```\n2. Two\n\n    Even.\n\n    ```\n   in it\n    ```\n"
    assert _odd_indentations(text) == ["4:    Odd.", "6:    ```"]


@pytest.mark.parametrize("page", sorted(pages.DOCS.rglob("*.md")), ids=lambda page: str(page.relative_to(pages.DOCS)))
def test_a_page_that_installs_packages_says_where_they_are(page: Path) -> None:
    """`pip install concertina-cli` fails until the packages are published. Remove this test then."""
    names = re.search(r"\bconcertina-(?:cli|sdk)\b", page.read_text())
    here = page.name == "install.md" or page.parent.name == "decisions"
    assert here or not names or "install.md#packages" in page.read_text()


def _odd_indentations(text: str) -> list[str]:
    """Return the first lines of paragraphs and code blocks whose indentation is not a multiple of four spaces."""
    found, in_block, after_empty = [], False, True
    for number, line in enumerate(text.splitlines(), 1):
        fence = line.lstrip().startswith("```")
        if not in_block and (after_empty or fence) and (len(line) - len(line.lstrip())) % 4 and line.strip():
            found.append(f"{number}: {line}")
        in_block ^= fence
        after_empty = not line.strip()
    return found


def test_files_that_a_page_shows_are_those_of_the_examples() -> None:
    shown = [block for block in pages.all_blocks() if block.title]
    assert shown
    assert not [b.title for b in shown if b.text != (ROOT / "examples" / "get-started" / b.title).read_text()]


def test_marks_are_known_and_counted() -> None:
    marks = Counter(block.needs for block in pages.all_blocks() if block.commands and block.needs)
    assert set(marks) <= set(pages.NEEDS)
    assert {need: marks[need] for need in pages.NEEDS} == MARKED


def test_a_test_runs_all_commands_without_a_mark() -> None:
    run = {f"get-started/{name}" for name in pages.GET_STARTED}
    by_others = [*SECTIONS_RUN, *((name, beginning) for name, beginning, _ in RUN_BY_OTHERS)]
    run_by_others = [block for name, beginning in by_others for block in pages.beginning_with(name, beginning)]
    run_by_tests = [*pages.run_by_tests(), *run_by_others]
    left = [
        block.name
        for block in pages.all_blocks()
        if block.commands and not block.needs and block.name not in run and block not in run_by_tests
    ]
    assert not left


@pytest.mark.parametrize(("name", "beginning", "test"), RUN_BY_OTHERS)
def test_the_named_test_reads_the_block_from_the_page(name: str, beginning: str, test: str) -> None:
    text = (ROOT / "tests" / test).read_text()
    assert f'"{name}"' in text
    assert f'"{beginning}' in text


@pytest.mark.parametrize("page", sorted(pages.DOCS.rglob("*.md")), ids=lambda page: str(page.relative_to(pages.DOCS)))
def test_commands_have_the_options_that_there_are(page: Path) -> None:
    commands = [words for block in pages.blocks(page) for words in block.commands]
    synopses = [words for words in commands if any(word.startswith("[") for word in words)]
    own = [words[1:] for words in commands if words and Path(words[0]).name == "concertina" and words not in synopses]
    assert not [complaint for words in own if (complaint := _complaint(words))]


def test_a_block_with_a_prompt_or_a_variable_is_one_of_commands() -> None:
    for text in ("$ kubectl get tj\n", "PYTHONPATH=tests python3 -m x\n", "aws s3 ls\n"):
        assert pages.Block(pages.DOCS / "a.md", "", "", "", text).commands


@pytest.mark.parametrize("page", sorted(pages.DOCS.rglob("*.md")), ids=lambda page: str(page.relative_to(pages.DOCS)))
def test_commands_within_sentences_have_the_options_that_there_are(page: Path) -> None:
    """A sentence may leave out the values of a command, so only its name and its options are checked."""
    text = re.sub(r"^ *```.*?^ *```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    quoted = [" ".join(code.split()) for code in re.findall(r"`(concertina\s[^`]+)`", text)]
    assert not [complaint for command in quoted if (complaint := _unknown(command.split()[1:]))]


@pytest.mark.parametrize("wrong", ["nope", "status demo --nope", "checkpoint lst URI", "local node kil"])
def test_an_unknown_name_or_option_within_a_sentence_is_noticed(wrong: str) -> None:
    assert _unknown(wrong.split())


def _unknown(words: list[str]) -> str:
    """Return the names of commands and options that do not exist, with the whole command."""
    if words[:1] == ["data"]:
        parsers = [parser for name, parser in cli.data_commands().items() if [name.split()[0]] == words[1:2]]
        if not parsers and words[1:] not in ([], ["--help"]):
            return f"{words[1]}: {' '.join(words)}"
        options = {"--help", *(option for parser in parsers for option in parser._option_string_actions)}
        return "".join(f"{option}: {' '.join(words)}" for option in _options(words) if option not in options)
    apart = OWN_APPS.get(words[0] if words else "")
    command, rest = typer.main.get_command(apart or app), list(words[1:] if apart else words)
    while isinstance(command, TyperGroup) and rest and not rest[0].startswith("-"):
        if rest[0] not in command.commands:
            return f"{rest[0]}: {' '.join(words)}"
        command = command.commands[rest.pop(0)]
    options = {name for each in command.params for name in (*each.opts, *each.secondary_opts)} | {"--help"}
    return "".join(f"{option}: {' '.join(words)}" for option in _options(rest) if option not in options)


def _options(words: list[str]) -> list[str]:
    return [word.partition("=")[0].strip("[],.;") for word in words if word.startswith(("-", "[-"))]


@pytest.mark.parametrize("wrong", ["stat demo", "local node kil x", "status demo --nope", "scale demo"])
def test_a_command_that_there_is_not_is_noticed(wrong: str) -> None:
    assert _complaint(wrong.split())


def _complaint(words: list[str]) -> str:
    """Return what is wrong with a command; values may be placeholders."""
    end = next((n for n, word in enumerate(words) if word in ("|", ">", "&", "&&", ";", "2>&1", "||")), len(words))
    arguments = words[:end]
    apart = OWN_APPS.get(arguments[0] if arguments else "")
    command, arguments = typer.main.get_command(apart or app), arguments[1:] if apart else arguments
    while isinstance(command, TyperGroup):
        if not arguments or not (below := command.commands.get(arguments[0])):
            return "" if arguments[:1] in ([], ["--help"], ["COMMAND"]) else f"no such command: {' '.join(words)}"
        command, arguments = below, arguments[1:]
    if "--help" in arguments:
        return ""
    try:
        command.make_context(words[0], list(arguments))
    except TyperException as error:
        placeholder = type(error).__name__ == "BadParameter"
        return "" if placeholder else f"{' '.join(words)}: {error}"
    return ""
