"""Launch lines as people write them, plainly and warm: equal results, and the script is warm behind each of them."""

import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from builders.train.starts import WARMTH, alike, prepare, started, written

FACTS = """
    print("args", sys.argv, os.getcwd(), os.nice(0), sorted(os.sched_getaffinity(0)), os.umask(0o22), sys.executable)
    import resource, signal
    print(resource.getrlimit(resource.RLIMIT_NOFILE), resource.getrlimit(resource.RLIMIT_CORE))
    print({n.name: str(signal.getsignal(n)) for n in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM)})
    skipped = ("_", "SHLVL", "PWD", "OLDPWD")
    print({name: value for name, value in sorted(os.environ.items()) if name not in skipped})
    print(sys.stdout.line_buffering, sys.stdout.seekable(), sys.stdin.seekable(), sorted(os.listdir("/proc/self/fd")))
    print("stdin", sys.stdin.read(), os.getsid(0) == os.getsid(os.getppid()))
    os.system("echo from a child")
    print("error", file=sys.stderr)
    if "--exit" in sys.argv: sys.exit(int(sys.argv[-1]))
    if "--kill" in sys.argv: os.kill(os.getpid(), int(sys.argv[-1]))
    if "--kill-group" in sys.argv: os.killpg(0, int(sys.argv[-1]))
"""
LINES = {
    "a condition": "R=new; [ -f script.py ] && R=old; python script.py --init=$R; echo $?",
    "a pipe to tee": "set -o pipefail; python script.py --exit 4 2>&1 | tee log; echo ${PIPESTATUS[@]}; exit 4",
    "a folder, a limit, a mask and nice": (
        "mkdir -p runs; cd runs; ulimit -n 300; ulimit -c 0; umask 027; exec nice -n 3 python ../script.py"
    ),
    "a heredoc as input": "python script.py <<END\none\n$HOME\nEND\n",
    "a signal that the shell sees": "python script.py --kill 15; echo $?",
    "a failure is handled": "python script.py || exit 1; python script.py --exit 6 || { echo failed $?; exit 6; }",
    "in the background": "python script.py & wait $!; echo $?",
    "a loop and a variable": "export LR=3; for i in 1 2; do python script.py $i || exit 9; done; echo end",
    "a sourced file and a function": "echo 'go() { \"$@\"; }; export F=1' > lib.sh; . ./lib.sh; go python script.py x",
    "an affinity behind env": "env A=1 taskset -c 0 python script.py; echo $?",
    "a script as input": "python - --exit 5 <<END\nimport sys; print(sys.argv); sys.exit(5)\nEND\n",
    "files": "exec 5>five; flock 5; python script.py > out 2> err; cat out err",
    "an exit code": "exec python script.py --exit 7",
    "a signal that ends all": "exec python script.py --kill 9",
    "a signal to the group": "trap 'echo trapped' TERM; python script.py --kill-group 15; echo $?",
    "an ignored signal": "trap '' HUP INT; python script.py",
    "a command in a substitution": 'N=$(python -c "print(3)"); python script.py $N',
    "timeout": "timeout 100 python script.py --exit 2; echo $?",
    "timeout that ends it": "timeout 3 python -c 'import anchor, time; print(1, flush=True); time.sleep(60)'; echo $?",
    "a module": "cd . && python -m script --flag",
    "closed files": "python script.py <&- 2>&-; echo $?",
    "make": "printf 'train:\\n\\t@python script.py $(ARGS)\\n' > Makefile; make -s train ARGS=1",
    "numactl": "numactl --physcpubind=0 python script.py",
    "xargs": "echo a b | xargs -n 1 python script.py",
}
NOTES = {
    "a loop and a variable": "00011111",
    "xargs": "00011111",
    "a failure is handled": "00011111",
    "a script as input": "",
    "timeout that ends it": "",
}
"""Where it is not WARMTH. The second script of a line is warm already, once the parent of the first one is."""
GATE = (
    "a condition",
    "a pipe to tee",
    "a folder, a limit, a mask and nice",
    "a heredoc as input",
    "a signal that the shell sees",
    "in the background",
)
LAW = "tests/train/scripts/test_launch_lines.py::test_a_line_gives_the_same_plainly_and_warm[a condition]"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return prepare(tmp_path)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in GATE else [pytest.mark.long(law=LAW)]) for name in LINES]
)
def test_a_line_gives_the_same_plainly_and_warm(name, place):
    if name in ("make", "numactl") and shutil.which(name) is None:
        pytest.skip(f"{name} is not installed")
    written(place, FACTS)
    alike(started(place, "bash", "-c", LINES[name], warmth=NOTES.get(name, WARMTH)))


