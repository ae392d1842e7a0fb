import argparse
import importlib
import re
import shlex
import shutil
import subprocess
import sys
import types

import pytest

import crossdevice
from crossdevice.cli import completion
from crossdevice.cli import main as command
from crossdevice.errors import OptionError


@pytest.fixture
def a_command(monkeypatch):
    """A command that does what a test tells it to; returns the place to say so."""
    module = types.ModuleType("crossdevice.cli.made_up.command")
    module.add_arguments = lambda parser: parser.add_argument("--number", type=int, default=0)
    module.run = lambda arguments: arguments.number
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(
        command.COMMANDS, "made_up", command.Command(module.__name__, "does what it is told", "")
    )
    return module


def test_a_command_gets_its_arguments_and_gives_the_exit_code(a_command):
    assert command.main(["made_up", "--number", "3"]) == 3


def test_what_crossdevice_refuses_is_one_line_and_exit_code_2(a_command, capsys):
    def run(arguments: argparse.Namespace) -> int:
        raise OptionError("expected something else")

    a_command.run = run
    assert command.main(["made_up"]) == 2
    assert capsys.readouterr() == ("", "crossdevice made_up: expected something else\n")


def test_other_errors_are_not_hidden(a_command):
    a_command.run = lambda arguments: 1 // 0
    with pytest.raises(ZeroDivisionError):
        command.main(["made_up"])


def test_an_interrupted_command_gives_the_exit_code_of_the_shell(a_command):
    def run(arguments: argparse.Namespace) -> int:
        raise KeyboardInterrupt

    a_command.run = run
    assert command.main(["made_up"]) == 130


@pytest.mark.parametrize("words", [[], ["--steps"]])
def test_a_reader_that_has_seen_enough_ends_a_command_quietly(words):
    command = [sys.executable, "-m", "crossdevice", "explain", "--ops", "ring", "--devices", "32", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141


@pytest.mark.parametrize("words", [[], ["--json"], ["--html", "/dev/full"]])
def test_a_full_disk_is_one_line_without_a_traceback(words):
    command = [sys.executable, "-m", "crossdevice", "explain", "--devices", "2", *words]
    with open("/dev/full", "w") as full:
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert ended.returncode == 2
    assert re.fullmatch(
        r"crossdevice explain: .* cannot be written: .*No space left on device\n", ended.stderr
    )


def test_a_command_runs_without_an_output():
    words = f"'{sys.executable}' -m crossdevice explain --json >&-"
    assert subprocess.run(words, shell=True, capture_output=True, check=False).stderr == b""


def test_without_a_command_all_commands_are_shown(capsys):
    assert command.main([]) == 0
    shown = capsys.readouterr().out
    assert [name for name in command.COMMANDS if not re.search(rf"^    {name}\s", shown, re.M)] == []


@pytest.mark.parametrize("words", [["no_such_command"], ["--no-such-option"]])
def test_what_is_no_command_shows_usage(words, capsys):
    with pytest.raises(SystemExit) as stop:
        command.main(words)
    assert stop.value.code == 2
    assert "usage: crossdevice" in capsys.readouterr().err


@pytest.mark.parametrize("name", command.COMMANDS)
def test_every_command_explains_itself(name, capsys):
    with pytest.raises(SystemExit) as stop:
        command.main([name, "--help"])
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    assert command.COMMANDS[name].summary in shown.replace("\n", " ")
    assert f"example:\n  crossdevice {name} " in shown


@pytest.mark.parametrize("name", command.COMMANDS)
def test_the_example_of_a_command_is_one_that_it_takes(name):
    words = shlex.split(command.COMMANDS[name].example)
    parser = argparse.ArgumentParser(prog=name)
    importlib.import_module(command.COMMANDS[name].module).add_arguments(parser)
    assert words[:2] == ["crossdevice", name]
    parser.parse_args(words[2:])


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["be"], ["bench"]),
        (["bench", "--prec"], ["--precision"]),
        (["bench", "--precision", ""], ["fast", "accurate", "exact"]),
        (["average", "-o", ""], []),  # files
        (["completion", "b"], ["bash"]),
        (["no_such_command", ""], []),
    ],
)
def test_bash_completes_commands_options_and_choices(words, offered, capsys):
    assert command.main(["completion", "bash"]) == 0
    typed = shlex.join(["crossdevice", *words])
    script = f"{capsys.readouterr().out}\nCOMP_WORDS=({typed}) COMP_CWORD={len(words)}\n"
    script += '_crossdevice\necho "${COMPREPLY[@]}"'
    answer = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert answer.stdout.split() == offered


@pytest.mark.parametrize("shell", completion.SHELLS)
def test_completion_knows_every_option_of_every_command(shell, capsys):
    assert command.main(["completion", shell]) == 0
    script = capsys.readouterr().out
    for name, one in command.COMMANDS.items():
        parser = argparse.ArgumentParser()
        importlib.import_module(one.module).add_arguments(parser)
        lines = [line for line in script.splitlines() if re.search(rf"\b{name}\b", line)]
        options = [word for action in parser._actions for word in action.option_strings]
        assert [word for word in options if not any(word.lstrip("-") in line for line in lines)] == []


def test_python_m_crossdevice_is_the_command():
    words = [sys.executable, "-m", "crossdevice", "--version"]
    answer = subprocess.run(words, capture_output=True, text=True, check=True)
    assert answer.stdout == f"crossdevice {crossdevice.__version__}\n"


@pytest.mark.parametrize(
    ("words", "library", "install"),
    [
        (["demo", "--backend", "torch"], "torch", "'crossdevice[torch]'"),
        (["bench", "--backend", "torch"], "torch", "'crossdevice[torch]'"),
        (["bench", "--backend", "cupy"], "cupy", "cupy-cuda13x"),
    ],
)
def test_a_missing_library_is_one_line_that_says_what_to_install(words, library, install):
    program = (
        f"import sys; sys.modules[{library!r}] = None\n"
        f"from crossdevice.cli.main import main; raise SystemExit(main({words}))"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == (
        f"crossdevice {words[0]}: {library!r}, an array library, needs {library}: pip install {install}\n"
    )


def test_an_unknown_argument_shows_how_to_use_the_command(a_command, capsys):
    with pytest.raises(SystemExit) as stop:
        command.main(["made_up", "--nummer", "3"])
    assert stop.value.code == 2
    shown = capsys.readouterr().err
    assert "usage: crossdevice made_up [-h] [--number NUMBER]" in shown
    assert "unrecognized arguments: --nummer 3" in shown


@pytest.mark.parametrize(
    "words",
    [
        ["bench", "--json"],
        ["bench", "--chart"],
        ["bench", "--calibrate"],
        ["explain", "--html"],
        ["demo", "--picture"],
    ],
)
def test_a_file_that_cannot_be_written_is_refused_before_the_work(words, tmp_path, capsys):
    for path, reason in (
        (tmp_path / "missing" / "file.svg", "there is no folder"),
        (tmp_path, "is a folder"),
    ):
        with pytest.raises(SystemExit) as stop:
            command.main([*words, str(path)])
        assert stop.value.code == 2
        shown = capsys.readouterr()
        assert reason in shown.err
        assert not shown.out
