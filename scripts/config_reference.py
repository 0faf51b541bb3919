#!/usr/bin/env python3
"""docs/configuration.md from what it describes: configs/psrl/job.yaml, and docstrings of the classes that are read.

    python scripts/config_reference.py            # write the page anew
    python scripts/config_reference.py --check    # exit 1 where it differs

Keys, defaults and sentences of the ``psrl`` group are those of job.yaml; its types, and everything about the embedded
rollout, agent loops and environments, are read from the source text of their classes. Nothing is imported.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).resolve().parent.parent
PAGE = REPOSITORY / "docs" / "configuration.md"
JOB = REPOSITORY / "configs" / "psrl" / "job.yaml"
ENVIRONMENTS = REPOSITORY / "psrl" / "agents" / "env"
HF = "actor_rollout_ref.rollout.engine_kwargs.hf"

HEAD = """\
# Configuration

<!-- Made by scripts/config_reference.py: change configs/psrl/job.yaml or the docstrings that it reads. -->

A job is a configuration of veRL's `ppo_trainer` with `configs/psrl/job.yaml` composed after it, as
`configs/psrl_trainer.yaml` does. Keys of veRL keep their meaning. Overrides are Hydra's, on the command line of
`psrl train` or of veRL's `main_ppo`: `psrl.max_tokens=8192`. Settings are checked before workers start; an unknown key,
a value out of range and an option that rules sharing out are errors that name the key.
`psrl train --config-name NAME --dry-run` composes and checks a job and starts nothing.
"""
REST = """\
## What else `psrl/job` sets

Keys of veRL that sharing needs, or that join the two. A job may change those that a check does not refuse.
"""
ROLLOUT = f"""\
## The embedded rollout

`actor_rollout_ref.rollout.name=hf` samples with transformers, on the CPU too. Its settings are keys of `{HF}`
(`+{HF}.num_threads=2`); the others are those of veRL's rollouts, and what it cannot do is refused by name.
"""
AGENTS = """\
## Agent loops

`actor_rollout_ref.rollout.agent.agent_loop_config_path` names a file of agent loops such as `configs/agents.yaml`; a
dataset row names its loop as `agent_name`. `+agents.KEY=VALUE` overrides a key for all loops.
"""
OPTIONS = """\
### Options of environments