MEMBIND = (
    'import ctypes, os, sys; number = {"x86_64": 238, "aarch64": 237}[os.uname().machine]; '
    "failed = ctypes.CDLL(None).syscall(number, 2, ctypes.byref(ctypes.c_ulong(1)), 64); "
    "sys.exit(1) if failed else os.execvp(sys.argv[1], sys.argv[1:])"
)
"""Python program that binds its memory to NUMA node 0 (set_mempolicy(2)), and executes its arguments.

`numactl --membind=0` does the same, but is not installed everywhere.
"""
UNLIKE = {
    "isolated": (
        "true; exec python -I script.py",
        "the command starts no Python that can be used: CPython 3.9 or newer that reads PYTHONPATH",
    ),
    "its own session": ("setsid -w python script.py", "it is in its own session"),
    "without its path": (
        'P=$PYTHONPATH; PYTHONPATH= python -c \'import sys; sys.path.append(sys.argv.pop().split(":")[-1]); '
        "import script' $P",
        "the command starts no Python that can be used: CPython 3.9 or newer that reads PYTHONPATH",
    ),
    "a memory policy": (f"exec python -I -c '{MEMBIND}' python script.py", "its NUMA memory policy differs"),
    "privileges": ("setpriv --no-new-privs python script.py", "its NoNewPrivs in /proc/PID/status differs"),
    "another path each time": (
        "D=$(mktemp -d); PYTHONPATH=$PYTHONPATH:$D python script.py",
        "its sys.path differs from that of the warm process",
    ),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name == "its own session" else [pytest.mark.long(law=UNLIKE_LAW)])
        for UNLIKE_LAW in [
            "tests/train/scripts/test_launch_lines.py"
            "::test_a_line_that_can_not_be_taken_over_starts_plainly_and_says_why[its own session]"
        ]
        for name in UNLIKE
    ],
)
def test_a_line_that_can_not_be_taken_over_starts_plainly_and_says_why(name, place):
    if (
        name == "a memory policy"
        and subprocess.run([sys.executable, "-I", "-c", MEMBIND, "true"], check=False).returncode
    ):
        pytest.skip("the kernel refuses a memory policy")
    line, why = UNLIKE[name]
    written(place, "print(sys.argv[:1]); sys.exit(3)")
    ways = started(place, "bash", "-c", line, warmth=None)
    assert ways.pop("why")[2].startswith(why)
    alike(ways)


def test_an_import_that_depends_on_what_the_shell_sets_is_never_taken_from_another_setting(place):
    """The parent's imports have read the variable, so another value starts plainly once, and warm from then on."""
    (place / "count").write_text("0")
    line = (
        "N=$(cat count); echo $((N + 1)) > count; [ $N -ge 2 ] && export READ_WHEN_IMPORTED=late IRRELEVANT=$N; "
        "python script.py"
    )
    written(place, "import reads_variables; print(reads_variables.VALUE)")
    ways = started(place, "bash", "-c", line, warmth="0001")
    assert [out for out, _, _ in ways.values()][:2] == ["None", "None"]
    assert [ways[way][0] for way in ("warm", "again")] == ["late", "late"]
    assert "READ_WHEN_IMPORTED" in ways["why"][2]


