#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes docs/api.md, the API reference, from the docstrings of the package.

    python scripts/write_api.py            # after a change of a docstring or a signature
    python scripts/write_api.py --check    # exit status 1 where the page is not up to date

It reads sources and imports nothing: the page is the same whatever is installed. TOPICS says what
the page has; docs/conf.py takes the same list for the HTML, which Sphinx makes from the docstrings.
"""

import argparse
import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/api.md"

#: Of each topic the names; behind a name its members that are shown, "*" for all public ones.
TOPICS: dict[str, list[str]] = {
    "Who owns which tokens": ["ringattn.Partition *"],
    "Attention": [
        "ringattn.ring_attention",
        "ringattn.RingAttention forward",
        "ringattn.block_attention",
        "ringattn.merge_states",
        "ringattn.decode_attention",
        "ringattn.rotate_kv",
        "ringattn.RotatedKV *",
        "ringattn.synchronize",
        "ringattn.last_transport",
    ],
    "Measuring": ["ringattn.record_timings", "ringattn.Timings *", "ringattn.StepTiming *"],
    "Planning for unequal ranks": [
        "ringattn.measure_profiles",
        "ringattn.profiling.equalize",
        "ringattn.RankProfile",
        "ringattn.AttentionTile",
        "ringattn.save_profiles",
        "ringattn.load_profiles",
        "ringattn.ModelCost *",
        "ringattn.plan",
        "ringattn.Plan *",
        "ringattn.plan_cache",
        "ringattn.Rebalancer *",
        "ringattn.strategies *",
    ],
    "Models": [
        "ringattn.models.load_model",
        "ringattn.models.save_model",
        "ringattn.models.demo_model_path",
        "ringattn.models.LLaMA *",
        "ringattn.models.LLaMAHeadless forward",
        "ringattn.models.LLaMABlock forward",
        "ringattn.models.LLaMAConfig *",
        "ringattn.model_call.ModelCall *",
        "ringattn.model_inputs.Padding",
        "ringattn.cache.ShardedKVCache *",
        "ringattn.generate",
        "ringattn.sampling.Sampling *",
    ],
    "Training": [
        "ringattn.all_reduce_gradients",
        "ringattn.checkpoint_policy",
        "ringattn.integrations.torch.context_parallel",
    ],
    "Models of other libraries": [
        "ringattn.parallelize",
        "ringattn.unparallelize",
        "ringattn.integrations.diffusers.register",
        "ringattn.integrations.fms.get_model",
        "ringattn.integrations.fms.generate",
        "ringattn.integrations.fms.RingAttentionStrategy attach",
    ],
    "Testing": ["ringattn.testing *", "ringattn.reference *"],
}

HEAD = """# API reference

The public API by topic, written from the docstrings by `python scripts/write_api.py`; with
`scripts/build_docs.sh` it is HTML. Shapes: B batch, `S_r` tokens of this rank, H query heads,
`H_kv` key/value heads, D head dimension, W ranks.
"""

_SECTIONS = ("Args", "Returns", "Yields", "Raises")
Definition = ast.FunctionDef | ast.ClassDef | ast.Module


@dataclass(frozen=True)
class Found:
    """A definition, the lines of its file, and the module it is in."""

    node: Definition
    lines: list[str]
    module: str


# ---- sources ------------------------------------------------------------------------------------


def module_file(module: str) -> Path | None:
    path = ROOT / "python" / module.replace(".", "/")
    for file in (path.with_suffix(".py"), path / "__init__.py"):
        if file.is_file():
            return file
    return None


def find(name: str) -> Found:
    """The definition of a dotted name, through the imports of modules.

    Raises:
        ValueError: there is none.
    """
    file = module_file(name)
    if file is not None:
        text = file.read_text()
        return Found(ast.parse(text), text.splitlines(), name)
    module, _, last = name.rpartition(".")
    file = module_file(module)
    if file is None:
        raise ValueError(f"{name} must be in the sources of the package, got no module {module}")
    text = file.read_text()
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == last:
            return Found(node, text.splitlines(), module)
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                if (alias.asname or alias.name) == last:
                    return find(f"{node.module}.{alias.name}")
    raise ValueError(f"{name} must be defined or imported in {module}, got neither")


def members(found: Found, asked: str) -> Iterator[ast.FunctionDef | ast.ClassDef]:
    """The public definitions in a class or a module that have a docstring, or those asked for."""
    public = None
    for node in found.node.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            public = ast.literal_eval(node.value)
    for node in found.node.body:
        if not isinstance(node, ast.FunctionDef | ast.ClassDef) or ast.get_docstring(node) is None:
            continue
        shown = not node.name.startswith("_") and (public is None or node.name in public)
        if node.name == asked or (asked == "*" and shown):
            yield node


# ---- Markdown -----------------------------------------------------------------------------------


def anchor(name: str) -> str:
    """Of the heading `name`, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", name.lower())