Keys of `environment_options`.
"""


class Setting(NamedTuple):
    key: str
    kind: str
    default: str | None
    """As a configuration file has it; None: it has to be given."""
    text: str


class Attribute(NamedTuple):
    annotation: str
    default: ast.expr | None
    text: str


# ---------------------------------------------------------------------------------------------- reading sources
def find_class(path: Path, name: str) -> ast.ClassDef:
    (found,) = [
        node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef) and node.name == name
    ]
    return found


def attributes(path: Path, class_name: str) -> dict[str, Attribute]:
    """Annotated attributes of a class, with the docstring after each; empty text where there is none."""
    body = find_class(path, class_name).body
    found: dict[str, Attribute] = {}
    for node, following in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found[node.target.id] = Attribute(ast.unparse(node.annotation), node.value, _docstring(following))
    return found


def _docstring(node: ast.stmt | None) -> str:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
        return " ".join(node.value.value.split())
    return ""


def kind_of(annotation: str) -> str:
    """A type as users of a configuration file know it."""
    names = {
        "bool": "true or false", "int": "integer", "float": "number", "str": "text", "None": "null",
        "tuple[int, ...]": "list of integers", "Mapping[str, Any]": "mapping",
    }  # fmt: skip
    return " or ".join(names[part] for part in annotation.split(" | "))


def default_of(value: ast.expr | None) -> str | None:
    """A default as YAML."""
    if value is None:
        return None
    if isinstance(value, ast.Call) and ast.unparse(value) == "field(default_factory=dict)":
        return "{}"
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.LShift):
        return str(ast.literal_eval(value.left) << ast.literal_eval(value.right))
    plain = ast.literal_eval(value)
    return plain if isinstance(plain, str) else json.dumps(plain)


def class_settings(path: Path, class_name: str, others: dict[str, Attribute] | None = None) -> list[Setting]:
    """Settings of a class; ``others`` has the docstrings of attributes that have none here."""
    settings: list[Setting] = []
    for name, found in attributes(path, class_name).items():
        text = found.text or (others or {})[name].text
        settings.append(Setting(name, kind_of(found.annotation), default_of(found.default), text))
    return settings


def job_settings() -> Iterator[tuple[str, list[Setting]]]:
    """Sections of the ``psrl`` group: title and settings."""
    kinds = {
        **attributes(REPOSITORY / "psrl" / "config.py", "PSRLConfig"),
        **attributes(REPOSITORY / "psrl" / "integrations" / "verl" / "job" / "config.py", "OrchestratorConfig"),
    }
    title, settings, comment = "", list[Setting](), list[str]()
    for line in _job_parts()[0]:
        if header := re.fullmatch(r"  # --- (.+) ---", line):
            if settings:
                yield title, settings
            title, settings = header[1], []
        elif line.startswith("  # "):
            comment.append(line.removeprefix("  # "))
        elif setting := re.fullmatch(r"  (\w+): (.+)", line):
            kind = kind_of(kinds[setting[1]].annotation)
            settings.append(Setting(f"psrl.{setting[1]}", kind, setting[2], " ".join(comment)))
            comment = []
        elif line:
            raise SystemExit(f"{JOB}: cannot read the line {line!r}")
    yield title, settings


def _job_parts() -> tuple[list[str], list[str]]:
    """Lines of the ``psrl`` group without its name, and all others after the head of the file."""
    lines = JOB.read_text().splitlines()
    start = lines.index("psrl:") + 1
    stop = next(i for i in range(start, len(lines)) if re.match(r"\w", lines[i]))
    return lines[start:stop], lines[lines.index("") + 1 : start - 1] + lines[stop:]


def environment_options() -> Iterator[tuple[str, Setting]]:
    """Name of the environment, and an option of it."""
    for path in sorted(ENVIRONMENTS.glob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and [ast.unparse(base) for base in node.bases] == ["Environment"]:
                for setting in _arguments(node):
                    yield path.stem, setting


def _arguments(node: ast.ClassDef) -> Iterator[Setting]:
    for method in node.body:
        if isinstance(method, ast.FunctionDef) and method.name == "__init__":
            text = dict(re.findall(r"^ {4}(\w+): (.+)$", ast.get_docstring(method) or "", re.MULTILINE))
            arguments = method.args.args[1:]
            for argument, default in zip(arguments, method.args.defaults, strict=True):
                assert argument.annotation is not None
                kind = kind_of(ast.unparse(argument.annotation))
                words = text.get(argument.arg, "")
                yield Setting(argument.arg, kind, default_of(default), words[:1].upper() + words[1:])


# -------------------------------------------------------------------------------------------------- writing the page
def sentence(text: str, key: str) -> str:
    """A description, checked to be one, in Markdown and with the names that configuration files have."""
    if not re.fullmatch(r"\W*[A-Z].*\.|`.+\.", text):
        raise SystemExit(f"{key} is not described in sentences: {text!r}")
    text = text.replace("``", "`").replace("None:", "`null`:")
    return text


def write_settings(settings: list[Setting]) -> Iterator[str]:
    for setting in settings:
        default = "has to be given" if setting.default is None else f"default `{setting.default}`"
        head = f"### `{setting.key}`\n\n{setting.kind.capitalize()}, {default}."
        yield f"{head}\n\n{sentence(setting.text, setting.key)}\n"


def write_page() -> str:
    agents = REPOSITORY / "psrl" / "agents"
    parts = [HEAD]
    for title, settings in job_settings():
        parts += [f"## {title[0].upper()}{title[1:]}\n", *write_settings(settings)]
    rest = "\n".join(_job_parts()[1])
    parts += [REST, f"```yaml\n{rest}\n```\n"]
    parts += [
        ROLLOUT,
        *write_settings(class_settings(REPOSITORY / "psrl" / "rollout" / "settings.py", "HFEngineSettings")),
    ]
    episode = attributes(agents / "episode.py", "EpisodeOptions")
    parts += [AGENTS, *write_settings(class_settings(agents / "parameters.py", "AgentParameters", episode))]
    rows = [
        f"| {name} | `{option.key}` | {option.kind} | `{option.default}` | {sentence(option.text, option.key)} |"
        for name, option in environment_options()
    ]
    table = ["| environment | option | type | default | what it is |", f"|{' --- |' * 5}", *rows]
    parts += [OPTIONS, "\n".join(table) + "\n"]
    return "\n".join(parts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with the page instead of writing it")
    options = parser.parse_args()
    page = write_page()
    if not options.check:
        PAGE.write_text(page)
        return 0
    if PAGE.read_text() == page:
        return 0
    print(f"{PAGE} is out of date: run scripts/config_reference.py", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
