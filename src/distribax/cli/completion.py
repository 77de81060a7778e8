"""`distribax completion`: prints a script that completes the command line in a shell."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from distribax.cli.help_format import add_command


@dataclass(frozen=True)
class _Option:
    """An option of a command: its spellings, its help, and the values that it may have."""

    names: tuple[str, ...]
    help: str
    takes_value: bool
    choices: tuple[str, ...]


@dataclass(frozen=True)
class _Command:
    """A command, its options, and the words that may follow it."""

    name: str
    help: str
    options: tuple[_Option, ...]
    words: tuple[str, ...]

    @property
    def flags(self) -> list[str]:
        """All spellings of all options."""
        return [name for option in self.options for name in option.names]


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command to the command line."""
    parser = add_command(
        commands,
        "completion",
        summary="print a script that completes commands in bash, zsh or fish",
        description="Prints a script for a shell, which then completes commands and options.",
        examples="""
eval "$(distribax completion bash)"      # in ~/.bashrc
eval "$(distribax completion zsh)"       # in ~/.zshrc, after compinit
distribax completion fish | source       # in ~/.config/fish/config.fish""",
    )
    parser.add_argument("shell", choices=list(_WRITERS), help="the shell to complete in")
    parser.set_defaults(run=lambda options: _print_script(options.shell, commands))


def _print_script(shell: str, commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> int:
    print(_WRITERS[shell](_read_commands(commands)))
    return 0


def _read_commands(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
) -> list[_Command]:
    """Returns what the parsers of the commands accept."""
    helps = {action.dest: action.help or "" for action in commands._get_subactions()}
    return [
        _Command(
            name,
            helps[name],
            tuple(
                _Option(
                    tuple(action.option_strings),
                    _find_first_sentence(action.help or ""),
                    action.nargs != 0,
                    tuple(map(str, action.choices or ())),
                )
                for action in parser._actions
                if action.option_strings
            ),
            tuple(
                str(choice)
                for action in parser._actions
                if not action.option_strings
                for choice in action.choices or ()
            ),
        )
        for name, parser in commands.choices.items()
    ]


def _find_first_sentence(text: str) -> str:
    return text.replace("%%", "%").partition(";")[0].partition(": ")[0]


def _write_bash(commands: list[_Command]) -> str:
    cases: list[str] = []
    for command in commands:
        values = "".join(
            f"\n        {'|'.join(option.names)}) words={shlex.quote(' '.join(option.choices))} ;;"
            for option in command.options
            if option.choices
        )
        words = " ".join([*command.flags, *command.words])
        cases.append(
            f"    {command.name})\n"
            f'      case "$before" in{values}\n'
            f"        *) words={shlex.quote(words)} ;;\n"
            "      esac ;;"
        )
    names = " ".join(command.name for command in commands)
    first = shlex.quote(f"{names} --help --version")
    return "\n".join(
        [
            "_distribax() {",
            '  local current="${COMP_WORDS[COMP_CWORD]}" words=""',
            '  local before="${COMP_WORDS[COMP_CWORD-1]}"',
            '  case "${COMP_WORDS[1]}" in',
            *cases,
            "  esac",
            f'  [ "$COMP_CWORD" -eq 1 ] && words={first}',
            '  COMPREPLY=($(compgen -W "$words" -- "$current"))',
            "}",
            "complete -o default -F _distribax distribax",
        ]
    )


def _write_zsh(commands: list[_Command]) -> str:
    described = " ".join(shlex.quote(f"{each.name}:{each.help}") for each in commands)
    cases: list[str] = []
    for command in commands:
        specs = [_write_zsh_option(option) for option in command.options]
        choices = f":word:({' '.join(command.words)})" if command.words else ":file:_files"
        specs.append(shlex.quote(f"*{choices}"))
        cases.append(f"    {command.name}) _arguments {' '.join(specs)} ;;")
    return "\n".join(
        [
            "_distribax() {",
            f"  local -a commands=({described})",
            "  if (( CURRENT == 2 )); then",
            "    _describe command commands",
            "    return",
            "  fi",
            "  local command=$words[2]",
            "  shift words",
            "  (( CURRENT-- ))",
            '  case "$command" in',
            *cases,
            "  esac",
            "}",
            "compdef _distribax distribax",
        ]
    )


def _write_zsh_option(option: _Option) -> str:
    value = ""
    if option.takes_value:
        value = f":value:({' '.join(option.choices)})" if option.choices else ":value:_files"
    text = option.help.replace("[", "(").replace("]", ")").replace(":", ",")
    return " ".join(shlex.quote(f"{name}[{text}]{value}") for name in option.names)


def _write_fish(commands: list[_Command]) -> str:
    lines = ["complete -c distribax -n __fish_use_subcommand -l version -d 'show the version'"]
    for command in commands:
        lines.append(
            f"complete -c distribax -f -n __fish_use_subcommand -a {command.name} "
            f"-d {_quote_fish(command.help)}"
        )
        seen = f"-n '__fish_seen_subcommand_from {command.name}'"
        for option in command.options:
            spelled = " ".join(
                f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}"
                for name in option.names
            )
            value = " -r" if option.takes_value else ""
            if option.choices:
                value = f" -x -a {_quote_fish(' '.join(option.choices))}"
            lines.append(
                f"complete -c distribax {seen} {spelled}{value} -d {_quote_fish(option.help)}"
            )
        if command.words:
            words = _quote_fish(" ".join(command.words))
            lines.append(f"complete -c distribax -f {seen} -a {words}")
    return "\n".join(lines)


def _quote_fish(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


_WRITERS: Final[dict[str, Callable[[list[_Command]], str]]] = {
    "bash": _write_bash,
    "zsh": _write_zsh,
    "fish": _write_fish,
}