def prose(text: str, known: set[str], module: str) -> str:
    """A paragraph of reStructuredText as Markdown: links to names on the page, code."""

    def link(role: re.Match[str]) -> str:
        target = role[1].lstrip("~")
        named = [name for name in known if name == target or name.endswith(f".{target}")]
        near = [name for name in named if name.startswith(module)] or named
        return f"[`{target}`](#{anchor(near[0])})" if len(near) == 1 else f"`{target}`"

    text = " ".join(text.split())
    text = re.sub(r":\w+:`([^`]+)`", link, text)
    return re.sub(r"``(.+?)``", r"`\1`", text)


def items(lines: list[str]) -> Iterator[str]:
    """Entries of a section, each in one line: a line that is not indented begins one."""
    entry: list[str] = []
    for line in lines:
        if line and not line.startswith(" ") and entry:
            yield " ".join(entry)
            entry = []
        entry.append(line.strip())
    yield " ".join(entry)


def markdown(docstring: str, known: set[str], module: str) -> Iterator[str]:
    """Lines of a docstring in Google's style."""
    paragraph: list[str] = []
    lines = [*docstring.splitlines(), ""]
    index = 0
    while index < len(lines):
        line = lines[index]
        index += 1
        section = line.rstrip(":")
        if section in _SECTIONS and line.endswith(":"):
            body = []
            while index < len(lines) and (not lines[index] or lines[index].startswith(" ")):
                body.append(lines[index][4:])
                index += 1
            while body and not body[-1]:
                body.pop()
            yield from (f"**{section}**", "")
            yield from section_lines(section, body, known, module)
            yield ""
        elif line.startswith("* "):
            if paragraph:
                yield from (prose(" ".join(paragraph), known, module), "")
                paragraph = []
            entry = [line[2:]]
            while lines[index].startswith("  "):
                entry.append(lines[index])
                index += 1
            yield "* " + prose(" ".join(entry), known, module)
            if not lines[index].startswith("* "):
                yield ""
        elif line.strip():
            paragraph.append(line)
            if line.endswith("::"):
                paragraph[-1] = line[:-1]
                yield from (prose(" ".join(paragraph), known, module), "", "```py")
                paragraph = []
                code = []
                while index < len(lines) and (not lines[index] or lines[index].startswith("    ")):
                    code.append(lines[index][4:])
                    index += 1
                yield from "\n".join(code).strip("\n").splitlines()
                yield from ("```", "")
        elif paragraph:
            yield from (prose(" ".join(paragraph), known, module), "")
            paragraph = []


def section_lines(section: str, body: list[str], known: set[str], module: str) -> Iterator[str]:
    if section in ("Returns", "Yields"):
        yield prose(" ".join(body), known, module)
        return
    for entry in items(body):
        name, _, text = entry.partition(": ")
        yield f"* `{name}`: {prose(text, known, module)}"


