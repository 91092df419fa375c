"""Writes the pages of docs/reference that come from the code: keys from the models and docstrings, commands from their parsers.

python docs/make_reference.py
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from ds_terapipe import cli, config
from ds_terapipe.blocks import Block, must_of
from ds_terapipe.commands.schema import lamb_keys
from ds_terapipe.docstrings import entries
from ds_terapipe.elastic import settings as elastic
from ds_terapipe.optim.schedules.keys import Phase, WarmupKeys
from ds_terapipe.refusals.configuration import CUT_RULES, LAMB_RULES, RULES
from ds_terapipe.rules import Rule

FOLDER = Path(__file__).parent / "reference"
NOTE = "<!-- Written by docs/make_reference.py from the code: change the code, then run it. -->\n"
INTRODUCTION = """\
[Notes on keys](keys_notes.md) say how they act together. `ds_terapipe schema` prints the same as a JSON schema, and an editor
completes and checks keys with it. For VS Code, write it beside the configurations and name it in .vscode/settings.json:

```bash
ds_terapipe schema --output ds_config.schema.json
```

```text
{
  "json.schemas": [
    {"fileMatch": ["ds_config*.json"], "url": "./ds_config.schema.json"}
  ]
}
```
"""
RULE = """
Rules between keys. A configuration that breaks one ends with one line, on every rank, before the first step.

| key | must be | use |
|---|---|---|
"""


def code(text: str) -> str:
    """A docstring's words as Markdown."""
    text = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", text.replace("``", "`"))
    return re.sub(r"(?<!\\)\|", r"\\|", text)


def fields(block: type[Block], prefix: str = "") -> Iterator[str]:
    """The rows of a block's keys, those of blocks in it under their path."""
    texts = entries(block, "Attributes")
    for name, field in block.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, Block):
            yield from fields(kind, f"{name}.")
            continue
        must = must_of(field)
        default = json.dumps(field.default) if field.default is not None else ""
        example = must.use.removeprefix("e.g. ")
        shown = f"{code(must.rule)}, e.g. `{example}`" if is_json(example) and example != default else code(must.rule)
        yield f"| `{prefix}{name}` | {f'`{default}`' if default else 'none'} | {shown} | {code(texts[name])} |\n"


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def keys_part(block: type[Block], text: str, rules: Iterable[Rule]) -> str:
    table = "| key | default | value | meaning |\n|---|---|---|---|\n" + "".join(fields(block))
    return f"## {block.PATH}\n\n{text} Empty, it takes all defaults.\n\n{table}{rules_of(rules)}\n"


def rules_of(rules: Iterable[Rule]) -> str:
    rows = (f"| `{rule.path}` | {code(rule.must)} | {code(rule.use)} |\n" for rule in rules)
    return RULE + "".join(rows).replace("{beside}", "token_pipeline")


def lamb_part() -> str:
    rows = "".join(
        f"| `{name}` | `{json.dumps(default)}` | {code(text)} |\n" for name, (default, text) in lamb_keys().items()
    )
    return f"""## FusedLamb

The keys of `optimizer.params`, where `optimizer.type` is `"FusedLamb"`. The formulas of the modes are
in the [class](api.md#ds_terapipe.optim.lamb.FusedLamb).

| key | default | meaning |
|---|---|---|
{rows}
## LambWarmup

The keys of `scheduler.params`, where `scheduler.type` is `"LambWarmup"`.
The peak LR is `reference_lr` times the square root of the batch over `reference_batch_size`.

{plain_table(WarmupKeys)}
## MixedBatch

Where `scheduler.type` is `"MixedBatch"`, `scheduler.params.phases` is a list of phases.
Each has its own batch, sequence length and LR.

{plain_table(Phase)}
## DeepSpeed's keys beside FusedLamb
{rules_of(LAMB_RULES)}"""


def plain_table(block: type[Block]) -> str:
    rows = (
        f"| `{name}` | {'yes' if block.model_fields[name].is_required() else 'no'} | {code(text)} |\n"
        for name, text in entries(block, "Attributes").items()
    )
    return "| key | required | meaning |\n|---|---|---|\n" + "".join(rows)


def cli_page() -> str:
    (action,) = (each for each in cli.build_parser()._actions if isinstance(each.choices, dict))
    parts = "\n".join(command_part(name, parser) for name, parser in action.choices.items())
    text = "One command with a subcommand for each task. Commands that print a table write it as JSON too, with `--json FILE`."
    return f"{NOTE}# The command `ds_terapipe`\n\n{text}\n\n{parts}"


def command_part(name: str, parser: argparse.ArgumentParser) -> str:
    """A subcommand: its description, a table for each group of arguments, its examples."""
    tables = []
    for group in parser._action_groups:
        rows = [argument_row(each) for each in group._group_actions if each.dest != "help"]
        if rows:
            title = {"positional arguments": "argument", "options": "option"}.get(group.title or "", group.title)
            tables.append(f"| {title} | meaning |\n|---|---|\n{''.join(rows)}")
    examples, _, rest = (parser.epilog or "").partition("\n\n")
    lines = [re.sub(r"(\S)\s{2,}(\S.*)$", r"\1  # \2", line.strip()) for line in examples.splitlines()[1:]]
    shell = "```bash\n" + "\n".join(lines) + "\n```\n"
    after = f"\n{code(rest.strip())}\n" if rest.strip() else ""
    description = (parser.description or "").rstrip(".") + "."
    return f"## `ds_terapipe {name}`\n\n{code(description)}\n\n" + "\n".join([*tables, shell]) + after


def argument_row(action: argparse.Action) -> str:
    value = action.metavar or (",".join(map(str, action.choices)) if action.choices else action.dest.upper())
    value = " ".join(value) if isinstance(value, tuple) else value
    names = ", ".join(action.option_strings)
    shown = f"`{names} {value}`" if names and action.nargs != 0 else f"`{names}`" if names else f"**{value}**"
    return f"| {code(shown)} | {code((action.help or '') % {**vars(action), 'prog': 'ds_terapipe'})} |\n"


def pages() -> dict[str, str]:
    """Names and texts of all pages."""
    token = (*config.RULES, *RULES, *CUT_RULES)
    layer = (*elastic.RULES, *elastic.CHANGES)
    parts = [
        keys_part(config.TokenPipelineConfig, "The block runs training steps in slices.", token),
        keys_part(elastic.ElasticPipelineConfig, "The block freezes layers and reshapes the pipeline.", layer),
        lamb_part(),
    ]
    return {"keys.md": f"{NOTE}# Keys of ds_config.json\n\n{INTRODUCTION}\n{''.join(parts)}", "cli.md": cli_page()}


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, text in pages().items():
        (FOLDER / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