def console_script(place: Path, name: str, text: str) -> Path:
    """Install a program beside the interpreter of a virtual environment, as pip does."""
    path = place / "venv" / "bin" / name
    path.write_text(f"#!{place}/venv/bin/python\nimport sys, os\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.fixture
def venv(place: Path) -> Path:
    """Make a virtual environment without pip."""
    bin_folder = place / "venv" / "bin"
    bin_folder.mkdir(parents=True)
    base = Path(sys.executable).resolve()
    (bin_folder / "python").symlink_to(base)
    (place / "venv" / "pyvenv.cfg").write_text(f"home = {base.parent}\n")
    (bin_folder / "activate").write_text(f"export VIRTUAL_ENV={place}/venv PATH={bin_folder}:$PATH\n")
    return place


def test_a_virtual_environment_of_its_own_that_the_shell_activates(venv):
    written(venv, "print(sys.prefix, sys.executable, sys.argv)")
    out, _, _ = alike(started(venv, "bash", "-c", ". venv/bin/activate && python script.py 1"))
    assert out.startswith(f"{venv}/venv {venv}/venv/bin/python")


def test_a_console_script_and_what_it_launches_are_both_warm(venv):
    """Start a launcher that imports for seconds too, as `accelerate launch` does."""
    launcher = (
        "with open(os.path.expanduser('~/launched'), 'a') as file: file.write(str(int('anchor' in sys.modules)))\n"
        "import anchor, subprocess\n"
        "done = subprocess.run([sys.executable, '-u', 'script.py', *sys.argv[1:]], env={**os.environ, 'OWN': '1'})\n"
        "plain = subprocess.run([sys.executable, '-c', 'import anchor'])\n"
        "print('launched', done.returncode, plain.returncode, sorted(os.listdir('/proc/self/fd')), flush=True)\n"
        "sys.exit(done.returncode)"
    )
    console_script(venv, "launch", launcher)
    written(venv, "print(sys.argv, os.environ['OWN'], 'CONCERTINA_WARM_SOCKET' in os.environ); sys.exit(4)")
    _, _, code = alike(started(venv, "bash", "-c", "PATH=$PWD/venv/bin:$PATH; launch --x y; exit $?"))
    assert code == "4"
    assert (venv / "launched").read_text() == WARMTH


ENTRY_POINT = (
    "import os, sys, anchor\n"
    "IMPORTED_IN = os.getpid()\n"
    "def main():\n"
    "    with open(os.path.expanduser('~/warmth'), 'a') as file: file.write(str(int(os.getpid() != IMPORTED_IN)))\n"
    "    os.environ.pop('CONCERTINA_WARM_SOCKET', None)  # an installed program has it for its children\n"
    "    print(sys.modules['__main__'].__file__, sys.path, sys.orig_argv, sys.flags)\n"
    f"{FACTS}\n"
    "    return 4\n"
)
"""Module of an installed package, whose function `main` trains. In a warm start, another process has imported it."""


def test_a_console_script_that_is_the_training_script_itself(venv):
    """Start the entry point of a package, as pip installs it and hydra's applications have it."""
    package = venv / "site-packages" / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "module.py").write_text(ENTRY_POINT)
    console_script(venv, "train", "from package.module import main\nsys.exit(main())")
    out, _, code = alike(started(venv, "bash", "-c", "PATH=$PWD/venv/bin:$PATH; train --lr 1 'a b'; exit $?"))
    assert code == "4"
    assert f"args ['{venv}/venv/bin/train', '--lr', '1', 'a b'] {venv} " in out
    assert f"{venv}/venv/bin/python\n" in out


@pytest.mark.long(law=LAW)
def test_uv_runs_the_script_of_a_project(venv):
    uv = Path(sys.executable).parent / "uv"
    if not uv.exists():
        pytest.skip("uv is not installed")
    written(venv, "print(sys.argv, sys.prefix)")
    line = f"UV_OFFLINE=1 VIRTUAL_ENV=$PWD/venv {uv} run --no-project --active script.py 1; echo $?"
    alike(started(venv, "bash", "-c", line))


@pytest.mark.long(law=LAW)
def test_accelerate_launches_a_script(place):
    accelerate = Path(sys.executable).parent / "accelerate"
    if not accelerate.exists():
        pytest.skip("accelerate is not installed")
    written(place, "print(sys.argv); sys.exit(0)")
    alike(started(place, "bash", "-c", "accelerate launch --cpu --num_processes 1 script.py --lr 1 2> err; echo $?"))
