"""Write the generated parts of the documentation: `make docs`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from qcfuse_rag.cli.app import app
from qcfuse_rag.cli.describe import describe_methods

ROOT = Path(__file__).parent.parent
METHODS = ROOT / "docs" / "reference" / "methods.md"
COMMANDS = ROOT / "docs" / "reference" / "cli.md"
README = ROOT / "README.md"
BEGIN, END = "<!-- methods:begin -->\n", "<!-- methods:end -->\n"
CLI_HEADER = """# Command line reference

`make docs` writes this page: each command with its options and their defaults. `--help` explains them, and [Command
line](../guide/command-line.md) shows how to use them.
"""


def methods_page(text: str) -> str:
    """Return the page with a new table of methods."""
    rows = ["| method | what it does | parameters | source |", "|---|---|---|---|"]
    for method in describe_methods():
        parameters = ", ".join(f"`{name}={value}`" for name, value in method["parameters"].items()) or "none"
        rows.append(f"| `{method['name']}` | {method['does']} | {parameters} | {method['source']} |")
    before, rest = text.split(BEGIN)
    return before + BEGIN + "\n".join(rows) + "\n" + END + rest.split(END)[1]


def readme(text: str) -> str:
    """Return the README with its Python block taken from the example."""
    name = "llama_index_query_engine.py"
    example = (ROOT / "examples" / name).read_text("utf-8")
    marker = f"<!-- examples/{name} -->\n"
    before, rest = text.split(marker)
    return before + marker + "```python\n" + example + "```\n" + rest.split("```\n", 1)[1]


def cli_page() -> str:
    """Return the page of all commands with their arguments and options."""
    return "\n".join([CLI_HEADER, *_sections("qcfuse", typer.main.get_command(app))])


def _sections(path: str, command: Any) -> list[str]:
    children = getattr(command, "commands", {})
    if children:
        return [line for name, child in children.items() for line in _sections(f"{path} {name}", child)]
    arguments = [parameter for parameter in command.params if parameter.param_type_name == "argument"]
    usage = " ".join([path, *(parameter.name.upper() for parameter in arguments)])
    options = [_option(parameter) for parameter in command.params if parameter not in arguments]
    return [f"## {path}", "", " ".join(command.help.split()), "", f"`{usage}` with {', '.join(options)}", ""]


def _option(parameter: Any) -> str:
    default = parameter.default
    if parameter.required or default in (None, False, True, (), "") or callable(default):
        return f"`{parameter.opts[0]}`"
    return f"`{parameter.opts[0]}={','.join(map(str, default)) if isinstance(default, list | tuple) else default}`"


if __name__ == "__main__":
    METHODS.write_text(methods_page(METHODS.read_text("utf-8")), "utf-8")
    COMMANDS.write_text(cli_page(), "utf-8")
    README.write_text(readme(README.read_text("utf-8")), "utf-8")
