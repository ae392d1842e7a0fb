"""`crossdevice completion`: a script for tab completion, made from the parsers of all commands."""

from __future__ import annotations

import argparse
import importlib
import shlex

SHELLS = ("bash", "zsh", "fish")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the argument: a shell."""
    parser.add_argument(
        "shell",
        choices=SHELLS,
        help='in ~/.bashrc or ~/.zshrc: eval "$(crossdevice completion bash)", or zsh; '
        "in config.fish: crossdevice completion fish | source",
    )


def run(arguments: argparse.Namespace) -> int:
    """Prints the script of one shell."""
    from crossdevice.cli.main import COMMANDS

    parsers = {name: argparse.ArgumentParser() for name in COMMANDS}
    for name, parser in parsers.items():
        importlib.import_module(COMMANDS[name].module).add_arguments(parser)
    if arguments.shell == "fish":
        print(_fish({name: command.summary for name, command in COMMANDS.items()}, parsers))
    else:
        if arguments.shell == "zsh":
            print("autoload -U +X compinit && compinit; autoload -U +X bashcompinit && bashcompinit")
        print(_bash(parsers))
    return 0


def _bash(parsers: dict[str, argparse.ArgumentParser]) -> str:
    cases = []
    for name, parser in parsers.items():
        words: list[str] = []
        for action in parser._actions:
            words += action.option_strings or _choices(action).split()
            if action.option_strings and action.nargs != 0:  # no choices: any file
                patterns = "|".join(f'"{name} {option}"' for option in action.option_strings)
                cases.append(f'    {patterns}) words="{_choices(action)}" ;;')
        cases.append(f'    "{name} "*) words="{" ".join(words)}" ;;')
    return f"""_crossdevice() {{
  local words="{" ".join(parsers)} --help --version"
  if [ "$COMP_CWORD" -gt 1 ]; then case "${{COMP_WORDS[1]}} ${{COMP_WORDS[COMP_CWORD-1]}}" in
{chr(10).join(cases)}
    *) words="" ;;
  esac; fi
  COMPREPLY=($(compgen -W "$words" -- "${{COMP_WORDS[COMP_CWORD]}}"))
}}
complete -o default -F _crossdevice crossdevice"""


def _fish(summaries: dict[str, str], parsers: dict[str, argparse.ArgumentParser]) -> str:
    lines = []
    for name, parser in parsers.items():
        start = "complete -c crossdevice"
        summary = shlex.quote(summaries[name])
        lines.append(f"{start} -n __fish_use_subcommand -f -a {name} -d {summary}")
        start += f" -n '__fish_seen_subcommand_from {name}'"
        for action in parser._actions:
            flags = [
                f"-{'l' if word.startswith('--') else 's'} {word.lstrip('-')}"
                for word in action.option_strings
            ]
            if action.option_strings and action.nargs != 0:
                flags.append("-r")
            if action.choices:
                flags.append(f"-f -a '{_choices(action)}'")
            if flags:
                about = shlex.quote(" ".join((action.help or "").replace("%%", "%").split()))
                lines.append(f"{start} {' '.join(flags)} -d {about}")
    return "\n".join(lines)


def _choices(action: argparse.Action) -> str:
    return " ".join(map(str, action.choices or ()))
