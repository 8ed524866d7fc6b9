"""Check of prose: the texts that it collects, and that Vale applies the style to them."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import typer
from tools import prose
from tools.prose import MessageCollector, Text

from concertina.local.binaries import programs

VALE = programs.ready(programs.VALE).get("vale")

MODULE = '''
def annotate(pods, node):
    """Say what happens."""
    log.info("nothing that users read")
    message = f"replica {pods[0]} is lost: " + ("its node stopped" if node else "it stopped by itself")
    return Event("Warning", "ReplicaLost", message, advice="raise maxRestarts to go on")

class Check:
    async def sentence(self):
        if self.old:
            raise errors.InvalidInput("The folder holds no checkpoint.")
        return "all replicas are ready"
'''


def test_messages_of_events_and_errors_are_collected() -> None:
    collector = MessageCollector("module.py")
    collector.visit(ast.parse(MODULE))
    assert [text for text in collector.texts if " " in text.content] == [
        Text("module.py annotate", "replica `x` is lost: its node stopped"),
        Text("module.py annotate", "replica `x` is lost: it stopped by itself"),
        Text("module.py annotate", "raise maxRestarts to go on"),
        Text("module.py Check.sentence", "The folder holds no checkpoint."),
        Text("module.py Check.sentence", "all replicas are ready"),
    ]


def test_lines_of_a_screen_are_collected() -> None:
    source = 'def rows(job):\n    yield "Next", f"wait for {job} to end"\n    return "nothing has to be done"\n'
    for module, found in ((prose.SCREENS[0], ["wait for `x` to end", "nothing has to be done"]), ("other.py", [])):
        collector = MessageCollector(module)
        collector.visit(ast.parse(source))
        assert [text.content for text in collector.texts if " " in text.content] == found


def test_descriptions_and_rules_of_a_schema_are_collected() -> None:
    schema = {
        "description": "A job.",
        "x-kubernetes-validations": [{"rule": "has(self.a)", "message": "set a"}],
        "properties": {
            "a": {"type": "array", "items": {"description": "A value."}},
            "template": {"description": "Kubernetes wrote this one."},
        },
    }
    assert [text for text in prose.crd_texts(schema) if text.content] == [
        Text("TrainingJob description", "A job."),
        Text("TrainingJob rule 1", "set a"),
        Text("a[] description", "A value."),
    ]


def test_help_of_commands_and_parameters_is_collected() -> None:
    app = typer.Typer(help="Run jobs.")

    @app.command(help="Start a job.")
    def start(replicas: int = typer.Option(1, "--replicas", help="Number of replicas.")) -> None:
        pass

    @app.command(help="Stop a job.")
    def stop() -> None:
        pass

    texts = list(prose.help_texts(typer.main.get_command(app), "jobs"))
    for expected in (
        Text("jobs", "Run jobs."),
        Text("jobs start", "Start a job."),
        Text("jobs start --replicas", "Number of replicas."),
        Text("jobs stop", "Stop a job."),
    ):
        assert expected in texts


def test_texts_of_each_kind_are_found() -> None:
    names = {text.name for text in prose.all_texts(prose.ROOT)}
    assert {"spec.replicas description", "column Age", "concertina run"} <= names
    for package in ("operator/concertina/plan/", "trainer_image/trainingjob/"):
        assert any(name.startswith(package) for name in names)


def test_without_vale_the_check_is_skipped_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("KUBEBUILDER_ASSETS", raising=False)
    assert prose.main([]) == 0
    assert "Vale was skipped" in capsys.readouterr().out


@pytest.mark.skipif(VALE is None, reason="there is no Vale here: `make vale` provides it, once")
def test_the_style_finds_what_it_forbids_and_nothing_in_plain_english() -> None:
    assert VALE
    texts = {
        "SubjectFirst": "Who trains alone waits.",
        "RelativeFirst": "The name. By which alerts know it.",
        "VeryLongSentence": "the replica and " * 16,
        "Hedges": "The job simply continues.",
        "FirstPerson": "The file is no checkpoint of ours.",
        "Latin": "A device, e.g. a GPU.",
        "Future": "The operator will delete the pod.",
        "RepeatedWord": "The operator deletes the the pod.",
        "Metaphors": "The next rung restarts the workers.",
        "none": "The operator deletes the pod. Set `what` to 1 if a replica that trains alone waits.",
    }
    findings = prose.check(VALE, (Text(rule, content) for rule, content in texts.items()))
    found = {(finding.text.name, finding.rule.removeprefix("Concertina.")) for finding in findings}
    assert found == {(rule, rule) for rule in texts if rule != "none"} | {("VeryLongSentence", "LongSentence")}
    rules = {path.stem for path in (prose.ROOT / "tools/vale/styles/Concertina").glob("*.yml")}
    assert rules == {rule for _, rule in found}, "each rule has a sentence that it finds"


@pytest.mark.skipif(VALE is None, reason="Vale is not here: run `make vale`")
def test_hand_written_pages_are_checked(tmp_path: Path) -> None:
    for name in ("docs/page.md", "docs/reference/api.md", "docs/decisions/rounds.md", "README.md"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("# A page\n\nThe operator will start `pods` of a job.\n\nWho waits is asked.\n")
    assert VALE
    findings = prose.check_pages(VALE, tmp_path)
    assert {(each.text.name, each.rule) for each in findings} == {
        ("docs/page.md:3", "Concertina.Future"),
        ("docs/page.md:5", "Concertina.SubjectFirst"),
        ("docs/decisions/rounds.md:3", "Concertina.Future"),
        ("docs/decisions/rounds.md:5", "Concertina.SubjectFirst"),
        ("README.md:3", "Concertina.Future"),
        ("README.md:5", "Concertina.SubjectFirst"),
    }
