"""`concertina dashboard` against a real API server, as a process of its own, accessed by HTTP and a real browser."""

from __future__ import annotations

import asyncio
import http.client
import json
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from builders import browser
from builders.cluster.cli import DEMO, NOW, Cli, status
from builders.until import until, until_async

EVIL = "<script>document.title = 'EVIL'</script><img src='/evil' onerror=\"document.title = 'EVIL'\">"


class Served:
    def __init__(self, port: int) -> None:
        self.port = port
        self.address = f"http://127.0.0.1:{port}"

    def ask(self, path: str, method: str = "GET", host: str = "") -> tuple[int, str, http.client.HTTPMessage]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        connection.request(method, path, headers={"Host": host} if host else {})
        answer = connection.getresponse()
        return answer.status, answer.read().decode(), answer.headers

    def text(self, path: str) -> str:
        return self.ask(path)[1]


@contextmanager
def served(cli: Cli, *options: str) -> Iterator[Served]:
    """Run the dashboard until Ctrl-C, on which it ends in order."""
    with cli.start("dashboard", "--port", "0", *options) as process:
        assert process.stdout
        first_line = process.stdout.readline()
        match = re.match(r"The dashboard is at http://127\.0\.0\.1:(\d+)/,", first_line)
        assert match, first_line + process.stdout.read()
        try:
            yield Served(int(match[1]))
        finally:
            process.send_signal(signal.SIGINT)
        rest = process.stdout.read()
        assert (process.wait(60), rest) == (130, "")


def two_jobs(cli: Cli) -> None:
    cli("run", str(DEMO), "--detach")
    cli("run", "-", "--detach", stdin=DEMO.read_text().replace("name: demo", "name: other", 1))
    cli.kubectl("label", "tj", "demo", "team=red")
    cli.write("demo", status("Training", EVIL, "Running"))
    about = {"apiVersion": "concertina.dev/v1beta1", "kind": "TrainingJob", "name": "demo", "namespace": cli.namespace}
    uid = cli.kubectl("get", "tj", "demo", "-o", "jsonpath={.metadata.uid}")
    event = {
        "apiVersion": "v1", "kind": "Event", "metadata": {"name": "demo.1"}, "involvedObject": {**about, "uid": uid},
        "type": "Warning", "reason": "MemberLost", "message": EVIL, "count": 3, "lastTimestamp": NOW,
    }  # fmt: skip
    cli.kubectl("create", "-f", "-", stdin=json.dumps(event))


def test_pages_of_all_jobs_and_of_one(cli: Cli) -> None:
    two_jobs(cli)
    job = f"/jobs/{cli.namespace}/demo"
    with served(cli) as dashboard:
        until(lambda: "2 jobs: 1 waiting, 1 training" in dashboard.text("/"), "both jobs", lambda: dashboard.text("/"))
        assert f'href="{job}"' in dashboard.text("/")
        grouped = dashboard.text("/?by=team&sort=name&page=7")
        assert re.search(r"<th>Team</th>.*<td>\(none\)</td>.*other.*<td>red</td>.*demo", grouped)
        assert dashboard.text("/?by=&sort=size&page=-1").count("<td>") == dashboard.text("/").count("<td>")

        code, page, headers = dashboard.ask(job)
        assert code == 200
        for text in ("step", "Training", "MemberLost", "What is wrong", "Where the time went", "concertina logs demo"):
            assert text in page, text
        assert (page.count("<script"), page.count("<img"), page.count("&lt;img")) == (1, 0, 2), "ours alone is one"
        nonce = re.search(r'<script nonce="([^"]+)"', page)
        policy = headers["Content-Security-Policy"]
        assert nonce
        assert f"script-src 'nonce-{nonce[1]}'" in policy
        assert policy.startswith("default-src 'none'")
        assert nonce[1] not in dashboard.text(job), "each page has its own"
        assert headers["X-Content-Type-Options"] == "nosniff"

        cli.kubectl("delete", "tj", "demo")
        assert dashboard.ask(job)[0] == 404
        until(lambda: "1 job: 1 waiting" in dashboard.text("/"), "the list without it", lambda: dashboard.text("/"))


