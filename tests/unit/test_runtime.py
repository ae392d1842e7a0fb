"""Settings, forks and the end of a process have one home."""

import os
import re
import subprocess
import sys
from pathlib import Path

from crossdevice import runtime

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "crossdevice"
SETTINGS = [each for each in vars(runtime).values() if isinstance(each, runtime.Setting)]


def said_by(program):
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    return ended.stdout.split(), ended.stderr


def test_no_other_file_names_a_setting_or_has_a_hook_of_its_own():
    quoted = "|".join(re.escape(f'"{each.variable}"') for each in SETTINGS)
    for path in PACKAGE.rglob("*.py"):
        found = re.findall(rf"{quoted}|register_at_fork|atexit\.register", path.read_text())
        assert found == [] or path.name == "runtime.py", path


def test_every_setting_is_in_the_documents():
    pages = "".join(path.read_text() for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")))
    own = {runtime.RUN_FOLDER}  # set by `crossdevice run`, not by people
    assert [each.variable for each in SETTINGS if each.variable not in pages and each not in own] == []


def test_an_empty_variable_is_not_set(monkeypatch):
    setting = runtime.Setting("CROSSDEVICE_MADE_UP", "default")
    assert setting.read() == "default"
    monkeypatch.setenv(setting.variable, "")
    assert setting.read() == "default"
    monkeypatch.setenv(setting.variable, "word")
    assert setting.read() == "word"


def test_what_was_handed_in_last_ends_first_and_an_error_keeps_nothing_from_its_end():
    program = """
import atexit
from crossdevice import runtime
runtime.end_with_process(lambda: print("first"))
runtime.end_with_process(lambda: 1 // 0)
atexit.register(print, "library")
runtime.end_with_process(lambda: print("last"))
"""
    words, error = said_by(program)
    assert words == ["last", "first", "library"]
    assert error.count("ZeroDivisionError") == 1


def test_a_fork_renews_all_and_its_parent_nothing():
    program = """
import os
from crossdevice import runtime
runtime.renew_after_fork(lambda: 1 // 0)
runtime.renew_after_fork(lambda: print("renewed", flush=True))
child = os.fork()
if not child:
    os._exit(0)
os.waitpid(child, 0)
"""
    words, error = said_by(program)
    assert words == ["renewed"]
    assert error.count("ZeroDivisionError") == 1


def test_a_child_finds_this_package_and_has_its_own_variables():
    environment = runtime.environment_of_child(CROSSDEVICE_MADE_UP="1")
    assert environment["CROSSDEVICE_MADE_UP"] == "1"
    assert environment["PYTHONPATH"].split(os.pathsep)[0] == str(PACKAGE.parent)
    assert set(os.environ) <= set(environment)
