"""Help of commands with settings, and their answers to flags of other servers."""

from __future__ import annotations

import textwrap
from typing import Any

import typer
from typer.core import TyperCommand

from fd_core.cli.report import print_error
from fd_core.cli.settings.flags import COMMON, GROUPS, HELP_ALL, OTHER
from fd_core.cli.settings.other_servers import REASONS
from fd_core.errors import ConfigError


class SettingsCommand(TyperCommand):
    """A command with settings, whose help explains the most used ones first. It explains flags of other servers."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the command line; report a flag of another server with its equivalent."""
        own = {name for each in self.params for name in (*each.opts, *each.secondary_opts)}
        for flag in (hyphenated(arg.partition("=")[0]) for arg in args):
            if flag in REASONS and flag not in own:
                print_error(ConfigError(f"not a flag of fdcore: {REASONS[flag]}", field=flag))
                raise typer.Exit(ConfigError.exit_code)
        return super().parse_args(ctx, args)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the options in groups; without --help-all, only the names of the less used ones."""
        sections: dict[str, list[Any]] = {title: [] for title in ("Arguments", COMMON, OTHER, *GROUPS)}
        for param in self.get_params(ctx):
            is_argument = param.param_type_name == "argument"
            sections["Arguments" if is_argument else getattr(param, "rich_help_panel", None) or OTHER].append(param)
        brief = HELP_ALL not in ctx.meta and any(each.name == "help_all" for each in self.params)
        less_used = {title: sections.pop(title) for title in GROUPS} if brief else {}
        for title, params in sections.items():
            if rows := [row for each in params if (row := each.get_help_record(ctx)) is not None]:
                with formatter.section(title):
                    formatter.write_dl(rows)
        wrapped = textwrap.TextWrapper(
            formatter.width, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False
        )
        texts = [
            f"{title}: {' '.join(each.opts[0] for each in params)}" for title, params in less_used.items() if params
        ]
        if texts:
            with formatter.section(f"More settings, explained by {ctx.command_path} {HELP_ALL}"):
                formatter.write("".join(f"{wrapped.fill(each)}\n" for each in texts))


def hyphenated(flag: str) -> str:
    """Return a flag with hyphens, which may be typed with underscores."""
    return flag.replace("_", "-") if flag.startswith("--") else flag