def test_it_reads_alone_and_answers_under_its_own_name_alone(cli: Cli) -> None:
    with served(cli) as dashboard:
        assert "There are no TrainingJobs here" in dashboard.text("/")
        for method in ("POST", "PUT", "PATCH", "DELETE"):
            assert dashboard.ask("/", method)[0] == 405
        for path in ("/jobs", "/jobs/a/..%2f..%2fsecrets", f"/jobs/{cli.namespace}/a%2fstatus", "/jobs/A/B", "/x"):
            assert dashboard.ask(path)[0] == 404, path
        assert dashboard.ask(f"/jobs/{cli.namespace}/none")[0] == 404
        for host in ("localhost", "127.0.0.1", f"localhost:{dashboard.port}", "127.0.0.1:9"):
            assert dashboard.ask("/", host=host)[0] == 200, host
        for host in (
            "evil.example",
            f"evil.example:{dashboard.port}",
            "127.0.0.1.evil.example",
            "localhost:80:80",
            "x",
        ):
            assert dashboard.ask("/", host=host)[0] == 421, host
        taken = cli("dashboard", "--port", str(dashboard.port))
        assert (taken.returncode, taken.stdout) == (1, "")
        assert "is not available: Address already in use. Choose another one with --port" in taken.stderr
    nowhere = cli("dashboard", "--kubeconfig", "/nowhere")
    assert (nowhere.returncode, "There is no cluster to connect to" in nowhere.stderr) == (1, True)


@pytest.mark.skipif(not browser.program(), reason="there is no Chromium here: install Debian's package chromium")
def test_in_a_browser_nothing_of_a_job_comes_alive_and_the_page_keeps_up(cli: Cli) -> None:
    two_jobs(cli)
    with served(cli) as dashboard:
        asyncio.run(_look(cli, dashboard))


async def _look(cli: Cli, dashboard: Served) -> None:
    address = f"{dashboard.address}/jobs/{cli.namespace}/demo"
    async with browser.tab() as tab:

        async def shown(text: str, now: bool = True) -> None:
            """Wait until the page shows a text.

            If `now` is true, the page refreshes at once instead of at its next interval.

            Raises:
                AssertionError: If the text does not appear in time.
            """
            for _ in range(300):
                seen = str(await tab.evaluate("document.querySelector('main').innerText"))
                if text in seen:
                    return
                if now:
                    await tab.evaluate("again()")
                await asyncio.sleep(0.2)
            raise AssertionError(f"{text!r} is not in {seen}")

        await tab.open(address)
        await shown(EVIL)
        assert await tab.evaluate("document.title") == f"{cli.namespace}/demo"
        assert await tab.evaluate("document.querySelectorAll('img').length") == 0
        assert await tab.evaluate("getComputedStyle(document.querySelector('.scroll')).overflowX") == "auto", "styled"
        loads = tab.loads
        await asyncio.to_thread(cli.write, "demo", status("Running", "it goes on", "Running"))
        await shown("it goes on", now=False)
        await asyncio.to_thread(cli.cluster.kill_component, "kube-apiserver")
        try:
            await shown("can't be reached")
        finally:
            await asyncio.to_thread(cli.cluster.start_component, "kube-apiserver")
            await asyncio.to_thread(cli.cluster.wait_api)
        await shown("it goes on")
        assert tab.loads == loads, "it was never loaded anew"
        assert {url.split("?")[0] for url in tab.requests} == {address}
        await tab.open(f"{dashboard.address}/")
        await tab.evaluate("document.querySelector('input[name=by]').value = 'team'")
        await tab.evaluate("document.querySelector('form').submit()")
        await until_async(lambda: tab.loads == loads + 2, "the list by groups")
        await shown("red")
        assert tab.complaints == []