def signature(node: ast.FunctionDef | ast.ClassDef, name: str) -> str:
    """As in the source, without self."""
    if isinstance(node, ast.ClassDef):
        for inner in node.body:
            if isinstance(inner, ast.FunctionDef) and inner.name == "__init__":
                return signature(inner, name).rpartition(" -> ")[0]
        fields = [
            ast.unparse(inner)
            for inner in node.body
            if isinstance(inner, ast.AnnAssign) and not ast.unparse(inner.target).startswith("_")
        ]
        is_data = any("dataclass" in ast.unparse(made) for made in node.decorator_list)
        return f"{name}({', '.join(fields)})" if is_data else name
    decorators = {ast.unparse(made) for made in node.decorator_list}
    arguments = node.args
    if arguments.args and arguments.args[0].arg in ("self", "cls"):
        arguments.args = arguments.args[1:]
    returned = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    if "property" in decorators:
        return f"{name}{returned.replace(' -> ', ': ', 1)}"
    return f"{name}({ast.unparse(arguments)}){returned}"


def fields(found: Found, node: ast.ClassDef, known: set[str]) -> Iterator[str]:
    """Fields that a comment beside them, `#: ...`, describes."""
    for inner in node.body:
        if isinstance(inner, ast.AnnAssign):
            comment = re.search(r"#: (.*)", found.lines[inner.lineno - 1])
            if comment:
                text = prose(comment[1], known, found.module)
                yield f"* `{ast.unparse(inner.target)}`: {text}"


def entry(
    found: Found, node: ast.FunctionDef | ast.ClassDef, name: str, level: int, known: set[str]
) -> Iterator[str]:
    short = name.rpartition(".")[2]
    yield from (f"{'#' * level} `{name}`", "", "```py", signature(node, short), "```", "")
    yield from markdown(ast.get_docstring(node) or "", known, found.module)
    if isinstance(node, ast.ClassDef):
        described = list(fields(found, node, known))
        if described:
            yield from ("**Fields**", "", *described, "")


def names() -> Iterator[tuple[str, str, list[str]]]:
    """Topic, name, and what is shown of its members."""
    for topic, entries in TOPICS.items():
        for line in entries:
            name, *asked = line.split()
            yield topic, name, asked


def shown() -> Iterator[tuple[str, str, Found, list[tuple[str, ast.FunctionDef | ast.ClassDef]]]]:
    for topic, name, asked in names():
        found = find(name)
        inner = [(f"{name}.{x.name}", x) for each in asked for x in members(found, each)]
        yield topic, name, found, inner


def page(operators: str) -> str:
    """The whole page; ``operators``: its last part, which is written by hand."""
    everything = list(shown())
    known = {name for _, name, _, _ in everything}
    known |= {name for _, _, _, inner in everything for name, _ in inner}
    lines = [HEAD]
    last = ""
    for topic, name, found, inner in everything:
        if topic != last:
            lines += [f"## {topic}", ""]
            last = topic
        if isinstance(found.node, ast.Module):
            lines += [f"### `{name}`", ""]
            lines += markdown(ast.get_docstring(found.node) or "", known, found.module)
        else:
            lines += entry(found, found.node, name, 3, known)
        for member, node in inner:
            lines += entry(found, node, member, 4, known)
    return "\n".join(lines) + operators


def operators_of(text: str) -> str:
    return text[text.index("## Operators\n") :]


def directives(text: str) -> str:
    """The page as Sphinx takes it: it makes the entries itself, and checks their references."""
    lines = [HEAD]
    last = ""
    for topic, name, asked in names():
        if topic != last:
            lines += [f"## {topic}", ""]
            last = topic
        node = find(name).node
        kind = {ast.Module: "module", ast.ClassDef: "class"}.get(type(node), "function")
        lines += ["```{eval-rst}", f".. auto{kind}:: {name}"]
        if asked:
            lines.append(f"   :members: {', '.join(asked) if asked != ['*'] else ''}".rstrip())
        lines += ["```", ""]
    return "\n".join(lines) + operators_of(text)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing, compare")
    options = parser.parse_args()
    there = PAGE.read_text()
    made = page(operators_of(there))
    if not options.check:
        PAGE.write_text(made)
    elif made != there:
        print(
            "write_api: docs/api.md must be what the docstrings say, got another page: "
            "type python scripts/write_api.py",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
